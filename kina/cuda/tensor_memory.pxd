from libc.stdint cimport int64_t

from kina._core.dtype cimport DType
from kina._core.resource cimport MemoryResource
from kina._core.tensor cimport Tensor
from kina.cuda.handles cimport kina_runtime

# A C-ordered tensor with undefined contents: from `memory` as a call gave it, else `preset` (the session's, or None),
# else what is current, else the Runtime's own pool. By the thread that has the Runtime open; needs no context. Waits
# only where the resource does, or has no memory without what is retired.
cdef Tensor allocate_tensor(kina_runtime *runtime, MemoryResource preset, DType dtype, int ndim, const int64_t *extents,
                            object memory, const char *operation)
