"""The table of driver functions: how it is loaded, and questions about devices that it does not answer."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cuda import KERNELS, fork_body, pop, run_body, simulation, stack

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


# Calls that fail: these by name, every call of every operation in test_faults.py ----------------------------


def small_round_trip(session):
    values = np.arange(10, dtype=np.int32)
    assert np.array_equal(session.to_host(session.copy(session.from_host(values))), values)


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
        assert info.max_block[0] > 0 < info.compute_capability[0]

    fork_body(body, name)


@pytest.mark.simulated
@pytest.mark.multi_gpu
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
