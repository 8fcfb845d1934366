# cython: annotation_typing=False
"""A memory resource that writes every allocation and free to a file, in the columns of RMM's logs.

Producers put records into a ring without a lock; one native thread for each log writes them out. The ring is a bounded
queue of sequence numbers: a producer draws a ticket, waits until the place of that ticket is free, fills it, and
publishes it by its sequence number. So nothing is lost, and the order of each thread is kept.
"""

import atexit
import os

cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from kina._core.call_stack cimport call_stack
from kina._core.fork_mutex cimport fork_count, fork_mutex_init, kina_fork_mutex
from kina._core.resource cimport (
    MemoryResource,
    adaptor_destroy,
    adaptor_init,
    checked_upstream,
    kina_adaptor,
    parse_nbytes,
)
from kina._core.storage cimport (
    drain_python_releases,
    kina_handle,
    kina_resource,
    kina_resource_vtable,
    kina_stream,
)
from kina._core.tokens cimport thread_token

from kina.errors import ArgumentError, InvalidConfigError

__all__ = ["LoggingMemoryResource"]


cdef extern from *:
    """
    #include <errno.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>
    #include <time.h>
    #include <unistd.h>

    enum { KINA_LOG_ALLOCATE, KINA_LOG_FREE, KINA_LOG_FAILURE };

    typedef struct kina_log_record {
        uint64_t sequence; /* == ticket: free for that ticket; == ticket + 1: its record is complete */
        int64_t time_ns;
        uint64_t pointer;
        uint64_t nbytes;
        uint64_t stream;
        uint64_t thread;
        uint64_t action;
        char *stack; /* owned, or NULL */
    } kina_log_record;

    #define KINA_LOG_TEXT 65536 /* written at once */
    #define KINA_LOG_LINE 256   /* room for a line without its stack */
    #define KINA_LOG_NAP_MS 20  /* between looks at the ring while something comes now and then */
    #define KINA_LOG_NAPS 50    /* in vain, before the writer waits to be woken */

    typedef struct kina_log {
        int64_t references; /* atomic: the resource, the writer, and whoever closes it at exit */
        kina_log_record *ring;
        uint64_t capacity; /* a power of two */
        int descriptor;    /* owned */
        int with_stacks;
        int forks; /* the process that has the writer */
        struct kina_log *previous, *next; /* the list of all that may have to be closed at exit */
        /* atomic */
        int open;    /* producers may draw tickets */
        int started; /* there is a writer */
        int asleep;  /* the writer waits to be woken */
        int failure; /* errno of the write that failed; what comes after it is dropped */
        uint64_t waits;
        /* under the mutex */
        pthread_mutex_t mutex;
        pthread_cond_t wake; /* for the writer */
        pthread_cond_t news; /* from the writer: room, something written, the end */
        pthread_t writer;
        int stop, finished;
        int settled; /* somebody joins the writer, or has let it go */
        uint64_t written; /* tickets whose lines are in the file */
        /* each on a line of its own in the cache */
        char pad_before[64];
        uint64_t head; /* the next ticket; atomic */
        char pad_between[64];
        /* the writer's own */
        uint64_t tail;
        time_t second; /* that `clock` shows */
        char clock[16];
        size_t length;
        char text[KINA_LOG_TEXT];
    } kina_log;

    /* All logs of this process; a forked child begins anew. */
    static kina_fork_mutex kina_logs_mutex; /* guards what follows */
    static pthread_cond_t kina_logs_news = PTHREAD_COND_INITIALIZER;
    static kina_log *kina_logs = NULL;
    static int kina_log_writers = 0;
    static int kina_logs_forks = 0;

    static void kina_logs_lock(int forks) {
        pthread_mutex_lock(&kina_logs_mutex.mutex);
        if (kina_logs_forks == forks) return;
        kina_logs_forks = forks;
        kina_logs = NULL;
        kina_log_writers = 0;
        pthread_cond_init(&kina_logs_news, NULL);
    }
    static void kina_logs_unlock(void) { pthread_mutex_unlock(&kina_logs_mutex.mutex); }

    static void kina_log_unref(kina_log *log) {
        uint64_t place;
        if (__atomic_fetch_sub(&log->references, 1, __ATOMIC_ACQ_REL) != 1) return;
        for (place = 0; place < log->capacity; place++) free(log->ring[place].stack); /* of records after the end */
        close(log->descriptor);
        pthread_cond_destroy(&log->news);
        pthread_cond_destroy(&log->wake);
        pthread_mutex_destroy(&log->mutex);
        free(log->ring);
        free(log);
    }

    /* Takes the descriptor over; NULL without memory. */
    static kina_log *kina_log_new(int descriptor, uint64_t capacity, int with_stacks, int forks) {
        kina_log *log = (kina_log *)calloc(1, sizeof(kina_log));
        uint64_t place;
        if (!log) return NULL;
        if (posix_memalign((void **)&log->ring, 64, capacity * sizeof(kina_log_record)) != 0) {
            free(log);
            return NULL;
        }
        for (place = 0; place < capacity; place++) {
            log->ring[place].sequence = place;
            log->ring[place].stack = NULL;
        }
        log->capacity = capacity;
        log->descriptor = descriptor;
        log->with_stacks = with_stacks;
        log->forks = forks;
        log->references = 1;
        log->open = 1;
        log->second = (time_t)-1;
        pthread_mutex_init(&log->mutex, NULL);
        pthread_cond_init(&log->wake, NULL);
        pthread_cond_init(&log->news, NULL);
        kina_logs_lock(forks);
        log->next = kina_logs;
        if (kina_logs) kina_logs->previous = log;
        kina_logs = log;
        kina_logs_unlock();
        return log;
    }

    /* The writer ------------------------------------------------------------------------------------------- */

    static void kina_log_out(kina_log *log) {
        size_t done = 0;
        while (done < log->length && !log->failure) {
            ssize_t count = write(log->descriptor, log->text + done, log->length - done);
            if (count >= 0)
                done += (size_t)count;
            else if (errno != EINTR)
                __atomic_store_n(&log->failure, errno, __ATOMIC_RELEASE);
        }
        log->length = 0;
    }
    static void kina_log_text(kina_log *log, const char *text, size_t length) {
        memcpy(log->text + log->length, text, length);
        log->length += length;
    }
    static void kina_log_decimal(kina_log *log, uint64_t number) {
        char digits[20];
        size_t first = sizeof(digits);
        do digits[--first] = (char)('0' + number % 10);
        while ((number /= 10) != 0);
        kina_log_text(log, digits + first, sizeof(digits) - first);
    }
    static void kina_log_hexadecimal(kina_log *log, uint64_t number) {
        char digits[16];
        size_t first = sizeof(digits);
        do digits[--first] = "0123456789abcdef"[number & 15];
        while ((number >>= 4) != 0);
        kina_log_text(log, digits + first, sizeof(digits) - first);
    }
    static void kina_log_time(kina_log *log, int64_t time_ns) {
        time_t second = (time_t)(time_ns / 1000000000);
        uint32_t micros = (uint32_t)(time_ns % 1000000000 / 1000);
        char fraction[7] = ".000000";
        int place;
        if (second != log->second) {
            struct tm local;
            localtime_r(&second, &local);
            strftime(log->clock, sizeof(log->clock), "%H:%M:%S", &local);
            log->second = second;
        }
        for (place = 6; place > 0; place--, micros /= 10) fraction[place] = (char)('0' + micros % 10);
        kina_log_text(log, log->clock, 8);
        kina_log_text(log, fraction, sizeof(fraction));
    }
    static void kina_log_stack(kina_log *log, const char *stack) {
        kina_log_text(log, ",\\"", 2);
        for (; *stack; stack++) {
            if (log->length + KINA_LOG_LINE > KINA_LOG_TEXT) kina_log_out(log);
            if (*stack == '"') kina_log_text(log, stack, 1);
            kina_log_text(log, stack, 1);
        }
        kina_log_text(log, "\\"", 1);
    }
    static void kina_log_line(kina_log *log, const kina_log_record *record) {
        static const char *const actions[] = {",allocate,0x", ",free,0x", ",allocate failure,0x"};
        if (log->length + KINA_LOG_LINE > KINA_LOG_TEXT) kina_log_out(log);
        kina_log_decimal(log, record->thread);
        kina_log_text(log, ",", 1);
        kina_log_time(log, record->time_ns);
        kina_log_text(log, actions[record->action], strlen(actions[record->action]));
        kina_log_hexadecimal(log, record->pointer);
        kina_log_text(log, ",", 1);
        kina_log_decimal(log, record->nbytes);
        kina_log_text(log, ",0x", 3);
        kina_log_hexadecimal(log, record->stream);
        if (log->with_stacks) kina_log_stack(log, record->stack ? record->stack : "");
        kina_log_text(log, "\\n", 1);
    }
    /* Write what is complete; whether there was anything. Room is given back as soon as a record is read. */
    static int kina_log_drain(kina_log *log) {
        uint64_t first = log->tail;
        for (;;) {
            kina_log_record *record = &log->ring[log->tail & (log->capacity - 1)];
            if (__atomic_load_n(&record->sequence, __ATOMIC_ACQUIRE) != log->tail + 1) break;
            kina_log_line(log, record);
            free(record->stack);
            record->stack = NULL;
            __atomic_store_n(&record->sequence, log->tail + log->capacity, __ATOMIC_RELEASE);
            log->tail += 1;
            if (log->tail - first == log->capacity) break; /* let those who flush or wait know */
        }
        kina_log_out(log);
        return log->tail != first;
    }
    static void kina_log_nap(pthread_cond_t *condition, pthread_mutex_t *mutex, int milliseconds) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += milliseconds * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(condition, mutex, &until);
    }
    static void *kina_log_write(void *argument) {
        kina_log *log = (kina_log *)argument;
        int idle = 0, forks = log->forks;
        for (;;) {
            int busy = kina_log_drain(log);
            pthread_mutex_lock(&log->mutex);
            log->written = log->tail;
            if (log->stop && log->tail == __atomic_load_n(&log->head, __ATOMIC_ACQUIRE)) break; /* with the mutex */
            if (busy) {
                pthread_cond_broadcast(&log->news);
                __atomic_store_n(&log->asleep, 0, __ATOMIC_RELEASE);
                idle = 0;
            } else if (log->stop) {
                kina_log_nap(&log->wake, &log->mutex, 1); /* for a record that is being filled */
            } else if (++idle <= KINA_LOG_NAPS) {
                if (idle == KINA_LOG_NAPS) __atomic_store_n(&log->asleep, 1, __ATOMIC_SEQ_CST);
                kina_log_nap(&log->wake, &log->mutex, KINA_LOG_NAP_MS);
            } else if (__atomic_load_n(&log->asleep, __ATOMIC_ACQUIRE)) {
                /* Producers read the flag without a fence. It has been up for a nap: one that missed it had published
                 * its record long before this last look at the ring. */
                pthread_cond_wait(&log->wake, &log->mutex);
                idle = 0;
            } else {
                idle = 0;
            }
            pthread_mutex_unlock(&log->mutex);
        }
        log->finished = 1;
        pthread_cond_broadcast(&log->news);
        pthread_mutex_unlock(&log->mutex);
        kina_log_unref(log);
        kina_logs_lock(forks);
        kina_log_writers -= 1;
        pthread_cond_broadcast(&kina_logs_news);
        kina_logs_unlock();
        return NULL;
    }
    static void kina_log_count_writer(int forks, int change) {
        kina_logs_lock(forks);
        kina_log_writers += change;
        kina_logs_unlock();
    }
    static void kina_log_start(kina_log *log) {
        sigset_t all, before;
        int failure;
        pthread_mutex_lock(&log->mutex);
        if (!log->started && !log->stop && !log->failure) {
            kina_log_count_writer(log->forks, 1);
            __atomic_fetch_add(&log->references, 1, __ATOMIC_RELAXED);
            sigfillset(&all); /* signals are for the threads of the program */
            pthread_sigmask(SIG_SETMASK, &all, &before);
            failure = pthread_create(&log->writer, NULL, kina_log_write, log);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            if (failure) {
                kina_log_count_writer(log->forks, -1);
                __atomic_fetch_sub(&log->references, 1, __ATOMIC_RELAXED);
                __atomic_store_n(&log->failure, failure, __ATOMIC_RELEASE);
                __atomic_store_n(&log->open, 0, __ATOMIC_RELEASE);
            } else {
                __atomic_store_n(&log->started, 1, __ATOMIC_RELEASE);
            }
        }
        pthread_mutex_unlock(&log->mutex);
    }

    /* Producers -------------------------------------------------------------------------------------------- */

    static void kina_log_wake(kina_log *log) {
        pthread_mutex_lock(&log->mutex);
        __atomic_store_n(&log->asleep, 0, __ATOMIC_RELEASE);
        pthread_cond_signal(&log->wake);
        pthread_mutex_unlock(&log->mutex);
    }
    /* 0 if the log has ended. */
    static int kina_log_wait_for_room(kina_log *log, kina_log_record *record, uint64_t ticket) {
        int room = 0;
        __atomic_fetch_add(&log->waits, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&log->mutex);
        while (!(room = __atomic_load_n(&record->sequence, __ATOMIC_ACQUIRE) == ticket) && !log->finished) {
            __atomic_store_n(&log->asleep, 0, __ATOMIC_RELEASE);
            pthread_cond_signal(&log->wake);
            kina_log_nap(&log->news, &log->mutex, 1);
        }
        pthread_mutex_unlock(&log->mutex);
        return room;
    }
    static inline int kina_log_is_open(kina_log *log, int forks) {
        return __atomic_load_n(&log->open, __ATOMIC_ACQUIRE) && log->forks == forks;
    }
    static inline void kina_log_put(kina_log *log, uint64_t thread, uint64_t action, uint64_t pointer, uint64_t nbytes,
                                    uint64_t stream, char *stack) {
        struct timespec now;
        kina_log_record *record;
        uint64_t ticket;
        if (!__atomic_load_n(&log->started, __ATOMIC_ACQUIRE)) {
            kina_log_start(log);
            if (!__atomic_load_n(&log->open, __ATOMIC_ACQUIRE)) {
                free(stack);
                return;
            }
        }
        clock_gettime(CLOCK_REALTIME, &now);
        ticket = __atomic_fetch_add(&log->head, 1, __ATOMIC_ACQ_REL);
        record = &log->ring[ticket & (log->capacity - 1)];
        if (__atomic_load_n(&record->sequence, __ATOMIC_ACQUIRE) != ticket &&
            !kina_log_wait_for_room(log, record, ticket)) {
            free(stack);
            return;
        }
        record->time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
        record->pointer = pointer;
        record->nbytes = nbytes;
        record->stream = stream;
        record->thread = thread;
        record->action = action;
        record->stack = stack;
        __atomic_store_n(&record->sequence, ticket + 1, __ATOMIC_RELEASE);
        if (__atomic_load_n(&log->asleep, __ATOMIC_RELAXED) || ((ticket + 1) & (log->capacity / 2 - 1)) == 0)
            kina_log_wake(log);
    }

    /* The owner -------------------------------------------------------------------------------------------- */

    /* Wait until everything recorded so far is in the file. */
    static void kina_log_flush(kina_log *log) {
        uint64_t target = __atomic_load_n(&log->head, __ATOMIC_ACQUIRE);
        if (!__atomic_load_n(&log->started, __ATOMIC_ACQUIRE)) return;
        pthread_mutex_lock(&log->mutex);
        while (log->written < target && !log->finished) {
            __atomic_store_n(&log->asleep, 0, __ATOMIC_RELEASE);
            pthread_cond_signal(&log->wake);
            pthread_cond_wait(&log->news, &log->mutex);
        }
        pthread_mutex_unlock(&log->mutex);
    }
    /* No more records; what there is gets written, and the writer is joined. */
    static void kina_log_close(kina_log *log) {
        int join;
        __atomic_store_n(&log->open, 0, __ATOMIC_SEQ_CST);
        pthread_mutex_lock(&log->mutex);
        log->stop = 1;
        join = log->started && !log->settled;
        log->settled = 1;
        pthread_cond_signal(&log->wake);
        while (log->started && !log->finished) pthread_cond_wait(&log->news, &log->mutex);
        pthread_mutex_unlock(&log->mutex);
        if (join) pthread_join(log->writer, NULL);
    }
    /* The last of its resource, from any thread: nothing is waited for, the writer ends by itself. */
    static void kina_log_abandon(kina_log *log, int forks) {
        if (log->forks != forks) return; /* it is the parent's; here it leaks */
        kina_logs_lock(forks);
        if (log->previous) log->previous->next = log->next;
        else if (kina_logs == log) kina_logs = log->next;
        if (log->next) log->next->previous = log->previous;
        kina_logs_unlock();
        __atomic_store_n(&log->open, 0, __ATOMIC_SEQ_CST);
        pthread_mutex_lock(&log->mutex);
        log->stop = 1;
        if (log->started && !log->settled) pthread_detach(log->writer);
        log->settled = 1;
        pthread_cond_signal(&log->wake);
        pthread_mutex_unlock(&log->mutex);
        kina_log_unref(log);
    }
    /* At the end of the process: close every log, and wait for the writers of those that were abandoned. */
    static void kina_logs_end(int forks) {
        kina_log *log;
        kina_logs_lock(forks);
        while (kina_logs) {
            log = kina_logs; /* as if it had no owner any more, so that it is found once */
            kina_logs = log->next;
            if (kina_logs) kina_logs->previous = NULL;
            log->next = log->previous = NULL;
            __atomic_fetch_add(&log->references, 1, __ATOMIC_RELAXED);
            kina_logs_unlock();
            kina_log_close(log);
            kina_log_unref(log);
            kina_logs_lock(forks);
        }
        while (kina_log_writers > 0) pthread_cond_wait(&kina_logs_news, &kina_logs_mutex.mutex);
        kina_logs_unlock();
    }
    """
    ctypedef struct kina_log:
        int failure
        bint open
        bint with_stacks
        int forks
        uint64_t head
        uint64_t waits

    enum: KINA_LOG_ALLOCATE
    enum: KINA_LOG_FREE
    enum: KINA_LOG_FAILURE
    kina_log *kina_log_new(int descriptor, uint64_t capacity, bint with_stacks, int forks) noexcept nogil
    bint kina_log_is_open(kina_log *log, int forks) noexcept nogil
    void kina_log_put(kina_log *log, uint64_t thread, uint64_t action, uint64_t pointer, uint64_t nbytes,
                      uint64_t stream, char *stack) noexcept nogil
    void kina_log_flush(kina_log *log) noexcept nogil
    void kina_log_close(kina_log *log) noexcept nogil
    void kina_log_abandon(kina_log *log, int forks) noexcept nogil
    void kina_logs_end(int forks) noexcept nogil
    kina_fork_mutex kina_logs_mutex


fork_mutex_init(&kina_logs_mutex)


ctypedef struct logging_resource:
    kina_adaptor adaptor
    kina_log *log


cdef void record(kina_log *log, uint64_t action, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    if kina_log_is_open(log, fork_count()):
        kina_log_put(log, thread_token(), action, <uintptr_t> data, nbytes,
                     0 if stream == NULL else <uintptr_t> stream.native, call_stack() if log.with_stacks else NULL)


cdef int logging_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef int status = self.upstream.vtable.allocate(self.upstream, out, nbytes, stream)
    if status == 0:
        record((<logging_resource *> self).log, KINA_LOG_ALLOCATE, out[0], nbytes, stream)
    else:
        record((<logging_resource *> self).log, KINA_LOG_FAILURE, NULL, nbytes, stream)
    return status


cdef void logging_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    # Before it is done: afterwards the address may be in somebody else's record already.
    record((<logging_resource *> self).log, KINA_LOG_FREE, data, nbytes, stream)
    self.upstream.vtable.deallocate(self.upstream, data, nbytes, stream)


cdef void logging_destroy(kina_handle *self) noexcept nogil:
    kina_log_abandon((<logging_resource *> self).log, fork_count())
    adaptor_destroy(self)


cdef kina_resource_vtable functions
functions.name = b"LoggingMemoryResource"
functions.allocate = logging_allocate
functions.deallocate = logging_deallocate


@cython.final
@cython.no_gc_clear
cdef class LoggingMemoryResource(MemoryResource):
    """LoggingMemoryResource(upstream, path, stacks=False, *, ring_records=65536)

    Writes every allocation and free to a file: comma-separated, with RMM's columns ``Thread``, ``Time``, ``Action``,
    ``Pointer``, ``Size`` and ``Stream``, so RMM's tools read it.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    path : str or os.PathLike
        The file; what it held is gone.
    stacks : bool
        One more column, ``Stack``: where in Python it happened. This takes the GIL at each record.
    ring_records : int
        How many records wait for the writer at most, a power of two from 2 on; 64 bytes each.

    Raises
    ------
    OSError
        The file cannot be written; also from :meth:`flush` and :meth:`close`, for what failed in between.

    Notes
    -----
    Actions are ``allocate``, ``free`` and ``allocate failure``. Threads are kina's numbers, never reused; times are
    local, to the microsecond. A record costs its clock reading and a place in a ring, which one native thread empties.
    It begins with the first record and ends with :meth:`close`, the resource or the process. When the ring is full the
    thread waits for room (:attr:`waits`): nothing is lost, and the order of each thread is kept. What a forked child
    allocates is not logged.
    """

    cdef object path_text

    def __init__(self, upstream: MemoryResource, path: object, stacks: bool = False, *,
                 ring_records: int = 65536) -> None:
        cdef MemoryResource below = checked_upstream(upstream)
        cdef size_t capacity = parse_nbytes(ring_records, "LoggingMemoryResource")
        cdef logging_resource *made
        cdef bytes header = b"Thread,Time,Action,Pointer,Size,Stream"
        if not isinstance(stacks, bool):
            raise ArgumentError(f"stacks: a bool is needed, not {type(stacks).__name__}",
                                operation="LoggingMemoryResource")
        if not 2 <= capacity <= 1 << 26 or capacity & (capacity - 1):
            raise InvalidConfigError(f"ring_records: {capacity} is not a power of two from 2 to 2**26",
                                     operation="LoggingMemoryResource")
        self.path_text = os.fspath(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        made = <logging_resource *> calloc(1, sizeof(logging_resource))
        try:
            os.write(descriptor, header + (b",Stack\n" if stacks else b"\n"))
            if made == NULL:
                raise MemoryError
            made.log = kina_log_new(descriptor, capacity, stacks, fork_count())
            if made.log == NULL:
                raise MemoryError
        except BaseException:
            free(made)
            os.close(descriptor)
            raise
        adaptor_init(&made.adaptor, &functions, below, logging_destroy)
        self.serve(&made.adaptor.resource, below, NULL)

    cdef kina_log *log(self) except NULL:
        return (<logging_resource *> self.ready()).log

    cdef int check_written(self) except -1:
        cdef int failure = self.log().failure
        if failure != 0:
            raise OSError(failure, os.strerror(failure), self.path_text)
        return 0

    def flush(self) -> None:
        """Wait until everything recorded so far is in the file.

        Raises
        ------
        OSError
            Writing failed: from there on the log misses everything.
        """
        cdef kina_log *log = self.log()
        drain_python_releases()
        if log.forks == fork_count():
            with nogil:
                kina_log_flush(log)
            self.check_written()

    def close(self) -> None:
        """Write what is recorded and end the log; the resource goes on without one. Closing twice is harmless.

        Raises
        ------
        OSError
            As :meth:`flush`.
        """
        cdef kina_log *log = self.log()
        drain_python_releases()
        if log.forks == fork_count():
            with nogil:
                kina_log_close(log)
            self.check_written()

    def __enter__(self) -> LoggingMemoryResource:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self.close()

    @property
    def path(self) -> str:
        """The file."""
        return self.path_text

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return not kina_log_is_open(self.log(), fork_count())

    @property
    def records(self) -> int:
        """How many allocations, frees and failures were recorded."""
        return self.log().head

    @property
    def waits(self) -> int:
        """How often a thread had to wait for room in the ring."""
        return self.log().waits


def _end() -> None:
    """At exit, before the interpreter goes: what is recorded is in the files, and no writer is left."""
    cdef int forks = fork_count()
    with nogil:
        kina_logs_end(forks)


atexit.register(_end)
