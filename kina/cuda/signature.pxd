cimport cython

from kina._core.dtype cimport DType

cdef enum ParameterKind:
    PARAMETER_TENSOR = 0
    PARAMETER_SCALAR = 1    # or a struct
    PARAMETER_WORKSPACE = 2

cdef struct kina_parameter:
    ParameterKind kind
    bint writable       # a tensor that the kernel writes
    int dtype_id
    char letter         # of scalars with a short way: f 32-bit float, d double, i signed, u unsigned, 0 none
    int nbytes


@cython.final
cdef class Signature:
    cdef readonly str text
    cdef int count
    cdef kina_parameter *parameters
    cdef readonly list words
    cdef list dtypes    # DType of each parameter; None: a struct, or a workspace

    # Whether parameter i may be one that PTX declares so: "f32", "u64", "b8[24]".
    cdef bint fits(self, int i, str declared)
