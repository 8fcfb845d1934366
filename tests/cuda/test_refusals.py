"""What the driver refuses at an unlucky place: the error says so, nothing is lost, and the session goes on."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers.cuda import KERNELS, fork_body, on_stack, run_body, simulation
from helpers.kernels import module_text, nothing_enqueued, sized_entry

import kina

ADD_ONE = "mut f32[], u32"


def round_trip(session):
    values = np.arange(8, dtype=np.float32)
    assert np.array_equal(session.to_host(session.copy(session.from_host(values))), values)


# The driver itself ----------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_a_library_that_is_none(tmp_path):
    """What the loader says is in the reason."""
    (tmp_path / "libcuda.so.1").write_text("no library")

    def body():
        assert kina.devices() == kina.cuda.devices() == kina.cuda.peer_matrix() == []
        assert "could not be loaded" in kina.unavailable_reason()
        assert "libcuda.so.1" in kina.unavailable_reason()
        with pytest.raises(kina.UnavailableError, match="could not be loaded"):
            kina.session("cuda:0")

    run_body(body, LD_LIBRARY_PATH=str(tmp_path))


@pytest.mark.simulated
def test_a_result_that_the_driver_cannot_name(sim, session):
    with sim.failing("cuStreamSynchronize", 1, 12345), pytest.raises(kina.SynchronizeError) as raised:
        session.synchronize()
    assert raised.value.driver_error.code == 12345
    assert raised.value.driver_error.name == "CUDA_ERROR_UNKNOWN"
    assert "an error that this driver does not know" in str(raised.value)
    round_trip(session)


# Memory ---------------------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_a_runtime_whose_pool_is_refused():
    """The pool of the device is asked for again by the next Runtime."""

    def body():
        sim = simulation()
        with sim.failing("cuMemPoolCreate", 1, 999), pytest.raises(kina.DriverError) as raised:
            kina.Runtime(0)
        assert raised.value.driver_error.code == 999
        streams = sim.live()["streams"]
        with kina.session("cuda:0") as session:
            assert sim.live()["streams"] == streams
            round_trip(session)

    fork_body(body, also=(round_trip,))


@pytest.mark.simulated
@pytest.mark.parametrize("wait", [1, 2])
def test_a_wait_that_fails_is_no_lack_of_memory(wait):
    """Out of memory waits for every Runtime, twice; what goes wrong in a wait is told as what it is."""

    def body(wait):
        sim = simulation()
        with kina.session("cuda:0") as session:
            round_trip(session)
            sim.fail("cuMemAllocFromPoolAsync", 1, 2, from_then_on=True)
            sim.fail("cuEventSynchronize", wait, 999)
            with pytest.raises(kina.DriverError) as raised:
                session.empty(64 << 20)
            assert not isinstance(raised.value, kina.OutOfMemoryError)
            assert raised.value.driver_error.code == 999
            assert sim.calls("cuEventSynchronize") >= wait
            sim.clear_faults()
            round_trip(session)

    fork_body(body, wait, also=(round_trip,))


@pytest.mark.simulated
@pytest.mark.parametrize(("code", "error"), [(901, "OutOfMemoryError"), (999, "DriverError")])
def test_quarantined_memory_that_cannot_be_waited_for(code, error):
    """During somebody's capture there is just no room; any other failure of the wait is told as what it is."""

    def body(code, error):
        sim = simulation()
        with kina.session("cuda:0") as session:
            round_trip(session)
            session.zeros(10).to_dlpack(stream=-1)
            gc.collect()
            frees = session.counters().frees
            sim.fail("cuMemAllocFromPoolAsync", 1, 2, from_then_on=True)
            sim.fail("cuCtxSynchronize", 1, code)
            with pytest.raises(getattr(kina, error)) as raised:
                session.empty(64 << 20)
            assert raised.value.driver_error.code == (2 if error == "OutOfMemoryError" else code)
            assert session.counters().frees == frees
            sim.clear_faults()
            session.synchronize()
            assert session.counters().frees == frees + 1
            round_trip(session)

    fork_body(body, code, error, also=(round_trip,))


@pytest.mark.simulated
def test_synchronizing_beside_a_capture_frees_no_quarantined_memory(sim, session):
    """The device cannot be waited for while somebody captures: the session's own stream can, and the rest stays."""
    session.synchronize()
    tensor = session.full(10, 1.0)
    tensor.to_dlpack(stream=-1)
    del tensor
    gc.collect()
    frees = session.counters().frees
    with sim.failing("cuCtxSynchronize", 1, 900):
        session.synchronize()
        assert sim.faults_delivered == 1
    assert session.counters().frees == frees
    session.synchronize()
    assert session.counters().frees == frees + 1


# Events and staging ---------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_an_event_that_is_refused():
    def body():
        sim = simulation()
        with kina.session("cuda:0") as session:
            tensor = session.zeros(10)
            with sim.failing("cuEventCreate", 1, 999), pytest.raises(kina.DriverError) as raised:
                session.completion()
            assert raised.value.driver_error.code == 999
            session.completion().wait()
            assert not session.to_host(tensor).any()

    fork_body(body)


@pytest.mark.simulated
def test_idle_events_are_bounded():
    """A device keeps events for later, but not as many as there ever were at once."""

    def body():
        sim = simulation()
        with kina.session("cuda:0") as session:
            held = []
            for _ in range(300):
                session.zeros(1)
                held.append(session.completion())
            assert sim.live()["events"] >= 300
            session.synchronize()
            held.clear()
            gc.collect()
            assert 0 < sim.live()["events"] <= 256
            session.completion().wait()

    fork_body(body)


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["cuEventRecord", "cuMemHostAlloc", "cuMemcpyHtoDAsync"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_upload_of_several_blocks_breaks_off(name, nth):
    """Each block is sealed, so that the ring turns; what fails on the way is told, and the next upload is whole."""

    def body(name, nth):
        sim = simulation()
        values = np.arange(5 << 20, dtype=np.float32)  # five blocks
        with kina.session("cuda:0") as session:
            sim.fail(name, nth, 999)
            with pytest.raises(kina.KinaError) as raised:
                session.from_host(values)
            assert raised.value.driver_error.code == 999
            sim.clear_faults()
            assert np.array_equal(session.to_host(session.from_host(values)), values)

    fork_body(body, name, nth)


# Launches and modules -------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_a_launch_that_cannot_make_its_context_current(sim, session, foreign):
    """Nothing is enqueued, and the same launch goes through afterwards."""
    tensor = session.zeros(8)
    with session.raw() as raw:
        function = raw.module(KERNELS).function("add_one", ADD_ONE)
        with on_stack(foreign):
            with nothing_enqueued(session), sim.failing("cuCtxPushCurrent"), pytest.raises(kina.KinaError) as raised:
                function.launch(kina.LaunchConfig(1, 8), tensor, 8)
            assert raised.value.driver_error.code == 999
            function.launch(kina.LaunchConfig(1, 8), tensor, 8)
    assert session.to_host(tensor).tolist() == [1.0] * 8


def test_a_launch_with_its_configuration_by_keyword(session):
    """No argument can follow it; what is missing is told as in any other launch."""
    with session.raw() as raw:
        function = raw.module(KERNELS).function("add_one", ADD_ONE)
        with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match=r"takes 2 argument\(s\), got 0"):
            function.launch(config=kina.LaunchConfig(1, 8))


@pytest.mark.simulated
def test_more_parameters_than_a_launch_can_carry(session):
    with session.raw() as raw:
        module = raw.module(module_text(sized_entry("vast", 32760, 8)))
        with pytest.raises(kina.UnsupportedError, match="vast takes 32768 bytes of parameters, more than the 32764"):
            module.function("vast")


@pytest.mark.simulated
def test_ptx_that_is_too_new_for_a_driver_that_does_not_say_what_it_knows(sim, session):
    with session.raw() as raw, sim.failing("cuModuleLoadDataEx", 1, 222), pytest.raises(kina.ModuleLoadError) as raised:
        raw.module(module_text(sized_entry("new", 8), version="9.9"))
    assert "asks for .version 9.9, this driver accepts up to 9.0" in str(raised.value)


# Other libraries' memory ----------------------------------------------------------------------------------


def test_a_producer_on_a_device_that_is_not_the_session_s(session):
    from helpers.managed import CUDA, Producer

    producer = Producer((4,), device=(CUDA, 7))
    with pytest.raises(kina.DLPackError, match=r"device: .*cuda:7, which does not exist"):
        session.adopt(producer)
    assert producer.deleted == 0
