from kina._core.storage cimport kina_stream

# Whoever made a stream calls this before it can no longer be used, with nothing else using it: every pool makes what it
# keeps in the stream's order independent of it. Any thread, with or without the GIL; never waits.
cdef void stream_closing(kina_stream *stream) noexcept nogil

# Around a wait on the host for the stream: what was freed in its order before the first is anybody's after the second,
# which is called only if the wait succeeded.
cdef void stream_awaited(kina_stream *stream) noexcept nogil
cdef void stream_passed(kina_stream *stream) noexcept nogil
