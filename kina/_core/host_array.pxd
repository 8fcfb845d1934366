from kina._core.dtype cimport DType
from kina._core.tensor cimport Tensor

# (NumPy array, DType) of anything numpy.asarray takes, in NumPy's `order` ("C", "K"); converts on the host where
# `dtype` asks for another.
# ArgumentError where NumPy cannot read it, DTypeError for what kina does not store.
cdef tuple as_host_array(object array, object dtype, str order)
# An uninitialised C-ordered NumPy array.
cdef object empty_host_array(object shape, DType dtype)
# The address of the first element.
cdef void *host_address(object array) except? NULL
# Strides in bytes as NumPy wants them.
cdef tuple byte_strides(Tensor tensor)
# The elements of `tensor`, in C order, from a uint8 array that holds the bytes of its span.
cdef object elements_of_span(object octets, Tensor tensor)
