#include "pool.h"

#include <algorithm>

#include "capture.h"
#include "memory.h"

namespace sim {

PoolPtr make_pool(int device, bool is_default) {
    auto pool = std::make_shared<Pool>();
    pool->id = world().next_id++;
    pool->device = device;
    pool->is_default = is_default;
    pool->props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    pool->props.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    pool->handle = reinterpret_cast<CUmemoryPool>(world().pools.add(pool));
    return pool;
}

namespace {

bool free_is_done(const FreeBlock &block) { return !block.stream || block.stream->completed >= block.seq; }

void give_back(Device &device, Pool &pool, const FreeBlock &block) {
    pool.reserved -= block.nbytes;
    device.used -= block.nbytes;
    device.addresses.give(block.base, block.nbytes);
}

// Where a new block may come from, best first.
struct Choice {
    size_t index = SIZE_MAX;
    bool must_wait = false; // on the stream that freed it
};

Choice choose_block(const Pool &pool, const StreamPtr &stream, uint64_t nbytes, bool may_wait) {
    Choice best;
    uint64_t best_size = UINT64_MAX;
    for (size_t i = 0; i < pool.free_blocks.size(); ++i) {
        const FreeBlock &block = pool.free_blocks[i];
        if (block.nbytes < nbytes || block.nbytes >= best_size) continue;
        bool in_order = block.stream == stream;
        bool done = pool.opportunistic && free_is_done(block);
        if (!in_order && !done && !may_wait) continue;
        best = {i, !in_order && !done};
        best_size = block.nbytes;
    }
    return best;
}

} // namespace

void trim_pool(const PoolPtr &pool, uint64_t keep) {
    Device &device = *world().devices[pool->device];
    auto &blocks = pool->free_blocks;
    for (size_t i = blocks.size(); i-- > 0 && pool->reserved > keep;) {
        if (!free_is_done(blocks[i])) continue;
        give_back(device, *pool, blocks[i]);
        blocks.erase(blocks.begin() + static_cast<long>(i));
    }
}

void trim_pools_after_sync(int device) {
    for (const auto &[handle, pool] : world().pools.live())
        if (pool->device == device && pool->reserved > pool->release_threshold)
            trim_pool(pool, pool->release_threshold);
}

void drop_free_blocks_of(const Stream &stream) {
    for (const auto &[handle, pool] : world().pools.live()) {
        Device &device = *world().devices[pool->device];
        auto &blocks = pool->free_blocks;
        for (size_t i = blocks.size(); i-- > 0;)
            if (blocks[i].stream.get() == &stream) {
                give_back(device, *pool, blocks[i]);
                blocks.erase(blocks.begin() + static_cast<long>(i));
            }
    }
}

namespace {

void reserve_new(Call &call, Pool &pool, uint64_t nbytes, CUdeviceptr *base) {
    Device &device = *world().devices[pool.device];
    if (pool.props.maxSize && pool.reserved + nbytes > pool.props.maxSize) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    AllocationPtr fresh = allocate_device(device, nbytes);
    *base = fresh->base;
    pool.reserved += nbytes;
    pool.reserved_high = std::max(pool.reserved_high, pool.reserved);
    (void)call;
}

AllocationPtr take_block(Call &call, const PoolPtr &pool, const StreamPtr &stream, size_t nbytes,
                         std::vector<Dependency> &dependencies) {
    constexpr uint64_t kGranule = 512;
    if (nbytes == 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
    uint64_t rounded = (nbytes + kGranule - 1) & ~(kGranule - 1);
    if (rounded < nbytes) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    CUdeviceptr base = 0;
    Choice choice = choose_block(*pool, stream, rounded, false);
    if (choice.index == SIZE_MAX) {
        try {
            reserve_new(call, *pool, rounded, &base);
        } catch (const Fail &first) {
            // What idle pools of the device hold back is given up before the call fails.
            for (const auto &[handle, other] : world().pools.live())
                if (other->device == pool->device) trim_pool(other, 0);
            try {
                reserve_new(call, *pool, rounded, &base);
            } catch (const Fail &) {
                if (pool->internal_dependencies) choice = choose_block(*pool, stream, rounded, true);
                if (choice.index == SIZE_MAX) throw first;
            }
        }
    }
    if (!base) {
        FreeBlock &block = pool->free_blocks[choice.index];
        base = block.base;
        if (block.stream != stream && !free_is_done(block)) dependencies.push_back({block.stream, block.seq});
        if (block.nbytes > rounded) {
            block.base += rounded;
            block.nbytes -= rounded;
        } else {
            pool->free_blocks.erase(pool->free_blocks.begin() + static_cast<long>(choice.index));
        }
    }
    pool->used += rounded;
    pool->used_high = std::max(pool->used_high, pool->used);
    auto allocation = std::make_shared<Allocation>();
    allocation->id = world().next_id++;
    allocation->kind = MemoryKind::pool;
    allocation->base = base;
    allocation->nbytes = nbytes;
    allocation->reserved = rounded;
    allocation->device = pool->device;
    allocation->pool = pool;
    return allocation;
}

void allocate_async(Call &call, CUdeviceptr *out, size_t nbytes, PoolPtr pool, CUstream handle) {
    require(out);
    call.record.nbytes = nbytes;
    StreamPtr stream = call.stream(handle);
    if (!stream->capture) call.check_capture_allows();
    if (!pool) pool = world().devices[stream->context->device]->current_pool;
    if (pool->device != stream->context->device && !pool->readers.count(stream->context->device))
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    Operation operation{"alloc"};
    AllocationPtr allocation = take_block(call, pool, stream, nbytes, operation.dependencies);
    allocation->from_graph = stream->capture != nullptr;
    operation.nbytes = nbytes;
    operation.even_if_faulted = true;
    // Until this has run, work that touches the address is out of order, and faults.
    operation.work = [allocation](Exec &) {
        Guard guard(world().lock);
        world().device_view[allocation->base] = allocation;
        poison(allocation->base, allocation->nbytes, kFresh);
    };
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

namespace {

void leave_destroyed_pool(Pool &pool, CUdeviceptr base) {
    auto &blocks = pool.free_blocks;
    for (size_t i = 0; i < blocks.size(); ++i) {
        if (blocks[i].base != base) continue;
        give_back(*world().devices[pool.device], pool, blocks[i]);
        blocks.erase(blocks.begin() + static_cast<long>(i));
        return;
    }
}

} // namespace

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    return entry("cuMemFreeAsync", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        if (!stream->capture) call.check_capture_allows();
        call.record.handle = address;
        World &w = world();
        auto it = w.host_view.find(address);
        if (it == w.host_view.end() || it->second->free_queued) {
            bool once = (it != w.host_view.end()) || find_allocation(w.freed, address, 0);
            violation(call.name(), once ? "double free" : "free of an address that is no allocation's base", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        AllocationPtr allocation = it->second;
        call.record.nbytes = allocation->nbytes;
        call.record.kind = kind_name(allocation->kind);
        if (allocation->kind != MemoryKind::pool && allocation->kind != MemoryKind::device) {
            violation(call.name(), std::string("wrong free for ") + kind_name(allocation->kind) + " memory", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        Operation operation{"free"};
        operation.nbytes = allocation->nbytes;
        operation.even_if_faulted = true;
        operation.work = [allocation](Exec &) {
            Guard guard(world().lock);
            World &now = world();
            auto live = now.device_view.find(allocation->base);
            if (live != now.device_view.end() && live->second == allocation) now.device_view.erase(live);
            poison(allocation->base, allocation->nbytes, kStale);
            if (allocation->kind == MemoryKind::device) release_device(*now.devices[allocation->device], allocation);
            else if (allocation->pool->destroyed) leave_destroyed_pool(*allocation->pool, allocation->base);
        };
        uint64_t seq = submit(call, stream, CU_GRAPH_NODE_TYPE_MEM_FREE, std::move(operation));
        // A captured free does not take the address from the host: the graph frees it when it runs.
        if (seq == 0) return;
        allocation->free_queued = true;
        w.host_view.erase(address);
        w.freed[address] = allocation;
        if (allocation->pool) {
            Pool &pool = *allocation->pool;
            pool.used -= allocation->reserved;
            pool.free_blocks.push_back({allocation->base, allocation->reserved, stream, seq});
        }
    });
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice dev) {
    return entry("cuDeviceGetDefaultMemPool", kInit,
                 [&](Call &call) { require(out) = call.device(dev).default_pool->handle; });
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *out, CUdevice dev) {
    return entry("cuDeviceGetMemPool", kInit,
                 [&](Call &call) { require(out) = call.device(dev).current_pool->handle; });
}

CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool handle) {
    return entry("cuDeviceSetMemPool", kInit, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        if (pool->device != dev) throw Fail{CUDA_ERROR_INVALID_VALUE};
        call.device(dev).current_pool = pool;
    });
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
    return entry("cuMemPoolCreate", kInit | kUnsafe, [&](Call &call) {
        require(out);
        const CUmemPoolProps &wanted = require(props);
        if (wanted.allocType != CU_MEM_ALLOCATION_TYPE_PINNED) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (wanted.location.type != CU_MEM_LOCATION_TYPE_DEVICE) throw Fail{CUDA_ERROR_NOT_SUPPORTED};
        call.device(wanted.location.id);
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
        trim_pool(pool, 0);
        pool->destroyed = true;
    });
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    return entry("cuMemPoolTrimTo", kInit | kUnsafe, [&](Call &call) { trim_pool(call.pool(handle), keep); });
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    return entry("cuMemPoolSetAttribute", kInit, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
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
    return entry("cuMemPoolGetAttribute", kInit, [&](Call &call) {
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
    return entry("cuMemPoolSetAccess", kInit, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        if (count) require(map);
        for (size_t i = 0; i < count; ++i) {
            if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) throw Fail{CUDA_ERROR_INVALID_VALUE};
            int device = map[i].location.id;
            call.device(device);
            if (device == pool->device) {
                // Access of its own device cannot be taken away.
                if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) throw Fail{CUDA_ERROR_INVALID_VALUE};
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
    return entry("cuMemPoolGetAccess", kInit, [&](Call &call) {
        PoolPtr pool = call.pool(handle);
        int device = require(location).id;
        call.device(device);
        bool allowed = device == pool->device || pool->readers.count(device);
        require(flags) = allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    });
}
