"""Round trips of any layout with PyTorch, CuPy and JAX on a GPU, both ways: the same memory, seen the same way.

PyTorch and CuPy are promised wherever these tests run; JAX by KINA_REQUIRE_JAX=1.
"""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from helpers.exchange import borrow, delete, export, make_object, table_of, work_stream
from helpers.layouts import layouts, steps_of
from helpers.managed import CUDA
from hypothesis import given, settings
from hypothesis import strategies as st

import kina

pytestmark = pytest.mark.gpu

some = settings(max_examples=30)
TORCH_NAMES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]
CUPY_NAMES = [name for name in TORCH_NAMES if not name.startswith(("bfloat16", "float8"))]
JAX_NAMES = ["bool", "uint8", "int8", "int16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]


@pytest.fixture(scope="module")
def torch():
    import torch

    torch.cuda.init()
    return torch


@pytest.fixture(scope="module")
def cupy():
    import cupy

    return cupy


@pytest.fixture(scope="module")
def jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the others need some of the memory
    import jax

    return jax


def octets_of(layout, name):
    return layout.octets(getattr(kina, name).itemsize, most=1 if name == "bool" else 250)


def values_of(layout, name, octets):
    return layout.numpy(octets.view(f"V{getattr(kina, name).itemsize}")).tobytes()


def first_of(tensor):
    managed = export(tensor)
    data = managed.dl_tensor.data
    delete(managed)
    return data


def compact_values(session, tensor):
    return session.to_host(tensor).tobytes() if tensor.is_contiguous else None


def check_tensor(session, tensor, layout, name, pointer, values):
    assert (tensor.shape, tensor.dtype.name, tensor.device) == (layout.shape, name, "cuda:0")
    assert steps_of(tensor) == layout.steps
    if 0 not in layout.shape:
        assert first_of(tensor) == pointer
    assert compact_values(session, tensor) in (None, values)


# PyTorch ----------------------------------------------------------------------------------------------------

FROM_TORCH = {
    "adopt": lambda session, theirs: session.adopt(theirs),
    "from_dlpack": lambda session, theirs: kina.from_dlpack(theirs),
    "legacy": lambda session, theirs: session.adopt(theirs.__dlpack__(stream=1)),
    "versioned": lambda session, theirs: session.adopt(theirs.__dlpack__(stream=1, max_version=(1, 3))),
    "table": lambda session, theirs: make_object(kina.Tensor, export(theirs)),
}


@pytest.mark.parametrize("way", FROM_TORCH)
def test_torch_there_and_back(session, torch, way):
    @some
    @given(layout=layouts(most_axes=9, lowest=0), name=st.sampled_from(TORCH_NAMES))
    def check(layout, name):
        octets = octets_of(layout, name)
        base = torch.from_numpy(octets).cuda().view(getattr(torch, name))
        theirs = layout.torch(base)
        values = values_of(layout, name, octets)
        tensor = FROM_TORCH[way](session, theirs)
        check_tensor(session, tensor, layout, name, theirs.data_ptr(), values)
        backs = [torch.from_dlpack(tensor), torch.from_dlpack(tensor.to_dlpack())]
        backs.append(make_object(torch.Tensor, export(tensor)))
        if not layout.repeats:
            backs.append(torch.from_dlpack(tensor.to_dlpack(versioned=False)))
        for back in backs:
            assert (tuple(back.shape), back.dtype, steps_of(back)) == (layout.shape, theirs.dtype, layout.steps)
            assert (back.device, back.storage_offset()) == (theirs.device, 0)
            if back.numel():
                assert back.data_ptr() == theirs.data_ptr()
        seen = backs[-1].contiguous().view(-1).view(torch.uint8) if backs[-1].numel() else None
        assert seen is None or seen.cpu().numpy().tobytes() == values

    check()
    session.synchronize()


def test_what_kina_made_goes_to_torch_and_comes_back(session, torch):
    @some
    @given(layout=layouts(most_axes=6, lowest=0), name=st.sampled_from(TORCH_NAMES))
    def check(layout, name):
        octets = octets_of(layout, name)
        ours = session.from_host(octets)
        theirs = layout.torch(torch.from_dlpack(ours).view(getattr(torch, name)))
        back = kina.from_dlpack(theirs)
        pointer = first_of(ours) + layout.before * getattr(kina, name).itemsize
        check_tensor(session, back, layout, name, pointer, values_of(layout, name, octets))

    check()
    session.synchronize()


def test_both_tables_called_by_hand(session, torch):
    """As a compiled library does, without a capsule or a call of Python."""
    ours = session.from_host(np.arange(6, dtype="f4"))
    table = table_of(kina.Tensor)
    assert (table.major, table.minor >= 3) == (1, True)
    assert work_stream(kina.Tensor, (CUDA, 0)) == session_stream(session)
    lent = borrow(ours)
    assert (lent.device.device_type, lent.device.device_id, lent.byte_offset) == (CUDA, 0, 0)
    taken = make_object(torch.Tensor, export(ours))
    assert taken.data_ptr() == lent.data
    assert taken.cpu().tolist() == [0, 1, 2, 3, 4, 5]
    theirs = torch.arange(6, dtype=torch.float32, device="cuda:0")
    back = make_object(kina.Tensor, export(theirs[2:]))
    torch.cuda.synchronize()
    assert session.to_host(back).tolist() == [2, 3, 4, 5]
    assert borrow(theirs).data == theirs.data_ptr()


def session_stream(session):
    with session.raw() as raw:
        return raw.unsafe_stream_handle()


@pytest.mark.parametrize("table", [True, False])
def test_what_torch_cannot_share_is_refused(session, torch, table):
    take = session.adopt if table else (lambda theirs: session.adopt(ByCapsule(theirs)))
    for theirs, cure in (
        (torch.zeros(3, device="cuda:0", requires_grad=True), "detach"),
        (torch.zeros(3, dtype=torch.complex64, device="cuda:0").conj(), "conj"),
    ):
        with pytest.raises(kina.DLPackError, match=cure if table else ""):
            take(theirs)
    assert session.adopt(torch.zeros(3, device="cuda:0", requires_grad=True).detach()).shape == (3,)


class ByCapsule:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **wishes):
        return self.array.__dlpack__(**wishes)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# CuPy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["adopt", "from_dlpack", "capsule"])
def test_cupy_there_and_back(session, cupy, way):
    take = {
        "adopt": session.adopt,
        "from_dlpack": kina.from_dlpack,
        "capsule": lambda theirs: session.adopt(theirs.__dlpack__(stream=1)),
    }[way]

    @some
    @given(layout=layouts(most_axes=9), name=st.sampled_from(CUPY_NAMES))
    def check(layout, name):
        octets = octets_of(layout, name)
        base = cupy.asarray(octets).view(name)
        steps = [step * base.itemsize for step in layout.strides]
        theirs = cupy.ndarray(layout.shape, name, base[layout.before :].data, strides=steps)
        values = values_of(layout, name, octets)
        tensor = take(theirs)
        check_tensor(session, tensor, layout, name, theirs.data.ptr, values)
        if layout.repeats:
            return  # what may not be written has no capsule that CuPy takes
        back = cupy.from_dlpack(tensor)
        assert (back.shape, back.dtype, steps_of(back)) == (layout.shape, theirs.dtype, layout.steps)
        if back.size:
            assert back.data.ptr == theirs.data.ptr
            assert cupy.asnumpy(back).tobytes() == values

    check()
    session.synchronize()


def test_what_kina_made_goes_to_cupy_and_comes_back(session, cupy):
    @some
    @given(layout=layouts(most_axes=6), name=st.sampled_from(CUPY_NAMES))
    def check(layout, name):
        octets = octets_of(layout, name)
        ours = session.from_host(octets)
        base = cupy.from_dlpack(ours).view(name)
        steps = [step * base.itemsize for step in layout.strides]
        theirs = cupy.ndarray(layout.shape, name, base[layout.before :].data, strides=steps)
        pointer = first_of(ours) + layout.before * base.itemsize
        check_tensor(session, session.adopt(theirs), layout, name, pointer, values_of(layout, name, octets))

    check()
    session.synchronize()


# JAX --------------------------------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize("way", ["adopt", "from_dlpack"])
def test_jax_there_and_back(session, jax, way):
    """Its arrays are compact, and nobody writes them."""

    @settings(max_examples=15)
    @given(
        shape=st.lists(st.integers(0, 3), max_size=5).map(tuple),
        name=st.sampled_from(JAX_NAMES),
    )
    def check(shape, name):
        dtype = getattr(kina, name)
        count = int(np.prod(shape))
        octets = (np.arange(count * dtype.itemsize) * 37 % (2 if name == "bool" else 251)).astype("u1")
        theirs = jax.device_put(octets.view(dtype.numpy).reshape(shape), jax.devices("gpu")[0])
        theirs.block_until_ready()
        tensor = session.adopt(theirs) if way == "adopt" else kina.from_dlpack(theirs)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous) == (shape, dtype, True)
        assert session.to_host(tensor).tobytes() == octets.tobytes()
        if count:
            assert first_of(tensor) == theirs.unsafe_buffer_pointer()
        ours = session.copy(tensor)
        back = jax.dlpack.from_dlpack(ours)
        assert (back.shape, back.dtype) == (shape, theirs.dtype)
        assert np.asarray(back).tobytes() == octets.tobytes()
        if count:
            assert back.unsafe_buffer_pointer() == first_of(ours)

    check()
    gc.collect()
    session.synchronize()
