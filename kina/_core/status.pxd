from libc.stdint cimport int64_t


cdef extern from "kina_status.h":
    enum: KINA_SUCCESS
    enum: KINA_INVALID_SHAPE
    enum: KINA_INVALID_LAYOUT
    enum: KINA_NON_CONTIGUOUS
    enum: KINA_INVALID_CONFIG
    enum: KINA_FOREIGN_RUNTIME
    enum: KINA_FOREIGN_DEVICE
    enum: KINA_FOREIGN_DOMAIN
    enum: KINA_SESSION_CLOSED
    enum: KINA_WRONG_THREAD
    enum: KINA_RUNTIME_BUSY
    enum: KINA_DLPACK
    enum: KINA_UNAVAILABLE
    enum: KINA_OUT_OF_MEMORY
    enum: KINA_COMPILE
    enum: KINA_MODULE_LOAD
    enum: KINA_SYMBOL_LOOKUP
    enum: KINA_LAUNCH
    enum: KINA_SYNCHRONIZE
    enum: KINA_PEER_ACCESS
    enum: KINA_RUNTIME_POISONED
    enum: KINA_DRIVER
    enum: KINA_UNSUPPORTED
    enum: KINA_INTERNAL
    enum: KINA_DTYPE
    enum: KINA_ARGUMENT

    ctypedef struct kina_memory_figures:
        int64_t requested
        int64_t live
        int64_t cached
        int64_t pending
        int64_t largest_free
        int64_t limit

    ctypedef struct kina_error:
        int detail
        int driver_code
        char driver_name[64]
        char driver_string[160]
        char operation[64]
        char message[1024]
        bint has_figures
        bint has_exception
        kina_memory_figures figures

# The calling thread's record; never NULL.
cdef kina_error *last_error() noexcept nogil

# Write the record and return `detail`, so that a nogil function ends in `return fail(...)`.
cdef int fail(int detail, const char *operation, const char *message) noexcept nogil
cdef int fail_driver(int detail, int code, const char *name, const char *string,
                     const char *operation, const char *message) noexcept nogil
# KINA_OUT_OF_MEMORY with what is known about it; the exception carries the figures.
cdef int fail_out_of_memory(const char *operation, const char *message,
                            const kina_memory_figures *figures) noexcept nogil
# A Python exception on its way through nogil code: raise_last() raises this very object. Needs the GIL.
cdef int fail_with(object exception) noexcept

# Lay the calling thread's error aside while Python runs in between, and put it back. Needs the GIL.
cdef object error_take(kina_error *record)
cdef void error_put(const kina_error *record, object exception) noexcept
# What failed came to nothing: nobody is to meet the calling thread's error again.
cdef void error_forget() noexcept nogil

# Raise the exception of the calling thread's record. Needs the GIL.
cdef int raise_last() except -1


cdef inline int check(int status) except -1 nogil:
    """Success costs a compare; only failure takes the GIL."""
    if status != 0:
        with gil:
            raise_last()
    return 0
