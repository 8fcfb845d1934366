from libc.stdint cimport int64_t

from kina._core.storage cimport kina_tensor

# All of these check for overflow of int64 and record an error; 0 on success.

# Elements of a shape (negative extents and overflow are InvalidShape).
cdef int layout_size(const char *operation, int ndim, const int64_t *shape, int64_t *size) noexcept nogil
# C-order strides, in elements. Zero-size shapes get the strides of max(extent, 1), as NumPy gives.
cdef int layout_c_strides(const char *operation, int ndim, const int64_t *shape, int64_t *strides) noexcept nogil
# From ndim, dtype.bits, shape, strides, byte_offset: fill size, size_bytes, span and the contiguity and
# self-overlap flags; the READ_ONLY flag is kept. Checks the span against the storage where there is one.
cdef int layout_describe(const char *operation, kina_tensor *tensor) noexcept nogil
# Do the byte envelopes of two tensors of the same address space meet? Empty tensors never do.
cdef bint layout_overlaps(const kina_tensor *a, const kina_tensor *b) noexcept nogil
