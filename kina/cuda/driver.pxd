from kina._core.storage cimport interpreter_is_finalizing
from kina.cuda.cudatypes cimport CU_STREAM_CAPTURE_MODE_RELAXED, CUresult, CUstreamCaptureMode
from kina.cuda.driver_table cimport kina_driver_table

# The table. Every entry is valid once ensure_driver() has succeeded, except optional ones (NULL when missing).
cdef kina_driver_table *cu

# Load the driver library, fill the table, cuInit; UnavailableError says what is missing. Needs the GIL.
cdef int ensure_driver() except -1

# Where the flag of a fork is: set in a forked child of a process that had initialised CUDA.
cdef const int *forked_flag

# Record a refusal of the driver for this thread and return `detail`.
cdef int driver_failed(CUresult code, int detail, const char *operation, const char *message) noexcept nogil

# The failure as Python shows it.
cdef object describe(CUresult code)


cdef inline bint process_is_forked() noexcept nogil:
    """In such a child no driver call may be made."""
    return forked_flag[0] != 0


cdef inline bint driver_is_silent() noexcept nogil:
    """Destructors ask this first: in a forked child and after exit began they leak, silently."""
    return process_is_forked() or interpreter_is_finalizing()


cdef inline CUstreamCaptureMode relaxed_begin() noexcept nogil:
    """Slow paths run in RELAXED mode, or they would fail, and kill, a capture that another thread has open."""
    cdef CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED
    cu.cuThreadExchangeStreamCaptureMode(&mode)
    return mode


cdef inline void relaxed_end(CUstreamCaptureMode mode) noexcept nogil:
    cu.cuThreadExchangeStreamCaptureMode(&mode)
