"""DLPack round trips on the host, with NumPy, with PyTorch, and by hand."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from helpers.managed import (
    CPU,
    CUDA,
    CUDA_HOST,
    IS_COPIED,
    MANAGED,
    READ_ONLY,
    Producer,
    managed_of,
    name_of,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kina
from kina._core.dtype import all_dtypes

NUMPY_TYPES = [dtype for dtype in all_dtypes() if not dtype.name.startswith(("bfloat16", "float8"))]
LAYOUTS = st.tuples(
    hnp.array_shapes(min_dims=0, max_dims=9, min_side=0, max_side=3),
    st.sampled_from(NUMPY_TYPES),
    st.randoms(use_true_random=False),
)


def strided(shape, dtype, random):
    """An array of that shape with permuted axes, gaps and, where allowed, negative strides."""
    axes = list(range(len(shape)))
    random.shuffle(axes)
    grown = [shape[axis] * random.choice([1, 1, 2]) + random.choice([0, 1]) for axis in axes]
    base = (np.arange(int(np.prod(grown))) % 120).astype(dtype.numpy).reshape(grown)
    cuts = (slice(extent - shape[axis], None) for axis, extent in zip(axes, grown, strict=True))
    return base[(*cuts, Ellipsis)].transpose(np.argsort(axes)) if shape else base


def address(array):
    return array.__array_interface__["data"][0]


@given(layout=LAYOUTS)
def test_numpy_round_trip(layout):
    array = strided(*layout)
    with kina.session("cpu") as host:
        for view in (array, array[::-1] if array.ndim else array):
            tensor = host.adopt(view)
            back = np.from_dlpack(tensor)
            assert (back.shape, back.dtype, back.flags.writeable) == (view.shape, view.dtype, True)
            np.testing.assert_array_equal(back, view)
            if view.size:
                assert address(back) == address(view)
                assert [step for step, extent in zip(back.strides, view.shape, strict=True) if extent > 1] == [
                    step for step, extent in zip(view.strides, view.shape, strict=True) if extent > 1
                ]


@given(layout=LAYOUTS)
def test_numpy_through_its_own_capsules(layout):
    """NumPy as producer of legacy and of versioned capsules."""
    array = strided(*layout)
    with kina.session("cpu") as host:
        for capsule in (array.__dlpack__(), array.__dlpack__(max_version=(1, 0))):
            tensor = host.adopt(capsule)
            assert name_of(capsule).startswith("used_")
            assert tensor.dtype.numpy == array.dtype
            np.testing.assert_array_equal(host.to_host(tensor), array)
            if array.size:
                assert address(np.from_dlpack(tensor)) == address(array)


@pytest.mark.torch
@given(layout=LAYOUTS)
def test_torch_round_trip(layout):
    import torch

    array = strided(*layout)
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.view(f"i{array.itemsize}")
    theirs = torch.from_numpy(array)
    with kina.session("cpu") as host:
        tensor = host.adopt(theirs)
        assert tensor.shape == tuple(theirs.shape)
        np.testing.assert_array_equal(host.to_host(tensor), array)
        for back in (torch.from_dlpack(tensor), torch.from_dlpack(tensor.to_dlpack(versioned=False))):
            assert back.dtype == theirs.dtype
            assert torch.equal(back, theirs)
            if array.size:
                assert back.data_ptr() == theirs.data_ptr()
                assert back.storage_offset() == 0
                assert [step for step, extent in zip(back.stride(), back.shape, strict=True) if extent > 1] == [
                    step for step, extent in zip(theirs.stride(), theirs.shape, strict=True) if extent > 1
                ]


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"],
)
def test_torch_narrow_floats(host, name):
    import torch

    theirs = torch.arange(200, 230).to(torch.uint8).view(torch.uint8)
    theirs = (theirs.repeat_interleave(2) if name == "bfloat16" else theirs).view(getattr(torch, name))
    tensor = host.adopt(theirs)
    assert tensor.dtype is getattr(kina, name)
    assert host.to_host(tensor).tobytes() == theirs.view(torch.uint8).numpy().tobytes()
    assert torch.from_dlpack(tensor).dtype == getattr(torch, name)
    assert torch.from_dlpack(tensor).data_ptr() == theirs.data_ptr()


@pytest.mark.parametrize(
    "name", ["bfloat16", *(dtype.name for dtype in all_dtypes() if dtype.name.startswith("float8"))]
)
def test_ml_dtypes_arrays(host, name):
    array = np.arange(8).astype(getattr(ml_dtypes, name)).reshape(2, 4)[:, ::2]
    tensor = host.adopt(array)
    assert tensor.dtype is getattr(kina, name)
    assert host.to_host(tensor).tobytes() == np.ascontiguousarray(array).tobytes()
    versioned = managed_of(tensor.to_dlpack()).dl_tensor
    assert (versioned.dtype.bits, versioned.dtype.lanes, versioned.data) == (
        array.itemsize * 8,
        1,
        address(array),
    )


@pytest.mark.torch
@pytest.mark.parametrize("trouble", ["requires_grad", "conj", "sparse"])
def test_torch_refusals_are_passed_on(host, trouble):
    import torch

    if trouble == "requires_grad":
        theirs = torch.zeros(3, requires_grad=True)
    elif trouble == "conj":
        theirs = torch.zeros(3, dtype=torch.complex64).conj()
    else:
        theirs = torch.zeros(3, 3).to_sparse()
    with pytest.raises(kina.DLPackError) as raised:
        host.adopt(theirs)
    if trouble == "sparse":
        assert raised.value.__cause__ is not None
        assert str(raised.value.__cause__) in str(raised.value)
    else:  # PyTorch's table would have exported it
        assert {"requires_grad": ".detach()", "conj": ".resolve_conj()"}[trouble] in str(raised.value)


@pytest.mark.torch
def test_a_negative_bit_is_refused_though_torch_exports_it(host):
    import torch

    theirs = torch.ones(3, dtype=torch.complex64).conj().imag
    assert theirs.is_neg()
    with pytest.raises(kina.DLPackError, match=r"resolve_neg\(\)"):
        host.adopt(theirs)
    assert host.to_host(host.adopt(theirs.resolve_neg())).tolist() == [0, 0, 0]


@pytest.mark.parametrize("versioned", [True, False])
@given(
    shape=hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=3),
    byte_offset=st.sampled_from([0, 4, 20, 6]),
    random=st.randoms(use_true_random=False),
)
def test_byte_offset_and_strides_of_any_producer(versioned, shape, byte_offset, random):
    """The first element is data + byte_offset, with negative strides too, and after a round trip."""
    array = np.arange(4000, dtype="i2")
    strides = [random.choice([-3, -1, 0, 1, 2, 5]) for _ in shape]
    producer = Producer(
        shape,
        strides,
        versioned=versioned,
        dtype=(0, 16, 1),
        data=address(array) + 4000,
        byte_offset=byte_offset,
    )
    expected = np.lib.stride_tricks.as_strided(
        array[2000 + byte_offset // 2 :], shape, [2 * stride for stride in strides], writeable=False
    )
    with kina.session("cpu") as host:
        tensor = host.adopt(producer)
        assert host.to_host(tensor).tobytes() == expected.tobytes()
        if expected.size:
            back = managed_of(tensor.to_dlpack()).dl_tensor
            assert (back.data, back.byte_offset) == (producer.first, 0)
            assert back.strides[: tensor.ndim] == strides
        del tensor
        assert producer.deleted == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_missing_strides_mean_c_order(host, versioned):
    tensor = host.adopt(Producer((2, 3), None, versioned=versioned))
    assert tensor.strides == (3, 1)
    assert host.to_host(tensor).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_exports_always_have_strides_and_no_offset(host):
    tensor = host.from_host(np.arange(6, dtype="i4"))[2:]
    for capsule in (
        tensor.to_dlpack(),
        tensor.to_dlpack(versioned=False),
        host.zeros(()).to_dlpack(),
        host.zeros(0).to_dlpack(),
    ):
        given_ = managed_of(capsule).dl_tensor
        assert given_.strides
        assert given_.shape
        assert given_.byte_offset == 0
    assert ctypes.c_int32.from_address(managed_of(tensor.to_dlpack()).dl_tensor.data).value == 2


def test_misaligned_views_are_taken(host):
    array = np.frombuffer(bytes(range(1, 14)), "u1")[1:]
    producer = Producer((3,), dtype=(1, 32, 1), data=address(array))
    assert host.to_host(host.adopt(producer)).tobytes() == array.tobytes()


# Requests


@pytest.mark.parametrize(
    ("max_version", "name", "version"),
    [
        (None, "dltensor", None),
        ((0, 8), "dltensor", None),
        ((1, 0), "dltensor_versioned", (1, 0)),
        ((1, 1), "dltensor_versioned", (1, 1)),
        ((1, 3), "dltensor_versioned", (1, 3)),
        ((1, 9), "dltensor_versioned", (1, 3)),
        ((2, 0), "dltensor_versioned", (1, 3)),
        ([1, 0], "dltensor_versioned", (1, 0)),
    ],
)
def test_max_version(host, max_version, name, version):
    capsule = host.zeros(3).__dlpack__(max_version=max_version)
    assert name_of(capsule) == name
    if version:
        assert (managed_of(capsule).major, managed_of(capsule).minor) == version


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"max_version": 1}, "max_version"),
        ({"max_version": (1,)}, "max_version"),
        ({"max_version": (-1, 0)}, "max_version"),
        ({"max_version": ("1", "0")}, "max_version"),
        ({"stream": 0}, "stream: host memory has no stream"),
        ({"stream": 1}, "stream: host memory has no stream"),
        ({"stream": -1}, "stream: host memory has no stream"),
        ({"dl_device": (CUDA, 0)}, "dl_device"),
        ({"dl_device": (CPU, 1)}, "dl_device"),
        ({"dl_device": "cpu"}, "dl_device"),
        ({"copy": 1}, "copy: a bool"),
    ],
    ids=repr,
)
def test_requests_that_cannot_be_honoured(host, wish, words):
    with pytest.raises(kina.DLPackError, match=words) as raised:
        host.zeros(3).__dlpack__(**wish)
    assert isinstance(raised.value, BufferError)


def test_requests_are_keywords_only(host):
    with pytest.raises(TypeError):
        host.zeros(3).__dlpack__(None)


def test_device(host):
    assert host.zeros(3).__dlpack_device__() == (CPU, 0)
    assert name_of(host.zeros(3).__dlpack__(dl_device=(CPU, 0))) == "dltensor"


def test_copy(host):
    tensor = host.from_host(np.arange(12, dtype="f4").reshape(3, 4)).permute(1, 0)[::-1].as_readonly()
    shared = managed_of(kept := tensor.__dlpack__(max_version=(1, 3), copy=False))
    assert shared.flags == READ_ONLY
    copied = managed_of(kept2 := tensor.__dlpack__(max_version=(1, 3), copy=True))
    assert copied.flags == IS_COPIED
    assert copied.dl_tensor.data != shared.dl_tensor.data
    assert copied.dl_tensor.strides[:2] == [3, 1]
    values = np.from_dlpack(tensor, copy=True)
    assert values.flags.writeable
    np.testing.assert_array_equal(values, host.to_host(tensor))
    assert name_of(tensor.__dlpack__(copy=True)) == "dltensor"
    assert kept is not kept2


def test_read_only_travels(host):
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = host.adopt(array)
    assert tensor.readonly
    assert managed_of(capsule := tensor.to_dlpack()).flags == READ_ONLY
    assert not np.from_dlpack(tensor).flags.writeable
    assert host.adopt(capsule).readonly
    assert host.adopt(array.__dlpack__(max_version=(1, 0))).readonly
    assert not host.adopt(Producer(flags=IS_COPIED).__dlpack__()).readonly


def test_a_copy_that_nobody_asked_for_is_refused(host):
    producer = Producer(flags=IS_COPIED)
    with pytest.raises(kina.DLPackError, match=r"flags: .*copy"):
        host.adopt(producer)
    assert not host.adopt(producer.__dlpack__()).readonly  # whoever has the capsule may have asked for it


@pytest.mark.parametrize("make", [lambda t: t.as_readonly(), lambda t: t.broadcast_to(2, 3)])
def test_what_may_not_be_written_has_no_legacy_capsule(host, make):
    tensor = make(host.zeros(3))
    assert managed_of(capsule := tensor.to_dlpack()).flags == READ_ONLY
    with pytest.raises(kina.DLPackError, match="read-only"):
        tensor.__dlpack__()
    with pytest.raises(kina.DLPackError, match="read-only"):
        tensor.to_dlpack(versioned=False)
    assert name_of(tensor.__dlpack__(copy=True)) == "dltensor"
    assert name_of(capsule) == "dltensor_versioned"


# Producers


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": None}, "data: NULL for 4 elements"),
        ({"ndim": -1}, "ndim: -1"),
        ({"ndim": 65}, "ndim: 65"),
        ({"shape": None, "ndim": 2}, "shape: NULL for 2 axes"),
        ({"shape": (2, -1)}, "shape: axis 1 has the negative extent -1"),
        ({"shape": (2**40, 2**40)}, "shape: the number of elements overflows"),
        ({"shape": (2**40, 2**40), "strides": (0, 0)}, "shape: the number of elements overflows"),
        ({"shape": (2**62,)}, "shape: the number of bytes overflows"),
        ({"strides": (2**62,)}, "strides: axis 0"),
        ({"strides": (-(2**61),)}, "strides"),
        ({"shape": (4, 4), "strides": (2**60, 2**60)}, "strides"),
        ({"byte_offset": 2**64 - 1}, "byte_offset"),
        ({"data": 2**64 - 8}, "strides: bytes 0 to 16"),
        ({"data": 8, "strides": (-1,)}, "strides: bytes -12 to 4"),
        ({"device": (CUDA, 0)}, "device"),
        ({"device": (CPU, 3)}, "device"),
        ({"device": (MANAGED, 0)}, "device"),
        ({"device": (99, 0)}, "device"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("bare", [True, False], ids=["capsule", "producer"])
def test_a_description_that_cannot_be_true(host, fields, words, versioned, bare):
    producer = Producer(**{"shape": (4,), **fields}, versioned=versioned)
    capsule = producer.capsule()
    producer.capsule = lambda: capsule
    with pytest.raises(kina.DLPackError, match=words):
        host.adopt(capsule if bare else producer)
    assert not name_of(capsule).startswith("used")  # still the producer's
    assert producer.deleted == 0


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ((0, 4, 1), "int4"),
        ((1, 1, 1), "uint1"),
        ((17, 4, 1), "float4_e2m1fn"),
        ((15, 6, 1), "float6_e2m3fn"),
        ((16, 6, 1), "float6_e3m2fn"),
        ((3, 64, 1), "opaque"),
        ((2, 32, 4), "float32 with lanes=4"),
        ((2, 128, 1), "float128"),
        ((6, 1, 1), "1-bit bool"),
        ((10, 16, 1), "float8_e4m3fn of 16 bits"),
        ((77, 8, 1), "code=77"),
        ((2, 32, 0), "lanes=0"),
    ],
    ids=repr,
)
def test_elements_that_are_not_stored(host, dtype, words):
    producer = Producer(dtype=dtype)
    with pytest.raises(kina.DTypeError, match=words):
        host.adopt(producer)
    assert producer.deleted == 0


@pytest.mark.parametrize("data", [None, 1, 2**64 - 1])
def test_no_elements_need_no_data(host, data):
    producer = Producer((2, 0), (2**40, 2**40), data=data, byte_offset=3)
    tensor = host.adopt(producer)
    assert (tensor.size, tensor.shape) == (0, (2, 0))
    assert tensor[1:, :, None].shape == (1, 0, 1)
    assert tensor[1].shape == (0,)
    assert host.to_host(tensor).shape == (2, 0)
    assert np.from_dlpack(tensor).shape == (2, 0)
    del tensor
    assert producer.deleted == 1


def test_a_wild_stride_on_one_element_is_harmless(host):
    producer = Producer((1, 3), (2**62 + 1, 1))
    tensor = host.adopt(producer)
    assert tensor.is_contiguous
    assert host.to_host(tensor[::2, ::2]).tolist() == [[0, 2]]
    assert host.to_host(tensor.reshape(3)).tolist() == [0, 1, 2]
    assert host.to_host(host.add(tensor, tensor)).tolist() == [[0, 2, 4]]


def test_pinned_memory_is_host_memory(host):
    tensor = host.adopt(Producer(device=(CUDA_HOST, 0)))
    assert tensor.device == "cpu"
    assert tensor.__dlpack_device__() == (CUDA_HOST, 0)
    assert host.to_host(tensor).tolist() == [0, 1, 2, 3]
    assert managed_of(capsule := tensor.to_dlpack()).dl_tensor.device.device_type == CUDA_HOST
    assert capsule is not None


class Old:
    """A producer from before DLPack 1.0."""

    def __init__(self):
        self.inner = Producer(versioned=False)

    def __dlpack__(self, stream=None):
        return self.inner.capsule()

    def __dlpack_device__(self):
        return (1, 0)


def test_old_producers_are_asked_in_the_old_way(host):
    old = Old()
    tensor = host.adopt(old)
    assert host.to_host(tensor).tolist() == [0, 1, 2, 3]
    del tensor
    assert old.inner.deleted == 1


class Liar(Producer):
    def __init__(self, device=(1, 0), answer=None, error=None):
        super().__init__()
        self.device_answer, self.answer, self.error = device, answer, error

    def __dlpack__(self, **wishes):
        if self.error:
            raise self.error
        return self.answer

    def __dlpack_device__(self):
        if isinstance(self.device_answer, Exception):
            raise self.device_answer
        return self.device_answer


@pytest.mark.parametrize(
    ("liar", "words"),
    [
        (Liar(answer="no capsule"), "capsule: __dlpack__ gave a str"),
        (Liar(answer=None), "capsule: __dlpack__ gave a NoneType"),
        (Liar(error=RuntimeError("not today")), "refuses: not today"),
        (Liar(error=TypeError("not so")), "refuses: not so"),
        (Liar(error=BufferError("busy")), "refuses: busy"),
        (Liar(device=(CUDA, 0)), "device type 2"),
        (Liar(device=(1,)), "device: __dlpack_device__"),
        (Liar(device=("a", "b")), "device: __dlpack_device__"),
        (Liar(device=(2**40, 0)), "device: __dlpack_device__"),
        (Liar(device=ValueError("lost")), "device: __dlpack_device__.*lost"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_producers_that_misbehave(host, liar, words):
    with pytest.raises(kina.DLPackError, match=words):
        host.adopt(liar)
    assert host.to_host(host.full(1, 3)).tolist() == [3]


@pytest.mark.parametrize("thing", [3, "text", None, object(), [1.0]], ids=repr)
def test_what_is_no_array(host, thing):
    with pytest.raises(kina.DLPackError, match="neither DLPack nor the buffer protocol"):
        host.adopt(thing)


def test_a_producer_that_raises_keyboard_interrupt_is_not_caught(host):
    with pytest.raises(KeyboardInterrupt):
        host.adopt(Liar(error=KeyboardInterrupt()))
