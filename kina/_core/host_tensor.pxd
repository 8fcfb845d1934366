from libc.stdint cimport int64_t, uint64_t

from kina._core.dtype cimport DType
from kina._core.storage cimport kina_dl_device
from kina._core.tensor cimport Tensor

# The host is one Runtime with one allocation domain for the process.
cdef uint64_t host_runtime() noexcept nogil
cdef uint64_t host_domain() noexcept nogil
cdef kina_dl_device host_device() noexcept nogil

# A new compact host tensor, uninitialised.
cdef Tensor host_empty(DType dtype, int ndim, const int64_t *shape, const char *operation)
# A NumPy array over the memory of a host tensor; it keeps the storage alive. For the rooms of kina only:
# users get copies.
cdef object numpy_view(Tensor tensor, bint writable)
# A host tensor over the memory of a NumPy array, or of anything with the buffer protocol.
cdef Tensor adopt_array(object array)
cdef Tensor adopt_buffer(object exporter)
