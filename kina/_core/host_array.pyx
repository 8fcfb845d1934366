"""Host data on its way in and out: NumPy arrays, loaded when first needed."""

from libc.stdint cimport int64_t, uintptr_t

from kina._core.dtype cimport DType, as_dtype
from kina._core.tensor cimport Tensor, is_host_readable

from kina.errors import ArgumentError, DLPackError

__all__ = []


cdef tuple as_host_array(object array, object dtype, str order):
    import numpy as np

    cdef DType wanted = None if dtype is None else as_dtype(dtype)
    if type(array) is Tensor and not is_host_readable(<Tensor> array):
        raise ArgumentError(f"from_host: the tensor is on {array.device} already: session.copy(tensor) copies one of "
                            "the session's own device, to_host of its own session brings it to the host",
                            operation="from_host")
    try:
        host = np.asarray(array, None if wanted is None else wanted.numpy, order=order)
    except DLPackError:
        raise  # a tensor that the device may still use
    except (TypeError, ValueError, OverflowError, BufferError) as error:
        raise ArgumentError(f"from_host: numpy.asarray cannot read {type(array).__name__}: {error}",
                            operation="from_host") from error
    return host, as_dtype(host.dtype) if wanted is None else wanted


cdef object empty_host_array(object shape, DType dtype):
    import numpy as np

    return np.empty(shape, dtype.numpy)


cdef void *host_address(object array) except? NULL:
    return <void *> <uintptr_t> array.__array_interface__["data"][0]


cdef object elements_of_span(object octets, Tensor tensor):
    import numpy as np

    cdef int64_t start = <int64_t> tensor.c.byte_offset - tensor.c.span_low
    if tensor.c.size == 0:
        return np.empty(tensor.shape, tensor._dtype.numpy)
    return np.ndarray(tensor.shape, tensor._dtype.numpy, octets, start, byte_strides(tensor)).copy()


cdef tuple byte_strides(Tensor tensor):
    cdef int64_t itemsize = tensor._dtype.itemsize
    # The stride of an axis of one element is never used and may be anything: NumPy is not shown it.
    return tuple([tensor.c.strides[axis] * itemsize if tensor.c.shape[axis] > 1 else itemsize
                  for axis in range(tensor.c.ndim)])
