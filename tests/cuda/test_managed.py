"""Managed memory of sessions: the device's and the host's, which reads it in place once the device is past it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cuda import stalled, stream_of
from helpers.managed import CPU, CUDA, CUDA_HOST, MANAGED, managed_of

import kina


@pytest.fixture
def session():
    with kina.session(kina.Runtime(0)) as opened:
        yield opened
        opened.synchronize()


def pooled():
    return kina.memory.PoolMemoryResource(kina.memory.ManagedMemoryResource(0))


@pytest.fixture
def managed_tensor(session):
    return session.from_host(np.arange(6, dtype="f4"), memory=kina.memory.ManagedMemoryResource(0))


def test_managed_memory_says_what_it_is(session, managed_tensor):
    assert managed_tensor.device == "cuda:0"
    for tensor in (managed_tensor, managed_tensor[1:], session.copy(managed_tensor, memory=pooled())):
        assert tensor.__dlpack_device__() == (MANAGED, 0)
    assert session.copy(managed_tensor).__dlpack_device__() == (CUDA, 0)
    with kina.memory.using(kina.memory.ManagedMemoryResource(0)), session.capture() as graph:
        captured = session.zeros(1)
    assert captured.__dlpack_device__() == (MANAGED, 0)
    graph.launch(session)
    session.synchronize()


def test_the_host_reads_managed_memory_without_a_copy_once_the_device_is_past_it(session, managed_tensor):
    session.synchronize()
    readers = (np.from_dlpack, np.asarray, memoryview, lambda t: np.from_dlpack(t, device="cpu"),
               lambda t: t.__array_interface__, lambda t: t.__dlpack__())  # fmt: skip
    seen = [np.asarray(read(managed_tensor)) for read in readers[:4]]
    for array in seen:
        assert array.tolist() == [0, 1, 2, 3, 4, 5]
        assert array.ctypes.data == seen[0].ctypes.data
    with stalled(session):
        session.copy(managed_tensor)
        for read in readers:
            with pytest.raises(BufferError, match=r"synchronize\(\)"):
                read(managed_tensor)
        managed_tensor.__dlpack__(stream=stream_of(session))  # a device waits for itself
        managed_tensor.__dlpack__(stream=-1)
    session.synchronize()


@pytest.mark.parametrize("version", [(1, 0), None])
@pytest.mark.parametrize(
    ("device", "streams"),
    [((MANAGED, 0), (None, -1, 1)), ((CUDA, 0), (None, -1, 1)), ((CPU, 0), (None,))],
    ids=["managed", "device", "host"],
)
def test_managed_memory_may_be_named_as_either_side_has_it(session, managed_tensor, device, streams, version):
    session.synchronize()
    told = [address_of(session, managed_tensor)]
    for stream in streams:
        capsule = managed_tensor.__dlpack__(dl_device=device, stream=stream, max_version=version)
        given = managed_of(capsule).dl_tensor
        assert (given.device.device_type, given.device.device_id) == device
        told.append(given.data)
    assert len({*told}) == 1


def address_of(session, tensor):
    with session.raw() as raw:
        return raw.unsafe_address(raw.ref(tensor))


def test_what_managed_memory_is_not(session, managed_tensor):
    session.synchronize()
    for device in ((CUDA, 1), (CPU, 1), (CUDA_HOST, 0), (MANAGED, 1)):
        with pytest.raises(kina.DLPackError, match="dl_device"):
            managed_tensor.__dlpack__(dl_device=device)
    with pytest.raises(kina.DLPackError, match="host memory has no stream"):
        managed_tensor.__dlpack__(dl_device=(CPU, 0), stream=1)
    with pytest.raises(kina.DLPackError, match="nothing crosses"):
        session.zeros(1).__dlpack__(dl_device=(CPU, 0))


def test_what_the_host_had_is_reused_after_a_wait_for_the_device(session, managed_tensor):
    """The host may have handed it to a device in its turn."""
    session.synchronize()
    np.from_dlpack(managed_tensor)
    waits = session.counters().host_waits
    del managed_tensor
    session.synchronize()
    assert session.counters().host_waits == waits + 1
