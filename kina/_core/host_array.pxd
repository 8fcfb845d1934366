from kina._core.dtype cimport DType
from kina._core.tensor cimport Tensor

# (C-ordered NumPy array, DType) of anything numpy.asarray takes; converts on the host where `dtype` asks for another.
cdef tuple as_host_array(object array, object dtype)
# An uninitialised C-ordered NumPy array.
cdef object empty_host_array(object shape, DType dtype)
# The address of the first element.
cdef void *host_address(object array) except? NULL
# The elements of `tensor`, in C order, from a uint8 array that holds the bytes of its span.
cdef object elements_of_span(object octets, Tensor tensor)
