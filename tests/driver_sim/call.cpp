#include "call.h"

#include "capture.h"
#include "device.h"
#include "event.h"
#include "graph.h"
#include "pool.h"
#include "stream.h"

namespace sim {

Call::Call(const char *name, unsigned needs) : name_(name), needs_(needs), guard_(world().lock) {
    ThreadState &thread = this_thread();
    if (!thread.stack.empty()) context_ = thread.stack.back();
    record.name = name;
    record.thread = thread.number;
    record.context = context_ ? context_->id : 0;
}

void Call::admit() {
    note_activity();
    bool counted = !(needs_ & kPure);
    count_call(name_, counted);
    int forced = take_fault(name_, counted);
    if (forced >= 0) {
        record.injected = true;
        throw Fail{static_cast<CUresult>(forced)};
    }
    if ((needs_ & kInit) && !world().initialized) throw Fail{CUDA_ERROR_NOT_INITIALIZED};
    const ThreadState &thread = this_thread();
    if (counted && (thread.in_host_function || thread.in_destructor)) {
        violation(name_, "driver call from a host function");
        if (thread.in_destructor || !(needs_ & kUnrefused)) throw Fail{CUDA_ERROR_NOT_PERMITTED};
    }
    if ((needs_ & kCurrent) == kCurrent && !context_) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    bool needs_context = (needs_ & kContext) == kContext;
    if (needs_context && !context_) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    if ((needs_context || (needs_ & kNotDead) == kNotDead) && context_ && !context_->alive) {
        violation(name_, "current context is destroyed");
        throw Fail{CUDA_ERROR_CONTEXT_IS_DESTROYED};
    }
    if (needs_context || (needs_ & kHealthy) == kHealthy) check_healthy();
    if (needs_ & kUnsafe) check_capture_allows();
    reap_graph_memory();
}

CUresult Call::finish(CUresult result) {
    ThreadState &thread = this_thread();
    record.result = result;
    record.context_after = thread.stack.empty() ? 0 : thread.stack.back()->id;
    trace_add(std::move(record));
    return result;
}

void Call::check_healthy() {
    if (!world().fault_is_told) return;
    record.note = "earlier fault: " + world().fault_why;
    throw Fail{world().fault};
}

void Call::notice_fault() {
    world().fault_is_told = world().fault != CUDA_SUCCESS;
    check_healthy();
}

void Call::check_capture_allows() {
    if (capture_forbids_unsafe_call(this_thread(), name_)) throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
}

StreamPtr Call::stream(CUstream handle) {
    record.stream = reinterpret_cast<uint64_t>(handle);
    StreamPtr found;
    if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        // Only these need a current context: a stream of its own handle knows its context.
        if (!context_) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
        if (!context_->alive) {
            violation(name_, "current context is destroyed");
            throw Fail{CUDA_ERROR_CONTEXT_IS_DESTROYED};
        }
        found = handle == CU_STREAM_PER_THREAD ? per_thread_stream(context_, this_thread().number) : context_->legacy;
    } else {
        found = world().streams.find(handle);
    }
    if (!found) refuse_dead(world().streams, handle, name_, "stream");
    record.stream_id = found->id;
    record.device = found->context->device;
    check_healthy();
    return found;
}

EventPtr Call::event(CUevent handle) {
    record.handle = reinterpret_cast<uint64_t>(handle);
    EventPtr found = world().events.find(handle);
    if (!found) refuse_dead(world().events, handle, name_, "event");
    check_healthy();
    return found;
}

Device &Call::device(CUdevice ordinal) {
    record.device = ordinal;
    if (ordinal < 0 || static_cast<size_t>(ordinal) >= world().devices.size()) throw Fail{CUDA_ERROR_INVALID_DEVICE};
    return *world().devices[ordinal];
}

PoolPtr Call::pool(CUmemoryPool handle) {
    record.handle = reinterpret_cast<uint64_t>(handle);
    PoolPtr found = world().pools.find(handle);
    if (found) return found;
    if (world().pools.was_destroyed(handle)) violation(name_, "memory pool was destroyed", record.handle);
    throw Fail{CUDA_ERROR_INVALID_VALUE};
}

void Call::wait(const std::function<bool()> &pred) { host_wait(guard_, name_, pred); }

} // namespace sim
