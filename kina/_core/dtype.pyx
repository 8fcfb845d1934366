# cython: annotation_typing=False
"""Dtypes: one object per element type, its spellings, and the bytes of one scalar."""

import sys

cimport cython
from cpython.complex cimport PyComplex_FromDoubles
from cpython.float cimport PyFloat_AsDouble
from cpython.long cimport PyLong_AsUnsignedLongLong
from cpython.number cimport PyNumber_Index
from libc.math cimport isfinite, isinf
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kina.errors import ArgumentError, DTypeError

__all__ = ["DType", "TypedScalar"]


cdef extern from "Python.h":
    # Public since 3.11; they round half to even and refuse what would overflow.
    int PyFloat_Pack2(double value, char *out, int little_endian) except -1
    double PyFloat_Unpack2(const char *data, int little_endian) except? -1.0
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "kina is written for little-endian machines"
    #endif
    """


cdef enum:
    CODE_INT = 0
    CODE_UINT = 1
    CODE_FLOAT = 2
    CODE_BFLOAT = 4
    CODE_COMPLEX = 5
    CODE_BOOL = 6
    CODE_FLOAT8_FIRST = 7
    CODE_FLOAT8_LAST = 14


cdef double LARGEST_FLOAT32 = 3.4028234663852886e38
cdef double LARGEST_BFLOAT16 = 3.3895313892515355e38

cdef bint sealed = False  # up once the table below is complete: no DType is made afterwards


@cython.final
cdef class DType:
    """DType()

    One element type, such as ``kina.float32``. There is exactly one object per type: compare with ``is``
    or ``==``. Calling one makes a typed scalar, ``kina.f32(2)``.

    Attributes
    ----------
    name : str
        Long name, as NumPy and ml_dtypes spell it: ``"float32"``.
    short_name : str
        ``"f32"``.
    itemsize : int
        Bytes of one element.

    Notes
    -----
    Immutable, so safe to share between threads. Copying and unpickling give the same object.
    """

    def __cinit__(self):
        if sealed:
            raise TypeError("dtypes are not constructed: use kina.float32, kina.int64 and so on")

    @property
    def numpy(self) -> numpy.dtype:
        """The NumPy dtype of the same elements (ml_dtypes for bfloat16 and fp8); loads NumPy at first use."""
        if self._numpy is None:
            import numpy

            if self.code == CODE_BFLOAT or CODE_FLOAT8_FIRST <= self.code <= CODE_FLOAT8_LAST:
                import ml_dtypes

                self._numpy = numpy.dtype(getattr(ml_dtypes, self.name))
            else:
                self._numpy = numpy.dtype(self.name)
        return self._numpy

    def __call__(self, value: object) -> TypedScalar:
        """A scalar of this dtype.

        Parameters
        ----------
        value
            An int for integer types, an int or float for floating types, a complex for complex types, a
            bool for ``kina.bool``; NumPy scalars likewise.

        Raises
        ------
        ArgumentError
            A number out of range, or a value of the wrong kind: nothing wraps, nothing is truncated, and nothing
            finite becomes an infinity or NaN.

        Notes
        -----
        Floating values round once, half to even, as IEEE 754 says; infinities and NaN stay what they are. For fp8
        the rules of ml_dtypes hold (formats without infinity make NaN of one).
        """
        return make_scalar(self, value)

    def __repr__(self) -> str:
        return f"kina.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self):
        return _dtype_named, (self.name,)


cdef enum:
    CODES = 15          # of DLPack that have a dtype
    LARGEST_NBYTES = 16

cdef list table = []
cdef dict by_name = {}
cdef void *by_code[CODES][LARGEST_NBYTES + 1]  # of DLPack, and bytes: borrowed from `table`


cdef int declare(str name, str short_name, int code, int bits) except -1:
    cdef DType dtype = DType.__new__(DType)
    dtype.name = name
    dtype.short_name = short_name
    dtype.itemsize = bits // 8
    dtype.id = len(table)
    dtype.code = code
    dtype.bits = bits
    table.append(dtype)
    by_code[code][bits >> 3] = <void *> dtype
    by_name[name] = dtype
    by_name[short_name] = dtype
    return 0


# In the order of the DTYPE_ indices in dtype.pxd.
declare("float16", "f16", CODE_FLOAT, 16)
declare("bfloat16", "bf16", CODE_BFLOAT, 16)
declare("float32", "f32", CODE_FLOAT, 32)
declare("float64", "f64", CODE_FLOAT, 64)
declare("int8", "i8", CODE_INT, 8)
declare("int16", "i16", CODE_INT, 16)
declare("int32", "i32", CODE_INT, 32)
declare("int64", "i64", CODE_INT, 64)
declare("uint8", "u8", CODE_UINT, 8)
declare("uint16", "u16", CODE_UINT, 16)
declare("uint32", "u32", CODE_UINT, 32)
declare("uint64", "u64", CODE_UINT, 64)
declare("bool", "bool_", CODE_BOOL, 8)
declare("complex64", "c64", CODE_COMPLEX, 64)
declare("complex128", "c128", CODE_COMPLEX, 128)
declare("float8_e3m4", "f8_e3m4", 7, 8)
declare("float8_e4m3", "f8_e4m3", 8, 8)
declare("float8_e4m3b11fnuz", "f8_e4m3b11fnuz", 9, 8)
declare("float8_e4m3fn", "f8_e4m3fn", 10, 8)
declare("float8_e4m3fnuz", "f8_e4m3fnuz", 11, 8)
declare("float8_e5m2", "f8_e5m2", 12, 8)
declare("float8_e5m2fnuz", "f8_e5m2fnuz", 13, 8)
declare("float8_e8m0fnu", "f8_e8m0fnu", 14, 8)
sealed = True
if len(table) != DTYPE_COUNT:
    raise ImportError("kina: the table of dtypes and the indices in dtype.pxd disagree")

# Names that NumPy or ml_dtypes have and kina refuses; the sentence says why.
cdef dict refused_names = {
    name: "is smaller than a byte; kina stores whole bytes"
    for name in ("int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn",
                 "float6_e3m2fn")
}
refused_names.update({
    "float": "is ambiguous; pick 'float32' or 'float64'",
    "int": "is ambiguous; pick 'int32' or 'int64'",
    "complex": "is ambiguous; pick 'complex64' or 'complex128'",
})

# NumPy's C-named types that have the layout of a sized one (both are 64-bit wherever kina runs).
cdef dict numpy_aliases = {"longlong": "int64", "ulonglong": "uint64", "bool_": "bool"}


def _dtype_named(name: str) -> DType:
    """What pickles of dtypes call."""
    return by_name[name]


def all_dtypes() -> tuple[DType, ...]:
    """Every dtype of kina, in the order of the table."""
    return tuple(table)


cdef DType dtype_by_id(int id):
    if not 0 <= id < DTYPE_COUNT:
        raise DTypeError(f"no dtype has the index {id}")
    return <DType> table[id]


# The name that was looked up last, most often a constant of the program, and its dtype.
cdef object recent_name = None
cdef DType recent_dtype = None


cdef DType as_dtype(object spelling):
    global recent_name, recent_dtype
    if type(spelling) is DType:
        return <DType> spelling
    if spelling is recent_name and spelling is not None:
        return recent_dtype
    if isinstance(spelling, str):
        found = dtype_of_name(spelling, spelling)
        if type(spelling) is str:
            recent_name, recent_dtype = spelling, found
        return found
    if isinstance(spelling, type):
        return dtype_of_type(spelling)
    # An object can only be a NumPy dtype if its maker has loaded NumPy.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(spelling, numpy.dtype):
        if not spelling.isnative:
            raise DTypeError(
                f"dtype {spelling.str!r} is byte-swapped; kina stores native byte order: "
                f"convert with .astype({spelling.newbyteorder('=').name!r})"
            )
        return dtype_of_type(spelling.type)
    raise DTypeError(
        f"a dtype is a kina dtype, a name such as 'float32' or a NumPy dtype, not {type(spelling).__name__}"
    )


cdef DType dtype_of_name(str name, object given):
    found = by_name.get(name)
    if found is not None:
        return <DType> found
    reason = refused_names.get(name)
    if reason is not None:
        raise DTypeError(f"dtype {name!r} {reason}")
    raise DTypeError(f"unknown dtype {given!r}; kina has "
                     f"{', '.join([(<DType> each).name for each in table])}")


cdef DType dtype_of_type(object kind):
    cdef str name = kind.__name__
    if kind is bool:
        return dtype_by_id(DTYPE_BOOL)
    if kind is float or kind is int or kind is complex:
        return dtype_of_name(name, kind)
    if kind.__module__ == "numpy" or kind.__module__ == "ml_dtypes":
        return dtype_of_name(numpy_aliases.get(name, name), name)
    raise DTypeError(f"{kind.__module__}.{name} is not the type of a dtype")


cdef DType dtype_from_dlpack(uint8_t code, uint8_t bits, uint16_t lanes):
    cdef DType dtype
    if code < CODES and bits & 7 == 0 and bits >> 3 <= LARGEST_NBYTES and by_code[code][bits >> 3] != NULL:
        dtype = <DType> by_code[code][bits >> 3]
        if lanes == 1:
            return dtype
        raise DTypeError(f"dtype {dtype.name} with lanes={lanes}: vector types are not supported")
    raise DTypeError(f"dtype {dlpack_name(code, bits)} (code={code}, bits={bits}, lanes={lanes}) is not "
                     f"supported")


cdef str dlpack_name(int code, int bits):
    prefix = {CODE_INT: "int", CODE_UINT: "uint", CODE_FLOAT: "float", CODE_BFLOAT: "bfloat",
              CODE_COMPLEX: "complex"}.get(code)
    if prefix is not None:
        return f"{prefix}{bits}"
    names = {3: "opaque handle", CODE_BOOL: f"{bits}-bit bool", 15: "float6_e2m3fn", 16: "float6_e3m2fn",
             17: "float4_e2m1fn"}
    if CODE_FLOAT8_FIRST <= code <= CODE_FLOAT8_LAST:
        return f"{(<DType> table[DTYPE_FLOAT8_FIRST + code - CODE_FLOAT8_FIRST]).name} of {bits} bits"
    return names.get(code, "of unknown code")


# Scalars --------------------------------------------------------------------------------------------------


cdef object refusal(DType dtype, object value, str why):
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return ArgumentError(f"{type(value).__name__} {text} cannot become {dtype.name}: {why}")


cdef bint is_numpy_scalar(object value):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


cdef int pack_integer(DType dtype, object value, void *out) except -1:
    cdef int overflow = 0
    cdef int64_t signed
    cdef int64_t limit = 1LL << (dtype.bits - 1) if dtype.bits < 64 else 0
    cdef uint64_t unsigned
    if type(value) is not int:
        if isinstance(value, bool):
            raise refusal(dtype, value, "a bool is not an integer here")
        try:
            value = PyNumber_Index(value)
        except TypeError:
            raise refusal(dtype, value, "an integer is needed") from None
    if dtype.code == CODE_UINT:
        try:
            unsigned = PyLong_AsUnsignedLongLong(value)
        except OverflowError:
            overflow = 1
        if overflow or (dtype.bits < 64 and unsigned >> dtype.bits != 0):
            raise refusal(dtype, value, f"the range is 0 to {2 ** <object> dtype.bits - 1}")
        memcpy(out, &unsigned, dtype.itemsize)  # little-endian: the low bytes come first
    else:
        signed = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow or (dtype.bits < 64 and not -limit <= signed < limit):
            half = 2 ** <object> (dtype.bits - 1)
            raise refusal(dtype, value, f"the range is {-half} to {half - 1}")
        memcpy(out, &signed, dtype.itemsize)
    return dtype.itemsize


cdef object out_of_range(DType dtype, object value):
    if dtype.code == CODE_COMPLEX:
        return refusal(dtype, value, f"the range of its parts is {-LARGEST_FLOAT32!r} to {LARGEST_FLOAT32!r}")
    if dtype.id == DTYPE_FLOAT16:
        most = 65504.0
    elif dtype.id == DTYPE_BFLOAT16:
        most = LARGEST_BFLOAT16
    elif dtype.id == DTYPE_FLOAT32:
        most = LARGEST_FLOAT32
    else:
        import ml_dtypes

        finite = ml_dtypes.finfo(dtype.numpy.type)
        return refusal(dtype, value, f"the range is {float(finite.min)!r} to {float(finite.max)!r}")
    return refusal(dtype, value, f"the range is {-most!r} to {most!r}")


cdef double as_double(DType dtype, object value, object part) except? -1.0:
    """Of a NumPy scalar, or of a part of it: a longdouble may be finite and its float64 not."""
    cdef double wide = float(part)
    if isinf(wide) and part != wide:
        raise refusal(dtype, value, "it is beyond float64")
    return wide


cdef double as_real(DType dtype, object value) except? -1.0:
    if isinstance(value, bool):
        raise refusal(dtype, value, "a bool is not a number here")
    if not isinstance(value, (float, int)):
        if is_numpy_scalar(value) and (value.dtype.kind in "fiu" or type(value).__module__ == "ml_dtypes"):
            return as_double(dtype, value, value)
        else:
            try:
                value = PyNumber_Index(value)
            except TypeError:
                raise refusal(dtype, value, "a real number is needed") from None
    try:
        return PyFloat_AsDouble(value)
    except OverflowError:
        raise refusal(dtype, value, "it is beyond float64") from None


cdef uint16_t round_to_bfloat16(double value) noexcept nogil:
    cdef float nearest = <float> value
    cdef double back = <double> nearest
    cdef uint32_t bits
    memcpy(&bits, &nearest, 4)
    if nearest != nearest:
        return <uint16_t> ((bits >> 16) | 0x40)  # quiet, sign and upper payload kept
    if back != value:
        # Round to odd in float32 first, so that the second rounding sees on which side the value lies.
        if (back > value) == (back > 0):
            bits -= 1
        bits |= 1
    return <uint16_t> ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


cdef int pack_float(DType dtype, object value, void *out) except -1:
    cdef double wide = as_real(dtype, value)
    cdef bint fits = True
    cdef float single
    cdef uint16_t half
    if dtype.id == DTYPE_FLOAT64:
        memcpy(out, &wide, 8)
    elif dtype.id == DTYPE_FLOAT32:
        single = <float> wide
        fits = isfinite(single)
        memcpy(out, &single, 4)
    elif dtype.id == DTYPE_BFLOAT16:
        half = round_to_bfloat16(wide)
        fits = half & 0x7F80 != 0x7F80
        memcpy(out, &half, 2)
    elif dtype.id == DTYPE_FLOAT16:
        try:
            PyFloat_Pack2(wide, <char *> out, 1)
        except OverflowError:
            fits = False
    else:
        rounded = dtype.numpy.type(wide)
        fits = isfinite(<double> float(rounded))
        octets = rounded.tobytes()
        memcpy(out, <const char *> octets, 1)
    if not fits and isfinite(wide):
        raise out_of_range(dtype, value)
    return dtype.itemsize


cdef int pack_complex(DType dtype, object value, void *out) except -1:
    # Pairs, not C's complex numbers: making one of inf and inf gives NaN, for it multiplies by i.
    cdef double wide[2]
    cdef float narrow[2]
    cdef int i
    if isinstance(value, complex) or (is_numpy_scalar(value) and value.dtype.kind == "c"):
        wide[0] = as_double(dtype, value, value.real)
        wide[1] = as_double(dtype, value, value.imag)
    else:
        wide[0] = as_real(dtype, value)
        wide[1] = 0
    if dtype.id == DTYPE_COMPLEX128:
        memcpy(out, wide, 16)
        return 16
    for i in range(2):
        narrow[i] = <float> wide[i]
        if isfinite(wide[i]) and not isfinite(narrow[i]):
            raise out_of_range(dtype, value)
    memcpy(out, narrow, 8)
    return 8


cdef int pack_bool(DType dtype, object value, void *out) except -1:
    if not isinstance(value, bool) and not (is_numpy_scalar(value) and value.dtype.kind == "b"):
        raise refusal(dtype, value, "a bool is needed")
    (<uint8_t *> out)[0] = 1 if value else 0
    return 1


cdef int pack_scalar(DType dtype, object value, void *out) except -1:
    if type(value) is TypedScalar:
        if (<TypedScalar> value).dtype is not dtype:
            raise refusal(dtype, value, "typed scalars are not converted")
        memcpy(out, (<TypedScalar> value).raw, dtype.itemsize)
        return dtype.itemsize
    if dtype.code == CODE_INT or dtype.code == CODE_UINT:
        return pack_integer(dtype, value, out)
    if dtype.code == CODE_COMPLEX:
        return pack_complex(dtype, value, out)
    if dtype.code == CODE_BOOL:
        return pack_bool(dtype, value, out)
    return pack_float(dtype, value, out)


cdef object unpack_scalar(DType dtype, const void *data):
    cdef int64_t signed = 0
    cdef uint64_t unsigned = 0
    cdef float single
    cdef double wide
    cdef float narrow_pair[2]
    cdef double wide_pair[2]
    cdef uint32_t bits = 0
    if dtype.code == CODE_UINT or dtype.code == CODE_BOOL:
        memcpy(&unsigned, data, dtype.itemsize)
        return unsigned != 0 if dtype.code == CODE_BOOL else unsigned
    if dtype.code == CODE_INT:
        memcpy(&signed, data, dtype.itemsize)
        signed = <int64_t> (<uint64_t> signed << (64 - dtype.bits)) >> (64 - dtype.bits)  # extends the sign
        return signed
    if dtype.id == DTYPE_FLOAT16:
        return PyFloat_Unpack2(<const char *> data, 1)
    if dtype.id == DTYPE_BFLOAT16:
        memcpy(<char *> &bits + 2, data, 2)
        memcpy(&single, &bits, 4)
        return single
    if dtype.id == DTYPE_FLOAT32:
        memcpy(&single, data, 4)
        return single
    if dtype.id == DTYPE_FLOAT64:
        memcpy(&wide, data, 8)
        return wide
    if dtype.id == DTYPE_COMPLEX64:
        memcpy(narrow_pair, data, 8)
        return PyComplex_FromDoubles(narrow_pair[0], narrow_pair[1])
    if dtype.id == DTYPE_COMPLEX128:
        memcpy(wide_pair, data, 16)
        return PyComplex_FromDoubles(wide_pair[0], wide_pair[1])
    import numpy

    return float(numpy.frombuffer((<const char *> data)[:1], dtype.numpy)[0])


cdef bint making_scalar = False


cdef TypedScalar make_scalar(DType dtype, object value):
    cdef unsigned char raw[16]
    memset(raw, 0, sizeof(raw))
    pack_scalar(dtype, value, raw)
    return scalar_of(dtype, raw)


cdef TypedScalar scalar_of(DType dtype, const unsigned char *raw):
    global making_scalar
    cdef TypedScalar scalar
    making_scalar = True
    try:
        scalar = TypedScalar.__new__(TypedScalar)
    finally:
        making_scalar = False
    scalar.dtype = dtype
    memcpy(scalar.raw, raw, sizeof(scalar.raw))
    return scalar


@cython.final
@cython.no_gc
@cython.freelist(32)
cdef class TypedScalar:
    """TypedScalar()

    One value with its dtype, made by calling a dtype: ``kina.f32(2.0)``. For launches without a signature,
    where a plain number would not say how many bytes it is.

    Attributes
    ----------
    dtype : DType
        The type of the value.
    """

    def __cinit__(self):
        if not making_scalar:
            raise TypeError("a typed scalar is made by calling its dtype: kina.f32(2.0)")

    @property
    def value(self) -> bool | int | float | complex:
        """The value as held, that is after rounding to the dtype, as a Python number."""
        return unpack_scalar(self.dtype, self.raw)

    def __bytes__(self) -> bytes:
        """The bytes of the element, little-endian."""
        return (<const char *> self.raw)[:self.dtype.itemsize]

    def __repr__(self) -> str:
        return f"kina.{self.dtype.name}({self.value!r})"

    def __reduce__(self):
        return _scalar_from_bytes, (self.dtype, bytes(self))


def _scalar_from_bytes(DType dtype not None, bytes octets not None) -> TypedScalar:
    """What pickles of typed scalars call: the very bytes, NaN payloads included."""
    cdef unsigned char raw[16]
    if len(octets) != dtype.itemsize:
        raise ArgumentError(f"{dtype.name} has {dtype.itemsize} bytes, got {len(octets)}")
    memset(raw, 0, sizeof(raw))
    memcpy(raw, <const char *> octets, dtype.itemsize)
    return scalar_of(dtype, raw)


# The names under which kina and this module give the dtypes.
for each in table:
    globals()[(<DType> each).name] = each
    globals()[(<DType> each).short_name] = each
del each
