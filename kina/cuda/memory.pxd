from libc.stdint cimport uint64_t

from kina._core.storage cimport kina_stream
from kina.cuda.cudatypes cimport CUmemoryPool, CUresult, CUstream
from kina.cuda.handles cimport kina_device, kina_runtime

# Make runtime.pool ready for use as a resource; the driver's pool comes with the first allocation.
# `harvest` is what retirement offers when memory runs short: release what is complete (everything, if idle).
cdef void pool_init(kina_runtime *runtime, void (*harvest)(kina_runtime *, int) noexcept nogil) noexcept nogil
# Lay the driver's pool aside for the next Runtime of the device, emptied of what it can give back at once.
cdef void pool_shelve(kina_runtime *runtime) noexcept nogil
# Bytes the driver's pool holds and uses; 0 where there is none.
cdef void pool_usage(kina_runtime *runtime, uint64_t *reserved, uint64_t *used) noexcept nogil
# The same of one pool.
cdef void pool_figures(CUmemoryPool pool, uint64_t *reserved, uint64_t *used) noexcept nogil

# A driver pool that keeps everything it frees: one that was laid aside, or a new one. The context must be current.
cdef CUresult pool_checkout(kina_device *device, CUmemoryPool *out) noexcept nogil
# Lay it aside.
cdef void pool_checkin(kina_device *device, CUmemoryPool pool) noexcept nogil
# Every pool of the device gives back what it caches.
cdef void trim_all_pools(kina_device *device) noexcept nogil
# Wait for the streams of all Runtimes of the device.
cdef CUresult wait_for_all(kina_device *device) noexcept nogil
# The native stream, or for NULL the device's private one, which has nothing on it but allocations and releases that no
# stream orders. The context must be current. 0 or a recorded status.
cdef int stream_or_private(kina_device *device, kina_stream *stream, CUstream *out) noexcept nogil
