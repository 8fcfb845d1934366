// The kernels that the simulation can run: host code under the names of PTX entries.
#pragma once

#include <cstring>

#include "control.h"
#include "module.h"

namespace sim {

struct LaunchShape {
    unsigned grid[3] = {1, 1, 1};
    unsigned block[3] = {1, 1, 1};
    unsigned cluster[3] = {0, 0, 0};
    unsigned shared = 0;
    bool cooperative = false;
    uint64_t blocks() const { return uint64_t{grid[0]} * grid[1] * grid[2]; }
    uint64_t block_threads() const { return uint64_t{block[0]} * block[1] * block[2]; }
};

struct KernelCall {
    const EntryPoint &entry;
    const std::vector<unsigned char> &bytes; // the parameter buffer as the device sees it
    const LaunchShape &shape;

    template <class T> T get(size_t index) const {
        T value;
        std::memcpy(&value, bytes.data() + entry.parameters[index].offset, sizeof value);
        return value;
    }
};

using KernelBody = std::function<void(Exec &, const KernelCall &)>;

// Null if no kernel of the simulation has this name as its beginning.
KernelBody find_kernel(const EntryPoint &entry);
void register_kernel(const std::string &prefix, kina_sim_kernel body, void *user);

} // namespace sim
