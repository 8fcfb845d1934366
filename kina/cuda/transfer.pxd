from libc.stdint cimport int64_t

from kina.cuda.cudatypes cimport CUdeviceptr
from kina.cuda.handles cimport kina_runtime

# All enqueue on the Runtime's stream, with the device's context current, and return 0 or a recorded status.

# Host memory -> device. `source` has been read to its end when it returns; the copy itself may still be running.
cdef int upload(kina_runtime *runtime, CUdeviceptr target, const char *source, size_t nbytes) noexcept nogil
# Device -> host memory. Waits: `target` is complete when it returns.
cdef int download(kina_runtime *runtime, char *target, CUdeviceptr source, size_t nbytes) noexcept nogil
# `count` elements of `itemsize` bytes, each like `element`.
cdef int fill(
    kina_runtime *runtime, CUdeviceptr target, int64_t count, int itemsize, const void *element
) noexcept nogil
cdef int copy_within(kina_runtime *runtime, CUdeviceptr target, CUdeviceptr source, size_t nbytes) noexcept nogil
