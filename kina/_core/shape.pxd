from libc.stdint cimport int64_t

# A Python shape (int or sequence of ints) -> extents; returns ndim. InvalidShapeError.
# `extents` has room for KINA_MAX_NDIM.
cdef int parse_shape(object shape, int64_t *extents, const char *operation) except -1
# The same without a look at the extents themselves: they may be negative.
cdef int parse_extents(object shape, int64_t *extents, const char *operation) except -1
# reshape(2, 3) and reshape((2, 3)) mean the same.
cdef object one_or_many(tuple arguments)
# The InvalidShapeError for more axes than KINA_MAX_NDIM.
cdef object too_many_axes(Py_ssize_t ndim, const char *operation)
