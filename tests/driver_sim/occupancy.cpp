#include "occupancy.h"

#include <algorithm>

namespace sim {
namespace {

constexpr int kWarp = 32, kMaxWarps = 64, kMaxBlocks = 32;
constexpr int kRegisters = 65536, kRegisterUnit = 256, kWarpUnit = 4;
constexpr size_t kSharedPerProcessor = 233472, kReservedPerBlock = 1024, kSharedUnit = 128;
// Processors of each graphics processing cluster: a thread block cluster does not reach beyond one.
constexpr int kClusterProcessors[] = {18, 18, 16, 16, 16, 16, 16, 16};

int warps_by_registers(const EntryPoint &entry) {
    int per_warp = (entry.registers * kWarp + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit;
    if (!per_warp) return kMaxWarps;
    return kRegisters / per_warp / kWarpUnit * kWarpUnit;
}

size_t shared_of_block(const Function &f, size_t dynamic) {
    size_t bytes = f.entry.static_shared + dynamic + kReservedPerBlock;
    return (bytes + kSharedUnit - 1) / kSharedUnit * kSharedUnit;
}

} // namespace

int max_threads(const EntryPoint &entry) { return std::min(entry.max_threads, warps_by_registers(entry) * kWarp); }

int blocks_per_processor(const Function &f, int block_size, size_t dynamic_shared) {
    size_t opted_in = static_cast<size_t>(kMaxDynamicShared);
    if (block_size > max_threads(f.entry) || dynamic_shared > opted_in) return 0;
    int warps = (block_size + kWarp - 1) / kWarp;
    int by_shared = static_cast<int>(kSharedPerProcessor / shared_of_block(f, dynamic_shared));
    return std::min({kMaxBlocks, kMaxWarps / warps, warps_by_registers(f.entry) / warps, by_shared});
}

int active_clusters(const Function &f, unsigned cluster_size, int block_size, size_t dynamic_shared) {
    int blocks = blocks_per_processor(f, block_size, dynamic_shared), clusters = 0;
    for (int processors : kClusterProcessors) clusters += blocks * processors / static_cast<int>(cluster_size);
    return clusters;
}

namespace {

// The cluster of a configuration: its attribute's, else the function's own, else single blocks.
unsigned cluster_size_of(const CUlaunchConfig &config, const Function &f) {
    const unsigned *own = f.entry.required_cluster;
    unsigned size = own[0] ? own[0] * own[1] * own[2] : 1;
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        const CUlaunchAttribute &a = config.attrs[i];
        if (a.id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
        size = a.value.clusterDim.x * a.value.clusterDim.y * a.value.clusterDim.z;
    }
    if (!size) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return size;
}

int block_size_of(const CUlaunchConfig &config) {
    uint64_t size = uint64_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
    if (!size || size > 1024) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return static_cast<int>(size);
}

CUresult max_active_blocks(const char *name, int *out, CUfunction handle, int block_size, size_t dynamic_shared,
                           unsigned flags) {
    return entry(name, kContext, [&](Call &call) {
        FunctionPtr f = find_function(call, handle, call.context_ptr());
        if (block_size <= 0 || (flags & ~unsigned{CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE}))
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        require(out) = blocks_per_processor(*f, block_size, dynamic_shared);
    });
}

CUresult max_potential_block(const char *name, int *min_grid, int *block, CUfunction handle,
                             CUoccupancyB2DSize shared_of, size_t dynamic_shared, int limit) {
    return entry(name, kContext, [&](Call &call) {
        FunctionPtr f = find_function(call, handle, call.context_ptr());
        int best = 0, best_threads = 0, most = max_threads(f->entry);
        if (limit > 0) most = std::min(most, limit);
        for (int size = most; size > 0; size -= kWarp) {
            size_t shared = shared_of ? shared_of(size) : dynamic_shared;
            bool opted_in = static_cast<int>(shared) <= f->max_dynamic_shared; // seen to matter for this call
            int threads = opted_in ? size * blocks_per_processor(*f, size, shared) : 0;
            if (threads > best_threads) {
                best_threads = threads;
                best = size;
            }
        }
        require(block) = best;
        require(min_grid) = best ? kProcessors * (best_threads / best) : 0;
    });
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction f, int block_size,
                                                             size_t dynamic_shared) {
    return max_active_blocks("cuOccupancyMaxActiveBlocksPerMultiprocessor", out, f, block_size, dynamic_shared, 0);
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, CUfunction f, int block_size,
                                                                      size_t dynamic_shared, unsigned flags) {
    return max_active_blocks("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", out, f, block_size, dynamic_shared,
                             flags);
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSize(int *min_grid, int *block, CUfunction f, CUoccupancyB2DSize shared_of,
                                                  size_t dynamic_shared, int limit) {
    return max_potential_block("cuOccupancyMaxPotentialBlockSize", min_grid, block, f, shared_of, dynamic_shared,
                               limit);
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSizeWithFlags(int *min_grid, int *block, CUfunction f,
                                                           CUoccupancyB2DSize shared_of, size_t dynamic_shared,
                                                           int limit, unsigned) {
    return max_potential_block("cuOccupancyMaxPotentialBlockSizeWithFlags", min_grid, block, f, shared_of,
                               dynamic_shared, limit);
}

CUresult CUDAAPI cuOccupancyAvailableDynamicSMemPerBlock(size_t *out, CUfunction handle, int blocks, int block_size) {
    return entry("cuOccupancyAvailableDynamicSMemPerBlock", kContext, [&](Call &call) {
        FunctionPtr f = find_function(call, handle, call.context_ptr());
        if (blocks <= 0 || block_size <= 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
        size_t each = kSharedPerProcessor / static_cast<size_t>(blocks) / kSharedUnit * kSharedUnit;
        size_t taken = kReservedPerBlock + f->entry.static_shared;
        size_t most = static_cast<size_t>(kMaxDynamicShared) - f->entry.static_shared;
        require(out) = each > taken ? std::min(each - taken, most) : 0;
    });
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *out, CUfunction handle, const CUlaunchConfig *config) {
    return entry("cuOccupancyMaxActiveClusters", kContext, [&](Call &call) {
        FunctionPtr f = find_function(call, handle, call.context_ptr());
        unsigned size = cluster_size_of(require(config), *f);
        if (size > (f->non_portable_cluster ? kLargestCluster : kPortableCluster))
            throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
        require(out) = active_clusters(*f, size, block_size_of(*config), config->sharedMemBytes);
    });
}

CUresult CUDAAPI cuOccupancyMaxPotentialClusterSize(int *out, CUfunction handle, const CUlaunchConfig *config) {
    return entry("cuOccupancyMaxPotentialClusterSize", kContext, [&](Call &call) {
        FunctionPtr f = find_function(call, handle, call.context_ptr());
        unsigned size = f->non_portable_cluster ? kLargestCluster : kPortableCluster;
        int block_size = block_size_of(require(config));
        while (size > 1 && !active_clusters(*f, size, block_size, config->sharedMemBytes)) size /= 2;
        require(out) = static_cast<int>(size);
    });
}
