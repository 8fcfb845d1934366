"""Mutexes that survive a fork: no callback runs and nothing is waited for under them, so a fork may wait for all."""

__all__ = []


cdef extern from *:
    """
    static pthread_mutex_t kina_fork_registry = PTHREAD_MUTEX_INITIALIZER; /* guards the list; taken first */
    static kina_fork_mutex *kina_fork_mutexes = NULL;
    static int kina_forks = 0;

    static void kina_fork_mutex_add(kina_fork_mutex *added) {
        pthread_mutex_init(&added->mutex, NULL);
        pthread_mutex_lock(&kina_fork_registry);
        added->previous = NULL;
        added->next = kina_fork_mutexes;
        if (kina_fork_mutexes) kina_fork_mutexes->previous = added;
        kina_fork_mutexes = added;
        pthread_mutex_unlock(&kina_fork_registry);
    }
    static void kina_fork_mutex_remove(kina_fork_mutex *removed) {
        pthread_mutex_lock(&kina_fork_registry);
        if (removed->previous) removed->previous->next = removed->next;
        else kina_fork_mutexes = removed->next;
        if (removed->next) removed->next->previous = removed->previous;
        pthread_mutex_unlock(&kina_fork_registry);
        pthread_mutex_destroy(&removed->mutex);
    }
    static void kina_fork_hold_all(void) {
        kina_fork_mutex *each;
        pthread_mutex_lock(&kina_fork_registry);
        for (each = kina_fork_mutexes; each; each = each->next) pthread_mutex_lock(&each->mutex);
    }
    static void kina_fork_let_all_go(void) {
        kina_fork_mutex *each;
        for (each = kina_fork_mutexes; each; each = each->next) pthread_mutex_unlock(&each->mutex);
        pthread_mutex_unlock(&kina_fork_registry);
    }
    static void kina_fork_in_child(void) {
        kina_forks += 1; /* the child has one thread */
        kina_fork_let_all_go();
    }
    static int kina_fork_watch(void) {
        return pthread_atfork(kina_fork_hold_all, kina_fork_let_all_go, kina_fork_in_child);
    }
    """
    int kina_forks
    void kina_fork_mutex_add(kina_fork_mutex *added) noexcept nogil
    void kina_fork_mutex_remove(kina_fork_mutex *removed) noexcept nogil
    int kina_fork_watch() noexcept nogil


if kina_fork_watch() != 0:
    raise ImportError("kina: forks cannot be watched (pthread_atfork failed)")


cdef void fork_mutex_init(kina_fork_mutex *mutex) noexcept nogil:
    kina_fork_mutex_add(mutex)


cdef void fork_mutex_destroy(kina_fork_mutex *mutex) noexcept nogil:
    kina_fork_mutex_remove(mutex)


cdef int fork_count() noexcept nogil:
    return kina_forks
