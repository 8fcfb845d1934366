// Copies of plain ranges, synchronous and in stream order.
#include "copy.h"

using namespace sim;

namespace {

void copy_peer(Call &call, CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
               size_t nbytes, CUstream stream, When when) {
    check_peers(to_context, from_context);
    copy(call, to, Side::device, from, Side::device, flat(nbytes), stream, when);
    call.record.kind = "PtoP";
}

void copy_batch(Call &call, CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                const CUmemcpyAttributes *attributes, const size_t *first_of, size_t attribute_count, CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) throw Fail{CUDA_ERROR_INVALID_VALUE};
    bool given = to && from && sizes && attributes && first_of;
    if (!given || !count || !attribute_count || attribute_count > count || first_of[0] != 0)
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    std::vector<When> when(count);
    for (size_t k = 0; k < attribute_count; ++k) {
        size_t end = k + 1 < attribute_count ? first_of[k + 1] : count;
        if (end <= first_of[k] || end > count) throw Fail{CUDA_ERROR_INVALID_VALUE};
        CUmemcpySrcAccessOrder order = attributes[k].srcAccessOrder;
        if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        bool during = order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
        std::fill(when.begin() + static_cast<long>(first_of[k]), when.begin() + static_cast<long>(end),
                  during ? When::during_the_call : When::in_stream_order);
    }
    // A batch has no order of its own. The last one first is as legal, and shows who counts on the first.
    size_t total = 0;
    for (size_t i = count; i-- > 0;) {
        copy(call, to[i], Side::either, from[i], Side::either, flat(sizes[i]), handle, when[i]);
        total += sizes[i];
    }
    call.record.nbytes = total;
}

} // namespace

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return entry("cuMemcpy", kContext, [&](Call &call) {
        copy(call, to, Side::either, from, Side::either, flat(n), nullptr, When::waited_for);
    });
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return entry("cuMemcpyAsync", kHealthy, [&](Call &call) {
        copy(call, to, Side::either, from, Side::either, flat(n), stream, When::in_stream_order);
    });
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t n) {
    return entry("cuMemcpyHtoD", kContext, [&](Call &call) {
        copy(call, to, Side::device, address_of(from), Side::host, flat(n), nullptr, When::waited_for);
    });
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n, CUstream stream) {
    return entry("cuMemcpyHtoDAsync", kHealthy, [&](Call &call) {
        copy(call, to, Side::device, address_of(from), Side::host, flat(n), stream, When::in_stream_order);
    });
}

CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n) {
    return entry("cuMemcpyDtoH", kContext, [&](Call &call) {
        copy(call, address_of(to), Side::host, from, Side::device, flat(n), nullptr, When::waited_for);
    });
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n, CUstream stream) {
    return entry("cuMemcpyDtoHAsync", kHealthy, [&](Call &call) {
        copy(call, address_of(to), Side::host, from, Side::device, flat(n), stream, When::in_stream_order);
    });
}

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return entry("cuMemcpyDtoD", kContext, [&](Call &call) {
        copy(call, to, Side::device, from, Side::device, flat(n), nullptr, When::waited_for);
    });
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return entry("cuMemcpyDtoDAsync", kHealthy, [&](Call &call) {
        copy(call, to, Side::device, from, Side::device, flat(n), stream, When::in_stream_order);
    });
}

CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n) {
    return entry("cuMemcpyPeer", kContext,
                 [&](Call &call) { copy_peer(call, to, tc, from, fc, n, nullptr, When::waited_for); });
}

CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n,
                                   CUstream stream) {
    return entry("cuMemcpyPeerAsync", kHealthy,
                 [&](Call &call) { copy_peer(call, to, tc, from, fc, n, stream, When::in_stream_order); });
}

CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                    CUmemcpyAttributes *attributes, size_t *first_of, size_t attribute_count,
                                    CUstream stream) {
    return entry("cuMemcpyBatchAsync", kHealthy, [&](Call &call) {
        copy_batch(call, to, from, sizes, count, attributes, first_of, attribute_count, stream);
    });
}
