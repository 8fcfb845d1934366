"""Managed and pinned memory: the device's and the host's, which reads it in place once the device is past it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cuda import stalled, stream_of
from helpers.managed import CPU, CUDA, CUDA_HOST, MANAGED, Producer, managed_of

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


def test_what_the_host_had_is_reused_after_a_wait_for_the_device(session):
    """The host may have handed it to a device in its turn."""
    pool = pooled()
    tensor = session.full(1000, 1.0, memory=pool)
    session.synchronize()
    address = address_of(session, tensor)
    np.from_dlpack(tensor)
    del tensor

    def made():
        tensors = [session.empty(1000, memory=pool) for _ in range(4)]
        return [address_of(session, each) for each in tensors]

    assert address not in made()
    session.synchronize()  # of the device
    assert address in made()


def test_a_host_session_takes_managed_memory_in_once_the_device_is_past_it(session, managed_tensor):
    address = address_of(session, managed_tensor)
    with kina.session("cpu") as host:
        with stalled(session):
            session.copy(managed_tensor)
            with pytest.raises(kina.DLPackError, match=r"synchronize\(\)"):
                host.adopt(managed_tensor)
            with pytest.raises(kina.DLPackError, match=r"synchronize\(\)"):
                host.from_host(managed_tensor)
        session.synchronize()
        taken = host.adopt(managed_tensor)
        assert taken.__dlpack_device__() == (CPU, 0)
        assert taken.__array_interface__["data"][0] == address
        doubled = host.to_host(host.add(taken, taken))
        assert doubled.tolist() == [0, 2, 4, 6, 8, 10]
        with pytest.raises(kina.ForeignDeviceError, match="to_host"):
            host.adopt(session.zeros(3))
        with pytest.raises(kina.ArgumentError, match="cuda:0 already"):
            host.from_host(session.zeros(3))


def pinned_tensor(host):
    return host.from_host(np.arange(6, dtype="f4"), memory=kina.memory.PinnedMemoryResource())


def test_pinned_memory_of_a_host_session_goes_to_the_device_and_comes_back(session):
    with kina.session("cpu") as host:
        pinned = pinned_tensor(host)
        address = pinned.__array_interface__["data"][0]
        taken = session.adopt(pinned[1:4])
        assert taken.__dlpack_device__() == (CUDA_HOST, 0)
        assert session.to_host(session.copy(taken)).tolist() == [1, 2, 3]
        session.synchronize()
        back = host.adopt(taken)
        assert back.__array_interface__["data"][0] == taken.__array_interface__["data"][0] == address + 4
        with stalled(session):
            session.copy(taken)
            with pytest.raises(kina.DLPackError, match=r"synchronize\(\)"):
                host.adopt(taken)
        session.synchronize()
        with kina.session(kina.Runtime(0)) as other:
            again = other.adopt(taken)
            assert other.to_host(other.copy(again)).tolist() == [1, 2, 3]
            assert session.adopt(again).runtime_identity == session.runtime_identity
            del again
            other.synchronize()
        del taken, back


@pytest.mark.multi_gpu
def test_pinned_memory_in_the_order_of_another_device_is_refused(session):
    with kina.session("cpu") as host:
        taken = session.adopt(pinned_tensor(host))
        with kina.session(kina.Runtime(1)) as far, pytest.raises(kina.ForeignDeviceError, match="another device"):
            far.adopt(taken)


def test_copies_for_the_host(session, managed_tensor):
    session.synchronize()
    with kina.session("cpu") as host:
        pinned = pinned_tensor(host)
        for source, named in ((pinned, None), (managed_tensor, (CPU, 0))):
            capsule = source.__dlpack__(copy=True, dl_device=named, max_version=(1, 0))
            given = managed_of(capsule)
            assert (given.dl_tensor.device.device_type, given.flags & 2) == (CPU, 2)
        copied = np.from_dlpack(pinned, copy=True)
        copied[0] = 7
        assert host.to_host(pinned)[0] == 0
    with pytest.raises(kina.DLPackError, match=r"s\.copy"):
        managed_tensor.__dlpack__(copy=True)


def test_tensors_of_the_host_are_uploaded(session):
    with kina.session("cpu") as host:
        for tensor in (host.from_host(np.arange(6, dtype="f4").reshape(2, 3)).permute(1, 0), pinned_tensor(host)[::2]):
            assert session.to_host(session.from_host(tensor)).tolist() == host.to_host(tensor).tolist()
            assert host.to_host(host.from_host(tensor)).tolist() == host.to_host(tensor).tolist()
    with pytest.raises(kina.ArgumentError, match="cuda:0 already"):
        session.from_host(session.zeros(3))


def refused(tensor):
    try:
        np.asarray(tensor)
    except BufferError as error:
        return "synchronize()" in str(error)
    return False


def test_the_host_waits_for_whoever_adopted_what_was_adopted(session, managed_tensor):
    """Another library's managed memory, adopted by one session, and from that by another."""
    session.synchronize()
    lent = Producer((6,), device=(MANAGED, 0), data=address_of(session, managed_tensor))
    with kina.session(kina.Runtime(0)) as first, kina.session(kina.Runtime(0)) as second:
        taken = first.adopt(lent)
        again = second.adopt(taken)
        first.synchronize()
        second.synchronize()
        assert not refused(taken)
        with stalled(second):
            second.copy(again)
            assert refused(again)
            assert refused(taken)
        second.synchronize()
        assert not refused(taken)
        del taken, again
        second.synchronize()
        first.synchronize()


@pytest.mark.parametrize("consumer", [1, -1], ids=["legacy", "unknown"])
def test_the_host_waits_for_whom_an_adopter_gave_it_to(session, managed_tensor, consumer):
    with kina.session(kina.Runtime(0)) as other:
        adopted = other.adopt(managed_tensor)
        other.synchronize()
        session.synchronize()
        assert not refused(managed_tensor)
        capsule = adopted.to_dlpack(stream=consumer)
        assert refused(managed_tensor)  # nobody knows when that one is done
        session.synchronize()  # of the device
        assert not refused(managed_tensor)
        del capsule, adopted
        other.synchronize()
