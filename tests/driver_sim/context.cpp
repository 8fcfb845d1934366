#include "call.h"
#include "capture.h"
#include "device.h"
#include "event.h"
#include "memory.h"
#include "module.h"
#include "pool.h"
#include "stream.h"

namespace sim {

ContextPtr make_context(int device, bool primary, unsigned flags) {
    auto context = std::make_shared<Context>();
    context->device = device;
    context->primary = primary;
    context->flags = flags;
    context->handle = reinterpret_cast<CUcontext>(world().contexts.add(context));
    world().destroyed_contexts.erase(context->handle); // if it is given out again
    activate_context(context);
    return context;
}

void activate_context(const ContextPtr &context) {
    context->alive = true;
    context->id = world().next_id++;
    context->peers.clear();
    context->awaited.clear();
    context->per_thread.clear();
    context->legacy = make_stream(context, CU_STREAM_DEFAULT, 0, true);
    context->limits = {{CU_LIMIT_STACK_SIZE, 1024},
                       {CU_LIMIT_PRINTF_FIFO_SIZE, 8650752},
                       {CU_LIMIT_MALLOC_HEAP_SIZE, 8388608},
                       {CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 2048},
                       {CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64},
                       {CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 11796480},
                       {CU_LIMIT_SHMEM_SIZE, 232448}};
}

namespace {

// Handles of a destroyed context stay recognisable, so that their use is reported as such.
template <class T> void drop_handles(HandleTable<T> &table, const ContextPtr &context, bool known_as_lost = true) {
    std::vector<uint64_t> mine;
    for (const auto &[handle, object] : table.live())
        if (object->context == context) mine.push_back(handle);
    for (uint64_t handle : mine) table.remove(reinterpret_cast<void *>(handle), known_as_lost);
}

} // namespace

void destroy_context(Guard &guard, const ContextPtr &context) {
    World &w = world();
    std::vector<StreamPtr> streams = streams_of(*context);
    // A stalled stream would hold the destruction for ever, and nobody could resume it afterwards.
    for (const StreamPtr &stream : streams) stream->stalled = false;
    wake_streams();
    wait_for_context(guard, "context destruction", context);
    abandon_captures_of(context);
    for (const StreamPtr &stream : streams) retire_stream(stream);
    drop_handles(w.streams, context);
    drop_handles(w.events, context);
    drop_handles(w.functions, context, false);
    drop_handles(w.modules, context, false);
    host_waited_for(*context);
    forget_memory_of(context);
    context->legacy.reset();
    context->per_thread.clear();
    context->alive = false;
    context->id = 0;
    if (context->primary) // created contexts of a device may be several
        for (const auto &[handle, other] : w.contexts.live()) other->peers.erase(context->device);
}

namespace {

void pop_everywhere_here(const ContextPtr &context) {
    auto &stack = this_thread().stack;
    if (!stack.empty() && stack.back() == context) stack.pop_back();
}

// The handle of a primary context outlives it: the next retain gives the same one. That of a destroyed context is
// still taken by some calls.
ContextPtr find_handle(Call &call, CUcontext handle) {
    if (ContextPtr found = world().contexts.find(handle)) return found;
    auto destroyed = world().destroyed_contexts.find(handle);
    if (destroyed == world().destroyed_contexts.end()) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    violation(call.name(), "context is destroyed", reinterpret_cast<uint64_t>(handle));
    return destroyed->second;
}

ContextPtr find_context(Call &call, CUcontext handle) {
    ContextPtr found = find_handle(call, handle);
    if (!found->alive) {
        violation(call.name(), "context is destroyed", reinterpret_cast<uint64_t>(handle));
        throw Fail{CUDA_ERROR_CONTEXT_IS_DESTROYED};
    }
    return found;
}

// As the newer calls take it: an explicit context, or NULL for the current one; alive or not.
ContextPtr named_or_current(Call &call, CUcontext handle) {
    if (handle) return find_handle(call, handle);
    if (!call.context_ptr()) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    return call.context_ptr();
}

void check_flags(unsigned flags) {
    unsigned schedule = flags & CU_CTX_SCHED_MASK;
    bool one = schedule == 0 || schedule == CU_CTX_SCHED_SPIN || schedule == CU_CTX_SCHED_YIELD ||
               schedule == CU_CTX_SCHED_BLOCKING_SYNC;
    if (!one || (flags & ~unsigned{CU_CTX_FLAGS_MASK})) throw Fail{CUDA_ERROR_INVALID_VALUE};
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice dev) {
    return entry("cuDevicePrimaryCtxRetain", kInit, [&](Call &call) {
        Device &device = call.device(dev);
        require(out);
        if (!device.primary->alive) {
            call.check_healthy();
            activate_context(device.primary);
            device.primary->flags = device.primary_flags;
        }
        device.primary_retains++;
        *out = device.primary->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) {
    return entry("cuDevicePrimaryCtxRelease", kInit, [&](Call &call) {
        Device &device = call.device(dev);
        if (device.primary_retains == 0) {
            violation(call.name(), "primary context released more often than retained");
            throw Fail{CUDA_ERROR_INVALID_CONTEXT};
        }
        if (--device.primary_retains == 0 && device.primary->alive) destroy_context(call.guard(), device.primary);
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev) {
    return entry("cuDevicePrimaryCtxReset", kInit, [&](Call &call) {
        Device &device = call.device(dev);
        // Who retained it still owes a release: of what the next retain revives, too.
        if (device.primary->alive) destroy_context(call.guard(), device.primary);
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned *flags, int *active) {
    return entry("cuDevicePrimaryCtxGetState", kInit, [&](Call &call) {
        Device &device = call.device(dev);
        require(flags) = device.primary_flags;
        require(active) = device.primary->alive ? 1 : 0;
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned flags) {
    return entry("cuDevicePrimaryCtxSetFlags", kInit, [&](Call &call) {
        Device &device = call.device(dev);
        check_flags(flags);
        if (flags & CU_CTX_MAP_HOST) throw Fail{CUDA_ERROR_INVALID_VALUE};
        device.primary_flags = flags;
        if (device.primary->alive) device.primary->flags = flags;
    });
}

CUresult CUDAAPI cuCtxCreate(CUcontext *out, CUctxCreateParams *params, unsigned flags, CUdevice dev) {
    return entry("cuCtxCreate", kHealthy, [&](Call &call) {
        call.device(dev);
        require(out);
        if (params && (params->numExecAffinityParams || params->cigParams)) throw Fail{CUDA_ERROR_NOT_SUPPORTED};
        check_flags(flags);
        wait_for_device(call.guard(), call.name(), dev);
        ContextPtr context = make_context(dev, false, flags);
        this_thread().stack.push_back(context);
        *out = context->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice dev) {
    return cuCtxCreate_v4(out, nullptr, flags, dev);
}

CUresult CUDAAPI cuCtxDestroy(CUcontext handle) {
    return entry("cuCtxDestroy", kInit, [&](Call &call) {
        if (!handle) throw Fail{CUDA_ERROR_INVALID_VALUE};
        ContextPtr context = find_handle(call, handle);
        if (context->primary || !context->alive) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
        destroy_context(call.guard(), context);
        wait_for_device(call.guard(), call.name(), context->device);
        world().contexts.remove(handle);
        world().destroyed_contexts[handle] = context;
        pop_everywhere_here(context);
    });
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext handle) {
    return entry("cuCtxPushCurrent", kInit, [&](Call &call) {
        call.record.handle = reinterpret_cast<uint64_t>(handle);
        if (!handle) throw Fail{CUDA_ERROR_INVALID_VALUE};
        // Succeeds after a reset too: only what is then done with the context tells.
        this_thread().stack.push_back(find_handle(call, handle));
    });
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *out) {
    return entry("cuCtxPopCurrent", kInit, [&](Call &) {
        auto &stack = this_thread().stack;
        if (stack.empty()) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
        if (out) *out = stack.back()->handle;
        stack.pop_back();
    });
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext handle) {
    return entry("cuCtxSetCurrent", kInit, [&](Call &call) {
        auto &stack = this_thread().stack;
        call.record.handle = reinterpret_cast<uint64_t>(handle);
        if (!handle) {
            if (!stack.empty()) stack.pop_back();
            return;
        }
        ContextPtr context = find_handle(call, handle);
        if (stack.empty()) stack.push_back(context);
        else stack.back() = context;
    });
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *out) {
    return entry("cuCtxGetCurrent", kInit,
                 [&](Call &call) { require(out) = call.context_ptr() ? call.context().handle : nullptr; });
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *out) {
    return entry("cuCtxGetDevice", kCurrent, [&](Call &call) { require(out) = call.context().device; });
}

CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *out, CUcontext handle) {
    return entry("cuCtxGetDevice", kInit, [&](Call &call) { require(out) = named_or_current(call, handle)->device; });
}

CUresult CUDAAPI cuCtxGetId(CUcontext handle, unsigned long long *id) {
    return entry("cuCtxGetId", kInit, [&](Call &call) {
        // Asking is how a program learns of a reset, so a context that is gone breaks no rule here.
        ContextPtr context = named_or_current(call, handle);
        if (!handle) call.check_healthy();
        if (!context->alive) throw Fail{CUDA_ERROR_CONTEXT_IS_DESTROYED};
        require(id) = context->id;
    });
}

CUresult CUDAAPI cuCtxGetFlags(unsigned *flags) {
    return entry("cuCtxGetFlags", kCurrent, [&](Call &call) {
        const Context &context = call.context();
        // Mapping host memory is the way of every primary context, though nobody may ask for it.
        require(flags) = context.flags | (context.primary && context.alive ? CU_CTX_MAP_HOST : 0);
    });
}

CUresult CUDAAPI cuCtxSetFlags(unsigned flags) {
    return entry("cuCtxSetFlags", kCurrent, [&](Call &call) {
        check_flags(flags);
        call.context().flags = flags;
    });
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext handle, unsigned *version) {
    return entry("cuCtxGetApiVersion", kInit, [&](Call &call) {
        if (!named_or_current(call, handle)->alive) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
        require(version) = 3020;
    });
}

namespace {

void synchronize_context(Call &call, const ContextPtr &context) {
    if (!context->alive) throw Fail{CUDA_ERROR_CONTEXT_IS_DESTROYED};
    // A context that holds a capturing stream cannot be waited for at all; captures elsewhere do not mind.
    if (invalidate_captures_in(context, call.name())) throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
    call.check_healthy();
    wait_for_context(call.guard(), call.name(), context);
    call.notice_fault();
    host_waited_for(*context);
}

} // namespace

CUresult CUDAAPI cuCtxSynchronize(void) {
    return entry("cuCtxSynchronize", kContext, [&](Call &call) { synchronize_context(call, call.context_ptr()); });
}

CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext handle) {
    return entry("cuCtxSynchronize", kInit,
                 [&](Call &call) { synchronize_context(call, named_or_current(call, handle)); });
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return entry("cuCtxGetStreamPriorityRange", kContext, [&](Call &) {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
    });
}

CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit) {
    return entry("cuCtxGetLimit", kContext, [&](Call &call) {
        if (limit < 0 || limit >= CU_LIMIT_MAX) throw Fail{CUDA_ERROR_INVALID_VALUE};
        auto it = call.context().limits.find(limit);
        if (it == call.context().limits.end()) throw Fail{CUDA_ERROR_UNSUPPORTED_LIMIT};
        require(value) = it->second;
    });
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) {
    return entry("cuCtxSetLimit", kContext, [&](Call &call) {
        if (limit < 0 || limit >= CU_LIMIT_MAX) throw Fail{CUDA_ERROR_INVALID_VALUE};
        auto it = call.context().limits.find(limit);
        if (it == call.context().limits.end()) throw Fail{CUDA_ERROR_UNSUPPORTED_LIMIT};
        wait_for_context(call.guard(), call.name(), call.context_ptr());
        it->second = value;
    });
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    return entry("cuCtxEnablePeerAccess", kContext, [&](Call &call) {
        if (flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        ContextPtr other = find_context(call, peer);
        if (!devices_are_peers(call.context().device, other->device)) throw Fail{CUDA_ERROR_PEER_ACCESS_UNSUPPORTED};
        if (!call.context().peers.insert(other->device).second) throw Fail{CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED};
    });
}

CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext peer) {
    return entry("cuCtxDisablePeerAccess", kContext, [&](Call &call) {
        ContextPtr other = find_context(call, peer);
        if (!call.context().peers.erase(other->device)) throw Fail{CUDA_ERROR_PEER_ACCESS_NOT_ENABLED};
    });
}
