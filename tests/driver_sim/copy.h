// The engine of every copy: what its ends are, how they are reached, and when the host waits.
#pragma once

#include "memory.h"

namespace sim {

enum class Side { host, device, either };

struct CopyEnd {
    CUdeviceptr address;
    Side side;
    bool pageable = false;
    bool host_memory = false; // of the driver's making, or registered
    bool managed = false;
    int device = -1;
};

// Finds out what an address is, as unified addressing does; checks it where it must be a device's. Throws Fail.
CopyEnd classify_end(Call &call, CUdeviceptr address, size_t nbytes, Side side);
// The real bytes, seen by the copy engine of the running stream. Throws Fault.
char *reach_end(Exec &run, const CopyEnd &end, size_t nbytes);

// Rows of one end: bytes from a row to the next, and from a slice to the next.
struct Strides {
    size_t pitch = 0;
    size_t slice = 0;
};

struct Box {
    size_t width = 0, height = 1, depth = 1; // width in bytes
    Strides to, from;

    bool empty() const { return !width || !height || !depth; }
    size_t span(const Strides &s) const { return (depth - 1) * s.slice + (height - 1) * s.pitch + width; }
};

inline Box flat(size_t nbytes) { return {nbytes, 1, 1, {nbytes, nbytes}, {nbytes, nbytes}}; }
inline CUdeviceptr address_of(const void *p) { return reinterpret_cast<CUdeviceptr>(p); }

// When the source is read, and whether the host waits for the copy.
enum class When { in_stream_order, during_the_call, waited_for };

void copy(Call &call, CUdeviceptr to, Side to_side, CUdeviceptr from, Side from_side, const Box &box, CUstream stream,
          When when);
// Between two contexts: each must be live.
void check_peers(CUcontext to, CUcontext from);

} // namespace sim
