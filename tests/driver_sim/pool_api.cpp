// Entry points of pools and of stream-ordered memory.
#include "pool.h"

#include "capture.h"
#include "memory.h"

namespace sim {
namespace {

void allocate_async(Call &call, CUdeviceptr *out, size_t nbytes, PoolPtr pool, CUstream handle) {
    require(out);
    call.record.nbytes = nbytes;
    StreamPtr stream = call.stream(handle);
    if (!stream->capture) call.check_capture_allows();
    if (!pool) pool = world().devices[stream->context->device]->current_pool;
    if (nbytes == 0) {
        *out = 0;
        return;
    }
    // What submitting would refuse is refused before anything is taken.
    refuse_if_faulted(call, stream);
    if (!stream->capture) refuse_implicit_dependency(call, stream);
    else if (stream->capture->invalidated) throw Fail{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
    if (stream->capture) {
        std::shared_ptr<GraphMemory> memory = make_graph_memory(pool, nbytes);
        submit(call, stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC, allocation_work(memory->allocation));
        stream->capture_tail.back()->memory = memory;
        *out = call.record.handle = memory->allocation->base;
        call.record.kind = "graph";
        return;
    }
    std::vector<Dependency> dependencies;
    AllocationPtr allocation = take_block(pool, stream, nbytes, dependencies);
    Operation operation = allocation_work(allocation);
    operation.dependencies = std::move(dependencies);
    submit(call, stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC, std::move(operation));
    world().host_view[allocation->base] = allocation;
    *out = allocation->base;
    call.record.handle = allocation->base;
    call.record.kind = "pool";
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *out, size_t nbytes, CUstream stream) {
    return entry("cuMemAllocAsync", kInit, [&](Call &call) { allocate_async(call, out, nbytes, nullptr, stream); });
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t nbytes, CUmemoryPool pool, CUstream stream) {
    return entry("cuMemAllocFromPoolAsync", kInit,
                 [&](Call &call) { allocate_async(call, out, nbytes, call.pool(pool), stream); });
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    return entry("cuMemFreeAsync", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        if (!stream->capture) call.check_capture_allows();
        call.record.handle = address;
        if (!address) return;
        World &w = world();
        auto it = w.host_view.find(address);
        bool here = it != w.host_view.end();
        // In a capture, memory of the graph itself is live from its node on.
        bool gone =
            here && (it->second->from_graph ? !it->second->graph_live && !stream->capture : it->second->free_queued);
        if (!here || gone) {
            bool once = here || find_allocation(w.freed, address, 0);
            violation(call.name(), once ? "double free" : "free of an address that is no allocation's base", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        AllocationPtr allocation = it->second;
        call.record.nbytes = allocation->nbytes;
        call.record.kind = kind_name(allocation->kind);
        if (allocation->kind != MemoryKind::pool && allocation->kind != MemoryKind::device) {
            violation(call.name(), std::string("wrong free for ") + kind_name(allocation->kind) + " memory", address);
            bool managed = allocation->kind == MemoryKind::managed;
            throw Fail{managed ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE};
        }
        // A graph frees what a graph allocated, and nothing else.
        if (stream->capture && !allocation->from_graph) throw Fail{CUDA_ERROR_INVALID_VALUE};
        uint64_t seq = submit(call, stream, CU_GRAPH_NODE_TYPE_MEM_FREE, free_work(allocation));
        // A captured free does not take the address from the host: each launch of the graph does.
        if (seq) note_freed(allocation, stream, seq);
        else stream->capture_tail.back()->frees = allocation;
    });
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice dev) {
    return entry("cuDeviceGetDefaultMemPool", kInit,
                 [&](Call &call) { require(out) = call.device(dev).default_pool->handle; });
}

namespace {

// Where a wrong ordinal is a wrong value.
Device &device_of_pool(int ordinal) {
    if (ordinal < 0 || static_cast<size_t>(ordinal) >= world().devices.size()) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return *world().devices[ordinal];
}

} // namespace

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *out, CUdevice dev) {
    return entry("cuDeviceGetMemPool", kInit, [&](Call &) { require(out) = device_of_pool(dev).current_pool->handle; });
}

CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool handle) {
    return entry("cuDeviceSetMemPool", kInit, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        if (pool->device != dev) throw Fail{CUDA_ERROR_INVALID_VALUE};
        device_of_pool(dev).current_pool = pool;
    });
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
    return entry("cuMemPoolCreate", kInit | kUnsafe, [&](Call &call) {
        require(out);
        if (!world().settings.pools) throw Fail{CUDA_ERROR_NOT_SUPPORTED};
        const CUmemPoolProps &wanted = require(props);
        constexpr unsigned kShareable = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
        if (wanted.allocType == CU_MEM_ALLOCATION_TYPE_INVALID ||
            wanted.location.type == CU_MEM_LOCATION_TYPE_INVALID || (wanted.handleTypes & ~kShareable))
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (wanted.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || wanted.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            throw Fail{CUDA_ERROR_NOT_SUPPORTED};
        device_of_pool(wanted.location.id);
        PoolPtr pool = make_pool(wanted.location.id, false);
        pool->props = wanted;
        *out = pool->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool handle) {
    return entry("cuMemPoolDestroy", kInit | kUnsafe, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        Device &device = *world().devices[pool->device];
        if (pool->is_default) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (pool->used) call.record.note = "destroyed with live allocations";
        if (device.current_pool == pool) device.current_pool = device.default_pool;
        world().pools.remove(handle);
        trim_pool(*pool, 0);
        pool->destroyed = true;
    });
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    return entry("cuMemPoolTrimTo", kInit | kUnsafe, [&](Call &call) { trim_pool(*call.pool(handle), keep); });
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    return entry("cuMemPoolSetAttribute", kInit | kUnsafe, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        if (!value) violation(call.name(), "nowhere to read the value from");
        require(value ? static_cast<char *>(value) : nullptr);
        auto number = [&] { return *static_cast<cuuint64_t *>(value); };
        switch (attribute) {
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: pool->follow_events = *static_cast<int *>(value); break;
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: pool->opportunistic = *static_cast<int *>(value); break;
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
            pool->internal_dependencies = *static_cast<int *>(value);
            break;
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->release_threshold = number(); break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
            if (number() != 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
            pool->reserved_high = pool->reserved;
            break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
            if (number() != 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
            pool->used_high = pool->used;
            break;
        default: throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
    });
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    return entry("cuMemPoolGetAttribute", kInit | kUnsafe, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        require(value ? static_cast<char *>(value) : nullptr);
        auto number = [&](uint64_t n) { *static_cast<cuuint64_t *>(value) = n; };
        switch (attribute) {
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: *static_cast<int *>(value) = pool->follow_events; break;
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: *static_cast<int *>(value) = pool->opportunistic; break;
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
            *static_cast<int *>(value) = pool->internal_dependencies;
            break;
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: number(pool->release_threshold); break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: number(pool->reserved); break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: number(pool->reserved_high); break;
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: number(pool->used); break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: number(pool->used_high); break;
        default: throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
    });
}

CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *map, size_t count) {
    return entry("cuMemPoolSetAccess", kInit | kUnsafe, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        require(map);
        for (size_t i = 0; i < count; ++i) {
            if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) throw Fail{CUDA_ERROR_INVALID_VALUE};
            int device = map[i].location.id;
            call.device(device);
            if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ) throw Fail{CUDA_ERROR_NOT_SUPPORTED};
            if (map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                throw Fail{CUDA_ERROR_INVALID_VALUE};
            if (device == pool->device) {
                // Access of its own device cannot be taken away.
                if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) throw Fail{CUDA_ERROR_INVALID_DEVICE};
                continue;
            }
            if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
                pool->readers.erase(device);
                continue;
            }
            if (!devices_are_peers(device, pool->device)) throw Fail{CUDA_ERROR_INVALID_DEVICE};
            pool->readers.insert(device);
        }
    });
}

CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool handle, CUmemLocation *location) {
    return entry("cuMemPoolGetAccess", kInit | kUnsafe, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        int device = require(location).id;
        device_of_pool(device);
        bool allowed = device == pool->device || pool->readers.count(device);
        require(flags) = allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    });
}

// The newer names of the pools of a device, which also know of other places.
namespace {

Device &pool_device(Call &call, const CUmemLocation *location, CUmemAllocationType type) {
    if (require(location).type != CU_MEM_LOCATION_TYPE_DEVICE || type != CU_MEM_ALLOCATION_TYPE_PINNED)
        throw Fail{CUDA_ERROR_NOT_SUPPORTED};
    return call.device(location->id);
}

} // namespace

CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    return entry("cuMemGetDefaultMemPool", kInit,
                 [&](Call &call) { require(out) = pool_device(call, location, type).default_pool->handle; });
}

CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    return entry("cuMemGetMemPool", kInit,
                 [&](Call &call) { require(out) = pool_device(call, location, type).current_pool->handle; });
}

CUresult CUDAAPI cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool handle) {
    return entry("cuMemSetMemPool", kInit, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        Device &device = pool_device(call, location, type);
        if (pool->device != device.ordinal) throw Fail{CUDA_ERROR_INVALID_VALUE};
        device.current_pool = pool;
    });
}
