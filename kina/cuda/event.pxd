from kina.cuda.cudatypes cimport CUevent, CUstream
from kina.cuda.handles cimport kina_device, kina_seal

# An event without timing, from the device's idle list or new. The device's context must be current.
cdef int event_take(kina_device *device, CUevent *out, const char *operation) noexcept nogil
cdef void event_give(kina_device *device, CUevent event) noexcept nogil
# Make `waiter` wait for what is in `producer` now, without a host wait: record, wait, give back.
cdef int order_streams(kina_device *device, CUstream producer, CUstream waiter, const char *operation) noexcept nogil

# Record a seal on `stream`; the caller owns the reference.
cdef int seal_record(kina_device *device, CUstream stream, kina_seal **out, const char *operation) noexcept nogil
# 1 complete, 0 not yet, -1 failed (recorded). Asks the driver at most until it has once said yes.
cdef int seal_query(kina_seal *seal) noexcept nogil
# Wait on the host. 0 or the recorded status.
cdef int seal_wait(kina_seal *seal, const char *operation) noexcept nogil
