"""Round trips of any layout on the host, by every way in and out: the same memory arrives, seen the same way."""

from __future__ import annotations

import ctypes
from collections import deque

import numpy as np
import pytest
from helpers.exchange import Table, delete, export, make_object
from helpers.layouts import layouts, steps_of
from helpers.managed import CPU, READ_ONLY, DLTensor, Producer, managed_of
from hypothesis import given, settings
from hypothesis import strategies as st

import kina
from kina._core.dtype import all_dtypes

DTYPES = all_dtypes()
NARROW = ("bfloat16", "float8")  # NumPy knows them by ml_dtypes alone, and its DLPack not at all
NUMPY_TYPES = [dtype for dtype in DTYPES if not dtype.name.startswith(NARROW)]
TORCH_NAMES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
KEPT = deque(maxlen=1000)  # producers: when a test fails, its frames may let go of them before the tensors
some = settings(max_examples=60)


class ByCapsule:
    """A producer that has nothing but ``__dlpack__``."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **wishes):
        return self.array.__dlpack__(**wishes)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Holding:
    """A capsule, for consumers that want a producer."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **wishes):
        return self.capsule

    def __dlpack_device__(self):
        return (CPU, 0)


def base_of(layout, dtype):
    most = 1 if dtype.name == "bool" else 250
    return layout.octets(dtype.itemsize, most=most).view(dtype.numpy)


def address(array):
    return array.__array_interface__["data"][0]


def said(tensor: DLTensor) -> tuple:
    """What a structure says, its pointers followed."""
    shape, strides = tuple(tensor.shape[: tensor.ndim]), tuple(tensor.strides[: tensor.ndim])
    dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    return (tensor.device.device_type, tensor.device.device_id), dtype, shape, strides, tensor.byte_offset


def exports(tensor, *, legacy=True):
    """The structure of every export of a tensor, and its flags; None: it has none."""
    if legacy:
        capsule = tensor.to_dlpack(versioned=False)
        yield managed_of(capsule).dl_tensor, None
    capsule = tensor.to_dlpack()
    yield managed_of(capsule).dl_tensor, managed_of(capsule).flags
    managed = export(tensor)
    yield managed.dl_tensor, managed.flags
    delete(managed)


def again(tensor, *, legacy=True):
    """Tensors of every export of a tensor."""
    if legacy:
        yield kina.from_dlpack(tensor.to_dlpack(versioned=False))
    yield kina.from_dlpack(tensor.to_dlpack())
    yield kina.from_dlpack(ByCapsule(tensor))
    yield make_object(kina.Tensor, export(tensor))


def first_of(tensor):
    managed = export(tensor)
    data = managed.dl_tensor.data
    delete(managed)
    return data


# NumPy ------------------------------------------------------------------------------------------------------

FROM_NUMPY = {
    "adopt": lambda session, array: session.adopt(array),
    "from_dlpack": lambda session, array: kina.from_dlpack(array),
    "__dlpack__": lambda session, array: session.adopt(ByCapsule(array)),
    "legacy": lambda session, array: session.adopt(array.__dlpack__()),
    "versioned": lambda session, array: session.adopt(array.__dlpack__(max_version=(1, 3))),
    "from_dlpack of a capsule": lambda session, array: kina.from_dlpack(array.__dlpack__(max_version=(1, 0))),
}


def to_numpy(tensor, *, legacy):
    yield np.from_dlpack(tensor)
    yield np.from_dlpack(Holding(tensor.to_dlpack()))
    for other in again(tensor, legacy=legacy):
        yield np.from_dlpack(other)


@pytest.mark.parametrize("way", FROM_NUMPY)
@some
@given(layout=layouts(), dtype=st.sampled_from(NUMPY_TYPES), locked=st.booleans())
def test_numpy_there_and_back(way, layout, dtype, locked):
    theirs = layout.numpy(base_of(layout, dtype))
    if locked:
        theirs.flags.writeable = False
    with kina.session("cpu") as session:
        if locked and way == "legacy":  # it cannot say so
            with pytest.raises(BufferError):
                FROM_NUMPY[way](session, theirs)
            return
        tensor = FROM_NUMPY[way](session, theirs)
        assert (tensor.shape, tensor.dtype, tensor.readonly) == (layout.shape, dtype, locked)
        assert steps_of(tensor) == layout.steps
        assert session.to_host(tensor).tobytes() == theirs.tobytes()
        writable = not locked and not layout.repeats
        for back in to_numpy(tensor, legacy=writable):
            assert (back.shape, back.dtype, steps_of(back)) == (layout.shape, theirs.dtype, layout.steps)
            assert back.flags.writeable == writable or not back.size  # NumPy makes an array of its own of nothing
            assert back.tobytes() == theirs.tobytes()
            if back.size:
                assert address(back) == address(theirs)
        if writable:  # NumPy takes what a legacy capsule holds for read-only
            back = np.from_dlpack(Holding(tensor.to_dlpack(versioned=False)))
            assert (back.shape, back.dtype, steps_of(back)) == (layout.shape, theirs.dtype, layout.steps)
            assert back.tobytes() == theirs.tobytes()
            assert not back.size or address(back) == address(theirs)
        else:
            with pytest.raises(kina.DLPackError, match="read-only"):
                tensor.to_dlpack(versioned=False)


@some
@given(layout=layouts(), dtype=st.sampled_from(NUMPY_TYPES))
def test_what_kina_made_goes_to_numpy_and_comes_back(layout, dtype):
    base = base_of(layout, dtype)
    with kina.session("cpu") as session:
        ours = session.from_host(base)
        view = FROM_NUMPY["__dlpack__"](session, layout.numpy(np.from_dlpack(ours)))
        del ours
        for theirs in to_numpy(view, legacy=not layout.repeats):
            assert theirs.tobytes() == layout.numpy(base).tobytes()
            back = session.adopt(ByCapsule(theirs))
            assert (back.shape, steps_of(back), back.dtype) == (layout.shape, layout.steps, dtype)
            if back.size:
                assert first_of(back) == first_of(view)
        if layout.length and 0 not in layout.shape and not layout.repeats:
            # The same memory: what one writes the other reads.
            np.from_dlpack(view)[...] = np.zeros((), dtype.numpy)
            assert not any(session.to_host(view).tobytes())


# PyTorch ----------------------------------------------------------------------------------------------------

FROM_TORCH = {
    "adopt": lambda session, theirs: session.adopt(theirs),
    "from_dlpack": lambda session, theirs: kina.from_dlpack(theirs),
    "legacy": lambda session, theirs: session.adopt(theirs.__dlpack__()),
    "versioned": lambda session, theirs: session.adopt(theirs.__dlpack__(max_version=(1, 3))),
    "__dlpack__": lambda session, theirs: session.adopt(ByCapsule(theirs)),
    "table": lambda session, theirs: make_object(kina.Tensor, export(theirs)),
}


def to_torch(tensor, *, legacy):
    import torch

    yield torch.from_dlpack(tensor)
    yield torch.from_dlpack(tensor.to_dlpack())
    if legacy:
        yield torch.from_dlpack(tensor.to_dlpack(versioned=False))
    yield torch.from_dlpack(ByCapsule(tensor))
    yield make_object(torch.Tensor, export(tensor))
    for other in again(tensor, legacy=legacy):
        yield torch.from_dlpack(other)


@pytest.mark.torch
@pytest.mark.parametrize("way", FROM_TORCH)
@some
@given(layout=layouts(lowest=0), name=st.sampled_from(TORCH_NAMES))
def test_torch_there_and_back(way, layout, name):
    import torch

    dtype = getattr(kina, name)
    octets = layout.octets(dtype.itemsize, most=1 if name == "bool" else 250)
    theirs = layout.torch(torch.from_numpy(octets).view(getattr(torch, name)))
    values = layout.numpy(octets.view(f"V{dtype.itemsize}")).tobytes()
    with kina.session("cpu") as session:
        tensor = FROM_TORCH[way](session, theirs)
        assert (tensor.shape, tensor.dtype, tensor.readonly) == (layout.shape, dtype, False)
        assert steps_of(tensor) == layout.steps
        assert session.to_host(tensor).tobytes() == values
        for back in to_torch(tensor, legacy=not layout.repeats):
            assert (tuple(back.shape), back.dtype, steps_of(back)) == (layout.shape, theirs.dtype, layout.steps)
            assert type(back) is torch.Tensor
            assert back.storage_offset() == 0
            if back.numel():
                assert back.data_ptr() == theirs.data_ptr()


@pytest.mark.torch
@some
@given(layout=layouts(lowest=0), name=st.sampled_from(["float32", "int16", "bool", "complex128"]))
def test_from_torch_through_kina_to_numpy_and_back(layout, name):
    """Three libraries, one memory."""
    import torch

    dtype = getattr(kina, name)
    octets = layout.octets(dtype.itemsize, most=1 if name == "bool" else 250)
    theirs = layout.torch(torch.from_numpy(octets).view(getattr(torch, name)))
    with kina.session("cpu") as session:
        seen = np.from_dlpack(session.adopt(theirs))
        assert seen.tobytes() == layout.numpy(octets.view(f"V{dtype.itemsize}")).tobytes()
        seen.flags.writeable = False
        back = session.adopt(ByCapsule(seen))
        assert back.readonly
        assert (back.shape, steps_of(back), back.dtype) == (layout.shape, layout.steps, dtype)
        if back.size:
            assert first_of(back) == theirs.data_ptr()


# By hand ----------------------------------------------------------------------------------------------------


def hand_made(kind, layout, dtype, octets, gap, offset, locked):
    """An array of `layout` in `octets`, `gap` bytes in: `offset` of the way to its first element is byte_offset."""
    code = export_code(dtype)
    start = octets.ctypes.data + gap + layout.before * dtype.itemsize
    fields = {"dtype": code, "data": start - offset, "byte_offset": offset, "buffer": octets}
    if kind != "legacy":
        fields["flags"] = READ_ONLY * locked
    if kind == "table":
        made = Table().Array(layout.shape, layout.strides, **fields)
    else:
        made = Producer(layout.shape, layout.strides, versioned=kind != "legacy", **fields)
    KEPT.append(made)
    return made


def export_code(dtype):
    empty = managed_of(kept := kina.zeros(0, dtype).to_dlpack()).dl_tensor.dtype
    assert kept is not None
    return (empty.code, empty.bits, empty.lanes)


INTO = {
    "legacy": {
        "adopt": lambda session, made: session.adopt(made),
        "adopt a capsule": lambda session, made: session.adopt(made.capsule()),
        "from_dlpack": lambda session, made: kina.from_dlpack(made),
        "from_dlpack of a capsule": lambda session, made: kina.from_dlpack(made.capsule()),
    },
    "table": {
        "adopt": lambda session, made: session.adopt(made),
        "from_dlpack": lambda session, made: kina.from_dlpack(made),
        "the table of Tensor": lambda session, made: make_object(kina.Tensor, made.managed),
    },
}
INTO["versioned"] = INTO["legacy"]
WAYS = [(kind, way) for kind in ("legacy", "versioned", "table") for way in INTO[kind]]


@pytest.mark.parametrize(("kind", "way"), WAYS)
@some
@given(
    layout=layouts(),
    dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 17),
    share=st.sampled_from([0, 1, 3, 256]),
    locked=st.booleans(),
)
def test_any_producer_there_and_back(kind, way, layout, dtype, gap, share, locked):
    """Whatever lies between `data` and the first element, aligned or not; every export says it in kina's way."""
    locked = locked and kind != "legacy"
    octets = np.zeros(max(1, layout.length) * dtype.itemsize + gap, "u1")
    octets[gap:] = layout.octets(dtype.itemsize, most=1 if dtype.name == "bool" else 250)
    values = layout.numpy(octets[gap:].view(f"V{dtype.itemsize}")).tobytes()
    made = hand_made(kind, layout, dtype, octets, gap, share, locked)
    with kina.session("cpu") as session:
        tensor = INTO[kind][way](session, made)
        assert (tensor.shape, tensor.dtype, tensor.readonly) == (layout.shape, dtype, locked)
        assert tensor.strides == layout.strides
        assert session.to_host(tensor).tobytes() == values
        writable = not locked and not layout.repeats
        told = ((CPU, 0), export_code(dtype), layout.shape, layout.strides, 0)
        for structure, flags in exports(tensor, legacy=writable):
            assert said(structure) == told
            assert flags is None or flags == READ_ONLY * (not writable)
            assert structure.data == (made.first if values else None)
        for other in again(tensor, legacy=writable):
            assert (other.shape, other.strides, other.dtype) == (layout.shape, layout.strides, dtype)
            assert other.readonly == (not writable)
            assert first_of(other) == (made.first if values else None)
            assert session.to_host(other).tobytes() == values
        del other
        assert made.deleted == 0
        del tensor
        assert made.deleted == 1


def test_views_of_views_keep_one_owner():
    made = Table().Array((4, 4))
    with kina.session("cpu") as session:
        tensor = session.adopt(made)
        views = [tensor]
        for cut in (np.s_[1:], np.s_[::-1], np.s_[:, 1:3], np.s_[0], np.s_[1]):
            views.append(session.adopt(views[-1][cut].to_dlpack()))
        assert session.to_host(views[-1]) == ctypes.c_float.from_address(first_of(views[-1])).value == 14.0
        while views:
            assert made.deleted == 0
            views.pop(0)
            tensor = None
        assert made.deleted == 1
