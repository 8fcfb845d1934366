"""Promises that only an unlucky moment shows: a stream at an old handle, somebody's capture, a failure in between.

Each test here is the one that notices when its line of kina is broken: see tests/mutation.
"""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from helpers import managed
from helpers.cuda import (
    KERNELS,
    ForeignStream,
    current_context,
    driver,
    during_a_capture,
    fork_body,
    in_thread,
    ok,
    on_stack,
    primary_context,
    simulation,
    stack,
    stalled,
    stalled_until_waited,
    stream_of,
    unchanged,
    until,
    view,
)

import kina

NOT_READY = 600


@pytest.fixture
def lender():
    """An open session of another Runtime, whose memory is adopted."""
    with kina.session(kina.Runtime(0)) as opened:
        yield opened


def is_held_up(stream: int) -> bool:
    """Is the stream, on which there is next to nothing to do, not done with it after a while?"""
    until = time.monotonic() + (0.5 if simulation() is not None else 0.1)
    with on_stack(primary_context()):
        while int(driver.cuStreamQuery(driver.CUstream(stream))[0]) == NOT_READY:
            if time.monotonic() > until:
                return True
            time.sleep(0.001)
    return False


# Streams and events ---------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_a_stream_at_the_handle_of_a_dead_one_is_another():
    """The driver hands handles out again; the Runtime that a thread keeps of the dead stream is not the new one's."""

    def body():
        first = ForeignStream()
        with kina.session("cuda:0", stream=first) as session:
            identity = session.runtime_identity
        del session
        first.destroy()
        second = ForeignStream()
        assert second.handle == first.handle
        with kina.session("cuda:0", stream=second) as session:
            assert session.runtime_identity != identity
            assert session.to_host(session.full(3, 2.0)).tolist() == [2.0] * 3

    fork_body(body, KINA_SIM_REUSE_HANDLES="1")


class Producer:
    """A tensor of somebody who is not kina, as far as a session can see."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **wishes):
        return self.tensor.__dlpack__(**wishes)


@pytest.mark.parametrize("owner", ["kina", "another library"])
def test_an_adoption_makes_the_session_wait(session, lender, owner):
    """From the adoption on, whatever is enqueued: a foreign producer is told which stream shall wait for its own."""
    with stalled(lender):
        tensor = lender.full(1000, 3.0)
        adopted = session.adopt(tensor if owner == "kina" else Producer(tensor))
        assert is_held_up(stream_of(session))
        copied = session.copy(adopted)
    assert session.to_host(copied).tolist() == [3.0] * 1000
    del adopted
    session.synchronize()


def test_an_export_makes_its_consumer_wait(session):
    """From the export on, before the consumer has enqueued anything."""
    stream = ForeignStream()
    with stalled(session):
        tensor = session.full(1000, 5.0)
        capsule = tensor.to_dlpack(stream=stream.handle)
        assert is_held_up(stream.handle)
    stream.synchronize()
    del capsule, tensor
    session.synchronize()
    stream.destroy()


def test_the_end_of_an_export_makes_the_exporter_wait(session):
    """The legacy stream may use the memory until then: what comes after in the session comes after that."""
    tensor = session.full(1000, 5.0)
    session.synchronize()
    capsule = tensor.to_dlpack(stream=1)
    del tensor
    with stalled(1):
        with on_stack(primary_context()):
            ok(driver.cuMemsetD32Async(managed.managed_of(capsule).dl_tensor.data, 1, 1000, driver.CUstream(1)))
        del capsule
        assert is_held_up(stream_of(session))
    session.synchronize()
    assert session.counters().frees == 1


def test_a_byte_offset_is_honoured(session):
    """What begins before the tensor is the producer's."""
    base = session.from_host(np.arange(16, dtype=np.float32))
    session.synchronize()
    made = managed.Producer((4,), device=(managed.CUDA, 0), data=view(session, base), byte_offset=8)
    assert session.to_host(session.adopt(made)).tolist() == [2.0, 3.0, 4.0, 5.0]
    session.synchronize()


def test_a_witness_keeps_its_event(session, lender):
    """As long as it may be asked, no other recording of its event can answer for it."""
    with stalled(session):
        session.full(100, 1.0)
        witness = session.completion()
        for _ in range(3):
            lender.completion().wait()
        assert not witness.done()
    witness.wait()


# Captures of others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act", ["query", "wait", "allocate", "free", "synchronize", "from_host", "to_host", "unload", "drop"]
)
def test_a_capture_of_another_thread_lives(act):
    """Whatever kina asks of the driver meanwhile is answered, and does not end it."""

    def body(act):
        dropped = [kina.Runtime(0)]
        with kina.session(dropped[0]) as session, session.raw() as raw:
            raw.module(KERNELS)
            session.zeros(10)
        del session, raw
        with kina.session(kina.Runtime(0)) as session:
            drivers = kina.memory.CudaAsyncMemoryResource()  # whose releases are the driver's
            tensors = [session.full(10, 2.0, memory=drivers)]
            session.synchronize()
            witness = session.completion()
            if act == "unload":
                dropped.clear()
            during_a_capture(
                {
                    "query": witness.done,
                    "wait": witness.wait,
                    "allocate": lambda: session.empty(10),
                    "free": tensors.clear,
                    "synchronize": session.synchronize,
                    "from_host": lambda: session.from_host([1.0]),
                    "to_host": lambda: session.to_host(tensors[0]),
                    "unload": session.synchronize,
                    "drop": dropped.clear,
                }[act]
            )
            counters = session.counters()
            assert (counters.leaked, counters.frees) == (0, act in ("allocate", "from_host"))
            assert drivers.live_bytes == (0 if act == "free" else 40)
            assert session.to_host(session.full(3, 2.0)).tolist() == [2.0] * 3

    fork_body(body, act)


@pytest.mark.simulated
def test_the_ladder_passes_over_a_captured_stream():
    """A full device waits for the streams of its Runtimes, but not for one that somebody captures."""

    def body():
        stream = ForeignStream()
        handle = driver.CUstream(stream.handle)
        adopted = kina.Runtime(0, stream=stream)
        with kina.session("cuda:0") as session:
            kept = session.empty(700 << 17, "uint8")
            with on_stack(primary_context()):
                ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            with pytest.raises(kina.OutOfMemoryError):
                session.empty(700 << 17, "uint8")
            with on_stack(primary_context()):
                ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(handle))))
            assert session.to_host(session.copy(kept[:3])).shape == (3,)
        adopted.close()

    fork_body(body, KINA_SIM_MEMORY=str(1 << 27))


# Leases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signature", ["mut f32[], f32[], u32", None], ids=["tensor", "ref"])
def test_an_argument_is_leased_by_its_launch(session, lender, signature):
    """What another Runtime owns is its to free only when the kernel is done with it."""
    source = lender.full(1000, 3.0)
    lender.synchronize()
    result = session.zeros(1000)
    with session.raw() as raw:
        copy = raw.module(KERNELS).function("copy", signature)
    with stalled(session):
        with session.raw() as raw:
            adopted = session.adopt(source)
            arguments = (result, adopted, 1000) if signature else (raw.mut(result), raw.ref(adopted), kina.u32(1000))
            copy.launch(kina.LaunchConfig.linear(1000), *arguments)
        del source, adopted, arguments, raw
        gc.collect()
        assert lender.counters().frees == 0
    assert session.to_host(result).tolist() == [3.0] * 1000
    session.synchronize()
    until(lambda: lender.counters().frees == 1)


def test_leases_wait_for_their_seals(session, lender):
    """A later seal looks at the earlier ones; what those hold is released when they are complete, not before."""
    source = lender.full(1000, 3.0)
    lender.synchronize()
    with stalled(session):
        session.copy(session.adopt(source))
        del source
        for _ in range(3):
            session.from_host([1.0])
            session.completion()
        assert lender.counters().frees == 0
        assert session.counters().retired == 0
    session.synchronize()
    until(lambda: lender.counters().frees == 1)


@pytest.mark.simulated
def test_a_full_segment_covers_the_launch_that_filled_it():
    """Its seal is recorded behind that launch: what the last arguments point to is in use until then."""

    def body():
        from helpers.kernels import borrowed, many_pointers

        sim = simulation()
        with kina.session(0) as session, session.raw() as raw:
            function = many_pointers(raw)
            parts = borrowed(session, 520)
            session.synchronize()
            handle, since = raw.unsafe_stream_handle(), sim.position
            with sim.stalled(handle):
                for i in range(26):  # the leases of the last one are those beyond 512
                    function.launch(kina.LaunchConfig(1, 1), *parts[20 * i : 20 * i + 20])
                del parts
                sim.step(handle, sim.pending(handle) - 1)
                until(lambda: sim.pending(handle) <= 1)
                kept = session.from_host([1.0])
                session.completion()  # looks at the seals before it
                assert sim.trace(since, name="cuMemFreeAsync") == []
            session.synchronize()
            until(lambda: len(sim.trace(since, name="cuMemFreeAsync")) >= 520)
            assert len(sim.trace(since, name="cuMemFreeAsync")) == 520
            del kept

    fork_body(body)


@pytest.mark.simulated
def test_what_a_release_enqueues_is_not_taken_for_done():
    """A deleter runs while the session synchronizes, and uses the session: that work was not waited for."""

    def body():
        import ctypes

        from helpers.managed import CUDA, DELETER, Producer

        sim = simulation()
        with kina.session(kina.Runtime(0)) as lender, kina.session(0) as session:
            base, lent = session.zeros(1024), [lender.zeros(1024)]
            lender.synchronize()
            session.synchronize()
            handle = stream_of(session)

            def use(_):
                sim.stall(handle)
                session.copy(session.adopt(lent.pop()))

            producer = Producer((1024,), device=(CUDA, 0), data=view(session, base), versioned=False)
            deleter = DELETER(use)
            producer.managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
            session.copy(session.adopt(producer))
            session.completion()
            with sim.failing("cuEventQuery", result=600, from_then_on=True):  # for the reaper nothing is done
                session.synchronize()
            assert sim.pending(handle) > 0
            assert lender.counters().frees == 0
            sim.resume(handle)
            session.synchronize()
            until(lambda: lender.counters().frees == 1)

    fork_body(body)


@pytest.mark.simulated
def test_leases_of_a_failed_query_stay():
    """Where the state of work cannot be asked any more, its owners' memory is not given back."""

    def body():
        from helpers.managed import CUDA, Producer

        sim = simulation()
        with kina.session("cuda:0") as session:
            base = session.zeros(1024)
            session.synchronize()
            producer = Producer((1024,), device=(CUDA, 0), data=view(session, base))
            with stalled(session):  # nobody has seen it complete
                session.copy(session.adopt(producer))
                session.completion()
                gc.collect()
                session.from_host([1.0])
                sim.fail("cuEventQuery", 1, 700, from_then_on=True)  # to whoever asks: the reaper does too
                session.completion()  # the seal of these asks for the one before
            with pytest.raises(kina.RuntimePoisonedError):
                session.synchronize()
        gc.collect()
        assert producer.deleted == 0

    fork_body(body)


@pytest.mark.simulated
def test_leases_that_cannot_be_sealed_stay():
    """When the work of a Runtime that goes is over cannot be known without an event: what it uses is left to it."""

    def body():
        sim = simulation()
        runtime = kina.Runtime(0)
        with kina.session("cuda:0") as lender:
            lent = lender.zeros(1024)
            lender.synchronize()
            session = kina.session(runtime)
            session.__enter__()
            handle = stream_of(session)
            with sim.stalled(handle):
                tensor = session.adopt(lent)
                with sim.failing("cuEventRecord", from_then_on=True):
                    session.copy(tensor)
                    session.close()
                    del session, runtime, tensor, lent
                    gc.collect()
                lender.synchronize()
                assert sim.pending(handle) > 0
                assert lender.counters().live_bytes == 4096

    fork_body(body)


def test_orphans_wait_for_their_seals(lender):
    """What a dropped Runtime leased is not another's to release before the dropped one's work is done."""
    gc.collect()  # exports that other tests left in cycles, for whose end the whole device would be waited for
    source = lender.full(1000, 3.0)
    lender.synchronize()
    session = kina.session(kina.Runtime(0))
    session.__enter__()
    with stalled(stream_of(session)):
        session.copy(session.adopt(source))
        session.close()
        del source, session
        gc.collect()
        lender.synchronize()  # an occasion to release what is done
        assert lender.counters().frees == 0


@pytest.mark.simulated
def test_staging_of_a_broken_download_is_not_used_again(sim, session, lender):
    """Copies into it are still to come, although nobody reads what they bring."""
    tensor = session.zeros(3 << 20)  # three blocks
    session.synchronize()
    held_up, other = stream_of(session), stream_of(lender)
    values = np.arange(3 << 20, dtype=np.float32)
    with sim.stalled(other):
        with sim.stalled(held_up):
            for name in ("cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"):
                sim.fail(name, 3, 999)
            with pytest.raises(kina.DriverError):
                session.to_host(tensor)
            sim.clear_faults()
            uploaded = lender.from_host(values)
        session.synchronize()
    assert np.array_equal(lender.to_host(uploaded), values)


@pytest.mark.simulated
def test_the_ring_of_staging_blocks_is_bounded():
    """A session that uploads faster than the device copies waits for its own transfers."""

    def body():
        with kina.session("cuda:0") as session:
            for _ in range(3):
                with stalled_until_waited(stream_of(session), "cuEventSynchronize"):
                    for i in range(20):
                        session.from_host([float(i)])
        assert [a["kind"] for a in simulation().live()["allocations"]].count("pinned") == 16

    fork_body(body)


@pytest.mark.simulated
def test_a_full_ring_takes_what_idle_runtimes_are_done_with():
    """Before it waits or grows."""

    def body():
        sim = simulation()
        idle = kina.Runtime(0)
        with kina.session(idle) as session:
            for i in range(16):
                session.from_host([float(i)])
        sim.wait_idle()
        with kina.session(kina.Runtime(0)) as session:
            session.from_host([1.0])
            assert session.counters().host_waits == 0

    fork_body(body)


# Exports and modules --------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_quarantine_ends_with_the_work_of_the_whole_device(sim, session):
    """Synchronizing waits for streams that it does not know before it frees what they were given."""
    stream = ForeignStream()
    tensor = session.zeros(1000)
    session.synchronize()
    address = view(session, tensor)
    tensor.to_dlpack(stream=stream.handle)
    del tensor
    sim.stall(stream.handle)
    with on_stack(primary_context()):
        ok(driver.cuMemsetD32Async(address, 1, 1000, driver.CUstream(stream.handle)))
    let_go = threading.Timer(0.3, sim.resume, [stream.handle])
    let_go.start()
    session.synchronize()
    assert sim.pending(stream.handle) == 0
    assert session.counters().frees == 1
    let_go.join()
    stream.destroy()


@pytest.mark.simulated
def test_a_module_in_flight_is_not_unloaded_by_others():
    """Another Runtime's synchronize unloads what nothing refers to; a launch that is to come refers to its module."""

    def body():
        sim = simulation()
        with kina.session(0) as other:
            session = kina.session(kina.Runtime(0))
            session.__enter__()
            tensor = session.zeros(8)
            since = sim.position
            with session.raw() as raw:
                fill = raw.module(KERNELS).function("fill", "mut f32[], f32, u32")
            with sim.stalled(stream_of(session)):
                with session.raw() as raw:
                    fill.launch(kina.LaunchConfig(1, 8), tensor, 1.0, 8)
                session.close()
                del session, raw, fill
                gc.collect()
                other.synchronize()
                assert sim.trace(since, name="cuModuleUnload") == []
            assert other.to_host(other.adopt(tensor)).tolist() == [1.0] * 8
            other.synchronize()
            assert len(sim.trace(since, name="cuModuleUnload")) == 1

    fork_body(body, KINA_SIM_TIMEOUT_MS="5000")  # where it is unloaded, that waits for the launch


@pytest.mark.simulated
def test_dropping_a_module_unloads_nothing_by_itself(sim, runtime):
    """Unloading may wait for the device, and the last reference goes wherever the collector runs."""
    with kina.session(runtime) as session, session.raw() as raw:
        function = raw.module(KERNELS).function("fill")
    runtime.close()
    since = sim.position
    del function, raw, session
    gc.collect()
    assert sim.trace(since, name="cuModuleUnload") == []
    with kina.session(0) as session:
        session.synchronize()
    assert len(sim.trace(since, name="cuModuleUnload")) == 1


# Memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["pool", "driver"])
def test_a_free_waits_for_what_the_stream_still_does(session, whose):
    """Memory that the device has, dropped behind work that reads it."""
    memory = kina.memory.CudaAsyncMemoryResource() if whose == "driver" else None
    tensor = session.full(1000, 3.0, memory=memory)
    session.synchronize()
    with stalled(session):
        copied = session.copy(tensor)
        del tensor
        fresh = session.full(1000, 4.0, memory=memory)
        ForeignStream(1).synchronize()  # on the legacy stream, the free would have come to pass by now
    assert session.to_host(copied).tolist() == [3.0] * 1000
    assert session.to_host(fresh).tolist() == [4.0] * 1000


@pytest.mark.simulated
def test_the_ladder_harvests_before_it_waits():
    """What completed seals protected is freed before anybody waits; the free itself may be waited for."""

    def body():
        sim = simulation()
        memory = kina.memory.CudaAsyncMemoryResource()  # whose releases are the driver's
        with kina.session(kina.Runtime(0)) as lender, kina.session(0) as session:
            tensor = lender.zeros(700 << 17, "uint8", memory=memory)
            address = view(lender, tensor)
            lender.synchronize()
            session.copy(session.adopt(tensor)[:1000])
            session.completion()
            del tensor
            sim.wait_idle()
            since = sim.position
            session.empty(700 << 17, "uint8")
            calls = [(record["name"], record["handle"]) for record in sim.trace(since, event="call")]
            before = calls[: calls.index(("cuMemFreeAsync", address))]
            assert not {"cuStreamSynchronize", "cuEventSynchronize"} & {name for name, _ in before}

    fork_body(body, KINA_SIM_MEMORY=str(1 << 27))


@pytest.mark.simulated
def test_the_ladder_harvests_what_it_waited_for():
    """What was leased for work that the wait has seen the end of is released, and serves."""

    def body():
        sim = simulation()
        with kina.session(kina.Runtime(0)) as lender, kina.session(0) as session:
            tensor = lender.zeros(700 << 17, "uint8")
            lender.synchronize()
            with stalled(session):
                session.copy(session.adopt(tensor)[:1000])
                session.completion()
                del tensor
                threading.Timer(0.3, sim.resume_all).start()
                session.empty(700 << 17, "uint8")

    fork_body(body, KINA_SIM_MEMORY=str(1 << 27))


# Contexts, threads and failures ---------------------------------------------------------------------------


def test_a_session_left_below_another(runtime, foreign):
    """It has nothing to put back while the other one is open; that one puts back what was current before both."""
    with on_stack(foreign), unchanged():
        below, above = kina.session(runtime), kina.session(kina.Runtime(0))
        below.__enter__()
        above.__enter__()
        below.close()
        assert current_context() == primary_context()
        assert above.to_host(above.full(3, 2.0)).tolist() == [2.0] * 3
        above.close()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_session_given_up_elsewhere_touches_no_context(runtime, foreign, how):
    """Neither of the thread that gives it up, nor, before that one's next session, of its own."""
    held = [kina.session(runtime)]
    held[0].__enter__()

    def give_up():
        with on_stack(foreign), unchanged():
            if how == "closed":
                with pytest.raises(kina.WrongThreadError, match="given up"):
                    held[0].close()
            held.clear()
            gc.collect()

    in_thread(give_up)
    assert stack() == [primary_context()]
    with kina.session(runtime):
        pass
    assert stack() == []


@pytest.mark.simulated
def test_the_first_cause_stays():
    """A second failure within the call that meets the first is not what later ones are told."""

    def body():
        sim = simulation()
        with kina.session("cuda:0") as session:
            tensor = session.from_host([1.0])
            session.completion()
            sim.fail("cuEventQuery", 1, 719)
            sim.fail("cuEventSynchronize", 1, 700)
            with pytest.raises(kina.SynchronizeError):
                session.to_host(tensor)
            assert sim.faults_delivered == 2
            with pytest.raises(kina.RuntimePoisonedError) as later:
                session.synchronize()
            assert later.value.driver_error.code == 719

    fork_body(body)
