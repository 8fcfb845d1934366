"""add, multiply and matmul on the host, against NumPy and against exact arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kina
from kina._core.dtype import all_dtypes

CALCULATED = [dtype for dtype in all_dtypes() if not dtype.name.startswith(("complex", "float8"))]
STORED_ONLY = [dtype for dtype in all_dtypes() if dtype not in CALCULATED]


def numbers(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    if dtype is kina.bool:
        return random.integers(0, 2, shape).astype(bool)
    low = 0 if dtype.name.startswith("u") else -20
    return random.integers(low, 20, shape).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", CALCULATED, ids=str)
@pytest.mark.parametrize("name", ["add", "multiply"])
@given(shapes=hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3, min_side=0))
def test_elementwise(dtype, name, shapes):
    a, b = (numbers(shape, dtype, seed) for seed, shape in enumerate(shapes.input_shapes))
    expected = getattr(np, name)(a, b)
    with kina.session("cpu") as host:
        made = getattr(host, name)(host.from_host(a), host.from_host(b))
        got = host.to_host(made)
    assert made.dtype is dtype
    assert got.shape == shapes.result_shape
    assert got.tobytes() == expected.tobytes()


def test_integers_wrap_and_floats_overflow_without_a_word(host):
    big = host.full(2, 127, "i8")
    assert host.to_host(host.add(big, big)).tolist() == [-2, -2]
    huge = host.full(2, 1e38, "f32")
    assert host.to_host(host.multiply(huge, huge)).tolist() == [np.inf, np.inf]
    nan = host.full(2, float("nan"), "f16")
    assert np.isnan(host.to_host(host.add(nan, nan))).all()


def test_strided_operands_and_output(host):
    source = np.arange(24, dtype="f4").reshape(4, 6)
    a = host.from_host(source)
    out = host.zeros((6, 4))
    back = host.add(a[::-1, ::2], a[:, 1::2], out=out[::2].permute(1, 0))
    np.testing.assert_array_equal(host.to_host(out)[::2], (source[::-1, ::2] + source[:, 1::2]).T)
    assert not host.to_host(out)[1::2].any()
    assert back.shape == (4, 3)


def test_in_place(host):
    a = host.full(3, 2)
    assert host.add(a, a, out=a) is a
    host.multiply(a, host.full((), 10), out=a)
    assert host.to_host(a).tolist() == [40, 40, 40]


@pytest.mark.parametrize("name", ["add", "multiply", "matmul"])
def test_operands_of_one_dtype(host, name):
    with pytest.raises(kina.DTypeError, match="float32 and float64; nothing is promoted"):
        getattr(host, name)(host.zeros((2, 2)), host.zeros((2, 2), "f64"))
    with pytest.raises(kina.DTypeError, match="out is float64"):
        getattr(host, name)(host.zeros((2, 2)), host.zeros((2, 2)), out=host.zeros((2, 2), "f64"))


@pytest.mark.parametrize("dtype", STORED_ONLY, ids=str)
@pytest.mark.parametrize("name", ["add", "multiply", "matmul"])
def test_what_is_only_stored(host, dtype, name):
    tensor = host.empty((2, 2), dtype)
    with pytest.raises(kina.DTypeError, match="can be stored"):
        getattr(host, name)(tensor, tensor)


def test_shapes_that_do_not_fit(host):
    with pytest.raises(kina.InvalidShapeError, match="3 and 4 elements") as raised:
        host.add(host.zeros((2, 3)), host.zeros(4))
    assert raised.value.operation == "add"
    for shape in ((2,), (1, 3), (3, 1), ()):
        with pytest.raises(kina.InvalidShapeError, match="out has the shape"):
            host.add(host.zeros(3), host.zeros(3), out=host.zeros(shape))


@pytest.mark.parametrize("name", ["add", "multiply"])
def test_partial_overlap_is_refused(host, name):
    base = host.zeros((4, 4))
    for out in (base[1:], base[:3, ::-1], base.permute(1, 0)[:3]):
        with pytest.raises(kina.InvalidLayoutError, match="overlaps"):
            getattr(host, name)(base[:3], host.zeros((3, 4)), out=out)
        with pytest.raises(kina.InvalidLayoutError, match="overlaps"):
            getattr(host, name)(host.zeros((3, 4)), base[:3], out=out)
    getattr(host, name)(base[:2], base[:2], out=base[2:])  # beside each other is fine


def test_matmul_may_not_overwrite_an_operand(host):
    base = host.zeros((4, 4))
    with pytest.raises(kina.InvalidLayoutError, match="overlaps"):
        host.matmul(base, host.zeros((4, 4)), out=base)
    with pytest.raises(kina.InvalidLayoutError, match="overlaps"):
        host.matmul(host.zeros((4, 4)), base, out=base)


# matmul


@st.composite
def matmul_shapes(draw):
    m, k, n = (draw(st.integers(0, 4)) for _ in range(3))
    batch = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=2, max_side=3, min_side=0))
    a, b = batch.input_shapes
    a = (k,) if draw(st.integers(0, 4)) == 0 else (*a, m, k)
    b = (k,) if draw(st.integers(0, 4)) == 0 else (*b, k, n)
    return a, b


@pytest.mark.parametrize("dtype", CALCULATED, ids=str)
@given(shapes=matmul_shapes(), filled=st.booleans())
def test_matmul(dtype, shapes, filled):
    a, b = (numbers(shape, dtype, seed) for seed, shape in enumerate(shapes))
    # Integers below 2^24 are exact in float64, and in float32 sums too.
    wide = np.matmul(a.astype("f8"), b.astype("f8"))
    with np.errstate(all="ignore"):
        expected = np.matmul(a, b) if dtype.name.startswith(("int", "uint", "bool")) else wide.astype(dtype.numpy)
    with kina.session("cpu") as host:
        out = host.empty(expected.shape, dtype) if filled else None
        if filled and dtype.name.startswith("f"):
            host.add(out, host.full((), float("nan"), dtype), out=out)
        made = host.matmul(host.from_host(a), host.from_host(b), out=out)
        got = host.to_host(made)
    assert made is out if filled else made.dtype is dtype
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


def test_nothing_to_sum_gives_zeros(host):
    out = host.full((10, 10, 432), float("nan"))
    host.matmul(host.zeros((10, 1, 0)).broadcast_to(10, 10, 0), host.zeros((10, 0, 432)), out=out)
    assert not host.to_host(out).any()
    assert host.to_host(host.matmul(host.zeros(0), host.zeros(0))).tolist() == 0


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_floats_are_summed_in_float32(host, name):
    """4096 ones and a half more than float16 or bfloat16 can count in ones."""
    count = 4097
    kind = np.dtype(name if name == "float16" else ml_dtypes.bfloat16)
    row = host.full((1, count), 1, name)
    column = host.full((count, 1), 1, name)
    assert host.to_host(host.matmul(row, column)).astype("f8").item() == np.array(count, "f4").astype(kind).astype("f8")


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((2, 3), (2, 3), "summed axis"),
        ((3,), (2,), "summed axis"),
        ((), (3,), "at least one axis"),
        ((2, 2), (), "at least one axis"),
        ((2, 3, 4), (3, 4, 5), "cannot be broadcast"),
    ],
)
def test_matmul_shapes_that_do_not_fit(host, a, b, words):
    with pytest.raises(kina.InvalidShapeError, match=words):
        host.matmul(host.zeros(a), host.zeros(b))


def test_matmul_of_views(host):
    source = np.arange(12, dtype="i4").reshape(3, 4)
    a = host.from_host(source)
    np.testing.assert_array_equal(host.to_host(host.matmul(a, a.permute(1, 0))), source @ source.T)
    np.testing.assert_array_equal(host.to_host(host.matmul(a[:, ::-2], a[:2, :3])), source[:, ::-2] @ source[:2, :3])
    np.testing.assert_array_equal(
        host.to_host(host.matmul(a.broadcast_to(2, 3, 4), a[0])),
        np.broadcast_to(source, (2, 3, 4)) @ source[0],
    )
