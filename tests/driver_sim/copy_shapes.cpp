// Copies of rows and of slices of rows.
#include "copy.h"
#include "device.h"

using namespace sim;

namespace {

// One end of a shaped copy, from the fields of any of the structs that describe them.
struct ShapedEnd {
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    size_t x, y, z;
    size_t pitch, height; // 0: as tight as the box

    Side side() const {
        switch (type) {
        case CU_MEMORYTYPE_HOST: return Side::host;
        case CU_MEMORYTYPE_DEVICE: return Side::device;
        case CU_MEMORYTYPE_UNIFIED: return Side::either;
        default: throw Fail{CUDA_ERROR_INVALID_VALUE}; // arrays are not simulated
        }
    }
    CUdeviceptr begin(const Strides &s) const {
        return (type == CU_MEMORYTYPE_HOST ? address_of(host) : device) + z * s.slice + y * s.pitch + x;
    }
};

bool exceeds(size_t begin, size_t length, size_t limit) { return begin > limit || length > limit - begin; }

Strides strides_of(Call &call, const ShapedEnd &end, const Box &box) {
    size_t widest =
        static_cast<size_t>(device_attribute(*world().devices[call.context().device], CU_DEVICE_ATTRIBUTE_MAX_PITCH));
    size_t pitch = end.pitch ? end.pitch : box.width;
    size_t height = end.height ? end.height : box.height;
    if (pitch > widest || exceeds(end.x, box.width, pitch) || exceeds(end.y, box.height, height))
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    size_t slice, all;
    if (__builtin_mul_overflow(pitch, height, &slice) || __builtin_mul_overflow(slice, box.depth + end.z, &all))
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    return {pitch, slice};
}

void copy_box(Call &call, Box box, const ShapedEnd &to, const ShapedEnd &from, CUstream stream, When when) {
    Side to_side = to.side(), from_side = from.side();
    if (box.empty()) {
        call.stream(stream);
        return;
    }
    box.to = strides_of(call, to, box);
    box.from = strides_of(call, from, box);
    copy(call, to.begin(box.to), to_side, from.begin(box.from), from_side, box, stream, when);
}

void copy_2d(Call &call, const CUDA_MEMCPY2D *p, CUstream stream, When when) {
    const CUDA_MEMCPY2D &c = require(p);
    Box box;
    box.width = c.WidthInBytes;
    box.height = c.Height;
    // The rows above belong to no slice: nothing limits how many there are.
    auto rows = [&](size_t y) { return y + c.Height; };
    copy_box(call, box, {c.dstMemoryType, c.dstHost, c.dstDevice, c.dstXInBytes, c.dstY, 0, c.dstPitch, rows(c.dstY)},
             {c.srcMemoryType, c.srcHost, c.srcDevice, c.srcXInBytes, c.srcY, 0, c.srcPitch, rows(c.srcY)}, stream,
             when);
}

// CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER name their fields alike.
template <class Struct> void copy_3d(Call &call, const Struct &c, CUstream stream, When when) {
    if (c.srcLOD || c.dstLOD) throw Fail{CUDA_ERROR_INVALID_VALUE};
    Box box;
    box.width = c.WidthInBytes;
    box.height = c.Height;
    box.depth = c.Depth;
    copy_box(call, box,
             {c.dstMemoryType, c.dstHost, c.dstDevice, c.dstXInBytes, c.dstY, c.dstZ, c.dstPitch, c.dstHeight},
             {c.srcMemoryType, c.srcHost, c.srcDevice, c.srcXInBytes, c.srcY, c.srcZ, c.srcPitch, c.srcHeight}, stream,
             when);
}

void copy_3d_peer(Call &call, const CUDA_MEMCPY3D_PEER *p, CUstream stream, When when) {
    const CUDA_MEMCPY3D_PEER &c = require(p);
    check_peers(c.dstContext, c.srcContext);
    copy_3d(call, c, stream, when);
}

} // namespace

CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D *p) {
    return entry("cuMemcpy2D", kContext, [&](Call &call) { copy_2d(call, p, nullptr, When::waited_for); });
}

CUresult CUDAAPI cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *p) {
    return entry("cuMemcpy2DUnaligned", kContext, [&](Call &call) { copy_2d(call, p, nullptr, When::waited_for); });
}

CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D *p, CUstream stream) {
    return entry("cuMemcpy2DAsync", kContext, [&](Call &call) { copy_2d(call, p, stream, When::in_stream_order); });
}

CUresult CUDAAPI cuMemcpy3D(const CUDA_MEMCPY3D *p) {
    return entry("cuMemcpy3D", kContext, [&](Call &call) { copy_3d(call, require(p), nullptr, When::waited_for); });
}

CUresult CUDAAPI cuMemcpy3DAsync(const CUDA_MEMCPY3D *p, CUstream stream) {
    return entry("cuMemcpy3DAsync", kContext,
                 [&](Call &call) { copy_3d(call, require(p), stream, When::in_stream_order); });
}

CUresult CUDAAPI cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *p) {
    return entry("cuMemcpy3DPeer", kContext, [&](Call &call) { copy_3d_peer(call, p, nullptr, When::waited_for); });
}

CUresult CUDAAPI cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *p, CUstream stream) {
    return entry("cuMemcpy3DPeerAsync", kContext,
                 [&](Call &call) { copy_3d_peer(call, p, stream, When::in_stream_order); });
}
