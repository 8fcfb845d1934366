cdef extern from *:
    """
    #ifndef KINA_FORK_MUTEX
    #define KINA_FORK_MUTEX
    #include <pthread.h>
    /* A mutex that a forked child finds free, and what it guards whole: every one is held during a fork. */
    typedef struct kina_fork_mutex {
        pthread_mutex_t mutex;
        struct kina_fork_mutex *previous, *next;
    } kina_fork_mutex;
    #endif
    """
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct kina_fork_mutex:
        pthread_mutex_t mutex
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept nogil

cdef void fork_mutex_init(kina_fork_mutex *mutex) noexcept nogil
cdef void fork_mutex_destroy(kina_fork_mutex *mutex) noexcept nogil
# How often this process is a fork of another that had loaded kina: what threads it had is gone with each.
cdef int fork_count() noexcept nogil


cdef inline void fork_mutex_lock(kina_fork_mutex *mutex) noexcept nogil:
    pthread_mutex_lock(&mutex.mutex)


cdef inline void fork_mutex_unlock(kina_fork_mutex *mutex) noexcept nogil:
    pthread_mutex_unlock(&mutex.mutex)
