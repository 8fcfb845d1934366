// Functions: what is asked of them and set on them.
#include "module.h"
#include "occupancy.h"

namespace sim {

int function_attribute(const Function &f, CUfunction_attribute attribute) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return max_threads(f.entry);
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: return static_cast<int>(f.entry.static_shared);
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: return 0;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: return static_cast<int>(f.entry.local_bytes);
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return f.entry.registers;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: return f.target;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return f.binary;
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: return 0;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return f.max_dynamic_shared;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: return f.carveout;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: return f.entry.needs_cluster;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: return static_cast<int>(f.entry.required_cluster[0]);
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT: return static_cast<int>(f.entry.required_cluster[1]);
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: return static_cast<int>(f.entry.required_cluster[2]);
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: return f.non_portable_cluster;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: return f.cluster_scheduling;
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
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: f.cluster_scheduling = value; break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
        if (f.cluster_is_compiled) throw Fail{CUDA_ERROR_NOT_PERMITTED};
        if (value < 0) throw Fail{CUDA_ERROR_INVALID_VALUE};
        f.entry.required_cluster[attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH] = static_cast<unsigned>(value);
        break;
    default: throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
}

} // namespace sim

using namespace sim;

CUresult CUDAAPI cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction handle) {
    return entry("cuFuncGetAttribute", kHealthy, [&](Call &call) {
        require(out) = function_attribute(*find_function(call, handle, call.context_ptr()), attribute);
    });
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    return entry("cuFuncSetAttribute", kHealthy, [&](Call &call) {
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
    return entry("cuFuncGetModule", kHealthy, [&](Call &call) {
        ModulePtr owner = find_function(call, handle, call.context_ptr())->module.lock();
        if (!owner) throw Fail{CUDA_ERROR_INVALID_HANDLE};
        require(module) = owner->handle;
    });
}

CUresult CUDAAPI cuFuncLoad(CUfunction handle) {
    return entry("cuFuncLoad", kHealthy, [&](Call &call) { find_function(call, handle, call.context_ptr()); });
}

CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction handle) {
    return entry("cuFuncIsLoaded", kHealthy, [&](Call &call) {
        find_function(call, handle, call.context_ptr());
        require(state) = CU_FUNCTION_LOADING_STATE_LOADED; // looking a function up loads it
    });
}
