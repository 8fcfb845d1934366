# ruff: noqa: F821
# Bodies run in a process of their own, behind the names of helpers.cuda.PRELUDE.
"""The launch entry for Cython code, through an extension that is compiled as another project would compile it."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from helpers.compiler import compile_extension
from helpers.cuda import foreign_context, in_thread, on_stack, run_body, simulation, stalled, until
from helpers.kernels import KERNELS, module_text, nothing_enqueued

import kina

pytestmark = pytest.mark.cuda

SAXPY = "mut f32[], f32[], f32, u32"
EIGHT = kina.LaunchConfig(1, 8)


def load(path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("nogil_launch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = Path(__file__).parents[1] / "native" / "nogil_launch.pyx"
    return str(compile_extension(source, tmp_path_factory.mktemp("nogil"), control=False))


@pytest.fixture(scope="module")
def nogil(library):
    from kina.cuda import load_sessions

    load_sessions()
    return load(library)


@pytest.fixture
def raw(session):
    with session.raw("nogil") as block:
        yield block


@pytest.fixture
def prepared(raw):
    return raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)


def test_it_launches(session, prepared, nogil):
    y, x = session.zeros(8), session.full(8, 3.0)
    before = session.counters()
    nogil.saxpy(prepared, y, x, 2.0, 8, 5)
    after = session.counters()
    assert (session.to_host(y) == 30).all()
    assert after.launches - before.launches == 5
    assert after.leases - before.leases == 1  # the module, once
    for name in ("events_recorded", "event_queries", "synchronizations", "host_waits", "allocations"):
        assert getattr(after, name) == getattr(before, name)


def test_kernels_without_parameters(session, raw, sim, nogil):
    text = KERNELS if simulation() is not None else module_text(".visible .entry nothing() { ret; }")
    name = "trap" if simulation() is not None else "nothing"
    prepared = raw.module(text).function(name, "").prepare(kina.LaunchConfig(1, 1))
    with nothing_enqueued(session), pytest.raises(kina.WrongThreadError):
        in_thread(lambda: nogil.nothing(prepared))
    if name == "nothing":
        nogil.nothing(prepared)
        session.synchronize()


def test_extended_launches(session, raw, nogil):
    """Attributes go with it."""
    function = raw.module(KERNELS).function("saxpy", SAXPY)
    y, x = session.zeros(512), session.full(512, 3.0)
    for more in ({"cluster": 2}, {"cooperative": True}, {"cluster": 4, "cooperative": True}):
        nogil.saxpy(function.prepare(kina.LaunchConfig(16, 32, **more)), y, x, 1.0, 512)
    assert (session.to_host(y) == 9).all()


def test_the_wrong_thread(session, prepared, nogil):
    y, x = session.zeros(8), session.full(8, 3.0)
    wrong = kina.WrongThreadError.detail
    with nothing_enqueued(session):
        assert nogil.from_a_bare_thread(prepared) == wrong
        with pytest.raises(kina.WrongThreadError, match="belongs to another thread"):
            in_thread(lambda: nogil.saxpy(prepared, y, x, 1.0, 8))
    nogil.saxpy(prepared, y, x, 1.0, 8)
    assert (session.to_host(y) == 3).all()


def test_no_open_block(session, nogil):
    y, x = session.zeros(8), session.full(8, 3.0)
    with session.raw() as raw:
        prepared = raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)
    with nothing_enqueued(session), pytest.raises(kina.SessionClosedError, match="no raw block"):
        nogil.saxpy(prepared, y, x, 1.0, 8)
    with session.raw():
        nogil.saxpy(prepared, y, x, 1.0, 8)
    assert (session.to_host(y) == 3).all()


def test_no_session(runtime, nogil):
    with kina.session(runtime) as session, session.raw() as raw:
        y, x = session.zeros(8), session.full(8, 3.0)
        prepared = raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)
    with pytest.raises(kina.SessionClosedError, match="no raw block"):
        nogil.saxpy(prepared, y, x, 1.0, 8)
    assert nogil.from_a_bare_thread(prepared) == kina.SessionClosedError.detail


def test_tensors_of_another_runtime(session, prepared, nogil):
    y = session.zeros(8)
    with kina.session(kina.Runtime(0)) as other:
        x = other.full(8, 3.0)
        with nothing_enqueued(session), pytest.raises(kina.ForeignRuntimeError):
            nogil.saxpy(prepared, y, x, 1.0, 8)
    assert not session.to_host(y).any()


def test_what_is_no_prepared_launch(raw, nogil):
    function = raw.module(KERNELS).function("saxpy", SAXPY)
    for wrong in (None, function, EIGHT):
        with pytest.raises(TypeError, match=r"function\.prepare"):
            nogil.nothing(wrong)


def test_adopted_memory_is_leased(session, nogil):
    """What another Runtime owns is its to free only when the kernel is done with it."""
    with kina.session(kina.Runtime(0)) as lender:
        source = lender.full(8, 3.0)
        lender.synchronize()
        y = session.zeros(8)
        with session.raw() as raw:
            prepared = raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)
        with stalled(session), session.raw():
            x = session.adopt(source)
            nogil.saxpy(prepared, y, x, 2.0, 8)
            del source, x
            gc.collect()
            assert lender.counters().frees == 0
        assert (session.to_host(y) == 6).all()
        session.synchronize()
        until(lambda: lender.counters().frees == 1)


def test_another_context_is_current(session, prepared, nogil):
    """The launch runs in its own, and the other one stays."""
    y, x = session.zeros(8), session.full(8, 3.0)
    with foreign_context() as foreign, on_stack(foreign):
        nogil.saxpy(prepared, y, x, 2.0, 8)
    assert (session.to_host(y) == 6).all()


@pytest.mark.simulated
def test_what_the_driver_refuses(session, prepared, sim, nogil):
    y, x = session.zeros(8), session.full(8, 3.0)
    before = session.counters().launches
    with sim.failing("cuLaunchKernel", result=1), pytest.raises(kina.LaunchError, match="saxpy was refused") as caught:
        nogil.saxpy(prepared, y, x, 2.0, 8)
    assert caught.value.driver_error.code == 1
    assert session.counters().launches == before
    nogil.saxpy(prepared, y, x, 2.0, 8)
    assert (session.to_host(y) == 6).all()


def test_a_module_in_flight_stays(library):
    """Leased by the segment, not by the objects that launched it."""

    def body(path):
        nogil = load(path)
        from helpers.kernels import KERNELS

        with kina.session(0) as other:
            session = kina.session(kina.Runtime(0))
            session.__enter__()
            y, x = session.zeros(8), session.full(8, 3.0)
            with session.raw() as raw:
                function = raw.module(KERNELS).function("saxpy", "mut f32[], f32[], f32, u32")
                prepared = function.prepare(kina.LaunchConfig(1, 8))
            with stalled(session):
                with session.raw() as raw:
                    nogil.saxpy(prepared, y, x, 2.0, 8)
                session.close()
                del session, raw, function, prepared
                gc.collect()
                other.synchronize()
            assert other.to_host(other.adopt(y)).tolist() == [6.0] * 8

    run_body(body, library, also=[load], KINA_SIM_TIMEOUT_MS="5000")


@pytest.mark.simulated
def test_a_poisoned_device(library):
    def body(path):
        nogil = load(path)
        from helpers.kernels import KERNELS

        with kina.session(0) as session, session.raw() as raw:
            module = raw.module(KERNELS)
            prepared = module.function("saxpy", "mut f32[], f32[], f32, u32").prepare(kina.LaunchConfig(1, 8))
            y, x = session.zeros(8), session.full(8, 3.0)
            module.function("trap", "").launch(kina.LaunchConfig(1, 1))
            with pytest.raises(kina.SynchronizeError):
                session.synchronize()
            since = sim.position
            with pytest.raises(kina.RuntimePoisonedError, match="First cause"):
                nogil.saxpy(prepared, y, x, 2.0, 8)
            assert [call for call in sim.trace(since, event="call") if call["name"].startswith("cuLaunch")] == []

    run_body(body, library, also=[load])


def test_a_forked_child(library):
    def body(path):
        nogil = load(path)
        from helpers.kernels import KERNELS

        with kina.session(0) as session, session.raw() as raw:
            prepared = (
                raw.module(KERNELS).function("saxpy", "mut f32[], f32[], f32, u32").prepare(kina.LaunchConfig(1, 8))
            )
            y, x = session.zeros(8), session.full(8, 3.0)
            session.synchronize()
            if (child := os.fork()) == 0:
                try:
                    nogil.saxpy(prepared, y, x, 2.0, 8)
                except kina.UnavailableError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            nogil.saxpy(prepared, y, x, 2.0, 8)
            assert (session.to_host(y) == 6).all()

    run_body(body, library, also=[load])


def test_threads_with_a_runtime_each(nogil):
    """None of them takes the GIL between its launches, nor sees what the others do."""
    counts = {}
    started = threading.Barrier(4, timeout=60)

    def work(number: int) -> None:
        with kina.session(kina.Runtime(0)) as session, session.raw() as raw:
            prepared = raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)
            y, x = session.zeros(8), session.full(8, float(number))
            started.wait()
            nogil.saxpy(prepared, y, x, 1.0, 8, 200)
            counts[number] = (session.to_host(y).tolist(), session.counters().launches)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {number: ([200.0 * number] * 8, 200) for number in range(4)}


def test_it_follows_a_capture(session, prepared, nogil):
    """A launch in a capture is the graph's, with what it uses."""
    y, x = session.zeros(8), session.full(8, 3.0)
    with session.capture() as graph:
        nogil.saxpy(prepared, y, x, 1.0, 8)
    assert not session.to_host(y).any()
    del x
    gc.collect()
    for _ in range(2):
        graph.launch(session)
    assert (session.to_host(y) == 6).all()
