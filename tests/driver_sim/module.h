// Modules, functions and libraries.
#pragma once

#include "device.h"
#include "image.h"

namespace sim {

struct Function {
    CUfunction handle = nullptr;
    ContextPtr context; // null for a kernel of a library
    std::weak_ptr<Module> module;
    std::weak_ptr<Library> library;
    EntryPoint entry;
    int max_dynamic_shared = 0;
    int carveout = -1;
    int non_portable_cluster = 0;
    int cluster_scheduling = 0;
    bool cluster_is_compiled = false;
    int target = 0, binary = 0; // of its image
};

struct Module {
    CUmodule handle = nullptr;
    uint64_t id = 0;
    ContextPtr context;
    std::shared_ptr<Image> image;
    std::map<std::string, FunctionPtr> functions;
    std::map<std::string, AllocationPtr> globals;
    bool of_library = false;
};

struct Library {
    CUlibrary handle = nullptr;
    std::shared_ptr<Image> image;
    std::map<std::string, FunctionPtr> kernels;
    std::map<ContextPtr, ModulePtr> modules;
};

ModulePtr make_module(const ContextPtr &context, std::shared_ptr<Image> image);
// The library's code in a context: loaded when it is first needed there.
ModulePtr module_of_library(const std::shared_ptr<Library> &library, const ContextPtr &context);
FunctionPtr make_function(const Image &image, const EntryPoint &entry);
// The bytes of a file, and a zero behind them. Throws Fail.
std::vector<char> read_file(const char *path);
void parameter_info(const EntryPoint &entry, size_t index, size_t *offset, size_t *size);
void unload_module(Call &call, const ModulePtr &module);
FunctionPtr function_of(Call &call, const ModulePtr &module, const std::string &name);
// A CUfunction, or a CUkernel passed as one: the function of the given context.
FunctionPtr find_function(Call &call, CUfunction handle, const ContextPtr &context);
int function_attribute(const Function &function, CUfunction_attribute attribute);
void set_function_attribute(Function &function, CUfunction_attribute attribute, int value);
constexpr int kMaxDynamicShared = 232448;
constexpr int kDefaultShared = 49152;

} // namespace sim
