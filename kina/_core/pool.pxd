from libc.stdint cimport int64_t

from kina._core.resource cimport MemoryResource
from kina._core.storage cimport kina_handle, kina_resource, kina_stream

# A pool with one reference over `upstream`, with no limit of its own.
cdef kina_resource *pool_make(kina_resource *upstream) except NULL
# The same, which gives no chunk back to `upstream` before pool_dissolve. Of a C resource only.
cdef kina_resource *pool_make_keeping(kina_resource *upstream) except NULL
# Drop a reference to it: what is free goes back, the rest when it is freed.
cdef void pool_dissolve(kina_resource *pool) noexcept nogil
# A face of a pool; it has its own reference.
cdef MemoryResource pool_face(kina_resource *pool)


cdef struct pool_counts:
    int64_t live_bytes
    int64_t live_allocations
    int64_t total_allocations
    int64_t reserved_bytes


# Memory of `pool` that the calling thread keeps, quickly enough for the GIL to stay held. Whether there was some; never
# of a resource that is no pool. nbytes is not 0.
cdef bint pool_take(kina_resource *pool, void **out, size_t nbytes, kina_stream *stream) noexcept nogil
cdef void pool_count(kina_resource *pool, pool_counts *out) noexcept nogil
# When the stream closes, `fence` is behind all uses of what the pool has in its order, and the stream is not touched;
# NULL: it is in use again.
cdef void pool_end_with(kina_resource *pool, kina_stream *stream, kina_handle *fence) noexcept nogil
# Give back, in the order of `stream`, every chunk that is free for it. For whoever ends the stream. Never waits.
cdef void pool_return(kina_resource *pool, kina_stream *stream) noexcept nogil

# Whoever made a stream calls this before it can no longer be used, with nothing else using it: every pool makes what it
# keeps in the stream's order independent of it. Any thread, with or without the GIL; never waits.
cdef void stream_closing(kina_stream *stream) noexcept nogil

# Once a library is loaded that fences call: pools take their locks before that library's when the process forks.
cdef int pools_watch_forks() except -1
# Pools that are gone give back what they could not without a wait. For where waiting is allowed, with no lock held.
cdef void pools_settle() noexcept nogil

# What may happen where memory is short: nothing that waits; releases of memory without stream order, where drivers wait
# for the device; and waits for fences. As in native/pool.h.
cdef enum:
    QUIETLY = 0
    FREELY = 1
    PATIENTLY = 2


# Trim every pool of memory of a CUDA device. With no lock held.
cdef void pools_trim_device(int device_id, int how) noexcept nogil

# Around a wait on the host for the stream: what was freed in its order before the first is anybody's after the second,
# which is called only if the wait succeeded.
cdef void stream_awaited(kina_stream *stream) noexcept nogil
cdef void stream_passed(kina_stream *stream) noexcept nogil
