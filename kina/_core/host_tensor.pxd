from libc.stdint cimport int64_t, uintptr_t

from kina._core.dtype cimport DType
from kina._core.resource cimport MemoryResource
from kina._core.tensor cimport Tensor

# A new compact host tensor, uninitialised, over memory of `memory` (None: the host's own resource).
cdef Tensor host_empty(DType dtype, int ndim, const int64_t *shape, MemoryResource memory, const char *operation)
# A NumPy array over the memory of a host tensor; it keeps the storage alive. Whether it may be written to is for the
# caller to know.
cdef object numpy_view(Tensor tensor, bint writable)
# A host tensor over the memory of a NumPy array.
cdef Tensor adopt_array(object array)
# The same of any memory: `first` is the address of element (0, ..., 0), `strides` in bytes. Keeps `owner`.
cdef Tensor adopt_memory(object owner, uintptr_t first, DType dtype, tuple shape, object strides, bint readonly)
