#include "device.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "pool.h"

namespace sim {
namespace {

// An H200 (SXM), as the 580 driver reports it. Entries left out read as zero.
const std::map<int, int> &h200() {
    static const std::map<int, int> values = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
        {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 131072},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH, 131072},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, 65536},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH, 16384},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT, 16384},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH, 16384},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS, 2048},
        {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6016},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 62914560},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS, 2048},
        {CU_DEVICE_ATTRIBUTE_CAN_TEX2D_GATHER, 1},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE, 8192},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE, 8192},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE, 32768},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS, 2046},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH, 131072},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT, 65536},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH, 16384},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT, 16384},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH, 16384},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS, 2048},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS, 2048},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS, 2046},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH, 268435456},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH, 131072},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT, 65000},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH, 2097120},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT, 32768},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH, 32768},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
        {CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, 39321600},
        {CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE, 134217728},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, 1},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, 100},
        {CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 9},
        {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
        {CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, 4},
        {CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, 1},
        {CU_DEVICE_ATTRIBUTE_NUMA_ID, -1},
        {CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID, 590680286},
        {CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID, 415174878},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    };
    return values;
}

uint64_t map_range(uint64_t nbytes, int protection) {
    void *p = mmap(nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(p);
}

std::string uuid_text(const CUuuid &uuid) {
    std::string out = "GPU-";
    for (int i = 0; i < 16; ++i) {
        char hex[3];
        std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
        out += hex;
        if (i == 3 || i == 5 || i == 7 || i == 9) out += '-';
    }
    return out;
}

CUuuid uuid_of(int physical) {
    CUuuid uuid{};
    for (int i = 0; i < 16; ++i) uuid.bytes[i] = static_cast<char>(0x51 * (physical + 1) + 37 * i);
    return uuid;
}

// Physical devices that CUDA_VISIBLE_DEVICES leaves, in its order: as the driver, the list ends
// at the first entry that names no device.
std::vector<int> visible_devices(int physical) {
    std::vector<int> all;
    for (int i = 0; i < physical; ++i) all.push_back(i);
    const char *text = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return all;
    std::vector<int> chosen;
    std::string list = text;
    size_t begin = 0;
    while (begin <= list.size()) {
        size_t end = std::min(list.find(',', begin), list.size());
        std::string item = list.substr(begin, end - begin);
        begin = end + 1;
        int found = -1;
        if (item.compare(0, 4, "GPU-") == 0) {
            for (int i : all)
                if (uuid_text(uuid_of(i)).compare(0, item.size(), item) == 0) found = i;
        } else if (!item.empty()) {
            char *rest = nullptr;
            long n = std::strtol(item.c_str(), &rest, 10);
            if (*rest == 0 && n >= 0 && n < physical) found = static_cast<int>(n);
        }
        bool repeated = false;
        for (int c : chosen) repeated = repeated || c == found;
        if (found < 0 || repeated) break;
        chosen.push_back(found);
    }
    return chosen;
}

std::vector<int> physical_of; // by ordinal

std::string pci_bus_id(int physical) {
    char text[16];
    std::snprintf(text, sizeof text, "0000:%02X:00.0", 0x19 + 0x11 * physical);
    return text;
}

} // namespace

bool reserve_hidden(uint64_t length, uint64_t alignment, HiddenRange *range) {
    uint64_t room;
    if (__builtin_add_overflow(length, alignment, &room)) return false;
    uint64_t bytes = map_range(room, PROT_READ | PROT_WRITE);
    if (!bytes) return false;
    uint64_t face = bytes;
    // Device addresses are reserved but unreadable: host code that follows one dies as on hardware.
    if (!world().settings.host_readable) face = map_range(room, PROT_NONE);
    if (!face) {
        munmap(reinterpret_cast<void *>(bytes), room);
        return false;
    }
    *range = {(face + alignment - 1) / alignment * alignment, length, static_cast<int64_t>(bytes - face)};
    return true;
}

void create_devices(World &w) {
    physical_of = visible_devices(w.settings.devices);
    for (size_t i = 0; i < physical_of.size(); ++i) {
        auto device = std::make_unique<Device>();
        device->ordinal = static_cast<int>(i);
        device->uuid = uuid_of(physical_of[i]);
        device->total = w.settings.memory;
        // Twice the memory, so that fragmented addresses do not run out before the bytes do.
        uint64_t length = (w.settings.memory * 2 + (uint64_t{1} << 30)) & ~((uint64_t{1} << 21) - 1);
        HiddenRange range;
        if (!reserve_hidden(length, uint64_t{1} << 21, &range)) {
            std::fprintf(stderr, "driver_sim: cannot reserve %llu bytes of address space\n",
                         static_cast<unsigned long long>(length));
            std::abort();
        }
        device->addresses.reset(range.base, range.length);
        device->backing = range.backing;
        device->primary = make_context(device->ordinal, true, 0);
        device->primary->alive = false;
        device->primary->id = 0;
        w.devices.push_back(std::move(device));
        w.devices.back()->default_pool = make_pool(static_cast<int>(i), true);
        w.devices.back()->current_pool = w.devices.back()->default_pool;
    }
}

bool devices_are_peers(int from, int to) {
    const std::string &matrix = world().settings.peers;
    if (from == to) return false;
    if (matrix.empty()) return true;
    size_t count = static_cast<size_t>(world().settings.devices);
    size_t index = static_cast<size_t>(physical_of[from]) * count + physical_of[to];
    return index < matrix.size() && matrix[index] == '1';
}

int device_attribute(const Device &device, CUdevice_attribute attribute) {
    if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) return 0x19 + 0x11 * physical_of[device.ordinal];
    auto it = h200().find(attribute);
    return it == h200().end() ? 0 : it->second;
}

} // namespace sim

using namespace sim;

CUresult CUDAAPI cuInit(unsigned int flags) {
    return entry("cuInit", kUnrefused, [&](Call &) {
        if (flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        World &w = world();
        if (!w.initialized) initialize(w);
        if (w.devices.empty()) {
            w.initialized = false;
            throw Fail{CUDA_ERROR_NO_DEVICE};
        }
    });
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    return entry("cuDriverGetVersion", kPure, [&](Call &) {
        Settings settings;
        read_settings(settings); // asked before cuInit too
        require(version) = settings.driver_version;
    });
}

CUresult CUDAAPI cuGetExportTable(const void **table, const CUuuid *) {
    // The undocumented door of the CUDA runtime library: programs built on it get an error from it.
    return entry("cuGetExportTable", kPure, [&](Call &) {
        if (table) *table = nullptr;
        throw Fail{CUDA_ERROR_NOT_FOUND};
    });
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    return entry("cuDeviceGet", kInit, [&](Call &call) {
        call.device(ordinal);
        require(device) = ordinal;
    });
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    return entry("cuDeviceGetCount", kInit, [&](Call &) { require(count) = static_cast<int>(world().devices.size()); });
}

CUresult CUDAAPI cuDeviceGetName(char *name, int len, CUdevice dev) {
    return entry("cuDeviceGetName", kInit, [&](Call &call) {
        call.device(dev);
        if (len <= 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
        std::snprintf(&require(name), static_cast<size_t>(len), "NVIDIA H200");
    });
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) { // the _v2 symbol
    return entry("cuDeviceGetUuid", kInit, [&](Call &call) { require(uuid) = call.device(dev).uuid; });
}

#undef cuDeviceGetUuid
extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice dev);
CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) { return cuDeviceGetUuid_v2(uuid, dev); }

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice dev) {
    return entry("cuDeviceTotalMem", kInit, [&](Call &call) { require(bytes) = call.device(dev).total; });
}

CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attribute, CUdevice dev) {
    return entry("cuDeviceGetAttribute", kInit, [&](Call &call) {
        const Settings &s = world().settings;
        int value = device_attribute(call.device(dev), attribute);
        if (attribute == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED && !s.pools) value = 0;
        if (attribute == CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH && s.capability < 90) value = 0;
        if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) value = s.capability / 10;
        if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) value = s.capability % 10;
        require(pi) = value;
    });
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *text, int len, CUdevice dev) {
    return entry("cuDeviceGetPCIBusId", kInit, [&](Call &call) {
        call.device(dev);
        std::string id = pci_bus_id(physical_of[dev]);
        if (len <= static_cast<int>(id.size())) throw Fail{CUDA_ERROR_INVALID_VALUE};
        std::memcpy(&require(text), id.c_str(), id.size() + 1);
    });
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *dev, const char *text) {
    return entry("cuDeviceGetByPCIBusId", kInit, [&](Call &) {
        unsigned part[4];
        bool reads = text && (std::sscanf(text, "%x:%x:%x.%x", part, part + 1, part + 2, part + 3) == 4 ||
                              std::sscanf(text, "%x:%x.%x", part, part + 1, part + 2) == 3);
        if (!reads) throw Fail{CUDA_ERROR_INVALID_VALUE};
        for (size_t i = 0; i < physical_of.size(); ++i)
            if (pci_bus_id(physical_of[i]) == text) {
                require(dev) = static_cast<int>(i);
                return;
            }
        throw Fail{CUDA_ERROR_INVALID_DEVICE};
    });
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer) {
    return entry("cuDeviceCanAccessPeer", kInit, [&](Call &call) {
        call.device(peer);
        call.device(dev);
        require(can) = devices_are_peers(dev, peer) ? 1 : 0;
    });
}

CUresult CUDAAPI cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice src, CUdevice dst) {
    return entry("cuDeviceGetP2PAttribute", kInit, [&](Call &call) {
        call.device(dst);
        call.device(src);
        if (src == dst) throw Fail{CUDA_ERROR_INVALID_DEVICE};
        bool peers = devices_are_peers(src, dst);
        switch (attribute) {
        case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: require(value) = 0; break;
        case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
        case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
        case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: require(value) = peers; break;
        case CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED: require(value) = 0; break;
        default: throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
    });
}
