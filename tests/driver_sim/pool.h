// Stream-ordered pools: freed blocks are reused along stream order, or once their free is done.
#pragma once

#include "world.h"

namespace sim {

struct FreeBlock {
    CUdeviceptr base;
    size_t nbytes;
    StreamPtr stream; // where it was freed, and when
    uint64_t seq;
};

struct Pool {
    CUmemoryPool handle = nullptr;
    uint64_t id = 0;
    int device = 0;
    bool is_default = false;
    bool destroyed = false; // lives on until its allocations and frees are done
    CUmemPoolProps props{};
    uint64_t release_threshold = 0;
    int follow_events = 1;
    int opportunistic = 1;
    int internal_dependencies = 1;
    uint64_t reserved = 0, reserved_high = 0;
    uint64_t used = 0, used_high = 0;
    std::set<int> readers; // devices given access, the own one left out
    std::vector<FreeBlock> free_blocks;
};

PoolPtr make_pool(int device, bool is_default);
// Gives completed free blocks back to the device until at most keep bytes stay reserved.
void trim_pool(const PoolPtr &pool, uint64_t keep);
// What the driver does by itself when the host has synchronized.
void trim_pools_after_sync(int device);
void drop_free_blocks_of(const Stream &stream);

} // namespace sim
