// Names and texts of results. The names come from cuda.h; the texts are the driver's where known.
#include "call.h"

namespace sim {
namespace {

struct ErrorName {
    int code;
    const char *name;
};

const ErrorName kNames[] = {
#include "error_names.inc"
};

const std::map<int, const char *> kTexts = {
    {0, "no error"},
    {1, "invalid argument"},
    {2, "out of memory"},
    {3, "initialization error"},
    {4, "driver shutting down"},
    {100, "no CUDA-capable device is detected"},
    {101, "invalid device ordinal"},
    {200, "device kernel image is invalid"},
    {201, "invalid device context"},
    {209, "no kernel image is available for execution on the device"},
    {217, "peer access is not supported between these two devices"},
    {218, "a PTX JIT compilation failed"},
    {222, "the provided PTX was compiled with an unsupported toolchain."},
    {400, "invalid resource handle"},
    {401, "the operation cannot be performed in the present state"},
    {500, "named symbol not found"},
    {600, "device not ready"},
    {700, "an illegal memory access was encountered"},
    {701, "too many resources requested for launch"},
    {704, "peer access is already enabled"},
    {705, "peer access has not been enabled"},
    {708, "cannot set while device is active in this process"},
    {709, "context is destroyed"},
    {712, "part or all of the requested memory range is already mapped"},
    {713, "pointer does not correspond to a registered memory region"},
    {719, "unspecified launch failure"},
    {720, "too many blocks in cooperative launch"},
    {800, "operation not permitted"},
    {801, "operation not supported"},
    {900, "operation not permitted when stream is capturing"},
    {901, "operation failed due to a previous error during capture"},
    {902, "operation would result in a merge of separate capture sequences"},
    {903, "capture was not ended in the same stream as it began"},
    {904, "capturing stream has unjoined work"},
    {905, "dependency created on uncaptured work in another stream"},
    {906, "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "operation not permitted on an event last recorded in a capturing stream"},
    {908, "attempt to terminate a thread-local capture sequence from another thread"},
    {912, "misconfigured cluster size"},
    {999, "unknown error"},
};

} // namespace
} // namespace sim

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    for (const auto &entry : sim::kNames)
        if (entry.code == static_cast<int>(error)) {
            *text = entry.name;
            return CUDA_SUCCESS;
        }
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    auto it = sim::kTexts.find(static_cast<int>(error));
    if (it != sim::kTexts.end()) {
        *text = it->second;
        return CUDA_SUCCESS;
    }
    return cuGetErrorName(error, text);
}
