from kina._core.session cimport Session

# Who opens CUDA sessions: set by the room that can, which lives above this one. `runtime` is None for the
# default Runtime of `ordinal`, or of `stream` where one is given.
ctypedef Session (*session_opener)(int ordinal, object stream, object runtime)
cdef void set_cuda_opener(session_opener opener, object runtime_type) noexcept
