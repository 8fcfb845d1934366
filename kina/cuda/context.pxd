from kina.cuda.cudatypes cimport CUDA_SUCCESS, CUcontext, CUresult
from kina.cuda.driver cimport cu
from kina.cuda.handles cimport kina_device, kina_runtime, kina_session_node, kina_thread

# How many devices the driver shows; UnavailableError. Needs ensure_driver() first.
cdef int device_count() except -1
# The device of an ordinal with its primary context retained; UnavailableError. Needs the GIL, may take 150 ms.
cdef kina_device *open_device(int ordinal) except NULL
# 0, or the record says why no driver call may be made for this device: poisoned, reset by others, forked.
cdef int device_check(kina_device *device, const char *operation) noexcept nogil
# Walk the live Runtimes of a device, with no lock held in between: NULL begins, and each is retained until it is given
# back for the one after it.
# The devices that were opened, one after the other: NULL gives the first, the last gives NULL.
cdef kina_device *device_after(kina_device *previous) noexcept nogil
cdef kina_runtime *runtime_after(kina_device *device, kina_runtime *previous) noexcept nogil
# Destructors ask this: may the driver be called at all for objects of this device?
cdef bint device_is_gone(kina_device *device) noexcept nogil
# Translate a driver's refusal: sticky faults poison the device with the first cause.
cdef int device_failed(kina_device *device, CUresult code, int detail, const char *operation,
                       const char *message) noexcept nogil

# Push the device's context: 1, or -1 with a recorded error.
cdef int context_push(kina_device *device, const char *operation) noexcept nogil

# The context of context_push could not be taken off the stack: it is logged, and changes nothing else.
cdef void context_stays(CUresult code) noexcept nogil


cdef inline int context_begin(kina_device *device, const char *operation) noexcept nogil:
    """Make the device's context current around one call from anywhere: 0 if it was (9 ns), 1 if it was pushed, -1 on
    failure (recorded). The result goes to context_end."""
    cdef CUcontext current = NULL
    if cu.cuCtxGetCurrent(&current) == CUDA_SUCCESS and current == device.context:
        return 0
    return context_push(device, operation)


cdef inline void context_end(int pushed) noexcept nogil:
    cdef CUcontext popped = NULL
    cdef CUresult code
    if pushed > 0:
        code = cu.cuCtxPopCurrent(&popped)
        if code != CUDA_SUCCESS:
            context_stays(code)


# The calling thread's record; NULL only without memory.
cdef kina_thread *this_thread() noexcept nogil

# Borrowed: the calling thread's innermost open session on a device (-1: on any), which holds its Runtime; or NULL.
cdef kina_session_node *innermost_node(int ordinal) noexcept nogil

# Enter a session: the list of the thread, the context stack, the Runtime's open state. NULL with a recorded error.
# The face owns the node until it leaves or abandons it, and keeps the Runtime alive meanwhile.
cdef kina_session_node *session_enter(kina_runtime *runtime) noexcept nogil
# Leave it, in its own thread (`thread`), and free the node. Returns 0, or 1 when the caller's context could not be
# restored (the record says why).
cdef int session_leave(kina_thread *thread, kina_session_node *node) noexcept nogil
# The face is gone, or gives up in another thread, without having left: any thread, no driver call.
cdef void session_abandon(kina_session_node *node) noexcept nogil
