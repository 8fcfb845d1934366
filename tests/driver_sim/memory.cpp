#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "pool.h"
#include "vmm.h"

namespace sim {

const char *kind_name(MemoryKind kind) {
    switch (kind) {
    case MemoryKind::device: return "device";
    case MemoryKind::pool: return "pool";
    case MemoryKind::managed: return "managed";
    case MemoryKind::pinned: return "pinned";
    case MemoryKind::registered: return "registered";
    case MemoryKind::mapped: return "mapped";
    }
    return "?";
}

void AddressSpace::reset(uint64_t base, uint64_t length) {
    base_ = base;
    length_ = length;
    free_.clear();
    free_[base] = length;
}

void AddressSpace::carve(std::map<uint64_t, uint64_t>::iterator hole, uint64_t base, uint64_t nbytes) {
    uint64_t begin = hole->first, end = hole->first + hole->second;
    free_.erase(hole);
    if (base > begin) free_[begin] = base - begin;
    if (end > base + nbytes) free_[base + nbytes] = end - (base + nbytes);
}

uint64_t AddressSpace::take(uint64_t nbytes, uint64_t alignment) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
        uint64_t base = (it->first + alignment - 1) / alignment * alignment;
        uint64_t skipped = base - it->first;
        if (it->second < skipped || it->second - skipped < nbytes) continue;
        carve(it, base, nbytes);
        return base;
    }
    return 0;
}

bool AddressSpace::take_at(uint64_t base, uint64_t nbytes) {
    auto it = free_.upper_bound(base);
    if (it == free_.begin()) return false;
    --it;
    uint64_t skipped = base - it->first;
    if (it->second < skipped || it->second - skipped < nbytes) return false;
    carve(it, base, nbytes);
    return true;
}

uint64_t AddressSpace::take_apart(uint64_t nbytes, uint64_t alignment) {
    uint64_t middle = base_ + length_ / 2, widest = 0, at = 0;
    for (const auto &[base, length] : free_) {
        uint64_t begin = std::max(base, middle), end = base + length;
        if (end <= begin || end - begin <= widest) continue;
        widest = end - begin;
        at = begin == middle ? begin : begin + widest / 2;
    }
    at = (at + alignment - 1) / alignment * alignment;
    return at && take_at(at, nbytes) ? at : take(nbytes, alignment);
}

void AddressSpace::give(uint64_t base, uint64_t nbytes) {
    auto next = free_.lower_bound(base);
    if (next != free_.end() && base + nbytes == next->first) {
        nbytes += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == base) {
            before->second += nbytes;
            return;
        }
    }
    free_[base] = nbytes;
}

AllocationPtr find_allocation(const std::map<uint64_t, AllocationPtr> &view, CUdeviceptr address, size_t nbytes) {
    auto it = view.upper_bound(address);
    if (it == view.begin()) return nullptr;
    const AllocationPtr &found = std::prev(it)->second;
    uint64_t offset = address - found->base;
    if (offset > found->nbytes || nbytes > found->nbytes - offset) return nullptr;
    if (offset == found->nbytes && nbytes == 0 && found->nbytes != 0) return nullptr;
    return found;
}

std::vector<AllocationPtr> find_range(const std::map<uint64_t, AllocationPtr> &view, CUdeviceptr address,
                                      size_t nbytes) {
    if (AllocationPtr whole = find_allocation(view, address, nbytes)) return {whole};
    std::vector<AllocationPtr> pieces;
    for (uint64_t done = 0; done < nbytes;) {
        AllocationPtr piece = find_allocation(view, address + done, 0);
        if (!piece || piece->kind != MemoryKind::mapped) return {};
        done = piece->base + piece->nbytes - address;
        pieces.push_back(std::move(piece));
    }
    return pieces;
}

bool is_device_address(CUdeviceptr address) {
    for (const auto &device : world().devices)
        if (device->addresses.contains(address)) return true;
    return find_reservation(address) != nullptr;
}

void *backing(CUdeviceptr address) {
    for (const auto &device : world().devices)
        if (device->addresses.contains(address)) return reinterpret_cast<void *>(address + device->backing);
    if (const HiddenRange *reserved = find_reservation(address))
        return reinterpret_cast<void *>(address + reserved->backing);
    return reinterpret_cast<void *>(address);
}

void poison(CUdeviceptr address, size_t nbytes, unsigned char value) {
    if (world().settings.poison) fill_edges(static_cast<char *>(backing(address)), nbytes, value);
}

void fill_edges(char *bytes, size_t nbytes, unsigned char value) {
    // Large blocks only at their ends: a pattern costs real pages, and one edge is enough to see.
    constexpr size_t kEdge = size_t{1} << 20;
    if (nbytes <= 2 * kEdge) {
        std::memset(bytes, value, nbytes);
        return;
    }
    std::memset(bytes, value, kEdge);
    std::memset(bytes + nbytes - kEdge, value, kEdge);
}

void release_pages(CUdeviceptr address, size_t nbytes) {
    constexpr uint64_t kPage = 4096;
    uint64_t begin = (reinterpret_cast<uint64_t>(backing(address)) + kPage - 1) & ~(kPage - 1);
    uint64_t end = (reinterpret_cast<uint64_t>(backing(address)) + nbytes) & ~(kPage - 1);
    if (end > begin + (uint64_t{4} << 20)) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
}

namespace {

std::string describe_miss(CUdeviceptr address, size_t nbytes) {
    char text[160];
    std::snprintf(text, sizeof text, "[%#llx, +%zu)", static_cast<unsigned long long>(address), nbytes);
    std::string out = text;
    if (AllocationPtr over = find_allocation(world().device_view, address, 0))
        return out + " runs past the end of a " + kind_name(over->kind) + " allocation of " +
               std::to_string(over->nbytes) + " bytes";
    if (AllocationPtr host = find_allocation(world().host_view, address, 0))
        return out + " is not allocated yet in stream order";
    if (AllocationPtr old = find_allocation(world().freed, address, 0))
        return out + (old->kind == MemoryKind::mapped ? " was unmapped (" : " was freed (") + kind_name(old->kind) +
               " allocation " + std::to_string(old->id) + ")";
    if (find_reservation(address)) return out + " has nothing mapped";
    return out + " is no device memory";
}

} // namespace

bool device_may_touch(const Context &context, const Allocation &allocation, bool write) {
    if (allocation.kind == MemoryKind::mapped) {
        auto granted = allocation.access.find(context.device);
        if (granted == allocation.access.end()) return false;
        return granted->second == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
               (!write && granted->second == CU_MEM_ACCESS_FLAGS_PROT_READ);
    }
    if (allocation.device == context.device) return true;
    switch (allocation.kind) {
    case MemoryKind::device: return context.peers.count(allocation.device) != 0;
    case MemoryKind::pool: return allocation.pool->readers.count(context.device) != 0;
    default: return true;
    }
}

void *Exec::at(CUdeviceptr address, size_t nbytes, bool write) const {
    Guard guard(world().lock);
    if (nbytes == 0) return backing(address);
    std::vector<AllocationPtr> found = find_range(world().device_view, address, nbytes);
    if (found.empty()) throw Fault{CUDA_ERROR_ILLEGAL_ADDRESS, what_ + ": " + describe_miss(address, nbytes)};
    for (const AllocationPtr &piece : found)
        if (!device_may_touch(*context_, *piece, write))
            throw Fault{CUDA_ERROR_ILLEGAL_ADDRESS, what_ + ": device " + std::to_string(context_->device) +
                                                        " has no access to " + kind_name(piece->kind) +
                                                        " memory of device " + std::to_string(piece->device)};
    return backing(address);
}

AllocationPtr allocate_device(Device &device, size_t nbytes) {
    constexpr uint64_t kGranule = 512;
    if (nbytes == 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (nbytes > device.total) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    uint64_t reserved = (nbytes + kGranule - 1) & ~(kGranule - 1);
    if (device.used + reserved > device.total) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    uint64_t base = device.addresses.take(reserved);
    if (!base) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    device.used += reserved;
    auto allocation = std::make_shared<Allocation>();
    allocation->id = world().next_id++;
    allocation->base = base;
    allocation->nbytes = nbytes;
    allocation->reserved = reserved;
    allocation->device = device.ordinal;
    poison(base, nbytes, kFresh);
    return allocation;
}

void release_device(Device &device, const AllocationPtr &allocation) {
    poison(allocation->base, allocation->nbytes, kStale);
    release_pages(allocation->base, allocation->nbytes);
    device.used -= allocation->reserved;
    device.addresses.give(allocation->base, allocation->reserved);
    world().freed[allocation->base] = allocation;
}

void forget_memory_of(const ContextPtr &context) {
    World &w = world();
    for (auto it = w.host_view.begin(); it != w.host_view.end();) {
        AllocationPtr allocation = it->second;
        // Memory of pools belongs to no context, and stays.
        if (allocation->context != context) {
            ++it;
            continue;
        }
        it = w.host_view.erase(it);
        w.device_view.erase(allocation->base);
        Device &device = *w.devices[allocation->device];
        switch (allocation->kind) {
        case MemoryKind::device: release_device(device, allocation); break;
        case MemoryKind::managed:
        case MemoryKind::pinned: release_host_visible(allocation); break;
        case MemoryKind::pool:
        case MemoryKind::registered:
        case MemoryKind::mapped: break; // mappings belong to no context
        }
    }
}

void release_host_visible(const AllocationPtr &allocation) {
    mmap(reinterpret_cast<void *>(allocation->base), allocation->reserved, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    world().freed[allocation->base] = allocation;
}

void check_host_range(const char *call, CUdeviceptr address, size_t nbytes) {
    std::vector<AllocationPtr> found = find_range(world().host_view, address, nbytes);
    for (const AllocationPtr &piece : found) {
        if (piece->free_queued) violation(call, "names memory that was freed in stream order", address);
        if (piece->kind == MemoryKind::mapped && piece->access.empty()) {
            violation(call, "names a mapping that no device has access to", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
    }
    if (!found.empty()) return;
    if (find_allocation(world().freed, address, 0)) violation(call, "use after free", address);
    else if (find_allocation(world().host_view, address, 0))
        violation(call, "range of " + std::to_string(nbytes) + " bytes runs past its allocation", address);
    throw Fail{CUDA_ERROR_INVALID_VALUE};
}

void require_access(const Context &context, CUdeviceptr address, size_t nbytes, Access access) {
    for (const AllocationPtr &piece : find_range(world().host_view, address, nbytes)) {
        bool asked = access == Access::kernel || piece->kind == MemoryKind::pool;
        if (asked && !device_may_touch(context, *piece, true)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
}

uint64_t free_memory(const Device &device) { return device.total - device.used; }

} // namespace sim
