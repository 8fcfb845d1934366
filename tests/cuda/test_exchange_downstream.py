"""Tensors in another project's Cython code, which cimports kina's structures; a million exchanges leave nothing."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.compiler import compile_extension

import kina

MISALIGNED, C_ORDER, READ_ONLY = 16, 2, 1
PAGE_KB = os.sysconf("SC_PAGESIZE") // 1024


@pytest.fixture(scope="module")
def downstream(tmp_path_factory):
    source = Path(__file__).with_name("exchange_downstream.pyx")
    path = compile_extension(source, tmp_path_factory.mktemp("downstream"), control=False)
    spec = importlib.util.spec_from_file_location("exchange_downstream", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def session(request):
    with kina.session("cpu" if request.param == "cpu" else kina.Runtime(0)) as opened:
        yield opened


def settled(session):
    gc.collect()
    session.synchronize()


def resident_kb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KB


# One --------------------------------------------------------------------------------------------------------


def test_a_tensor_is_read_without_the_gil(downstream, session):
    tensor = session.zeros((3, 4), "int16")
    found = downstream.look(tensor[1:, ::2].as_readonly())
    whole = downstream.look(tensor)
    assert found["address"] == whole["address"] + 8
    assert (found["nbytes"], found["size"], found["elements"], found["bits"], found["ndim"]) == (8, 4, 4, 16, 2)
    assert (found["low"], found["high"]) == (8, 22)
    assert (found["flags"], whole["flags"] & ~4) == (READ_ONLY, C_ORDER)
    assert (found["device_type"], found["device_id"]) == tensor.__dlpack_device__()
    for name, identity in (("runtime", tensor.runtime_identity), ("domain", tensor.allocation_domain)):
        assert found[name] == whole[name] > 0
        assert str(found[name]) in repr(identity)


def test_an_export_shares_and_its_end_lets_go(downstream, session):
    tensor = session.zeros(8)
    before = downstream.references(tensor)
    downstream.lend(tensor, downstream.works, 3)
    downstream.lend(tensor, downstream.orders, 3)
    assert downstream.references(tensor) == before


def test_memory_of_a_library_becomes_a_tensor(downstream, session):
    """Its deleter, which is C, is called once: when nothing of it is left, and the device is past it."""
    lent = session.full(8, 3.0)
    session.synchronize()
    before = downstream.deleted()
    tensor = downstream.adopt(downstream.look(lent)["address"], 8, lent)
    view = tensor[2:]
    assert (tensor.shape, tensor.dtype, tensor.device) == ((8,), kina.float32, lent.device)
    assert tensor.runtime_identity == session.runtime_identity
    assert session.to_host(view).tolist() == [3.0] * 6
    copied = session.copy(view)
    del tensor
    assert downstream.deleted() == before
    del view
    settled(session)
    assert downstream.deleted() == before + 1
    assert session.to_host(copied).tolist() == [3.0] * 6


def test_what_a_library_says_is_checked(downstream, session):
    lent = session.zeros(8)
    before = downstream.deleted()
    for address, size, words in ((0, 8, "data: NULL"), (downstream.look(lent)["address"], -1, "shape: axis 0")):
        with pytest.raises(kina.DLPackError, match=words):
            downstream.adopt(address, size, lent)
    assert downstream.deleted() == before + 2


def test_misaligned_elements_are_told(downstream, session):
    lent = session.zeros(8)
    address = downstream.look(lent)["address"]
    for offset in (0, 1, 2, 4):
        tensor = downstream.adopt(address + offset, 4, lent)
        assert bool(downstream.look(tensor)["flags"] & MISALIGNED) == (offset % 4 != 0)
        assert bool(downstream.look(tensor[1:])["flags"] & MISALIGNED) == (offset % 4 != 0)
        assert not downstream.look(tensor[4:])["flags"] & MISALIGNED  # no element lies anywhere
        del tensor
        settled(session)


# A million --------------------------------------------------------------------------------------------------


def every_way(downstream, session, tensor, share):
    """Exchanges of every kind, `share` twentieths of a million."""
    unit = share * 2500
    downstream.lend(tensor, downstream.works, 8 * unit)
    if tensor.device == "cpu":
        downstream.lend(tensor, downstream.orders, unit)
        downstream.lend_legacy(tensor, 4 * unit)
        downstream.there_and_back(tensor, 3 * unit)
        downstream.through_tables(tensor, kina.Tensor, 2 * unit)
        downstream.through_capsules(tensor, session.adopt, 2 * unit)
    else:
        # Whoever orders for itself leaves a use behind that is of no known stream, and what it had is kept until the
        # device was waited for: these are for the tensors of a library.
        lent = downstream.adopt(downstream.look(tensor)["address"], 8, tensor)
        downstream.lend(lent, downstream.works, 5 * unit)
        downstream.lend(tensor, downstream.works, unit + 3 * unit // 4)
        downstream.through_tables(tensor, kina.Tensor, 5 * unit)
        del lent
        downstream.through_capsules(tensor, session.adopt, unit // 4)  # these ask the driver for events
    settled(session)
    if tensor.device != "cpu":
        forget_calls()


def forget_calls():
    """The simulated driver remembers each."""
    from helpers.cuda import simulation

    if simulation() is not None:
        simulation().clear_trace()


def test_a_million_exchanges_leave_nothing(downstream, session):
    on_host = session.zeros(0).device == "cpu"
    upstream = kina.memory.HostMemoryResource() if on_host else kina.memory.CudaAsyncMemoryResource(0)
    memory = kina.memory.StatisticsMemoryResource(upstream)
    tensor = session.full(8, 2.0, memory=memory)
    before = downstream.references(tensor), sys.getrefcount(tensor)
    for _ in range(2):  # buffers, caches and the allocator's arenas have their sizes from here on
        every_way(downstream, session, tensor, 1)
    objects, resident = len(gc.get_objects()), resident_kb()
    deleted = downstream.deleted()
    for _ in range(20):
        every_way(downstream, session, tensor, 1)
    assert downstream.references(tensor) == before[0]
    assert sys.getrefcount(tensor) == before[1]
    assert memory.counts().current_count == 1
    assert downstream.deleted() - deleted == 20 * (not on_host)
    assert abs(len(gc.get_objects()) - objects) < 50
    assert resident_kb() - resident < 1024, f"{resident_kb() - resident} kB more after a million exchanges"
    assert session.to_host(tensor).tolist() == [2.0] * 8
    del tensor
    settled(session)
    assert memory.counts().current_count == 0


@pytest.mark.torch
def test_exchanges_with_torch_leave_nothing(downstream):
    import torch

    with kina.session("cpu") as session:
        tensor, theirs = session.zeros(8), torch.zeros(8)
        before = downstream.references(tensor), sys.getrefcount(theirs)

        def exchange(times):
            downstream.through_tables(tensor, torch.Tensor, times)
            for _ in range(times // 2):
                kina.from_dlpack(theirs)
                session.adopt(theirs.__dlpack__())

        exchange(2000)
        resident = resident_kb()
        exchange(20_000)
        assert resident_kb() - resident < 1024
        assert (downstream.references(tensor), sys.getrefcount(theirs)) == before


@pytest.mark.torch
def test_torch_takes_what_kina_lends(downstream):
    """By both tables, in another project's code: the memory is kina's."""
    import torch

    with kina.session("cpu") as session:
        tensor = session.adopt(np.arange(8, dtype="f4"))
        downstream.through_tables(tensor, torch.Tensor, 3)
        taken = torch.from_dlpack(tensor)
        assert taken.data_ptr() == downstream.look(tensor)["address"]
        assert ctypes.c_float.from_address(taken[3:].data_ptr()).value == 3.0
