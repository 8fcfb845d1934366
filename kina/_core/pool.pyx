# cython: annotation_typing=False
"""The pool: a memory resource that keeps what it got and hands it out again, in the order of streams.

The work is done in native/pool.c, which needs no Python.
"""

from typing import NamedTuple

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.resource cimport MemoryResource, checked_upstream, parse_nbytes
from kina._core.status cimport (
    KINA_OUT_OF_MEMORY,
    check,
    error_forget,
    fail,
    fail_driver,
    kina_error,
    kina_memory_figures,
    last_error,
)
from kina._core.storage cimport (
    KINA_RESOURCE_PYTHON,
    drain_python_releases,
    kina_handle,
    kina_release,
    kina_resource,
    kina_retain,
    kina_stream,
)

from kina.errors import ArgumentError

__all__ = ["PoolMemoryResource", "PoolStatistics", "PoolStreamStatistics"]


cdef extern from "native/pool.h":
    ctypedef enum kina_patience:
        KINA_QUIETLY

    ctypedef struct kina_pool_options:
        size_t initial_bytes
        size_t maximum_bytes
        size_t growth_bytes
        size_t alignment
        int keeps_all

    ctypedef struct kina_pool_statistics:
        int64_t live_bytes
        int64_t live_allocations
        int64_t total_allocations
        int64_t reserved_bytes
        int64_t peak_reserved_bytes
        int64_t cached_bytes
        int64_t pending_bytes
        int64_t largest_free_bytes
        int64_t chunks
        int64_t maximum_bytes
        int64_t grown
        int64_t returned
        int64_t rescued_by_harvest
        int64_t rescued_by_raid
        int64_t rescued_by_stealing
        int64_t rescued_by_returning
        int64_t rescued_by_callback
        int64_t rescued_by_waiting
        int64_t refused
        int64_t unknown_frees

    ctypedef struct kina_pool_stream:
        uint64_t number
        int64_t cached_bytes
        int64_t pending_bytes

    ctypedef void (*kina_pool_reporter)(const kina_resource *pool, int detail, const kina_memory_figures *figures,
                                        int in_vain) noexcept nogil
    void kina_pool_set_reporter(kina_pool_reporter reporter) noexcept nogil
    int kina_pool_create(kina_resource **out, kina_resource *upstream, const kina_pool_options *options) noexcept nogil
    int kina_pool_take(kina_resource *pool, void **out, size_t nbytes, kina_stream *stream) noexcept nogil
    size_t kina_pool_trim(kina_resource *pool, size_t keep_bytes) noexcept nogil
    void kina_pool_return(kina_resource *pool, kina_stream *stream) noexcept nogil
    void kina_pool_end_with(kina_resource *pool, kina_stream *stream, kina_handle *fence) noexcept nogil
    void kina_pool_forsake(kina_resource *pool) noexcept nogil
    void kina_pool_keep_all(kina_resource *pool, int keeps) noexcept nogil
    void kina_pools_settle() noexcept nogil
    void kina_pools_trim_device(int device_id, kina_patience how) noexcept nogil
    void kina_pool_read(kina_resource *pool, kina_pool_statistics *out) noexcept nogil
    size_t kina_pool_streams(kina_resource *pool, kina_pool_stream *out, size_t room) noexcept nogil
    void kina_stream_closing(kina_stream *stream) noexcept nogil
    void kina_stream_awaited(kina_stream *stream) noexcept nogil
    void kina_stream_passed(kina_stream *stream) noexcept nogil
    int kina_pool_setup() noexcept nogil
    int kina_pool_watch_forks() noexcept nogil
    size_t SIZE_MAX


if kina_pool_setup() != 0:
    raise ImportError("kina: threads and forks cannot be watched (pthread_key_create or pthread_atfork failed)")


cdef void report(const kina_resource *pool, int detail, const kina_memory_figures *figures,
                 int in_vain) noexcept nogil:
    cdef kina_error upstream
    cdef kina_memory_figures known
    cdef char limit[64]
    cdef char below[256]
    if detail == 0:
        error_forget()  # the upstream's: the request was served all the same
        return
    if last_error().has_exception:
        return  # of an upstream in Python: it passes through as it is
    memset(&upstream, 0, sizeof(upstream))
    known = figures[0]
    snprintf(limit, sizeof(limit), "no limit of its own")
    below[0] = 0
    if figures.limit >= 0:
        snprintf(limit, sizeof(limit), "a limit of %lld", <long long> figures.limit)
    if in_vain and last_error().detail == KINA_OUT_OF_MEMORY:
        upstream = last_error()[0]
        snprintf(below, sizeof(below), "; below it, %.200s", upstream.message)
        if known.limit < 0 and upstream.has_figures:
            known.limit = upstream.figures.limit
    snprintf(last_error().message, sizeof(last_error().message),
             "the pool has no room for %lld bytes: %lld bytes are live, %lld cached (%lld of them may be in use on the "
             "device, the largest free block has %lld), %s%s",
             <long long> figures.requested, <long long> figures.live, <long long> figures.cached,
             <long long> figures.pending, <long long> figures.largest_free, limit, below)
    fail_driver(KINA_OUT_OF_MEMORY, upstream.driver_code, upstream.driver_name, upstream.driver_string, b"allocate",
                last_error().message)
    last_error().figures = known
    last_error().has_figures = True


kina_pool_set_reporter(report)


cdef void stream_closing(kina_stream *stream) noexcept nogil:
    kina_stream_closing(stream)


cdef int pools_watch_forks() except -1:
    if kina_pool_watch_forks() != 0:
        raise MemoryError("no host memory to watch forks (pthread_atfork)")
    return 0


cdef void pools_settle() noexcept nogil:
    kina_pools_settle()


cdef void pools_trim_device(int device_id, int how) noexcept nogil:
    kina_pools_trim_device(device_id, <kina_patience> how)


cdef kina_resource *pool_make(kina_resource *upstream) except NULL:
    return plain_pool(upstream, False)


cdef kina_resource *pool_make_keeping(kina_resource *upstream) except NULL:
    return plain_pool(upstream, True)


cdef kina_resource *plain_pool(kina_resource *upstream, bint keeps_all) except NULL:
    cdef kina_pool_options options
    options.initial_bytes = 0
    options.maximum_bytes = SIZE_MAX
    options.growth_bytes = 0
    options.alignment = 256
    options.keeps_all = keeps_all
    return create(upstream, &options)


cdef void pool_dissolve(kina_resource *pool) noexcept nogil:
    # What would make drivers wait goes back where that is allowed (kina_pools_settle).
    kina_pool_keep_all(pool, False)
    if pool.upstream.vtable.supports_streams:
        kina_pool_forsake(pool)
    kina_release(pool)


cdef kina_resource *create(kina_resource *upstream, const kina_pool_options *options) except NULL:
    cdef kina_resource *made = NULL
    if kina_pool_create(&made, upstream, options) != 0:
        check(fail(KINA_OUT_OF_MEMORY, b"PoolMemoryResource", b"no host memory for the bookkeeping of a pool"))
    return made


cdef MemoryResource pool_face(kina_resource *pool):
    cdef PoolMemoryResource face = PoolMemoryResource.__new__(PoolMemoryResource)
    kina_retain(pool)
    face.serve(pool, None, NULL)
    return face


cdef bint pool_take(kina_resource *pool, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    return kina_pool_take(pool, out, nbytes, stream) != 0


cdef void pool_count(kina_resource *pool, pool_counts *out) noexcept nogil:
    cdef kina_pool_statistics now
    kina_pool_read(pool, &now)
    out.live_bytes = now.live_bytes
    out.live_allocations = now.live_allocations
    out.total_allocations = now.total_allocations
    out.reserved_bytes = now.reserved_bytes


cdef void pool_end_with(kina_resource *pool, kina_stream *stream, kina_handle *fence) noexcept nogil:
    kina_pool_end_with(pool, stream, fence)


cdef void pool_return(kina_resource *pool, kina_stream *stream) noexcept nogil:
    kina_pool_return(pool, stream)


cdef void stream_awaited(kina_stream *stream) noexcept nogil:
    kina_stream_awaited(stream)


cdef void stream_passed(kina_stream *stream) noexcept nogil:
    kina_stream_passed(stream)


class PoolStreamStatistics(NamedTuple):
    """What a :class:`PoolMemoryResource` keeps in the order of one stream.

    Attributes
    ----------
    stream_number : int
        kina's own number of the stream, never used again; 0 is memory without a stream.
    cached_bytes : int
        In the caches of threads and the bins of the stream: the stream's own, at once.
    pending_bytes : int
        Free in its order: its own at once, anybody's when the stream is past the release.
    """

    stream_number: int
    cached_bytes: int
    pending_bytes: int


class PoolStatistics(NamedTuple):
    """What a :class:`PoolMemoryResource` has and did; sizes in bytes.

    Attributes
    ----------
    live_bytes, live_allocations : int
        What is out, as it was asked for.
    total_allocations : int
        Served since the pool was made.
    reserved_bytes, peak_reserved_bytes : int
        What the pool has from its upstream, now and at most.
    cached_bytes : int
        What is free in the pool.
    pending_bytes : int
        How much of that was freed in the order of a stream that has not been seen past the release.
    largest_free_bytes : int
        The largest request that one free block can serve.
    fragmentation : float
        ``1 - largest_free_bytes / cached_bytes``; 0.0 where nothing is free.
    chunks : int
        In how many pieces the upstream gave what is reserved.
    maximum_bytes : int or None
        The limit of `reserved_bytes`.
    grown, returned : int
        How often a chunk came from the upstream, and went back.
    rescued_by_harvest, rescued_by_raid, rescued_by_stealing : int
        How many requests were served only by: taking over what streams are past; emptying the caches of
        threads; taking memory of another stream behind a wait on the device.
    rescued_by_returning, rescued_by_callback, rescued_by_waiting : int
        And how many only by: giving free chunks back to the upstream and asking again; what the callback of a
        :class:`FailureCallbackMemoryResource` below made room for; waiting on the host for the streams.
    refused : int
        Requests that failed.
    unknown_frees : int
        Releases that were left alone, because the pool never gave such memory.
    streams : tuple of PoolStreamStatistics
        By stream.
    """

    live_bytes: int
    live_allocations: int
    total_allocations: int
    reserved_bytes: int
    peak_reserved_bytes: int
    cached_bytes: int
    pending_bytes: int
    largest_free_bytes: int
    fragmentation: float
    chunks: int
    maximum_bytes: int | None
    grown: int
    returned: int
    rescued_by_harvest: int
    rescued_by_raid: int
    rescued_by_stealing: int
    rescued_by_returning: int
    rescued_by_callback: int
    rescued_by_waiting: int
    refused: int
    unknown_frees: int
    streams: tuple[PoolStreamStatistics, ...]


@cython.final
@cython.no_gc_clear
cdef class PoolMemoryResource(MemoryResource):
    """PoolMemoryResource(upstream, *, initial_bytes=0, maximum_bytes=None, alignment=256, growth=None)

    Keeps the memory that it got from `upstream` and hands it out again.

    Parameters
    ----------
    upstream : MemoryResource
        Where memory comes from, in chunks; of the host or of a device.
    initial_bytes : int
        How much the first chunk has at least. It is allocated when memory is first asked for.
    maximum_bytes : int, optional
        The most that the pool takes from `upstream` at any time. Default: no limit.
    alignment : int
        Of the addresses: a power of two, at least 256. Sizes are rounded up to it.
    growth : int, optional
        How many bytes a further chunk has at least. Default: an eighth of what is reserved, 2 to 256 MiB.

    Raises
    ------
    ArgumentError
        `alignment` is no power of two of 256 or more, or `maximum_bytes` is below `initial_bytes`.
    InvalidShapeError
        A size is negative or more than ``2**63 - 1``.

    Notes
    -----
    **Streams.** Over memory of a device, memory that was freed in the order of a stream serves that stream again at
    once, and others once the device is past the release, which the pool finds out by an event that it records and
    asks for when it would have to grow. Nothing is waited for, unless a request can be served in no other way: then
    the pool, in this order, takes over what streams are past, empties the caches of other threads, lets the asking
    stream wait on the device for another stream, gives free chunks back to `upstream` and asks again, calls the
    callback of a :class:`FailureCallbackMemoryResource` below it for as long as that makes room, looking through
    everything again after each call, and waits on the host for the streams. The callback of one above the pool comes
    at the same place: when nothing but a wait is left.

    **Threads.** Any thread may allocate and free, several at once, without the GIL. Each keeps up to 256 KiB of each
    size to itself, which goes back when the thread ends.

    **The end.** Memory goes back to `upstream` by :meth:`trim` and when the pool and all its memory are gone: chunks
    that a stream may still use follow when it is past them, at the next use of any pool; over device memory without
    stream order, whose release waits for the device, at the next ``synchronize()`` of a session. In a forked child,
    host memory works on; what other threads were busy with at the fork stays out.

    Source: per-thread caches and batches as in TCMalloc; two-level segregated fit below them.
    """

    def __init__(self, upstream: MemoryResource, *, initial_bytes: int = 0, maximum_bytes: int | None = None,
                 alignment: int = 256, growth: int | None = None) -> None:
        cdef MemoryResource below = checked_upstream(upstream)
        cdef kina_pool_options options
        options.initial_bytes = parse_nbytes(initial_bytes, "PoolMemoryResource")
        options.maximum_bytes = SIZE_MAX
        options.growth_bytes = 0
        options.alignment = parse_nbytes(alignment, "PoolMemoryResource")
        options.keeps_all = False
        if growth is not None:
            options.growth_bytes = parse_nbytes(growth, "PoolMemoryResource")
        if maximum_bytes is not None:
            options.maximum_bytes = parse_nbytes(maximum_bytes, "PoolMemoryResource")
        if options.alignment < 256 or options.alignment & (options.alignment - 1) or options.alignment > 1 << 30:
            raise ArgumentError(f"PoolMemoryResource: alignment={alignment} is not a power of two in 256 to 2**30",
                                operation="PoolMemoryResource")
        if options.maximum_bytes < options.initial_bytes:
            raise ArgumentError(f"PoolMemoryResource: maximum_bytes={maximum_bytes} is below "
                                f"initial_bytes={initial_bytes}", operation="PoolMemoryResource")
        self.serve(create(below.c, &options), below, NULL)

    def __del__(self):
        # In a cycle with a resource in Python, that one must be whole when it takes its memory back.
        if self.c != NULL and self.c.flags & KINA_RESOURCE_PYTHON:
            with nogil:
                kina_pool_forsake(self.c)
            drain_python_releases()

    def trim(self, keep_bytes: int = 0) -> int:
        """Give free chunks back to the upstream until no more than `keep_bytes` are reserved; how many bytes went.

        Parameters
        ----------
        keep_bytes : int
            What may stay reserved.

        Notes
        -----
        Empties the caches of all threads first. Waits for nothing: a chunk that a stream may still use stays. An
        upstream whose release waits for the device (CudaMemoryResource) does so here.
        """
        cdef size_t keep = parse_nbytes(keep_bytes, "trim")
        cdef size_t returned
        with nogil:
            returned = kina_pool_trim(self.c, keep)
        drain_python_releases()
        return returned

    def stats(self) -> PoolStatistics:
        """What the pool has and did, read at one moment."""
        cdef kina_pool_statistics now
        cdef kina_pool_stream *streams = NULL
        cdef size_t known = 0
        cdef size_t room, i
        with nogil:
            room = kina_pool_streams(self.c, NULL, 0)
            streams = <kina_pool_stream *> calloc(room + 1, sizeof(kina_pool_stream))
            if streams != NULL:
                known = min(room, kina_pool_streams(self.c, streams, room))
                kina_pool_read(self.c, &now)
        if streams == NULL:
            raise MemoryError
        found = tuple(PoolStreamStatistics(streams[i].number, streams[i].cached_bytes, streams[i].pending_bytes)
                      for i in range(known))
        free(streams)
        return PoolStatistics(
            live_bytes=now.live_bytes,
            live_allocations=now.live_allocations,
            total_allocations=now.total_allocations,
            reserved_bytes=now.reserved_bytes,
            peak_reserved_bytes=now.peak_reserved_bytes,
            cached_bytes=now.cached_bytes,
            pending_bytes=now.pending_bytes,
            largest_free_bytes=now.largest_free_bytes,
            fragmentation=1 - now.largest_free_bytes / <double> now.cached_bytes if now.cached_bytes else 0.0,
            chunks=now.chunks,
            maximum_bytes=None if now.maximum_bytes < 0 else now.maximum_bytes,
            grown=now.grown,
            returned=now.returned,
            rescued_by_harvest=now.rescued_by_harvest,
            rescued_by_raid=now.rescued_by_raid,
            rescued_by_stealing=now.rescued_by_stealing,
            rescued_by_returning=now.rescued_by_returning,
            rescued_by_callback=now.rescued_by_callback,
            rescued_by_waiting=now.rescued_by_waiting,
            refused=now.refused,
            unknown_frees=now.unknown_frees,
            streams=found,
        )
