// Functions: attributes, occupancy, launches.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "capture.h"
#include "kernels.h"
#include "memory.h"
#include "module.h"

namespace sim {

int function_attribute(const Function &f, CUfunction_attribute attribute) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return f.entry.max_threads;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: return static_cast<int>(f.entry.static_shared);
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: return 0;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: return 0;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return f.entry.registers;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: return 90;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return 90;
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: return 0;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return f.max_dynamic_shared;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: return f.carveout;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: return 0;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: return static_cast<int>(f.entry.required_cluster[0]);
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT: return static_cast<int>(f.entry.required_cluster[1]);
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: return static_cast<int>(f.entry.required_cluster[2]);
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: return f.non_portable_cluster;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: return 0;
    default: throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
}

void set_function_attribute(Function &f, CUfunction_attribute attribute, int value) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        if (value < 0 || value + static_cast<int>(f.entry.static_shared) > kMaxDynamicShared)
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        f.max_dynamic_shared = value;
        break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        if (value < -1 || value > 100) throw Fail{CUDA_ERROR_INVALID_VALUE};
        f.carveout = value;
        break;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: f.non_portable_cluster = value != 0; break;
    default: throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
}

namespace {

// The buffer as the device sees it, from either way of passing parameters.
std::vector<unsigned char> gather_parameters(const Function &f, void **params, void **extra) {
    std::vector<unsigned char> bytes(f.entry.parameter_bytes, 0);
    if (params && extra) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (extra) {
        const void *buffer = nullptr;
        size_t *size = nullptr;
        for (void **p = extra; *p != CU_LAUNCH_PARAM_END; p += 2) {
            if (*p == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = p[1];
            else if (*p == CU_LAUNCH_PARAM_BUFFER_SIZE) size = static_cast<size_t *>(p[1]);
            else throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        if (!size || *size < bytes.size() || (!buffer && *size)) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (!bytes.empty()) std::memcpy(bytes.data(), buffer, bytes.size());
        return bytes;
    }
    if (!f.entry.parameters.empty() && !params) throw Fail{CUDA_ERROR_INVALID_VALUE};
    for (size_t i = 0; i < f.entry.parameters.size(); ++i) {
        if (!params[i]) throw Fail{CUDA_ERROR_INVALID_VALUE};
        std::memcpy(bytes.data() + f.entry.parameters[i].offset, params[i], f.entry.parameters[i].size);
    }
    return bytes;
}

void check_shape(const Function &f, const LaunchShape &s) {
    const unsigned grid_limit[3] = {2147483647u, 65535, 65535};
    const unsigned block_limit[3] = {1024, 1024, 64};
    for (int i = 0; i < 3; ++i) {
        if (s.grid[i] == 0 || s.grid[i] > grid_limit[i]) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (s.block[i] == 0 || s.block[i] > block_limit[i]) throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    uint64_t threads = uint64_t{s.block[0]} * s.block[1] * s.block[2];
    if (threads > 1024 || threads > static_cast<uint64_t>(f.entry.max_threads)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (s.shared > static_cast<unsigned>(f.max_dynamic_shared)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (!s.cluster[0]) return;
    uint64_t size = uint64_t{s.cluster[0]} * s.cluster[1] * s.cluster[2];
    for (int i = 0; i < 3; ++i)
        if (s.cluster[i] == 0 || s.grid[i] % s.cluster[i]) throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
    if (size > (f.non_portable_cluster ? 16u : 8u)) throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
}

int blocks_per_processor(const Function &f, int block_size, size_t dynamic_shared) {
    int warps = (block_size + 31) / 32;
    int by_threads = 2048 / (warps * 32);
    int by_registers = 65536 / std::max(1, f.entry.registers * warps * 32);
    size_t shared = f.entry.static_shared + dynamic_shared + 1024;
    int by_shared = static_cast<int>(233472 / shared);
    return std::max(0, std::min({32, by_threads, by_registers, by_shared}));
}

void launch(Call &call, CUfunction handle, const LaunchShape &shape, CUstream stream_handle, void **params,
            void **extra) {
    StreamPtr stream = call.stream(stream_handle);
    FunctionPtr f = find_function(call, handle, stream->context);
    call.record.kind = f->entry.name;
    if (f->context != stream->context) {
        violation(call.name(), "function and stream belong to different contexts", call.record.handle);
        throw Fail{CUDA_ERROR_INVALID_HANDLE};
    }
    check_shape(*f, shape);
    std::vector<unsigned char> bytes = gather_parameters(*f, params, extra);
    if (shape.cooperative) {
        uint64_t blocks = uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2];
        int threads = static_cast<int>(shape.block[0] * shape.block[1] * shape.block[2]);
        if (blocks > 132u * static_cast<unsigned>(blocks_per_processor(*f, threads, shape.shared)))
            throw Fail{CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE};
    }
    KernelBody body = find_kernel(f->entry);
    if (!body) {
        std::fprintf(stderr,
                     "driver_sim: launch of entry '%s', which has no host code in the simulation for its "
                     "parameters\n",
                     f->entry.name.c_str());
        std::abort();
    }
    if (!f->loaded) {
        f->loaded = true;
        call.record.note = "lazy load";
    }
    Operation operation{"kernel", f->entry.name};
    operation.work = [f, shape, bytes, body](Exec &run) { body(run, KernelCall{f->entry, bytes, shape}); };
    submit(call, stream, CU_GRAPH_NODE_TYPE_KERNEL, std::move(operation));
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                unsigned bz, unsigned shared, CUstream stream, void **params, void **extra) {
    return entry("cuLaunchKernel", kContext, [&](Call &call) {
        launch(call, f, LaunchShape{{gx, gy, gz}, {bx, by, bz}, {0, 0, 0}, shared, false}, stream, params, extra);
    });
}

CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                           unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params) {
    return entry("cuLaunchCooperativeKernel", kContext, [&](Call &call) {
        launch(call, f, LaunchShape{{gx, gy, gz}, {bx, by, bz}, {0, 0, 0}, shared, true}, stream, params, nullptr);
    });
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
    return entry("cuLaunchKernelEx", kContext, [&](Call &call) {
        const CUlaunchConfig &c = require(config);
        LaunchShape shape{{c.gridDimX, c.gridDimY, c.gridDimZ},
                          {c.blockDimX, c.blockDimY, c.blockDimZ},
                          {0, 0, 0},
                          c.sharedMemBytes,
                          false};
        for (unsigned i = 0; i < c.numAttrs; ++i) {
            const CUlaunchAttribute &a = c.attrs[i];
            switch (a.id) {
            case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                shape.cluster[0] = a.value.clusterDim.x;
                shape.cluster[1] = a.value.clusterDim.y;
                shape.cluster[2] = a.value.clusterDim.z;
                break;
            case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: shape.cooperative = a.value.cooperative != 0; break;
            default: break;
            }
        }
        launch(call, f, shape, c.hStream, params, extra);
    });
}

CUresult CUDAAPI cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction handle) {
    return entry("cuFuncGetAttribute", kContext, [&](Call &call) {
        require(out) = function_attribute(*find_function(call, handle, call.context_ptr()), attribute);
    });
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    return entry("cuFuncSetAttribute", kContext, [&](Call &call) {
        set_function_attribute(*find_function(call, handle, call.context_ptr()), attribute, value);
    });
}

CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache) {
    return entry("cuFuncSetCacheConfig", kContext,
                 [&](Call &call) { find_function(call, handle, call.context_ptr()); });
}

CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction handle) {
    return entry("cuFuncGetName", kContext, [&](Call &call) {
        require(name) = find_function(call, handle, call.context_ptr())->entry.name.c_str();
    });
}

CUresult CUDAAPI cuFuncGetModule(CUmodule *module, CUfunction handle) {
    return entry("cuFuncGetModule", kContext, [&](Call &call) {
        ModulePtr owner = find_function(call, handle, call.context_ptr())->module.lock();
        if (!owner) throw Fail{CUDA_ERROR_INVALID_HANDLE};
        require(module) = owner->handle;
    });
}

CUresult CUDAAPI cuFuncLoad(CUfunction handle) {
    return entry("cuFuncLoad", kContext,
                 [&](Call &call) { find_function(call, handle, call.context_ptr())->loaded = true; });
}

CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction handle) {
    return entry("cuFuncIsLoaded", kContext, [&](Call &call) {
        bool loaded = find_function(call, handle, call.context_ptr())->loaded;
        require(state) = loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
    });
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, CUfunction handle, int block_size,
                                                                      size_t dynamic_shared, unsigned) {
    return entry("cuOccupancyMaxActiveBlocksPerMultiprocessor", kContext, [&](Call &call) {
        if (block_size <= 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
        require(out) =
            blocks_per_processor(*find_function(call, handle, call.context_ptr()), block_size, dynamic_shared);
    });
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction f, int block_size,
                                                             size_t dynamic_shared) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, f, block_size, dynamic_shared, 0);
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSize(int *min_grid, int *block, CUfunction handle,
                                                  CUoccupancyB2DSize shared_of, size_t dynamic_shared, int limit) {
    return entry("cuOccupancyMaxPotentialBlockSize", kContext, [&](Call &call) {
        FunctionPtr f = find_function(call, handle, call.context_ptr());
        int best = 0, best_threads = 0, most = f->entry.max_threads;
        if (limit > 0) most = std::min(most, limit);
        for (int size = most; size > 0; size -= 32) {
            size_t shared = shared_of ? shared_of(size) : dynamic_shared;
            int threads = size * blocks_per_processor(*f, size, shared);
            if (threads > best_threads) {
                best_threads = threads;
                best = size;
            }
        }
        require(block) = best;
        require(min_grid) = best ? 132 * (best_threads / best) : 0;
    });
}
