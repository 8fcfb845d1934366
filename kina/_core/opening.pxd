from kina._core.session cimport Session

# Who opens CUDA sessions: set by the room that can, which lives above this one. `runtime` is None for the
# default Runtime of `ordinal`, or of `stream` where one is given; `memory` is as the user gave it.
ctypedef Session (*session_opener)(int ordinal, object stream, object runtime, object memory)
cdef void set_cuda_opener(session_opener opener, object runtime_type) noexcept
