"""The table of driver functions: how it is loaded, and what kina is worth when any call of it fails."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers.cuda import KERNELS, ForeignStream, current_context, pop, run_body, simulation, stack

import kina
from kina.cuda import compiled_version, driver_path, driver_version

# Loading --------------------------------------------------------------------------------------------------


def test_versions():
    loaded, compiled = (tuple(map(int, text.split("."))) for text in (driver_version(), compiled_version()))
    assert loaded[0] >= compiled[0] == 13
    assert "libcuda.so" in driver_path()


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemAllocFromPoolAsync", "cuCtxGetId"])
def test_a_missing_entry_is_named(name):
    def body(name):
        with pytest.raises(kina.UnavailableError, match=rf"too old: it has no {name}"):
            kina.session("cuda:0")
        assert name in kina.unavailable_reason()
        assert kina.devices() == []
        with kina.session("cpu") as session:
            assert session.to_host(session.full(2, 1)).tolist() == [1, 1]

    run_body(body, name, KINA_SIM_HIDE=name)


@pytest.mark.simulated
def test_an_optional_entry_may_be_missing():
    def body():
        with kina.session("cuda:0") as session, session.raw() as raw:
            tensor = session.zeros(10)
            raw.module(KERNELS).function("add_one", "mut f32[], u32").launch(kina.LaunchConfig(1, 32), tensor, 10)
            assert session.to_host(tensor).tolist() == [1.0] * 10

    run_body(body, KINA_SIM_HIDE="cuFuncLoad")


@pytest.mark.simulated
def test_a_driver_that_is_too_old():
    def body():
        with pytest.raises(kina.UnavailableError, match=r"supports CUDA 12\.9, kina needs CUDA 13"):
            kina.session("cuda:0")

    run_body(body, KINA_SIM_DRIVER_VERSION="12090")


@pytest.mark.simulated
def test_a_driver_without_a_device():
    def body():
        with pytest.raises(kina.UnavailableError, match=r"sees no GPU.*\(100\)") as raised:
            kina.session("cuda:0")
        assert raised.value.driver_error.code == 100
        assert kina.devices() == []

    run_body(body, KINA_SIM_DEVICES="0")


def test_loading_waits_for_the_first_use():
    def body():

        import kina.cuda

        def loaded():
            return "libcuda.so" in open("/proc/self/maps").read()

        print(loaded())
        kina.devices()
        print(loaded())

    # Without the helpers, which load the driver themselves.
    import inspect
    import textwrap

    from helpers.processes import run_python

    source = textwrap.dedent(inspect.getsource(body))
    assert run_python(f"import kina\n{source}\nbody()\n").split() == ["False", "True"]


# Any call fails -------------------------------------------------------------------------------------------

# What a failure cannot be told from: the context that was reset (cuCtxGetId), and texts of errors.
EXEMPT = {"cuCtxGetId", "cuGetErrorName", "cuGetErrorString"}

# What the driver refuses to take back is lost, and counted as leaked.
RELEASES = {"cuMemFreeAsync", "cuMemPoolDestroy", "cuModuleUnload"}

SIZE = 100_000  # of more than one small staging block


def launch(session, state):
    with session.raw() as raw:
        raw.module(KERNELS).function("add_one", "mut f32[], u32").launch(
            kina.LaunchConfig.linear(SIZE), state["tensor"], SIZE
        )


def adopt(session, state):
    return session.copy(session.adopt(state["theirs"]))


def ask(session, state):
    session.copy(state["tensor"])
    session.completion().done()


def wait(session, state):
    session.copy(state["tensor"])
    session.completion().wait()


def tolerate(function, code, where):
    """Run it: it may fail with a typed error that carries the driver's code, and nothing else."""
    seen = None
    try:
        function()
    except kina.KinaError as error:
        seen = error
    if seen is not None:
        assert not isinstance(seen, (kina.RuntimePoisonedError, kina.InternalError)), where
        assert seen.driver_error is None or seen.driver_error.code == code, where


OPERATIONS = {
    "empty": lambda s, state: s.empty(SIZE),
    "zeros": lambda s, state: s.zeros(SIZE),
    "full": lambda s, state: s.full(SIZE, 1.5),
    "full, 16 bytes": lambda s, state: s.full(10, 1 + 2j, "complex128"),
    "from_host": lambda s, state: s.from_host(state["array"]),
    "to_host": lambda s, state: s.to_host(state["tensor"]),
    "to_host of a view": lambda s, state: s.to_host(state["tensor"][::-3]),
    "copy": lambda s, state: s.copy(state["tensor"]),
    "adopt": adopt,
    "export": lambda s, state: state["tensor"].to_dlpack(),
    "synchronize": lambda s, state: s.synchronize(),
    "completion, done": ask,
    "completion, wait": wait,
    "counters": lambda s, state: s.counters(),
    "launch": launch,
}


def small_round_trip(session):
    values = np.arange(10, dtype=np.int32)
    assert np.array_equal(session.to_host(session.copy(session.from_host(values))), values)


def in_fresh_session(function, source):
    """Run function(session, state) on a Runtime of its own, its memory and staging warm or not."""
    runtime = kina.Runtime(0)
    session = kina.session(runtime)
    session.__enter__()
    state = {"tensor": session.zeros(SIZE), "theirs": source, "array": np.ones(SIZE, np.float32)}
    session.synchronize()
    try:
        return function(session, state)
    finally:
        state.clear()
        session.close()
        runtime.close()
        assert stack() == []


@pytest.fixture
def source():
    with kina.session(kina.Runtime(0)) as session:
        tensor = session.zeros(SIZE)
        session.synchronize()
    return tensor


def kept(sim):
    """What lives in the driver, but for pinned blocks, idle pools, streams and events: the device keeps those."""
    live = sim.live()
    return {
        "modules": live["modules"],
        "memory": sorted(a["address"] for a in live["allocations"] if a["kind"] != "pinned"),
        "retains": live["retains"],
    }


def settle():
    with kina.session("cuda:0") as session:
        session.synchronize()
    gc.collect()


@pytest.mark.simulated
@pytest.mark.parametrize("code", [1, 2, 999])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_nth_call_fails(sim, source, operation, code):
    """Each driver call of an operation fails once: a typed error or none, stack as before, all usable."""
    act = OPERATIONS[operation]

    def count(session, state):
        sim.reset_counts()
        act(session, state)
        return {name: number for name, number in sim.call_counts().items() if number and name not in EXEMPT}

    in_fresh_session(count, source)
    counts = in_fresh_session(count, source)
    assert counts
    settle()
    before = kept(sim)
    for name, number in sorted(counts.items(), key=lambda item: item[0] in RELEASES):
        if name in RELEASES and before is not None:
            settle()
            assert kept(sim) == before
            before = None
        for nth in range(1, min(number, 6) + 1):

            def fail(session, state, name=name, nth=nth):
                there = stack()
                with sim.failing(name, nth, code):
                    tolerate(lambda: act(session, state), code, (name, nth))
                    delivered = sim.faults_delivered
                assert delivered == 1, (name, nth)
                if name != "cuCtxPopCurrent":
                    assert stack() == there, (name, nth)
                small_round_trip(session)

            in_fresh_session(fail, source)
    settle()
    assert before is None or kept(sim) == before


@pytest.mark.simulated
@pytest.mark.parametrize("code", [1, 2, 999])
@pytest.mark.parametrize("adopted", [False, True])
def test_entering_and_leaving_with_a_failing_call(sim, caplog, code, adopted):
    stream = ForeignStream() if adopted else None

    def cycle():
        session = kina.session("cuda:0", stream=stream)
        session.__enter__()
        try:
            session.from_host([1.0])
        finally:
            session.close()

    cycle()
    sim.reset_counts()
    cycle()
    counts = {name: number for name, number in sim.call_counts().items() if number and name not in EXEMPT}
    for name, number in counts.items():
        for nth in range(1, number + 1):
            caplog.clear()
            with sim.failing(name, nth, code):
                tolerate(cycle, code, (name, nth))
            if name == "cuCtxPopCurrent" and current_context():
                pop()  # of a call before the session, whose context the driver refused to take back
            assert current_context() == 0, (name, nth)
            assert len(caplog.records) <= 1, (name, nth)
            cycle()
    if stream is not None:
        stream.destroy()


@pytest.mark.simulated
@pytest.mark.parametrize("code", [1, 2, 999])
def test_making_a_runtime_with_a_failing_call(sim, code):
    held = [kina.Runtime(0) for _ in range(33)]  # no idle stream is left
    sim.reset_counts()
    kept_runtime = kina.Runtime(0)
    counts = {name: number for name, number in sim.call_counts().items() if number and name not in EXEMPT}
    assert "cuStreamCreateWithPriority" in counts
    for name, number in counts.items():
        for nth in range(1, number + 1):
            with sim.failing(name, nth, code):
                tolerate(lambda: held.append(kina.Runtime(0)), code, (name, nth))
            while name == "cuCtxPopCurrent" and current_context():
                pop()  # whose context it is cannot be mended: the driver refused just that
    with kina.session(kept_runtime) as session:
        small_round_trip(session)


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["cuDevicePrimaryCtxRetain", "cuDeviceGet", "cuCtxGetId", "cuDeviceGetAttribute"])
def test_a_device_that_does_not_open(name):
    def body(name):
        sim = simulation()
        kina.devices()
        with sim.failing(name, 1, 2), pytest.raises(kina.KinaError) as raised:
            kina.session("cuda:0").__enter__()
        assert raised.value.driver_error.code == 2
        with kina.session("cuda:0") as session:
            assert session.to_host(session.full(2, 1)).tolist() == [1, 1]
        assert stack() == []
        assert sim.live()["retains"][0] <= 2

    run_body(body, name)


QUESTIONS = [
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetUuid",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceTotalMem",
    "cuDeviceGetAttribute",
]


@pytest.mark.simulated
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_about_devices_without_an_answer(name):
    """It is told as it is, and nothing wrong is remembered."""

    def body(name):
        sim = simulation()
        sim.fail(name, 1, 999)
        with pytest.raises(kina.UnavailableError, match="does not tell") as raised:
            kina.cuda.device_info(0)
        assert raised.value.driver_error.code == 999
        info = kina.cuda.device_info(0)
        assert info.total_memory_bytes > 2**30
        assert info.attributes["max_block_x"] > 0 < info.compute_capability[0]

    run_body(body, name)


@pytest.mark.simulated
def test_a_peer_question_without_an_answer(sim):
    from kina.cuda.device import peer_matrix

    with sim.failing("cuDeviceGetP2PAttribute", 1, 999), pytest.raises(kina.UnavailableError, match="does not tell"):
        peer_matrix()


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["cuFuncGetParamInfo", "cuFuncGetAttribute"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_function_that_the_driver_does_not_describe(session, sim, name, nth):
    with session.raw() as raw:
        module = raw.module(KERNELS)
        with sim.failing(name, nth, 999), pytest.raises(kina.ModuleLoadError, match="does not tell") as raised:
            module.function("saxpy")
        assert raised.value.driver_error.code == 999
        assert len(module.function("saxpy").parameters) == 4


@pytest.mark.simulated
def test_a_context_that_stays_is_logged_once(sim, caplog):
    """Around a call outside of sessions too; the call itself succeeds."""
    with kina.session("cuda:0") as session:
        witness = session.completion()
    with sim.failing("cuCtxPopCurrent", 1, 999):
        made = kina.Runtime(0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "could not be taken off the stack: CUDA_ERROR_UNKNOWN (999)" in caplog.text
    assert pop()
    with kina.session(made) as session:
        small_round_trip(session)
    assert witness.done()
    assert len(caplog.records) == 1


@pytest.mark.simulated
@pytest.mark.multi_gpu
def test_an_abandoned_session_keeps_its_place_until_the_driver_answers(sim):
    kina.session("cuda:1").__enter__()  # given up at once
    assert len(stack()) == 1
    with sim.failing("cuCtxGetCurrent", 1, 999), kina.session("cuda:0") as session:
        small_round_trip(session)
    assert stack() == []
