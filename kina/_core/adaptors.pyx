# cython: annotation_typing=False
"""Memory resources over others that count, limit, or ask for help: nothing on their way takes the GIL or allocates."""

from typing import NamedTuple

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.fork_mutex cimport (
    fork_mutex_destroy,
    fork_mutex_init,
    fork_mutex_lock,
    fork_mutex_unlock,
    kina_fork_mutex,
)
from kina._core.resource cimport (
    MemoryResource,
    adaptor_destroy,
    adaptor_init,
    checked_upstream,
    kina_adaptor,
    parse_nbytes,
)
from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport (
    KINA_OUT_OF_MEMORY,
    error_forget,
    error_put,
    error_take,
    fail_out_of_memory,
    fail_with,
    kina_error,
    kina_memory_figures,
    last_error,
)
from kina._core.storage cimport (
    KINA_ASK_FOR_ALL,
    KINA_ASK_PATIENTLY,
    KINA_ASK_QUIETLY,
    KINA_RESOURCE_PYTHON,
    holds_gil,
    interpreter_is_finalizing,
    kina_ask,
    kina_asking,
    kina_handle,
    kina_resource,
    kina_resource_vtable,
    kina_stream,
)

from kina.errors import ArgumentError

__all__ = [
    "AllocationCounts",
    "FailureCallbackMemoryResource",
    "LimitingMemoryResource",
    "StatisticsMemoryResource",
    "StatisticsScope",
]


# Limiting -------------------------------------------------------------------------------------------------


cdef extern from *:
    """
    #include <stdint.h>
    /* Adds unless the sum is beyond the limit; 1 if it was added. */
    static int kina_reserve(int64_t *live, int64_t nbytes, int64_t limit) {
        int64_t seen = __atomic_load_n(live, __ATOMIC_RELAXED);
        do {
            if (nbytes > limit - seen) return 0;
        } while (!__atomic_compare_exchange_n(live, &seen, seen + nbytes, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return 1;
    }
    static void kina_unreserve(int64_t *live, int64_t nbytes) { __atomic_fetch_sub(live, nbytes, __ATOMIC_RELAXED); }
    static int64_t kina_reserved(const int64_t *live) { return __atomic_load_n(live, __ATOMIC_RELAXED); }
    """
    bint kina_reserve(int64_t *live, int64_t nbytes, int64_t limit) noexcept nogil
    void kina_unreserve(int64_t *live, int64_t nbytes) noexcept nogil
    int64_t kina_reserved(const int64_t *live) noexcept nogil


ctypedef struct limiting_resource:
    kina_adaptor adaptor
    int64_t limit
    int64_t live


cdef int limiting_serve(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                        kina_asking how) noexcept nogil:
    cdef limiting_resource *limiting = <limiting_resource *> self
    cdef kina_memory_figures figures
    cdef int status
    if nbytes > <size_t> limiting.limit or not kina_reserve(&limiting.live, <int64_t> nbytes, limiting.limit):
        memset(&figures, 0xff, sizeof(figures))  # -1: not known
        figures.requested = <int64_t> nbytes
        figures.live = kina_reserved(&limiting.live)
        figures.limit = limiting.limit
        snprintf(last_error().message, sizeof(last_error().message),
                 "%zu bytes are beyond the limit: %lld of %lld bytes are live", nbytes,
                 <long long> figures.live, <long long> figures.limit)
        return fail_out_of_memory(b"allocate", last_error().message, &figures)
    status = kina_ask(self.upstream, out, nbytes, stream, how)
    if status != 0:
        kina_unreserve(&limiting.live, <int64_t> nbytes)
    return status


cdef int limiting_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    return limiting_serve(self, out, nbytes, stream, KINA_ASK_FOR_ALL)


cdef int limiting_try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                               bint may_wait) noexcept nogil:
    return limiting_serve(self, out, nbytes, stream, KINA_ASK_PATIENTLY if may_wait else KINA_ASK_QUIETLY)


cdef void limiting_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    self.upstream.vtable.deallocate(self.upstream, data, nbytes, stream)
    kina_unreserve(&(<limiting_resource *> self).live, <int64_t> nbytes)


cdef int limiting_make_room(kina_resource *self, size_t nbytes, int *made) noexcept nogil:
    """Nobody is asked for what the limit refuses."""
    cdef limiting_resource *limiting = <limiting_resource *> self
    made[0] = 0
    if nbytes > <size_t> limiting.limit or <int64_t> nbytes > limiting.limit - kina_reserved(&limiting.live):
        return 0
    return self.upstream.vtable.make_room(self.upstream, nbytes, made)


cdef kina_resource_vtable limiting_functions
limiting_functions.name = b"LimitingMemoryResource"
limiting_functions.allocate = limiting_allocate
limiting_functions.try_allocate = limiting_try_allocate
limiting_functions.deallocate = limiting_deallocate


@cython.final
@cython.no_gc_clear
cdef class LimitingMemoryResource(MemoryResource):
    """LimitingMemoryResource(upstream, limit_bytes)

    Serves from `upstream` as long as no more than `limit_bytes` are out at once.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    limit_bytes : int
        The most bytes, as they were asked for, that may be live together.

    Notes
    -----
    Beyond the limit ``allocate`` raises OutOfMemoryError with the attributes ``requested``, ``live`` and ``limit``,
    and `upstream` is not asked. The limit holds exactly, however many threads allocate.
    """

    def __init__(self, upstream: MemoryResource, limit_bytes: int) -> None:
        cdef MemoryResource below = checked_upstream(upstream)
        cdef size_t limit = parse_nbytes(limit_bytes, "LimitingMemoryResource")
        cdef limiting_resource *made = <limiting_resource *> calloc(1, sizeof(limiting_resource))
        if made == NULL:
            raise MemoryError
        made.limit = <int64_t> limit
        adaptor_init(&made.adaptor, &limiting_functions, below.c, adaptor_destroy)
        if made.adaptor.vtable.make_room != NULL:
            made.adaptor.vtable.make_room = limiting_make_room
        self.serve(&made.adaptor.resource, below, NULL)

    @property
    def limit_bytes(self) -> int:
        """The most bytes that may be live together."""
        return (<limiting_resource *> self.ready()).limit

    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""
        return kina_reserved(&(<limiting_resource *> self.ready()).live)


# Statistics -----------------------------------------------------------------------------------------------


class AllocationCounts(NamedTuple):
    """What a :class:`StatisticsMemoryResource`, or one scope of it, has counted.

    Attributes
    ----------
    current_bytes, current_count : int
        Allocated and not freed. In a scope: since its beginning, so negative where more was freed.
    peak_bytes, peak_count : int
        The most that these ever were; at least 0.
    total_bytes, total_count : int
        All allocations.
    failed_count : int
        Allocations that were not served.
    """

    current_bytes: int = 0
    peak_bytes: int = 0
    total_bytes: int = 0
    current_count: int = 0
    peak_count: int = 0
    total_count: int = 0
    failed_count: int = 0


ctypedef struct allocation_counts:
    int64_t current_bytes
    int64_t peak_bytes
    int64_t total_bytes
    int64_t current_count
    int64_t peak_count
    int64_t total_count
    int64_t failed_count


ctypedef struct counting_scope:
    counting_scope *next
    allocation_counts counts


ctypedef struct statistics_resource:
    kina_adaptor adaptor
    kina_fork_mutex mutex
    counting_scope *scopes          # those that are open; guarded by the mutex
    counting_scope everything       # the last of them, open for good


cdef int statistics_serve(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                          kina_asking how) noexcept nogil:
    cdef statistics_resource *statistics = <statistics_resource *> self
    cdef int status = kina_ask(self.upstream, out, nbytes, stream, how)
    cdef counting_scope *scope
    cdef allocation_counts *counts
    fork_mutex_lock(&statistics.mutex)
    scope = statistics.scopes
    while scope != NULL:
        counts = &scope.counts
        if status != 0:
            counts.failed_count += how != KINA_ASK_QUIETLY  # else the asker has other ways, and asks again
        else:
            counts.current_bytes += <int64_t> nbytes
            counts.total_bytes += <int64_t> nbytes
            counts.current_count += 1
            counts.total_count += 1
            if counts.current_bytes > counts.peak_bytes:
                counts.peak_bytes = counts.current_bytes
            if counts.current_count > counts.peak_count:
                counts.peak_count = counts.current_count
        scope = scope.next
    fork_mutex_unlock(&statistics.mutex)
    return status


cdef int statistics_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    return statistics_serve(self, out, nbytes, stream, KINA_ASK_FOR_ALL)


cdef int statistics_try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                                 bint may_wait) noexcept nogil:
    return statistics_serve(self, out, nbytes, stream, KINA_ASK_PATIENTLY if may_wait else KINA_ASK_QUIETLY)


cdef void statistics_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef statistics_resource *statistics = <statistics_resource *> self
    cdef counting_scope *scope
    self.upstream.vtable.deallocate(self.upstream, data, nbytes, stream)
    fork_mutex_lock(&statistics.mutex)
    scope = statistics.scopes
    while scope != NULL:
        scope.counts.current_bytes -= <int64_t> nbytes
        scope.counts.current_count -= 1
        scope = scope.next
    fork_mutex_unlock(&statistics.mutex)


cdef void statistics_destroy(kina_handle *self) noexcept nogil:
    fork_mutex_destroy(&(<statistics_resource *> self).mutex)
    adaptor_destroy(self)


cdef kina_resource_vtable statistics_functions
statistics_functions.name = b"StatisticsMemoryResource"
statistics_functions.allocate = statistics_allocate
statistics_functions.try_allocate = statistics_try_allocate
statistics_functions.deallocate = statistics_deallocate


cdef object counts_of(statistics_resource *statistics, counting_scope *scope):
    cdef allocation_counts counts
    fork_mutex_lock(&statistics.mutex)
    counts = scope.counts
    fork_mutex_unlock(&statistics.mutex)
    return AllocationCounts(counts.current_bytes, counts.peak_bytes, counts.total_bytes, counts.current_count,
                            counts.peak_count, counts.total_count, counts.failed_count)


@cython.final
@cython.no_gc_clear
cdef class StatisticsMemoryResource(MemoryResource):
    """StatisticsMemoryResource(upstream)

    Counts what is allocated from `upstream`: bytes as they were asked for, and allocations.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    """

    def __init__(self, upstream: MemoryResource) -> None:
        cdef MemoryResource below = checked_upstream(upstream)
        cdef statistics_resource *made = <statistics_resource *> calloc(1, sizeof(statistics_resource))
        if made == NULL:
            raise MemoryError
        fork_mutex_init(&made.mutex)
        made.scopes = &made.everything
        adaptor_init(&made.adaptor, &statistics_functions, below.c, statistics_destroy)
        self.serve(&made.adaptor.resource, below, NULL)

    def counts(self) -> AllocationCounts:
        """What was counted since the resource was made; of one moment."""
        cdef statistics_resource *statistics = <statistics_resource *> self.ready()
        return counts_of(statistics, &statistics.everything)

    def scope(self) -> StatisticsScope:
        """``with resource.scope() as scope:`` counts, from nothing, what happens until the block is left.

        Notes
        -----
        It counts all threads. Scopes nest, overlap and may be left in any order and on any thread: each counts for
        itself. After the block, ``scope.counts()`` stays as it was at its end.
        """
        cdef StatisticsScope scope
        self.ready()
        begin_construction()
        try:
            scope = StatisticsScope.__new__(StatisticsScope)
        finally:
            end_construction()
        scope.statistics = self
        scope.node = <counting_scope *> calloc(1, sizeof(counting_scope))
        if scope.node == NULL:
            raise MemoryError
        return scope


@cython.final
@cython.no_gc_clear
cdef class StatisticsScope:
    """StatisticsScope()

    What :meth:`StatisticsMemoryResource.scope` gives: entered once, it counts until it is left.
    """

    cdef StatisticsMemoryResource statistics
    cdef counting_scope *node       # owned; in the resource's list while `open`
    cdef bint open
    cdef bint used

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        if self.node != NULL:
            self.close()
            free(self.node)

    cdef void close(self) noexcept:
        cdef statistics_resource *resource = <statistics_resource *> self.statistics.c
        cdef counting_scope **place = &resource.scopes
        if not self.open:
            return
        fork_mutex_lock(&resource.mutex)
        while place[0] != self.node:
            place = &place[0].next
        place[0] = self.node.next
        fork_mutex_unlock(&resource.mutex)
        self.open = False

    def __enter__(self) -> StatisticsScope:
        cdef statistics_resource *resource = <statistics_resource *> self.statistics.c
        if self.used:
            raise ArgumentError("scope: this one was entered before; resource.scope() makes another",
                                operation="scope")
        self.used = self.open = True
        fork_mutex_lock(&resource.mutex)
        self.node.next = resource.scopes
        resource.scopes = self.node
        fork_mutex_unlock(&resource.mutex)
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self.close()

    def counts(self) -> AllocationCounts:
        """What was counted in the block, so far or until it was left."""
        return counts_of(<statistics_resource *> self.statistics.c, self.node)

    def __reduce_ex__(self, protocol: int) -> object:
        raise TypeError("a StatisticsScope watches a resource of this process: it cannot be copied or pickled")


# Failure callback -----------------------------------------------------------------------------------------


ctypedef struct callback_resource:
    kina_adaptor adaptor
    PyObject *face                  # borrowed; NULL once it is gone, touched under the GIL only


cdef int callback_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    """The callback comes before whatever waits on the host."""
    cdef int status
    cdef int made = 1
    while made:
        status = kina_ask(self.upstream, out, nbytes, stream, KINA_ASK_QUIETLY)
        if status != KINA_OUT_OF_MEMORY:
            return status
        status = ask_callback(<callback_resource *> self, nbytes, &made)
        if status != 0:
            return status
    if self.upstream.vtable.try_allocate == NULL:
        return KINA_OUT_OF_MEMORY  # it has done what it can
    status = self.upstream.vtable.allocate(self.upstream, out, nbytes, stream)
    if status == 0:
        error_forget()
    return status


cdef int callback_try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                               bint may_wait) noexcept nogil:
    return kina_ask(self.upstream, out, nbytes, stream, KINA_ASK_PATIENTLY if may_wait else KINA_ASK_QUIETLY)


cdef int callback_make_room(kina_resource *self, size_t nbytes, int *made) noexcept nogil:
    cdef int status = ask_callback(<callback_resource *> self, nbytes, made)
    if status != 0 or made[0] or self.upstream.vtable.make_room == NULL:
        return status
    return self.upstream.vtable.make_room(self.upstream, nbytes, made)


cdef int ask_callback(callback_resource *self, size_t nbytes, int *made) noexcept nogil:
    cdef int status
    made[0] = 0
    if interpreter_is_finalizing() and not holds_gil():
        return 0
    with gil:
        status = call(self, nbytes, made)
    return status


cdef int call(callback_resource *self, size_t nbytes, int *made) noexcept:
    """0, or what allocate fails with."""
    cdef kina_error failure
    cdef object callback = None
    # The callback may do anything, also what writes the thread's error.
    exception = error_take(&failure)
    if self.face != NULL:
        callback = (<FailureCallbackMemoryResource> self.face).callback
    try:
        if callback is not None and callback(nbytes):
            made[0] = 1
            return 0
    except BaseException as error:
        return fail_with(error)
    error_put(&failure, exception)
    return 0


cdef void callback_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    self.upstream.vtable.deallocate(self.upstream, data, nbytes, stream)


cdef kina_resource_vtable callback_functions
callback_functions.name = b"FailureCallbackMemoryResource"
callback_functions.allocate = callback_allocate
callback_functions.deallocate = callback_deallocate


@cython.final
@cython.no_gc_clear
cdef class FailureCallbackMemoryResource(MemoryResource):
    """FailureCallbackMemoryResource(upstream, callback)

    Asks `callback` for help when `upstream` is out of memory.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    callback : callable
        ``callback(nbytes) -> bool``: true if it has made room and `upstream` shall be asked again; false, and the
        failure of `upstream` is raised.

    Notes
    -----
    `callback` runs on the allocating thread, with the GIL and no lock of kina held, so it may allocate and free. It is
    called until `upstream` serves or it gives false. Its exceptions pass through to whoever allocates. Other failures
    than OutOfMemoryError and MemoryError are not shown to it.

    It comes when nothing is left but to wait on the host: for memory of a device before the streams are waited for, and
    with a pool above or below after all that the pool can do without a wait. Only when it has given false is the rest
    tried, and it is not called again for that request. A pool that is at its own `maximum_bytes` does not call one
    below it, whose upstream is not what is full.
    """

    cdef object callback

    def __init__(self, upstream: MemoryResource, callback: object) -> None:
        cdef MemoryResource below = checked_upstream(upstream)
        cdef callback_resource *made
        if not callable(callback):
            raise ArgumentError(f"callback: a callable is needed, not {type(callback).__name__}",
                                operation="FailureCallbackMemoryResource")
        made = <callback_resource *> calloc(1, sizeof(callback_resource))
        if made == NULL:
            raise MemoryError
        adaptor_init(&made.adaptor, &callback_functions, below.c, adaptor_destroy)
        made.adaptor.vtable.try_allocate = callback_try_allocate  # whatever the upstream has
        made.adaptor.vtable.make_room = callback_make_room
        made.adaptor.resource.flags |= KINA_RESOURCE_PYTHON
        made.face = <PyObject *> self
        self.serve(&made.adaptor.resource, below, &made.face)
        self.callback = callback
