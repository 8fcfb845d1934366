"""Signatures: their words, what of them must agree with the kernel, and the bytes that a launch makes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from helpers.kernels import (
    KERNELS,
    LAYOUTS,
    MIXED,
    element,
    module_text,
    offsets_of,
    sized_entry,
    write_args_entry,
)

import kina
from kina._core.dtype import all_dtypes
from kina.cuda import Signature

ONE = kina.LaunchConfig(1, 1)
DTYPES = all_dtypes()
SIZED = module_text(*(sized_entry(f"size_{size}", size) for size in (1, 2, 4, 8, 16)), sized_entry("nothing"))


@pytest.fixture
def raw(session):
    with session.raw("signature") as block:
        yield block


# Words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["f32[]", "mut f32[]", "mut  f32 []", "mut\tfloat32[ ]", "f32", " f32 , u8 ", "", "  ",
     "f32[],mut i8[],bool,f8_e5m2", "f32,\n  f32"],
)  # fmt: skip
def test_what_can_be_read(text):
    assert Signature(text).text == text
    assert repr(text) in repr(Signature(text))


@pytest.mark.parametrize(
    "text",
    ["f33", "mut f32", "mut", "mut mut f32[]", "f32[", "f32]", "f32[]]", "f32[][]", "f32[4]", "*f32", "f32*",
     "const f32[]", "f32 mut[]", "Mut f32[]", "mutf32[]", "f32[] mut", ",", "f32,", ",f32", "f32,,f32",
     "f32;f32", "f32 f32", "[]", "float",
     "int", "float[]", "double", "void*", "int4[]", "float4_e2m1fn", "f32\0", "\uff4632"],
)  # fmt: skip
def test_nonsense_is_shown(text):
    with pytest.raises(kina.ArgumentError) as caught:
        Signature(text)
    assert "parameter" in str(caught.value)
    assert caught.value.operation == "function"


@pytest.mark.parametrize("text", [None, b"f32", 3, ["f32"]])
def test_a_signature_is_text(text):
    with pytest.raises(TypeError):
        Signature(text)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_by_both_names(raw, dtype):
    module = raw.module(SIZED)
    for name in (dtype.name, dtype.short_name):
        assert module.function(f"size_{dtype.itemsize}", name).signature.text == name
        for word in (f"{name}[]", f"mut {name}[]"):
            assert module.function("size_8", word).signature.text == word
            with pytest.raises(kina.ArgumentError, match="takes 4 bytes in the kernel, 8 by its signature"):
                module.function("size_4", word)
        for size in {1, 2, 4, 8, 16} - {dtype.itemsize}:
            with pytest.raises(kina.ArgumentError, match=rf"takes {size} bytes in the kernel, {dtype.itemsize} by"):
                module.function(f"size_{size}", name)


@pytest.mark.parametrize(
    ("entry", "text", "match"),
    [
        ("saxpy", "mut f32[], f32[], f32", r"has 3 parameter\(s\), the kernel 4"),
        ("saxpy", "mut f32[], f32[], f32, u32, u32", r"has 5 parameter\(s\), the kernel 4"),
        ("saxpy", "", r"has 0 parameter\(s\), the kernel 4"),
        ("trap", "f32", r"has 1 parameter\(s\), the kernel 0"),
        ("saxpy", "mut f32[], f32[], f64, u32", "parameter 2 of saxpy takes 4 bytes in the kernel, 8"),
        ("saxpy", "mut f32[], f32, f32, u32", "parameter 1 of saxpy takes 8 bytes in the kernel, 4"),
        ("saxpy", "mut f32[], f32[], f32[], u32", "parameter 2 of saxpy takes 4 bytes in the kernel, 8"),
    ],
)
def test_a_signature_that_contradicts_the_kernel(raw, entry, text, match):
    module = raw.module(KERNELS)
    with pytest.raises(kina.ArgumentError, match=match) as caught:
        module.function(entry, text)
    assert caught.value.operation == "function"
    assert module.function("saxpy", "mut f32[], f32[], f32, u32").parameters == (
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 4),
    )


@pytest.mark.parametrize(
    "wrong", [["f32"], b"f32", 3, Signature("f32"), kina.f32], ids=lambda value: type(value).__name__
)
def test_a_function_takes_its_signature_as_text(raw, wrong):
    module = raw.module(SIZED)
    with pytest.raises(TypeError):
        module.function("size_4", wrong)
    assert module.function("size_4").signature is None
    assert module.function("size_4", "f32").signature.text == "f32"


# Bytes ----------------------------------------------------------------------------------------------------

EXTREMES = {
    "u8": [0, 1, 255],
    "u16": [0, 1, 65535],
    "u32": [0, 1, 2**31, 2**32 - 1],
    "u64": [0, 1, 2**63, 2**64 - 1],
    "i8": [0, 1, -1, 127, -128],
    "i16": [0, -1, 32767, -32768],
    "i32": [0, -1, 2**31 - 1, -(2**31)],
    "i64": [0, -1, 2**63 - 1, -(2**63)],
    "f16": [0.0, -0.0, 1.0, -2.5, 65504.0, 6e-8, 0.1, math.inf, -math.inf, 1],
    "bf16": [0.0, -0.0, 1.0, 0.1, 3.38e38, 1e-40, math.inf, -math.inf, 7],
    "f32": [0.0, -0.0, 0.1, 1e-45, 3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf, 2**24],
    "f64": [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 2**53],
    "bool": [True, False],
    "c64": [1 + 2j, -0.5j, complex(math.inf, -0.0)],
}  # fmt: skip


class Written:
    """Launches `write_args_...(u8 *to, ...)` and reads what arrived on the device."""

    def __init__(self, session, raw, kinds, signature=True):
        self.session = session
        self.kinds = kinds
        self.offsets = offsets_of(kinds)
        name = f"write_args_{'_'.join(kinds)}"
        words = ", ".join(["mut u8[]", *kinds]) if signature else None
        self.function = raw.module(module_text(write_args_entry(name, kinds))).function(name, words)
        self.to = session.zeros(-(-(self.offsets[-1] + 8) // 8) * 8, "u8")
        self.first = self.to if signature else raw.mut(self.to)

    def __call__(self, *values) -> list[bytes]:
        self.function.launch(ONE, self.first, *values)
        data = self.session.to_host(self.to).tobytes()
        return [data[at : at + LAYOUTS[kind]] for kind, at in zip(self.kinds, self.offsets, strict=True)]


@pytest.mark.parametrize("kind", sorted(EXTREMES))
def test_scalars_arrive_bit_by_bit(session, raw, kind):
    written = Written(session, raw, (kind,))
    for value in EXTREMES[kind]:
        assert written(value) == [element(kind, value)], value


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_nan_stays_nan(session, raw, kind):
    (octets,) = Written(session, raw, (kind,))(math.nan)
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}[kind]
    assert np.isnan(np.frombuffer(octets, dtype)[0])


@pytest.mark.parametrize(
    ("kind", "value"), [("f16", 65520.0), ("bf16", 3.4e38), ("f32", 3.5e38), ("f32", 1e300), ("f32", 10**300)]
)
def test_a_finite_float_never_becomes_infinite(session, raw, kind, value):
    """As `kina.f32(1e300)` is refused; an infinity itself is none of that."""
    written = Written(session, raw, (kind,))
    name = getattr(kina, kind).name
    for beyond in (value, -value, np.float64(value)):
        with pytest.raises(
            kina.ArgumentError, match=f"argument 1 of .* is a scalar {name}: .* the range is -"
        ) as caught:
            written(beyond)
        assert caught.value.operation == "launch"
    for infinite in (math.inf, -math.inf, np.float32(math.inf)):
        assert written(infinite) == [element(kind, infinite)]


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (3.4028235e38, 3.4028234663852886e38),
        (3.40282356e38, 3.4028234663852886e38),
        (math.nextafter(3.4028235677973366e38, 0), 3.4028234663852886e38),
        (3.4028235677973366e38, None),
    ],
)
def test_rounding_at_the_edge_of_f32(session, raw, value, nearest):
    """Half a unit beyond the largest is where infinity would begin."""
    written = Written(session, raw, ("f32",))
    if nearest is None:
        with pytest.raises(kina.ArgumentError, match="the range is"):
            written(value)
    else:
        assert written(value) == [element("f32", nearest)]


def test_every_kind_at_once(session, raw):
    """Sizes and alignments alternate; the padding between is zero."""
    written = Written(session, raw, MIXED)
    values = [EXTREMES[kind][(i + 1) % len(EXTREMES[kind])] for i, kind in enumerate(MIXED)]
    assert written(*values) == [element(kind, value) for kind, value in zip(MIXED, values, strict=True)]
    assert tuple(written.function.parameters) == (
        (0, 8), *((at, LAYOUTS[kind]) for kind, at in zip(MIXED, written.offsets, strict=True)),
    )  # fmt: skip
    data = bytearray(session.to_host(written.to).tobytes())
    assert int.from_bytes(data[:8], "little") == raw.unsafe_address(raw.ref(written.to))
    for start, length in written.function.parameters:
        data[start : start + length] = bytes(length)
    assert not any(data)


def test_every_kind_at_once_without_a_signature(session, raw):
    written = Written(session, raw, MIXED, signature=False)
    values = [EXTREMES[kind][-1] for kind in MIXED]
    expected = [element(kind, value) for kind, value in zip(MIXED, values, strict=True)]
    assert written(*(getattr(kina, "bool_" if kind == "bool" else kind)(value)
                     for kind, value in zip(MIXED, values, strict=True))) == expected  # fmt: skip
    assert written(*(bytes(len(octets)) for octets in expected)) == [bytes(len(octets)) for octets in expected]
    assert written(*expected) == expected
    numpy = {kind: getattr(kina, "bool_" if kind == "bool" else kind).numpy.type for kind in MIXED}
    assert written(*(numpy[kind](value) for kind, value in zip(MIXED, values, strict=True))) == expected


def test_numpy_scalars_convert_by_value(session, raw):
    """With a signature the declared type counts, whatever width the NumPy scalar has."""
    written = Written(session, raw, ("u8", "i64", "f32", "f64", "bool", "f16"))
    values = (np.int64(200), np.uint8(7), np.float64(0.1), np.float32(0.5), np.bool_(True), np.float32(2.5))
    expected = [
        element("u8", 200),
        element("i64", 7),
        element("f32", 0.1),
        element("f64", 0.5),
        b"\1",
        element("f16", 2.5),
    ]
    assert written(*values) == expected
    assert written(kina.u8(200), kina.i64(7), kina.f32(0.1), kina.f64(0.5), kina.bool_(True), kina.f16(2.5)) == expected


def test_ints_that_are_no_int(session, raw):
    """Whatever has __index__ is an integer, and an int subclass is one too."""

    class Index:
        def __index__(self):
            return 41

    class Int(int):
        pass

    written = Written(session, raw, ("u8", "i32", "f32"))
    assert written(Index(), Int(-3), Int(2)) == [b"\x29", element("i32", -3), element("f32", 2.0)]


def test_a_struct_goes_as_bytes(session, raw):
    function = raw.module(KERNELS).function("write_args")  # u8 *, u8, u16, f32, f64, 24 bytes aligned to 8
    to = session.zeros(48, "u8")
    packed = bytes(range(100, 124))
    function.launch(ONE, raw.mut(to), kina.u8(9), np.uint16(515), kina.f32(-0.0), np.float64(0.1), packed)
    data = session.to_host(to).tobytes()
    assert data[8:9] == b"\x09"
    assert data[10:12] == b"\x03\x02"
    assert data[12:16] == element("f32", -0.0)
    assert data[16:24] == element("f64", 0.1)
    assert data[24:] == packed


def test_a_view_is_passed_by_its_first_element(session, raw):
    """Whatever its strides; the kernel gets them as arguments if it wants them."""
    function = raw.module(module_text(write_args_entry("write_args_p", ("u64",)))).function("write_args_p")
    x = session.from_host(np.arange(24, dtype=np.float32).reshape(4, 6))
    to = session.zeros(2, "u64")
    base = raw.unsafe_address(raw.ref(x))
    for view, offset in (
        (x, 0),
        (x[1:], 24),
        (x[2, 3:], 60),
        (x[:, 2], 8),
        (x[::-1], 72),
        (x[..., ::-2], 20),
    ):
        ref = raw.ref(view)
        assert raw.unsafe_address(ref) - base == offset
        function.launch(ONE, raw.mut(to), ref)
        assert session.to_host(to)[1] - base == offset
