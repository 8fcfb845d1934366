from libc.stdint cimport int64_t, uint8_t, uint16_t


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


cdef class TypedScalar:
    # kina.f32(2.0): a scalar that knows its dtype, for launches without a signature.
    cdef readonly DType dtype
    cdef unsigned char raw[16]
