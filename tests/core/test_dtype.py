"""Dtypes: identity, spellings, and the bytes of scalars."""

import copy
import math
import operator
import pickle
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kina
from kina._core.dtype import all_dtypes

ALL = all_dtypes()
INTEGERS = [dtype for dtype in ALL if dtype.name.lstrip("u").startswith("int")]
FP8 = [dtype for dtype in ALL if dtype.name.startswith("float8")]


def each(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=str)


def accepted(spelling):
    """The dtype that kina takes a spelling for, asked through the public face."""
    return kina.empty(0, spelling, device="cpu").dtype


@each(ALL)
def test_every_spelling_is_the_same_object(dtype):
    spellings = [dtype, dtype.name, dtype.short_name, dtype.numpy, dtype.numpy.type]
    assert all(accepted(spelling) is dtype for spelling in spellings)
    assert getattr(kina, dtype.name) is getattr(kina, dtype.short_name) is dtype


def test_the_names_are_those_that_were_promised():
    assert [dtype.short_name for dtype in ALL] == [
        *(
            "f16",
            "bf16",
            "f32",
            "f64",
            "i8",
            "i16",
            "i32",
            "i64",
            "u8",
            "u16",
            "u32",
            "u64",
            "bool_",
            "c64",
            "c128",
        ),
        *(
            "f8_e3m4",
            "f8_e4m3",
            "f8_e4m3b11fnuz",
            "f8_e4m3fn",
            "f8_e4m3fnuz",
            "f8_e5m2",
            "f8_e5m2fnuz",
            "f8_e8m0fnu",
        ),
    ]
    assert [dtype.itemsize for dtype in ALL] == [2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16, *[1] * 8]


@each(ALL)
def test_itemsize_is_numpys(dtype):
    assert dtype.itemsize == dtype.numpy.itemsize
    assert dtype.numpy.name == dtype.name


def test_c_names_of_numpy_are_accepted():
    assert accepted(np.longlong) is kina.int64
    assert accepted(np.dtype("ulonglong")) is kina.uint64
    assert accepted(np.intp) is kina.int64
    assert accepted(bool) is kina.bool is kina.bool_


@each(ALL)
def test_copies_are_the_same_object(dtype):
    assert copy.copy(dtype) is copy.deepcopy(dtype) is pickle.loads(pickle.dumps(dtype)) is dtype


def test_dtypes_cannot_be_made():
    with pytest.raises(TypeError, match="not constructed"):
        kina.DType()
    with pytest.raises(TypeError, match="calling its dtype"):
        kina.TypedScalar()


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        (float, "float32' or 'float64"),
        ("float", "float32' or 'float64"),
        (int, "int32' or 'int64"),
        (complex, "complex64"),
        ("int4", "int4.*smaller than a byte"),
        (ml_dtypes.int4, "int4.*smaller than a byte"),
        (np.dtype(ml_dtypes.float4_e2m1fn), "float4_e2m1fn.*smaller than a byte"),
        (np.dtype(">f4"), "byte-swapped.*float32"),
        (np.dtype("U3"), "unknown dtype 'str_'"),
        (np.dtype(object), "unknown dtype 'object"),
        (np.dtype([("x", "f4")]), "unknown dtype 'void'"),
        (np.longdouble, "unknown dtype 'longdouble'|unknown dtype 'float128'"),
        (np.floating, "unknown dtype 'floating'"),
        ("f4", "unknown dtype 'f4'"),
        ("", "unknown dtype ''"),
        (3, "not int"),
        (None, "not NoneType"),
        (["float32"], "not list"),
        (Fraction, "fractions.Fraction"),
    ],
    ids=repr,
)
def test_what_is_no_dtype_is_refused_by_name(spelling, words):
    with pytest.raises(kina.DTypeError, match=words) as raised:
        kina.empty(0, spelling, device="cpu")
    assert isinstance(raised.value, TypeError)


# Scalars


@each(INTEGERS)
def test_integers_are_checked_at_both_ends(dtype):
    info = np.iinfo(dtype.numpy)
    for value in (info.min, info.max, 0, 1, np.int64(7), dtype.numpy.type(info.max)):
        assert dtype(value).value == value
        assert bytes(dtype(value)) == np.array(value, dtype.numpy).tobytes()
    for value in (int(info.min) - 1, int(info.max) + 1, 1 << 200, -(1 << 200)):
        with pytest.raises(kina.ArgumentError, match=f"{dtype.name}: the range is {info.min} to {info.max}"):
            dtype(value)


@each([dtype for dtype in ALL if dtype is not kina.bool])
@pytest.mark.parametrize("value", [True, np.True_, "1", None, b"1", [1], Fraction(1, 2)], ids=repr)
def test_what_is_no_number_is_refused(dtype, value):
    with pytest.raises(kina.ArgumentError, match=dtype.name):
        dtype(value)


@each(INTEGERS)
@pytest.mark.parametrize("value", [1.0, np.float32(1), 1j], ids=repr)
def test_integers_take_no_floats(dtype, value):
    with pytest.raises(kina.ArgumentError, match="an integer is needed"):
        dtype(value)


@pytest.mark.parametrize("value", [0, 1, 1.0, "yes", np.int8(1), None], ids=repr)
def test_bool_takes_bools_only(value):
    assert kina.bool(True).value is True
    assert kina.bool(np.False_).value is False
    with pytest.raises(kina.ArgumentError, match="a bool is needed"):
        kina.bool(value)


@each([kina.float16, kina.float32, kina.float64])
@given(value=st.floats(width=64))
def test_floats_round_as_numpy_does(dtype, value):
    with np.errstate(all="ignore"):
        expected = np.array(value).astype(dtype.numpy)
    if np.isinf(expected) and not math.isinf(value):
        with pytest.raises(kina.ArgumentError, match="the range is"):
            dtype(value)
        return
    got = dtype(value)
    if math.isnan(value):
        assert math.isnan(got.value)
    else:
        assert bytes(got) == expected.tobytes()


def exact_bfloat16(value: float) -> float:
    """The nearest bfloat16, by exact arithmetic: half to even, beyond the largest finite value infinity."""
    if value == 0 or math.isinf(value):
        return value
    _, exponent = math.frexp(value)
    ulp = Fraction(2) ** max(exponent - 8, -133)  # 8 significant bits; subnormals step by 2**-133
    rounded = round(Fraction(value) / ulp) * ulp
    if abs(rounded) >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


@given(
    value=st.one_of(
        st.floats(allow_nan=False),
        st.floats(width=32, allow_nan=False),
        # around the halfway points, where rounding twice goes wrong
        st.builds(
            lambda high, nudge, sign: (
                sign * (struct.unpack("<f", struct.pack("<I", (high << 16) | 0x8000))[0]) * (1 + nudge)
            ),
            st.integers(0, 0x7F7F),
            st.sampled_from([0.0, 2.0**-52, -(2.0**-53), 2.0**-30, -(2.0**-30)]),
            st.sampled_from([1.0, -1.0]),
        ),
    )
)
def test_bfloat16_rounds_once_to_even(value):
    expected = exact_bfloat16(value)
    if math.isinf(expected) and not math.isinf(value):
        with pytest.raises(kina.ArgumentError, match="the range is"):
            kina.bf16(value)
    else:
        assert kina.bf16(value).value == expected


def test_bfloat16_keeps_nan_and_sign():
    for payload in (0x7FF8000000000000, 0x7FF0000000000001, 0xFFF8000000000000, 0xFFFFFFFFFFFFFFFF):
        value = struct.unpack("<d", struct.pack("<Q", payload))[0]
        bits = struct.unpack("<H", bytes(kina.bf16(value)))[0]
        assert math.isnan(kina.bf16(value).value)
        assert bits >> 15 == payload >> 63
    assert bytes(kina.bf16(-0.0)) == b"\x00\x80"


LARGEST = {
    kina.f16: (65504.0, 65520.0),
    kina.bf16: (3.3895313892515355e38, 3.39617752923046e38),
    kina.f32: (3.4028234663852886e38, 3.4028235677973366e38),
}


@each(LARGEST)
def test_a_finite_number_never_becomes_infinite(dtype):
    """From halfway between the largest finite value and the next power of two on, where IEEE rounding would."""
    largest, beyond = LARGEST[dtype]
    for sign in (1, -1):
        assert dtype(sign * math.nextafter(beyond, 0)).value == sign * largest
        for value in (beyond, 1e300, np.float64(beyond), 10**60, np.float64(1e300)):
            with pytest.raises(
                kina.ArgumentError, match=rf"cannot become {dtype.name}: the range is -.* to "
            ) as caught:
                dtype(sign * value)
            assert f"the range is {-largest!r} to {largest!r}" in str(caught.value)
        assert dtype(sign * math.inf).value == dtype(sign * np.float32(math.inf)).value == sign * math.inf
    assert math.isnan(dtype(math.nan).value)


def test_what_only_a_long_double_holds_is_out_of_range():
    huge = np.longdouble("1e4000")
    if np.isfinite(huge):  # else a long double is a double here
        with pytest.raises(kina.ArgumentError, match="beyond float64"):
            kina.f64(huge)
        with pytest.raises(kina.ArgumentError, match="beyond float64"):
            kina.c128(np.clongdouble(huge))
    assert kina.f64(np.longdouble(math.inf)).value == math.inf


@pytest.mark.parametrize("value", [1e300, complex(0, -1e300), complex(math.inf, 1e39), np.complex128(1e39)], ids=repr)
def test_parts_of_complex_numbers_have_a_range(value):
    with pytest.raises(kina.ArgumentError, match=r"the range of its parts is -3\.4028234663852886e"):
        kina.c64(value)
    assert kina.c128(value).value == value


@each([kina.complex64, kina.complex128])
@pytest.mark.parametrize(
    "value",
    [complex(math.inf, -math.inf), complex(0.0, math.inf), complex(-math.inf, -0.0), complex(-0.0, 1)],
    ids=repr,
)
def test_parts_of_complex_numbers_do_not_mix(dtype, value):
    for same in (value, np.complex128(value)):
        assert bytes(dtype(same)) == np.array(value, dtype.numpy).tobytes()
    assert repr(dtype(value).value) == repr(value)


@pytest.mark.parametrize(
    "value", [3, 2**60, np.float32(1.5), np.int8(-3), np.float64(2), ml_dtypes.bfloat16(1.5)], ids=repr
)
def test_floats_take_ints_and_numpy_scalars(value):
    assert kina.f64(value).value == float(value)


def test_floats_refuse_complex_and_what_float64_cannot_hold():
    with pytest.raises(kina.ArgumentError, match="a real number is needed"):
        kina.f32(1j)
    with pytest.raises(kina.ArgumentError, match="a real number is needed"):
        kina.f32(np.complex64(1))
    with pytest.raises(kina.ArgumentError, match="beyond float64"):
        kina.f32(10**400)


@each([kina.complex64, kina.complex128])
@pytest.mark.parametrize("value", [1 + 2j, 3, 2.5, np.complex64(1j), np.float32(0.5)], ids=repr)
def test_complex(dtype, value):
    assert dtype(value).value == complex(value)
    assert bytes(dtype(value)) == np.array(value, dtype.numpy).tobytes()


@each(FP8)
@pytest.mark.parametrize("value", [0.5, 1, 3.3, 1e6, -2.0, math.nan, math.inf, np.float16(2)], ids=repr)
def test_fp8_is_ml_dtypes(dtype, value):
    if math.isfinite(value) and not np.isfinite(dtype.numpy.type(float(value)).astype(np.float32)):
        with pytest.raises(kina.ArgumentError, match=f"cannot become {dtype.name}: the range is "):
            dtype(value)
        return
    assert bytes(dtype(value)) == dtype.numpy.type(float(value)).tobytes()


@each(ALL)
def test_typed_scalars_survive_pickling(dtype):
    scalar = dtype(True if dtype is kina.bool else 1)
    again = pickle.loads(pickle.dumps(scalar))
    assert again.dtype is dtype
    assert bytes(again) == bytes(scalar)
    assert repr(scalar) == f"kina.{dtype.name}({scalar.value!r})"


def test_a_typed_scalar_is_taken_by_its_own_dtype_only():
    assert kina.f32(kina.f32(2.5)).value == 2.5
    with pytest.raises(kina.ArgumentError, match="not converted"):
        kina.f64(kina.f32(2.5))


def test_a_tensor_is_no_scalar(host):
    with pytest.raises(kina.ArgumentError):
        kina.i32(host.zeros((), "i32"))
    with pytest.raises(TypeError):
        operator.index(host.zeros((), "i32"))
