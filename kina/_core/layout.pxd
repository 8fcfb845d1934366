from libc.stdint cimport int64_t

from kina._core.storage cimport kina_tensor

# All of these check for overflow of int64 and record an error; 0 on success.

# Elements of a shape (negative extents and overflow are InvalidShape).
cdef int layout_size(const char *operation, int ndim, const int64_t *shape, int64_t *size) noexcept nogil
# Bytes of `size` elements (InvalidShape beyond 2^63 - 1).
cdef int layout_nbytes(const char *operation, int64_t size, int itemsize, size_t *nbytes) noexcept nogil
# C-order strides, in elements. Zero-size shapes get the strides of max(extent, 1), as NumPy gives.
cdef int layout_c_strides(const char *operation, int ndim, const int64_t *shape,
                          int64_t *strides) noexcept nogil
# From data, ndim, dtype.bits, shape, strides, byte_offset: fill size, size_bytes, span and the flags, of which
# READ_ONLY is kept. Checks the span against the storage where there is one.
cdef int layout_describe(const char *operation, kina_tensor *tensor) noexcept nogil
# Do the byte envelopes of two tensors of the same address space meet? Empty tensors never do.
cdef bint layout_overlaps(const kina_tensor *a, const kina_tensor *b) noexcept nogil

# Views. Outputs have room for KINA_MAX_NDIM axes and may not alias the inputs.

# Elements start, start + step, ... (`count` of them, within `extent`) of an axis: adds to *offset (in
# elements) and gives the stride of the resulting axis.
cdef int layout_slice(const char *operation, int64_t start, int64_t step, int64_t count, int64_t stride,
                      int64_t *offset, int64_t *out_stride) noexcept nogil
# Axis i of the result is axis axes[i] of the input; axes must name each of 0 .. ndim-1 once.
cdef int layout_permute(const char *operation, int ndim, const int *axes, const int64_t *shape,
                        const int64_t *strides,
                        int64_t *out_shape, int64_t *out_strides) noexcept nogil
# Strides that show `shape` as `out_shape`: new and stretched axes get stride 0.
cdef int layout_broadcast(const char *operation, int ndim, const int64_t *shape, const int64_t *strides,
                          int out_ndim, const int64_t *out_shape, int64_t *out_strides) noexcept nogil
# Strides that show the same elements, in C order, under `out_shape` (of equal size), or NON_CONTIGUOUS where
# only a copy could: NumPy's rule.
cdef int layout_reshape(const char *operation, int ndim, const int64_t *shape, const int64_t *strides,
                        int out_ndim, const int64_t *out_shape, int64_t *out_strides) noexcept nogil
# The shape that two shapes broadcast to.
cdef int layout_broadcast_shapes(const char *operation, int ndim_a, const int64_t *a, int ndim_b,
                                 const int64_t *b,
                                 int *out_ndim, int64_t *out) noexcept nogil

# Host memory only: the elements of `source`, in C order, into `target` (size_bytes, not overlapping).
cdef void layout_gather(const kina_tensor *source, char *target) noexcept nogil
# Host memory only: `count` times the same element.
cdef void layout_fill(char *target, int itemsize, int64_t count, const void *element) noexcept nogil
