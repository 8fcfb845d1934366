# ruff: noqa: F821
# Bodies run in a process of their own, behind the names of helpers.cuda.PRELUDE.
"""The reaper: an idle kina pins nobody's memory, and the thread that sees to it is never in the way.

Bodies call nothing of kina while they wait: the main thread sleeps in one call of the C library, so that it runs no
pending call of Python's either.
"""

from __future__ import annotations

import time

import pytest
from helpers.compiler import compile_c
from helpers.cuda import during_a_capture, run_body, simulation, stalled, stream_of

import kina

simulated = pytest.mark.simulated

DELETER_IN_C = r"""
#include <stdatomic.h>
#include <time.h>

static _Atomic int deleted;
static _Atomic long long last;

/* Asks nothing of Python. */
void deleter(void *managed) {
    struct timespec now;
    (void)managed;
    clock_gettime(CLOCK_MONOTONIC, &now);
    last = now.tv_sec * 1000000000LL + now.tv_nsec;
    deleted++;
}
int times(void) { return deleted; }
long long when_ns(void) { return last; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deleter")
    (folder / "deleter.c").write_text(DELETER_IN_C)
    return str(compile_c(folder / "deleter.c", folder / "deleter.so", "-shared", "-fPIC"))


# What bodies have beside the prelude ----------------------------------------------------------------------


class Lender:
    """Memory of another library. ``deleted`` and ``when_ns`` say how often, and when last, it was given back."""

    def __init__(self, session, library=None):
        import ctypes

        from helpers.managed import CUDA, Producer

        self.base = session.zeros(1024)
        session.synchronize()
        self.compiled = None if library is None else ctypes.CDLL(library)
        self.moments = []
        self.producers = []
        address = view(session, self.base)
        self.make = lambda: Producer((1024,), device=(CUDA, 0), data=address)
        if self.compiled is not None:
            self.compiled.when_ns.restype = ctypes.c_longlong

    def lend(self):
        import ctypes
        import time

        producer = self.make()
        if self.compiled is None:
            delete = producer._delete
            producer._deleter = type(producer._deleter)(
                lambda address: (delete(address), self.moments.append(time.monotonic_ns()))
            )
            producer.managed.deleter = ctypes.cast(producer._deleter, ctypes.c_void_p)
        else:
            producer.managed.deleter = ctypes.cast(self.compiled.deleter, ctypes.c_void_p)
        self.producers.append(producer)  # the memory of its fields
        return producer

    @property
    def deleted(self):
        return len(self.moments) if self.compiled is None else self.compiled.times()

    @property
    def when_ns(self):
        return self.moments[-1] if self.compiled is None else self.compiled.when_ns()


def resume_later(sim, handle):
    """From another thread, while the main one sleeps. Gives the list that says when."""
    import threading
    import time

    moments = []

    def resume():
        time.sleep(0.2)
        moments.append(time.monotonic_ns())
        sim.resume(handle)

    thread = threading.Thread(target=resume)
    thread.start()
    return thread, moments


def reapers():
    """Native threads of that name in this process."""
    from pathlib import Path

    return [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == "kina-reaper"]


# The promise ----------------------------------------------------------------------------------------------


@simulated
@pytest.mark.parametrize("deleter", ["C", "Python"])
def test_an_idle_process_gives_back_what_it_borrowed(library, deleter):
    """Within 100 ms of the end of the work: the best of a few, for hosts are busy."""

    def body(library):
        import time

        best = 1e9
        with kina.session(0) as session:
            lender = Lender(session, library)
            handle = stream_of(session)
        for turn in range(5):
            sim.stall(handle)
            with kina.session(0) as session:
                session.copy(session.adopt(lender.lend()))
            gc.collect()
            thread, resumed = resume_later(sim, handle)
            time.sleep(0.19)
            assert lender.deleted == turn
            time.sleep(1)
            assert lender.deleted == turn + 1
            best = min(best, lender.when_ns - resumed[0])
            thread.join()
        with kina.session(0) as session:
            counters = session.counters()
            assert counters.reaped == counters.retired > 0
        assert best < 100e6, best

    run_body(body, library if deleter == "C" else None, also=[Lender, resume_later])


@simulated
def test_python_objects_are_let_go_too():
    """The owner of an adopted stream goes with the last memory of its Runtime, while the main thread runs nothing."""

    def body():
        import time
        import weakref

        gone = []
        with kina.session(kina.Runtime(0)) as ours:
            owner = ForeignStream()
            weakref.finalize(owner, lambda: gone.append(threading.get_ident()))
            theirs = kina.Runtime(0, stream=owner)
            with kina.session(theirs) as session:
                tensor = session.zeros(1000)
            handle = stream_of(ours)
            sim.stall(handle)
            ours.copy(ours.adopt(tensor))
        del owner, theirs, session, tensor
        gc.collect()
        thread, _ = resume_later(sim, handle)
        time.sleep(0.19)
        assert gone == []
        time.sleep(1)
        assert len(gone) == 1
        assert gone[0] not in (threading.get_ident(), thread.ident)
        thread.join()

    run_body(body, also=[resume_later])


@simulated
@pytest.mark.parametrize("what", ["a Runtime that is gone", "a thread that is gone", "a Runtime that was left open"])
def test_whoever_used_it_last(library, what):
    def body(library, what):
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)
        borrowed = []

        def use():
            runtime = kina.Runtime(0)
            session = kina.session(runtime).__enter__()
            handle = stream_of(session)
            sim.stall(handle)
            session.copy(session.adopt(lender.lend()))
            if what == "a Runtime that was left open":
                session.completion()
                borrowed.append(session)
            else:
                session.close()
            return handle

        handle = in_thread(use) if what == "a thread that is gone" else use()
        gc.collect()
        time.sleep(0.1)
        assert lender.deleted == 0
        thread, _ = resume_later(sim, handle)
        time.sleep(1)
        assert lender.deleted == 1
        thread.join()

    run_body(body, library, what, also=[Lender, resume_later])


@simulated
def test_a_graph_of_another_library_that_is_destroyed(library):
    """What kina did while that one captured, and holds for its graph, goes with it."""

    def body(library):
        import time

        stream = ForeignStream()
        handle = driver.CUstream(stream.handle)
        with kina.session(0) as session:
            lender = Lender(session, library)
        with kina.session(0, stream=stream) as session:
            target, lent = session.zeros(1024), session.adopt(lender.lend())
        with on_stack(primary_context()):
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            ok(driver.cuStreamBeginCapture(handle, mode))
            with kina.session(0, stream=stream) as session, session.raw() as raw:
                copy = raw.module(KERNELS).function("copy", "mut f32[], f32[], u32")
                copy.launch(kina.LaunchConfig.linear(1024), target, lent, 1024)
            del lent
            graph = ok(driver.cuStreamEndCapture(handle))
            gc.collect()
            time.sleep(0.1)
            with kina.session(0, stream=stream):
                pass  # kina learns that the capture is over
            assert lender.deleted == 0
            ok(driver.cuGraphDestroy(graph))
        time.sleep(0.5)
        assert lender.deleted == 1

    run_body(body, library, also=[Lender])


@pytest.mark.gpu
def test_torch_has_its_memory_back_while_kina_is_idle():
    """Within 100 ms of the end of the work, and without a call of kina's."""

    def body():
        import time

        import torch

        nbytes = 64 << 20
        torch.zeros(1, device="cuda:0")
        with kina.session(0) as session, session.raw() as raw:
            raw.module(KERNELS).function("spin", "u64")
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with kina.session(0) as session, session.raw() as raw:
                tensor = session.adopt(torch.ones(nbytes // 4, device="cuda:0"))
                raw.module(KERNELS).function("spin", "u64").launch(kina.LaunchConfig(1, 1), 100_000_000)
                session.copy(tensor)
                witness = session.completion()
                del tensor
            gc.collect()
            assert torch.cuda.memory_allocated() == before + nbytes
            torch.cuda.synchronize()  # the work is done
            assert witness is not None
            time.sleep(0.1)
            assert torch.cuda.memory_allocated() == before

    run_body(body)


# What it costs --------------------------------------------------------------------------------------------


@simulated
def test_the_thread_comes_when_it_is_needed_and_sleeps_when_it_is_not(library):
    def body(library):
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)
            for _ in range(100):
                session.copy(session.from_host(np.ones(1000)))
        with kina.session(0) as session:
            session.from_host([1.0])
        time.sleep(0.1)
        assert reapers() == []  # staging is kina's own
        for turn in range(2):
            with kina.session(0) as session:
                session.copy(session.adopt(lender.lend()))
            time.sleep(1)
            assert (lender.deleted, len(reapers())) == (turn + 1, 1)
            calls = sim.calls()
            time.sleep(0.3)
            assert sim.calls() == calls

    run_body(body, library, also=[Lender, reapers])


@simulated
def test_it_asks_now_and_then(library):
    """While there is something to wait for: some fifty times a second."""

    def body(library):
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)
            handle = stream_of(session)
        sim.stall(handle)
        with kina.session(0) as session:
            session.copy(session.adopt(lender.lend()))
        before = sim.calls("cuEventQuery")
        time.sleep(1)
        assert 1 <= sim.calls("cuEventQuery") - before <= 60
        assert sim.calls("cuEventSynchronize") == 0
        sim.resume(handle)

    run_body(body, library, also=[Lender])


def test_captures_of_others_live(session):
    """Another thread captures in global mode while it asks."""
    other = kina.Runtime(0)
    with kina.session(other) as theirs:
        lent = theirs.zeros(1000)
        theirs.synchronize()
    with kina.session(kina.Runtime(0)) as ours:
        handle = stream_of(ours)
        with stalled(handle) if simulation() is not None else stalled(ours):
            ours.copy(ours.adopt(lent))
            ours.completion()
            during_a_capture(lambda: time.sleep(0.15))
        ours.synchronize()


# When something is wrong ----------------------------------------------------------------------------------


@simulated
@pytest.mark.parametrize(
    "name", ["cuEventQuery", "cuCtxGetId", "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent"]
)
@pytest.mark.parametrize("code", [1, 900, 999])
def test_what_fails_is_tried_again(library, name, code):
    def body(library, name, code):
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)
            handle = stream_of(session)
        sim.stall(handle)
        with kina.session(0) as session:
            session.copy(session.adopt(lender.lend()))
        gc.collect()
        sim.fail(name, 1, code, from_then_on=True)
        sim.resume(handle)
        time.sleep(0.2)
        assert lender.deleted == (name != "cuEventQuery")
        sim.clear_faults()
        time.sleep(0.5)
        assert lender.deleted == 1
        with kina.session(0) as session:
            assert session.to_host(session.full(3, 1.0)).tolist() == [1.0] * 3

    run_body(body, library, name, code, also=[Lender])


@simulated
@pytest.mark.parametrize("first", ["the reaper", "a session"])
def test_of_a_device_that_is_broken_it_keeps_off(library, first):
    """Nothing is given back, nothing asked any more, and the process ends in silence."""

    def body(library, first):
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)
            handle = stream_of(session)
        sim.stall(handle)
        with kina.session(0) as session:
            session.copy(session.adopt(lender.lend()))
        gc.collect()
        sim.break_device(0)
        if first == "a session":
            with pytest.raises(kina.KinaError), kina.session(0) as session:
                session.synchronize()
        time.sleep(0.3)
        calls = sim.calls()
        time.sleep(0.3)
        assert sim.calls() == calls
        assert lender.deleted == 0
        with pytest.raises(kina.RuntimePoisonedError), kina.session(0):
            pass

    run_body(body, library, first, also=[Lender])


@simulated
@pytest.mark.parametrize("deleter", ["C", "Python"])
@pytest.mark.parametrize("state", ["stands still", "has just ended", "sleeps"])
def test_the_process_ends(library, state, deleter):
    """At once and in silence, whatever the device does; run_body asserts it."""

    def body(library, state):
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)
            handle = stream_of(session)
        sim.stall(handle)
        with kina.session(0) as session:
            session.copy(session.adopt(lender.lend()))
        globals()["kept"] = lender
        if state != "stands still":
            sim.resume(handle)
        if state == "sleeps":
            time.sleep(1)

    begun = time.monotonic()
    run_body(body, library if deleter == "C" else None, state, also=[Lender])
    assert time.monotonic() - begun < 60


@simulated
@pytest.mark.parametrize("state", ["stands still", "sleeps"])
def test_a_forked_child_has_none(library, state):
    def body(library, state):
        import signal
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)
            handle = stream_of(session)
        sim.stall(handle)
        with kina.session(0) as session:
            session.copy(session.adopt(lender.lend()))
        if state == "sleeps":
            sim.resume(handle)
            time.sleep(1)
        assert len(reapers()) == 1
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            assert reapers() == []
            with pytest.raises(kina.UnavailableError, match="forked"):
                kina.session(0).__enter__()
            sys.exit(0)  # with all that the interpreter does at its end
        assert os.waitpid(child, 0)[1] == 0
        if state == "stands still":
            assert lender.deleted == 0
            sim.resume(handle)
        else:
            with kina.session(0) as session:
                session.copy(session.adopt(lender.lend()))
        time.sleep(1)
        assert lender.deleted == 1 + (state == "sleeps")

    run_body(body, library, state, also=[Lender, reapers])


# Threads --------------------------------------------------------------------------------------------------


@simulated
@pytest.mark.parametrize("deleter", ["C", "Python"])
def test_beside_threads_that_retire_themselves(library, deleter):
    """Every one is given back once, whoever finds it first."""

    def body(library):
        import time

        with kina.session(0) as session:
            lender = Lender(session, library)

        def use():
            for turn in range(50):
                with kina.session(0) as session:
                    session.copy(session.adopt(lender.lend()))
                    if turn % 10 == 0:
                        session.synchronize()
                if turn % 7 == 0:
                    time.sleep(0.03)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del threads, thread
        until = time.monotonic() + 20
        while lender.deleted < 200 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.1)
        assert lender.deleted == 200
        if library is None:
            assert {producer.deleted for producer in lender.producers} == {1}
        assert sim.violations == 0

    run_body(body, library if deleter == "C" else None, also=[Lender])
