"""Runtimes: identity, closing, and which of them a thread has."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
from helpers.cuda import ForeignStream, in_thread, stream_of

import kina


def identity_of_default():
    with kina.session("cuda:0") as session:
        return session.runtime_identity


# Identity -------------------------------------------------------------------------------------------------


def test_identities_are_never_reused():
    seen = set()
    for _ in range(50):
        runtime = kina.Runtime(0)
        seen |= {("runtime", runtime.identity), ("domain", runtime.allocation_domain)}
        del runtime
        gc.collect()
    assert len(seen) == 100


def test_identities_belong_to_the_runtime(session):
    runtime = session.runtime
    tensor = session.zeros(3)
    assert runtime.device == kina.DeviceId(0)
    assert runtime.identity == session.runtime_identity == tensor.runtime_identity == tensor[1:].runtime_identity
    assert runtime.allocation_domain == session.allocation_domain == tensor.allocation_domain
    assert runtime.identity != runtime.allocation_domain
    assert hash(runtime.identity) == hash(session.runtime_identity)


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", kina.DeviceId(0)])
def test_devices(device):
    assert kina.Runtime(device).device == kina.DeviceId(0)


def test_a_device_that_is_not_there():
    count = len(kina.devices())
    for device in (count, f"cuda:{count}", kina.DeviceId(count)):
        with pytest.raises(kina.UnavailableError, match=f"cuda:{count} does not exist"):
            kina.Runtime(device)
    for device in (-1, True, "cpu", "cuda:-1", None, 1.0):
        with pytest.raises(kina.InvalidConfigError):
            kina.Runtime(device)
    for device in (2**31, 2**64, f"cuda:{2**31}"):
        with pytest.raises((kina.UnavailableError, kina.InvalidConfigError)):
            kina.Runtime(device)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copies_are_refused(runtime, take):
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        take(runtime)


def test_what_it_says_of_itself(runtime):
    number = repr(runtime).split()[1]
    assert repr(runtime) == f"<kina.Runtime {number} on cuda:0, own stream>"
    runtime.close()
    assert repr(runtime) == f"<kina.Runtime {number} on cuda:0, own stream, closed>"


def test_two_runtimes_of_a_device_share_nothing(session):
    ours = session.full(3, 1.0)
    with kina.session(kina.Runtime(0)) as other:
        theirs = other.full(3, 2.0)
        assert theirs.runtime_identity != ours.runtime_identity
        assert theirs.allocation_domain != ours.allocation_domain
        for call in (session.to_host, session.copy):
            with pytest.raises(kina.ForeignRuntimeError, match=r"adopt"):
                call(theirs)
        assert other.counters().allocations == session.counters().allocations == 1
        assert session.to_host(ours).tolist() == [1.0] * 3


@pytest.mark.multi_gpu
def test_runtimes_of_two_devices(session):
    with kina.session("cuda:1") as other:
        theirs = other.full(3, 2.0)
        assert theirs.device == "cuda:1"
        for call in (session.to_host, session.copy, session.adopt):
            with pytest.raises(kina.ForeignDeviceError, match="cuda:1"):
                call(theirs)
        assert other.to_host(theirs).tolist() == [2.0] * 3
        assert session.to_host(session.full(3, 1.0)).tolist() == [1.0] * 3


# Closing --------------------------------------------------------------------------------------------------


def test_close(runtime):
    assert not runtime.closed
    with pytest.raises(kina.RuntimeBusyError, match="leave its sessions first"), kina.session(runtime):
        runtime.close()
    assert not runtime.closed
    runtime.close()
    runtime.close()
    assert runtime.closed
    with pytest.raises(kina.SessionClosedError, match="closed"):
        kina.session(runtime).__enter__()


def test_close_of_a_with_block():
    with kina.Runtime(0) as runtime, kina.session(runtime) as session:
        session.zeros(3)
    assert runtime.closed


def test_close_waits_and_releases(runtime):
    with kina.session(runtime) as session:
        session.from_host(range(10))
        assert session.counters().pending > 0
    runtime.close()
    assert runtime.closed


def test_tensors_outlive_their_runtime():
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        tensor = session.full(5, 4.0)
    runtime.close()
    domain = runtime.allocation_domain
    del runtime, session
    gc.collect()
    assert tensor.allocation_domain == domain
    other = kina.Runtime(0)
    with kina.session(other) as session:
        assert session.to_host(session.adopt(tensor)).tolist() == [4.0] * 5
    del tensor
    gc.collect()
    other.close()


def test_a_runtime_without_a_reference_lives_with_its_session():
    with kina.session(kina.Runtime(0)) as session:
        gc.collect()
        assert session.to_host(session.full(2, 1.0)).tolist() == [1.0, 1.0]


# Defaults of threads --------------------------------------------------------------------------------------


def test_one_default_per_thread_and_device():
    assert identity_of_default() == identity_of_default()
    assert in_thread(identity_of_default) != identity_of_default()
    if len(kina.devices()) > 1:
        with kina.session(1) as second:
            assert second.runtime_identity != identity_of_default()


def test_a_closed_default_is_replaced():
    def work():
        with kina.session("cuda:0") as session:
            runtime = session.runtime
        runtime.close()
        return runtime.identity, identity_of_default()

    closed, replaced = in_thread(work)
    assert closed != replaced


def test_a_thread_takes_its_defaults_with_it():
    """The stream comes back once the thread is gone: its Runtime is not kept."""
    handles = []

    def work():
        with kina.session("cuda:0") as session:
            handles.append(stream_of(session))

    in_thread(work)
    with kina.session("cuda:0"):
        pass  # releases what the thread had
    gc.collect()
    kept = [kina.Runtime(0) for _ in range(40)]
    found = set()
    for runtime in kept:
        with kina.session(runtime) as session:
            found.add(stream_of(session))
    assert handles[0] in found


def test_a_thread_keeps_its_tensors_usable():
    tensor = in_thread(lambda: kina.full(4, 6.0, device="cuda:0"))
    gc.collect()
    with kina.session("cuda:0") as session:
        assert session.to_host(session.adopt(tensor)).tolist() == [6.0] * 4


def test_a_shared_runtime_serves_one_thread_at_a_time(runtime):
    tried, failures = [], []
    start = threading.Barrier(4, timeout=30)

    def work():
        start.wait()
        for _ in range(50):
            try:
                with kina.session(runtime) as session:
                    session.zeros(10)
                tried.append("in")
            except kina.RuntimeBusyError:
                tried.append("busy")
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert "in" in tried
    with kina.session(runtime) as session:
        session.synchronize()


def test_an_adopted_runtime_can_be_named(runtime):
    stream = ForeignStream()
    adopted = kina.Runtime(0, stream=stream)
    with kina.session(adopted) as session:
        assert stream_of(session) == stream.handle
    with pytest.raises(kina.InvalidConfigError, match="has its stream already"):
        kina.session(runtime, stream=stream)
    del session
    adopted.close()
    del adopted
    stream.destroy()
