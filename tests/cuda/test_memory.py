"""Device memory: what is freed when, and the ways out of a full device."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers.cuda import (
    ForeignStream,
    driver,
    fork_body,
    ok,
    on_stack,
    primary_context,
    simulation,
    stack,
    stalled,
    stalled_until_waited,
    stream_of,
    view,
)

import kina

MIB = 1 << 20


def test_what_is_counted(runtime):
    with kina.session(runtime) as session:
        assert session.counters()[:12] == (0,) * 12
        tensor = session.empty(1000, "float64")
        part = tensor[10:20]
        counters = session.counters()
        assert (counters.allocations, counters.frees, counters.live_bytes) == (1, 0, 8000)
        assert counters.reserved_bytes >= 8000
        del tensor
        assert session.counters().frees == 0  # a view holds the allocation
        del part
        counters = session.counters()
        assert (counters.allocations, counters.frees, counters.live_bytes) == (1, 1, 0)
        session.empty(0)
        assert session.counters().allocations == 1


def test_memory_is_used_again_in_the_order_of_the_stream(session):
    """Freed behind a pending copy, taken again, filled: the copy has read the old values."""
    with stalled(session):
        first = session.full(MIB, 1.0)
        address = view(session, first)
        copied = session.copy(first)
        del first
        second = session.full(MIB, 2.0)
        assert view(session, second) == address
    assert session.to_host(copied).sum() == MIB
    assert session.to_host(second).sum() == 2 * MIB


def test_memory_is_freed_on_its_home_stream_from_anywhere(runtime):
    """Outside a session, in another thread, with another library's context current."""
    from helpers.cuda import foreign_context, in_thread, on_stack, unchanged

    def drop_here(tensors, context):
        with on_stack(context), unchanged():
            tensors.clear()

    with foreign_context() as context, kina.session(runtime) as session:
        with stalled(session):
            held = [[session.full(100, float(i))] for i in range(3)]
            copies = [session.copy(tensors[0]) for tensors in held]
            held[0].clear()
            in_thread(lambda: drop_here(held[1], context))
            drop_here(held[2], context)
            fresh = [session.full(100, -1.0) for _ in range(3)]
        assert [session.to_host(copied)[99] for copied in copies] == [0.0, 1.0, 2.0]
        counters = session.counters()
        assert (counters.frees, counters.leaked) == (3, 0)
        del fresh


def test_the_size_of_an_allocation_that_cannot_be():
    def body():
        with kina.session("cuda:0") as session:
            total = session.device_info.total_memory_bytes
            kept = session.full(1000, 5, "uint8")
            for call in (session.empty, session.zeros, lambda *a: session.full(a[0], 1, a[1])):
                with pytest.raises(kina.OutOfMemoryError) as raised:
                    call(2 * total, "uint8")
                error = raised.value
                assert isinstance(error, MemoryError)
                assert error.requested == 2 * total
                assert error.live == 1000
                assert error.cached >= 0
                assert 0.9 * total < error.limit <= total
                assert error.driver_error.code == 2
                assert str(2 * total) in str(error)
                assert "1000 bytes are live" in str(error)
            assert session.to_host(session.copy(kept)).tolist() == [5] * 1000
            assert session.counters().live_bytes == 1000

    fork_body(body)


@pytest.mark.simulated
def test_freed_memory_serves_a_larger_request():
    """Half is taken and freed, three quarters are asked for: what was cached goes back to the device."""

    def body():
        half, more = 512 << 20, 768 << 20
        with kina.session("cuda:0") as session:
            for _ in range(3):
                tensor = session.empty(half, "uint8")
                del tensor
                tensor = session.empty(more, "uint8")
                del tensor
            kept = session.empty(half, "uint8")
            with pytest.raises(kina.OutOfMemoryError) as raised:
                session.empty(more, "uint8")
            assert raised.value.live == half
            assert raised.value.cached + raised.value.live <= 1 << 30
            del kept
            session.empty(more, "uint8")

    fork_body(body, KINA_SIM_MEMORY=str(1 << 30))


@pytest.mark.simulated
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("whose", ["pool", "driver"])
def test_what_another_runtime_caches_is_given_back(whose, busy):
    def body(whose, busy):
        import contextlib

        memory = kina.memory.CudaAsyncMemoryResource() if whose == "driver" else None
        one, other = kina.Runtime(0), kina.Runtime(0)
        with contextlib.ExitStack() as until:
            with kina.session(one) as session:
                tensor = session.zeros(700 << 19, "uint8", memory=memory)
                if busy:  # the free has not come to pass yet when the other one asks
                    until.enter_context(stalled_until_waited(stream_of(session), "cuEventSynchronize"))
                    session.copy(session.zeros(1000))
                del tensor
            with kina.session(other) as session:
                tensor = session.full(700 << 19, 1, "uint8")
                assert session.to_host(tensor[-10:]).tolist() == [1] * 10
                assert session.counters().host_waits >= busy
        with kina.session(one) as session, pytest.raises(kina.OutOfMemoryError):
            session.empty(700 << 19, "uint8")

    fork_body(body, whose, busy, KINA_SIM_MEMORY=str(1 << 29))


@pytest.mark.simulated
@pytest.mark.parametrize("whose", ["pool", "driver"])
def test_what_a_runtime_that_is_gone_frees_is_waited_for(whose):
    """Its stream is idle to kina, and busy to the device."""

    def body(whose):
        memory = kina.memory.CudaAsyncMemoryResource() if whose == "driver" else None
        other = kina.Runtime(0)
        with kina.session(kina.Runtime(0)) as session:
            tensor = session.zeros(700 << 19, "uint8", memory=memory)
            session.synchronize()
            handle = stream_of(session)
            until = stalled_until_waited(handle, "cuStreamSynchronize")
            until.__enter__()
            session.copy(tensor[:1000])
            del tensor
        del session
        gc.collect()
        assert simulation().pending(handle) > 0
        with kina.session(other) as session:
            assert session.to_host(session.full(700 << 19, 1, "uint8")[-10:]).tolist() == [1] * 10
        until.__exit__(None, None, None)

    fork_body(body, whose, KINA_SIM_MEMORY=str(1 << 29))


@pytest.mark.simulated
@pytest.mark.parametrize("between", ["nothing", "statistics", "limiting", "tracking", "logging", "callback"])
def test_a_full_device_lets_one_stream_wait_for_another(between, tmp_path):
    """Nothing waits on the host, nobody is asked for help, while a pool has what another stream is not done with."""

    def body(between, folder):
        bottom = kina.memory.CudaAsyncMemoryResource()
        adaptors = {
            "nothing": lambda: bottom,
            "statistics": lambda: kina.memory.StatisticsMemoryResource(bottom),
            "limiting": lambda: kina.memory.LimitingMemoryResource(bottom, 1 << 29),
            "tracking": lambda: kina.memory.TrackingMemoryResource(bottom),
            "logging": lambda: kina.memory.LoggingMemoryResource(bottom, folder + "/log.csv"),
            "callback": lambda: kina.memory.FailureCallbackMemoryResource(bottom, lambda nbytes: 1 / 0),
        }
        upstream = adaptors[between]()
        pool = kina.memory.PoolMemoryResource(upstream)
        with kina.session(kina.Runtime(0)) as a, kina.session(kina.Runtime(0)) as b:
            tensor = a.empty(700 << 19, "uint8", memory=pool)
            with stalled_until_waited(stream_of(a), "cuStreamSynchronize"):
                copied = a.copy(tensor[:1000])
                del tensor
                taken = b.full(700 << 19, 1, "uint8", memory=pool)
                assert b.counters().host_waits == 0
            assert (pool.stats().rescued_by_stealing, pool.stats().grown) == (1, 1)
            assert b.to_host(taken[-10:]).tolist() == [1] * 10
            assert a.to_host(copied).shape == (1000,)
        if between == "statistics":
            assert upstream.counts().failed_count == 0
        if between == "logging":
            upstream.close()
            with open(folder + "/log.csv") as lines:
                assert "failure" not in lines.read()

    fork_body(body, between, str(tmp_path), KINA_SIM_MEMORY=str(1 << 29))


CHAINS = ["alone", "below", "above", "between", "two pools", "above and below"]


def chain_of(place, help_out):
    memory = kina.memory
    bottom = memory.CudaAsyncMemoryResource()
    if place == "alone":
        return memory.FailureCallbackMemoryResource(bottom, help_out)
    if place == "above":
        return memory.FailureCallbackMemoryResource(memory.PoolMemoryResource(bottom), help_out)
    below = memory.PoolMemoryResource(memory.FailureCallbackMemoryResource(bottom, help_out))
    if place == "below":
        return below
    if place == "two pools":
        return memory.PoolMemoryResource(below)
    if place == "above and below":
        return memory.FailureCallbackMemoryResource(below, help_out)
    limited = memory.LimitingMemoryResource(bottom, 1 << 29)
    return memory.PoolMemoryResource(
        memory.StatisticsMemoryResource(memory.FailureCallbackMemoryResource(limited, help_out))
    )


def waits_so_far(sim):
    return sum(sim.calls(name) for name in ("cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"))


@pytest.mark.simulated
@pytest.mark.parametrize("place", CHAINS)
def test_callbacks_come_before_waits(place):
    """Two streams each have memory of half the device, and only the host can wait for both."""

    def body(place):
        sim = simulation()
        waited = []

        def decline(nbytes):
            waited.append(waits_so_far(sim) - before)

        resource = chain_of(place, decline)
        sessions = [kina.session(kina.Runtime(0)).__enter__() for _ in range(3)]
        a, b, c = sessions
        halves = [each.full(400 << 19, 1, "uint8", memory=resource) for each in (a, b)]
        for each in sessions:
            each.synchronize()
        how = "cuEventSynchronize"
        with stalled_until_waited(stream_of(a), how), stalled_until_waited(stream_of(b), how):
            copies = [a.copy(halves[0][:10]), b.copy(halves[1][:10])]
            before = waits_so_far(sim)
            del halves
            taken = c.full(700 << 19, 2, "uint8", memory=resource)
            assert waits_so_far(sim) > before
        assert waited == [0] * len(waited)
        assert len(waited) == (2 if place == "above and below" else 1)
        assert c.to_host(taken[-10:]).tolist() == [2] * 10
        assert a.to_host(copies[0]).tolist() == b.to_host(copies[1]).tolist() == [1] * 10
        for each in reversed(sessions):
            each.close()

    fork_body(body, place, KINA_SIM_MEMORY=str(1 << 29), also=[chain_of, waits_so_far])


@pytest.mark.simulated
@pytest.mark.parametrize("place", CHAINS)
def test_a_callback_that_helps_saves_the_wait(place):
    """A stream stands still all the while."""

    def body(place):
        sim = simulation()
        kept = []

        def drop(nbytes):
            kept.pop()
            return True

        resource = chain_of(place, drop)
        with kina.session(kina.Runtime(0)) as a, kina.session(kina.Runtime(0)) as b:
            tensor = a.full(300 << 19, 1, "uint8", memory=resource)
            kept.append(b.full(600 << 19, 1, "uint8", memory=resource))
            b.synchronize()
            with stalled(a):
                a.copy(tensor[:10])
                del tensor
                before = waits_so_far(sim)
                taken = b.full(550 << 19, 2, "uint8", memory=resource)
                assert (waits_so_far(sim), kept) == (before, [])
            assert b.to_host(taken[-10:]).tolist() == [2] * 10

    fork_body(body, place, KINA_SIM_MEMORY=str(1 << 29), also=[chain_of, waits_so_far])


@pytest.mark.simulated
def test_quarantined_memory_is_the_last_resort():
    """What was exported to an unknown stream comes back once the whole device has been waited for."""

    def body():
        with kina.session("cuda:0") as session:
            tensor = session.zeros(700 << 19, "uint8")
            tensor.to_dlpack(stream=-1)
            del tensor
            gc.collect()
            assert session.counters().frees == 0
            session.empty(700 << 19, "uint8")
            counters = session.counters()
            assert counters.host_waits >= 1
            assert counters.synchronizations == 0

    fork_body(body, KINA_SIM_MEMORY=str(1 << 29))


@pytest.mark.simulated
def test_the_last_resort_frees_only_what_was_dropped_before_its_wait():
    """What is quarantined while a full device is waited for may still be in use when the wait is over."""

    def body():
        import threading
        import time

        sim = simulation()
        busy, late = ForeignStream(), ForeignStream()
        with kina.session(0) as session:
            first, target = session.zeros(700 << 19, "uint8"), session.zeros(1000)
            tensor = session.full(1000, 1.0)
            session.synchronize()
            addresses = [view(session, each) for each in (first, target, tensor)]
            first.to_dlpack(stream=-1)
            del first
            sim.stall(busy.handle)
            sim.stall(late.handle)

            def use(stream):
                with on_stack(primary_context()):
                    handle = driver.CUstream(stream.handle)
                    ok(driver.cuMemcpyDtoDAsync(addresses[1], addresses[2], 4000, handle))

            def need():
                with kina.session(kina.Runtime(0)) as needy:
                    needy.empty(700 << 19, "uint8")

            use(busy)
            before = sim.calls("cuCtxSynchronize")
            thread = threading.Thread(target=need)
            thread.start()
            while sim.calls("cuCtxSynchronize") == before:
                time.sleep(0.001)
            tensor.to_dlpack(stream=late.handle)
            use(late)
            del tensor
            sim.resume(busy.handle)
            thread.join()
            fresh = [session.full(1000, float(-i)) for i in range(1, 4)]
            assert addresses[2] not in [view(session, each) for each in fresh]
            sim.resume(late.handle)
            session.synchronize()
            assert session.to_host(target).tolist() == [1.0] * 1000
        busy.destroy()
        late.destroy()

    fork_body(body, KINA_SIM_MEMORY=str(1 << 29))


@pytest.mark.simulated
def test_leased_memory_is_harvested_before_anything_waits():
    def body():
        one, other = kina.Runtime(0), kina.Runtime(0)
        with kina.session(one) as session:
            theirs = session.zeros(700 << 19, "uint8")
        with kina.session(other) as session:
            ours = session.adopt(theirs)
            session.copy(ours[:1000])
            del ours, theirs  # the lease alone holds it
        simulation().wait_idle()
        with kina.session(other) as session:
            session.empty(700 << 19, "uint8")

    fork_body(body, KINA_SIM_MEMORY=str(1 << 29))


@pytest.mark.simulated
@pytest.mark.parametrize("operation", ["from_host", "copy", "zeros"])
def test_the_session_is_usable_after_running_out(operation):
    def body(operation):
        source = np.ones(80 << 20, np.uint8)
        with kina.session("cuda:0") as session:
            kept = session.from_host(source)
            arguments = {"from_host": (source,), "copy": (kept,), "zeros": (80 << 20, "uint8")}[operation]
            before = stack()
            for _ in range(3):
                with pytest.raises(kina.OutOfMemoryError):
                    getattr(session, operation)(*arguments)
                assert stack() == before
            assert session.to_host(session.full(10, 3)).tolist() == [3] * 10
            assert session.to_host(kept).all()
            del kept, arguments
            session.zeros(80 << 20, "uint8")

    fork_body(body, operation, KINA_SIM_MEMORY=str(128 << 20))


@pytest.mark.simulated
def test_a_runtime_that_goes_gives_its_memory_back_in_the_order_of_its_stream(sim):
    """At once, behind what the stream still does, and without a wait."""
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        tensor = session.full(MIB, 1.0)
        handle = stream_of(session)
    gc.collect()
    with stalled(handle):
        with kina.session(runtime) as session:
            session.copy(tensor)
        since = sim.position
        del runtime, session, tensor
        gc.collect()
        calls = sim.trace(since, event="call")
        assert {call["stream"] for call in calls if call["name"] == "cuMemFreeAsync"} == {handle}
        assert not {"cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"} & {call["name"] for call in calls}


def test_nothing_is_kept_by_a_dropped_runtime(sim):
    gc.collect()  # what other tests left in cycles goes before the count
    before = sim.live() if sim is not None else None
    for _ in range(3):
        runtime = kina.Runtime(0)
        with kina.session(runtime) as session:
            tensors = [session.from_host(np.ones(100 * i, np.float32)) for i in range(1, 5)]
            session.copy(tensors[0])
        runtime.close()
        del runtime, session, tensors
        gc.collect()
    if sim is not None:
        after = sim.live()
        assert after["pools"] <= before["pools"] + 1  # one Runtime at a time needs one pool
        assert [
            a for a in after["allocations"] if a not in before["allocations"] and a["kind"] not in ("host", "pinned")
        ] == []
