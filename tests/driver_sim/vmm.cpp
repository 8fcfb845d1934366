#include "vmm.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace sim {

VirtualMemory &virtual_memory() {
    static VirtualMemory *instance = new VirtualMemory; // never destroyed: workers outlive static destruction
    return *instance;
}

const HiddenRange *find_reservation(CUdeviceptr address) {
    const auto &all = virtual_memory().reservations;
    auto it = all.upper_bound(address);
    if (it == all.begin()) return nullptr;
    --it;
    return address - it->first < it->second.length ? &it->second : nullptr;
}

namespace {

constexpr uint64_t kHostPage = 4096;

bool is_granular(uint64_t value) { return value % kGranularity == 0; }

// One that was given back, at the wished address if it is among them, else a new one. Throws Fail.
HiddenRange take_reservation(uint64_t length, uint64_t alignment, CUdeviceptr wanted) {
    auto &idle = virtual_memory().idle;
    auto best = idle.end();
    for (auto it = idle.begin(); it != idle.end(); ++it) {
        if (it->length != length || it->base % alignment) continue;
        if (best == idle.end() || it->base == wanted) best = it;
    }
    HiddenRange range;
    if (best != idle.end()) {
        range = *best;
        idle.erase(best);
    } else if (!reserve_hidden(length, std::max(alignment, kGranularity), &range)) {
        throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    }
    return range;
}

void check_physical_props(Call &call, const CUmemAllocationProp &props) {
    constexpr unsigned kShareable = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
    if (props.type != CU_MEM_ALLOCATION_TYPE_PINNED || props.location.type == CU_MEM_LOCATION_TYPE_INVALID ||
        (props.requestedHandleTypes & ~kShareable))
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (props.location.type != CU_MEM_LOCATION_TYPE_DEVICE) throw Fail{CUDA_ERROR_NOT_SUPPORTED};
    call.device(props.location.id);
}

PhysicalPtr find_physical(Call &call, CUmemGenericAllocationHandle handle) {
    call.record.handle = handle;
    PhysicalPtr found = virtual_memory().physical.find(reinterpret_cast<void *>(handle));
    if (found && found->references) return found;
    if (found || virtual_memory().physical.was_destroyed(reinterpret_cast<void *>(handle)))
        violation(call.name(), "memory handle was released", handle);
    throw Fail{CUDA_ERROR_INVALID_VALUE};
}

PhysicalPtr make_physical(Call &call, size_t nbytes, const CUmemAllocationProp &props) {
    Device &device = call.device(props.location.id);
    if (nbytes > device.total - device.used) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    auto memory = std::make_shared<Physical>();
    memory->id = world().next_id++;
    memory->props = props;
    memory->nbytes = nbytes;
    memory->references = 1;
    memory->file = memfd_create("sim-physical", MFD_CLOEXEC);
    if (memory->file < 0 || ftruncate(memory->file, static_cast<off_t>(nbytes)) != 0) {
        std::perror("driver_sim: no file for physical memory");
        std::abort();
    }
    if (world().settings.poison) {
        void *bytes = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->file, 0);
        if (bytes != MAP_FAILED) {
            fill_edges(static_cast<char *>(bytes), nbytes, kFresh);
            munmap(bytes, nbytes);
        }
    }
    device.used += nbytes;
    memory->handle = virtual_memory().physical.add(memory);
    return memory;
}

void free_if_unused(const PhysicalPtr &memory) {
    if (memory->references || memory->mappings) return;
    close(memory->file);
    world().devices[memory->device()]->used -= memory->nbytes;
    virtual_memory().physical.remove(reinterpret_cast<void *>(memory->handle));
}

// The bytes behind [address, address + nbytes): those of a file, or none of their own.
void show_bytes(CUdeviceptr address, size_t nbytes, int file) {
    int flags = MAP_FIXED | MAP_NORESERVE | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    if (mmap(backing(address), nbytes, PROT_READ | PROT_WRITE, flags, file, 0) == MAP_FAILED) {
        std::perror("driver_sim: cannot map physical memory");
        std::abort();
    }
}

bool is_reserved(CUdeviceptr address, size_t nbytes) {
    const HiddenRange *range = find_reservation(address);
    return range && nbytes <= range->length - (address - range->base);
}

bool overlaps_mapping(CUdeviceptr address, size_t nbytes) {
    auto next = world().host_view.lower_bound(address);
    if (next != world().host_view.end() && next->first < address + nbytes) return true;
    return find_allocation(world().host_view, address, 0) != nullptr;
}

// The mappings that make up the range exactly, first to last. Throws Fail.
std::vector<AllocationPtr> whole_mappings(Call &call, CUdeviceptr address, size_t nbytes) {
    call.record.handle = address;
    call.record.nbytes = nbytes;
    if (!nbytes || !is_granular(address) || !is_granular(nbytes)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    std::vector<AllocationPtr> found = find_range(world().host_view, address, nbytes);
    bool exact = !found.empty() && found.front()->kind == MemoryKind::mapped && found.front()->base == address &&
                 found.back()->base + found.back()->nbytes == address + nbytes;
    if (exact) return found;
    violation(call.name(), "the range is not made of whole mappings", address);
    throw Fail{CUDA_ERROR_INVALID_VALUE};
}

// The mappings of a reserved range, which may have holes, but cuts none of them. Throws Fail.
std::vector<AllocationPtr> mappings_within(Call &call, CUdeviceptr address, size_t nbytes) {
    call.record.handle = address;
    call.record.nbytes = nbytes;
    if (!nbytes || !is_granular(address) || !is_granular(nbytes) || !is_reserved(address, nbytes))
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    AllocationPtr before = find_allocation(world().host_view, address, 0);
    bool cut = before && before->base != address;
    std::vector<AllocationPtr> found;
    for (auto it = world().host_view.lower_bound(address);
         it != world().host_view.end() && it->first < address + nbytes; ++it) {
        found.push_back(it->second);
        cut = cut || it->first + it->second->nbytes > address + nbytes;
    }
    if (found.empty()) violation(call.name(), "nothing is mapped there", address);
    if (!cut) return found;
    violation(call.name(), "the range is not made of whole mappings", address);
    throw Fail{CUDA_ERROR_INVALID_VALUE};
}

AllocationPtr mapping_at(Call &call, CUdeviceptr address) {
    call.record.handle = address;
    AllocationPtr found = find_allocation(world().host_view, address, 0);
    if (!found || found->kind != MemoryKind::mapped) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return found;
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *props,
                                               CUmemAllocationGranularity_flags option) {
    return entry("cuMemGetAllocationGranularity", kInit, [&](Call &) {
        require(props); // and nobody looks at them
        if (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        require(granularity) = kGranularity;
    });
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *out, size_t nbytes, size_t alignment, CUdeviceptr wanted,
                                     unsigned long long flags) {
    return entry("cuMemAddressReserve", kInit, [&](Call &call) {
        call.record.nbytes = nbytes;
        require(out);
        bool power_of_two = (alignment & (alignment - 1)) == 0;
        if (!nbytes || !is_granular(nbytes) || wanted % kHostPage || !power_of_two || flags)
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        HiddenRange range = take_reservation(nbytes, std::max<size_t>(alignment, 1), wanted); // only a hint
        virtual_memory().reservations[range.base] = range;
        *out = range.base;
        call.record.handle = range.base;
    });
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    return entry("cuMemAddressFree", kInit, [&](Call &call) {
        call.record.handle = address;
        call.record.nbytes = nbytes;
        VirtualMemory &v = virtual_memory();
        auto it = v.reservations.find(address);
        if (it == v.reservations.end() || it->second.length != nbytes) {
            violation(call.name(), "no reservation of that base and size", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        if (overlaps_mapping(address, nbytes)) {
            violation(call.name(), "the reservation still holds mappings", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        v.idle.push_back(it->second);
        v.reservations.erase(it);
    });
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *out, size_t nbytes, const CUmemAllocationProp *props,
                             unsigned long long flags) {
    return entry("cuMemCreate", kInit, [&](Call &call) {
        call.record.nbytes = nbytes;
        require(out);
        check_physical_props(call, require(props));
        if (!nbytes || !is_granular(nbytes) || flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        *out = make_physical(call, nbytes, *props)->handle;
        call.record.handle = *out;
    });
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    return entry("cuMemRelease", kInit, [&](Call &call) {
        PhysicalPtr memory = find_physical(call, handle);
        memory->references--;
        free_if_unused(memory);
    });
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
    return entry("cuMemRetainAllocationHandle", kInit, [&](Call &call) {
        require(out);
        PhysicalPtr memory = mapping_at(call, reinterpret_cast<CUdeviceptr>(address))->physical;
        memory->references++;
        *out = memory->handle;
    });
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *props,
                                                        CUmemGenericAllocationHandle handle) {
    return entry("cuMemGetAllocationPropertiesFromHandle", kInit,
                 [&](Call &call) { require(props) = find_physical(call, handle)->props; });
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    return entry("cuMemMap", kInit, [&](Call &call) {
        PhysicalPtr memory = find_physical(call, handle);
        call.record.handle = address;
        call.record.nbytes = nbytes;
        call.record.device = memory->device();
        if (!nbytes || !is_granular(address) || flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        // All of the memory, or nothing.
        if (offset || nbytes != memory->nbytes) throw Fail{CUDA_ERROR_NOT_SUPPORTED};
        if (!is_reserved(address, nbytes)) {
            violation(call.name(), "the range is not reserved", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        if (overlaps_mapping(address, nbytes)) {
            violation(call.name(), "a part of the range is mapped already", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        show_bytes(address, nbytes, memory->file);
        auto mapping = std::make_shared<Allocation>();
        mapping->id = world().next_id++;
        mapping->kind = MemoryKind::mapped;
        mapping->base = address;
        mapping->nbytes = mapping->reserved = nbytes;
        mapping->device = memory->device();
        mapping->physical = memory;
        memory->mappings++;
        world().host_view[address] = mapping;
        world().device_view[address] = mapping;
    });
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    return entry("cuMemUnmap", kInit, [&](Call &call) {
        // Unlike a free, it waits for nothing: work still queued on the range faults.
        for (const AllocationPtr &mapping : mappings_within(call, address, nbytes)) {
            world().host_view.erase(mapping->base);
            world().device_view.erase(mapping->base);
            world().freed[mapping->base] = mapping;
            show_bytes(mapping->base, mapping->nbytes, -1);
            PhysicalPtr memory = std::move(mapping->physical);
            memory->mappings--;
            free_if_unused(memory);
        }
    });
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *wanted, size_t count) {
    return entry("cuMemSetAccess", kInit, [&](Call &call) {
        std::vector<AllocationPtr> mappings = whole_mappings(call, address, nbytes);
        if (!count) throw Fail{CUDA_ERROR_INVALID_VALUE};
        require(wanted);
        for (size_t i = 0; i < count; ++i) {
            if (wanted[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) throw Fail{CUDA_ERROR_INVALID_VALUE};
            int device = wanted[i].location.id;
            if (device < 0 || static_cast<size_t>(device) >= world().devices.size())
                throw Fail{CUDA_ERROR_INVALID_VALUE};
            for (const AllocationPtr &mapping : mappings)
                if (device != mapping->device && !devices_are_peers(device, mapping->device))
                    throw Fail{CUDA_ERROR_INVALID_DEVICE};
            bool known = wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ||
                         wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                         wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            if (!known) throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        for (const AllocationPtr &mapping : mappings)
            for (size_t i = 0; i < count; ++i) {
                if (wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) mapping->access.erase(wanted[i].location.id);
                else mapping->access[wanted[i].location.id] = wanted[i].flags;
            }
    });
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    return entry("cuMemGetAccess", kInit, [&](Call &call) {
        require(flags);
        if (require(location).type != CU_MEM_LOCATION_TYPE_DEVICE) throw Fail{CUDA_ERROR_INVALID_VALUE};
        call.device(location->id);
        AllocationPtr mapping = mapping_at(call, address);
        auto granted = mapping->access.find(location->id);
        *flags = granted == mapping->access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : granted->second;
    });
}
