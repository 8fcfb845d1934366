// Allocations, the two views of memory, and the pools.
#pragma once

#include "call.h"
#include "device.h"
#include "stream.h"

namespace sim {

struct Physical;

enum class MemoryKind { device, pool, managed, pinned, registered, mapped };

struct Allocation {
    uint64_t id = 0;
    MemoryKind kind = MemoryKind::device;
    CUdeviceptr base = 0;
    size_t nbytes = 0;
    size_t reserved = 0; // what it takes from the address range
    int device = 0;
    ContextPtr context; // null for pool memory, which belongs to no context
    PoolPtr pool;
    unsigned flags = 0;
    bool free_queued = false; // freed by the host, maybe not yet by the device
    bool freed_at_once = false;
    // Memory of a graph keeps its address; launches and frees make it live and take it away.
    bool from_graph = false;
    bool graph_live = false;
    size_t graph_frees = 0;                  // queued and not done
    std::shared_ptr<Physical> physical;      // what a mapping shows
    std::map<int, CUmemAccess_flags> access; // of a mapping, by device: none until it is granted
};

const char *kind_name(MemoryKind kind);

// The allocation that holds [address, address + nbytes), or null.
AllocationPtr find_allocation(const std::map<uint64_t, AllocationPtr> &view, CUdeviceptr address, size_t nbytes);
// The allocations that hold it: mappings that touch each other serve as one. Empty if a part is missing.
std::vector<AllocationPtr> find_range(const std::map<uint64_t, AllocationPtr> &view, CUdeviceptr address,
                                      size_t nbytes);
bool is_device_address(CUdeviceptr address);
// Whether a device has rights on an allocation for its kernels; for a mapping, also for its copies.
bool device_may_touch(const Context &context, const Allocation &allocation, bool write);

// cuMemAlloc memory of the device: accounted, addressed, filled with a pattern. Throws Fail.
AllocationPtr allocate_device(Device &device, size_t nbytes);
void release_device(Device &device, const AllocationPtr &allocation);
void forget_memory_of(const ContextPtr &context);

// Takes host-visible memory away; its addresses are never given out again, so that a stale use shows.
void release_host_visible(const AllocationPtr &allocation);

// Where the bytes of a device or host address really are; no checks.
void *backing(CUdeviceptr address);
// Same, after a check that a host call may name the range. Throws Fail(INVALID_VALUE).
void check_host_range(const char *call, CUdeviceptr address, size_t nbytes);
// Copies reach the memory of every device, but not its pools: those open to whom they are told. Fills and single words
// go by the rules for kernels. Throws Fail(INVALID_VALUE).
enum class Access { kernel, copy };
void require_access(const Context &context, CUdeviceptr address, size_t nbytes, Access access);

// Pages in the middle of a freed block go back to the machine.
void release_pages(CUdeviceptr address, size_t nbytes);
void poison(CUdeviceptr address, size_t nbytes, unsigned char value);
void fill_edges(char *bytes, size_t nbytes, unsigned char value);

constexpr unsigned char kFresh = 0xCB; // never written
constexpr unsigned char kStale = 0xDD; // freed

} // namespace sim
