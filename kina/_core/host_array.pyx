"""Host data on its way in and out: NumPy arrays, loaded when first needed."""

from libc.stdint cimport int64_t, uintptr_t

from kina._core.dtype cimport DType, as_dtype
from kina._core.tensor cimport Tensor

__all__ = []


cdef tuple as_host_array(object array, object dtype):
    import numpy as np

    cdef DType wanted
    host = np.asarray(array, order="C")
    if dtype is None:
        return host, as_dtype(host.dtype)
    wanted = as_dtype(dtype)
    return np.asarray(host, dtype=wanted.numpy, order="C"), wanted


cdef object empty_host_array(object shape, DType dtype):
    import numpy as np

    return np.empty(shape, dtype.numpy)


cdef void *host_address(object array) except? NULL:
    return <void *> <uintptr_t> array.__array_interface__["data"][0]


cdef object elements_of_span(object octets, Tensor tensor):
    import numpy as np

    cdef int64_t start = <int64_t> tensor.c.byte_offset - tensor.c.span_low
    strides = tuple(stride * tensor._dtype.itemsize for stride in tensor.strides)
    return np.ndarray(tensor.shape, tensor._dtype.numpy, octets, start, strides).copy()
