# cython: annotation_typing=False
"""Host tensors and the arrays of others: NumPy views for kina's own use, adoption of arrays and buffers."""

from cpython.memoryview cimport PyMemoryView_GET_BUFFER
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

from kina.errors import DLPackError, DTypeError, InvalidLayoutError, InvalidShapeError

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
        return numpy.empty(tensor.shape, tensor._dtype.numpy)
    octets = storage_bytes(tensor.c.storage, writable)
    return numpy.ndarray(tensor.shape, tensor._dtype.numpy, octets, tensor.c.byte_offset, byte_strides(tensor))


# Adoption -------------------------------------------------------------------------------------------------


cdef Tensor adopt_memory(object owner, uintptr_t first, DType dtype, tuple shape, object strides,
                         bint readonly):
    """`first` is the address of element (0, ..., 0), `strides` in bytes."""
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


cdef DType dtype_of_format(str form, Py_ssize_t itemsize):
    """A struct format of one native number."""
    if form[:1] in (">", "!"):
        raise DTypeError(f"buffer format {form!r} is byte-swapped; kina stores native byte order",
                         operation="adopt")
    letter = form.lstrip("@=<")
    if letter in ("b", "h", "i", "l", "q", "n"):
        return as_dtype(f"int{8 * itemsize}")
    if letter in ("B", "H", "I", "L", "Q", "N"):
        return as_dtype(f"uint{8 * itemsize}")
    if letter in ("e", "f", "d"):
        return as_dtype(f"float{8 * itemsize}")
    if letter in ("Zf", "Zd"):
        return as_dtype(f"complex{8 * itemsize}")
    if letter == "?" and itemsize == 1:
        return as_dtype("bool")
    raise DTypeError(f"buffer format {form!r} is not a number of one of kina's dtypes", operation="adopt")


cdef Tensor adopt_buffer(object exporter):
    cdef Py_buffer *buffer
    try:
        view = memoryview(exporter)
    except (TypeError, BufferError, ValueError) as error:
        raise DLPackError(
            f"{type(exporter).__name__} offers neither DLPack nor the buffer protocol: {error}",
            operation="adopt"
        ) from error
    buffer = PyMemoryView_GET_BUFFER(view)
    if any([offset >= 0 for offset in view.suboffsets]):
        raise InvalidLayoutError("strides: a buffer of pointers (suboffsets) has no strided layout",
                                 operation="adopt")
    # The memoryview is the owner: dropping it releases the buffer.
    return adopt_memory(view, <uintptr_t> buffer.buf, dtype_of_format(view.format, view.itemsize), view.shape,
                        view.strides, view.readonly)
