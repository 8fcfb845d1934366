// Managed memory: what the host advises, range by range, and prefetches.
#include <algorithm>
#include <cstring>

#include "capture.h"
#include "memory.h"

namespace sim {
namespace {

constexpr int kNowhere = CU_DEVICE_INVALID; // -2
constexpr int kHost = CU_DEVICE_CPU;        // -1

struct ManagedPlace {
    CUmemLocationType type = CU_MEM_LOCATION_TYPE_INVALID;
    int id = kNowhere;
    bool operator==(const ManagedPlace &other) const { return type == other.type && id == other.id; }
    // As the older attributes tell it: a device, the host, or nothing.
    int device_or_host() const {
        if (type == CU_MEM_LOCATION_TYPE_INVALID) return kNowhere;
        return type == CU_MEM_LOCATION_TYPE_DEVICE ? id : kHost;
    }
};

struct Advice {
    bool read_mostly = false;
    ManagedPlace preferred;
    ManagedPlace last_prefetch;
    std::set<int> accessed_by; // devices, and kHost
};

// Advice of pieces of an allocation: each begins at its key and ends at the next one.
using Pieces = std::map<uint64_t, Advice>;

std::map<uint64_t, Pieces> &advice_by_allocation() { // by id, which is never reused
    static auto *instance = new std::map<uint64_t, Pieces>;
    return *instance;
}

void split_pieces(Pieces &pieces, uint64_t at) {
    auto next = pieces.upper_bound(at);
    Advice before = next == pieces.begin() ? Advice{} : std::prev(next)->second;
    pieces.emplace(at, before);
}

template <class Change> void change_advice(const Allocation &memory, uint64_t begin, uint64_t end, Change apply) {
    Pieces &pieces = advice_by_allocation()[memory.id];
    split_pieces(pieces, memory.base);
    split_pieces(pieces, begin);
    split_pieces(pieces, end);
    for (auto it = pieces.find(begin); it != pieces.end() && it->first < end; ++it) apply(it->second);
}

std::vector<Advice> advice_in(const Allocation &memory, uint64_t begin, uint64_t end) {
    std::vector<Advice> found;
    const Pieces &pieces = advice_by_allocation()[memory.id];
    auto it = pieces.upper_bound(begin);
    if (it == pieces.begin()) return {Advice{}};
    for (--it; it != pieces.end() && it->first < end; ++it) found.push_back(it->second);
    return found;
}

AllocationPtr managed_range(Call &call, CUdeviceptr address, size_t nbytes) {
    call.record.handle = address;
    call.record.nbytes = nbytes;
    AllocationPtr found = find_allocation(world().host_view, address, nbytes);
    if (!nbytes || !found || found->kind != MemoryKind::managed) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return found;
}

ManagedPlace managed_place(Call &call, const CUmemLocation &location) {
    switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: call.device(location.id); return {location.type, location.id};
    case CU_MEM_LOCATION_TYPE_HOST: return {location.type, kHost};
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: return {location.type, location.id};
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    default: throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
}

// The value if the whole range has one, else the fallback.
template <class Get> auto common_value(const std::vector<Advice> &all, Get get, decltype(get(all[0])) otherwise) {
    for (const Advice &advice : all)
        if (!(get(advice) == get(all[0]))) return otherwise;
    return get(all[0]);
}

void answer_attribute(void *data, size_t size, CUmem_range_attribute attribute, const std::vector<Advice> &all) {
    if (!data || size % sizeof(int) || !size) throw Fail{CUDA_ERROR_INVALID_VALUE};
    ManagedPlace preferred = common_value(all, [](const Advice &a) { return a.preferred; }, ManagedPlace{});
    ManagedPlace prefetched = common_value(all, [](const Advice &a) { return a.last_prefetch; }, ManagedPlace{});
    int *out = static_cast<int *>(data);
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY) {
        std::vector<int> devices;
        for (int device : all[0].accessed_by) {
            bool everywhere =
                std::all_of(all.begin(), all.end(), [&](const Advice &a) { return a.accessed_by.count(device) != 0; });
            if (everywhere) devices.push_back(device);
        }
        for (size_t i = 0; i < size / sizeof(int); ++i) out[i] = i < devices.size() ? devices[i] : kNowhere;
        return;
    }
    if (size != sizeof(int)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        *out = common_value(all, [](const Advice &a) { return a.read_mostly; }, false);
        break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: *out = preferred.device_or_host(); break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: *out = prefetched.device_or_host(); break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: *out = preferred.type; break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: *out = preferred.id; break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: *out = prefetched.type; break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: *out = prefetched.id; break;
    default: throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuMemAdvise(CUdeviceptr address, size_t nbytes, CUmem_advise advice, CUmemLocation location) {
    return entry("cuMemAdvise", kInit, [&](Call &call) {
        AllocationPtr memory = managed_range(call, address, nbytes);
        bool placeless = advice == CU_MEM_ADVISE_SET_READ_MOSTLY || advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY ||
                         advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
        ManagedPlace where = placeless ? ManagedPlace{} : managed_place(call, location);
        change_advice(*memory, address, address + nbytes, [&](Advice &a) {
            switch (advice) {
            case CU_MEM_ADVISE_SET_READ_MOSTLY: a.read_mostly = true; break;
            case CU_MEM_ADVISE_UNSET_READ_MOSTLY: a.read_mostly = false; break;
            case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: a.preferred = where; break;
            case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: a.preferred = {}; break;
            case CU_MEM_ADVISE_SET_ACCESSED_BY: a.accessed_by.insert(where.device_or_host()); break;
            case CU_MEM_ADVISE_UNSET_ACCESSED_BY: a.accessed_by.erase(where.device_or_host()); break;
            default: throw Fail{CUDA_ERROR_INVALID_VALUE};
            }
        });
    });
}

CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr address, size_t nbytes, CUmemLocation location, unsigned flags,
                                    CUstream handle) {
    return entry("cuMemPrefetchAsync", kContext, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        if (flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        AllocationPtr memory = managed_range(call, address, nbytes);
        ManagedPlace where = managed_place(call, location);
        refuse_if_capturing(call, stream);
        Operation operation{"prefetch"};
        operation.nbytes = nbytes;
        submit(call, stream, CU_GRAPH_NODE_TYPE_EMPTY, std::move(operation));
        // Where the last call asked for, whether or not it has happened.
        change_advice(*memory, address, address + nbytes, [&](Advice &a) { a.last_prefetch = where; });
    });
}

CUresult CUDAAPI cuMemRangeGetAttribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address,
                                        size_t nbytes) {
    return entry("cuMemRangeGetAttribute", kInit, [&](Call &call) {
        AllocationPtr memory = managed_range(call, address, nbytes);
        answer_attribute(data, size, attribute, advice_in(*memory, address, address + nbytes));
    });
}

CUresult CUDAAPI cuMemRangeGetAttributes(void **data, size_t *sizes, CUmem_range_attribute *attributes, size_t count,
                                         CUdeviceptr address, size_t nbytes) {
    return entry("cuMemRangeGetAttributes", kInit, [&](Call &call) {
        AllocationPtr memory = managed_range(call, address, nbytes);
        require(data);
        require(sizes);
        require(attributes);
        std::vector<Advice> all = advice_in(*memory, address, address + nbytes);
        for (size_t i = 0; i < count; ++i) answer_attribute(data[i], sizes[i], attributes[i], all);
    });
}
