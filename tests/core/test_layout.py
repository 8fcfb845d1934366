"""Layouts and views against NumPy: the same shapes, strides, elements and flags for the same requests."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kina

SHAPES = hnp.array_shapes(min_dims=0, max_dims=7, min_side=0, max_side=4)


@st.composite
def strided_arrays(draw, min_dims=0):
    """Arrays with gaps, negative and zero strides, axes of any order, of one element and of none."""
    shape = draw(hnp.array_shapes(min_dims=min_dims, max_dims=5, min_side=0, max_side=4))
    grown = tuple(extent * draw(st.integers(1, 2)) + draw(st.integers(0, 1)) for extent in shape)
    dtype = draw(st.sampled_from(["int8", "int16", "float32", "complex128"]))
    base = np.arange(int(np.prod(grown)), dtype="int16").astype(dtype).reshape(grown)
    cuts = (
        slice(None, extent) if draw(st.booleans()) else slice(None, None, draw(st.sampled_from([-1, -2, 2])))
        for extent in shape
    )
    array = base[(*cuts, Ellipsis)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()) and array.ndim < 6:
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


@st.composite
def indices(draw, shape):
    """Basic indices: ints, slices of any step, None, an ellipsis."""
    parts = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        if extent and draw(st.booleans()):
            parts.append(draw(st.integers(-extent, extent - 1)))
        else:
            bounds = st.one_of(st.none(), st.integers(-6, 6))
            parts.append(slice(draw(bounds), draw(bounds), draw(st.sampled_from([None, 1, 2, 3, -1, -2, -5]))))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
        if parts[-1] is not Ellipsis and draw(st.booleans()):
            # what follows the ellipsis counts from the end, where an int may be out of bounds: keep slices
            place = parts.index(Ellipsis)
            parts[place + 1 :] = [part for part in parts[place + 1 :] if isinstance(part, slice)]
    for _ in range(draw(st.integers(0, 2))):
        parts.insert(draw(st.integers(0, len(parts))), None)
    return tuple(parts)


def span(array):
    """NumPy's view of the bytes touched, relative to the first element."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return low - array.__array_interface__["data"][0], high - array.__array_interface__["data"][0]


def agree(host, tensor, array):
    """Everything that a layout is, and the elements."""
    assert tensor.shape == array.shape
    assert (tensor.ndim, tensor.size, tensor.nbytes) == (array.ndim, array.size, array.nbytes)
    assert tensor.is_contiguous == array.flags.c_contiguous
    for axis, extent in enumerate(array.shape):
        if extent > 1 and array.size:
            assert tensor.strides[axis] * array.itemsize == array.strides[axis]
    got = host.to_host(tensor)
    assert got.flags.c_contiguous
    assert got.flags.owndata or got.size == 0
    np.testing.assert_array_equal(got, array)


def with_host(check):
    with kina.session("cpu") as host:
        check(host)


@given(array=strided_arrays())
def test_adoption_shows_the_same_layout(array):
    def check(host):
        tensor = host.adopt(array)
        agree(host, tensor, array)
        if array.size:
            back = np.from_dlpack(tensor)
            assert back.__array_interface__["data"][0] == array.__array_interface__["data"][0]
            assert span(back) == span(array)

    with_host(check)


@given(data=st.data())
def test_basic_indexing(data):
    array = data.draw(strided_arrays(min_dims=1))
    key = data.draw(indices(array.shape))
    try:
        expected = array[key]
    except IndexError:
        with kina.session("cpu") as host, pytest.raises(IndexError):
            host.adopt(array)[key]
        return
    if not isinstance(expected, np.ndarray):
        expected = array[(*key, Ellipsis)] if Ellipsis not in key else np.asarray(expected)
    with_host(lambda host: agree(host, host.adopt(array)[key], expected))


@given(data=st.data())
def test_indexing_without_a_tuple(data):
    array = data.draw(strided_arrays(min_dims=1))
    assume(array.shape[0] > 0)
    key = data.draw(
        st.one_of(st.integers(-array.shape[0], array.shape[0] - 1), st.none(), st.just(Ellipsis), st.slices(4))
    )
    with_host(lambda host: agree(host, host.adopt(array)[key], array[(key, Ellipsis) if isinstance(key, int) else key]))


@given(data=st.data())
def test_permute(data):
    array = data.draw(strided_arrays())
    axes = data.draw(st.permutations(range(array.ndim)))
    signed = [axis - array.ndim if data.draw(st.booleans()) else axis for axis in axes]

    def check(host):
        tensor = host.adopt(array)
        agree(
            host,
            tensor.permute(*signed) if array.ndim != 1 else tensor.permute(signed),
            array.transpose(axes),
        )
        agree(host, tensor.permute(tuple(signed)), array.transpose(axes))

    with_host(check)


@given(data=st.data())
def test_broadcast_to(data):
    array = data.draw(strided_arrays())
    shape = tuple(
        data.draw(st.integers(0, 3)) if extent == 1 and data.draw(st.booleans()) else extent for extent in array.shape
    )
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2))) + shape
    with_host(lambda host: agree(host, host.adopt(array).broadcast_to(shape), np.broadcast_to(array, shape)))


@given(data=st.data())
def test_broadcast_to_is_refused_where_numpy_refuses(data):
    array = data.draw(strided_arrays())
    shape = data.draw(SHAPES)
    try:
        expected = np.broadcast_to(array, shape)
    except ValueError:
        expected = None

    def check(host):
        if expected is None:
            with pytest.raises(kina.InvalidShapeError):
                host.adopt(array).broadcast_to(shape)
        else:
            agree(host, host.adopt(array).broadcast_to(shape), expected)

    with_host(check)


@st.composite
def refactored(draw, size):
    """A shape of `size` elements."""
    if size == 0:
        shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda shape: 0 in shape))
        return tuple(shape)
    shape, left = [], size
    while left > 1:
        factor = draw(st.sampled_from([factor for factor in range(2, left + 1) if left % factor == 0]))
        shape.append(factor)
        left //= factor
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@given(data=st.data())
def test_reshape_is_a_view_exactly_where_numpy_makes_one(data):
    array = data.draw(strided_arrays())
    shape = data.draw(refactored(array.size))
    try:
        expected = array.reshape(shape, copy=False)
    except ValueError:
        expected = None

    def check(host):
        tensor = host.adopt(array)
        if expected is None:
            with pytest.raises(kina.NonContiguousError, match="does not copy"):
                tensor.reshape(shape)
        else:
            agree(host, tensor.reshape(shape), expected)

    with_host(check)


@given(data=st.data())
def test_reshape_works_out_one_extent(data):
    array = np.arange(data.draw(st.integers(1, 48)))
    shape = list(data.draw(refactored(array.size).filter(bool)))
    shape[data.draw(st.integers(0, len(shape) - 1))] = -1
    with_host(lambda host: agree(host, host.adopt(array).reshape(*shape), array.reshape(shape)))


@given(shape=SHAPES)
def test_new_tensors_are_in_c_order(shape):
    expected = np.zeros(shape, "float64")

    def check(host):
        for tensor in (host.empty(shape, "f64"), host.zeros(shape, "f64"), host.full(shape, 0, "f64")):
            assert tensor.is_contiguous
            assert tensor.shape == shape
            if expected.size:
                assert tuple(step * 8 for step in tensor.strides) == expected.strides
        agree(host, host.zeros(shape, "f64"), expected)

    with_host(check)


def test_strides_of_an_empty_shape_are_numpys(host):
    assert host.empty((2, 0, 3)).strides == (3, 3, 1)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (-1, "axis 0 has the negative extent -1"),
        ((2, -3), "axis 1 has the negative extent -3"),
        ((2**32, 2**32), "elements overflows"),
        ((2**31, 2**31, 0, 4), "elements overflows"),
        (2**62, "bytes overflows"),
        (2**64, "overflows 64 bits"),
        (1.0, "not float"),
        ((1.0,), "ints, got float"),
        (True, "ints, got bool"),
        (((1,),), "ints, got tuple"),
        ("12", "not str"),
        (None, "not NoneType"),
        ({1: 2}, "not dict"),
        ((1,) * 65, "65 axes are more than the 64"),
    ],
    ids=repr,
)
def test_bad_shapes(host, shape, words):
    with pytest.raises(kina.InvalidShapeError, match=words) as raised:
        host.empty(shape)
    assert isinstance(raised.value, ValueError)
    assert raised.value.operation == "empty"


@pytest.mark.parametrize("shape", [3, (3,), [3], np.int64(3), (np.uint8(3),), np.array([3]), range(3, 4)], ids=repr)
def test_good_shapes(host, shape):
    assert host.empty(shape).shape == (3,)


def test_sixty_four_axes(host):
    tensor = host.zeros((1,) * 60 + (2, 1, 2, 1))
    assert tensor.permute(*reversed(range(64))).shape == (1, 2, 1, 2) + (1,) * 60
    assert tensor.reshape(4).shape == (4,)
    with pytest.raises(kina.InvalidShapeError, match="65 axes"):
        tensor[None]
    with pytest.raises(kina.InvalidShapeError, match="65 axes"):
        tensor.reshape((1,) * 65)


def test_a_broadcast_beyond_64_bits_is_refused(host):
    with pytest.raises(kina.InvalidShapeError, match="elements overflows"):
        host.zeros(1).broadcast_to(2**32, 2**32)
    with pytest.raises(kina.InvalidShapeError, match="elements overflows"):
        host.zeros(1).broadcast_to(2**62, 0, 3)
    with pytest.raises(kina.InvalidShapeError, match="bytes overflows"):
        host.zeros(1).broadcast_to(2**62)
    assert host.zeros(1).broadcast_to(2**60).nbytes == 2**62


@pytest.mark.parametrize(
    ("axes", "words"),
    [((0,), "1 are named"), ((0, 0), "a second time"), ((0, 2), "out of range"), ((0, -3), "out of range")],
)
def test_bad_axes(host, axes, words):
    with pytest.raises(kina.InvalidShapeError, match=words):
        host.zeros((2, 3)).permute(*axes)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((5,), "do not fill"), ((-1, 4), "do not fill"), ((-1, -1), "only one"), ((-2, 3), "negative")],
)
def test_bad_reshapes(host, shape, words):
    with pytest.raises(kina.InvalidShapeError, match=words):
        host.zeros((2, 3)).reshape(shape)


def test_an_extent_of_an_empty_tensor_is_not_guessed(host):
    with pytest.raises(kina.InvalidShapeError):
        host.zeros((0, 3)).reshape(0, -1)
    assert host.zeros((0, 3)).reshape(3, -1).shape == (3, 0)
