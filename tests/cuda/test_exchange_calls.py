"""Exports, imports and the host's wish to read, as C code has them: no GIL, and threads that Python has never seen."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from helpers.compiler import compile_extension
from helpers.cuda import ForeignStream, driver, during_a_capture, ok, on_stack, primary_context, stalled, stream_of

import kina

pytestmark = pytest.mark.simulated

LEGACY, PER_THREAD = 1, 2
NOT_READY = 600


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    from kina.cuda import load_sessions

    load_sessions()
    source = Path(__file__).with_name("exchange_calls.pyx")
    path = compile_extension(source, tmp_path_factory.mktemp("exchange"))
    spec = importlib.util.spec_from_file_location("exchange_calls", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def session():
    with kina.session(kina.Runtime(0)) as opened:
        yield opened
        opened.synchronize()


def is_pending(stream):
    with on_stack(primary_context()):
        return int(driver.cuStreamQuery(driver.CUstream(stream))[0]) == NOT_READY


# The work stream ------------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
def test_the_work_stream_is_the_innermost_sessions(calls):
    assert calls.work_stream(0) == LEGACY
    with kina.session(kina.Runtime(0)) as outer, kina.session(kina.Runtime(1)) as other:
        assert calls.work_stream(0) == stream_of(outer)
        assert calls.work_stream(1) == stream_of(other)
        with kina.session(kina.Runtime(0)) as inner:
            assert calls.work_stream(0) == stream_of(inner)
        assert calls.work_stream(0) == stream_of(outer)
    assert calls.work_stream(0) == calls.work_stream(1) == calls.work_stream(77) == LEGACY


def test_an_export_to_the_work_stream_waits_where_streams_differ(calls, session):
    before = session.counters()
    tensor = session.zeros(10)
    calls.export_to_the_work_stream(tensor)
    assert session.counters().events_recorded == before.events_recorded
    del tensor
    assert session.counters().events_recorded == before.events_recorded
    with kina.session(kina.Runtime(0)) as inner:
        with stalled(session):
            tensor = session.full(10, 1.0)
            calls.export_to_the_work_stream(tensor)
            inner.zeros(1)
            assert is_pending(stream_of(inner))
        inner.synchronize()
        with stalled(inner):
            del tensor
            session.zeros(1)
            assert is_pending(stream_of(session))


def test_an_export_outside_of_sessions_goes_to_the_legacy_stream(calls):
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        tensor = session.full(10, 1.0)
    with stalled(LEGACY):
        calls.export_to_the_work_stream(tensor)
        del tensor
        with kina.session(runtime) as session:
            session.zeros(1)
            assert is_pending(stream_of(session))
    with kina.session(runtime) as session:
        session.synchronize()


# The set of uses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "known"), [(1, True), (7, True), (40, False)])
def test_a_set_that_several_threads_fill_has_each_stream_once(calls, number, known):
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(kina.session(kina.Runtime(0))) for _ in range(number)]
        session = stack.enter_context(kina.session(kina.Runtime(0)))
        tensor = session.zeros(10)
        streams = [stream_of(other) for other in others] + [LEGACY]
        assert calls.export_from_threads(tensor, streams, 200) == [0] * 4
        before = session.counters()
        del tensor
        after = session.counters()
        assert after.events_recorded - before.events_recorded == (number + 1 if known else 0)
        assert after.frees - before.frees == known
        session.synchronize()
        assert session.counters().frees == before.frees + 1


# Imports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("producer", [0, LEGACY, PER_THREAD, "foreign", "own"])
def test_an_import_waits_for_its_producer(calls, session, producer):
    foreign = ForeignStream()
    with kina.session(kina.Runtime(0)) as other:
        named = {"foreign": foreign.handle, "own": stream_of(other)}.get(producer, producer)
        with stalled(named or LEGACY):
            with on_stack(primary_context()):
                calls.import_from(session.runtime, named)
            session.zeros(1)
            assert is_pending(stream_of(session))
        session.synchronize()
    before = session.counters().events_recorded
    calls.import_from(session.runtime, stream_of(session))
    assert session.counters().events_recorded == before
    foreign.destroy()


def test_an_import_from_a_captured_stream_is_refused(calls, session):
    foreign = ForeignStream()
    handle = driver.CUstream(foreign.handle)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(0)))
        with pytest.raises(kina.UnsupportedError, match="captured"):
            calls.import_from(session.runtime, foreign.handle)
        ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(handle))))
        with session.capture() as graph:
            session.zeros(1)
            with pytest.raises(kina.UnsupportedError, match="captured"):
                calls.import_from(session.runtime, foreign.handle)
    graph.launch(session)
    foreign.destroy()


# The host -------------------------------------------------------------------------------------------------


def refused(calls, tensor):
    try:
        calls.host_access(tensor)
    except BufferError as error:
        return type(error) is kina.DLPackError and "synchronize()" in str(error)
    return False


@pytest.fixture
def managed():
    return kina.memory.ManagedMemoryResource(0)


def test_the_host_reads_when_the_home_stream_is_past_it(calls, session, managed):
    tensor = session.full(10, 2.0, memory=managed)
    session.synchronize()
    assert not refused(calls, tensor)
    with stalled(session):
        session.zeros(1)
        assert refused(calls, tensor)
        during_a_capture(lambda: refused(calls, tensor))
    session.synchronize()
    assert not refused(calls, tensor)


@pytest.mark.parametrize("consumer", ["legacy", "own", "adopted"])
def test_the_host_reads_when_known_consumers_are_past_it(calls, session, managed, consumer):
    foreign = ForeignStream()
    target = {"own": kina.Runtime(0), "adopted": None, "legacy": kina.Runtime(0)}[consumer]
    with kina.session(target) if target else kina.session(0, stream=foreign) as other:
        stream = LEGACY if consumer == "legacy" else stream_of(other)
        tensor = session.full(10, 2.0, memory=managed)
        calls.export_to(tensor, stream)
        session.synchronize()
        other.synchronize()
        with on_stack(primary_context()):
            ok(driver.cuStreamSynchronize(driver.CUstream(stream)))
        assert not refused(calls, tensor)
        with stalled(stream):
            with on_stack(primary_context()):
                ok(driver.cuMemsetD8Async(driver.CUdeviceptr(scratch()), 0, 4, driver.CUstream(stream)))
            assert refused(calls, tensor)
        with on_stack(primary_context()):
            ok(driver.cuStreamSynchronize(driver.CUstream(stream)))
        assert not refused(calls, tensor)
        del tensor


def scratch():
    with on_stack(primary_context()):
        return int(ok(driver.cuMemAlloc(4)))


def test_the_host_reads_after_unknown_consumers_once_the_device_was_waited_for(calls, session, managed):
    foreign = ForeignStream()
    tensor = session.full(10, 2.0, memory=managed)
    calls.export_to(tensor, foreign.handle)
    session.synchronize()
    assert refused(calls, tensor)
    waits = session.counters().host_waits
    session.synchronize()  # of the whole device
    assert session.counters().host_waits == waits + 1
    assert not refused(calls, tensor)
    calls.export_to(tensor, -1)
    assert refused(calls, tensor)
    session.synchronize()
    assert not refused(calls, tensor)
    foreign.destroy()


def test_the_host_waits_for_those_who_adopted_the_memory(calls, session, managed):
    tensor = session.full(10, 2.0, memory=managed)
    session.synchronize()
    with kina.session(kina.Runtime(0)) as other:
        adopted = other.adopt(tensor)
        other.synchronize()
        assert not refused(calls, tensor)
        with stalled(other):
            other.copy(adopted)
            assert refused(calls, tensor)
            assert refused(calls, adopted)
        other.synchronize()
        assert not refused(calls, tensor)
        with stalled(session):
            session.copy(tensor)
            assert refused(calls, adopted)
        session.synchronize()
        assert not refused(calls, adopted)
        before = session.counters().events_recorded
        del adopted
        gc.collect()
        other.synchronize()
        del tensor
        assert session.counters().events_recorded == before + 1  # the seal of memory without stream order


def test_the_host_asks_no_stream_that_is_being_captured(calls, session, managed):
    tensor = session.full(10, 2.0, memory=managed)
    session.synchronize()
    x = session.zeros(10)
    with session.capture() as graph:
        session.copy(x)
        with pytest.raises(kina.DLPackError, match="captured"):
            calls.host_access(tensor)
    graph.launch(session)
    session.synchronize()
    assert not refused(calls, tensor)


def test_host_memory_is_nobodys_order(calls):
    with kina.session("cpu") as host:
        calls.host_access(host.from_host(np.ones(3)))
