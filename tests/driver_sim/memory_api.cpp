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
    if (found->free_queued) {
        violation(call.name(), "double free: already freed in stream order", address);
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    bool is_host = found->kind == MemoryKind::pinned;
    if (is_host != host || found->kind == MemoryKind::registered) {
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
    found->free_queued = true; // a second free meanwhile is a double free
    for (const auto &[handle, context] :
         std::map<uint64_t, ContextPtr>(w.contexts.live().begin(), w.contexts.live().end()))
        if (context->alive && context->device == found->device) wait_for_context(call.guard(), call.name(), context);
    w.host_view.erase(found->base);
    w.device_view.erase(found->base);
    Device &device = *w.devices[found->device];
    if (found->kind == MemoryKind::device) {
        release_device(device, found);
    } else if (found->kind == MemoryKind::pool) {
        Pool &pool = *found->pool;
        pool.used -= found->reserved;
        pool.reserved -= found->reserved;
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
    if (it == world().host_view.end() || it->second->kind != MemoryKind::registered)
        throw Fail{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED};
    AllocationPtr found = it->second;
    wait_for_context(call.guard(), call.name(), call.context_ptr());
    world().host_view.erase(address);
    world().device_view.erase(address);
}

} // namespace

CUresult CUDAAPI cuMemGetInfo(size_t *free, size_t *total) {
    return entry("cuMemGetInfo", kContext, [&](Call &call) {
        require(free) = free_memory(current_device(call));
        require(total) = current_device(call).total;
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

CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned) {
    return entry("cuMemAllocPitch", kContext | kUnsafe, [&](Call &call) {
        require(out);
        require(pitch) = (width + 511) & ~size_t{511};
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
    return entry("cuMemFree", kContext | kUnsafe, [&](Call &call) {
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
        sync_for_host_allocation(call);
        *out = reinterpret_cast<void *>(allocate_host_visible(call, MemoryKind::pinned, nbytes, flags)->base);
    });
}

CUresult CUDAAPI cuMemAllocHost(void **out, size_t nbytes) {
    return entry("cuMemAllocHost", kContext | kUnsafe, [&](Call &call) {
        call.record.nbytes = nbytes;
        require(out);
        sync_for_host_allocation(call);
        *out = reinterpret_cast<void *>(allocate_host_visible(call, MemoryKind::pinned, nbytes, 0)->base);
    });
}

CUresult CUDAAPI cuMemFreeHost(void *p) {
    return entry("cuMemFreeHost", kContext | kUnsafe, [&](Call &call) {
        call.record.handle = reinterpret_cast<uint64_t>(p);
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
        if (!found || found->kind != MemoryKind::pinned) throw Fail{CUDA_ERROR_INVALID_VALUE};
        // All pinned memory is mapped under unified addressing, whatever was asked.
        require(flags) = found->flags | CU_MEMHOSTALLOC_DEVICEMAP;
    });
}

CUresult CUDAAPI cuMemHostRegister(void *p, size_t nbytes, unsigned flags) {
    return entry("cuMemHostRegister", kContext | kUnsafe, [&](Call &call) {
        call.record.nbytes = nbytes;
        CUdeviceptr address = reinterpret_cast<CUdeviceptr>(p);
        if (!p || nbytes == 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
        auto next = world().host_view.lower_bound(address);
        bool overlaps = find_allocation(world().host_view, address, 0) != nullptr ||
                        (next != world().host_view.end() && next->first < address + nbytes);
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
    return entry("cuMemHostUnregister", kContext | kUnsafe, [&](Call &call) { unregister_host(call, p); });
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    return entry("cuMemGetAddressRange", kContext, [&](Call &) {
        AllocationPtr found = find_allocation(world().host_view, address, 0);
        if (!found) throw Fail{CUDA_ERROR_NOT_FOUND};
        if (base) *base = found->base;
        if (size) *size = found->nbytes;
    });
}

CUresult CUDAAPI cuMemAdvise(CUdeviceptr address, size_t nbytes, CUmem_advise, CUmemLocation) {
    return entry("cuMemAdvise", kInit, [&](Call &call) {
        AllocationPtr found = find_allocation(world().host_view, address, nbytes);
        if (!found || found->kind != MemoryKind::managed) throw Fail{CUDA_ERROR_INVALID_VALUE};
        call.record.nbytes = nbytes;
    });
}

CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr address, size_t nbytes, CUmemLocation, unsigned, CUstream handle) {
    return entry("cuMemPrefetchAsync", kContext, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        AllocationPtr found = find_allocation(world().host_view, address, nbytes);
        if (!found || found->kind != MemoryKind::managed) throw Fail{CUDA_ERROR_INVALID_VALUE};
        Operation operation{"prefetch"};
        operation.nbytes = nbytes;
        submit(call, stream, CU_GRAPH_NODE_TYPE_EMPTY, std::move(operation));
    });
}

// Attributes of addresses.
namespace {

struct Answer {
    bool known = true;
    size_t size = 0;
    unsigned char bytes[8] = {};
    template <class T> void set(T value) {
        size = sizeof value;
        __builtin_memcpy(bytes, &value, sizeof value);
    }
};

Answer pointer_attribute(CUpointer_attribute attribute, CUdeviceptr address) {
    Answer a;
    AllocationPtr found = find_allocation(world().host_view, address, 0);
    a.known = found != nullptr;
    bool host_side = found && (found->kind == MemoryKind::pinned || found->kind == MemoryKind::registered);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        a.set<CUcontext>(found && found->context ? found->context->handle : nullptr);
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        // Managed memory reads as device memory here; IS_MANAGED tells them apart.
        a.set<unsigned>(!found ? 0 : host_side ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: a.set<CUdeviceptr>(found ? address : 0); break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: {
        bool readable = host_side || (found && found->kind == MemoryKind::managed);
        a.set<uint64_t>(readable ? address : 0);
        a.known = readable;
        break;
    }
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: a.set<unsigned>(0); break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: a.set<uint64_t>(found ? found->id : 0); break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: a.set<unsigned>(found && found->kind == MemoryKind::managed); break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: a.set<int>(found ? found->device : -2); break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        a.set<unsigned>(found && found->kind == MemoryKind::device);
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: a.set<CUdeviceptr>(found ? found->base : 0); break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: a.set<size_t>(found ? found->nbytes : 0); break;
    case CU_POINTER_ATTRIBUTE_MAPPED: a.set<unsigned>(found != nullptr); break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: a.set<uint64_t>(0); break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        a.set<CUmemoryPool>(found && found->pool ? found->pool->handle : nullptr);
        break;
    default: throw Fail{CUDA_ERROR_NOT_SUPPORTED};
    }
    return a;
}

} // namespace

CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    return entry("cuPointerGetAttribute", kInit, [&](Call &call) {
        call.record.handle = address;
        if (!data) throw Fail{CUDA_ERROR_INVALID_VALUE};
        Answer a = pointer_attribute(attribute, address);
        if (!a.known) throw Fail{CUDA_ERROR_INVALID_VALUE};
        __builtin_memcpy(data, a.bytes, a.size);
    });
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data,
                                        CUdeviceptr address) {
    return entry("cuPointerGetAttributes", kInit, [&](Call &call) {
        call.record.handle = address;
        require(attributes);
        require(data);
        // Unlike the single question, an unknown address is an answer here: all zero.
        for (unsigned i = 0; i < count; ++i) {
            Answer a = pointer_attribute(attributes[i], address);
            __builtin_memcpy(data[i], a.bytes, a.size);
        }
    });
}
