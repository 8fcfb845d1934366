# cython: annotation_typing=False
"""The loop that plays a trace of allocations on a memory resource, without the GIL.

One thread at a time has the turn: that of the next event. It plays until an event of another thread comes and hands the
turn over, so all events happen in the order of the log, each on the thread it belongs to.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kina._core.allocation_trace cimport TRACE_ALLOCATE, TRACE_FREE, AllocationTrace, trace_event
from kina._core.resource cimport MemoryResource
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_RESOURCE_PYTHON,
    KINA_RESOURCE_VERSION,
    allocation_failed,
    drain_python_releases,
    kina_handle,
    kina_handle_init,
    kina_release,
    kina_resource,
    kina_resource_vtable,
    kina_retain,
    kina_stream,
)

from kina.errors import ArgumentError

__all__ = ["Playback"]


cdef extern from *:
    """
    #include <pthread.h>
    #include <stdint.h>
    #include <time.h>

    static inline int64_t kina_play_clock(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    static void kina_play_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int milliseconds) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += milliseconds * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(condition, mutex, &until);
    }
    """
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes) noexcept nogil
    int pthread_mutex_destroy(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_cond_init(pthread_cond_t *condition, void *attributes) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t *condition) noexcept nogil
    int pthread_cond_signal(pthread_cond_t *condition) noexcept nogil
    int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) noexcept nogil
    int64_t kina_play_clock() noexcept nogil
    void kina_play_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int milliseconds) noexcept nogil


cdef enum:
    NOBODY = -1
    LOOK_MS = 50            # how soon a signal is noticed while other threads play
    CALIBRATED = 1 << 20    # events that the cost of the loop is measured with, and in parts of how many
    CALIBRATED_PART = 1 << 14
    PLAYED = 0
    PAUSED = 1


ctypedef struct playing_slot:
    void *address           # NULL: nothing is live here
    uint64_t event          # of the allocation


ctypedef struct playing_thread:
    pthread_cond_t turn
    int64_t last            # its last event
    bint started


# A resource that does nothing, to know what the loop costs by itself ---------------------------------------


cdef int idle_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    out[0] = <void *> 256
    return 0


cdef void idle_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    pass


cdef kina_resource_vtable idle_functions
idle_functions.name = b"idle"
idle_functions.allocate = idle_allocate
idle_functions.deallocate = idle_deallocate
cdef kina_resource idle_resource
idle_resource.vtable = &idle_functions


# Streams --------------------------------------------------------------------------------------------------


ctypedef struct noting_resource:
    kina_resource base
    kina_stream *seen       # a reference


cdef int noting_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    kina_retain(stream)
    (<noting_resource *> self).seen = stream
    out[0] = NULL
    return 0


cdef void noting_destroy(kina_handle *self) noexcept nogil:
    free(self)


cdef kina_resource_vtable noting_functions
noting_functions.version = KINA_RESOURCE_VERSION
noting_functions.supports_streams = 1
noting_functions.name = b"replay"
noting_functions.allocate = noting_allocate
noting_functions.deallocate = idle_deallocate


cdef kina_stream *stream_for(MemoryResource resource, object stream) except? NULL:
    """The stream that a `stream=` stands for, with a reference: seen by a resource that is asked with it."""
    cdef MemoryResource face = MemoryResource.__new__(MemoryResource)
    cdef noting_resource *made = <noting_resource *> calloc(1, sizeof(noting_resource))
    if made == NULL:
        raise MemoryError("no host memory for a replay")
    kina_handle_init(&made.base.handle, noting_destroy)
    made.base.vtable = &noting_functions
    made.base.device_type = resource.c.device_type
    made.base.device_id = resource.c.device_id
    face.serve(&made.base, None, NULL)
    face.unsafe_allocate(1, stream)
    return made.seen


# The run --------------------------------------------------------------------------------------------------


@cython.final
cdef class Playback:
    """Playback(trace, resource, streams=())

    One run of a trace on a resource; :func:`kina.memory.replay` drives it.

    Parameters
    ----------
    trace : AllocationTrace
        Read to its end.
    resource : MemoryResource
        Where the memory comes from.
    streams : sequence
        One for each stream of the trace, for a resource with stream order; else empty.
    """

    cdef AllocationTrace trace
    cdef MemoryResource resource
    cdef tuple stream_owners
    cdef kina_stream **streams          # owned; one for each stream of the trace, with a reference each; or NULL
    cdef playing_slot *slots            # owned
    cdef playing_thread *threads        # owned; one for each thread of the trace
    cdef bint prepared                  # mutex and conditions are to be destroyed
    cdef pthread_mutex_t mutex          # guards `turn`, `stopped` and `started`
    cdef pthread_cond_t news            # for who starts threads: one is to be started, or all is over
    cdef int64_t turn                   # whose turn it is, or NOBODY
    cdef bint stopped
    # Of the thread whose turn it is:
    cdef uint64_t next
    cdef public uint64_t pause      # the number of the event before which run() comes back
    cdef int64_t spent_ns[2]
    cdef int64_t done[2]
    cdef double overhead_ns[2]          # of an event, measured beforehand
    cdef int inside                     # calls of run() under way; with the GIL

    def __cinit__(self, trace: AllocationTrace, resource: MemoryResource, streams: object = ()):
        cdef uint32_t thread
        if not isinstance(trace, AllocationTrace) or not (<AllocationTrace> trace).finished:
            raise ArgumentError("replay: a trace is needed that was read to its end", operation="replay")
        if not isinstance(resource, MemoryResource):
            raise ArgumentError(f"replay: a MemoryResource is needed, not {type(resource).__name__}",
                                operation="replay")
        self.trace = trace
        self.resource = resource
        self.resource.ready()
        self.stream_owners = tuple(streams)
        if self.stream_owners:
            self.find_streams()
        self.slots = <playing_slot *> calloc(<size_t> self.trace.slot_count + 1, sizeof(playing_slot))
        self.threads = <playing_thread *> calloc(<size_t> self.trace.threads.count + 1, sizeof(playing_thread))
        if self.slots == NULL or self.threads == NULL:
            raise MemoryError("no host memory for a replay")
        pthread_mutex_init(&self.mutex, NULL)
        pthread_cond_init(&self.news, NULL)
        for thread in range(self.trace.threads.count):
            pthread_cond_init(&self.threads[thread].turn, NULL)
            self.threads[thread].last = NOBODY
        self.prepared = True
        self.turn = NOBODY
        with nogil:
            self.calibrate()
            self.find_ends()

    def __dealloc__(self):
        cdef uint32_t thread
        if self.prepared:
            for thread in range(self.trace.threads.count):
                pthread_cond_destroy(&self.threads[thread].turn)
            pthread_cond_destroy(&self.news)
            pthread_mutex_destroy(&self.mutex)
        if self.streams != NULL:
            for thread in range(self.trace.streams.count):
                kina_release(self.streams[thread])
        free(self.streams)
        free(self.threads)
        free(self.slots)

    cdef int find_streams(self) except -1:
        cdef uint32_t number
        if len(self.stream_owners) != self.trace.streams.count:
            raise ArgumentError(f"replay: {len(self.stream_owners)} streams, the trace has {self.trace.streams.count}",
                                operation="replay")
        self.streams = <kina_stream **> calloc(self.trace.streams.count, sizeof(kina_stream *))
        if self.streams == NULL:
            raise MemoryError("no host memory for a replay")
        for number in range(self.trace.streams.count):
            self.streams[number] = stream_for(self.resource, self.stream_owners[number])
        return 0

    cdef void find_ends(self) noexcept nogil:
        cdef uint64_t number
        cdef trace_event *event
        for number in range(self.trace.count):
            event = &self.trace.events[number]
            if event.action <= TRACE_FREE:
                if self.turn == NOBODY:
                    self.turn = event.thread
                    self.next = number
                self.threads[event.thread].last = <int64_t> number

    cdef void calibrate(self) noexcept nogil:
        """What an event costs beside the resource: the clock, the record, the slot, the call. Of the quietest part."""
        cdef uint64_t end = min(<uint64_t> self.trace.count, <uint64_t> CALIBRATED)
        cdef double cost
        cdef int kind
        cdef uint32_t slot
        while self.next < end:
            self.spent_ns[0] = self.spent_ns[1] = 0
            self.done[0] = self.done[1] = 0
            self.play(&idle_resource, NOBODY, min(end, self.next + CALIBRATED_PART))
            for kind in range(2):
                if self.done[kind]:
                    cost = <double> self.spent_ns[kind] / self.done[kind]
                    if self.overhead_ns[kind] == 0 or cost < self.overhead_ns[kind]:
                        self.overhead_ns[kind] = cost
        for slot in range(self.trace.slot_count):
            self.slots[slot].address = NULL
        self.spent_ns[0] = self.spent_ns[1] = 0
        self.done[0] = self.done[1] = 0
        self.next = 0

    cdef int play(self, kina_resource *resource, int64_t thread, uint64_t end) noexcept nogil:
        """From the next event to `end`, or to the first of another thread than `thread` (NOBODY: of all threads)."""
        cdef trace_event *events = self.trace.events
        cdef trace_event *event
        cdef playing_slot *slot
        cdef uint64_t number = self.next
        cdef int64_t now, then = kina_play_clock()
        cdef int status = 0
        cdef bint in_python = resource.flags & KINA_RESOURCE_PYTHON != 0
        cdef kina_stream *stream = NULL
        while number < end:
            event = &events[number]
            if event.action <= TRACE_FREE:
                if thread != NOBODY and event.thread != <uint32_t> thread:
                    break
                slot = &self.slots[event.slot]
                if self.streams != NULL:
                    stream = self.streams[event.stream]
                if event.action == TRACE_ALLOCATE:
                    status = resource.vtable.allocate(resource, &slot.address, event.nbytes, stream)
                    if status != 0:
                        slot.address = NULL
                        allocation_failed(resource, status, event.nbytes)
                        break
                    slot.event = number
                elif in_python:
                    with gil:  # such a resource puts off what is freed without it
                        resource.vtable.deallocate(resource, slot.address, event.nbytes, stream)
                        slot.address = NULL
                else:
                    resource.vtable.deallocate(resource, slot.address, event.nbytes, stream)
                    slot.address = NULL
                now = kina_play_clock()
                self.spent_ns[event.action] += now - then
                self.done[event.action] += 1
                then = now
            number += 1
        self.next = number
        return status

    # Turns

    cdef bint await_turn(self, int64_t thread) noexcept nogil:
        """False: there will be none."""
        cdef bint mine
        pthread_mutex_lock(&self.mutex)
        while self.turn != thread and not self.stopped:
            pthread_cond_wait(&self.threads[thread].turn, &self.mutex)
        mine = not self.stopped
        pthread_mutex_unlock(&self.mutex)
        return mine

    cdef void hand_over(self) noexcept nogil:
        pthread_mutex_lock(&self.mutex)
        self.turn = NOBODY if self.next == self.trace.count else <int64_t> self.trace.events[self.next].thread
        if self.turn == NOBODY or not self.threads[self.turn].started:
            pthread_cond_signal(&self.news)
        else:
            pthread_cond_signal(&self.threads[self.turn].turn)
        pthread_mutex_unlock(&self.mutex)

    cdef int run_turns(self, int64_t thread, int *status) noexcept nogil:
        cdef bint was_last
        while thread == NOBODY or self.await_turn(thread):
            status[0] = self.play(self.resource.c, thread, min(self.pause, <uint64_t> self.trace.count))
            if status[0] != 0:
                return PLAYED
            if self.next < self.trace.count and self.next == self.pause:
                return PAUSED
            if thread == NOBODY:
                return PLAYED
            was_last = self.threads[thread].last < <int64_t> self.next
            self.hand_over()
            if was_last:
                return PLAYED
        return PLAYED

    def run(self, thread: int = -1) -> bool:
        """Play the events of a thread, each in its turn, or all of them if none is named.

        Returns
        -------
        bool
            True: the pause has come, the turn is still this thread's; call again, with a later :attr:`pause`. False:
            there is nothing more to do for it.

        Raises
        ------
        Exception
            What the resource raised for an allocation, with a note which line of the log it is.
        """
        cdef int64_t number = thread
        cdef int status = 0
        cdef int outcome
        if not NOBODY <= number < <int64_t> self.trace.threads.count:
            raise ArgumentError(f"replay: the trace has {self.trace.threads.count} threads, not {thread}",
                                operation="replay")
        self.inside += 1
        with nogil:
            outcome = self.run_turns(number, &status)
        self.inside -= 1
        if status != 0:
            try:
                check(status)
            except BaseException as error:
                event = self.trace.events[self.next]
                error.add_note(f"replay: {self.trace.source}, line {event.line}, allocates {event.nbytes} bytes")
                raise
        drain_python_releases()
        return outcome == PAUSED

    def thread_to_start(self) -> int | None:
        """Wait a moment for a thread to be started: its number; -1 if there was none; None when all is over."""
        cdef int64_t found = NOBODY
        cdef bint over
        cdef int look
        with nogil:
            pthread_mutex_lock(&self.mutex)
            for look in range(2):
                over = self.stopped or self.turn == NOBODY
                if over:
                    break
                if not self.threads[self.turn].started:
                    found = self.turn
                    self.threads[found].started = True
                    break
                if look == 0:
                    kina_play_wait(&self.news, &self.mutex, LOOK_MS)
            pthread_mutex_unlock(&self.mutex)
        return None if over else found

    def stop(self) -> None:
        """No thread gets another turn; the one that has it is done at its next pause."""
        cdef uint32_t thread
        with nogil:
            pthread_mutex_lock(&self.mutex)
            self.stopped = True
            for thread in range(self.trace.threads.count):
                pthread_cond_signal(&self.threads[thread].turn)
            pthread_cond_signal(&self.news)
            pthread_mutex_unlock(&self.mutex)

    def give_back(self) -> tuple[int, int]:
        """Stop, and free what is live: how many allocations, and how many bytes."""
        cdef kina_resource *resource = self.resource.c
        cdef kina_stream *stream = NULL
        cdef playing_slot *slot
        cdef trace_event *event
        cdef uint32_t number
        cdef uint64_t count = 0
        cdef uint64_t nbytes = 0
        self.stop()
        while self.inside:  # one may have the turn still, after an exception elsewhere
            with nogil:
                pthread_mutex_lock(&self.mutex)
                kina_play_wait(&self.news, &self.mutex, 1)
                pthread_mutex_unlock(&self.mutex)
        for number in range(self.trace.slot_count):
            slot = &self.slots[number]
            if slot.address == NULL:
                continue
            event = &self.trace.events[slot.event]
            if self.streams != NULL:
                stream = self.streams[event.stream]
            if resource.flags & KINA_RESOURCE_PYTHON:
                resource.vtable.deallocate(resource, slot.address, event.nbytes, stream)
            else:
                with nogil:
                    resource.vtable.deallocate(resource, slot.address, event.nbytes, stream)
            slot.address = NULL
            count += 1
            nbytes += event.nbytes
        drain_python_releases()
        return count, nbytes

    @property
    def position(self) -> int:
        """The number of the next event."""
        return self.next

    @property
    def allocations(self) -> int:
        """Allocations that were made."""
        return self.done[0]

    @property
    def deallocations(self) -> int:
        """Frees that were made, without those of :meth:`give_back`."""
        return self.done[1]

    @property
    def allocate_ns(self) -> int:
        """Nanoseconds in allocations, the loop's own included."""
        return self.spent_ns[0]

    @property
    def deallocate_ns(self) -> int:
        """Nanoseconds in frees, the loop's own included."""
        return self.spent_ns[1]

    @property
    def allocate_overhead_ns(self) -> float:
        """What the loop costs an allocation."""
        return self.overhead_ns[0]

    @property
    def deallocate_overhead_ns(self) -> float:
        """What the loop costs a free."""
        return self.overhead_ns[1]
