// Libraries: code that belongs to no context, until one of its kernels is used in one.
#include "memory.h"
#include "module.h"

namespace sim {

ModulePtr module_of_library(const std::shared_ptr<Library> &library, const ContextPtr &context) {
    ModulePtr &module = library->modules[context];
    if (!module || !world().modules.find(module->handle)) {
        module = make_module(context, library->image);
        module->of_library = true;
    }
    return module;
}

namespace {

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

void load_library(Call &call, CUlibrary *out, const void *code, CUjit_option *options, void **values, unsigned count) {
    require(out);
    auto library = std::make_shared<Library>();
    library->image = read_image(call, code, 90, count, options, values);
    library->handle = reinterpret_cast<CUlibrary>(world().libraries.add(library));
    *out = library->handle;
    call.record.handle = reinterpret_cast<uint64_t>(*out);
}

CUkernel kernel_of(const std::shared_ptr<Library> &library, const std::string &name) {
    FunctionPtr &kernel = library->kernels[name];
    for (const EntryPoint &entry : library->image->entries)
        if (!kernel && entry.name == name) {
            kernel = make_function(*library->image, entry);
            kernel->library = library;
            kernel->handle = reinterpret_cast<CUfunction>(world().kernels.add(kernel));
        }
    if (kernel) return reinterpret_cast<CUkernel>(kernel->handle);
    library->kernels.erase(name);
    throw Fail{CUDA_ERROR_NOT_FOUND};
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *options, void **values,
                                   unsigned count, CUlibraryOption *, void **, unsigned) {
    return entry("cuLibraryLoadData", kInit,
                 [&](Call &call) { load_library(call, out, code, options, values, count); });
}

CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *options, void **values,
                                       unsigned count, CUlibraryOption *, void **, unsigned) {
    return entry("cuLibraryLoadFromFile", kInit, [&](Call &call) {
        std::vector<char> bytes = read_file(path);
        load_library(call, out, bytes.data(), options, values, count);
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
        require(out) = kernel_of(library, &require(name));
    });
}

CUresult CUDAAPI cuLibraryGetKernelCount(unsigned *count, CUlibrary handle) {
    return entry("cuLibraryGetKernelCount", kInit, [&](Call &call) {
        require(count) = static_cast<unsigned>(find_library(call, handle)->image->entries.size());
    });
}

CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *out, unsigned count, CUlibrary handle) {
    return entry("cuLibraryEnumerateKernels", kInit, [&](Call &call) {
        auto library = find_library(call, handle);
        for (unsigned i = 0; i < count && i < library->image->entries.size(); ++i)
            (&require(out))[i] = kernel_of(library, library->image->entries[i].name);
    });
}

CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *address, size_t *nbytes, CUlibrary handle, const char *name) {
    return entry("cuLibraryGetGlobal", kContext, [&](Call &call) {
        ModulePtr module = module_of_library(find_library(call, handle), call.context_ptr());
        auto it = module->globals.find(&require(name));
        if (it == module->globals.end()) throw Fail{CUDA_ERROR_NOT_FOUND};
        if (address) *address = it->second->base;
        if (nbytes) *nbytes = it->second->nbytes;
    });
}

CUresult CUDAAPI cuLibraryGetModule(CUmodule *out, CUlibrary handle) {
    return entry("cuLibraryGetModule", kContext, [&](Call &call) {
        require(out) = module_of_library(find_library(call, handle), call.context_ptr())->handle;
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
