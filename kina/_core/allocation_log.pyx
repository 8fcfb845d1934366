# cython: annotation_typing=False
"""A memory resource that writes every allocation and free to a file, in the columns of RMM's logs.

Producers put records into a ring without a lock; one native thread for each log writes them out. A producer draws a
ticket, waits until the place of that ticket is free, fills it, and publishes it by its sequence number. So nothing is
lost, and the order of each thread is kept. The writer stays behind: it looks every 20 ms, or when another half of the
ring is full, so that it seldom wants a cache line that a producer is writing.

Reading the clock would be the dearest part of a record. So producers read the processor's own counter (x86-64: the
time-stamp counter; AArch64: the virtual counter), and the writer turns it into time. Before it writes what was drawn
up to then, it reads counter and clock together; a record between two such moments has its time on the straight line
between them. The lines join, so the times of a thread never go back unless the clock does; a step of the clock is
spread over the moments around it. Where the counter is not steady, producers read the clock.
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
    KINA_ASK_FOR_ALL,
    KINA_ASK_PATIENTLY,
    KINA_ASK_QUIETLY,
    drain_python_releases,
    kina_ask,
    kina_asking,
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
    #include "kina_memory.h"
    #if defined(__x86_64__)
    #include <cpuid.h>
    #endif

    enum { KINA_LOG_ALLOCATE, KINA_LOG_FREE, KINA_LOG_FAILURE };

    typedef struct kina_log_record {
        uint64_t sequence; /* == its ticket + 1: the record is complete */
        uint64_t ticks;
        uint64_t pointer;
        uint64_t nbytes;
        uint64_t stream;
        uint64_t thread;
        uint64_t action;
        char *stack; /* owned, or NULL */
    } kina_log_record;

    typedef struct kina_log_moment {
        uint64_t ticks;
        int64_t time_ns;
    } kina_log_moment;

    #define KINA_LOG_TEXT 65536 /* written at once */
    #define KINA_LOG_LINE 256   /* room for a line without its stack */
    #define KINA_LOG_NAP_MS 20  /* between looks at the ring while something comes now and then */
    #define KINA_LOG_NAPS 50    /* in vain, before the writer waits to be woken */
    #define KINA_LOG_BATCH 256  /* records read before their room is given back */
    #define KINA_LOG_AHEAD 32   /* records before its turn, a place is fetched into the cache */
    #define KINA_LOG_ALONE __attribute__((aligned(128))) /* begins a pair of cache lines */

    typedef struct kina_log {
        /* what producers read: seldom written */
        kina_log_record *ring;
        uint64_t capacity; /* a power of two */
        uint64_t tail;     /* atomic: what the writer has read, so that tickets below tail + capacity have room */
        int with_counter;
        int open;    /* atomic: producers may draw tickets */
        int started; /* atomic: there is a writer */
        int asleep;  /* atomic: the writer waits to be woken */
        int with_stacks;
        int forks; /* the process that has the writer */
        KINA_LOG_ALONE uint64_t head; /* atomic: the next ticket */
        KINA_LOG_ALONE int64_t references; /* atomic: the resource, the writer, and whoever closes it at exit */
        struct kina_log *previous, *next; /* the list of all that may have to be closed at exit */
        int descriptor; /* owned */
        int failure;    /* atomic: errno of the write that failed; what comes after it is dropped */
        uint64_t waits; /* atomic */
        /* under the mutex */
        pthread_mutex_t mutex;
        pthread_cond_t wake; /* for the writer */
        pthread_cond_t news; /* from the writer: room, something written, the end */
        pthread_t writer;
        int wanted; /* the writer is to look at once */
        int stop, finished;
        int settled; /* somebody joins the writer, or has let it go */
        uint64_t written; /* tickets whose lines are in the file */
        /* the writer's own */
        KINA_LOG_ALONE uint64_t end;   /* tickets drawn before the present */
        kina_log_moment past, present; /* of those from the end before up to this one */
        double tick_ns;                /* between the two */
        int64_t second_ns; /* that `clock` shows */
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
    /* The list is whole: its mutex was held during the fork. */
    static void kina_logs_in_child(void) {
        kina_log *log;
        for (log = kina_logs; log; log = log->next) log->open = 0;
    }
    static int kina_logs_watch_forks(void) { return pthread_atfork(NULL, NULL, kina_logs_in_child); }

    /* Time ------------------------------------------------------------------------------------------------- */

    /* Whether the processor has a counter of constant rate that user code may read. */
    static int kina_log_has_counter(void) {
    #if defined(__x86_64__)
        unsigned a, b, c, d;
        return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & 1u << 8); /* the invariant time-stamp counter */
    #elif defined(__aarch64__)
        return 1;
    #else
        return 0;
    #endif
    }
    static inline int64_t kina_log_clock_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    static inline uint64_t kina_log_ticks(int with_counter) {
    #if defined(__x86_64__)
        if (with_counter) return __builtin_ia32_rdtsc();
    #elif defined(__aarch64__)
        if (with_counter) {
            uint64_t ticks;
            __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
            return ticks;
        }
    #endif
        (void)with_counter;
        return (uint64_t)kina_log_clock_ns();
    }
    /* The closest of a few readings: the thread may lose its processor within one. */
    static kina_log_moment kina_log_now(int with_counter) {
        kina_log_moment found = {0, 0};
        uint64_t closest = UINT64_MAX;
        int attempt;
        if (!with_counter) {
            found.time_ns = kina_log_clock_ns();
            found.ticks = (uint64_t)found.time_ns;
            return found;
        }
        for (attempt = 0; attempt < 4; attempt++) {
            uint64_t before = kina_log_ticks(1);
            int64_t time_ns = kina_log_clock_ns();
            uint64_t between = kina_log_ticks(1) - before;
            if (between >= closest) continue;
            closest = between;
            found.ticks = before + between / 2;
            found.time_ns = time_ns;
        }
        return found;
    }
    static void kina_log_look_at_clock(kina_log *log) {
        log->past = log->present;
        log->present = kina_log_now(log->with_counter);
        log->tick_ns =
            (double)(log->present.time_ns - log->past.time_ns) / (double)(log->present.ticks - log->past.ticks);
    }
    /* Always between the two moments: also for a thread that was interrupted before it drew its ticket, and where the
     * counter jumped. */
    static inline int64_t kina_log_time_ns(const kina_log *log, uint64_t ticks) {
        if (!log->with_counter) return (int64_t)ticks;
        if (ticks <= log->past.ticks) return log->past.time_ns;
        if (ticks >= log->present.ticks) return log->present.time_ns;
        return log->present.time_ns - (int64_t)((double)(int64_t)(log->present.ticks - ticks) * log->tick_ns);
    }

    /* Making and ending ------------------------------------------------------------------------------------ */

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
    static kina_log *kina_log_new(int descriptor, uint64_t capacity, int with_stacks, int with_counter, int forks) {
        kina_log *log;
        if (posix_memalign((void **)&log, 128, sizeof(kina_log)) != 0) return NULL;
        memset(log, 0, sizeof(kina_log));
        if (posix_memalign((void **)&log->ring, 64, capacity * sizeof(kina_log_record)) != 0) {
            free(log);
            return NULL;
        }
        memset(log->ring, 0, capacity * sizeof(kina_log_record));
        log->capacity = capacity;
        log->descriptor = descriptor;
        log->with_stacks = with_stacks;
        log->with_counter = with_counter;
        log->forks = forks;
        log->references = 1;
        log->open = 1;
        log->second_ns = INT64_MIN;
        log->present = kina_log_now(with_counter);
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
    static inline char *kina_log_text(char *out, const char *text, size_t length) {
        memcpy(out, text, length);
        return out + length;
    }
    static inline char *kina_log_decimal(char *out, uint64_t number) {
        char digits[20];
        size_t first = sizeof(digits);
        do digits[--first] = (char)('0' + number % 10);
        while ((number /= 10) != 0);
        return kina_log_text(out, digits + first, sizeof(digits) - first);
    }
    static inline char *kina_log_hexadecimal(char *out, uint64_t number) {
        int shift = (63 - __builtin_clzll(number | 1)) & ~3;
        for (; shift >= 0; shift -= 4) *out++ = "0123456789abcdef"[number >> shift & 15];
        return out;
    }
    static inline char *kina_log_time(kina_log *log, char *out, int64_t time_ns) {
        uint32_t micros;
        int place;
        if (time_ns < log->second_ns || time_ns >= log->second_ns + 1000000000) {
            time_t second = (time_t)(time_ns / 1000000000);
            struct tm local;
            localtime_r(&second, &local);
            strftime(log->clock, sizeof(log->clock), "%H:%M:%S.", &local);
            log->second_ns = (int64_t)second * 1000000000;
        }
        micros = (uint32_t)(time_ns - log->second_ns) / 1000;
        out = kina_log_text(out, log->clock, 9);
        for (place = 5; place >= 0; place--, micros /= 10) out[place] = (char)('0' + micros % 10);
        return out + 6;
    }
    static void kina_log_stack(kina_log *log, const char *stack) {
        log->text[log->length++] = '"';
        for (; *stack; stack++) {
            if (log->length + KINA_LOG_LINE > KINA_LOG_TEXT) kina_log_out(log);
            if (*stack == '"') log->text[log->length++] = '"';
            log->text[log->length++] = *stack;
        }
        log->text[log->length++] = '"';
    }
    static void kina_log_line(kina_log *log, const kina_log_record *record) {
        static const char *const actions[] = {",allocate,0x", ",free,0x", ",allocate failure,0x"};
        static const size_t lengths[] = {12, 8, 20};
        char *out;
        if (log->length + KINA_LOG_LINE > KINA_LOG_TEXT) kina_log_out(log);
        out = kina_log_decimal(log->text + log->length, record->thread);
        *out++ = ',';
        out = kina_log_time(log, out, kina_log_time_ns(log, record->ticks));
        out = kina_log_text(out, actions[record->action], lengths[record->action]);
        out = kina_log_hexadecimal(out, record->pointer);
        *out++ = ',';
        out = kina_log_decimal(out, record->nbytes);
        out = kina_log_text(out, ",0x", 3);
        out = kina_log_hexadecimal(out, record->stream);
        if (log->with_stacks) {
            *out++ = ',';
            log->length = (size_t)(out - log->text);
            kina_log_stack(log, record->stack ? record->stack : "");
            out = log->text + log->length;
        }
        *out++ = '\\n';
        log->length = (size_t)(out - log->text);
    }
    /* Write what is complete, up to the end; whether there was anything. */
    static int kina_log_drain(kina_log *log) {
        uint64_t first = log->tail, tail = first;
        if (tail == log->end) {
            log->end = __atomic_load_n(&log->head, __ATOMIC_ACQUIRE);
            kina_log_look_at_clock(log);
        }
        while (tail != log->end) {
            kina_log_record *record = &log->ring[tail & (log->capacity - 1)];
            if (__atomic_load_n(&record->sequence, __ATOMIC_ACQUIRE) != tail + 1) break;
            kina_log_line(log, record);
            if (record->stack) {
                free(record->stack);
                record->stack = NULL;
            }
            tail += 1;
            if (tail % KINA_LOG_BATCH == 0) __atomic_store_n(&log->tail, tail, __ATOMIC_RELEASE);
        }
        __atomic_store_n(&log->tail, tail, __ATOMIC_RELEASE);
        kina_log_out(log);
        return tail != first;
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
                if (log->asleep) __atomic_store_n(&log->asleep, 0, __ATOMIC_RELEASE);
                idle = 0;
            }
            if (log->wanted) {
                idle = 0;
            } else if (log->stop) {
                kina_log_nap(&log->wake, &log->mutex, 1); /* for a record that is being filled */
            } else if (busy || ++idle <= KINA_LOG_NAPS) {
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
            log->wanted = 0;
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

    /* With the mutex: let the writer look at once. */
    static void kina_log_want(kina_log *log) {
        log->wanted = 1;
        __atomic_store_n(&log->asleep, 0, __ATOMIC_RELEASE);
        pthread_cond_signal(&log->wake);
    }
    static void kina_log_wake(kina_log *log) {
        pthread_mutex_lock(&log->mutex);
        kina_log_want(log);
        pthread_mutex_unlock(&log->mutex);
    }
    static inline int kina_log_has_room(kina_log *log, uint64_t ticket) {
        return ticket - __atomic_load_n(&log->tail, __ATOMIC_ACQUIRE) < log->capacity;
    }
    /* 0 if the log has ended. */
    static int kina_log_wait_for_room(kina_log *log, uint64_t ticket) {
        int room = 0;
        __atomic_fetch_add(&log->waits, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&log->mutex);
        while (!(room = kina_log_has_room(log, ticket)) && !log->finished) {
            kina_log_want(log);
            kina_log_nap(&log->news, &log->mutex, 1);
        }
        pthread_mutex_unlock(&log->mutex);
        return room;
    }
    static inline int kina_log_is_open(kina_log *log) { return __atomic_load_n(&log->open, __ATOMIC_ACQUIRE); }
    /* Its turn comes soon: by then the line is this processor's alone. */
    static inline void kina_log_fetch(kina_log_record *record) {
    #if defined(__x86_64__)
        __asm__ volatile("prefetchw %0" : : "m"(*(char *)record)); /* compilers turn the builtin into a fetch to read */
    #else
        __builtin_prefetch(record, 1);
    #endif
    }
    static inline void kina_log_put(kina_log *log, uint64_t thread, uint64_t action, uint64_t pointer, uint64_t nbytes,
                                    uint64_t stream, char *stack) {
        kina_log_record *record;
        uint64_t ticket, ticks, mask = log->capacity - 1;
        if (!__atomic_load_n(&log->started, __ATOMIC_ACQUIRE)) {
            kina_log_start(log);
            if (!kina_log_is_open(log)) {
                free(stack);
                return;
            }
        }
        ticks = kina_log_ticks(log->with_counter);
        ticket = __atomic_fetch_add(&log->head, 1, __ATOMIC_ACQ_REL);
        kina_log_fetch(&log->ring[(ticket + KINA_LOG_AHEAD) & mask]);
        if (!kina_log_has_room(log, ticket) && !kina_log_wait_for_room(log, ticket)) {
            free(stack);
            return;
        }
        record = &log->ring[ticket & mask];
        record->ticks = ticks;
        record->pointer = pointer;
        record->nbytes = nbytes;
        record->stream = stream;
        record->thread = thread;
        record->action = action;
        record->stack = stack;
        __atomic_store_n(&record->sequence, ticket + 1, __ATOMIC_RELEASE);
        if (__atomic_load_n(&log->asleep, __ATOMIC_RELAXED) || ((ticket + 1) & (mask >> 1)) == 0) kina_log_wake(log);
    }
    static _Thread_local uint64_t kina_log_thread KINA_INITIAL_EXEC = 0; /* thread_token(), without the call */

    /* The owner -------------------------------------------------------------------------------------------- */

    /* Wait until everything recorded so far is in the file. */
    static void kina_log_flush(kina_log *log) {
        uint64_t target = __atomic_load_n(&log->head, __ATOMIC_ACQUIRE);
        if (!__atomic_load_n(&log->started, __ATOMIC_ACQUIRE)) return;
        pthread_mutex_lock(&log->mutex);
        while (log->written < target && !log->finished) {
            kina_log_want(log);
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
        kina_log_want(log);
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
        kina_log_want(log);
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
    uint64_t kina_log_thread
    kina_log *kina_log_new(int descriptor, uint64_t capacity, bint with_stacks, bint with_counter,
                           int forks) noexcept nogil
    bint kina_log_has_counter() noexcept nogil
    bint kina_log_is_open(kina_log *log) noexcept nogil
    void kina_log_put(kina_log *log, uint64_t thread, uint64_t action, uint64_t pointer, uint64_t nbytes,
                      uint64_t stream, char *stack) noexcept nogil
    void kina_log_flush(kina_log *log) noexcept nogil
    void kina_log_close(kina_log *log) noexcept nogil
    void kina_log_abandon(kina_log *log, int forks) noexcept nogil
    void kina_logs_end(int forks) noexcept nogil
    int kina_logs_watch_forks() noexcept nogil
    kina_fork_mutex kina_logs_mutex


fork_mutex_init(&kina_logs_mutex)
if kina_logs_watch_forks() != 0:
    raise ImportError("kina: forks cannot be watched (pthread_atfork failed)")


def _clock_source() -> str:
    """What the kernel's clock reads, or nothing where it does not tell."""
    try:
        with open("/sys/devices/system/clocksource/clocksource0/current_clocksource") as source:
            return source.read().strip()
    except OSError:
        return ""


cdef bint counter_is_steady() except -1:
    """Whether the processor says that of its counter, and the kernel reads no slower clock for want of trust in it."""
    return kina_log_has_counter() and _clock_source() not in ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


ctypedef struct logging_resource:
    kina_adaptor adaptor
    kina_log *log


cdef void record(kina_log *log, uint64_t action, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    global kina_log_thread
    if kina_log_is_open(log):
        if kina_log_thread == 0:
            kina_log_thread = thread_token()
        kina_log_put(log, kina_log_thread, action, <uintptr_t> data, nbytes,
                     0 if stream == NULL else <uintptr_t> stream.native, call_stack() if log.with_stacks else NULL)


cdef int logging_serve(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                       kina_asking how) noexcept nogil:
    cdef int status = kina_ask(self.upstream, out, nbytes, stream, how)
    if status == 0:
        record((<logging_resource *> self).log, KINA_LOG_ALLOCATE, out[0], nbytes, stream)
    elif how != KINA_ASK_QUIETLY:  # else the asker has other ways, and asks again
        record((<logging_resource *> self).log, KINA_LOG_FAILURE, NULL, nbytes, stream)
    return status


cdef int logging_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    return logging_serve(self, out, nbytes, stream, KINA_ASK_FOR_ALL)


cdef int logging_try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                              bint may_wait) noexcept nogil:
    return logging_serve(self, out, nbytes, stream, KINA_ASK_PATIENTLY if may_wait else KINA_ASK_QUIETLY)


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
functions.try_allocate = logging_try_allocate
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
    local, to the microsecond. A record costs a reading of the processor's counter (of the clock, where that counter is
    not steady) and a place in a ring, which one native thread empties every 20 ms, or when it is half full. The thread
    begins with the first record and ends with :meth:`close`, the resource or the process. When the ring is full,
    whoever allocates waits for room (:attr:`waits`): nothing is lost, and the order of each thread is kept. What a
    forked child allocates is not logged.
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
            made.log = kina_log_new(descriptor, capacity, stacks, counter_is_steady(), fork_count())
            if made.log == NULL:
                raise MemoryError
        except BaseException:
            free(made)
            os.close(descriptor)
            raise
        adaptor_init(&made.adaptor, &functions, below.c, logging_destroy)
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
        return not kina_log_is_open(self.log())

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
