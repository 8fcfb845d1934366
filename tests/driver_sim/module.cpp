#include "module.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "capture.h"
#include "memory.h"

namespace sim {
namespace {

// The log buffers of a load call; the driver writes text and the number of bytes written.
struct Logs {
    char *error = nullptr, *info = nullptr;
    void **error_size = nullptr, **info_size = nullptr;

    Logs(unsigned count, CUjit_option *options, void **values) {
        for (unsigned i = 0; i < count; ++i) switch (options[i]) {
            case CU_JIT_ERROR_LOG_BUFFER: error = static_cast<char *>(values[i]); break;
            case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: error_size = &values[i]; break;
            case CU_JIT_INFO_LOG_BUFFER: info = static_cast<char *>(values[i]); break;
            case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: info_size = &values[i]; break;
            default: break;
            }
    }
    static void write(char *buffer, void **size, const std::string &text) {
        if (!size) return;
        size_t room = reinterpret_cast<size_t>(*size);
        if (!buffer || !room) return;
        size_t n = std::min(room - 1, text.size());
        std::memcpy(buffer, text.data(), n);
        buffer[n] = 0;
        *size = reinterpret_cast<void *>(n);
    }
};

} // namespace

std::shared_ptr<Image> read_image(Call &call, const void *data, int capability, unsigned count, CUjit_option *options,
                                  void **values) {
    if (!data) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (count && (!options || !values)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    Logs logs(count, options, values);
    const unsigned char *bytes = static_cast<const unsigned char *>(data);
    if (std::memcmp(bytes,
                    "\x7f"
                    "ELF",
                    4) == 0 ||
        std::memcmp(bytes, "\x50\xed\x55\xba", 4) == 0) {
        std::fprintf(stderr, "driver_sim: %s was given a cubin or fatbin, which the simulation cannot read\n",
                     call.name());
        throw Fail{CUDA_ERROR_INVALID_IMAGE};
    }
    auto image = std::make_shared<Image>();
    std::string log, text = static_cast<const char *>(data);
    call.record.nbytes = text.size();
    CUresult result = parse_ptx(text, capability, *image, log);
    Logs::write(logs.error, logs.error_size, log);
    Logs::write(logs.info, logs.info_size, "");
    if (result != CUDA_SUCCESS) {
        call.record.note = log;
        throw Fail{result};
    }
    return image;
}

ModulePtr make_module(const ContextPtr &context, std::shared_ptr<Image> image) {
    auto module = std::make_shared<Module>();
    module->id = world().next_id++;
    module->context = context;
    module->image = std::move(image);
    for (const GlobalVariable &variable : module->image->globals) {
        if (!variable.nbytes) continue;
        AllocationPtr memory = allocate_device(*world().devices[context->device], variable.nbytes);
        std::memset(backing(memory->base), 0, variable.nbytes);
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

FunctionPtr function_of(Call &call, const ModulePtr &module, const std::string &name) {
    call.record.note = name;
    auto known = module->functions.find(name);
    if (known != module->functions.end()) return known->second;
    for (const EntryPoint &entry : module->image->entries) {
        if (entry.name != name) continue;
        auto function = std::make_shared<Function>();
        function->context = module->context;
        function->module = module;
        function->entry = entry;
        function->max_dynamic_shared = kDefaultShared - static_cast<int>(entry.static_shared);
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
    ModulePtr &module = library->modules[context];
    if (!module || !world().modules.find(module->handle)) {
        module = make_module(context, library->image);
        module->of_library = true;
    }
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

std::shared_ptr<Library> find_library(Call &call, CUlibrary handle) {
    auto found = world().libraries.find(handle);
    if (!found) refuse_dead(world().libraries, handle, call.name(), "library");
    return found;
}

FunctionPtr find_kernel_handle(Call &call, CUkernel handle) {
    FunctionPtr found = world().kernels.find(handle);
    if (!found) refuse_dead(world().kernels, handle, call.name(), "kernel");
    return found;
}

void load(Call &call, CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
    require(out);
    auto parsed = read_image(call, image, 90, count, options, values);
    ModulePtr module = make_module(call.context_ptr(), parsed);
    *out = module->handle;
    call.record.handle = reinterpret_cast<uint64_t>(*out);
}

void parameter_info(const EntryPoint &entry, size_t index, size_t *offset, size_t *size) {
    if (index >= entry.parameters.size()) throw Fail{CUDA_ERROR_INVALID_VALUE};
    require(offset) = entry.parameters[index].offset;
    if (size) *size = entry.parameters[index].size;
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

CUresult CUDAAPI cuModuleUnload(CUmodule handle) {
    return entry("cuModuleUnload", kContext | kUnsafe, [&](Call &call) {
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
    return entry("cuModuleGetFunction", kContext, [&](Call &call) {
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
        auto it = module->globals.find(&require(name));
        if (it == module->globals.end()) throw Fail{CUDA_ERROR_NOT_FOUND};
        if (address) *address = it->second->base;
        if (nbytes) *nbytes = it->second->nbytes;
    });
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *options, void **values,
                                   unsigned count, CUlibraryOption *, void **, unsigned) {
    return entry("cuLibraryLoadData", kInit, [&](Call &call) {
        require(out);
        auto library = std::make_shared<Library>();
        library->image = read_image(call, code, 90, count, options, values);
        library->handle = reinterpret_cast<CUlibrary>(world().libraries.add(library));
        *out = library->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary handle) {
    return entry("cuLibraryUnload", kInit, [&](Call &call) {
        auto library = find_library(call, handle);
        for (const auto &[context, module] : library->modules)
            if (module && world().modules.find(module->handle)) unload_module(call, module);
        for (const auto &[name, kernel] : library->kernels) world().kernels.remove(kernel->handle);
        world().libraries.remove(handle);
    });
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel *out, CUlibrary handle, const char *name) {
    return entry("cuLibraryGetKernel", kInit, [&](Call &call) {
        auto library = find_library(call, handle);
        require(out);
        FunctionPtr &kernel = library->kernels[&require(name)];
        if (!kernel) {
            for (const EntryPoint &entry : library->image->entries)
                if (entry.name == name) {
                    kernel = std::make_shared<Function>();
                    kernel->library = library;
                    kernel->entry = entry;
                    kernel->max_dynamic_shared = kDefaultShared - static_cast<int>(entry.static_shared);
                    kernel->handle = reinterpret_cast<CUfunction>(world().kernels.add(kernel));
                }
            if (!kernel) {
                library->kernels.erase(name);
                throw Fail{CUDA_ERROR_NOT_FOUND};
            }
        }
        *out = reinterpret_cast<CUkernel>(kernel->handle);
    });
}

CUresult CUDAAPI cuLibraryGetKernelCount(unsigned *count, CUlibrary handle) {
    return entry("cuLibraryGetKernelCount", kInit, [&](Call &call) {
        require(count) = static_cast<unsigned>(find_library(call, handle)->image->entries.size());
    });
}

CUresult CUDAAPI cuLibraryGetModule(CUmodule *out, CUlibrary handle) {
    return entry("cuLibraryGetModule", kContext, [&](Call &call) {
        auto library = find_library(call, handle);
        ModulePtr &module = library->modules[call.context_ptr()];
        if (!module || !world().modules.find(module->handle)) {
            module = make_module(call.context_ptr(), library->image);
            module->of_library = true;
        }
        require(out) = module->handle;
    });
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction *out, CUkernel handle) {
    return entry("cuKernelGetFunction", kContext, [&](Call &call) {
        require(out) = find_function(call, reinterpret_cast<CUfunction>(handle), call.context_ptr())->handle;
    });
}

CUresult CUDAAPI cuKernelGetAttribute(int *out, CUfunction_attribute attribute, CUkernel handle, CUdevice dev) {
    return entry("cuKernelGetAttribute", kInit, [&](Call &call) {
        call.device(dev);
        require(out) = function_attribute(*find_kernel_handle(call, handle), attribute);
    });
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice dev) {
    return entry("cuKernelSetAttribute", kInit, [&](Call &call) {
        call.device(dev);
        set_function_attribute(*find_kernel_handle(call, handle), attribute, value);
    });
}

CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel handle) {
    return entry("cuKernelGetName", kInit,
                 [&](Call &call) { require(name) = find_kernel_handle(call, handle)->entry.name.c_str(); });
}

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel handle, size_t index, size_t *offset, size_t *size) {
    return entry("cuKernelGetParamInfo", kInit,
                 [&](Call &call) { parameter_info(find_kernel_handle(call, handle)->entry, index, offset, size); });
}

CUresult CUDAAPI cuKernelGetLibrary(CUlibrary *out, CUkernel handle) {
    return entry("cuKernelGetLibrary", kInit, [&](Call &call) {
        auto library = find_kernel_handle(call, handle)->library.lock();
        if (!library) throw Fail{CUDA_ERROR_INVALID_HANDLE};
        require(out) = library->handle;
    });
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
    return entry("cuFuncGetParamInfo", kContext, [&](Call &call) {
        parameter_info(find_function(call, handle, call.context_ptr())->entry, index, offset, size);
    });
}
