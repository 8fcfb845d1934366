// Stream-ordered pools: memory of the device in chunks, of which freed blocks are reused along stream order, or once
// their free is done.
#pragma once

#include "stream.h"

namespace sim {

struct FreeBlock {
    CUdeviceptr base;
    size_t nbytes;
    StreamPtr stream; // where it was freed, and when; null if the host knows that this is over
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
    uint64_t used = 0, used_high = 0; // as asked for, without what rounding adds
    std::set<int> readers;            // devices given access, the own one left out
    std::map<CUdeviceptr, size_t> chunks;
    CUdeviceptr first_chunk = 0; // where the first one was: an emptied pool begins there again
    std::vector<FreeBlock> free_blocks;
};

PoolPtr make_pool(int device, bool is_default);
// Gives chunks whose frees are known to be over back to the device, as long as keep bytes stay reserved.
void trim_pool(Pool &pool, uint64_t keep);
// What the driver does by itself when the host has waited for a place of a stream, or for a whole context: only now
// it knows that frees before it are over, and applies the thresholds.
void host_waited_for(const Stream &stream, uint64_t seq);
void host_waited_for(const Context &context);
// A free that waits for nothing, and is over at once.
void free_into_pool(const AllocationPtr &allocation);
// Memory for what comes next in the stream, and what that has to wait for besides. Throws Fail.
AllocationPtr take_block(const PoolPtr &pool, const StreamPtr &stream, size_t nbytes,
                         std::vector<Dependency> &dependencies);
// The stream work of an allocation and of its free.
Operation allocation_work(const AllocationPtr &allocation);
Operation free_work(const AllocationPtr &allocation);
// What a free changes at once for the host, which has put it at this place of the stream.
void note_freed(const AllocationPtr &allocation, const StreamPtr &stream, uint64_t seq);

} // namespace sim
