#include "pool.h"

#include <algorithm>
#include <tuple>

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

constexpr uint64_t kGranule = 512;
constexpr uint64_t kChunk = uint64_t{32} << 20;

uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

bool free_is_done(const FreeBlock &block) { return !block.stream || block.stream->completed >= block.seq; }

// Whether work of the stream comes behind the free without more ado.
bool in_order(const Pool &pool, const FreeBlock &block, const StreamPtr &stream) {
    if (!block.stream || block.stream == stream) return true;
    auto passed = stream->ordered_after.find(block.stream->id);
    bool waited = passed != stream->ordered_after.end() && passed->second >= block.seq;
    return (pool.follow_events && waited) || (pool.opportunistic && free_is_done(block));
}

// The smallest free block that will do: SIZE_MAX for none. Of two that fit alike, the stream's own.
size_t choose_block(const Pool &pool, const StreamPtr &stream, uint64_t nbytes, bool may_wait) {
    size_t best = SIZE_MAX;
    auto rank = [&](const FreeBlock &b) { return std::make_tuple(b.nbytes, b.stream != stream, b.base); };
    for (size_t i = 0; i < pool.free_blocks.size(); ++i) {
        const FreeBlock &block = pool.free_blocks[i];
        if (block.nbytes < nbytes || !(may_wait || in_order(pool, block, stream))) continue;
        if (best == SIZE_MAX || rank(block) < rank(pool.free_blocks[best])) best = i;
    }
    return best;
}

// Blocks that are free without condition, and touch each other, become one.
void merge_free_blocks(Pool &pool) {
    auto &blocks = pool.free_blocks;
    std::sort(blocks.begin(), blocks.end(), [](const FreeBlock &a, const FreeBlock &b) { return a.base < b.base; });
    std::vector<FreeBlock> merged;
    for (FreeBlock &block : blocks) {
        bool joins = !merged.empty() && !merged.back().stream && !block.stream &&
                     merged.back().base + merged.back().nbytes == block.base;
        if (joins) merged.back().nbytes += block.nbytes;
        else merged.push_back(std::move(block));
    }
    blocks = std::move(merged);
}

// Cuts [base, base + nbytes) out of a free block.
void cut_free_block(Pool &pool, size_t index, CUdeviceptr base, uint64_t nbytes) {
    FreeBlock block = pool.free_blocks[index];
    pool.free_blocks.erase(pool.free_blocks.begin() + static_cast<long>(index));
    uint64_t before = base - block.base, behind = block.nbytes - before - nbytes;
    if (before) pool.free_blocks.push_back({block.base, before, block.stream, block.seq});
    if (behind) pool.free_blocks.push_back({base + nbytes, behind, block.stream, block.seq});
}

// Whether what was free at the end of the pool's chunks begins a block there, for one that goes beyond them.
const FreeBlock *free_tail(const Pool &pool, const StreamPtr &stream) {
    if (pool.chunks.empty()) return nullptr;
    CUdeviceptr end = pool.chunks.rbegin()->first + pool.chunks.rbegin()->second;
    for (const FreeBlock &block : pool.free_blocks)
        if (block.base + block.nbytes == end && in_order(pool, block, stream)) return &block;
    return nullptr;
}

// More memory of the device, so that a free block of nbytes comes to be. Throws Fail.
void grow_pool(Pool &pool, const StreamPtr &stream, uint64_t nbytes) {
    Device &device = *world().devices[pool.device];
    auto take = [&](CUdeviceptr at, uint64_t size) -> CUdeviceptr {
        bool fits =
            size <= device.total - device.used && (!pool.props.maxSize || pool.reserved + size <= pool.props.maxSize);
        if (!fits) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
        if (at && device.addresses.take_at(at, size)) return at;
        return 0;
    };
    if (nbytes > device.total) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    const FreeBlock *tail = free_tail(pool, stream);
    CUdeviceptr base = 0;
    uint64_t size = 0;
    // Whole chunks; less where a whole one is too much for a small device.
    for (uint64_t unit : {kChunk, kGranule}) {
        try {
            if (tail) base = take(tail->base + tail->nbytes, size = round_up(nbytes - tail->nbytes, unit));
            if (!base) base = take(pool.chunks.empty() ? pool.first_chunk : 0, size = round_up(nbytes, unit));
            if (!base) base = device.addresses.take_apart(size, kChunk);
            if (base) break;
        } catch (const Fail &) {
            if (unit == kGranule) throw;
        }
    }
    if (!base) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    device.used += size;
    pool.reserved += size;
    pool.reserved_high = std::max(pool.reserved_high, pool.reserved);
    if (!pool.first_chunk) pool.first_chunk = base;
    for (uint64_t done = 0; done < size; done += kChunk) pool.chunks[base + done] = std::min(kChunk, size - done);
    // Of its neighbour's condition, that they can be one block.
    FreeBlock fresh{base, size, nullptr, 0};
    if (tail && tail->base + tail->nbytes == base) {
        FreeBlock joined = *tail;
        joined.nbytes += size;
        pool.free_blocks.erase(pool.free_blocks.begin() + (tail - pool.free_blocks.data()));
        fresh = joined;
    }
    pool.free_blocks.push_back(fresh);
}

} // namespace

void trim_pool(Pool &pool, uint64_t keep) {
    Device &device = *world().devices[pool.device];
    merge_free_blocks(pool);
    std::vector<std::pair<CUdeviceptr, size_t>> chunks(pool.chunks.rbegin(), pool.chunks.rend());
    for (const auto &[base, size] : chunks) {
        if (pool.reserved < keep + size) continue;
        for (size_t i = 0; i < pool.free_blocks.size(); ++i) {
            const FreeBlock &block = pool.free_blocks[i];
            if (block.stream || base < block.base || base + size > block.base + block.nbytes) continue;
            cut_free_block(pool, i, base, size);
            pool.chunks.erase(base);
            pool.reserved -= size;
            device.used -= size;
            device.addresses.give(base, size);
            release_pages(base, size);
            break;
        }
    }
}

namespace {

template <class Over> void settle_frees(Over over) {
    for (const auto &[handle, pool] : world().pools.live()) {
        bool any = false;
        for (FreeBlock &block : pool->free_blocks)
            if (block.stream && free_is_done(block) && over(block)) {
                block.stream.reset();
                any = true;
            }
        if (any && pool->reserved > pool->release_threshold) trim_pool(*pool, pool->release_threshold);
    }
}

} // namespace

void host_waited_for(const Stream &stream, uint64_t seq) {
    settle_frees([&](const FreeBlock &block) {
        if (block.stream.get() == &stream) return block.seq <= seq;
        auto passed = stream.ordered_after.find(block.stream->id);
        return passed != stream.ordered_after.end() && passed->second >= block.seq;
    });
}

void host_waited_for(const Context &context) {
    settle_frees([&](const FreeBlock &block) { return block.stream->context.get() == &context; });
}

AllocationPtr take_block(const PoolPtr &pool, const StreamPtr &stream, size_t nbytes,
                         std::vector<Dependency> &dependencies) {
    uint64_t rounded = round_up(nbytes, kGranule);
    if (rounded < nbytes) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    size_t index = choose_block(*pool, stream, rounded, false);
    if (index == SIZE_MAX) {
        try {
            grow_pool(*pool, stream, rounded);
        } catch (const Fail &first) {
            // What idle pools of the device hold back is given up before the call fails.
            for (const auto &[handle, other] : world().pools.live())
                if (other->device == pool->device) trim_pool(*other, 0);
            try {
                grow_pool(*pool, stream, rounded);
            } catch (const Fail &) {
                if (pool->internal_dependencies) index = choose_block(*pool, stream, rounded, true);
                if (index == SIZE_MAX) throw first;
            }
        }
        if (index == SIZE_MAX) index = choose_block(*pool, stream, rounded, false);
    }
    const FreeBlock block = pool->free_blocks[index];
    if (block.stream && block.stream != stream && !free_is_done(block))
        dependencies.push_back({block.stream, block.seq});
    cut_free_block(*pool, index, block.base, rounded);
    pool->used += nbytes;
    pool->used_high = std::max(pool->used_high, pool->used);
    auto allocation = std::make_shared<Allocation>();
    allocation->id = world().next_id++;
    allocation->kind = MemoryKind::pool;
    allocation->base = block.base;
    allocation->nbytes = nbytes;
    allocation->reserved = rounded;
    allocation->device = pool->device;
    allocation->pool = pool;
    return allocation;
}

namespace {

// The last free of a destroyed pool takes its chunk along.
void leave_destroyed_pool(Pool &pool) {
    for (FreeBlock &block : pool.free_blocks)
        if (free_is_done(block)) block.stream.reset();
    trim_pool(pool, 0);
}

} // namespace

Operation allocation_work(const AllocationPtr &allocation) {
    Operation operation{"alloc"};
    operation.nbytes = allocation->nbytes;
    operation.even_if_faulted = true;
    // Until this has run, work that touches the address is out of order, and faults.
    operation.work = [allocation](Exec &) {
        Guard guard(world().lock);
        if (allocation->freed_at_once) return;
        world().device_view[allocation->base] = allocation;
        poison(allocation->base, allocation->nbytes, kFresh);
    };
    return operation;
}

Operation free_work(const AllocationPtr &allocation) {
    Operation operation{"free"};
    operation.nbytes = allocation->nbytes;
    operation.even_if_faulted = true;
    operation.work = [allocation](Exec &) {
        Guard guard(world().lock);
        World &now = world();
        auto live = now.device_view.find(allocation->base);
        if (live != now.device_view.end() && live->second == allocation) now.device_view.erase(live);
        // On a stream that was not behind the allocation's: that one comes to nothing, whenever it runs.
        else if (!allocation->from_graph) allocation->freed_at_once = true;
        poison(allocation->base, allocation->nbytes, kStale);
        if (allocation->from_graph) allocation->graph_frees--;
        else if (allocation->kind == MemoryKind::device) release_device(*now.devices[allocation->device], allocation);
        else if (allocation->pool->destroyed) {
            for (FreeBlock &block : allocation->pool->free_blocks)
                if (block.base == allocation->base) block.stream.reset();
            leave_destroyed_pool(*allocation->pool);
        }
    };
    return operation;
}

void free_into_pool(const AllocationPtr &allocation) {
    World &w = world();
    allocation->free_queued = allocation->freed_at_once = true;
    auto live = w.device_view.find(allocation->base);
    if (live != w.device_view.end() && live->second == allocation) w.device_view.erase(live);
    w.host_view.erase(allocation->base);
    w.freed[allocation->base] = allocation;
    poison(allocation->base, allocation->nbytes, kStale);
    // The pool goes on counting it as used: so does the 580 driver.
    allocation->pool->free_blocks.push_back({allocation->base, allocation->reserved, nullptr, 0});
    if (allocation->pool->destroyed) leave_destroyed_pool(*allocation->pool);
}

void note_freed(const AllocationPtr &allocation, const StreamPtr &stream, uint64_t seq) {
    if (allocation->from_graph) { // the next launch brings it back
        allocation->graph_live = false;
        allocation->graph_frees++;
        return;
    }
    allocation->free_queued = true;
    world().host_view.erase(allocation->base);
    world().freed[allocation->base] = allocation;
    if (!allocation->pool) return;
    allocation->pool->used -= allocation->nbytes;
    allocation->pool->free_blocks.push_back({allocation->base, allocation->reserved, stream, seq});
}

} // namespace sim
