// Entry points of streams.
#include "capture.h"
#include "device.h"
#include "event.h"
#include "pool.h"
#include "stream.h"

using namespace sim;

namespace {

CUresult create_stream(const char *name, CUstream *out, unsigned flags, int priority) {
    return entry(name, kContext, [&](Call &call) {
        require(out);
        if (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) throw Fail{CUDA_ERROR_INVALID_VALUE};
        priority = std::max(-5, std::min(0, priority));
        StreamPtr stream = make_stream(call.context_ptr(), flags, priority, false);
        stream->handle = reinterpret_cast<CUstream>(world().streams.add(stream));
        *out = stream->handle;
        call.record.stream = reinterpret_cast<uint64_t>(*out);
        call.record.stream_id = stream->id;
        call.record.handle = call.record.stream;
        call.record.device = stream->context->device;
    });
}

} // namespace

CUresult CUDAAPI cuStreamCreate(CUstream *out, unsigned flags) {
    return create_stream("cuStreamCreate", out, flags, 0);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    return create_stream("cuStreamCreateWithPriority", out, flags, priority);
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
    return entry("cuStreamDestroy", kInit, [&](Call &call) {
        if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
            throw Fail{CUDA_ERROR_INVALID_HANDLE};
        StreamPtr stream = call.stream(handle);
        // A capture that only came over to it goes on: its work there is still to be joined.
        if (stream->capture && stream->capture->origin == stream) {
            invalidate(*stream->capture, "a capturing stream was destroyed");
            abandon_captures_of(stream->context);
        }
        world().streams.remove(handle);
        retire_stream(stream);
    });
}

CUresult CUDAAPI cuStreamGetId(CUstream handle, unsigned long long *id) {
    return entry("cuStreamGetId", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        // Refused whatever the modes are, as are some of the other questions about a stream.
        refuse_if_capturing(call, stream);
        refuse_implicit_dependency(call, stream);
        require(id) = stream->id;
    });
}

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned *flags) {
    return entry("cuStreamGetFlags", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        refuse_if_capturing(call, stream);
        require(flags) = stream->flags;
    });
}

CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int *priority) {
    return entry("cuStreamGetPriority", kInit, [&](Call &call) { require(priority) = call.stream(handle)->priority; });
}

CUresult CUDAAPI cuStreamGetDevice(CUstream handle, CUdevice *device) {
    return entry("cuStreamGetDevice", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        refuse_if_capturing(call, stream);
        require(device) = stream->context->device;
    });
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *context) {
    return entry("cuStreamGetCtx", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        refuse_implicit_dependency(call, stream);
        require(context) = stream->context->handle;
    });
}

CUresult CUDAAPI cuStreamGetCtx_v2(CUstream handle, CUcontext *context, CUgreenCtx *green) {
    // The green context is left unwritten for an ordinary stream, as the 580 driver does.
    (void)green;
    return cuStreamGetCtx(handle, context);
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    return entry("cuStreamQuery", kInit | kUnsafe | kUnrefused, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        refuse_if_capturing(call, stream);
        refuse_implicit_dependency(call, stream);
        nudge_scheduler(call.guard());
        std::vector<StreamPtr> asked{stream};
        if (stream->legacy)
            for (const StreamPtr &other : streams_of(*stream->context))
                if (other->blocking()) asked.push_back(other);
        bool done = true;
        for (const StreamPtr &one : asked) {
            refuse_if_faulted(call, one);
            done = done && one->idle();
        }
        if (!done) throw Fail{CUDA_ERROR_NOT_READY};
    });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    return entry("cuStreamSynchronize", kInit | kUnsafe | kUnrefused, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        refuse_if_capturing(call, stream);
        refuse_implicit_dependency(call, stream);
        // Waiting for the legacy stream waits for what it would wait for.
        if (stream->legacy) enqueue(stream, Operation{"synchronize"});
        wait_for_stream(call.guard(), call.name(), stream);
        call.notice_fault();
        host_waited_for(*stream, stream->completed);
    });
}

Operation sim::host_function(CUhostFn fn, void *data) {
    Operation operation{"host function"};
    operation.work = [fn, data](Exec &) {
        this_thread().in_host_function = true;
        fn(data);
        this_thread().in_host_function = false;
    };
    return operation;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
    return entry("cuStreamWaitEvent", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        EventPtr event = call.event(event_handle);
        if (flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL}) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (flags && !stream->capture) throw Fail{CUDA_ERROR_ILLEGAL_STATE};
        std::shared_ptr<Marker> marker = event->marker;
        if (marker && marker->capture) {
            const std::shared_ptr<Capture> &capture = marker->capture;
            if (!is_open(*capture)) throw Fail{CUDA_ERROR_INVALID_VALUE};
            if (capture->invalidated) throw Fail{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
            if (stream->legacy) {
                invalidate(*capture, "the legacy stream waits for captured work");
                throw Fail{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT};
            }
            if (stream->capture && stream->capture != capture) {
                invalidate(*capture, "two captures would merge");
                invalidate(*stream->capture, "two captures would merge");
                throw Fail{CUDA_ERROR_STREAM_CAPTURE_MERGE};
            }
            stream->capture = capture;
            capture->members.insert(stream);
            for (const NodePtr &node : marker->nodes) stream->capture_tail.push_back(node);
            call.record.note = "captured";
            return;
        }
        if (stream->capture && !(flags & CU_EVENT_WAIT_EXTERNAL)) {
            if (stream->capture->invalidated) throw Fail{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
            if (!marker) return; // never recorded: nothing to wait for
            invalidate(*stream->capture, "a captured wait for uncaptured work");
            throw Fail{CUDA_ERROR_STREAM_CAPTURE_ISOLATION};
        }
        Operation operation{"wait"};
        if (stream->capture) operation.event = event; // what it waits for is settled by each launch
        else if (marker && !is_complete(*event)) operation.dependencies.push_back({marker->stream, marker->seq});
        if (marker)
            call.record.note =
                "waits for stream id " + std::to_string(marker->stream->id) + " seq " + std::to_string(marker->seq);
        if (!submit(call, stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, std::move(operation)) || !marker) return;
        auto passes = [&](uint64_t id, uint64_t seq) {
            uint64_t &known = stream->ordered_after[id];
            known = std::max(known, seq);
        };
        passes(marker->stream->id, marker->seq);
        for (const auto &[id, seq] : marker->ordered_after) passes(id, seq);
    });
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn fn, void *data) {
    return entry("cuLaunchHostFunc", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        if (!fn) throw Fail{CUDA_ERROR_INVALID_VALUE};
        submit(call, stream, CU_GRAPH_NODE_TYPE_HOST, host_function(fn, data));
    });
}

CUresult CUDAAPI cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned flags) {
    return entry("cuStreamAddCallback", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        if (!callback || flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        refuse_if_capturing(call, stream);
        Operation operation{"callback"};
        operation.even_if_faulted = true; // unlike a host function, it is told the error
        operation.work = [=](Exec &) {
            CUresult status;
            {
                Guard guard(world().lock);
                status = world().fault;
            }
            this_thread().in_host_function = true;
            callback(handle, status, data);
            this_thread().in_host_function = false;
        };
        submit(call, stream, CU_GRAPH_NODE_TYPE_HOST, std::move(operation));
    });
}
