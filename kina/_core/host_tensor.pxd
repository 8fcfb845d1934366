from libc.stdint cimport int64_t

from kina._core.dtype cimport DType
from kina._core.resource cimport MemoryResource
from kina._core.tensor cimport Tensor

# A new compact host tensor, uninitialised, over memory of `memory` (None: the host's own resource).
cdef Tensor host_empty(DType dtype, int ndim, const int64_t *shape, MemoryResource memory, const char *operation)
# A NumPy array over the memory of a host tensor; it keeps the storage alive. For the rooms of kina only:
# users get copies.
cdef object numpy_view(Tensor tensor, bint writable)
# A host tensor over the memory of a NumPy array, or of anything with the buffer protocol.
cdef Tensor adopt_array(object array)
cdef Tensor adopt_buffer(object exporter)
