from kina._core.storage cimport kina_dl_device
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.handles cimport kina_device, kina_runtime

# Memory that a session of the device can work with, or the right typed error.
cdef int check_reachable(kina_dl_device device, int ordinal) except -1
# Where a DLPack producer has its data, checked in the same way.
cdef kina_dl_device producer_device(object source, int ordinal) except *

# The Runtime's stream waits, on the device, for all that `producer` has so far: NULL and 1 are the legacy stream, 2 the
# calling thread's own default stream. 0, or a recorded status: where either is being captured, both are left alone. By
# the thread that has the Runtime open; any current context.
cdef int order_import(kina_runtime *runtime, CUstream producer, const char *operation) noexcept nogil

# The live Runtime of a stream that lives as long as the Runtime does: a new reference, or NULL. 0 or a recorded status.
# The stream is not being captured.
cdef int runtime_of_stream(kina_runtime **out, kina_device *device, CUstream native) noexcept nogil

# 0 if a stream that somebody names is of the device and not being captured; else a recorded status.
cdef int check_stream(kina_device *device, CUstream native, const char *operation) noexcept nogil
