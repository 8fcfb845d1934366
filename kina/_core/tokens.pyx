"""Numbers that are never reused: of threads, Runtimes, domains and streams."""

from libc.stdint cimport uint64_t

__all__ = []


cdef extern from *:
    """
    #include "kina_memory.h"
    static uint64_t kina_last_number = 0;
    static _Thread_local uint64_t kina_thread_number KINA_INITIAL_EXEC = 0;
    static uint64_t kina_next_number(void) {
        return __atomic_add_fetch(&kina_last_number, 1, __ATOMIC_RELAXED);
    }
    """
    uint64_t kina_thread_number
    uint64_t kina_next_number() noexcept nogil


cdef uint64_t issue_number() noexcept nogil:
    return kina_next_number()


cdef uint64_t thread_token() noexcept nogil:
    global kina_thread_number
    if kina_thread_number == 0:
        kina_thread_number = kina_next_number()
    return kina_thread_number
