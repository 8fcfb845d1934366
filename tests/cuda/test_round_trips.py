"""Round trips of any layout of device memory, by every way in and out: the same memory, seen the same way, in order."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import pytest
from helpers.exchange import Table, delete, export, make_object
from helpers.layouts import layouts
from helpers.managed import CUDA, MANAGED, READ_ONLY, Producer, managed_of
from hypothesis import given, settings
from hypothesis import strategies as st

import kina
from kina._core.dtype import all_dtypes

DTYPES = all_dtypes()
LEGACY = 1
NBYTES = 1 << 20
OCTETS = (np.arange(NBYTES) * 37 % 251).astype("u1")
KEPT = deque(maxlen=1000)  # producers: when a test fails, its frames may let go of them before the tensors
some = settings(max_examples=40)


@pytest.fixture(params=[CUDA, MANAGED], ids=["device", "managed"])
def memory(request):
    """Where a device has OCTETS, in memory that stands for another library's: its DLPack device, and the address."""
    managed = kina.memory.ManagedMemoryResource(0) if request.param == MANAGED else None
    with kina.session(kina.Runtime(0)) as theirs:
        tensor = theirs.from_host(OCTETS) if managed is None else theirs.from_host(OCTETS, memory=managed)
        theirs.synchronize()
    yield (request.param, 0), address_of(tensor)
    del tensor  # so long it holds the memory


@pytest.fixture
def other():
    """An open session of another Runtime."""
    with kina.session(kina.Runtime(0)) as opened:
        yield opened


def address_of(tensor):
    managed = export(tensor)
    data = managed.dl_tensor.data
    delete(managed)
    return data


def whole(first, dtype):
    """The octets from there on, as many as make whole elements."""
    return OCTETS[first:][: (NBYTES - first) // dtype.itemsize * dtype.itemsize]


def settled(made, *sessions):
    """What one lets go may be another's export, which that fences; and the reaper may be at it just now."""
    end = time.monotonic() + 10
    while not made.deleted and time.monotonic() < end:
        for each in sessions:
            each.synchronize()


def code_of(dtype):
    managed = export(kina.zeros(0, dtype))
    code = managed.dl_tensor.dtype
    found = (code.code, code.bits, code.lanes)
    delete(managed)
    return found


CODES = {dtype.name: code_of(dtype) for dtype in DTYPES}
INTO = {
    "adopt": lambda session, made: session.adopt(made),
    "from_dlpack": lambda session, made: kina.from_dlpack(made),
    "adopt a capsule": lambda session, made: session.adopt(made.capsule()),
    "from_dlpack of a capsule": lambda session, made: kina.from_dlpack(made.capsule()),
    "the table of Tensor": lambda session, made: make_object(kina.Tensor, made.managed),
}
WAYS = [
    *(("legacy", way) for way in INTO if "table" not in way),
    *(("versioned", way) for way in INTO),
    ("table", "adopt"),
    ("table", "from_dlpack"),
]


def exports(tensor, *, legacy):
    if legacy:
        capsule = tensor.to_dlpack(stream=LEGACY, versioned=False)
        yield managed_of(capsule).dl_tensor, None
    capsule = tensor.to_dlpack(stream=-1)
    yield managed_of(capsule).dl_tensor, managed_of(capsule).flags
    managed = export(tensor)
    yield managed.dl_tensor, managed.flags
    delete(managed)


def again(session, tensor, *, legacy):
    """In another Runtime, of every export."""
    if legacy:
        yield session.adopt(tensor.to_dlpack(stream=LEGACY, versioned=False))
    yield session.adopt(tensor.to_dlpack(stream=LEGACY))
    yield make_object(kina.Tensor, export(tensor))
    yield session.adopt(tensor)


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_there_and_back(memory, session, other, kind, way):
    """`session` takes in, unless the way is by the innermost one; `other` takes what every export gives."""
    device, base = memory

    @some
    @given(
        layout=layouts(most_axes=9),
        dtype=st.sampled_from(DTYPES),
        gap=st.integers(0, 17),
        share=st.sampled_from([0, 1, 3, 256]),
        locked=st.booleans(),
    )
    def check(layout, dtype, gap, share, locked):
        locked = locked and kind != "legacy"
        start = 512 + gap + layout.before * dtype.itemsize
        assert start + layout.length * dtype.itemsize < NBYTES
        fields = {"dtype": CODES[dtype.name], "device": device, "data": base + start - share, "byte_offset": share}
        if kind == "table":
            made = Table(stream=LEGACY).Array(layout.shape, layout.strides, flags=READ_ONLY * locked, **fields)
        else:
            more = {"flags": READ_ONLY * locked} if kind == "versioned" else {}
            made = Producer(layout.shape, layout.strides, versioned=kind == "versioned", **more, **fields)
        KEPT.append(made)
        tensor = INTO[way](session, made)
        assert (tensor.shape, tensor.strides, tensor.dtype) == (layout.shape, layout.strides, dtype)
        assert (tensor.readonly, tensor.device, tensor.__dlpack_device__()) == (locked, "cuda:0", device)
        first = made.first if 0 not in layout.shape else None
        writable = not locked and not layout.repeats
        home = session if tensor.runtime_identity == session.runtime_identity else other
        values = layout.numpy(whole(512 + gap, dtype).view(f"V{dtype.itemsize}")).tobytes()
        assert home.to_host(tensor).tobytes() == values
        for structure, flags in exports(tensor, legacy=writable):
            assert tuple(structure.shape[: structure.ndim]) == layout.shape
            assert tuple(structure.strides[: structure.ndim]) == layout.strides
            assert (structure.data, structure.byte_offset) == (first, 0)
            assert (structure.device.device_type, structure.device.device_id) == device
            assert flags is None or flags == READ_ONLY * (not writable)
        for back in again(other, tensor, legacy=writable):
            assert (back.shape, back.strides, back.dtype) == (layout.shape, layout.strides, dtype)
            assert back.readonly == (locked or (layout.repeats and back.readonly))
            assert address_of(back) == first
            assert other.to_host(back).tobytes() == values
        assert made.deleted == 0
        del tensor, back
        settled(made, session, other)
        assert made.deleted == 1

    check()


def test_what_kina_made_and_cut_goes_to_another_runtime_and_comes_back(session, other):
    @some
    @given(
        layout=layouts(most_axes=9),
        dtype=st.sampled_from(DTYPES),
        versioned=st.booleans(),
        through=st.sampled_from(["capsule", "table", "tensor"]),
    )
    def check(layout, dtype, versioned, through):
        base = session.from_host(OCTETS)
        fields = {"dtype": CODES[dtype.name], "device": (CUDA, 0), "byte_offset": layout.before * dtype.itemsize}
        KEPT.append(Producer(layout.shape, layout.strides, data=address_of(base), **fields))
        view = session.adopt(KEPT[-1])
        away = {
            "capsule": lambda view: other.adopt(view.to_dlpack(versioned=versioned or layout.repeats)),
            "table": lambda view: make_object(kina.Tensor, export(view)),
            "tensor": lambda view: other.adopt(view),
        }[through](view)
        home = session.adopt(away.to_dlpack())
        assert (home.shape, home.strides, home.dtype) == (layout.shape, layout.strides, dtype)
        assert address_of(home) == address_of(away) == address_of(view)
        values = layout.numpy(whole(0, dtype).view(f"V{dtype.itemsize}")).tobytes()
        for where, tensor in ((session, view), (other, away), (session, home)):
            assert where.to_host(tensor).tobytes() == values
        del tensor, view, away, home
        settled(KEPT[-1], session, other)
        assert KEPT[-1].deleted == 1

    check()
