// Copies and fills, synchronous and in stream order.
#include <cstring>

#include "capture.h"
#include "memory.h"

using namespace sim;

namespace {

enum class Side { host, device, either };

struct End {
    CUdeviceptr address;
    Side side;
    bool pageable = false;
    int device = -1;
};

// Finds out what an address is, as unified addressing does; checks it where it must be a device's.
End classify(Call &call, CUdeviceptr address, size_t nbytes, Side side) {
    End end{address, side};
    AllocationPtr found = find_allocation(world().host_view, address, nbytes);
    if (side == Side::host) {
        end.pageable = !found;
        if (!found && find_allocation(world().freed, address, 0)) {
            violation(call.name(), "use after free of host memory", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        return end;
    }
    bool device_side = found || is_device_address(address);
    if (side == Side::either && !device_side) {
        end.side = Side::host;
        end.pageable = true;
        return end;
    }
    check_host_range(call.name(), address, nbytes);
    found = find_allocation(world().host_view, address, nbytes);
    bool pinned = found->kind == MemoryKind::pinned || found->kind == MemoryKind::registered;
    end.side = side == Side::either && pinned ? Side::host : Side::device;
    end.device = found->device;
    return end;
}

std::string direction(const End &to, const End &from) {
    if (to.side == Side::device && from.side == Side::device) return to.device == from.device ? "DtoD" : "PtoP";
    std::string out = from.side == Side::device ? "Dto" : "Hto";
    return out + (to.side == Side::device ? "D" : "H");
}

// The copy engine reaches the memory of every device; access rights are for kernels.
char *reach(Exec &run, const End &end, size_t nbytes) {
    if (end.side == Side::host) return reinterpret_cast<char *>(end.address);
    Guard guard(world().lock);
    AllocationPtr found = find_allocation(world().device_view, end.address, nbytes);
    if (!found) {
        guard.unlock();
        return static_cast<char *>(run.at(end.address, nbytes, false)); // throws, with the reason
    }
    return static_cast<char *>(backing(end.address));
}

struct Rows {
    size_t width, height, to_pitch, from_pitch;
    size_t to_span() const { return height ? (height - 1) * to_pitch + width : 0; }
    size_t from_span() const { return height ? (height - 1) * from_pitch + width : 0; }
};

// Pageable memory is staged by the driver before the call returns, up to this size.
constexpr size_t kStaged = 65536;

void copy(Call &call, CUdeviceptr to, Side to_side, CUdeviceptr from, Side from_side, Rows rows, CUstream handle,
          bool wait) {
    StreamPtr stream = call.stream(handle);
    size_t nbytes = rows.width * rows.height;
    call.record.nbytes = nbytes;
    if (nbytes == 0) return;
    if (wait) {
        call.check_capture_allows();
        refuse_if_capturing(call, stream);
    }
    End target = classify(call, to, rows.to_span(), to_side);
    End source = classify(call, from, rows.from_span(), from_side);
    Operation operation{"copy", direction(target, source)};
    operation.nbytes = nbytes;
    std::shared_ptr<std::vector<char>> staged;
    bool must_wait = wait;
    if (!wait && !stream->capture) {
        if (target.pageable) must_wait = true;
        if (source.pageable && target.side == Side::device) {
            if (rows.from_span() <= kStaged) {
                const char *bytes = reinterpret_cast<const char *>(from);
                staged = std::make_shared<std::vector<char>>(bytes, bytes + rows.from_span());
            } else {
                must_wait = true;
            }
        }
        if (must_wait) call.record.note = "pageable: waits";
    }
    operation.work = [=](Exec &run) {
        char *t = reach(run, target, rows.to_span());
        const char *f = staged ? staged->data() : reach(run, source, rows.from_span());
        if (rows.height == 1) {
            std::memmove(t, f, rows.width);
            return;
        }
        for (size_t row = 0; row < rows.height; ++row)
            std::memmove(t + row * rows.to_pitch, f + row * rows.from_pitch, rows.width);
    };
    submit(call, stream, CU_GRAPH_NODE_TYPE_MEMCPY, std::move(operation));
    if (!must_wait) return;
    wait_for_stream(call.guard(), call.name(), stream);
    call.check_healthy(*stream->context);
}

Rows flat(size_t nbytes) { return {nbytes, 1, nbytes, nbytes}; }

CUdeviceptr host(const void *p) { return reinterpret_cast<CUdeviceptr>(p); }

void copy_2d(Call &call, const CUDA_MEMCPY2D *p, CUstream stream, bool wait) {
    const CUDA_MEMCPY2D &c = require(p);
    auto end = [](CUmemorytype type, const void *h, CUdeviceptr d, CUdeviceptr *address, Side *side) {
        switch (type) {
        case CU_MEMORYTYPE_HOST:
            *address = host(h);
            *side = Side::host;
            break;
        case CU_MEMORYTYPE_DEVICE:
            *address = d;
            *side = Side::device;
            break;
        case CU_MEMORYTYPE_UNIFIED:
            *address = d;
            *side = Side::either;
            break;
        default: throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
    };
    CUdeviceptr to, from;
    Side to_side, from_side;
    end(c.dstMemoryType, c.dstHost, c.dstDevice, &to, &to_side);
    end(c.srcMemoryType, c.srcHost, c.srcDevice, &from, &from_side);
    size_t to_pitch = c.dstPitch ? c.dstPitch : c.WidthInBytes;
    size_t from_pitch = c.srcPitch ? c.srcPitch : c.WidthInBytes;
    if (c.WidthInBytes + c.dstXInBytes > to_pitch || c.WidthInBytes + c.srcXInBytes > from_pitch)
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    copy(call, to + c.dstY * to_pitch + c.dstXInBytes, to_side, from + c.srcY * from_pitch + c.srcXInBytes, from_side,
         {c.WidthInBytes, c.Height, to_pitch, from_pitch}, stream, wait);
}

void copy_peer(Call &call, CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
               size_t nbytes, CUstream stream, bool wait) {
    for (CUcontext handle : {to_context, from_context}) {
        ContextPtr context = world().contexts.find(handle);
        if (!context || !context->alive) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    }
    copy(call, to, Side::device, from, Side::device, flat(nbytes), stream, wait);
    call.record.kind = "PtoP";
}

void fill(Call &call, CUdeviceptr to, size_t pitch, uint32_t value, size_t unit, size_t width, size_t height,
          CUstream handle, bool wait) {
    StreamPtr stream = call.stream(handle);
    size_t row_bytes = width * unit;
    call.record.nbytes = row_bytes * height;
    call.record.handle = to;
    if (row_bytes == 0 || height == 0) return;
    if (to % unit || (height > 1 && pitch % unit)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (height > 1 && pitch < row_bytes) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (wait) refuse_if_capturing(call, stream);
    size_t span = (height - 1) * pitch + row_bytes;
    End target = classify(call, to, span, Side::device);
    Operation operation{"fill"};
    operation.nbytes = call.record.nbytes;
    operation.work = [=](Exec &run) {
        char *bytes = reach(run, target, span);
        for (size_t row = 0; row < height; ++row) {
            char *begin = bytes + row * pitch;
            if (unit == 1) std::memset(begin, static_cast<int>(value), row_bytes);
            else
                for (size_t i = 0; i < width; ++i) std::memcpy(begin + i * unit, &value, unit);
        }
    };
    // A memset call without a stream is asynchronous to the host for device memory.
    submit(call, stream, CU_GRAPH_NODE_TYPE_MEMSET, std::move(operation));
}

} // namespace

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return entry("cuMemcpy", kContext,
                 [&](Call &call) { copy(call, to, Side::either, from, Side::either, flat(n), nullptr, true); });
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return entry("cuMemcpyAsync", kContext,
                 [&](Call &call) { copy(call, to, Side::either, from, Side::either, flat(n), stream, false); });
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t n) {
    return entry("cuMemcpyHtoD", kContext,
                 [&](Call &call) { copy(call, to, Side::device, host(from), Side::host, flat(n), nullptr, true); });
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n, CUstream stream) {
    return entry("cuMemcpyHtoDAsync", kContext,
                 [&](Call &call) { copy(call, to, Side::device, host(from), Side::host, flat(n), stream, false); });
}

CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n) {
    return entry("cuMemcpyDtoH", kContext,
                 [&](Call &call) { copy(call, host(to), Side::host, from, Side::device, flat(n), nullptr, true); });
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n, CUstream stream) {
    return entry("cuMemcpyDtoHAsync", kContext,
                 [&](Call &call) { copy(call, host(to), Side::host, from, Side::device, flat(n), stream, false); });
}

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return entry("cuMemcpyDtoD", kContext,
                 [&](Call &call) { copy(call, to, Side::device, from, Side::device, flat(n), nullptr, true); });
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return entry("cuMemcpyDtoDAsync", kContext,
                 [&](Call &call) { copy(call, to, Side::device, from, Side::device, flat(n), stream, false); });
}

CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D *p) {
    return entry("cuMemcpy2D", kContext, [&](Call &call) { copy_2d(call, p, nullptr, true); });
}

CUresult CUDAAPI cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *p) {
    return entry("cuMemcpy2DUnaligned", kContext, [&](Call &call) { copy_2d(call, p, nullptr, true); });
}

CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D *p, CUstream stream) {
    return entry("cuMemcpy2DAsync", kContext, [&](Call &call) { copy_2d(call, p, stream, false); });
}

CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n) {
    return entry("cuMemcpyPeer", kContext, [&](Call &call) { copy_peer(call, to, tc, from, fc, n, nullptr, true); });
}

CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n,
                                   CUstream stream) {
    return entry("cuMemcpyPeerAsync", kContext,
                 [&](Call &call) { copy_peer(call, to, tc, from, fc, n, stream, false); });
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr to, unsigned char value, size_t n) {
    return entry("cuMemsetD8", kContext, [&](Call &call) { fill(call, to, n, value, 1, n, 1, nullptr, true); });
}

CUresult CUDAAPI cuMemsetD16(CUdeviceptr to, unsigned short value, size_t n) {
    return entry("cuMemsetD16", kContext, [&](Call &call) { fill(call, to, 2 * n, value, 2, n, 1, nullptr, true); });
}

CUresult CUDAAPI cuMemsetD32(CUdeviceptr to, unsigned value, size_t n) {
    return entry("cuMemsetD32", kContext, [&](Call &call) { fill(call, to, 4 * n, value, 4, n, 1, nullptr, true); });
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
    return entry("cuMemsetD8Async", kContext, [&](Call &call) { fill(call, to, n, value, 1, n, 1, stream, false); });
}

CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream stream) {
    return entry("cuMemsetD16Async", kContext,
                 [&](Call &call) { fill(call, to, 2 * n, value, 2, n, 1, stream, false); });
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream stream) {
    return entry("cuMemsetD32Async", kContext,
                 [&](Call &call) { fill(call, to, 4 * n, value, 4, n, 1, stream, false); });
}

CUresult CUDAAPI cuMemsetD2D8(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
    return entry("cuMemsetD2D8", kContext,
                 [&](Call &call) { fill(call, to, pitch, value, 1, width, height, nullptr, true); });
}

CUresult CUDAAPI cuMemsetD2D16(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height) {
    return entry("cuMemsetD2D16", kContext,
                 [&](Call &call) { fill(call, to, pitch, value, 2, width, height, nullptr, true); });
}

CUresult CUDAAPI cuMemsetD2D32(CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t height) {
    return entry("cuMemsetD2D32", kContext,
                 [&](Call &call) { fill(call, to, pitch, value, 4, width, height, nullptr, true); });
}

CUresult CUDAAPI cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                   CUstream stream) {
    return entry("cuMemsetD2D8Async", kContext,
                 [&](Call &call) { fill(call, to, pitch, value, 1, width, height, stream, false); });
}

CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                                    CUstream stream) {
    return entry("cuMemsetD2D16Async", kContext,
                 [&](Call &call) { fill(call, to, pitch, value, 2, width, height, stream, false); });
}

CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t height,
                                    CUstream stream) {
    return entry("cuMemsetD2D32Async", kContext,
                 [&](Call &call) { fill(call, to, pitch, value, 4, width, height, stream, false); });
}
