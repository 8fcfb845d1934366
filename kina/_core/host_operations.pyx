"""Operations on host tensors, computed by NumPy (ml_dtypes for bfloat16)."""

from libc.stdint cimport int64_t
from libc.string cimport memcmp

from kina._core.dtype cimport DTYPE_BFLOAT16, DTYPE_BOOL, DTYPE_FLOAT16
from kina._core.host_tensor cimport host_empty, numpy_view
from kina._core.layout cimport layout_broadcast_shapes, layout_overlaps
from kina._core.resource cimport MemoryResource
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_MAX_NDIM,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    kina_tensor,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor

from kina.errors import DTypeError, InvalidLayoutError, InvalidShapeError

__all__ = []


cdef int check_operands(Tensor a, Tensor b, str operation) except -1:
    if a._dtype is not b._dtype:
        raise DTypeError(f"{operation}: operands of one dtype are needed, got {a._dtype.name} and "
                         f"{b._dtype.name}; "
                         "nothing is promoted", operation=operation)
    # The same dtypes as on a device: complex numbers are stored, fp8 is converted, neither is calculated
    # with.
    if a._dtype.id > DTYPE_BOOL:
        raise DTypeError(f"{operation}: {a._dtype.name} can be stored but not calculated with",
                         operation=operation)
    return 0


cdef bint same_elements(const kina_tensor *a, const kina_tensor *b) noexcept nogil:
    return kina_tensor_address(a) == kina_tensor_address(b) and a.ndim == b.ndim \
        and memcmp(a.shape, b.shape, a.ndim * sizeof(int64_t)) == 0 \
        and memcmp(a.strides, b.strides, a.ndim * sizeof(int64_t)) == 0


cdef int check_output(Tensor out, Tensor a, int ndim, const int64_t *shape, str operation) except -1:
    if out._dtype is not a._dtype:
        raise DTypeError(f"{operation}: out is {out._dtype.name}, the result {a._dtype.name}",
                         operation=operation)
    if out.c.ndim != ndim or memcmp(out.c.shape, shape, ndim * sizeof(int64_t)) != 0:
        wanted = tuple([shape[axis] for axis in range(ndim)])
        raise InvalidShapeError(f"{operation}: out has the shape {out.shape}, the result {wanted}",
                                operation=operation)
    if out.c.flags & KINA_TENSOR_READ_ONLY:
        raise InvalidLayoutError(f"{operation}: out is read-only", operation=operation)
    if out.c.flags & KINA_TENSOR_SELF_OVERLAP:
        raise InvalidLayoutError(f"{operation}: out repeats elements by a stride of 0 and cannot be written",
                                 operation=operation)
    return 0


cdef int check_aliasing(Tensor out, Tensor operand, bint in_place, str operation) except -1:
    if layout_overlaps(&out.c, &operand.c) and not (in_place and same_elements(&out.c, &operand.c)):
        raise InvalidLayoutError(f"{operation}: out overlaps an operand", operation=operation)
    return 0


cdef Tensor elementwise(Tensor a, Tensor b, Tensor out, MemoryResource memory, str operation):
    import numpy

    cdef int64_t shape[KINA_MAX_NDIM]
    cdef int ndim = 0
    cdef bytes name = operation.encode()
    check_operands(a, b, operation)
    check(layout_broadcast_shapes(name, a.c.ndim, a.c.shape, b.c.ndim, b.c.shape, &ndim, shape))
    if out is None:
        out = host_empty(a._dtype, ndim, shape, memory, name)
    else:
        check_output(out, a, ndim, shape, operation)
        check_aliasing(out, a, True, operation)
        check_aliasing(out, b, True, operation)
    with numpy.errstate(all="ignore"):  # overflow gives infinity or wraps, as on a device, without a warning
        getattr(numpy, operation)(numpy_view(a, False), numpy_view(b, False), out=numpy_view(out, True))
    return out


cdef Tensor host_add(Tensor a, Tensor b, Tensor out, MemoryResource memory):
    return elementwise(a, b, out, memory, "add")


cdef Tensor host_multiply(Tensor a, Tensor b, Tensor out, MemoryResource memory):
    return elementwise(a, b, out, memory, "multiply")


cdef int matmul_shape(Tensor a, Tensor b, int64_t *shape) except -1:
    """NumPy's rule: vectors lend an axis, the axes before the last two broadcast. Returns ndim."""
    cdef int ndim = 0
    cdef int64_t inner_a, inner_b
    if a.c.ndim == 0 or b.c.ndim == 0:
        raise InvalidShapeError("matmul: operands need at least one axis; multiply takes scalars",
                                operation="matmul")
    inner_a = a.c.shape[a.c.ndim - 1]
    inner_b = b.c.shape[b.c.ndim - 2 if b.c.ndim > 1 else 0]
    if inner_a != inner_b:
        raise InvalidShapeError(f"matmul: {a.shape} and {b.shape} differ in the summed axis ({inner_a} and "
                                f"{inner_b})",
                                operation="matmul")
    check(layout_broadcast_shapes(b"matmul", max(a.c.ndim - 2, 0), a.c.shape, max(b.c.ndim - 2, 0), b.c.shape,
                                  &ndim, shape))
    if a.c.ndim > 1:
        shape[ndim] = a.c.shape[a.c.ndim - 2]
        ndim += 1
    if b.c.ndim > 1:
        shape[ndim] = b.c.shape[b.c.ndim - 1]
        ndim += 1
    return ndim


cdef Tensor host_matmul(Tensor a, Tensor b, Tensor out, MemoryResource memory):
    import numpy

    cdef int64_t shape[KINA_MAX_NDIM]
    cdef int ndim
    check_operands(a, b, "matmul")
    ndim = matmul_shape(a, b, shape)
    if out is None:
        out = host_empty(a._dtype, ndim, shape, memory, b"matmul")
    else:
        check_output(out, a, ndim, shape, "matmul")
        check_aliasing(out, a, False, "matmul")
        check_aliasing(out, b, False, "matmul")
    left, right, result = numpy_view(a, False), numpy_view(b, False), numpy_view(out, True)
    with numpy.errstate(all="ignore"):
        if a._dtype.id == DTYPE_FLOAT16 or a._dtype.id == DTYPE_BFLOAT16:
            # Sums in float32, rounded once: so it is on a device, and ml_dtypes has no matmul.
            product = numpy.matmul(left.astype(numpy.float32), right.astype(numpy.float32))
            numpy.copyto(result, product, casting="unsafe")
        else:
            numpy.matmul(left, right, out=result)
    return out
