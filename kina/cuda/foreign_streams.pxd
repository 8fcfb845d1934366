from libc.stdint cimport int64_t

from kina.cuda.handles cimport kina_runtime

# A new reference to the process's one Runtime of a stream, made at its first use: 0 or a detail code. NULL is the
# legacy stream. From any thread; takes the GIL only for the first use of a device, as serve_device does.
cdef int open_stream(kina_runtime **out, int ordinal, void *handle, const char *operation) noexcept nogil
# How many have one.
cdef int64_t known_streams() noexcept nogil
