from kina.cuda.cudatypes cimport CUresult, CUstream
from kina.cuda.handles cimport kina_device

# A non-blocking stream from the device's pool, or new. The device's context must be current.
cdef int stream_checkout(kina_device *device, CUstream *out) noexcept nogil
# Give it back; pending work on it is no obstacle. Beyond the pool's bound it is destroyed. Any thread.
cdef void stream_checkin(kina_device *device, CUstream stream) noexcept nogil
# Wait on the host for what Runtimes that are gone have left on their streams. The device's context must be current.
cdef CUresult streams_wait_idle(kina_device *device) noexcept nogil
# The driver's id of a stream of kina's own.
cdef int stream_identify(kina_device *device, CUstream stream, unsigned long long *stream_id) noexcept nogil
# 0 if a stream made elsewhere may be adopted for this device; fills its driver id. Context must be current.
cdef int stream_examine(kina_device *device, CUstream stream, unsigned long long *stream_id) noexcept nogil
# The same of one that may be being captured: its id is 0 then.
cdef int stream_examine_captured(kina_device *device, CUstream stream, unsigned long long *stream_id) noexcept nogil
# 0 if a stream made elsewhere belongs to the device's primary context; `remedy` ends the words for one that does not.
# A capture of it goes on. The context must be current.
cdef int stream_check_device(kina_device *device, CUstream stream, const char *operation,
                             const char *remedy) noexcept nogil
# 0, or the record says that the stream is being captured (or cannot be asked, which capture causes too).
cdef int stream_refuse_capture(kina_device *device, CUstream stream, const char *operation) noexcept nogil
# The same, the calling thread's own default stream included.
cdef CUstream named_stream(object owner, str operation) except? NULL
# The native handle of an object with __cuda_stream__ (0 comes back as legacy). Needs the GIL.
cdef CUstream stream_of(object owner) except? NULL
