from kina._core.dtype cimport DType

cdef enum ParameterKind:
    PARAMETER_TENSOR = 0
    PARAMETER_SCALAR = 1

cdef struct kina_parameter:
    ParameterKind kind
    bint writable       # a tensor that the kernel writes
    int dtype_id
    char letter         # of scalars with a short way: f 32-bit float, d double, i signed, u unsigned, 0 none
    int nbytes


cdef class Signature:
    cdef readonly str text
    cdef int count
    cdef kina_parameter *parameters
    cdef list dtypes    # DType of each parameter
