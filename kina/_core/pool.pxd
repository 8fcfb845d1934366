from kina._core.storage cimport kina_stream

# Whoever made a stream calls this before it can no longer be used, with nothing else using it: every pool makes what it
# keeps in the stream's order independent of it. Any thread, with or without the GIL; never waits.
cdef void stream_closing(kina_stream *stream) noexcept nogil

# Pools that are gone give back what they could not without a wait. For where waiting is allowed, with no lock held.
cdef void pools_settle() noexcept nogil
# Trim every pool of memory of a CUDA device. The same.
cdef void pools_trim_device(int device_id) noexcept nogil

# Around a wait on the host for the stream: what was freed in its order before the first is anybody's after the second,
# which is called only if the wait succeeded.
cdef void stream_awaited(kina_stream *stream) noexcept nogil
cdef void stream_passed(kina_stream *stream) noexcept nogil
