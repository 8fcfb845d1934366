// How much of a kernel fits on the device: a model of an H200, by the rules of the occupancy calculator.
#pragma once

#include "kernels.h"

namespace sim {

constexpr int kProcessors = 132;
constexpr unsigned kPortableCluster = 8, kLargestCluster = 16;

// Threads of a block that the registers, and the entry's own limit, allow.
int max_threads(const EntryPoint &entry);
int blocks_per_processor(const Function &f, int block_size, size_t dynamic_shared);
int active_clusters(const Function &f, unsigned cluster_size, int block_size, size_t dynamic_shared);

} // namespace sim
