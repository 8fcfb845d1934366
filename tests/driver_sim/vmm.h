// Virtual memory management: reservations of addresses, physical memory, and the mappings between them.
#pragma once

#include "device.h"
#include "memory.h"

namespace sim {

// What cuMemCreate makes. It lives while a handle or a mapping refers to it.
struct Physical {
    CUmemGenericAllocationHandle handle = 0;
    uint64_t id = 0;
    CUmemAllocationProp props{};
    size_t nbytes = 0;
    uint64_t references = 0; // of its handle; at zero the handle is stale, the memory maybe not
    size_t mappings = 0;
    int file = -1; // the bytes: the same in every mapping

    int device() const { return props.location.id; }
};

using PhysicalPtr = std::shared_ptr<Physical>;

struct VirtualMemory {
    std::map<uint64_t, HiddenRange> reservations; // by base
    std::vector<HiddenRange> idle;                // given back, and never to the system: work may still run on them
    HandleTable<Physical> physical{13};
};

VirtualMemory &virtual_memory();
// The reservation that holds an address, or null.
const HiddenRange *find_reservation(CUdeviceptr address);

constexpr uint64_t kGranularity = uint64_t{2} << 20;

} // namespace sim
