# cython: annotation_typing=False
"""Shapes as Python hands them over: ints and sequences of ints, read into extents."""

from cpython.number cimport PyIndex_Check, PyNumber_Index
from libc.stdint cimport int64_t

from kina._core.layout cimport layout_size
from kina._core.status cimport check
from kina._core.storage cimport KINA_MAX_NDIM

from kina.errors import InvalidShapeError

__all__ = []


cdef extern from "Python.h":
    Py_ssize_t PyLong_AsSsize_t(object number) except? -1


cdef object too_many_axes(Py_ssize_t ndim, const char *operation):
    return InvalidShapeError(f"shape: {ndim} axes are more than the {KINA_MAX_NDIM} supported",
                             operation=operation.decode())


cdef object one_or_many(tuple arguments):
    return arguments[0] if len(arguments) == 1 else arguments


cdef int64_t parse_extent(object extent, const char *operation) except? -1:
    if type(extent) is not int:
        if isinstance(extent, bool) or not PyIndex_Check(extent):
            raise InvalidShapeError(f"shape: extents are ints, got {type(extent).__name__}",
                                    operation=operation.decode())
        try:
            extent = PyNumber_Index(extent)
        except TypeError as error:
            raise InvalidShapeError(f"shape: {error}", operation=operation.decode()) from error
    try:
        return PyLong_AsSsize_t(extent)
    except OverflowError:
        raise InvalidShapeError(f"shape: the extent {extent} overflows 64 bits",
                                operation=operation.decode()) from None


cdef int parse_extents(object shape, int64_t *extents, const char *operation) except -1:
    cdef Py_ssize_t axis
    if type(shape) is int or (PyIndex_Check(shape) and not hasattr(type(shape), "__len__")):
        extents[0] = parse_extent(shape, operation)
        return 1
    if type(shape) is not tuple:
        if isinstance(shape, (str, bytes, dict, set, frozenset)):
            raise InvalidShapeError(f"shape: an int or a sequence of ints, not {type(shape).__name__}",
                                    operation=operation.decode())
        try:
            shape = tuple(shape)
        except TypeError:
            raise InvalidShapeError(f"shape: an int or a sequence of ints, not {type(shape).__name__}",
                                    operation=operation.decode()) from None
    if len(<tuple> shape) > KINA_MAX_NDIM:
        raise too_many_axes(len(<tuple> shape), operation)
    for axis in range(len(<tuple> shape)):
        extents[axis] = parse_extent((<tuple> shape)[axis], operation)
    return <int> len(<tuple> shape)


cdef int parse_shape(object shape, int64_t *extents, const char *operation) except -1:
    cdef int64_t size = 0
    cdef int ndim = parse_extents(shape, extents, operation)
    check(layout_size(operation, ndim, extents, &size))
    return ndim
