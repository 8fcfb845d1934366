# cython: annotation_typing=False
"""Host tensors and the arrays of others: NumPy views for kina's own use, adoption of arrays."""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from kina._core.dtype cimport DType, as_dtype
from kina._core.host_array cimport byte_strides
from kina._core.host_memory cimport host_device, host_domain, host_resource, host_runtime, storage_bytes
from kina._core.layout cimport layout_describe, layout_nbytes, layout_size
from kina._core.resource cimport MemoryResource, allocate_from
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_MAX_NDIM,
    KINA_STORAGE_READ_ONLY,
    kina_storage,
    kina_tensor,
    release_python_later,
    storage_adopt,
    storage_allocate,
)
from kina._core.tensor cimport Tensor, tensor_from_storage

from kina.errors import InvalidLayoutError, InvalidShapeError

__all__ = []

cdef Tensor host_empty(DType dtype, int ndim, const int64_t *shape, MemoryResource memory, const char *operation):
    cdef kina_storage *storage
    cdef int64_t size = 0
    cdef size_t nbytes = 0
    check(layout_size(operation, ndim, shape, &size))
    check(layout_nbytes(operation, size, dtype.itemsize, &nbytes))
    if memory is None:
        check(storage_allocate(&storage, host_resource(), NULL, nbytes, host_device(), host_runtime(), host_domain()))
    else:
        storage = allocate_from(memory, nbytes)
    return tensor_from_storage(storage, dtype, ndim, shape, NULL, 0, 0, operation)


cdef object numpy_view(Tensor tensor, bint writable):
    import numpy

    if tensor.c.size == 0:
        array = numpy.empty(tensor.shape, tensor._dtype.numpy)
        array.flags.writeable = writable
        return array
    octets = storage_bytes(tensor.c.storage, writable)
    return numpy.ndarray(tensor.shape, tensor._dtype.numpy, octets, tensor.c.byte_offset, byte_strides(tensor))


# Adoption -------------------------------------------------------------------------------------------------


cdef Tensor adopt_memory(object owner, uintptr_t first, DType dtype, tuple shape, object strides,
                         bint readonly):
    cdef int64_t extents[KINA_MAX_NDIM]
    cdef int64_t steps[KINA_MAX_NDIM]
    cdef kina_tensor layout
    cdef kina_storage *storage
    cdef int64_t step
    cdef int axis
    cdef int ndim = <int> len(shape)
    if ndim > KINA_MAX_NDIM:
        raise InvalidShapeError(f"shape: {ndim} axes are more than the {KINA_MAX_NDIM} supported",
                                operation="adopt")
    for axis in range(ndim):
        extents[axis] = shape[axis]
        step = strides[axis]
        if step % dtype.itemsize != 0 and extents[axis] > 1:
            raise InvalidLayoutError(f"strides: axis {axis} steps {step} bytes, which is no multiple of the "
                                     f"{dtype.itemsize} bytes of {dtype.name}", operation="adopt")
        steps[axis] = step // dtype.itemsize
    memset(&layout, 0, sizeof(layout))
    layout.ndim = ndim
    layout.dtype.bits = dtype.bits
    layout.shape = extents
    layout.strides = steps
    check(layout_describe(b"adopt", &layout))
    Py_INCREF(owner)
    try:
        check(storage_adopt(&storage, <void *> (first + layout.span_low),
                            <size_t> (layout.span_high - layout.span_low),
                            host_device(), NULL, host_runtime(), host_domain(),
                            KINA_STORAGE_READ_ONLY if readonly else 0,
                            release_python_later, <void *> owner))
    except BaseException:
        Py_DECREF(owner)
        raise
    return tensor_from_storage(storage, dtype, ndim, extents, steps, <uint64_t> -layout.span_low, 0, b"adopt")


cdef Tensor adopt_array(object array):
    # Not through __dlpack__: NumPy exports neither bfloat16 nor fp8, and before 2.1 nothing read-only.
    cdef DType dtype = as_dtype(array.dtype)
    address, readonly = array.__array_interface__["data"]
    return adopt_memory(array, address, dtype, array.shape, array.strides, readonly)
