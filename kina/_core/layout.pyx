"""Layouts: the arithmetic of shapes, strides and spans. No Python objects, no GIL, every step checked."""

from libc.stdint cimport INT64_MAX, int64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy, memset

from kina._core.status cimport KINA_INVALID_LAYOUT, KINA_INVALID_SHAPE, KINA_NON_CONTIGUOUS, fail, last_error
from kina._core.storage cimport (
    KINA_MAX_NDIM,
    KINA_TENSOR_C_CONTIGUOUS,
    KINA_TENSOR_F_CONTIGUOUS,
    KINA_TENSOR_MISALIGNED,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    kina_tensor,
    kina_tensor_address,
)

__all__ = []


cdef extern from *:
    """
    #include <stdint.h>
    static inline int kina_add_overflows(int64_t a, int64_t b, int64_t *out) {
        return __builtin_add_overflow(a, b, out);
    }
    static inline int kina_multiply_overflows(int64_t a, int64_t b, int64_t *out) {
        return __builtin_mul_overflow(a, b, out);
    }
    """
    bint add_overflows "kina_add_overflows"(int64_t a, int64_t b, int64_t *out) noexcept nogil
    bint multiply_overflows "kina_multiply_overflows"(int64_t a, int64_t b, int64_t *out) noexcept nogil


cdef int fail_axis(int detail, const char *operation, const char *form, int axis,
                   int64_t number) noexcept nogil:
    snprintf(last_error().message, sizeof(last_error().message), form, axis, <long long> number)
    return fail(detail, operation, last_error().message)


cdef int layout_size(const char *operation, int ndim, const int64_t *shape, int64_t *size) noexcept nogil:
    cdef int axis
    cdef int64_t product = 1
    cdef bint empty = False
    size[0] = 0
    for axis in range(ndim):
        if shape[axis] < 0:
            return fail_axis(KINA_INVALID_SHAPE, operation, b"shape: axis %d has the negative extent %lld",
                             axis, shape[axis])
        # Other axes must multiply without overflow even beside an empty one: strides are made from them.
        if shape[axis] == 0:
            empty = True
        elif multiply_overflows(product, shape[axis], &product):
            return fail(KINA_INVALID_SHAPE, operation, b"shape: the number of elements overflows 64 bits")
    size[0] = 0 if empty else product
    return 0


cdef int layout_nbytes(const char *operation, int64_t size, int itemsize, size_t *nbytes) noexcept nogil:
    cdef int64_t product = 0
    if multiply_overflows(size, itemsize, &product):
        return fail(KINA_INVALID_SHAPE, operation, b"shape: the number of bytes overflows 64 bits")
    nbytes[0] = <size_t> product
    return 0


cdef int layout_c_strides(const char *operation, int ndim, const int64_t *shape,
                          int64_t *strides) noexcept nogil:
    cdef int axis
    cdef int64_t product = 1
    for axis in range(ndim - 1, -1, -1):
        strides[axis] = product
        if shape[axis] > 1 and multiply_overflows(product, shape[axis], &product):
            return fail(KINA_INVALID_SHAPE, operation, b"shape: the number of elements overflows 64 bits")
    return 0


cdef int layout_describe(const char *operation, kina_tensor *tensor) noexcept nogil:
    cdef int axis
    cdef int status
    cdef int64_t itemsize = tensor.dtype.bits // 8
    cdef int64_t extent, reach, low, high, expected
    cdef int64_t *end
    cdef bint c_order = True
    cdef bint f_order = True
    tensor.flags &= KINA_TENSOR_READ_ONLY
    status = layout_size(operation, tensor.ndim, tensor.shape, &tensor.size)
    if status != 0:
        return status
    status = layout_nbytes(operation, tensor.size, <int> itemsize, &tensor.size_bytes)
    if status != 0:
        return status
    if tensor.byte_offset > <unsigned long long> INT64_MAX:
        return fail(KINA_INVALID_LAYOUT, operation, b"byte_offset: overflows 64 bits")
    tensor.span_low = tensor.span_high = <int64_t> tensor.byte_offset
    if tensor.size == 0:
        tensor.flags |= KINA_TENSOR_C_CONTIGUOUS | KINA_TENSOR_F_CONTIGUOUS
        return 0
    low = high = 0
    expected = 1
    for axis in range(tensor.ndim - 1, -1, -1):
        extent = tensor.shape[axis]
        if extent == 1:
            continue  # its stride is never used
        end = &low if tensor.strides[axis] < 0 else &high
        if multiply_overflows(extent - 1, tensor.strides[axis], &reach) \
                or multiply_overflows(reach, itemsize, &reach) or add_overflows(end[0], reach, end):
            return fail_axis(KINA_INVALID_LAYOUT, operation,
                             b"strides: axis %d (stride %lld) overflows the address space", axis,
                             tensor.strides[axis])
        if tensor.strides[axis] == 0:
            tensor.flags |= KINA_TENSOR_SELF_OVERLAP
        if tensor.strides[axis] != expected:
            c_order = False
        expected *= extent  # cannot overflow: bounded by size
    expected = 1
    for axis in range(tensor.ndim):
        if tensor.shape[axis] == 1:
            continue
        if tensor.strides[axis] != expected:
            f_order = False
            break
        expected *= tensor.shape[axis]
    if c_order:
        tensor.flags |= KINA_TENSOR_C_CONTIGUOUS
    if f_order:
        tensor.flags |= KINA_TENSOR_F_CONTIGUOUS
    if add_overflows(tensor.span_low, low, &tensor.span_low) or add_overflows(high, itemsize, &high) \
            or add_overflows(tensor.span_high, high, &tensor.span_high):
        return fail(KINA_INVALID_LAYOUT, operation, b"byte_offset: the span overflows 64 bits")
    if <uintptr_t> kina_tensor_address(tensor) & <uintptr_t> (itemsize - 1):  # sizes are powers of two
        tensor.flags |= KINA_TENSOR_MISALIGNED
    if tensor.storage != NULL:
        return check_span(operation, tensor)
    return 0


cdef int check_span(const char *operation, kina_tensor *tensor) noexcept nogil:
    if tensor.span_low >= 0 and <size_t> tensor.span_high <= tensor.storage.nbytes:
        return 0
    snprintf(last_error().message, sizeof(last_error().message),
             b"the layout touches bytes %lld to %lld of a storage of %zu",
             <long long> tensor.span_low, <long long> tensor.span_high, tensor.storage.nbytes)
    return fail(KINA_INVALID_LAYOUT, operation, last_error().message)


cdef bint layout_overlaps(const kina_tensor *a, const kina_tensor *b) noexcept nogil:
    if a.size == 0 or b.size == 0:
        return False
    cdef const char *a_data = <const char *> a.data
    cdef const char *b_data = <const char *> b.data
    return a_data + a.span_low < b_data + b.span_high and b_data + b.span_low < a_data + a.span_high


cdef int layout_slice(const char *operation, int64_t start, int64_t step, int64_t count, int64_t stride,
                      int64_t *offset, int64_t *out_stride) noexcept nogil:
    cdef int64_t moved = 0
    if multiply_overflows(stride, step, out_stride):
        if count > 1:
            return fail(KINA_INVALID_LAYOUT, operation, b"strides: the step overflows 64 bits")
        out_stride[0] = stride  # one element or none: the stride is never used
    if count == 0:
        return 0
    if multiply_overflows(start, stride, &moved) or add_overflows(offset[0], moved, offset):
        return fail(KINA_INVALID_LAYOUT, operation, b"strides: the offset overflows 64 bits")
    return 0


cdef int layout_permute(const char *operation, int ndim, const int *axes, const int64_t *shape,
                        const int64_t *strides,
                        int64_t *out_shape, int64_t *out_strides) noexcept nogil:
    cdef bint seen[KINA_MAX_NDIM]
    cdef int i
    memset(seen, 0, sizeof(seen))
    for i in range(ndim):
        if not 0 <= axes[i] < ndim:
            return fail_axis(KINA_INVALID_SHAPE, operation,
                             b"axes: place %d names the axis %lld, which does not exist", i, axes[i])
        if seen[axes[i]]:
            return fail_axis(KINA_INVALID_SHAPE, operation,
                             b"axes: place %d names the axis %lld a second time", i, axes[i])
        seen[axes[i]] = True
        out_shape[i] = shape[axes[i]]
        out_strides[i] = strides[axes[i]]
    return 0


cdef int layout_broadcast(const char *operation, int ndim, const int64_t *shape, const int64_t *strides,
                          int out_ndim, const int64_t *out_shape, int64_t *out_strides) noexcept nogil:
    cdef int added = out_ndim - ndim
    cdef int axis
    if added < 0:
        return fail_axis(KINA_INVALID_SHAPE, operation, b"shape: %d axes are fewer than the tensor's %lld",
                         out_ndim, ndim)
    for axis in range(out_ndim):
        if axis < added:
            out_strides[axis] = 0
        elif shape[axis - added] == out_shape[axis]:
            out_strides[axis] = strides[axis - added]
        elif shape[axis - added] == 1:
            out_strides[axis] = 0
        else:
            return fail_axis(KINA_INVALID_SHAPE, operation,
                             b"shape: axis %d of the tensor cannot be stretched to %lld", axis - added,
                             out_shape[axis])
    return 0


cdef int layout_broadcast_shapes(const char *operation, int ndim_a, const int64_t *a, int ndim_b,
                                 const int64_t *b,
                                 int *out_ndim, int64_t *out) noexcept nogil:
    cdef int ndim = ndim_a if ndim_a > ndim_b else ndim_b
    cdef int axis
    cdef int64_t of_a, of_b
    out_ndim[0] = ndim
    for axis in range(ndim):
        of_a = a[axis - (ndim - ndim_a)] if axis >= ndim - ndim_a else 1
        of_b = b[axis - (ndim - ndim_b)] if axis >= ndim - ndim_b else 1
        if of_a != of_b and of_a != 1 and of_b != 1:
            snprintf(last_error().message, sizeof(last_error().message),
                     b"shape: axis %d from the right has %lld and %lld elements and cannot be broadcast",
                     ndim - axis, <long long> of_a, <long long> of_b)
            return fail(KINA_INVALID_SHAPE, operation, last_error().message)
        out[axis] = of_b if of_a == 1 else of_a
    return 0


cdef int layout_reshape(const char *operation, int ndim, const int64_t *shape, const int64_t *strides,
                        int out_ndim, const int64_t *out_shape, int64_t *out_strides) noexcept nogil:
    cdef int64_t old_shape[KINA_MAX_NDIM]
    cdef int64_t old_strides[KINA_MAX_NDIM]
    cdef int64_t size, old_extent, new_extent, expected, last
    cdef int old_ndim = 0
    cdef int axis, old_first, old_end, new_first, new_end
    cdef int status = layout_size(operation, out_ndim, out_shape, &size)
    if status != 0:
        return status
    if size == 0:
        return layout_c_strides(operation, out_ndim, out_shape, out_strides)
    for axis in range(ndim):  # axes of one element constrain nothing
        if shape[axis] != 1:
            old_shape[old_ndim] = shape[axis]
            old_strides[old_ndim] = strides[axis]
            old_ndim += 1
    # Walk both shapes in step: the smallest groups of axes with equal products. A group of old axes must be
    # one evenly spaced run, for then any split of it into new axes is.
    old_first = new_first = 0
    while new_first < out_ndim and old_first < old_ndim:
        old_end = old_first + 1
        new_end = new_first + 1
        old_extent = old_shape[old_first]
        new_extent = out_shape[new_first]
        while new_extent != old_extent:
            if new_extent < old_extent:
                new_extent *= out_shape[new_end]
                new_end += 1
            else:
                old_extent *= old_shape[old_end]
                old_end += 1
        for axis in range(old_first, old_end - 1):
            if multiply_overflows(old_shape[axis + 1], old_strides[axis + 1], &expected) \
                    or old_strides[axis] != expected:
                return fail(KINA_NON_CONTIGUOUS, operation,
                            b"no view has this shape over these strides, and reshape does not copy: "
                            b"from_host(to_host(tensor)) makes a compact one, by way of the host")
        out_strides[new_end - 1] = old_strides[old_end - 1]
        for axis in range(new_end - 1, new_first, -1):
            out_strides[axis - 1] = out_strides[axis] * out_shape[axis]
        old_first = old_end
        new_first = new_end
    last = out_strides[new_first - 1] if new_first > 0 else 1
    for axis in range(new_first, out_ndim):  # what is left has one element each
        out_strides[axis] = last
    return 0


cdef void copy_row(char *target, const char *source, int64_t count, int64_t step,
                   int itemsize) noexcept nogil:
    cdef int64_t i
    if step == itemsize:
        memcpy(target, source, <size_t> (count * itemsize))
        return
    for i in range(count):
        memcpy(target + i * itemsize, source + i * step, itemsize)


cdef void layout_gather(const kina_tensor *source, char *target) noexcept nogil:
    cdef int itemsize = source.dtype.bits // 8
    cdef const char *data = kina_tensor_address(source)
    cdef int64_t index[KINA_MAX_NDIM]
    cdef int64_t row_nbytes
    cdef int inner = source.ndim - 1
    cdef int axis
    if source.size == 0:
        return
    if source.flags & KINA_TENSOR_C_CONTIGUOUS:
        memcpy(target, data, source.size_bytes)
        return
    memset(index, 0, sizeof(index))
    row_nbytes = source.shape[inner] * itemsize
    while True:
        copy_row(target, data, source.shape[inner], source.strides[inner] * itemsize, itemsize)
        target += row_nbytes
        axis = inner - 1
        while axis >= 0:  # an odometer over the outer axes
            index[axis] += 1
            data += source.strides[axis] * itemsize
            if index[axis] < source.shape[axis]:
                break
            data -= source.shape[axis] * source.strides[axis] * itemsize
            index[axis] = 0
            axis -= 1
        if axis < 0:
            return


cdef enum:
    LARGEST_PIECE = 65536  # bytes; a multiple of every itemsize, small enough to stay in the cache


cdef void layout_fill(char *target, int itemsize, int64_t count, const void *element) noexcept nogil:
    cdef int64_t nbytes = count * itemsize
    cdef int64_t done = itemsize
    cdef int64_t piece
    if count == 0:
        return
    memcpy(target, element, itemsize)
    while done < nbytes:  # what is written already is copied onwards, in doubling pieces
        piece = done if done < LARGEST_PIECE else LARGEST_PIECE
        if piece > nbytes - done:
            piece = nbytes - done
        memcpy(target + done, target, piece)
        done += piece
