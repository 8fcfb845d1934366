// A kernel with its shape and arguments, ready to be queued or to become a node of a graph.
#pragma once

#include "kernels.h"
#include "stream.h"

namespace sim {

struct KernelLaunch {
    FunctionPtr function;
    LaunchShape shape;
    std::vector<unsigned char> bytes; // the parameters as the device sees them
};

// Checks everything that a launch checks. Throws Fail.
Operation prepare_launch(Call &call, const FunctionPtr &f, LaunchShape shape, void **params, void **extra);

} // namespace sim
