# cython: annotation_typing=False
"""The buffer protocol of Python, both ways: tensors as buffers, buffers as tensors. Host memory only.

Source: PEP 3118; Python/C API, "Buffer Protocol".
"""

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_F_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
)
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc

from kina._core.dlpack cimport open_to_host
from kina._core.dtype cimport (
    DTYPE_BOOL,
    DTYPE_COMPLEX64,
    DTYPE_COMPLEX128,
    DTYPE_FLOAT16,
    DTYPE_FLOAT32,
    DTYPE_FLOAT64,
    DTYPE_INT8,
    DTYPE_INT16,
    DTYPE_INT32,
    DTYPE_INT64,
    DTYPE_UINT8,
    DTYPE_UINT16,
    DTYPE_UINT32,
    DTYPE_UINT64,
    DType,
    as_dtype,
)
from kina._core.host_tensor cimport adopt_memory
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_TENSOR_C_CONTIGUOUS,
    KINA_TENSOR_F_CONTIGUOUS,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor, is_host_readable, set_buffer_exporter

from kina.errors import DLPackError, DTypeError, InvalidLayoutError

__all__ = []


# Out ------------------------------------------------------------------------------------------------------


cdef const char *format_of(DType dtype) noexcept:
    """As the struct module has it, and NumPy for complex; NULL for what it has no letter for."""
    if dtype.id == DTYPE_FLOAT32:
        return b"f"
    if dtype.id == DTYPE_FLOAT64:
        return b"d"
    if dtype.id == DTYPE_FLOAT16:
        return b"e"
    if dtype.id == DTYPE_INT8:
        return b"b"
    if dtype.id == DTYPE_INT16:
        return b"h"
    if dtype.id == DTYPE_INT32:
        return b"i"
    if dtype.id == DTYPE_INT64:
        return b"l" if sizeof(long) == 8 else b"q"
    if dtype.id == DTYPE_UINT8:
        return b"B"
    if dtype.id == DTYPE_UINT16:
        return b"H"
    if dtype.id == DTYPE_UINT32:
        return b"I"
    if dtype.id == DTYPE_UINT64:
        return b"L" if sizeof(long) == 8 else b"Q"
    if dtype.id == DTYPE_BOOL:
        return b"?"
    if dtype.id == DTYPE_COMPLEX64:
        return b"Zf"
    if dtype.id == DTYPE_COMPLEX128:
        return b"Zd"
    return NULL


cdef bint asks_for(int flags, int wish) noexcept:
    return flags & wish == wish


cdef int check_request(Tensor tensor, int flags) except -1:
    cdef bint c_order = tensor.c.flags & KINA_TENSOR_C_CONTIGUOUS
    cdef bint f_order = tensor.c.flags & KINA_TENSOR_F_CONTIGUOUS
    if flags & PyBUF_WRITABLE and tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP):
        raise BufferError("a writable buffer was asked for, and the tensor is read-only"
                          + ("" if tensor.c.flags & KINA_TENSOR_READ_ONLY else " (a stride of 0 repeats elements)"))
    if (asks_for(flags, PyBUF_C_CONTIGUOUS) or not asks_for(flags, PyBUF_STRIDES)) and not c_order \
            or asks_for(flags, PyBUF_F_CONTIGUOUS) and not f_order \
            or asks_for(flags, PyBUF_ANY_CONTIGUOUS) and not (c_order or f_order):
        raise BufferError(f"a buffer without gaps was asked for, and the tensor of the shape {tensor.shape} has the "
                          f"strides {tensor.strides}: s.copy(t) makes a compact one")
    if not asks_for(flags, PyBUF_ND) and flags & PyBUF_FORMAT:
        raise BufferError("a buffer without a shape holds bytes, and no format")
    return 0


cdef int fill_buffer(Tensor tensor, Py_buffer *buffer, int flags) except -1:
    cdef const char *form = format_of(tensor._dtype)
    cdef int64_t itemsize = tensor._dtype.itemsize
    cdef Py_ssize_t *strides = NULL
    cdef int axis
    if not is_host_readable(tensor):
        raise BufferError(f"the tensor is on {tensor.device}: s.to_host(t) brings the values to the host, and "
                          "libraries of the device take it by DLPack (from_dlpack)")
    if form == NULL:
        raise BufferError(f"the buffer protocol has no format for {tensor._dtype.name}: exchange it by DLPack "
                          "(from_dlpack), or s.to_host(t) copies it")
    check_request(tensor, flags)
    if asks_for(flags, PyBUF_STRIDES) and tensor.c.ndim > 0:
        strides = <Py_ssize_t *> malloc(tensor.c.ndim * sizeof(Py_ssize_t))
        if strides == NULL:
            raise MemoryError
        for axis in range(tensor.c.ndim):
            # A stride that is never used may be anything, and might not fit when it is scaled.
            strides[axis] = itemsize
            if tensor.c.size > 0 and tensor.c.shape[axis] > 1:
                strides[axis] = tensor.c.strides[axis] * itemsize
    try:
        check(open_to_host(tensor.c.storage))
    except BaseException:
        free(strides)
        raise
    # Without elements there may be no address, and some readers of buffers insist on one.
    buffer.buf = kina_tensor_address(&tensor.c) if tensor.c.size > 0 else <void *> tensor.c.storage
    buffer.len = <Py_ssize_t> tensor.c.size_bytes
    buffer.itemsize = itemsize
    buffer.readonly = tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP) != 0
    buffer.format = <char *> form if flags & PyBUF_FORMAT else NULL
    buffer.ndim = tensor.c.ndim if asks_for(flags, PyBUF_ND) else 1
    buffer.shape = <Py_ssize_t *> tensor.c.shape if asks_for(flags, PyBUF_ND) else NULL
    buffer.strides = strides
    buffer.suboffsets = NULL
    buffer.internal = strides
    return 0


cdef void release_buffer(Py_buffer *buffer) noexcept:
    free(buffer.internal)


set_buffer_exporter(fill_buffer, release_buffer)


# In -------------------------------------------------------------------------------------------------------


cdef DType dtype_of_format(str form, Py_ssize_t itemsize):
    """A struct format of one native number."""
    letter = form[1:] if form[:1] in ("@", "=", "<", ">", "!") else form
    if form[:1] in (">", "!") and itemsize > 1:
        raise DTypeError(f"buffer format {form!r} is byte-swapped; kina stores native byte order",
                         operation="adopt")
    # A long has 4 bytes where the size is standard, and 8 where it is native or ctypes says so.
    if (letter == "b" and itemsize == 1 or letter == "h" and itemsize == 2 or letter == "i" and itemsize == 4
            or letter == "l" and itemsize in (4, 8) or letter in ("q", "n") and itemsize == 8):
        return as_dtype(f"int{8 * itemsize}")
    if (letter == "B" and itemsize == 1 or letter == "H" and itemsize == 2 or letter == "I" and itemsize == 4
            or letter == "L" and itemsize in (4, 8) or letter in ("Q", "N") and itemsize == 8):
        return as_dtype(f"uint{8 * itemsize}")
    if letter == "e" and itemsize == 2 or letter == "f" and itemsize == 4 or letter == "d" and itemsize == 8:
        return as_dtype(f"float{8 * itemsize}")
    if letter in ("Zf", "F") and itemsize == 8 or letter in ("Zd", "D") and itemsize == 16:
        return as_dtype(f"complex{8 * itemsize}")
    if letter == "?" and itemsize == 1:
        return as_dtype("bool")
    raise DTypeError(f"buffer format {form!r} of {itemsize} bytes is not a number of one of kina's dtypes",
                     operation="adopt")


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
