// What the driver knows about an address.
#include <cstring>

#include "memory.h"
#include "pool.h"
#include "vmm.h"

using namespace sim;

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

CUmemAccess_flags access_of_current_device(const Allocation &allocation) {
    const auto &stack = this_thread().stack;
    if (stack.empty()) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    if (device_may_touch(*stack.back(), allocation, true)) return CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (device_may_touch(*stack.back(), allocation, false)) return CU_MEM_ACCESS_FLAGS_PROT_READ;
    return CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

Answer pointer_attribute(CUpointer_attribute attribute, CUdeviceptr address) {
    Answer a;
    AllocationPtr found = find_allocation(world().host_view, address, 0);
    if (found && found->from_graph && !found->graph_live) found = nullptr; // an address, and nothing there
    a.known = found != nullptr;
    bool mapped = found && found->kind == MemoryKind::mapped;
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
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: a.set<unsigned>(found && found->kind == MemoryKind::managed); break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: a.set<uint64_t>(found ? found->id : 0); break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: a.set<unsigned>(found && found->kind == MemoryKind::managed); break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: a.set<int>(found ? found->device : -2); break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        a.set<unsigned>(found && found->kind == MemoryKind::device);
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: a.set<CUdeviceptr>(found ? found->base : 0); break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: a.set<size_t>(found ? found->nbytes : 0); break;
    case CU_POINTER_ATTRIBUTE_MAPPED: a.set<unsigned>(found != nullptr); break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        a.set<uint64_t>(mapped ? found->physical->props.requestedHandleTypes : 0);
        break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: a.set<unsigned>(found ? access_of_current_device(*found) : 0); break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: a.set<CUdeviceptr>(found ? found->base : 0); break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: a.set<size_t>(found ? found->nbytes : 0); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        a.set<uint64_t>(!found ? 0 : mapped ? found->physical->id : found->id);
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        a.set<CUmemoryPool>(found && found->pool ? found->pool->handle : nullptr);
        break;
    default: throw Fail{CUDA_ERROR_INVALID_VALUE};
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
