#include "event.h"

#include "capture.h"
#include "device.h"
#include "pool.h"
#include "stream.h"

namespace sim {

bool is_complete(const Event &event) {
    return !event.marker || (!event.marker->capture && event.marker->stream->completed >= event.marker->seq);
}

Operation record_operation(const std::shared_ptr<Marker> &marker) {
    Operation operation{"record"};
    operation.work = [marker](Exec &) {
        Guard guard(world().lock);
        marker->done_ns = now_ns();
    };
    return operation;
}

namespace {

void record_event(Call &call, CUevent event_handle, CUstream handle, unsigned flags) {
    StreamPtr stream = call.stream(handle);
    EventPtr event = call.event(event_handle);
    if (flags & ~unsigned{CU_EVENT_RECORD_EXTERNAL}) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (flags && !stream->capture) throw Fail{CUDA_ERROR_ILLEGAL_STATE};
    if (event->context != stream->context) {
        violation(call.name(), "event and stream belong to different contexts", call.record.handle);
        throw Fail{CUDA_ERROR_INVALID_HANDLE};
    }
    auto marker = std::make_shared<Marker>();
    marker->stream = stream;
    if (stream->capture && !(flags & CU_EVENT_RECORD_EXTERNAL)) {
        if (stream->capture->invalidated) throw Fail{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
        marker->capture = stream->capture;
        marker->nodes = stream->capture_tail;
        event->marker = marker;
        call.record.note = "captured";
        return;
    }
    Operation operation = record_operation(marker);
    if (stream->capture) { // the event is recorded by each launch, and until then it is what it was
        operation.event = event;
        submit(call, stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, std::move(operation));
        return;
    }
    marker->ordered_after = stream->ordered_after;
    marker->seq = submit(call, stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, std::move(operation));
    event->marker = marker;
    call.record.note = "seq " + std::to_string(marker->seq);
}

// An event of a capture is no place in time. Asking ruins the capture; once that is over, the event is of no use.
void refuse_captured_event(Call &call, const Event &event) {
    if (!event.marker || !event.marker->capture) return;
    if (!is_open(*event.marker->capture)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    invalidate(*event.marker->capture, call.name());
    throw Fail{CUDA_ERROR_CAPTURED_EVENT};
}

// Passed, but only because nothing ran any more.
bool was_dropped(const Event &event) {
    return event.marker && world().fault != CUDA_SUCCESS && is_complete(event) && !event.marker->done_ns;
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuEventCreate(CUevent *out, unsigned flags) {
    return entry("cuEventCreate", kContext, [&](Call &call) {
        require(out);
        constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        if (flags & ~kKnown) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)) throw Fail{CUDA_ERROR_INVALID_VALUE};
        auto event = std::make_shared<Event>();
        event->id = world().next_id++;
        event->context = call.context_ptr();
        event->flags = flags;
        event->handle = reinterpret_cast<CUevent>(world().events.add(event));
        *out = event->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuEventDestroy(CUevent handle) {
    return entry("cuEventDestroy", kInit, [&](Call &call) {
        call.event(handle);
        world().events.remove(handle);
    });
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
    return entry("cuEventRecord", kInit | kUnrefused, [&](Call &call) { record_event(call, event, stream, 0); });
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    return entry("cuEventRecordWithFlags", kInit, [&](Call &call) { record_event(call, event, stream, flags); });
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
    return entry("cuEventQuery", kInit | kUnsafe | kUnrefused, [&](Call &call) {
        EventPtr event = call.event(handle);
        refuse_captured_event(call, *event);
        nudge_scheduler(call.guard());
        // The first query behind a fault only makes the driver look.
        bool dropped = was_dropped(*event);
        if (dropped) world().fault_is_told = true;
        if (dropped || !is_complete(*event)) throw Fail{CUDA_ERROR_NOT_READY};
    });
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
    return entry("cuEventSynchronize", kInit | kUnsafe, [&](Call &call) {
        EventPtr event = call.event(handle);
        refuse_captured_event(call, *event);
        std::shared_ptr<Marker> marker = event->marker;
        if (marker) call.wait([&] { return marker->stream->completed >= marker->seq; });
        call.notice_fault();
        if (marker) host_waited_for(*marker->stream, marker->seq);
    });
}

CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    return entry("cuEventElapsedTime", kInit, [&](Call &call) {
        EventPtr start = call.event(start_handle);
        EventPtr end = call.event(end_handle);
        if (!milliseconds) throw Fail{CUDA_ERROR_INVALID_HANDLE};
        for (const EventPtr &event : {start, end}) {
            refuse_captured_event(call, *event);
            if (!event->marker || (event->flags & CU_EVENT_DISABLE_TIMING)) throw Fail{CUDA_ERROR_INVALID_HANDLE};
        }
        if (start->context->device != end->context->device) throw Fail{CUDA_ERROR_INVALID_HANDLE};
        for (const EventPtr &event : {start, end})
            if (!is_complete(*event) || was_dropped(*event)) throw Fail{CUDA_ERROR_NOT_READY};
        *milliseconds = static_cast<float>(
            (static_cast<double>(end->marker->done_ns) - static_cast<double>(start->marker->done_ns)) / 1e6);
    });
}

CUresult CUDAAPI cuCtxRecordEvent(CUcontext context_handle, CUevent event_handle) {
    return entry("cuCtxRecordEvent", kInit, [&](Call &call) {
        EventPtr event = call.event(event_handle);
        ContextPtr context = world().contexts.find(context_handle);
        if (!context || !context->alive) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
        if (event->context != context) throw Fail{CUDA_ERROR_INVALID_HANDLE};
        if (invalidate_captures_in(context, call.name())) throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
        // A place that every stream of the context must reach: a stream of its own that waits for all.
        StreamPtr fence = make_stream(context, CU_STREAM_NON_BLOCKING, 0, false);
        fence->stalled = false;
        auto marker = std::make_shared<Marker>();
        marker->stream = fence;
        Operation operation = record_operation(marker);
        for (const StreamPtr &stream : streams_of(*context))
            if (!stream->idle()) operation.dependencies.push_back({stream, stream->submitted});
        marker->seq = enqueue(fence, std::move(operation));
        event->marker = marker;
        retire_stream(fence);
    });
}

CUresult CUDAAPI cuCtxWaitEvent(CUcontext context_handle, CUevent event_handle) {
    return entry("cuCtxWaitEvent", kInit, [&](Call &call) {
        EventPtr event = call.event(event_handle);
        ContextPtr context = world().contexts.find(context_handle);
        if (!context || !context->alive) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
        refuse_captured_event(call, *event);
        if (invalidate_captures_in(context, call.name())) throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
        // All that is queued from now on waits, in streams that do not exist yet too.
        if (!is_complete(*event)) context->awaited.push_back({event->marker->stream, event->marker->seq});
    });
}
