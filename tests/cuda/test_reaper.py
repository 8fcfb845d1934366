# ruff: noqa: F821
# Bodies run in a process of their own, behind the names of helpers.cuda.PRELUDE and of ALSO.
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

DELETERS_IN_C = r"""
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

static _Atomic int deleted;
static _Atomic long long last;
static int bell = -1;

/* Asks nothing of Python. */
void deleter(void *managed) {
    struct timespec now;
    (void)managed;
    clock_gettime(CLOCK_MONOTONIC, &now);
    last = now.tv_sec * 1000000000LL + now.tv_nsec;
    deleted++;
    if (write(bell, "", 1) != 1) deleted = -1000;
}
void deleter_that_hangs(void *managed) {
    deleter(managed);
    for (;;) pause();
}
int times(void) { return deleted; }
long long when_ns(void) { return last; }
void ring(int file) { bell = file; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deleter")
    (folder / "deleter.c").write_text(DELETERS_IN_C)
    return str(compile_c(folder / "deleter.c", folder / "deleter.so", "-shared", "-fPIC"))


# What bodies have beside the prelude ----------------------------------------------------------------------


class Bell:
    """Rung by any thread, for a main thread that sleeps in one call of the C library until it hears it."""

    def __init__(self):
        self.heard, self.file = os.pipe()

    def ring(self):
        os.write(self.file, b"\0")

    def wait(self, seconds=20):
        import select

        assert select.select([self.heard], [], [], seconds)[0], "nothing is heard"
        os.read(self.heard, 1)


class Lender:
    """Memory of another library. ``deleted`` and ``when_ns`` say how often, and when last, it was given back."""

    def __init__(self, session, library=None, hangs=False):
        import ctypes

        from helpers.managed import CUDA, Producer

        self.base = session.zeros(1024)
        session.synchronize()
        self.stream = stream_of(session)
        self.bell, self.heard, self.hangs = Bell(), 0, hangs
        self.moments = []
        self.producers = []
        address = view(session, self.base)
        self.make = lambda: Producer((1024,), device=(CUDA, 0), data=address)
        self.compiled = None if library is None else ctypes.CDLL(library)
        if self.compiled is not None:
            self.compiled.when_ns.restype = ctypes.c_longlong
            self.compiled.ring(self.bell.file)

    def lend(self):
        import ctypes

        producer = self.make()
        if self.compiled is not None:
            deleter = self.compiled.deleter_that_hangs if self.hangs else self.compiled.deleter
        else:
            delete = producer._delete
            deleter = producer._deleter = type(producer._deleter)(lambda address: self.delete(delete, address))
        producer.managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
        self.producers.append(producer)  # the memory of its fields
        return producer

    def delete(self, delete, address):
        import time

        delete(address)
        self.moments.append(time.monotonic_ns())
        self.bell.ring()
        if self.hangs:
            threading.Event().wait()

    def wait_for(self, deleted):
        """Until so much was given back."""
        while self.heard < deleted:
            self.bell.wait()
            self.heard += 1
        assert self.deleted == deleted

    @property
    def deleted(self):
        return len(self.moments) if self.compiled is None else self.compiled.times()

    @property
    def when_ns(self):
        return self.moments[-1] if self.compiled is None else self.compiled.when_ns()


def a_lender(library=None, **how):
    with kina.session(0) as session:
        return Lender(session, library, **how)


def borrow(lender):
    """A session uses what it lent, and that is all that holds it when the session is over."""
    with kina.session(0) as session:
        session.copy(session.adopt(lender.lend()))
    gc.collect()


def several_periods():
    """Of the reaper's, in which it does what it must not, if it does."""
    import time

    time.sleep(0.1)


def reapers():
    """Native threads of that name in this process."""
    from pathlib import Path

    return [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == "kina-reaper"]


def turns():
    """How often the reaper has gone to sleep so far, for whatever time."""
    return [
        line for task in reapers() for line in (task / "status").read_text().splitlines() if "ctxt_switches" in line
    ]


def stands_still(what):
    """Wait until it stays the same for several periods."""
    before = object()
    for _ in range(100):
        now = what()
        if now == before:
            return now
        before = now
        several_periods()
    raise AssertionError(f"it goes on: {before}")


ALSO = [Bell, Lender, a_lender, borrow, several_periods, reapers, turns, stands_still]


def run(body, *arguments, **settings):
    return run_body(body, *arguments, also=ALSO, **settings)


def library_of(deleter, library):
    return library if deleter == "C" else None


# The promise ----------------------------------------------------------------------------------------------


@simulated
@pytest.mark.parametrize("deleter", ["C", "Python"])
def test_an_idle_process_gives_back_what_it_borrowed(library, deleter):
    """Within 100 ms of the end of the work: the best of a few, for hosts are busy."""

    def body(library):
        import time

        best = 1e9
        lender = a_lender(library)
        for turn in range(5):
            sim.stall(lender.stream)
            borrow(lender)
            several_periods()
            assert lender.deleted == turn
            resumed = time.monotonic_ns()
            sim.resume(lender.stream)
            lender.wait_for(turn + 1)
            best = min(best, lender.when_ns - resumed)
        assert best < 100e6, best
        with kina.session(0) as session:
            until(lambda: (counters := session.counters()).reaped == counters.retired > 0)

    run(body, library_of(deleter, library))


@simulated
def test_python_objects_are_let_go_too():
    """The owner of an adopted stream goes with the last memory of its Runtime, while the main thread runs nothing."""

    def body():
        import weakref

        bell, gone = Bell(), []
        with kina.session(kina.Runtime(0)) as ours:
            owner = ForeignStream()
            weakref.finalize(owner, lambda: (gone.append(threading.get_ident()), bell.ring()))
            theirs = kina.Runtime(0, stream=owner)
            with kina.session(theirs) as session:
                tensor = session.zeros(1000)
            handle = stream_of(ours)
            sim.stall(handle)
            ours.copy(ours.adopt(tensor))
        del owner, theirs, session, tensor
        gc.collect()
        several_periods()
        assert gone == []
        sim.resume(handle)
        bell.wait()
        assert len(gone) == 1
        assert gone[0] != threading.get_ident()

    run(body)


@simulated
@pytest.mark.parametrize("what", ["a Runtime that is gone", "a thread that is gone", "a Runtime that was left open"])
def test_whoever_used_it_last(library, what):
    def body(library, what):
        lender = a_lender(library)
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
        several_periods()
        assert lender.deleted == 0
        sim.resume(handle)
        lender.wait_for(1)

    run(body, library, what)


@simulated
def test_a_graph_of_another_library_that_is_destroyed(library):
    """What kina did while that one captured, and holds for its graph, goes with it."""

    def body(library):
        stream = ForeignStream()
        handle = driver.CUstream(stream.handle)
        lender = a_lender(library)
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
            several_periods()
            with kina.session(0, stream=stream):
                pass  # kina learns that the capture is over
            assert lender.deleted == 0
            ok(driver.cuGraphDestroy(graph))
        lender.wait_for(1)

    run(body, library)


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

        lender = a_lender(library)
        with kina.session(0) as session:
            for _ in range(100):
                session.copy(session.from_host(np.ones(1000)))
        with kina.session(0) as session:
            session.from_host([1.0])
        several_periods()
        assert reapers() == []  # staging is kina's own
        for turn in range(2):
            borrow(lender)
            lender.wait_for(turn + 1)
            assert len(reapers()) == 1
            still = stands_still(turns)
            calls = sim.calls()
            time.sleep(0.3)
            assert (turns(), sim.calls()) == (still, calls)

    run(body, library)


@simulated
def test_it_asks_now_and_then(library):
    """While there is something to wait for: some fifty times a second."""

    def body(library):
        import time

        lender = a_lender(library)
        sim.stall(lender.stream)
        borrow(lender)
        before, begun = sim.calls("cuEventQuery"), time.monotonic()
        until(lambda: sim.calls("cuEventQuery") > before)
        time.sleep(0.5)
        asked = sim.calls("cuEventQuery") - before
        assert asked <= 60 * (time.monotonic() - begun)
        assert sim.calls("cuEventSynchronize") == 0
        sim.resume(lender.stream)

    run(body, library)


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
def test_what_fails_is_tried_again(library, name):
    def body(library, name):
        lender = a_lender(library)
        for turn, code in enumerate([1, 900, 999]):
            sim.stall(lender.stream)
            borrow(lender)
            sim.fail(name, 1, code, from_then_on=True)
            sim.resume(lender.stream)
            if name == "cuEventQuery":
                until(lambda: sim.faults_delivered > 2)
                assert lender.deleted == turn, code
            else:
                lender.wait_for(turn + 1)
            sim.clear_faults()
            lender.wait_for(turn + 1)
            with kina.session(0) as session:
                assert session.to_host(session.full(3, 1.0)).tolist() == [1.0] * 3, code

    run(body, library, name)


@simulated
@pytest.mark.parametrize("first", ["the reaper", "a session"])
def test_of_a_device_that_is_broken_it_keeps_off(library, first):
    """Nothing is given back, nothing asked any more, and the process ends in silence."""

    def body(library, first):
        import time

        lender = a_lender(library)
        sim.stall(lender.stream)
        borrow(lender)
        sim.break_device(0)
        if first == "a session":
            with pytest.raises(kina.KinaError), kina.session(0) as session:
                session.synchronize()
        calls = stands_still(sim.calls)
        time.sleep(0.3)
        assert sim.calls() == calls
        assert lender.deleted == 0
        with pytest.raises(kina.RuntimePoisonedError), kina.session(0):
            pass

    run(body, library, first)


# The end of the process -----------------------------------------------------------------------------------


@simulated
@pytest.mark.parametrize("deleter", ["C", "Python"])
@pytest.mark.parametrize("state", ["stands still", "has just ended", "sleeps"])
def test_the_process_ends(library, state, deleter):
    """At once and in silence, whatever the device does; run_body asserts it."""

    def body(library, state):
        lender = a_lender(library)
        sim.stall(lender.stream)
        borrow(lender)
        globals()["kept"] = lender
        if state != "stands still":
            sim.resume(lender.stream)
        if state == "sleeps":
            lender.wait_for(1)
            stands_still(turns)

    begun = time.monotonic()
    run(body, library_of(deleter, library), state)
    assert time.monotonic() - begun < 60


@simulated
@pytest.mark.parametrize("deleter", ["C", "Python"])
def test_the_process_ends_though_a_deleter_hangs(library, deleter):
    """The exit waits two seconds for the reaper, which stands in it, and says nothing of it."""

    def body(library):
        import time

        lender = a_lender(library, hangs=True)
        globals()["kept"] = lender
        borrow(lender)
        lender.wait_for(1)
        print(time.monotonic())

    left = float(run(body, library_of(deleter, library), timeout=40))
    assert 1.9 <= time.monotonic() - left < 30


@simulated
@pytest.mark.parametrize("state", ["stands still", "sleeps"])
def test_a_forked_child_has_none(library, state):
    def body(library, state):
        import signal

        lender = a_lender(library)
        sim.stall(lender.stream)
        borrow(lender)
        if state == "sleeps":
            sim.resume(lender.stream)
            lender.wait_for(1)
            stands_still(turns)
        assert len(reapers()) == 1
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            assert reapers() == []
            with pytest.raises(kina.UnavailableError, match="forked"):
                kina.session(0).__enter__()
            sys.exit(0)  # with all that the interpreter does at its end
        assert os.waitpid(child, 0)[1] == 0
        if state == "stands still":
            assert lender.deleted == 0
            sim.resume(lender.stream)
        else:
            borrow(lender)
        lender.wait_for(1 + (state == "sleeps"))

    run(body, library, state)


# Threads --------------------------------------------------------------------------------------------------


@simulated
@pytest.mark.parametrize("deleter", ["C", "Python"])
def test_beside_threads_that_retire_themselves(library, deleter):
    """Every one is given back once, whoever finds it first."""

    def body(library):
        import time

        lender = a_lender(library)

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
        lender.wait_for(200)
        several_periods()
        assert lender.deleted == 200
        if library is None:
            assert {producer.deleted for producer in lender.producers} == {1}
        assert sim.violations == 0

    run(body, library_of(deleter, library))
