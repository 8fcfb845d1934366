# ruff: noqa: F821
# Bodies run in a process of their own, behind the names of helpers.cuda.PRELUDE.
"""Who waits for whom when memory crosses to other streams, and that nothing is reused before they are past it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import time
import types

import pytest
from helpers.cuda import (
    ForeignStream,
    driver,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    set_current,
    simulation,
    stalled,
    stream_of,
    view,
)
from helpers.exchange import delete, export
from helpers.managed import managed_of

import kina

MANY = 1000
NOT_READY = 600
LEGACY, PER_THREAD = 1, 2

HOMES = ["own", "legacy", "foreign"]
#: Whose stream it is: nobody's, or one that kina knows to live.
OTHERS = ["legacy", "per-thread", "own", "adopted", "foreign"]
KNOWN = ["legacy", "own", "adopted"]


def is_held_up(stream: int) -> bool:
    """Is the stream, on which there is next to nothing to do, not done with it after a while?"""
    until = time.monotonic() + (0.2 if simulation() is not None else 0.05)
    with on_stack(primary_context()):
        while int(driver.cuStreamQuery(driver.CUstream(stream))[0]) == NOT_READY:
            if time.monotonic() > until:
                return True
    return False


def copy_on(stream: int, target: int, source: int) -> None:
    with on_stack(primary_context()):
        ok(driver.cuMemcpyDtoDAsync(target, source, MANY * 4, driver.CUstream(stream)))


def wait_for(stream: int) -> None:
    with on_stack(primary_context()):
        ok(driver.cuStreamSynchronize(driver.CUstream(stream)))


class Lent:
    """A tensor of somebody who is not kina, as far as a session can see."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **wishes):
        return self.tensor.__dlpack__(**wishes)


@pytest.fixture
def cast():
    """Makes sessions and streams of every kind; all end with the test."""
    with contextlib.ExitStack() as made:

        def session(kind):
            if kind == "own":
                return made.enter_context(kina.session(kina.Runtime(0)))
            return made.enter_context(kina.session(0, stream=ForeignStream(0) if kind == "legacy" else stream()))

        def stream():
            foreign = ForeignStream()
            made.callback(foreign.destroy)
            made.callback(foreign.synchronize)
            return foreign

        def other(kind):
            """A stream with __cuda_stream__."""
            if kind in ("legacy", "per-thread"):
                return ForeignStream(LEGACY if kind == "legacy" else PER_THREAD)
            if kind == "own":
                return ForeignStream(stream_of(session("own")))
            foreign = stream()
            if kind == "adopted":
                made.enter_context(kina.session(0, stream=foreign))
            return foreign

        yield types.SimpleNamespace(session=session, other=other)
        gc.collect()
        with kina.session(kina.Runtime(0)) as last:
            last.synchronize()


PAIRS = [(home, other) for home in HOMES for other in OTHERS if (home, other) != ("legacy", "legacy")]


# Exports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("home", "consumer"), PAIRS)
def test_a_consumer_reads_what_the_home_stream_has_written(cast, home, consumer):
    session, stream = cast.session(home), cast.other(consumer).handle
    target = session.zeros(MANY)
    session.synchronize()
    with stalled(session):
        tensor = session.full(MANY, 5.0)
        capsule = tensor.to_dlpack(stream=stream)
        copy_on(stream, view(session, target), view(session, tensor))
        assert is_held_up(stream)
    wait_for(stream)
    assert session.to_host(target).tolist() == [5.0] * MANY
    del capsule


@pytest.mark.parametrize("consumer", OTHERS)
def test_a_session_may_be_closed_before_its_consumer_reads(cast, consumer):
    stream = cast.other(consumer).handle
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        target = session.zeros(MANY)
        session.synchronize()
        into = view(session, target)
        with stalled(session):
            tensor = session.full(MANY, 5.0)
            address = view(session, tensor)
            capsule = tensor.to_dlpack(stream=stream)
            session.close()
            del tensor
    copy_on(stream, into, address)
    wait_for(stream)
    with kina.session(runtime) as session:
        assert session.to_host(target).tolist() == [5.0] * MANY
        del capsule


@pytest.mark.parametrize(("home", "consumer"), [*PAIRS, *((home, "nobody") for home in HOMES)])
def test_a_consumer_reads_its_own_data_after_the_last_reference_went(cast, home, consumer):
    """Memory of a known stream is reused at once, by work that waits for that stream; other memory is not reused."""
    session = cast.session(home)
    stream = cast.other("foreign" if consumer == "nobody" else consumer).handle
    tensor, target = session.full(MANY, 1.0), session.zeros(MANY)
    session.synchronize()
    address, into = view(session, tensor), view(session, target)
    capsule = tensor.to_dlpack(stream=-1 if consumer == "nobody" else stream)
    del tensor
    with contextlib.nullcontext() if home == "legacy" and consumer == "per-thread" else stalled(stream):
        copy_on(stream, into, address)
        del capsule
        fresh = [session.full(MANY, float(-i)) for i in range(1, 4)]
        if consumer in KNOWN:
            assert address in [view(session, tensor) for tensor in fresh]
            assert is_held_up(stream_of(session))
        else:
            assert address not in [view(session, tensor) for tensor in fresh]
    wait_for(stream)
    assert session.to_host(target).tolist() == [1.0] * MANY
    session.synchronize()
    del fresh
    assert session.counters().allocations - session.counters().frees == 1  # the target


@pytest.mark.simulated
@pytest.mark.parametrize("home", ["legacy", "foreign"])
@pytest.mark.parametrize("way", ["table", "capsule"])
def test_a_library_on_its_own_stream_goes_on_after_the_session(home, way):
    """A tensor made on a library's stream is given to that: nothing is to be ordered until the library drops it."""
    nbytes = 64 << 20  # more than is cached by size

    def make():
        with kina.session(kina.Runtime(0, stream=stream)) as session:
            tensor = session.zeros(nbytes, "uint8")
            given = export(tensor) if way == "table" else tensor.to_dlpack(stream=stream.handle)
            return given, view(session, tensor)

    stream = ForeignStream(LEGACY if home == "legacy" else None)
    given, address = make()
    simulation().wait_idle()
    with stalled(stream):
        with on_stack(primary_context()):
            ok(driver.cuMemsetD8Async(address, 1, nbytes, driver.CUstream(stream.handle)))
        if way == "table":
            delete(given)
        del given
        gc.collect()
        with kina.session(kina.Runtime(0)) as other:
            made = [other.full(nbytes, 7, "uint8") for _ in range(3)]
            assert address not in [view(other, each) for each in made]
    simulation().wait_idle()
    for each in made:
        with kina.session(kina.Runtime(0)) as reader:
            assert (reader.to_host(reader.adopt(each)) == 7).all()


@pytest.mark.parametrize("consumer", OTHERS)
def test_memory_without_stream_order_outlives_its_consumer(cast, consumer):
    resource = kina.memory.CudaMemoryResource(0)
    session, stream = cast.session("own"), cast.other(consumer).handle
    target = session.zeros(MANY)
    tensor = session.full(MANY, 1.0, memory=resource)
    session.synchronize()
    address, into = view(session, tensor), view(session, target)
    capsule = tensor.to_dlpack(stream=stream)
    del tensor
    with stalled(stream):
        copy_on(stream, into, address)
        del capsule
        fresh = session.full(MANY, -1.0, memory=resource)
        assert view(session, fresh) != address
        assert resource.live_bytes == 2 * 4 * MANY
    wait_for(stream)
    assert session.to_host(target).tolist() == [1.0] * MANY
    session.synchronize()
    assert resource.live_bytes == 4 * MANY


@pytest.mark.parametrize("consumer", [*OTHERS, "home"])
def test_adopted_memory_goes_back_after_its_consumer(cast, consumer):
    """Its owner knows of no consumer: it has the memory back when the device is past what they had."""
    lender, session = cast.session("own"), cast.session("own")
    stream = stream_of(session) if consumer == "home" else cast.other(consumer).handle
    source, target = lender.full(MANY, 1.0), session.zeros(MANY)
    adopted = session.adopt(Lent(source))
    session.synchronize()
    lender.synchronize()
    address, into = view(session, adopted), view(session, target)
    before = lender.counters().frees
    capsule = adopted.to_dlpack(stream=stream)
    del adopted, source
    with stalled(stream):
        copy_on(stream, into, address)
        del capsule
        fresh = [lender.full(MANY, float(-i)) for i in range(1, 4)]
        assert address not in [view(lender, tensor) for tensor in fresh]
        assert lender.counters().frees == before
    wait_for(stream)
    assert session.to_host(target).tolist() == [1.0] * MANY
    session.synchronize()
    lender.synchronize()
    del fresh
    assert lender.counters().frees == before + 4


def test_adopted_memory_that_was_exported_needs_no_occasion(cast):
    """As everything else of other libraries, an idle process gives it back."""
    lender, session = cast.session("own"), cast.session("own")
    adopted = session.adopt(Lent(lender.full(MANY, 1.0)))
    before = lender.counters().frees
    capsule = adopted.to_dlpack(stream=LEGACY)
    del adopted, capsule
    until = time.monotonic() + 20
    while lender.counters().frees == before:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("consumer", KNOWN)
def test_a_known_stream_costs_one_event_however_often_it_was_named(cast, consumer):
    session, stream = cast.session("own"), cast.other(consumer).handle
    tensor = session.zeros(MANY)
    for _ in range(1000):
        tensor.to_dlpack(stream=stream)
    before = session.counters()
    del tensor
    assert session.counters().events_recorded == before.events_recorded + 1
    assert session.counters().frees == before.frees + 1
    assert session.counters().host_waits == before.host_waits


def test_several_streams_are_all_waited_for(cast):
    session = cast.session("own")
    streams = [cast.other(kind).handle for kind in (*KNOWN, "own")]
    for late in streams:
        tensor = session.zeros(MANY)
        capsules = [tensor.to_dlpack(stream=stream) for stream in streams]
        session.synchronize()
        del tensor
        with stalled(late):
            capsules.clear()
            session.zeros(1)
            assert is_held_up(stream_of(session))


def test_more_streams_than_are_noted_count_as_unknown():
    runtimes = [kina.Runtime(0) for _ in range(33)]
    with kina.session(kina.Runtime(0)) as session:
        tensor = session.zeros(MANY)
        for runtime in runtimes:
            with kina.session(runtime) as other:
                tensor.to_dlpack(stream=stream_of(other))
        frees = session.counters().frees
        del tensor
        assert session.counters().frees == frees
        session.synchronize()
        assert session.counters().frees == frees + 1


def test_a_noted_runtime_lives_until_the_memory_goes(cast):
    """And its stream with it: it would be another's by then, or none."""
    session = cast.session("own")
    tensor = session.full(MANY, 1.0)
    with kina.session(kina.Runtime(0)) as other:
        stream = stream_of(other)
        capsule = tensor.to_dlpack(stream=stream)
        del other
    gc.collect()
    assert stream_of(cast.session("own")) != stream
    del tensor, capsule
    assert stream_of(cast.session("own")) == stream


def test_the_per_thread_stream_is_the_exporting_threads(cast):
    """The other thread's is held up by it; what that one has left is not waited for by ours."""
    session = cast.session("own")
    with stalled(session):
        tensor = session.full(MANY, 1.0)

        def export():
            with on_stack(primary_context()):
                capsule = tensor.to_dlpack(stream=PER_THREAD)
                assert is_held_up(PER_THREAD)
            return capsule

        capsule = in_thread(export)
        assert not is_held_up(PER_THREAD)
    frees = session.counters().frees
    del tensor, capsule
    assert session.counters().frees == frees  # nobody can name that stream any more
    session.synchronize()
    assert session.counters().frees == frees + 1


@pytest.mark.parametrize("consumer", ["legacy", "own", "foreign"])
def test_a_deleter_needs_neither_the_gil_nor_a_context(cast, consumer):
    session, stream = cast.session("own"), cast.other(consumer).handle
    tensor, target = session.full(MANY, 1.0), session.zeros(MANY)
    session.synchronize()
    address, into = view(session, tensor), view(session, target)
    capsule = tensor.__dlpack__(stream=stream, max_version=(1, 3))
    del tensor
    managed = managed_of(capsule)
    pointer = ctypes.addressof(managed)
    delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)
    from helpers.managed import rename

    rename(capsule, b"used_dltensor_versioned")
    with stalled(stream):
        copy_on(stream, into, address)
        in_thread(lambda: delete(pointer))  # ctypes lets go of the GIL for the call
        fresh = [session.full(MANY, float(-i)) for i in range(1, 4)]
        del fresh
        assert is_held_up(stream_of(session)) == (consumer != "foreign")
    wait_for(stream)
    assert session.to_host(target).tolist() == [1.0] * MANY
    session.synchronize()
    assert session.counters().allocations - session.counters().frees == 1


# PyTorch's streams ----------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("kind", "known", "asked"),
    [("pooled", True, 1), ("external", False, 4), ("another", False, 4), ("broken", False, 4), ("asleep", False, 0)],
)
def test_pooled_streams_of_torch_are_known(kind, known, asked):
    """PyTorch is asked about a handle once, and never woken or imported for it."""

    def body(kind, known, asked):
        import types

        stream, calls = ForeignStream(), []

        def current_stream(device):
            calls.append(device)
            if kind == "broken":
                raise RuntimeError("no CUDA here")
            handle = stream.handle + (16 if kind == "another" else 0)
            return types.SimpleNamespace(cuda_stream=handle, stream_id=7 if kind != "external" else stream.handle)

        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(is_initialized=lambda: kind != "asleep", current_stream=current_stream)
        sys.modules["torch"] = torch
        with kina.session(kina.Runtime(0)) as session:
            for turn in range(1, 5):
                tensor, target = session.full(1000, 1.0), session.zeros(1000)
                session.synchronize()
                address, into = view(session, tensor), view(session, target)
                frees = session.counters().frees
                capsule = tensor.to_dlpack(stream=stream.handle)
                del tensor
                with stalled(stream):
                    with on_stack(primary_context()):
                        ok(driver.cuMemcpyDtoDAsync(into, address, 4000, driver.CUstream(stream.handle)))
                    del capsule
                    assert session.counters().frees == frees + known
                    fresh = [session.full(1000, float(-i)) for i in range(1, 4)]
                stream.synchronize()
                assert session.to_host(target).tolist() == [1.0] * 1000
                del fresh
                session.synchronize()
                assert len(calls) == min(turn, asked)
                assert set(calls) <= {0}

    run_body(body, kind, known, asked)


@pytest.mark.simulated
def test_torch_is_never_imported():
    def body():
        stream = ForeignStream()
        with kina.session(0) as session:
            session.zeros(3).to_dlpack(stream=stream.handle)
            session.synchronize()
        assert "torch" not in sys.modules

    run_body(body)


# Waiting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("home", "producer"), PAIRS)
def test_a_session_waits_for_a_stream(cast, home, producer):
    session, stream = cast.session(home), cast.other(producer)
    source, target = session.zeros(MANY), session.zeros(MANY)
    written = session.full(MANY, 7.0)
    session.synchronize()
    addresses = [view(session, each) for each in (source, written)]
    waits = session.counters().host_waits
    with stalled(stream.handle):
        copy_on(stream.handle, *addresses)
        session.wait(stream)
        session.zeros(1)
        assert is_held_up(stream_of(session))
        target = session.copy(source)
        assert session.counters().host_waits == waits
    assert session.to_host(target).tolist() == [7.0] * MANY


@pytest.mark.parametrize(("home", "other"), [pair for pair in PAIRS if pair != ("legacy", "per-thread")])
def test_a_stream_is_handed_over_to_and_taken_back_from(cast, home, other):
    session, stream = cast.session(home), cast.other(other)
    handle = stream.handle
    source, between = session.zeros(MANY), session.zeros(MANY)
    session.synchronize()
    addresses = [view(session, each) for each in (between, source)]
    waits = session.counters().host_waits
    with stalled(session):
        written = session.full(MANY, 7.0)
        with session.stream_ordered_with(stream) as same:
            assert same is stream
            copy_on(handle, view(session, source), view(session, written))
            assert is_held_up(handle)
    with stalled(handle):
        with session.stream_ordered_with(stream):
            copy_on(handle, *addresses)
        session.zeros(1)
        assert is_held_up(stream_of(session))
        copied = session.copy(between)
        assert session.counters().host_waits == waits
    assert session.to_host(copied).tolist() == [7.0] * MANY


def test_what_is_handed_over_is_taken_back_after_an_exception(cast):
    session, stream = cast.session("own"), cast.other("foreign")
    with stalled(stream):
        with pytest.raises(ZeroDivisionError), session.stream_ordered_with(stream):
            raise ZeroDivisionError
        session.zeros(1)
        assert is_held_up(stream_of(session))


def test_a_hand_over_alone_takes_nothing_back(cast):
    session, stream = cast.session("own"), cast.other("foreign")
    with stalled(stream):
        before = session.counters().events_recorded
        session.stream_ordered_with(stream)
        assert session.counters().events_recorded == before + 1
        assert not is_held_up(stream_of(session))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("use", ["wait", "hand over", "event"])
def test_objects_may_leave_another_context_current(cast, use):
    """Asking somebody's object runs somebody's code."""
    session, legacy = cast.session("own"), LEGACY

    class Stream:
        def __cuda_stream__(self):
            set_current(primary_context(1))
            return 0, LEGACY

    with on_stack(primary_context()):
        made = ok(driver.cuEventCreate(2))
    handle = property(lambda self: Stream().__cuda_stream__() and int(made))
    Event = type("Event", (), {"__module__": "torch.cuda.streams", "cuda_event": handle})
    with on_stack(primary_context()):
        if use == "wait":
            with stalled(legacy):
                copy_on(legacy, view(session, session.zeros(MANY)), view(session, session.zeros(MANY)))
                session.wait(Stream())
                session.zeros(1)
                assert is_held_up(stream_of(session))
        elif use == "hand over":
            with stalled(session):
                session.zeros(1)
                session.stream_ordered_with(Stream())
                copy_on(legacy, *scratch_addresses())
                assert is_held_up(legacy)
        else:
            session.wait(Event())
            session.wait(Event())
            session.completion().wait()
    session.synchronize()


def scratch_addresses():
    with on_stack(primary_context()):
        return int(ok(driver.cuMemAlloc(MANY * 4))), int(ok(driver.cuMemAlloc(MANY * 4)))


def test_the_own_stream_is_not_waited_for(cast):
    session = cast.session("own")
    own = ForeignStream(stream_of(session))
    before = session.counters().events_recorded
    session.wait(own)
    with session.stream_ordered_with(own):
        pass
    with kina.session(session.runtime) as inner:
        inner.wait(session)
    assert session.counters().events_recorded == before


def test_a_session_waits_for_another(cast):
    session, other = cast.session("own"), cast.session("own")
    with stalled(other):
        tensor = other.full(MANY, 3.0)
        session.wait(other)
        session.zeros(1)
        assert is_held_up(stream_of(session))
    other.synchronize()
    del tensor


@pytest.mark.parametrize("device", [0, pytest.param(1, marks=pytest.mark.multi_gpu)])
def test_a_session_waits_for_a_completion(cast, device):
    session = cast.session("own")
    with kina.session(kina.Runtime(device)) as other:
        handle = stream_of(other)
        if device == 0:
            context = stalled(other)
        else:
            context = simulation().stalled(handle)
        with context:
            tensor = other.zeros(MANY)
            completion = other.completion()
            session.wait(completion)
            session.zeros(1)
            assert is_held_up(stream_of(session))
        session.synchronize()
        other.synchronize()
        before = simulation().calls("cuStreamWaitEvent") if simulation() else 0
        session.wait(completion)
        if simulation() is not None and completion.done():
            session.wait(completion)
            assert simulation().calls("cuStreamWaitEvent") <= before + 1
        del tensor


def event_class(module, attribute):
    """An event as other libraries have it."""

    def make(self, stream=None):
        with on_stack(primary_context()):
            self.made = ok(driver.cuEventCreate(2))
            if stream is not None:
                ok(driver.cuEventRecord(self.made, driver.CUstream(stream)))

    device = types.SimpleNamespace(type="cuda")
    kind = type("Event", (), {"__module__": module, "__init__": make, "device": device})
    setattr(kind, attribute, property(lambda self: int(self.made) if attribute != "handle" else self.made))
    return type("Timer", (kind,), {"__module__": "somewhere.else"}) if module.startswith("cupy") else kind


EVENTS = {
    "torch": ("torch.cuda.streams", "cuda_event"),
    "torch, of any accelerator": ("torch", "event_id"),
    "cupy": ("cupy.cuda.stream", "ptr"),
    "cuda.core": ("cuda.core._event", "handle"),
}


@pytest.mark.parametrize("library", EVENTS)
def test_a_session_waits_for_an_event(cast, library):
    session, stream = cast.session("own"), cast.other("foreign")
    kind = event_class(*EVENTS[library])
    with stalled(stream):
        copy_on(stream.handle, view(session, session.zeros(MANY)), view(session, session.zeros(MANY)))
        event = kind(stream.handle)
        session.wait(event)
        session.zeros(1)
        assert is_held_up(stream_of(session))
    session.wait(kind())  # of nothing


@pytest.mark.parametrize(("module", "name"), [("driver", "CUevent"), ("runtime", "cudaEvent_t")])
def test_a_session_waits_for_an_event_of_cuda_bindings(cast, module, name):
    kind = getattr(importlib.import_module(f"cuda.bindings.{module}"), name)
    session, stream = cast.session("own"), cast.other("foreign")
    with on_stack(primary_context()):
        made = ok(driver.cuEventCreate(2))
        with stalled(stream):
            copy_on(stream.handle, view(session, session.zeros(MANY)), view(session, session.zeros(MANY)))
            ok(driver.cuEventRecord(made, driver.CUstream(stream.handle)))
            session.wait(kind(int(made)))
            session.zeros(1)
            assert is_held_up(stream_of(session))
        session.synchronize()
        ok(driver.cuEventDestroy(made))
    with pytest.raises(kina.ArgumentError, match="never recorded"):
        session.wait(kind(0))


def test_a_session_waits_for_an_event_of_cuda_core(cast):
    from cuda import core

    session, stream = cast.session("own"), cast.other("foreign")
    with on_stack(primary_context()):
        device = core.Device(0)
        device.set_current()
        theirs = core.Stream.from_handle(stream.handle)
        with stalled(stream):
            event = theirs.record()
            session.wait(event)
            session.wait(theirs)
            session.zeros(1)
            assert is_held_up(stream_of(session))


NEVER = type("Event", (), {"__module__": "torch.cuda.streams", "cuda_event": 0})
XPU = type("Event", (), {"__module__": "torch", "event_id": 7, "device": types.SimpleNamespace(type="xpu")})
CLOSED = type("Event", (), {"__module__": "cuda.core._event", "handle": None})


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (17, "ArgumentError", "a CUDA event of"),
        (None, "ArgumentError", "a CUDA event of"),
        (object(), "ArgumentError", "a CUDA event of"),
        (XPU(), "ArgumentError", "not Event"),
        (NEVER(), "ArgumentError", "never recorded"),
        (CLOSED(), "ArgumentError", "never recorded"),
        (type("Event", (), {})(), "ArgumentError", "not Event"),
        (type("Event", (), {"__module__": "torch", "cuda_event": "x"})(), "ArgumentError", "never recorded"),
    ],
)
def test_what_cannot_be_waited_for(session, other, error, words):
    with pytest.raises(getattr(kina, error), match=words) as raised:
        session.wait(other)
    assert raised.value.operation == "wait"
    with pytest.raises(kina.ArgumentError, match="is no stream"):
        session.stream_ordered_with(other)


@pytest.mark.simulated
def test_destroyed_events_and_streams_are_told():
    def body():
        class Event:
            __module__ = "torch.cuda.streams"

        with kina.session(kina.Runtime(0)) as session:
            with on_stack(primary_context()):
                made = ok(driver.cuEventCreate(2))
                Event.cuda_event = int(made)
                session.wait(Event())
                ok(driver.cuEventDestroy(made))
            with pytest.raises(kina.ArgumentError, match="destroyed"):
                session.wait(Event())
            stream = ForeignStream()
            stream.destroy()
            for use in (session.wait, session.stream_ordered_with):
                with pytest.raises(kina.ForeignDeviceError):
                    use(stream)
            assert session.to_host(session.zeros(1)).tolist() == [0.0]

    run_body(body)


def test_sessions_that_cannot_be_waited_for(session):
    with kina.session(kina.Runtime(0)) as other:
        pass
    with pytest.raises(kina.SessionClosedError, match="not open"):
        session.wait(other)
    with pytest.raises(kina.ArgumentError, match="is no stream"):
        session.stream_ordered_with(session)

    def open_there():
        with kina.session(kina.Runtime(0)) as theirs:
            theirs.zeros(1)

            def wait():
                with kina.session(kina.Runtime(0)) as mine, pytest.raises(kina.WrongThreadError, match="completion"):
                    mine.wait(theirs)

            in_thread(wait)

    open_there()
    hand_over = session.stream_ordered_with(ForeignStream(LEGACY))
    with pytest.raises(kina.WrongThreadError):
        in_thread(lambda: hand_over.__exit__(None, None, None))
    session.close()
    for use in (session.wait, session.stream_ordered_with):
        with pytest.raises(kina.SessionClosedError):
            use(ForeignStream(LEGACY))
    with pytest.raises(kina.SessionClosedError):
        hand_over.__exit__(None, None, None)
    with pytest.raises(TypeError):
        type(hand_over)()


@pytest.mark.multi_gpu
def test_streams_of_another_device_are_refused(session):
    stream = ForeignStream(context=primary_context(1))
    for use in (session.wait, session.stream_ordered_with):
        with pytest.raises(kina.ForeignDeviceError):
            use(stream)
    with kina.session(kina.Runtime(1)) as other, pytest.raises(kina.ForeignDeviceError, match="completion"):
        session.wait(other)
    stream.destroy()


def test_host_sessions_have_no_streams():
    with kina.session("cpu") as session:
        for use in (session.wait, session.stream_ordered_with):
            with pytest.raises(kina.UnsupportedError):
                use(ForeignStream)


# Captures -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def captured(stream, mode=0):
    """Another library captures the stream; the capture must be whole at the end of the block."""
    handle = driver.CUstream(stream if isinstance(stream, int) else stream.handle)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(mode)))
    try:
        yield
    finally:
        with on_stack(primary_context()):
            code, graph = driver.cuStreamEndCapture(handle)
            if int(code) == 0:
                ok(driver.cuGraphDestroy(graph))
    assert int(code) == 0


def uses_of(session, stream):
    tensor = session.zeros(MANY)
    session.synchronize()
    return {
        "export": lambda: tensor.to_dlpack(stream=stream.handle),
        "wait": lambda: session.wait(stream),
        "hand over": lambda: session.stream_ordered_with(stream),
    }


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("use", ["export", "wait", "hand over"])
def test_a_stream_that_is_being_captured_is_left_alone(cast, use, mode):
    session, stream = cast.session("own"), cast.other("foreign")
    act = uses_of(session, stream)[use]
    with captured(stream, mode), pytest.raises(kina.UnsupportedError, match="captured"):
        act()
    act()
    assert not is_held_up(stream_of(session))


@pytest.mark.parametrize("use", ["export", "wait", "hand over"])
def test_a_legacy_stream_that_a_capture_forbids_is_left_alone(cast, use):
    session, blocking = cast.session("own"), ForeignStream(flags=0)
    act = uses_of(session, ForeignStream(LEGACY))[use]
    with captured(blocking), pytest.raises(kina.UnsupportedError):
        act()
    act()
    blocking.destroy()


@pytest.mark.simulated
def test_a_graph_holds_what_a_library_captures_with():
    nbytes = 64 << 20
    with kina.session(kina.Runtime(0)) as session:
        tensor = session.zeros(nbytes, "uint8")
        session.synchronize()
        address, stream = view(session, tensor), stream_of(session)
        with session.capture() as graph:
            given = export(tensor)
            with on_stack(primary_context()):
                ok(driver.cuMemsetD8Async(address, 1, nbytes, driver.CUstream(stream)))
            delete(given)
        del tensor, given
        other = session.full(nbytes, 7, "uint8")
        assert view(session, other) != address
        graph.launch(session)
        assert (session.to_host(other) == 7).all()
        del graph
        session.synchronize()


@pytest.mark.parametrize("kind", ["own", "adopted"])
@pytest.mark.parametrize("use", ["export", "wait", "hand over"])
def test_a_session_that_is_being_captured_is_left_alone(cast, use, kind):
    stream = cast.other("foreign")
    if kind == "adopted":
        own = cast.other("foreign")
        with kina.session(0, stream=own) as session:
            act = uses_of(session, stream)[use]
            with captured(own), pytest.raises(kina.UnsupportedError, match="captured"):
                act()
            act()
            session.synchronize()
    else:
        session = cast.session("own")
        act = uses_of(session, stream)[use]
        with session.capture() as graph:
            session.zeros(1)
            with pytest.raises(kina.UnsupportedError, match="captured"):
                act()
        act()
        graph.launch(session)
    with on_stack(primary_context()):
        assert int(ok(driver.cuStreamIsCapturing(driver.CUstream(stream.handle)))) == 0


def test_a_session_waits_for_no_event_of_a_capture(cast):
    session, stream = cast.session("own"), cast.other("foreign")
    with captured(stream):
        event = event_class("torch.cuda.streams", "cuda_event")(stream.handle)
        for _ in range(3):
            with pytest.raises(kina.UnsupportedError, match="is being captured"):
                session.wait(event)
    assert not is_held_up(stream_of(session))
    with pytest.raises(kina.ArgumentError, match="recorded in a capture"):
        session.wait(event)
    session.synchronize()


def test_another_session_that_is_being_captured_is_left_alone(cast):
    session, other = cast.session("own"), cast.session("own")
    with other.capture() as graph:
        other.zeros(1)
        for use in (lambda: session.wait(other), lambda: session.wait(ForeignStream(stream_of(other)))):
            with pytest.raises(kina.UnsupportedError, match="captured"):
                use()
    graph.launch(other)


@pytest.mark.parametrize("who", ["consumer", "known consumer", "home", "own capture", "legacy"])
def test_captures_survive_the_last_release(cast, who):
    """What cannot be ordered while somebody captures is kept until the device has been waited for."""
    session = cast.session("foreign" if who == "home" else "own")
    stream = cast.other("own" if who == "known consumer" else "adopted").handle
    tensor = session.zeros(MANY)
    session.synchronize()
    blocking = ForeignStream(flags=0)
    capsule = tensor.to_dlpack(stream=LEGACY if who == "legacy" else stream)
    del tensor
    frees = session.counters().frees
    if who == "own capture":
        with session.capture() as graph:
            session.zeros(1)
            del capsule
        graph.launch(session)
    else:
        captures = {"home": stream_of(session), "legacy": blocking.handle}
        with captured(captures.get(who, stream)):
            del capsule
    assert session.counters().frees in (frees, frees + 1)  # the session's own capture frees too
    session.synchronize()
    assert session.counters().frees >= frees + 1
    blocking.destroy()
