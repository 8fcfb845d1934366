"""Other people's code in the middle of kina's: arguments, producers, deleters, finalisers and other threads."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
from helpers.cuda import (
    KERNELS,
    ForeignStream,
    driver,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    set_current,
    stack,
    stream_of,
    unchanged,
    until,
    view,
)
from helpers.managed import CUDA, DELETER, Producer, managed_of

import kina

KEPT = []  # the structures and callbacks of producers: who deletes them may still be inside them


@pytest.fixture
def other():
    made = kina.Runtime(0)
    yield made
    if not made.closed:
        made.close()


@pytest.fixture
def lender(other):
    """An open session of another Runtime, whose memory is adopted, and given back to the driver at once."""
    with kina.session(other, memory=kina.memory.CudaAsyncMemoryResource(0)) as opened:
        yield opened


def fill(raw, signature="mut f32[], f32, u32"):
    return raw.module(KERNELS).function("fill", signature)


def produced(address, size, deleter):
    """A producer of device memory, whose deleter runs Python."""
    made = Producer((size,), device=(CUDA, 0), data=address, versioned=False)
    callback = DELETER(deleter)
    made.managed.deleter = ctypes.cast(callback, ctypes.c_void_p).value
    KEPT.append((made, callback))
    return made


# Arguments of a launch ------------------------------------------------------------------------------------


def test_a_number_closes_the_session(runtime):
    session = kina.session(runtime)
    session.__enter__()
    tensor = session.zeros(16)
    raw = session.raw()
    raw.__enter__()
    function = fill(raw)
    launches = session.counters().launches

    class Number:
        def __index__(self):
            session.close()
            return 16

    with pytest.raises(kina.SessionClosedError):
        function.launch(kina.LaunchConfig.linear(16), tensor, 1.0, Number())
    assert session.closed
    with kina.session(runtime) as after:
        assert after.counters().launches == launches
        assert after.to_host(tensor).tolist() == [0.0] * 16


def test_a_dtype_closes_the_session(runtime):
    """Without a signature too, where refs come before the number that ends them."""
    session = kina.session(runtime)
    session.__enter__()
    tensor = session.zeros(16)
    raw = session.raw()
    raw.__enter__()
    function = fill(raw, None)
    ref = raw.mut(tensor)
    launches = session.counters().launches

    class Number(np.uint32):
        @property
        def dtype(self):
            session.close()
            return np.dtype("u4")

    with pytest.raises(kina.SessionClosedError):
        function.launch(kina.LaunchConfig.linear(16), ref, kina.f32(1.0), Number(16))
    assert not ref.alive
    with kina.session(runtime) as after:
        assert after.counters().launches == launches
        assert after.to_host(tensor).tolist() == [0.0] * 16


def dropped_in_a_launch():
    owner = kina.Runtime(0)
    runtime = kina.Runtime(0)
    lender = kina.session(owner)
    lender.__enter__()
    lent = lender.zeros(16)
    lender.synchronize()
    held = [kina.session(runtime)]
    held[0].__enter__()
    tensor = held[0].adopt(lent)
    held.append(held[0].raw())
    held[1].__enter__()
    function = held[1].module(KERNELS).function("fill", "mut f32[], f32, u32")

    class Number:
        def __index__(self):
            held.clear()  # as another thread may whenever the interpreter changes threads
            return 16

    with pytest.raises(kina.SessionClosedError):
        function.launch(kina.LaunchConfig.linear(16), tensor, 1.0, Number())
    assert lender.to_host(lent).tolist() == [0.0] * 16
    lender.close()


def test_a_number_drops_the_session():
    run_body(dropped_in_a_launch)


# A session is not left while a call of it is under way ----------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("direction", ["from_host", "to_host"])
def test_another_thread_closes_the_session_in_a_transfer(sim, runtime, direction):
    host = np.arange(20 << 20, dtype=np.float32)  # more than all staging blocks hold: it ends with the stream's stall
    seen = []
    with kina.session(runtime) as session:
        handle = stream_of(session)
        tensor = session.from_host(host) if direction == "to_host" else None
        session.synchronize()

        def interfere():
            try:
                until(lambda: sim.pending(handle) > 0)
                for close in (session.close, runtime.close):
                    try:
                        close()
                    except kina.KinaError as error:
                        seen.append(type(error))
            finally:
                sim.resume(handle)

        sim.stall(handle)
        thread = threading.Thread(target=interfere)
        thread.start()
        if direction == "to_host":
            assert np.array_equal(session.to_host(tensor), host)
        else:
            tensor = session.from_host(host)
        thread.join()
        assert seen == [kina.WrongThreadError, kina.RuntimeBusyError]
        assert not session.closed
        assert np.array_equal(session.to_host(tensor), host)


@pytest.mark.parametrize("current", ["own", "none"])
def test_a_producer_closes_the_session(foreign, current):
    seen = []

    class Refusing:
        def __dlpack_device__(self):
            return (CUDA, 0)

        def __dlpack__(self, **_):
            with pytest.raises(kina.RuntimeBusyError, match="under way"):
                session.close()
            seen.append(stack())
            raise BufferError("no")

    with on_stack(foreign), unchanged(), kina.session(0) as session:
        if current == "none":
            set_current(0)  # a library left none current inside the block
        inside = stack()
        with pytest.raises(kina.DLPackError):
            session.adopt(Refusing())
        assert len(seen) == 1
        assert stack() == inside
        assert session.to_host(session.full(3, 2.0)).tolist() == [2.0] * 3


def closed_by_the_collector():
    import contextlib

    array = np.ones(4, np.float32)
    errors = (kina.SessionClosedError, kina.RuntimeBusyError)
    runtime = kina.Runtime(0)

    class Cycle:
        def __init__(self, session):
            self.me = self
            self.session = session

        def __del__(self):
            with contextlib.suppress(*errors):
                self.session.close()

    for threshold in range(1, 60):
        before = stack()
        session = kina.session(runtime)
        session.__enter__()
        gc.collect()
        gc.disable()
        Cycle(session)
        gc.set_threshold(threshold, 1, 1)
        gc.enable()
        with contextlib.suppress(*errors):
            session.from_host(array)
        gc.set_threshold(700, 10, 10)
        session.close()
        assert stack() == before
    runtime.close()


def test_the_collector_closes_the_session():
    run_body(closed_by_the_collector)


def test_a_deleter_closes_the_session_that_is_left(foreign, runtime, lender):
    base = lender.zeros(1024)
    address = view(lender, base)
    lender.synchronize()
    seen = []

    def close(_):
        # What a deleter raises goes nowhere: it is looked at here.
        try:
            session.close()
        except kina.KinaError as error:
            seen.append(type(error))

    with on_stack(foreign), unchanged():
        session = kina.session(runtime)
        session.__enter__()
        tensor = session.adopt(produced(address, 1024, close))
        session.copy(tensor)
        del tensor
        session.completion().wait()  # done, and not looked at until the next seal: that of the end
        tensor = session.adopt(produced(address, 1024, lambda _: None))
        session.copy(tensor)
        del tensor
        assert seen == []
        session.close()
        assert seen == [kina.RuntimeBusyError]
        assert session.closed
    with kina.session(runtime) as after:
        assert after.to_host(after.full(3, 2.0)).tolist() == [2.0] * 3
        after.synchronize()


# Adopted memory -------------------------------------------------------------------------------------------


def handed_to_and_fro():
    a, b = kina.session(kina.Runtime(0)), kina.session(kina.Runtime(0))
    with a, b:
        tensor = a.full(4, 3.0)
        address = view(a, tensor)
        for _ in range(10_000):
            tensor = a.adopt(b.adopt(tensor))
        assert view(a, tensor) == address
        assert a.to_host(tensor).tolist() == [3.0] * 4
        del tensor  # a chain of storages would overflow the stack here
        a.synchronize()
        b.synchronize()


def test_handed_back_and_forth():
    run_body(handed_to_and_fro)


def test_a_tensor_comes_home(runtime, lender):
    with kina.session(runtime) as session:
        away = session.adopt(lender.full(4, 3.0))
        home = lender.adopt(away)
        assert lender.to_host(home).tolist() == [3.0] * 4
        assert session.to_host(away).tolist() == [3.0] * 4
        with pytest.raises(kina.ForeignRuntimeError):
            session.to_host(home)


@pytest.mark.simulated
def test_a_transfer_that_breaks_off_keeps_its_source(sim, session, lender):
    """Its last copies come after the seal that covers the first."""
    lent = lender.zeros(3 << 20)
    lender.synchronize()
    tensor = session.adopt(lent)
    session.synchronize()
    handle = stream_of(session)
    frees = sim.calls("cuMemFreeAsync")
    sim.stall(handle)
    for name in ("cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"):
        sim.fail(name, 3, 999)

    def let_the_first_go():
        until(lambda: sim.pending(handle) >= 3)
        sim.step(handle, 2)

    thread = threading.Thread(target=let_the_first_go)
    thread.start()
    with pytest.raises(kina.DriverError):
        session.to_host(tensor)
    thread.join()
    sim.clear_faults()
    assert sim.pending(handle) > 0
    del tensor, lent
    session.completion()  # a seal looks at the older ones
    assert sim.calls("cuMemFreeAsync") == frees
    sim.resume(handle)
    session.synchronize()


@pytest.mark.simulated
def test_an_export_of_adopted_memory_waits(sim, session, lender):
    """On the adopter's own stream too: whose memory it is does not know of that."""
    lent = lender.zeros(1 << 20)
    lender.synchronize()
    tensor = session.adopt(lent)
    session.synchronize()
    handle = stream_of(session)
    capsule = tensor.to_dlpack(stream=handle)
    address = managed_of(capsule).dl_tensor.data
    since = sim.position
    with sim.stalled(handle):
        with on_stack(primary_context()):
            ok(driver.cuMemsetD8Async(address, 1, 4 << 20, driver.CUstream(handle)))
        del capsule, tensor, lent
        gc.collect()
        assert sim.pending(handle) > 0
        # (Pools of tests before may give back theirs.)
        assert [free for free in sim.trace(since, name="cuMemFreeAsync") if free["handle"] == address] == []
    session.synchronize()
    lender.synchronize()
    until(lambda: [free for free in sim.trace(since, name="cuMemFreeAsync") if free["handle"] == address])
    assert [free["result"] for free in sim.trace(since, name="cuMemFreeAsync") if free["handle"] == address] == [0]


@pytest.mark.simulated
def test_a_deleter_enqueues_while_the_session_synchronizes(sim, session, lender):
    """What a release enqueues and leases is not what was waited for."""
    base = lender.zeros(1024)
    address = view(lender, base)
    others = [session.adopt(lender.zeros(1 << 20))]
    lender.synchronize()
    handle = stream_of(session)
    frees = []

    def enqueue(_):
        sim.stall(handle)
        session.copy(others.pop())
        frees.append(sim.calls("cuMemFreeAsync"))

    tensor = session.adopt(produced(address, 1024, enqueue))
    session.copy(tensor)
    del tensor
    try:
        session.completion()
        with sim.failing("cuEventQuery", result=600, from_then_on=True):  # for the reaper nothing is done
            session.synchronize()
        assert frees == [sim.calls("cuMemFreeAsync")]
        assert sim.pending(handle) > 0
    finally:
        sim.resume(handle)
    session.synchronize()
    until(lambda: sim.calls("cuMemFreeAsync") > frees[0])


# Streams and contexts -------------------------------------------------------------------------------------


def test_the_stream_of_a_raw_block_in_another_thread(session):
    with session.raw() as raw:
        stream = raw.stream
        with pytest.raises(kina.WrongThreadError):
            in_thread(stream.__cuda_stream__)
        assert stream.__cuda_stream__() == (0, raw.unsafe_stream_handle())


@pytest.mark.simulated
def test_a_runtime_that_fails_loses_no_stream(sim):
    kina.Runtime(0).close()
    gc.collect()
    before = sim.live()["streams"]
    for _ in range(5):
        with sim.failing("cuStreamGetId"), pytest.raises(kina.KinaError):
            kina.Runtime(0)
    assert sim.live()["streams"] == before


def test_a_capture_survives_a_drop(session):
    """The legacy stream orders a blocking one: to fence a tensor that it once got would end the capture."""
    tensor = session.full(4, 3.0)
    capsule = tensor.to_dlpack(stream=1)
    session.synchronize()
    stream = ForeignStream(flags=0)
    handle = driver.CUstream(stream.handle)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    del capsule, tensor
    gc.collect()
    with pytest.raises(kina.UnsupportedError):
        session.zeros(4).to_dlpack(stream=1)
    with on_stack(primary_context()):
        graph = ok(driver.cuStreamEndCapture(handle))
        ok(driver.cuGraphDestroy(graph))
    stream.destroy()
    session.synchronize()  # and what was kept is released


@pytest.mark.simulated
def test_a_context_that_does_not_tell_its_id(sim, runtime):
    """It was not reset: only its end, or another id, says so."""
    sim.fail("cuCtxGetId", 1, 999)
    faults = sim.faults_delivered
    with kina.session(runtime) as session:
        assert sim.faults_delivered == faults + 1
        assert session.to_host(session.full(3, 2.0)).tolist() == [2.0] * 3
