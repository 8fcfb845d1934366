// Modules, functions and libraries made of PTX text.
#pragma once

#include "call.h"
#include "device.h"

namespace sim {

struct Parameter {
    size_t offset = 0;
    size_t size = 0;
    size_t alignment = 1;
    std::string type; // "f32", "u64", "b8", ...
};

struct EntryPoint {
    std::string name;
    std::vector<Parameter> parameters;
    size_t parameter_bytes = 0;
    size_t static_shared = 0;
    int max_threads = 1024;
    int registers = 32;
    unsigned required_cluster[3] = {0, 0, 0};
};

struct GlobalVariable {
    std::string name;
    size_t nbytes = 0;
};

struct Image {
    int version_major = 0, version_minor = 0;
    int target = 0; // 90 for sm_90
    std::vector<EntryPoint> entries;
    std::vector<GlobalVariable> globals;
};

// Parses PTX for a device of the given capability. Returns the driver's result; log gets its text.
CUresult parse_ptx(const std::string &text, int capability, Image &image, std::string &log);

struct Function {
    CUfunction handle = nullptr;
    ContextPtr context; // null for a kernel of a library
    std::weak_ptr<Module> module;
    std::weak_ptr<Library> library;
    EntryPoint entry;
    int max_dynamic_shared = 0;
    int carveout = -1;
    int non_portable_cluster = 0;
    bool loaded = false;
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

// Reads and checks an image with the JIT options of the caller. Throws Fail.
std::shared_ptr<Image> read_image(Call &call, const void *data, int capability, unsigned count, CUjit_option *options,
                                  void **values);
ModulePtr make_module(const ContextPtr &context, std::shared_ptr<Image> image);
void unload_module(Call &call, const ModulePtr &module);
FunctionPtr function_of(Call &call, const ModulePtr &module, const std::string &name);
// A CUfunction, or a CUkernel passed as one: the function of the given context.
FunctionPtr find_function(Call &call, CUfunction handle, const ContextPtr &context);
int function_attribute(const Function &function, CUfunction_attribute attribute);
void set_function_attribute(Function &function, CUfunction_attribute attribute, int value);
constexpr int kMaxDynamicShared = 232448;
constexpr int kDefaultShared = 49152;

} // namespace sim
