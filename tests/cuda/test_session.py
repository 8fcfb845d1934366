"""The session protocol: what a session is, whose it is, and how it ends."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading

import numpy as np
import pytest
from helpers.cuda import (
    KERNELS,
    current_context,
    driver,
    in_thread,
    ok,
    primary_context,
    run_body,
    simulation,
    stack,
    stalled,
)

import kina
from kina.cuda import Completion, CudaSession

# Every way to use a session, for the rules that hold for all of them.
CALLS = {
    "empty": lambda s, t: s.empty(3),
    "zeros": lambda s, t: s.zeros(3),
    "full": lambda s, t: s.full(3, 1.0),
    "from_host": lambda s, t: s.from_host([1.0]),
    "to_host": lambda s, t: s.to_host(t),
    "copy": lambda s, t: s.copy(t),
    "adopt": lambda s, t: s.adopt(t),
    "synchronize": lambda s, t: s.synchronize(),
    "completion": lambda s, t: s.completion(),
    "counters": lambda s, t: s.counters(),
    "raw": lambda s, t: s.raw(),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def tensor(runtime):
    with kina.session(runtime) as session:
        return session.full(4, 7.0)


# What it is -----------------------------------------------------------------------------------------------


def test_entered_and_left_by_libraries(runtime):
    """contextlib takes the methods from the class; more at a time than are kept for the next with statement."""
    before = stack()
    with contextlib.ExitStack() as scopes:
        entered = [scopes.enter_context(kina.session(runtime)) for _ in range(40)]
        assert not any(session.closed for session in entered)
    assert all(session.closed for session in entered)
    assert stack() == before


def test_bound_methods_of_a_scope(runtime):
    enter = kina.session(runtime).__enter__  # the only thing that holds it
    gc.collect()
    session = enter()
    leave = session.__exit__
    with pytest.raises(TypeError, match="__enter__"):
        session.__enter__(1)
    with pytest.raises(TypeError, match="__exit__"):
        leave()
    with pytest.raises(TypeError, match="__exit__"):
        leave(None, None, traceback=None)
    assert not session.closed
    assert session.to_host(session.full(1, 2.0)) == 2.0
    assert leave(None, None, None) is None
    assert session.closed
    with pytest.raises(kina.SessionClosedError):
        enter()


def test_an_exception_of_a_block_goes_on(runtime):
    with pytest.raises(ZeroDivisionError), kina.session(runtime) as session:
        _ = 1 / 0
    assert session.closed


@pytest.mark.parametrize("kind", [CudaSession, Completion])
def test_construction_is_refused(kind):
    with pytest.raises(TypeError, match="cannot be constructed"):
        kind()
    with pytest.raises(TypeError, match="cannot be constructed"):
        kind.__new__(kind)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("what", ["session", "Runtime", "Completion"])
def test_copies_are_refused(session, take, what):
    thing = {"session": session, "Runtime": session.runtime, "Completion": session.completion()}[what]
    with pytest.raises(TypeError, match=r"copied|pickled"):
        take(thing)


def test_what_it_says_of_itself(runtime):
    session = kina.session(runtime)
    assert repr(session) == "<kina.CudaSession on cuda:0, not entered>"
    assert not session.closed
    with session as entered:
        assert entered is session
        assert repr(session) == "<kina.CudaSession on cuda:0, open>"
        assert not session.closed
        assert session.device == "cuda:0"
        assert session.runtime is runtime
        assert session.runtime_identity == runtime.identity
        assert session.allocation_domain == runtime.allocation_domain
        assert session.device_info == kina.devices()[0]
    assert session.closed
    assert repr(session) == "<kina.CudaSession on cuda:0, ended>"


def test_capabilities_are_asked_by_their_enum(session):
    assert all(type(session.supports(capability)) is bool for capability in kina.Capability)
    for nonsense in ("pink", "RAW_STREAM", None):
        with pytest.raises(kina.ArgumentError, match="Capability"):
            session.supports(nonsense)


def test_it_supports_native_modules(session):
    """For it loads one, and the loaded code runs."""
    assert session.supports(kina.Capability.NATIVE_MODULE)
    y = session.zeros(8)
    with session.raw() as raw:
        raw.module(KERNELS).function("fill", "mut f32[], f32, u32").launch(kina.LaunchConfig(1, 8), y, 3.0, 8)
    assert (session.to_host(y) == 3).all()


def test_it_supports_raw_streams(session):
    """For it hands out its stream, which is the driver's."""
    assert session.supports(kina.Capability.RAW_STREAM)
    session.synchronize()  # what tests before left on it
    with session.raw() as raw:
        ok(driver.cuStreamQuery(driver.CUstream(raw.unsafe_stream_handle())))


def test_it_supports_copies_within_the_device(session, runtime):
    """For a copy of another Runtime's tensor is enqueued behind the work that makes it, and nothing waits."""
    assert session.supports(kina.Capability.SAME_DEVICE_ASYNC_COPY)
    with kina.session(kina.Runtime(0)) as other:
        with stalled(other):
            source = other.full(8, 3.0)
            waits = session.counters().host_waits
            made = session.copy(session.adopt(source))
            assert session.counters().host_waits == waits
        assert (session.to_host(made) == 3).all()


def test_it_supports_no_peer_copies_and_no_kernel_language(session):
    """For there is no way to ask for either."""
    assert not session.supports(kina.Capability.PEER_COPY)
    assert not hasattr(session, "copy_from_peer")
    assert not session.supports(kina.Capability.KERNEL_DSL)


@pytest.mark.parametrize("oldest", [0, 1])
def test_it_supports_compilation_for_devices_that_the_compiler_knows(session, monkeypatch, oldest):
    """Or that are newer than all it knows, for which it makes PTX; not for older ones."""
    from kina.cuda import nvrtc

    major, minor = session.device_info.compute_capability
    real = nvrtc.nvrtc()
    changed = real._replace(architectures=(10 * major + minor + oldest, 10 * major + minor + 5))
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: changed)
    assert session.supports(kina.Capability.RUNTIME_COMPILATION) == (oldest == 0)
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: real._replace(architectures=(10,)))
    assert session.supports(kina.Capability.RUNTIME_COMPILATION)
    monkeypatch.undo()
    assert session.supports(kina.Capability.RUNTIME_COMPILATION)


def test_a_device_that_has_failed_supports_nothing():
    def body():
        with kina.session(0) as session:
            assert session.supports(kina.Capability.NATIVE_MODULE)
            with session.raw() as raw:
                raw.module(KERNELS).function("trap", "").launch(kina.LaunchConfig(1, 1))
            with pytest.raises(kina.SynchronizeError):
                session.synchronize()
            assert not any(session.supports(capability) for capability in kina.Capability)

    run_body(body)


@pytest.mark.parametrize("target", ["cuda", "cuda:0", 0, kina.DeviceId(0), "info", "runtime"])
def test_targets(runtime, target):
    target = {"info": kina.devices()[0], "runtime": runtime}.get(target, target)
    with kina.session(target) as session:
        assert session.device == "cuda:0"
        assert (session.runtime is runtime) == (target is runtime)


@pytest.mark.parametrize("target", ["cuda:", "cuda:x", "cuda:-1", "gpu", -1, 1.5, None, True, b"cuda:0"])
def test_bad_targets(target):
    with pytest.raises(kina.InvalidConfigError):
        kina.session(target)


def test_a_device_that_does_not_exist():
    count = len(kina.devices())
    with pytest.raises(kina.UnavailableError, match=f"cuda:{count} does not exist: the driver shows {count}"):
        kina.session(f"cuda:{count}")
    for huge in (2**31, 10**30, f"cuda:{2**31}", f"cuda:{10**30}", kina.DeviceId(2**40)):
        with pytest.raises((kina.UnavailableError, kina.InvalidConfigError)):
            kina.session(huge)


# When it can be used --------------------------------------------------------------------------------------


@every_call
def test_not_entered(runtime, tensor, call):
    with pytest.raises(kina.SessionClosedError, match="not been entered"):
        call(kina.session(runtime), tensor)


@every_call
def test_ended(runtime, tensor, call):
    with kina.session(runtime) as session:
        pass
    with pytest.raises(kina.SessionClosedError, match="ended"):
        call(session, tensor)


@every_call
def test_another_thread(session, tensor, call):
    with pytest.raises(kina.WrongThreadError):
        in_thread(lambda: call(session, tensor))
    assert session.to_host(tensor).tolist() == [7.0] * 4


def test_entered_twice(runtime):
    session = kina.session(runtime)
    with session:
        with pytest.raises(kina.SessionClosedError, match="entered once"):
            session.__enter__()
        assert not session.closed
    with pytest.raises(kina.SessionClosedError, match="entered once"):
        session.__enter__()


def test_close_ends_it_once(runtime):
    session = kina.session(runtime)
    session.close()  # not entered: nothing to leave
    with session:
        session.close()
        assert session.closed
        assert current_context() == 0
        session.close()


def test_left_in_another_thread(runtime):
    """It is given up, so that its Runtime is not stuck; the stacks of both threads are as they should be."""
    session = kina.session(runtime)
    session.__enter__()
    with pytest.raises(kina.WrongThreadError, match="given up"):
        in_thread(session.close)
    assert session.closed
    in_thread(lambda: kina.session(runtime).__enter__().close())
    assert current_context() == primary_context()  # until this thread enters or leaves one
    with kina.session(runtime):
        pass
    assert stack() == []


# Busy Runtimes and threads --------------------------------------------------------------------------------


def test_a_runtime_open_elsewhere_is_busy(session):
    def enter():
        with kina.session(session.runtime):
            pass

    with pytest.raises(kina.RuntimeBusyError, match="another thread"):
        in_thread(enter)
    session.synchronize()


def test_a_runtime_moves_between_threads(runtime, tensor):
    def double():
        with kina.session(runtime) as session:
            return session.to_host(tensor)

    assert in_thread(double).tolist() == double().tolist() == [7.0] * 4


def test_many_nested_sessions_of_one_runtime(runtime, tensor):
    sessions = [kina.session(runtime) for _ in range(300)]
    for session in sessions:
        session.__enter__()
    np.random.default_rng(1).shuffle(sessions)
    for session in sessions:
        assert session.to_host(tensor)[0] == 7
        session.close()
    in_thread(lambda: kina.session(runtime).__enter__().close())  # nobody's any more


def test_a_thread_that_dies_in_a_session_frees_its_runtime(runtime, tensor):
    left_open = []

    def die():
        session = kina.session(runtime)
        session.__enter__()
        raw = session.raw()
        raw.__enter__()
        raw.mut(tensor)
        left_open.append((session, raw))

    in_thread(die)
    with kina.session(runtime) as session, session.raw() as raw:
        assert session.to_host(tensor).tolist() == [7.0] * 4
        raw.mut(tensor)  # what the dead thread had borrowed is free
    dead, _ = left_open.pop()
    with pytest.raises(kina.WrongThreadError):
        dead.synchronize()
    del dead, _
    gc.collect()
    with kina.session(runtime) as session:
        session.synchronize()


# Abandoned sessions ---------------------------------------------------------------------------------------


class Cycle:
    pass


def abandon(runtime, how):
    session = kina.session(runtime)
    session.__enter__()
    session.zeros(3)
    if how == "cycle":
        knot = Cycle()
        knot.knot, knot.session = knot, session
    elif how == "raw block":
        session.raw().__enter__()


@pytest.mark.parametrize("how", ["dropped", "cycle", "raw block"])
@pytest.mark.parametrize("where", ["this thread", "another thread"])
def test_an_abandoned_session_frees_its_runtime(runtime, tensor, how, where):
    gc.collect()
    gc.disable()
    try:
        abandon(runtime, how)
        if how == "cycle":
            with pytest.raises(kina.RuntimeBusyError):
                in_thread(lambda: kina.session(runtime).__enter__())
        collect = gc.collect if where == "this thread" else lambda: in_thread(gc.collect)
        collect()
        assert in_thread(lambda: kina.session(runtime).__enter__().close()) is None
        with kina.session(runtime) as session, session.raw() as raw:
            raw.mut(tensor)
        assert stack() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("position", ["below", "above", "between"])
def test_an_abandoned_session_among_others(runtime, position, foreign):
    other = kina.Runtime(0)
    outer, inner = kina.session(runtime), kina.session(other)
    if position == "below":
        abandon(other, "dropped")
        outer.__enter__()
    elif position == "above":
        outer.__enter__()
        abandon(other, "dropped")
    else:
        outer.__enter__()
        abandon(other, "dropped")
        inner.__enter__()
        inner.zeros(3)
        inner.close()
    outer.zeros(3)
    outer.close()
    assert stack() == []
    other.close()


def test_a_generator_collected_in_another_thread(runtime, tensor):
    def rows():
        with kina.session(runtime) as session:
            yield session.to_host(tensor)

    generator = rows()
    assert next(generator).tolist() == [7.0] * 4
    holder = [generator]
    del generator

    def collect():
        holder.clear()
        gc.collect()

    in_thread(collect)
    in_thread(lambda: kina.session(runtime).__enter__().close())
    with kina.session(runtime) as session:
        session.synchronize()
    assert stack() == []


def test_an_exception_keeps_a_session_alive_but_not_open(runtime):
    def fail():
        with kina.session(runtime) as session:
            session.zeros(3)
            raise KeyError

    with pytest.raises(KeyError) as raised:
        fail()
    in_thread(lambda: kina.session(runtime).__enter__().close())
    del raised


# Module-level functions -----------------------------------------------------------------------------------


def test_the_innermost_session_is_used(runtime):
    other = kina.Runtime(0)
    with kina.session(runtime), kina.session(other):
        assert kina.zeros(3, device="cuda:0").runtime_identity == other.identity
        assert kina.zeros(3).runtime_identity == other.identity
        with kina.session("cpu"):
            assert kina.zeros(3).device == "cpu"
            assert kina.zeros(3, device=0).runtime_identity == other.identity
    with kina.session("cpu"), kina.session(runtime):
        assert kina.zeros(3).device == "cuda:0"
        assert kina.zeros(3, device="cpu").device == "cpu"


def test_a_session_that_is_being_left_is_not_the_innermost(runtime):
    """What it lets go of runs anybody's code."""

    class Curious(kina.memory.MemoryResource):
        def _allocate(self, nbytes, stream): ...
        def _deallocate(self, address, nbytes, stream): ...

        def __del__(self):
            seen.append(kina.zeros(3, device=0).runtime_identity)

    seen = []
    with kina.session(runtime) as outer:
        with kina.session(kina.Runtime(0), memory=Curious(device="cuda:0")):
            pass
        assert seen == [outer.runtime_identity]


def test_without_a_session_the_default_runtime_is_used():
    with kina.session("cuda:0") as session:
        default = session.runtime_identity
    assert kina.full(3, 2, "int32", device="cuda:0").runtime_identity == default
    assert in_thread(lambda: kina.zeros(3, device="cuda:0").runtime_identity) != default
    assert kina.zeros(3).device == "cpu"


def test_no_wait_in_sessions(runtime):
    """Entering, leaving, allocating and filling wait for nothing and ask the device nothing."""
    with kina.session(runtime) as session:
        kept = [session.zeros(100), session.full(100, 2.0)]
        counters = session.counters()
    assert (counters.host_waits, counters.synchronizations, counters.event_queries) == (0, 0, 0)
    assert counters.events_recorded == counters.seals == 0
    assert counters.allocations == len(kept)
    sim = simulation()
    if sim is not None:
        sim.reset_counts()
        for _ in range(20):
            with kina.session(runtime) as session:
                session.zeros(10)
        waits = (
            "cuStreamSynchronize",
            "cuCtxSynchronize",
            "cuEventSynchronize",
            "cuEventQuery",
            "cuEventRecord",
        )
        assert {name: sim.calls(name) for name in waits} == dict.fromkeys(waits, 0)


def test_sessions_of_many_threads(runtime):
    """Each thread on its own Runtime, all at once."""
    failures = []

    def work(number):
        try:
            for i in range(20):
                with kina.session("cuda:0") as session:
                    values = np.arange(number * 100 + i, dtype=np.int64)
                    assert np.array_equal(session.to_host(session.from_host(values)), values)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
