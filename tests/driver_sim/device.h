// Devices: identity, attributes, the address ranges of their memory, their primary context.
#pragma once

#include "call.h"

namespace sim {

// First-fit allocator of addresses inside one device's range; neighbours coalesce.
class AddressSpace {
  public:
    void reset(uint64_t base, uint64_t length);
    uint64_t take(uint64_t nbytes, uint64_t alignment = 1); // 0 when nothing fits
    bool take_at(uint64_t base, uint64_t nbytes);           // false if a part of it is taken
    // For what may grow: in the upper half, far from everything else there.
    uint64_t take_apart(uint64_t nbytes, uint64_t alignment);
    void give(uint64_t base, uint64_t nbytes);
    bool contains(uint64_t address) const { return address - base_ < length_; }
    uint64_t base() const { return base_; }
    uint64_t length() const { return length_; }

  private:
    void carve(std::map<uint64_t, uint64_t>::iterator hole, uint64_t base, uint64_t nbytes);

    uint64_t base_ = 0;
    uint64_t length_ = 0;
    std::map<uint64_t, uint64_t> free_; // base -> length
};

// Address space whose bytes the host reaches only through a second mapping, unless the settings say otherwise.
struct HiddenRange {
    uint64_t base = 0;
    uint64_t length = 0;
    int64_t backing = 0; // address + backing = where the bytes really are
};
bool reserve_hidden(uint64_t length, uint64_t alignment, HiddenRange *range); // false: no such room

struct Device {
    int ordinal = 0;
    CUuuid uuid{};
    uint64_t total = 0;
    uint64_t used = 0;
    AddressSpace addresses; // the device addresses handed out
    int64_t backing = 0;    // device address + backing = where the bytes really are
    ContextPtr primary;     // one object for ever; alive and id change
    int primary_retains = 0;
    unsigned primary_flags = 0;
    PoolPtr default_pool;
    PoolPtr current_pool;
};

bool devices_are_peers(int from, int to);
int device_attribute(const Device &device, CUdevice_attribute attribute); // throws Fail
void create_devices(World &w);

// Contexts (context.cpp).
ContextPtr make_context(int device, bool primary, unsigned flags);
void activate_context(const ContextPtr &context);
// Drops the streams, events, modules and memory of a context; pending work is finished first.
void destroy_context(Guard &guard, const ContextPtr &context);

// The device's free memory as cuMemGetInfo tells it.
uint64_t free_memory(const Device &device);

} // namespace sim
