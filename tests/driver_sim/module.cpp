#include "module.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "capture.h"
#include "memory.h"

namespace sim {
ModulePtr make_module(const ContextPtr &context, std::shared_ptr<Image> image) {
    auto module = std::make_shared<Module>();
    module->id = world().next_id++;
    module->context = context;
    module->image = std::move(image);
    for (const GlobalVariable &variable : module->image->globals) {
        if (!variable.nbytes) continue;
        AllocationPtr memory = allocate_device(*world().devices[context->device], variable.nbytes);
        std::memset(backing(memory->base), 0, variable.nbytes);
        std::copy(variable.value.begin(), variable.value.end(), static_cast<unsigned char *>(backing(memory->base)));
        memory->context = context;
        world().host_view[memory->base] = memory;
        world().device_view[memory->base] = memory;
        module->globals[variable.name] = memory;
    }
    module->handle = reinterpret_cast<CUmodule>(world().modules.add(module));
    return module;
}

void unload_module(Call &call, const ModulePtr &module) {
    // The driver waits until nothing of the context can be using the code.
    wait_for_context(call.guard(), call.name(), module->context);
    World &w = world();
    for (const auto &[name, function] : module->functions) w.functions.remove(function->handle);
    for (const auto &[name, memory] : module->globals) {
        w.host_view.erase(memory->base);
        w.device_view.erase(memory->base);
        release_device(*w.devices[memory->device], memory);
    }
    w.modules.remove(module->handle);
}

FunctionPtr make_function(const Image &image, const EntryPoint &entry) {
    auto function = std::make_shared<Function>();
    function->entry = entry;
    function->max_dynamic_shared = kDefaultShared - static_cast<int>(entry.static_shared);
    function->cluster_is_compiled = entry.required_cluster[0] != 0;
    function->target = image.target;
    function->binary = image.binary;
    return function;
}

// The bytes of a file, and a zero behind them. Throws Fail.
std::vector<char> read_file(const char *path) {
    if (!path) throw Fail{CUDA_ERROR_INVALID_VALUE};
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Fail{CUDA_ERROR_FILE_NOT_FOUND};
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    bytes.push_back(0);
    return bytes;
}

void parameter_info(const EntryPoint &entry, size_t index, size_t *offset, size_t *size) {
    if (index >= entry.parameters.size()) throw Fail{CUDA_ERROR_INVALID_VALUE};
    require(offset) = entry.parameters[index].offset;
    if (size) *size = entry.parameters[index].size;
}

FunctionPtr function_of(Call &call, const ModulePtr &module, const std::string &name) {
    call.record.note = name;
    auto known = module->functions.find(name);
    if (known != module->functions.end()) return known->second;
    for (const EntryPoint &entry : module->image->entries) {
        if (entry.name != name) continue;
        FunctionPtr function = make_function(*module->image, entry);
        function->context = module->context;
        function->module = module;
        function->handle = reinterpret_cast<CUfunction>(world().functions.add(function));
        module->functions[name] = function;
        return function;
    }
    throw Fail{CUDA_ERROR_NOT_FOUND};
}

FunctionPtr find_function(Call &call, CUfunction handle, const ContextPtr &context) {
    call.record.handle = reinterpret_cast<uint64_t>(handle);
    if (FunctionPtr found = world().functions.find(handle)) return found;
    FunctionPtr kernel = world().kernels.find(handle);
    if (!kernel) refuse_dead(world().functions, handle, call.name(), "function");
    std::shared_ptr<Library> library = kernel->library.lock();
    if (!library || !context) throw Fail{CUDA_ERROR_INVALID_HANDLE};
    ModulePtr module = module_of_library(library, context);
    FunctionPtr function = function_of(call, module, kernel->entry.name);
    function->max_dynamic_shared = std::max(function->max_dynamic_shared, kernel->max_dynamic_shared);
    return function;
}

namespace {

ModulePtr find_module(Call &call, CUmodule handle) {
    call.record.handle = reinterpret_cast<uint64_t>(handle);
    ModulePtr found = world().modules.find(handle);
    if (!found) refuse_dead(world().modules, handle, call.name(), "module");
    return found;
}

void load(Call &call, CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
    require(out);
    auto parsed = read_image(call, image, 90, count, options, values);
    // Code goes to the device behind everything that the context does there.
    wait_for_context(call.guard(), call.name(), call.context_ptr());
    ModulePtr module = make_module(call.context_ptr(), parsed);
    *out = module->handle;
    call.record.handle = reinterpret_cast<uint64_t>(*out);
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuModuleLoadData(CUmodule *out, const void *image) {
    return entry("cuModuleLoadData", kContext, [&](Call &call) { load(call, out, image, 0, nullptr, nullptr); });
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *options,
                                    void **values) {
    return entry("cuModuleLoadDataEx", kContext, [&](Call &call) { load(call, out, image, count, options, values); });
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *out, const void *image) {
    return entry("cuModuleLoadFatBinary", kContext, [&](Call &call) { load(call, out, image, 0, nullptr, nullptr); });
}

CUresult CUDAAPI cuModuleLoad(CUmodule *out, const char *path) {
    return entry("cuModuleLoad", kContext, [&](Call &call) {
        std::vector<char> bytes = read_file(path);
        load(call, out, bytes.data(), 0, nullptr, nullptr);
    });
}

CUresult CUDAAPI cuModuleUnload(CUmodule handle) {
    return entry("cuModuleUnload", kHealthy | kUnsafe, [&](Call &call) {
        ModulePtr module = find_module(call, handle);
        if (module->of_library) throw Fail{CUDA_ERROR_NOT_PERMITTED};
        unload_module(call, module);
    });
}

CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    return entry("cuModuleGetLoadingMode", kInit, [&](Call &) {
        const char *text = std::getenv("CUDA_MODULE_LOADING");
        require(mode) = text && std::strcmp(text, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
    return entry("cuModuleGetFunction", kHealthy, [&](Call &call) {
        ModulePtr module = find_module(call, handle);
        require(out);
        if (!name || !*name) throw Fail{CUDA_ERROR_INVALID_VALUE};
        *out = function_of(call, module, name)->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuModuleGetFunctionCount(unsigned *count, CUmodule handle) {
    return entry("cuModuleGetFunctionCount", kContext, [&](Call &call) {
        require(count) = static_cast<unsigned>(find_module(call, handle)->image->entries.size());
    });
}

CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *out, unsigned count, CUmodule handle) {
    return entry("cuModuleEnumerateFunctions", kContext, [&](Call &call) {
        ModulePtr module = find_module(call, handle);
        for (unsigned i = 0; i < count && i < module->image->entries.size(); ++i)
            out[i] = function_of(call, module, module->image->entries[i].name)->handle;
    });
}

CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr *address, size_t *nbytes, CUmodule handle, const char *name) {
    return entry("cuModuleGetGlobal", kContext, [&](Call &call) {
        ModulePtr module = find_module(call, handle);
        if (!name || !*name || (!address && !nbytes)) throw Fail{CUDA_ERROR_INVALID_VALUE};
        for (const EntryPoint &entry : module->image->entries)
            if (entry.name == name) throw Fail{CUDA_ERROR_INVALID_VALUE};
        auto it = module->globals.find(name);
        if (it == module->globals.end()) throw Fail{CUDA_ERROR_NOT_FOUND};
        if (address) *address = it->second->base;
        if (nbytes) *nbytes = it->second->nbytes;
    });
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
    return entry("cuFuncGetParamInfo", kHealthy, [&](Call &call) {
        parameter_info(find_function(call, handle, call.context_ptr())->entry, index, offset, size);
    });
}
