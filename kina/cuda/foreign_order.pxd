from kina.cuda.cudatypes cimport CUstream
from kina.cuda.handles cimport kina_device, kina_runtime

# The Runtime's stream waits, on the device, for all that `producer` has so far: NULL and 1 are the legacy stream, 2 the
# calling thread's own default stream. 0, or a recorded status: where either is being captured, both are left alone. By
# the thread that has the Runtime open; any current context.
cdef int order_import(kina_runtime *runtime, CUstream producer, const char *operation) noexcept nogil

# The other way: `consumer` (1 legacy, 2 per-thread, or a handle) waits for all that the Runtime's stream has so far.
# `known` is the live Runtime of that stream, a new reference, where it lives as long as the Runtime does; else NULL, as
# on failure. From any thread; the device's context must be current.
cdef int order_export(kina_runtime *runtime, CUstream consumer, kina_runtime **known,
                      const char *operation) noexcept nogil

# 0 if a stream that somebody names belongs to the device; else a recorded status. The context must be current.
cdef int check_named(kina_device *device, CUstream native, const char *operation) noexcept nogil
