"""The reaper: one native thread that comes by where nobody else would.

It waits without a timeout while there is nothing to look after, and otherwise looks every 20 ms. It asks events rather
than to wait for them, so that the exit of the process never waits for a device, and events of completions and transfers
need not trade their latency for the sleep of a thread (docs/adr/0018).
"""

import atexit

from kina._core.storage cimport drain_python_releases, interpreter_is_finalizing, python_releases_wait
from kina.cuda.driver cimport process_is_forked

__all__ = []


cdef extern from *:
    """
    #include <errno.h>
    #include <pthread.h>
    #include <signal.h>
    #include <time.h>

    enum {
        KINA_REAP_NS = 20000000,
        KINA_REAPER_END_S = 2, /* that the exit of the process waits for it at most */
        KINA_REAP_LINGER = 5 /* calls that found nothing left before it sleeps: who comes again soon need not wake it */
    };

    static pthread_mutex_t kina_reaper_mutex = PTHREAD_MUTEX_INITIALIZER; /* nothing is called under it */
    static pthread_cond_t kina_reaper_called;
    static pthread_t kina_reaper;
    static int kina_reaper_runs, kina_reaper_sleeps, kina_reaper_wanted, kina_reaper_over;

    static int kina_reaper_setup(void) {
        pthread_condattr_t attributes;
        if (pthread_condattr_init(&attributes) != 0) return -1;
        if (pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) != 0) return -1;
        return pthread_cond_init(&kina_reaper_called, &attributes);
    }

    static void kina_reaper_start(void *(*body)(void *)) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the other threads' */
        kina_reaper_runs = pthread_create(&kina_reaper, NULL, body, NULL) == 0;
        if (kina_reaper_runs) pthread_setname_np(kina_reaper, "kina-reaper");
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }

    static void kina_reaper_wake(void *(*body)(void *)) {
        pthread_mutex_lock(&kina_reaper_mutex);
        kina_reaper_wanted = 1;
        if (kina_reaper_sleeps) pthread_cond_signal(&kina_reaper_called);
        else if (!kina_reaper_runs && !kina_reaper_over) kina_reaper_start(body);
        pthread_mutex_unlock(&kina_reaper_mutex);
    }

    /* Sleeps until it is time for another call; 0: it is over. `idle`: so many calls found nothing left. */
    static int kina_reaper_next(int idle) {
        struct timespec until;
        int goes_on;
        pthread_mutex_lock(&kina_reaper_mutex);
        kina_reaper_sleeps = idle >= KINA_REAP_LINGER;
        while (kina_reaper_sleeps && !kina_reaper_wanted && !kina_reaper_over)
            pthread_cond_wait(&kina_reaper_called, &kina_reaper_mutex);
        kina_reaper_sleeps = 0;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += KINA_REAP_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec += 1;
        }
        while (!kina_reaper_over &&
               pthread_cond_timedwait(&kina_reaper_called, &kina_reaper_mutex, &until) != ETIMEDOUT) {}
        kina_reaper_wanted = 0;
        goes_on = !kina_reaper_over;
        pthread_mutex_unlock(&kina_reaper_mutex);
        return goes_on;
    }

    /* For good. */
    static void kina_reaper_end(void) {
        struct timespec until;
        int runs;
        pthread_mutex_lock(&kina_reaper_mutex);
        runs = kina_reaper_runs;
        __atomic_store_n(&kina_reaper_over, 1, __ATOMIC_RELAXED);
        kina_reaper_runs = 0;
        pthread_cond_signal(&kina_reaper_called);
        pthread_mutex_unlock(&kina_reaper_mutex);
        if (!runs) return;
        /* Somebody else's deleter may wait for the device, or for a lock of the thread that ends here. */
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += KINA_REAPER_END_S;
        if (pthread_timedjoin_np(kina_reaper, NULL, &until) != 0) pthread_detach(kina_reaper);
    }
    static int kina_reaper_is_over(void) { return __atomic_load_n(&kina_reaper_over, __ATOMIC_RELAXED); }
    """
    int kina_reaper_setup() noexcept nogil
    void kina_reaper_wake(void *(*body)(void *) noexcept nogil) noexcept nogil
    bint kina_reaper_next(int idle) noexcept nogil
    void kina_reaper_end() noexcept nogil
    bint kina_reaper_is_over() noexcept nogil


cdef int (*reap)() noexcept nogil


cdef void set_reap(int (*done)() noexcept nogil) noexcept:
    global reap
    reap = done


cdef void *body(void *unused) noexcept nogil:
    cdef int idle = 0
    while kina_reaper_next(idle):
        idle = 0 if reap() != 0 else idle + 1
        # The interpreter's main thread may sleep, and its pending calls with it. That the interpreter is there to give
        # its lock is sure: it does not go before this thread is joined.
        if python_releases_wait() and not kina_reaper_is_over() and not interpreter_is_finalizing():
            with gil:
                drain_python_releases()
    return NULL


cdef void reaper_wake() noexcept nogil:
    kina_reaper_wake(body)


def _end() -> None:
    """Registered with atexit, and called before what the interpreter needs is gone."""
    if process_is_forked():
        return  # there is no such thread, and whoever held the lock at the fork is not here to give it back
    with nogil:
        kina_reaper_end()


if kina_reaper_setup() != 0:
    raise ImportError("kina.cuda: no condition variable can be made (pthread_cond_init failed)")
atexit.register(_end)
