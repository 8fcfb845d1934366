from libc.stdint cimport int64_t, uint64_t

from kina._core.dtype cimport DType
from kina._core.shape cimport parse_shape
from kina._core.storage cimport kina_storage, kina_tensor


cdef class Tensor:
    cdef kina_tensor c              # c.storage is an owned reference; NULL only while under construction
    cdef DType _dtype
    cdef int64_t _inline_dims[12]   # shape and strides of up to 6 axes; more go to the heap
    cdef int64_t *_heap_dims

# The C struct of a Tensor, which lives as long as the object: borrowed. TypeError for anything else.
cdef const kina_tensor *tensor_of(object tensor) except NULL

# A tensor over `storage`. Steals the caller's reference to `storage`, also on failure.
# strides == NULL means C order. flags may hold KINA_TENSOR_READ_ONLY.
cdef Tensor tensor_from_storage(kina_storage *storage, DType dtype, int ndim, const int64_t *shape,
                                const int64_t *strides, uint64_t byte_offset, uint64_t flags,
                                const char *operation)

# The same elements of `base` under another layout; `offset` in elements from its first one. Keeps READ_ONLY.
cdef Tensor tensor_view(Tensor base, int ndim, const int64_t *shape, const int64_t *strides, int64_t offset,
                        const char *operation)

# How a tensor leaves through DLPack. The room above (dlpack.pyx) sets it when it loads, so that no import
# goes upwards.
ctypedef object (*dlpack_exporter)(Tensor tensor, object stream, object max_version, object dl_device,
                                   object copy)
cdef void set_dlpack_exporter(dlpack_exporter exporter) noexcept

# Whether host code can read its elements: host, pinned and managed memory.
cdef bint is_host_readable(Tensor tensor) noexcept

# How a tensor leaves through the array interfaces, as a NumPy array, and as a buffer: set by the rooms above, likewise.
ctypedef object (*array_exporter)(Tensor tensor)
ctypedef object (*numpy_exporter)(Tensor tensor, object dtype, object copy)
cdef void set_array_exporters(array_exporter cuda, array_exporter host, numpy_exporter numpy) noexcept
ctypedef int (*buffer_exporter)(Tensor tensor, Py_buffer *buffer, int flags) except -1
ctypedef void (*buffer_releaser)(Py_buffer *buffer) noexcept
cdef void set_buffer_exporter(buffer_exporter fill, buffer_releaser release) noexcept
