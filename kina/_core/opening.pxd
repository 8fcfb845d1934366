from kina._core.session cimport Session

# Who opens CUDA sessions: set by the room that can, which lives above this one. `runtime` is None for the
# default Runtime of `ordinal`, or of `stream` where one is given; `memory` is as the user gave it.
ctypedef Session (*session_opener)(int ordinal, object stream, object runtime, object memory)
cdef void set_cuda_opener(session_opener opener, object runtime_type) noexcept

# Who finds the calling thread's innermost open session on a device, or None: the same room sets it.
ctypedef Session (*session_finder)(int ordinal)
cdef void set_cuda_finder(session_finder finder) noexcept
cdef Session innermost_cuda(int ordinal)

# The rooms of CUDA are loaded, or UnavailableError.
cdef int load_cuda() except -1
