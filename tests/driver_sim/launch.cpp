#include "launch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "capture.h"
#include "memory.h"
#include "occupancy.h"

namespace sim {
namespace {

// The buffer as the device sees it, from either way of passing parameters.
std::vector<unsigned char> gather_parameters(Call &call, const Function &f, void **params, void **extra) {
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
        if (!size || (!buffer && *size) || (!*size && !bytes.empty())) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (*size > bytes.size()) throw Fail{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES};
        if (*size < bytes.size()) violation(call.name(), "the buffer of parameters is too small");
        if (*size) std::memcpy(bytes.data(), buffer, *size);
        return bytes;
    }
    if (!f.entry.parameters.empty() && !params) throw Fail{CUDA_ERROR_INVALID_VALUE};
    for (size_t i = 0; i < f.entry.parameters.size(); ++i) {
        if (!params[i]) throw Fail{CUDA_ERROR_INVALID_VALUE};
        std::memcpy(bytes.data() + f.entry.parameters[i].offset, params[i], f.entry.parameters[i].size);
    }
    return bytes;
}

void check_threads(const Function &f, const LaunchShape &s) {
    const unsigned grid_limit[3] = {2147483647u, 65535, 65535};
    const unsigned block_limit[3] = {1024, 1024, 64};
    for (int i = 0; i < 3; ++i) {
        if (s.grid[i] == 0 || s.grid[i] > grid_limit[i]) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (s.block[i] == 0 || s.block[i] > block_limit[i]) throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    const unsigned *required = f.entry.required_block;
    if (required[0] && !std::equal(required, required + 3, s.block)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    uint64_t threads = s.block_threads();
    if (threads > 1024 || threads > static_cast<uint64_t>(f.entry.max_threads)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (threads > static_cast<uint64_t>(max_threads(f.entry))) throw Fail{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES};
    if (s.shared > static_cast<unsigned>(f.max_dynamic_shared)) throw Fail{CUDA_ERROR_INVALID_VALUE};
}

// The launch's cluster, or the function's own; both must be the same if there are both.
void settle_cluster(const Function &f, LaunchShape &s) {
    const unsigned *own = f.entry.required_cluster;
    bool asked = s.cluster[0] || s.cluster[1] || s.cluster[2];
    if (own[0]) {
        if (asked && !std::equal(own, own + 3, s.cluster)) throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
        std::copy(own, own + 3, s.cluster);
    } else if (!asked) {
        if (f.entry.needs_cluster) throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
        return;
    }
    uint64_t size = 1;
    for (int i = 0; i < 3; ++i) {
        if (s.cluster[i] == 0 || s.grid[i] % s.cluster[i]) throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
        size *= s.cluster[i];
        if (size > kLargestCluster) throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
    }
    if (size > (f.non_portable_cluster ? kLargestCluster : kPortableCluster))
        throw Fail{CUDA_ERROR_INVALID_CLUSTER_SIZE};
}

} // namespace

Operation prepare_launch(Call &call, const FunctionPtr &f, LaunchShape shape, void **params, void **extra) {
    call.record.kind = f->entry.name;
    check_threads(*f, shape);
    settle_cluster(*f, shape);
    std::vector<unsigned char> bytes = gather_parameters(call, *f, params, extra);
    if (shape.cooperative) {
        int threads = static_cast<int>(shape.block_threads());
        uint64_t resident = kProcessors * static_cast<uint64_t>(blocks_per_processor(*f, threads, shape.shared));
        if (shape.blocks() > resident) throw Fail{CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE};
    }
    KernelBody body = find_kernel(f->entry);
    if (!body) {
        std::fprintf(stderr,
                     "driver_sim: launch of entry '%s', which has no host code in the simulation for its "
                     "parameters\n",
                     f->entry.name.c_str());
        std::abort();
    }
    auto launch = std::make_shared<KernelLaunch>(KernelLaunch{f, shape, std::move(bytes)});
    Operation operation{"kernel", f->entry.name};
    operation.kernel = launch;
    operation.work = [launch, body](Exec &run) {
        body(run, KernelCall{launch->function->entry, launch->bytes, launch->shape});
    };
    return operation;
}

namespace {

void launch_kernel(Call &call, CUfunction handle, const LaunchShape &shape, CUstream stream_handle, void **params,
                   void **extra) {
    StreamPtr stream = call.stream(stream_handle);
    FunctionPtr f = find_function(call, handle, stream->context);
    if (f->context != stream->context) {
        violation(call.name(), "function and stream belong to different contexts", call.record.handle);
        throw Fail{CUDA_ERROR_INVALID_HANDLE};
    }
    Operation operation;
    try {
        operation = prepare_launch(call, f, shape, params, extra);
    } catch (const Fail &) {
        // Unlike other calls that are refused, a launch takes the capture with it.
        if (stream->capture) invalidate(*stream->capture, call.name());
        throw;
    }
    submit(call, stream, CU_GRAPH_NODE_TYPE_KERNEL, std::move(operation));
}

LaunchShape shape_of(const CUlaunchConfig &c) {
    LaunchShape shape{{c.gridDimX, c.gridDimY, c.gridDimZ},
                      {c.blockDimX, c.blockDimY, c.blockDimZ},
                      {0, 0, 0},
                      c.sharedMemBytes,
                      false};
    if (c.numAttrs && !c.attrs) throw Fail{CUDA_ERROR_INVALID_VALUE};
    for (unsigned i = 0; i < c.numAttrs; ++i) {
        const CUlaunchAttribute &a = c.attrs[i];
        switch (a.id) {
        case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            shape.cluster[0] = a.value.clusterDim.x;
            shape.cluster[1] = a.value.clusterDim.y;
            shape.cluster[2] = a.value.clusterDim.z;
            break;
        case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: shape.cooperative = a.value.cooperative != 0; break;
        // A kernel may begin before the one ahead of it has ended, but must not see what that one has not
        // finished: here it begins behind it, which is one of the orders that this allows.
        case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: break;
        // Hints, or settings that change no result.
        case CU_LAUNCH_ATTRIBUTE_IGNORE:
        case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
        case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
        case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: break;
        case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
            std::fprintf(stderr, "driver_sim: launch attribute %d is not simulated\n", static_cast<int>(a.id));
            std::abort();
        default: throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
    }
    return shape;
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                unsigned bz, unsigned shared, CUstream stream, void **params, void **extra) {
    return entry("cuLaunchKernel", kHealthy, [&](Call &call) {
        launch_kernel(call, f, LaunchShape{{gx, gy, gz}, {bx, by, bz}, {0, 0, 0}, shared, false}, stream, params,
                      extra);
    });
}

CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                           unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params) {
    return entry("cuLaunchCooperativeKernel", kHealthy, [&](Call &call) {
        launch_kernel(call, f, LaunchShape{{gx, gy, gz}, {bx, by, bz}, {0, 0, 0}, shared, true}, stream, params,
                      nullptr);
    });
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
    return entry("cuLaunchKernelEx", kHealthy, [&](Call &call) {
        LaunchShape shape = shape_of(require(config));
        launch_kernel(call, f, shape, config->hStream, params, extra);
    });
}
