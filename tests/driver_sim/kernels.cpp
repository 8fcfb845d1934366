#include "kernels.h"

#include <chrono>
#include <thread>

#include "memory.h"

namespace sim {
namespace {

struct Known {
    std::vector<size_t> sizes; // of the first parameters
    KernelBody body;
};

// A one-dimensional kernel: thread i does element i, so a grid too small leaves elements untouched.
size_t covered(const KernelCall &call, uint32_t n) {
    uint64_t threads = uint64_t{call.shape.grid[0]} * call.shape.block[0];
    return static_cast<size_t>(std::min<uint64_t>(n, threads));
}

float *floats(Exec &run, CUdeviceptr address, size_t n, bool write) {
    if (address % sizeof(float)) throw Fault{CUDA_ERROR_MISALIGNED_ADDRESS, run.what() + ": misaligned address"};
    return static_cast<float *>(run.at(address, n * sizeof(float), write));
}

void saxpy(Exec &run, const KernelCall &call) {
    size_t n = covered(call, call.get<uint32_t>(3));
    float *y = floats(run, call.get<CUdeviceptr>(0), n, true);
    const float *x = floats(run, call.get<CUdeviceptr>(1), n, false);
    float a = call.get<float>(2);
    for (size_t i = 0; i < n; ++i) y[i] += a * x[i];
}

void fill(Exec &run, const KernelCall &call) {
    size_t n = covered(call, call.get<uint32_t>(2));
    float *y = floats(run, call.get<CUdeviceptr>(0), n, true);
    std::fill(y, y + n, call.get<float>(1));
}

void copy(Exec &run, const KernelCall &call) {
    size_t n = covered(call, call.get<uint32_t>(2));
    float *y = floats(run, call.get<CUdeviceptr>(0), n, true);
    const float *x = floats(run, call.get<CUdeviceptr>(1), n, false);
    std::memmove(y, x, n * sizeof(float));
}

void add_one(Exec &run, const KernelCall &call) {
    size_t n = covered(call, call.get<uint32_t>(1));
    float *y = floats(run, call.get<CUdeviceptr>(0), n, true);
    for (size_t i = 0; i < n; ++i) y[i] += 1.0f;
}

void spin(Exec &, const KernelCall &call) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(call.get<uint64_t>(0)));
}

void write_args(Exec &run, const KernelCall &call) {
    size_t n = call.entry.parameter_bytes;
    std::memcpy(run.at(call.get<CUdeviceptr>(0), n, true), call.bytes.data(), n);
}

void trap(Exec &run, const KernelCall &) { throw Fault{CUDA_ERROR_ILLEGAL_ADDRESS, run.what() + ": trap"}; }

std::map<std::string, Known> &known() {
    static auto *instance = new std::map<std::string, Known>{
        {"saxpy", {{8, 8, 4, 4}, saxpy}},
        {"fill", {{8, 4, 4}, fill}},
        {"copy", {{8, 8, 4}, copy}},
        {"add_one", {{8, 4}, add_one}},
        {"spin", {{8}, spin}},
        {"write_args", {{8}, write_args}},
        {"trap", {{}, trap}},
    };
    return *instance;
}

// "_Z5saxpyPfPKffj" -> "saxpyPfPKffj": enough of C++ mangling for a prefix.
std::string plain_name(const std::string &name) {
    if (name.compare(0, 2, "_Z") != 0) return name;
    size_t i = 2;
    while (i < name.size() && std::isdigit(static_cast<unsigned char>(name[i]))) ++i;
    return name.substr(i);
}

} // namespace

KernelBody find_kernel(const EntryPoint &entry) {
    std::string name = plain_name(entry.name);
    const Known *best = nullptr;
    size_t length = 0;
    for (const auto &[prefix, kernel] : known()) {
        if (name.compare(0, prefix.size(), prefix) != 0 || prefix.size() <= length) continue;
        if (entry.parameters.size() < kernel.sizes.size()) continue;
        bool fits = true;
        for (size_t i = 0; i < kernel.sizes.size(); ++i) fits = fits && entry.parameters[i].size == kernel.sizes[i];
        if (!fits) continue;
        best = &kernel;
        length = prefix.size();
    }
    return best ? best->body : nullptr;
}

void register_kernel(const std::string &prefix, kina_sim_kernel body, void *user) {
    Known kernel;
    kernel.body = [body, user](Exec &run, const KernelCall &call) {
        std::vector<size_t> offsets, sizes;
        for (const Parameter &p : call.entry.parameters) {
            offsets.push_back(p.offset);
            sizes.push_back(p.size);
        }
        kina_sim_launch launch{};
        launch.name = call.entry.name.c_str();
        launch.parameters = call.bytes.data();
        launch.parameter_bytes = call.bytes.size();
        launch.parameter_count = offsets.size();
        launch.offsets = offsets.data();
        launch.sizes = sizes.data();
        std::memcpy(launch.grid, call.shape.grid, sizeof launch.grid);
        std::memcpy(launch.block, call.shape.block, sizeof launch.block);
        launch.shared_bytes = call.shape.shared;
        launch.opaque = &run;
        int result = body(&launch, user);
        if (result) throw Fault{static_cast<CUresult>(result), call.entry.name + ": reported by its host code"};
    };
    Guard guard(world().lock);
    known()[prefix] = std::move(kernel);
}

} // namespace sim

extern "C" void *kina_sim_launch_at(const kina_sim_launch *launch, unsigned long long address, size_t nbytes,
                                    int write) {
    try {
        return static_cast<sim::Exec *>(launch->opaque)->at(address, nbytes, write != 0);
    } catch (const sim::Fault &fault) {
        sim::violation("kernel", fault.why, address);
        return nullptr;
    }
}
