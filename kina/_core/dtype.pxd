from libc.stdint cimport int64_t, uint8_t, uint16_t

# Indices into the table of dtypes (DType.id), for switches in C.
cdef enum:
    DTYPE_FLOAT16 = 0
    DTYPE_BFLOAT16 = 1
    DTYPE_FLOAT32 = 2
    DTYPE_FLOAT64 = 3
    DTYPE_INT8 = 4
    DTYPE_INT16 = 5
    DTYPE_INT32 = 6
    DTYPE_INT64 = 7
    DTYPE_UINT8 = 8
    DTYPE_UINT16 = 9
    DTYPE_UINT32 = 10
    DTYPE_UINT64 = 11
    DTYPE_BOOL = 12
    DTYPE_COMPLEX64 = 13
    DTYPE_COMPLEX128 = 14
    DTYPE_FLOAT8_FIRST = 15         # the fp8 formats, in the order of their DLPack codes
    DTYPE_COUNT = 23


cdef class DType:
    # Singletons: one object per dtype for the process, compared by identity.
    cdef readonly str name          # "float32"
    cdef readonly str short_name    # "f32"
    cdef readonly int itemsize      # bytes
    cdef int id                     # index in the table
    cdef uint8_t code               # DLPack code
    cdef uint8_t bits
    cdef object _numpy              # numpy dtype, made at first use

# Any spelling -> DType, or DTypeError naming what was given.
cdef DType as_dtype(object spelling)
cdef DType dtype_by_id(int id)
# DTypeError (sub-byte, opaque and vector types by name).
cdef DType dtype_from_dlpack(uint8_t code, uint8_t bits, uint16_t lanes)
# The bytes of one element holding `value`, range-checked; returns itemsize. ArgumentError.
cdef int pack_scalar(DType dtype, object value, void *out) except -1


# A numpy.generic; False without loading NumPy.
cdef bint is_numpy_scalar(object value)


cdef class TypedScalar:
    # kina.f32(2.0): a scalar that knows its dtype, for launches without a signature.
    cdef readonly DType dtype
    cdef unsigned char raw[16]
