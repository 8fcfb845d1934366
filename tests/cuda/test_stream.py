"""Streams: the pool behind Runtimes, and streams of other libraries that a session adopts."""

from __future__ import annotations

import functools
import gc
import weakref

import numpy as np
import pytest
from helpers.cuda import (
    ForeignStream,
    driver,
    foreign_context,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    stalled,
    stream_of,
)

import kina


def round_trip(session):
    values = np.arange(100, dtype=np.float32)
    assert np.array_equal(session.to_host(session.copy(session.from_host(values))), values)


@pytest.fixture
def stream():
    made = ForeignStream()
    yield made
    made.synchronize()
    made.destroy()


# The pool -------------------------------------------------------------------------------------------------


def test_a_stream_comes_back_and_is_used_again():
    gc.collect()  # streams that other tests left in cycles would lie above this one
    first = kina.Runtime(0)
    with kina.session(first) as session:
        handle = stream_of(session)
        del session
    del first
    gc.collect()
    with kina.session(kina.Runtime(0)) as session:
        assert stream_of(session) == handle


def test_a_stream_comes_back_only_with_the_last_tensor():
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        handle = stream_of(session)
        tensor = session.full(10, 3.0)
    runtime.close()
    del runtime, session
    gc.collect()
    kept = kina.Runtime(0)
    with kina.session(kept) as session:
        assert stream_of(session) != handle
    del tensor, session
    gc.collect()
    with kina.session(kina.Runtime(0)) as session:
        assert stream_of(session) == handle


def test_a_stream_may_come_back_busy():
    """Pending work is no obstacle: the next Runtime is ordered after it."""
    session = kina.session(kina.Runtime(0))
    session.__enter__()
    handle = stream_of(session)
    with stalled(handle):
        session.full(10, 3.0)
        session.close()
        del session
        gc.collect()
        with kina.session(kina.Runtime(0)) as later:
            assert stream_of(later) == handle
            tensor = later.full(10, 4.0)
    with kina.session(later.runtime) as session:
        assert session.to_host(tensor).tolist() == [4.0] * 10


def test_two_runtimes_have_two_streams(session):
    with kina.session(kina.Runtime(0)) as other:
        assert stream_of(other) != stream_of(session)
        assert other.runtime_identity != session.runtime_identity
        assert other.allocation_domain != session.allocation_domain


@pytest.mark.simulated
def test_the_pool_is_bounded(sim):
    runtimes = [kina.Runtime(0) for _ in range(50)]
    created = sim.live()["streams"]
    del runtimes
    gc.collect()
    assert created - 50 + 32 >= sim.live()["streams"]
    before = sim.live()["streams"]
    runtimes = [kina.Runtime(0) for _ in range(32)]
    assert sim.live()["streams"] == before
    del runtimes


# Adoption -------------------------------------------------------------------------------------------------


def test_the_session_runs_on_the_adopted_stream(stream):
    with kina.session("cuda:0", stream=stream) as session:
        assert stream_of(session) == stream.handle
        with session.raw() as raw:
            assert raw.stream.__cuda_stream__() == (0, stream.handle)
        round_trip(session)
    assert "adopted stream" in repr(session.runtime)


def test_one_runtime_per_stream_and_thread(stream):
    def identity():
        with kina.session("cuda:0", stream=stream) as session:
            return session.runtime_identity

    assert identity() == identity()
    assert in_thread(identity) != identity()
    with kina.session("cuda:0") as session:
        assert session.runtime_identity != identity()


def test_order_with_the_owner(stream):
    """What the owner enqueued before is seen, what it enqueues after sees ours."""
    with kina.session("cuda:0", stream=stream) as session, stalled(stream):
        tensor = session.full(1000, 1.0)
        with session.raw() as raw:
            address = raw.unsafe_address(raw.ref(tensor))
        with on_stack(primary_context()):
            ok(driver.cuMemsetD32Async(address, 0x40000000, 500, driver.CUstream(stream.handle)))
        after = session.copy(tensor)
    with kina.session("cuda:0", stream=stream) as session:
        assert session.to_host(after).tolist() == [2.0] * 500 + [1.0] * 500


def test_the_owner_is_held(stream):
    class Owner:
        def __cuda_stream__(self):
            return (0, stream.handle)

    owner = Owner()
    gone = weakref.ref(owner)

    def use(owner):
        with kina.session("cuda:0", stream=owner) as session:
            return session.full(4, 1.0)

    tensor = in_thread(functools.partial(use, owner))
    del owner
    gc.collect()
    assert gone() is not None  # the tensor is freed on its stream
    del tensor
    gc.collect()
    with kina.session("cuda:0"):
        pass  # what other threads let go is released where the GIL is held
    assert gone() is None


def test_a_recreated_stream_is_another(stream):
    """Keyed by the driver's number of the stream, not by its handle, which comes back."""
    seen = {}
    made = [stream]
    for _ in range(20):
        again = ForeignStream()
        with kina.session("cuda:0", stream=again) as session:
            identity = session.runtime_identity
            round_trip(session)
            del session
        assert identity not in seen
        seen[identity] = again.handle
        again.destroy()
    assert len(made) == 1


def test_the_number_of_kept_runtimes_is_bounded():
    streams = [ForeignStream() for _ in range(34)]

    def identity(stream):
        with kina.session("cuda:0", stream=stream) as session:
            return session.runtime_identity

    def sweep():
        first = [identity(stream) for stream in streams]
        assert identity(streams[-1]) == first[-1]
        assert identity(streams[2]) == first[2]  # of the newest 32
        assert identity(streams[0]) != first[0]  # pushed out by the newer ones

    in_thread(sweep)
    with kina.session("cuda:0"):
        pass
    for stream in streams:
        stream.destroy()


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_stream(handle):
    with kina.session("cuda:0", stream=ForeignStream(handle)) as session:
        assert stream_of(session) == 1
        round_trip(session)
        identity = session.runtime_identity
    with kina.session("cuda:0", stream=ForeignStream(1 - handle)) as session:
        assert session.runtime_identity == identity


def test_a_closed_runtime_is_replaced(stream):
    with kina.session("cuda:0", stream=stream) as session:
        first = session.runtime
    first.close()
    with kina.session("cuda:0", stream=stream) as session:
        assert session.runtime is not first


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("stream", "error", "words"),
    [
        (5, kina.ArgumentError, "int is no stream"),
        (object(), kina.ArgumentError, "object is no stream"),
        (Answers(7), kina.ArgumentError, "answered 7"),
        (Answers((0,)), kina.ArgumentError, "answered"),
        (Answers((0, "x")), kina.ArgumentError, "answered"),
        (Answers((0, None)), kina.ArgumentError, "answered"),
        (Answers((1, 1)), kina.UnsupportedError, "version 1"),
        (Answers((0, 2)), kina.UnsupportedError, "per-thread"),
        (Answers((0, -1)), kina.UnsupportedError, "-1 is not the handle"),
        (Answers((0, 2**64)), kina.UnsupportedError, "not the handle"),
        (Answers(KeyError("the owner's own")), KeyError, "the owner's own"),
    ],
)
def test_what_is_refused(stream, error, words):
    with pytest.raises(error, match=words):
        kina.session("cuda:0", stream=stream)
    with pytest.raises(error, match=words):
        kina.Runtime(0, stream=stream)
    with kina.session("cuda:0") as session:
        round_trip(session)


def test_a_stream_of_a_foreign_context_is_refused():
    with foreign_context() as context:
        stream = ForeignStream(context=context)
        with pytest.raises(kina.ForeignDeviceError, match="does not belong to the primary context"):
            kina.session("cuda:0", stream=stream)
        stream.destroy()


@pytest.mark.multi_gpu
def test_a_stream_of_another_device_is_refused():
    stream = ForeignStream(context=primary_context(1))
    with pytest.raises(kina.ForeignDeviceError, match="cuda:0"):
        kina.session("cuda:0", stream=stream)
    with kina.session("cuda:1", stream=stream) as session:
        assert session.device == "cuda:1"
        round_trip(session)
    in_thread(lambda: None)
    stream.synchronize()
    stream.destroy()


@pytest.mark.simulated  # on hardware the driver's answer for such a handle is not defined
def test_a_handle_that_is_no_stream(sim):
    with pytest.raises(kina.ForeignDeviceError, match="could not be asked"):
        kina.session("cuda:0", stream=ForeignStream(0x1234560))


def test_a_stream_may_go_once_its_session_is_over():
    """Whatever was done on it, kept beyond it and let go of afterwards: it is not touched any more."""

    def body():
        import gc

        from helpers.cuda import KERNELS, ForeignStream, simulation

        sim = simulation()
        lender = kina.Runtime(0)
        with kina.session(lender) as session:
            lent = session.full(1000, 2.0)
            session.synchronize()
        stream = ForeignStream()
        with kina.session(0, stream=stream) as session, session.raw() as raw:
            first, kept = session.full(1000, 1.0), session.full(1 << 20, 1.0)
            copied = session.copy(session.adopt(lent))
            raw.module(KERNELS).function("add_one", "mut f32[], u32").launch(
                kina.LaunchConfig.linear(1000), first, 1000
            )
            assert session.to_host(first)[5] == 2.0
            del first
        stream.synchronize()
        stream.destroy()
        since = sim.position if sim else 0
        del kept, copied, lent, session, raw
        others = [ForeignStream() for _ in range(40)]
        for other in others:  # more than a thread keeps the Runtimes of
            with kina.session(0, stream=other) as session:
                session.full(10, 1.0)
        del session
        gc.collect()
        with kina.session(lender) as session:
            session.synchronize()
            assert session.to_host(session.full(1 << 20, 3.0))[7] == 3.0
        if sim:
            assert [call["name"] for call in sim.trace(since) if call["stream"] == stream.handle] == []
            assert sim.violations == 0

    run_body(body)


# Other libraries ------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_stream_of_torch():
    import torch

    stream = torch.cuda.Stream()
    with kina.session("cuda:0", stream=stream) as session:
        assert stream_of(session) == stream.cuda_stream
        with torch.cuda.stream(stream):
            theirs = torch.arange(1000, dtype=torch.float32, device="cuda")
            ours = session.adopt(theirs)
        assert np.array_equal(session.to_host(ours), np.arange(1000, dtype=np.float32))


@pytest.mark.gpu
def test_a_stream_of_cupy():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with kina.session("cuda:0", stream=stream) as session:
        assert stream_of(session) == stream.ptr
        round_trip(session)


@pytest.mark.gpu
def test_a_stream_of_cuda_core():
    from cuda import core

    device = core.Device(0)
    with on_stack(primary_context()):
        device.set_current()
        stream = device.create_stream()
    with kina.session("cuda:0", stream=stream) as session:
        assert stream_of(session) == int(stream.handle)
        round_trip(session)
