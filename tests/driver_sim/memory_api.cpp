// Entry points of memory that is not stream-ordered: device, managed, pinned, registered.
#include <sys/mman.h>

#include "capture.h"
#include "memory.h"
#include "pool.h"

using namespace sim;

namespace {

Device &current_device(Call &call) { return *world().devices[call.context().device]; }

void publish(Call &call, const AllocationPtr &allocation) {
    allocation->context = call.context_ptr();
    allocation->device = call.context().device;
    world().host_view[allocation->base] = allocation;
    world().device_view[allocation->base] = allocation;
    call.record.handle = allocation->base;
    call.record.nbytes = allocation->nbytes;
    call.record.kind = kind_name(allocation->kind);
    call.record.device = allocation->device;
}

// Host-visible memory has one address for both sides.
AllocationPtr allocate_host_visible(Call &call, MemoryKind kind, size_t nbytes, unsigned flags) {
    if (nbytes == 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
    size_t rounded = (nbytes + 4095) & ~size_t{4095};
    if (rounded < nbytes) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    void *p = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw Fail{CUDA_ERROR_OUT_OF_MEMORY};
    auto allocation = std::make_shared<Allocation>();
    allocation->id = world().next_id++;
    allocation->kind = kind;
    allocation->base = reinterpret_cast<CUdeviceptr>(p);
    allocation->nbytes = nbytes;
    allocation->reserved = rounded;
    allocation->flags = flags;
    publish(call, allocation);
    return allocation;
}

// A free by its base address, of the kinds that the call accepts.
AllocationPtr find_to_free(Call &call, CUdeviceptr address, bool host) {
    World &w = world();
    auto it = w.host_view.find(address);
    if (it == w.host_view.end()) {
        if (find_allocation(w.freed, address, 0)) violation(call.name(), "double free", address);
        else violation(call.name(), "free of an address that is no allocation's base", address);
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    AllocationPtr found = it->second;
    if (found->from_graph ? !found->graph_live : found->free_queued) {
        violation(call.name(), "double free: already freed in stream order", address);
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    bool is_host = found->kind == MemoryKind::pinned;
    bool freed_otherwise = found->kind == MemoryKind::registered || found->kind == MemoryKind::mapped;
    if (is_host != host || freed_otherwise) {
        violation(call.name(), std::string("wrong free for ") + kind_name(found->kind) + " memory", address);
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    call.record.nbytes = found->nbytes;
    call.record.kind = kind_name(found->kind);
    call.record.device = found->device;
    return found;
}

// These frees wait for everything the device still does.
void free_now(Call &call, const AllocationPtr &found) {
    World &w = world();
    if (found->kind == MemoryKind::pool && !found->from_graph) {
        // The caller is taken to have waited.
        free_into_pool(found);
        return;
    }
    // A second free meanwhile is a double free.
    if (found->from_graph) found->graph_live = false;
    else found->free_queued = true;
    wait_for_device(call.guard(), call.name(), found->device);
    call.notice_fault();
    w.device_view.erase(found->base);
    if (found->from_graph) { // the address stays the graph's
        poison(found->base, found->nbytes, kStale);
        return;
    }
    w.host_view.erase(found->base);
    Device &device = *w.devices[found->device];
    if (found->kind == MemoryKind::device) {
        release_device(device, found);
    } else {
        release_host_visible(found);
    }
}

void sync_for_host_allocation(Call &call) {
    if (world().settings.host_alloc_syncs) wait_for_context(call.guard(), call.name(), call.context_ptr());
}

void unregister_host(Call &call, void *p) {
    CUdeviceptr address = reinterpret_cast<CUdeviceptr>(p);
    call.record.handle = address;
    auto it = world().host_view.find(address);
    if (it == world().host_view.end()) throw Fail{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED};
    AllocationPtr found = it->second;
    if (found->kind != MemoryKind::registered) throw Fail{CUDA_ERROR_INVALID_VALUE};
    wait_for_context(call.guard(), call.name(), found->context);
    world().host_view.erase(address);
    world().device_view.erase(address);
}

} // namespace

CUresult CUDAAPI cuMemGetInfo(size_t *free, size_t *total) {
    return entry("cuMemGetInfo", kContext, [&](Call &call) {
        if (free) *free = free_memory(current_device(call));
        if (total) *total = current_device(call).total;
    });
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *out, size_t nbytes) {
    return entry("cuMemAlloc", kContext | kUnsafe, [&](Call &call) {
        call.record.nbytes = nbytes;
        require(out);
        AllocationPtr allocation = allocate_device(current_device(call), nbytes);
        publish(call, allocation);
        *out = allocation->base;
    });
}

CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element) {
    return entry("cuMemAllocPitch", kContext | kUnsafe, [&](Call &call) {
        require(out);
        require(pitch);
        if (!width || !height || (element != 4 && element != 8 && element != 16)) throw Fail{CUDA_ERROR_INVALID_VALUE};
        *pitch = (width + 511) & ~size_t{511};
        AllocationPtr allocation = allocate_device(current_device(call), *pitch * height);
        publish(call, allocation);
        *out = allocation->base;
    });
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *out, size_t nbytes, unsigned flags) {
    return entry("cuMemAllocManaged", kContext | kUnsafe, [&](Call &call) {
        call.record.nbytes = nbytes;
        require(out);
        if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) throw Fail{CUDA_ERROR_INVALID_VALUE};
        *out = allocate_host_visible(call, MemoryKind::managed, nbytes, flags)->base;
    });
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
    return entry("cuMemFree", kNotDead | kUnsafe, [&](Call &call) {
        call.record.handle = address;
        if (!address) return;
        free_now(call, find_to_free(call, address, false));
    });
}

CUresult CUDAAPI cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) {
    return entry("cuMemHostAlloc", kContext | kUnsafe, [&](Call &call) {
        call.record.nbytes = nbytes;
        require(out);
        constexpr unsigned kKnown =
            CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
        if (flags & ~kKnown) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (nbytes == 0) {
            *out = nullptr;
            return;
        }
        sync_for_host_allocation(call);
        *out = reinterpret_cast<void *>(allocate_host_visible(call, MemoryKind::pinned, nbytes, flags)->base);
    });
}

CUresult CUDAAPI cuMemAllocHost(void **out, size_t nbytes) {
    return entry("cuMemAllocHost", kContext | kUnsafe, [&](Call &call) {
        call.record.nbytes = nbytes;
        require(out);
        if (nbytes == 0) {
            *out = nullptr;
            return;
        }
        sync_for_host_allocation(call);
        *out = reinterpret_cast<void *>(allocate_host_visible(call, MemoryKind::pinned, nbytes, 0)->base);
    });
}

CUresult CUDAAPI cuMemFreeHost(void *p) {
    return entry("cuMemFreeHost", kNotDead | kUnsafe, [&](Call &call) {
        call.record.handle = reinterpret_cast<uint64_t>(p);
        if (!p) return;
        free_now(call, find_to_free(call, reinterpret_cast<CUdeviceptr>(p), true));
    });
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *out, void *p, unsigned flags) {
    return entry("cuMemHostGetDevicePointer", kContext, [&](Call &) {
        if (flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        AllocationPtr found = find_allocation(world().host_view, reinterpret_cast<CUdeviceptr>(p), 0);
        if (!found || (found->kind != MemoryKind::pinned && found->kind != MemoryKind::registered))
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        require(out) = reinterpret_cast<CUdeviceptr>(p);
    });
}

CUresult CUDAAPI cuMemHostGetFlags(unsigned *flags, void *p) {
    return entry("cuMemHostGetFlags", kContext, [&](Call &) {
        AllocationPtr found = find_allocation(world().host_view, reinterpret_cast<CUdeviceptr>(p), 0);
        bool pinned = found && found->kind == MemoryKind::pinned;
        if (!pinned && !(found && found->kind == MemoryKind::registered)) throw Fail{CUDA_ERROR_INVALID_VALUE};
        // Under unified addressing all of it is mapped, and what the driver allocated is portable, whatever was asked.
        require(flags) = found->flags | CU_MEMHOSTALLOC_DEVICEMAP | (pinned ? CU_MEMHOSTALLOC_PORTABLE : 0);
    });
}

CUresult CUDAAPI cuMemHostRegister(void *p, size_t nbytes, unsigned flags) {
    return entry("cuMemHostRegister", kContext | kUnsafe, [&](Call &call) {
        call.record.nbytes = nbytes;
        CUdeviceptr address = reinterpret_cast<CUdeviceptr>(p);
        constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                    CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
        if (!p || nbytes == 0 || (flags & ~kKnown)) throw Fail{CUDA_ERROR_INVALID_VALUE};
        auto next = world().host_view.lower_bound(address);
        AllocationPtr known = find_allocation(world().host_view, address, 0);
        if (known && known->kind != MemoryKind::registered) throw Fail{CUDA_ERROR_INVALID_VALUE};
        bool overlaps = known != nullptr || (next != world().host_view.end() && next->first < address + nbytes);
        if (overlaps) throw Fail{CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED};
        auto allocation = std::make_shared<Allocation>();
        allocation->id = world().next_id++;
        allocation->kind = MemoryKind::registered;
        allocation->base = address;
        allocation->nbytes = nbytes;
        allocation->flags = flags;
        publish(call, allocation);
    });
}

CUresult CUDAAPI cuMemHostUnregister(void *p) {
    return entry("cuMemHostUnregister", kNotDead | kUnsafe, [&](Call &call) { unregister_host(call, p); });
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    return entry("cuMemGetAddressRange", kContext, [&](Call &) {
        AllocationPtr found = find_allocation(world().host_view, address, 0);
        if (!found) throw Fail{CUDA_ERROR_NOT_FOUND};
        if (base) *base = found->base;
        if (size) *size = found->nbytes;
    });
}
