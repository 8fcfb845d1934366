# cython: annotation_typing=False
"""A memory resource that knows what is out, since when and from where, and refuses frees of anything else."""

import logging
from typing import NamedTuple

cimport cython
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free

from kina._core.call_stack cimport call_stack
from kina._core.fork_mutex cimport (
    fork_mutex_destroy,
    fork_mutex_init,
    fork_mutex_lock,
    fork_mutex_unlock,
    kina_fork_mutex,
)
from kina._core.resource cimport MemoryResource, adaptor_destroy, adaptor_init, checked_upstream, kina_adaptor
from kina._core.status cimport KINA_OUT_OF_MEMORY, fail
from kina._core.storage cimport (
    KINA_ASK_FOR_ALL,
    KINA_ASK_PATIENTLY,
    KINA_ASK_QUIETLY,
    drain_python_releases,
    kina_ask,
    kina_asking,
    kina_deferred,
    kina_handle,
    kina_resource,
    kina_resource_vtable,
    kina_stream,
    run_with_gil_later,
)
from kina._core.tokens cimport thread_token

from kina.errors import ArgumentError

__all__ = ["TrackedAllocation", "TrackingMemoryResource"]


cdef extern from *:
    """
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>
    #include <time.h>

    typedef struct kina_tracked {
        uintptr_t address; /* 0: an empty place of the table */
        size_t nbytes;
        uint64_t number; /* of this allocation, ascending */
        uint64_t thread;
        int64_t since_ns;
        char *stack; /* owned, or NULL */
    } kina_tracked;

    /* Open addressing with linear probing; at most half full. The caller's mutex guards it. */
    typedef struct kina_tracked_table {
        kina_tracked *places;
        size_t capacity; /* a power of two, or 0 */
        size_t count;
    } kina_tracked_table;

    static int64_t kina_monotonic_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    static size_t kina_tracked_home(const kina_tracked_table *table, uintptr_t address) {
        return (size_t)(((uint64_t)address * 0x9E3779B97F4A7C15u) >> 32) & (table->capacity - 1);
    }
    static void kina_tracked_put(kina_tracked_table *table, const kina_tracked *entry) {
        size_t place = kina_tracked_home(table, entry->address);
        while (table->places[place].address) place = (place + 1) & (table->capacity - 1);
        table->places[place] = *entry;
        table->count += 1;
    }
    /* 0 if there is no memory for it. */
    static int kina_tracked_add(kina_tracked_table *table, const kina_tracked *entry) {
        kina_tracked_table larger;
        size_t place;
        if (2 * (table->count + 1) > table->capacity) {
            larger.capacity = table->capacity ? 2 * table->capacity : 64;
            larger.count = 0;
            larger.places = (kina_tracked *)calloc(larger.capacity, sizeof(kina_tracked));
            if (!larger.places) return 0;
            for (place = 0; place < table->capacity; place++)
                if (table->places[place].address) kina_tracked_put(&larger, &table->places[place]);
            free(table->places);
            *table = larger;
        }
        kina_tracked_put(table, entry);
        return 1;
    }
    /* 0 if it is not there. What follows moves up, so that no search ends too early. */
    static int kina_tracked_take(kina_tracked_table *table, uintptr_t address, kina_tracked *found) {
        size_t mask = table->capacity - 1, hole, next;
        if (!table->capacity) return 0;
        hole = kina_tracked_home(table, address);
        while (table->places[hole].address != address) {
            if (!table->places[hole].address) return 0;
            hole = (hole + 1) & mask;
        }
        *found = table->places[hole];
        for (next = (hole + 1) & mask; table->places[next].address; next = (next + 1) & mask) {
            size_t home = kina_tracked_home(table, table->places[next].address);
            if (((next - home) & mask) >= ((next - hole) & mask)) {
                table->places[hole] = table->places[next];
                hole = next;
            }
        }
        table->places[hole].address = 0;
        table->count -= 1;
        return 1;
    }
    /* A copy of what is there, the stacks too; -1 without memory for it. */
    static int64_t kina_tracked_copy(const kina_tracked_table *table, kina_tracked **out) {
        size_t place;
        int64_t count = 0;
        kina_tracked *copy = (kina_tracked *)calloc(table->count + 1, sizeof(kina_tracked));
        *out = copy;
        if (!copy) return -1;
        for (place = 0; place < table->capacity; place++) {
            if (!table->places[place].address) continue;
            copy[count] = table->places[place];
            if (copy[count].stack) copy[count].stack = strdup(copy[count].stack);
            count++;
        }
        return count;
    }
    static void kina_tracked_free(kina_tracked_table *table) {
        size_t place;
        for (place = 0; place < table->capacity; place++)
            if (table->places[place].address) free(table->places[place].stack);
        free(table->places);
    }
    """
    ctypedef struct kina_tracked:
        uintptr_t address
        size_t nbytes
        uint64_t number
        uint64_t thread
        int64_t since_ns
        char *stack

    ctypedef struct kina_tracked_table:
        size_t count

    int64_t kina_monotonic_ns() noexcept nogil
    bint kina_tracked_add(kina_tracked_table *table, const kina_tracked *entry) noexcept nogil
    bint kina_tracked_take(kina_tracked_table *table, uintptr_t address, kina_tracked *found) noexcept nogil
    int64_t kina_tracked_copy(const kina_tracked_table *table, kina_tracked **out) noexcept nogil
    void kina_tracked_free(kina_tracked_table *table) noexcept nogil
    char *strdup(const char *text) noexcept nogil


cdef enum:
    KEPT_ERRORS = 64


ctypedef struct tracking_resource:
    kina_adaptor adaptor
    bint stacks
    kina_fork_mutex mutex           # guards what follows
    kina_tracked_table table
    uint64_t last_number
    int64_t error_count
    char *errors[KEPT_ERRORS]       # the first ones


cdef int tracking_serve(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                        kina_asking how) noexcept nogil:
    cdef tracking_resource *tracking = <tracking_resource *> self
    cdef kina_tracked entry
    cdef bint added
    cdef int status = kina_ask(self.upstream, out, nbytes, stream, how)
    if status != 0:
        return status
    entry.address = <uintptr_t> out[0]
    entry.nbytes = nbytes
    entry.thread = thread_token()
    entry.since_ns = kina_monotonic_ns()
    entry.stack = call_stack() if tracking.stacks else NULL
    fork_mutex_lock(&tracking.mutex)
    tracking.last_number += 1
    entry.number = tracking.last_number
    added = kina_tracked_add(&tracking.table, &entry)
    fork_mutex_unlock(&tracking.mutex)
    if not added:
        free(entry.stack)
        self.upstream.vtable.deallocate(self.upstream, out[0], nbytes, stream)
        return fail(KINA_OUT_OF_MEMORY, b"allocate", b"no host memory to keep track of an allocation")
    return 0


cdef int tracking_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    return tracking_serve(self, out, nbytes, stream, KINA_ASK_FOR_ALL)


cdef int tracking_try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                               bint may_wait) noexcept nogil:
    return tracking_serve(self, out, nbytes, stream, KINA_ASK_PATIENTLY if may_wait else KINA_ASK_QUIETLY)


cdef void tracking_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef tracking_resource *tracking = <tracking_resource *> self
    cdef kina_tracked entry
    cdef bint found
    fork_mutex_lock(&tracking.mutex)
    found = kina_tracked_take(&tracking.table, <uintptr_t> data, &entry)
    fork_mutex_unlock(&tracking.mutex)
    if not found:
        record_error(tracking, data, nbytes, NULL)
        return  # whoever has that memory now keeps it
    if entry.nbytes != nbytes:
        record_error(tracking, data, nbytes, &entry)
    free(entry.stack)
    self.upstream.vtable.deallocate(self.upstream, data, entry.nbytes, stream)


cdef void record_error(tracking_resource *self, void *data, size_t nbytes, kina_tracked *entry) noexcept nogil:
    """A free of what is not outstanding (`entry` is NULL), or of another size than was allocated."""
    cdef char text[2048]
    cdef char *stack = call_stack() if self.stacks else NULL
    cdef const char *where = b""
    cdef const char *frames = b""
    cdef bint first
    if stack != NULL:
        where, frames = b" at ", stack
    if entry == NULL:
        snprintf(text, sizeof(text), "free of %p (%zu bytes), which is not outstanding: freed twice, or never "
                 "allocated here%s%s", data, nbytes, where, frames)
    else:
        snprintf(text, sizeof(text), "free of %p as %zu bytes, which was allocated as %zu bytes%s%s", data, nbytes,
                 entry.nbytes, where, frames)
    free(stack)
    fork_mutex_lock(&self.mutex)
    first = self.error_count == 0
    if self.error_count < KEPT_ERRORS:
        self.errors[self.error_count] = strdup(text)
    self.error_count += 1
    fork_mutex_unlock(&self.mutex)
    if first:
        log_later(text)


ctypedef struct deferred_message:
    kina_deferred deferred
    char *text


cdef void log_later(const char *text) noexcept nogil:
    cdef deferred_message *node = <deferred_message *> calloc(1, sizeof(deferred_message))
    if node != NULL:
        node.deferred.run = log_now
        node.text = strdup(text)
        run_with_gil_later(&node.deferred)


cdef void log_now(kina_deferred *deferred) noexcept:
    cdef deferred_message *node = <deferred_message *> deferred
    if node.text != NULL:
        message = node.text.decode("utf-8", "replace")
        free(node.text)
        free(node)
        logging.getLogger("kina.memory").error("TrackingMemoryResource: %s", message)


cdef void tracking_destroy(kina_handle *self) noexcept nogil:
    cdef tracking_resource *tracking = <tracking_resource *> self
    cdef int number
    fork_mutex_destroy(&tracking.mutex)
    kina_tracked_free(&tracking.table)
    for number in range(KEPT_ERRORS):
        free(tracking.errors[number])
    adaptor_destroy(self)


cdef kina_resource_vtable functions
functions.name = b"TrackingMemoryResource"
functions.allocate = tracking_allocate
functions.try_allocate = tracking_try_allocate
functions.deallocate = tracking_deallocate


class TrackedAllocation(NamedTuple):
    """One allocation that has not been freed.

    Attributes
    ----------
    number : int
        Ascending from 1, never reused in its resource.
    nbytes : int
        What was asked for.
    age_s : float
        Seconds since it was made.
    thread : int
        kina's number of the thread that made it, never reused.
    stack : str or None
        Where Python was, innermost call first, if stacks are kept.
    """

    number: int
    nbytes: int
    age_s: float
    thread: int
    stack: str | None


@cython.final
@cython.no_gc_clear
cdef class TrackingMemoryResource(MemoryResource):
    """TrackingMemoryResource(upstream, stacks=False)

    Remembers every allocation from `upstream` until it is freed.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    stacks : bool
        Keep also where in Python each was made (32 calls deep). This takes the GIL at each allocation.

    Notes
    -----
    A free of what is not outstanding (freed twice, or foreign) frees nothing; one with a wrong size frees what was
    allocated. Both are kept in :meth:`errors`, and the first one is also an error of the logger ``"kina.memory"``.
    """

    def __init__(self, upstream: MemoryResource, stacks: bool = False) -> None:
        cdef MemoryResource below = checked_upstream(upstream)
        cdef tracking_resource *made
        if not isinstance(stacks, bool):
            raise ArgumentError(f"stacks: a bool is needed, not {type(stacks).__name__}",
                                operation="TrackingMemoryResource")
        made = <tracking_resource *> calloc(1, sizeof(tracking_resource))
        if made == NULL:
            raise MemoryError
        fork_mutex_init(&made.mutex)
        made.stacks = stacks
        adaptor_init(&made.adaptor, &functions, below.c, tracking_destroy)
        self.serve(&made.adaptor.resource, below, NULL)

    def outstanding(self) -> list[TrackedAllocation]:
        """What is allocated and not freed, oldest first."""
        cdef tracking_resource *tracking = <tracking_resource *> self.ready()
        cdef kina_tracked *copies = NULL
        cdef int64_t count, place, now
        drain_python_releases()
        fork_mutex_lock(&tracking.mutex)
        count = kina_tracked_copy(&tracking.table, &copies)
        fork_mutex_unlock(&tracking.mutex)
        if count < 0:
            raise MemoryError
        now = kina_monotonic_ns()
        found = []
        try:
            for place in range(count):
                stack = None if copies[place].stack == NULL else copies[place].stack.decode("utf-8", "replace")
                found.append(TrackedAllocation(copies[place].number, copies[place].nbytes,
                                               (now - copies[place].since_ns) * 1e-9, copies[place].thread, stack))
        finally:
            for place in range(count):
                free(copies[place].stack)
            free(copies)
        found.sort()
        return found

    def errors(self) -> list[str]:
        """What was freed wrongly, in words: the first 64."""
        cdef tracking_resource *tracking = <tracking_resource *> self.ready()
        cdef char *texts[KEPT_ERRORS]
        cdef int count, number
        fork_mutex_lock(&tracking.mutex)
        count = <int> min(tracking.error_count, KEPT_ERRORS)
        for number in range(count):
            texts[number] = tracking.errors[number]  # never changed again while the resource lives
        fork_mutex_unlock(&tracking.mutex)
        return [texts[number].decode("utf-8", "replace") for number in range(count) if texts[number] != NULL]

    @property
    def error_count(self) -> int:
        """How many frees were wrong."""
        return (<tracking_resource *> self.ready()).error_count

    def report(self) -> str:
        """A text for people: what is outstanding, largest first, and what was freed wrongly."""
        found = self.outstanding()
        total = sum([each.nbytes for each in found])
        lines = [f"{len(found)} allocations outstanding, {total} bytes"]
        for each in sorted(found, key=lambda each: (-each.nbytes, each.number)):
            lines.append(f"  #{each.number}: {each.nbytes} bytes, {each.age_s:.3g} s old, thread {each.thread}"
                         + (f", from {each.stack}" if each.stack else ""))
        if self.error_count:
            lines.append(f"{self.error_count} wrong frees")
            lines += [f"  {text}" for text in self.errors()]
        return "\n".join(lines)
