// Fills, of one row or of several.
#include <cstring>

#include "capture.h"
#include "copy.h"

using namespace sim;

namespace {

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
    CopyEnd target{to, Side::device};
    if (!stream->capture) { // a captured fill is looked at when it runs
        target = classify_end(call, to, span, Side::device);
        require_access(*stream->context, to, span, Access::kernel);
    }
    Operation operation{"fill"};
    operation.nbytes = call.record.nbytes;
    operation.work = [=](Exec &run) {
        char *bytes = reach_end(run, target, span);
        for (size_t row = 0; row < height; ++row) {
            char *begin = bytes + row * pitch;
            if (unit == 1) std::memset(begin, static_cast<int>(value), row_bytes);
            else
                for (size_t i = 0; i < width; ++i) std::memcpy(begin + i * unit, &value, unit);
        }
    };
    submit(call, stream, CU_GRAPH_NODE_TYPE_MEMSET, std::move(operation));
    // A call without a stream is asynchronous to the host all the same, but for host memory.
    if (!wait || !target.host_memory) return;
    wait_for_stream(call.guard(), call.name(), stream);
    call.notice_fault();
}

} // namespace

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
    return entry("cuMemsetD8Async", kHealthy | kUnrefused,
                 [&](Call &call) { fill(call, to, n, value, 1, n, 1, stream, false); });
}

CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream stream) {
    return entry("cuMemsetD16Async", kHealthy | kUnrefused,
                 [&](Call &call) { fill(call, to, 2 * n, value, 2, n, 1, stream, false); });
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream stream) {
    return entry("cuMemsetD32Async", kHealthy | kUnrefused,
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
    return entry("cuMemsetD2D8Async", kHealthy | kUnrefused,
                 [&](Call &call) { fill(call, to, pitch, value, 1, width, height, stream, false); });
}

CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                                    CUstream stream) {
    return entry("cuMemsetD2D16Async", kHealthy | kUnrefused,
                 [&](Call &call) { fill(call, to, pitch, value, 2, width, height, stream, false); });
}

CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t height,
                                    CUstream stream) {
    return entry("cuMemsetD2D32Async", kHealthy | kUnrefused,
                 [&](Call &call) { fill(call, to, pitch, value, 4, width, height, stream, false); });
}
