"""Retirement: nothing is released before the device is done with it, and nothing is kept longer."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers.cuda import (
    KERNELS,
    ForeignStream,
    driver,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    simulation,
    stalled,
    until,
    view,
)

import kina

MANY = 1000


@pytest.fixture
def other():
    made = kina.Runtime(0)
    yield made
    if not made.closed:
        made.close()


def kernel(raw, name, signature):
    return raw.module(KERNELS).function(name, signature)


def add_one(session, tensor):
    with session.raw() as raw:
        kernel(raw, "add_one", "mut f32[], u32").launch(kina.LaunchConfig.linear(tensor.size), tensor, tensor.size)


# Seals ----------------------------------------------------------------------------------------------------


def test_launches_record_no_event(runtime):
    """Nor does a session that only launches: at most one event per 64 launches, no query, no wait."""
    with kina.session(runtime) as session:
        tensor = session.zeros(100)
        add_one(session, tensor)
        start = session.counters()
    sim = simulation()
    if sim is not None:
        sim.reset_counts()
    for _ in range(10):
        with kina.session(runtime) as session, session.raw() as raw:
            function = kernel(raw, "add_one", "mut f32[], u32")
            config = kina.LaunchConfig.linear(100)
            for _ in range(64):
                function.launch(config, tensor, 100)
    with kina.session(runtime) as session:
        end = session.counters()
        assert end.launches - start.launches == 640
        assert end.events_recorded - start.events_recorded <= 10
        for name in ("event_queries", "synchronizations", "host_waits"):
            assert getattr(end, name) == getattr(start, name)
        if sim is not None:
            assert sim.calls("cuEventRecord") <= 10
            for name in ("cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"):
                assert sim.calls(name) == 0
        assert session.to_host(tensor).tolist() == [641.0] * 100


def test_exit_seals_what_is_urgent(runtime, other):
    """Staging and foreign owners are sealed when the session ends; a module waits for the next occasion."""
    with kina.session(other) as session:
        theirs = session.zeros(10)
    with kina.session(runtime) as session:
        tensor = session.zeros(10)
        add_one(session, tensor)
        seals = session.counters().seals
    with kina.session(runtime) as session:
        assert session.counters().seals == seals
        session.from_host([1.0])
    with kina.session(runtime) as session:
        assert session.counters().seals == seals + 1
        session.copy(session.adopt(theirs))
    with kina.session(runtime) as session:
        assert session.counters().seals == seals + 2


def test_many_leases_are_sealed_by_number(runtime):
    with kina.session(runtime) as session:
        for i in range(1200):
            session.copy(session.from_host([float(i)]))
        counters = session.counters()
        assert counters.leases == 1200
        assert counters.pending <= 600
        assert counters.seals >= 2
        session.synchronize()
        counters = session.counters()
        assert (counters.pending, counters.retired, counters.leaked) == (0, counters.leases, 0)


def test_harvest_needs_no_wait(runtime):
    with kina.session(runtime) as session:
        session.from_host([1.0])
        witness = session.completion()
        witness.wait()
        waits = session.counters().host_waits
        session.from_host([2.0])
        session.completion()  # a seal looks at the older ones
        counters = session.counters()
        assert counters.retired >= 1
        assert counters.host_waits == waits


# Witnesses ------------------------------------------------------------------------------------------------


def test_a_witness(runtime):
    with kina.session(runtime) as session:
        with stalled(session):
            session.full(100, 1.0)
            witness = session.completion()
            assert not witness.done()
            assert not in_thread(witness.done)
        in_thread(witness.wait)
        assert witness.done()
        assert session.counters().host_waits == 1
        queries = session.counters().event_queries
        for _ in range(5):
            assert witness.done()
            witness.wait()
        assert session.counters().host_waits == 1
        assert session.counters().event_queries <= queries + 1


def test_a_witness_sees_only_what_was_before_it(runtime):
    with kina.session(runtime) as session:
        session.full(100, 1.0)
        witness = session.completion()
        witness.wait()
        with stalled(session):
            session.full(100, 2.0)
            assert witness.done()
            assert not session.completion().done()


def test_a_witness_outlives_its_session_and_runtime():
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session, stalled(session):
        session.full(100, 1.0)
        witness = session.completion()
        session.close()
        del runtime, session
        gc.collect()
        assert not witness.done()
    in_thread(witness.wait)
    assert witness.done()


def test_a_witness_of_nothing(session):
    witness = session.completion()
    witness.wait()
    assert witness.done()


def test_many_witnesses_share_few_events(runtime, sim):
    with kina.session(runtime) as session:
        session.completion().wait()
        before = sim.live()["events"] if sim is not None else 0
        for _ in range(500):
            session.completion().wait()
        if sim is not None:
            assert sim.live()["events"] <= before + 1


# Tensors of other Runtimes --------------------------------------------------------------------------------


def test_adoption_is_ordered_after_the_source(runtime, other):
    with kina.session(other) as theirs, kina.session(runtime) as ours:
        with stalled(theirs):
            source = theirs.full(1000, 3.0)
            adopted = ours.adopt(source)
            assert adopted.runtime_identity == runtime.identity
            assert view(ours, adopted) == view(theirs, source)
            copied = ours.copy(adopted)
            assert not ours.completion().done()
        assert ours.to_host(copied).tolist() == [3.0] * 1000


def test_adopting_ones_own_is_nothing(session):
    tensor = session.zeros(3)
    events = session.counters().events_recorded
    assert session.adopt(tensor) is tensor
    assert session.counters().events_recorded == events


@pytest.mark.parametrize("use", ["copy", "launch", "to_host"])
def test_an_adopted_tensor_lives_until_its_work_is_done(runtime, other, use):
    """Source and adopted tensor are dropped while the adopter's work is pending: the memory is not reused."""
    with kina.session(other) as theirs:
        source = theirs.full(1000, 3.0)
        theirs.synchronize()
        with kina.session(runtime) as ours:
            result = ours.zeros(1000)
            if use == "to_host":
                assert ours.to_host(ours.adopt(source))[0] == 3.0
            with ours.raw() as raw:  # a load waits for the device
                function = kernel(raw, "copy", "mut f32[], f32[], u32")
            with stalled(ours):
                adopted = ours.adopt(source)
                if use == "launch":
                    with ours.raw():
                        function.launch(kina.LaunchConfig.linear(1000), result, adopted, 1000)
                else:
                    result = ours.copy(adopted)
                del adopted, source
                gc.collect()
                fresh = [theirs.full(1000, float(-i)) for i in range(1, 5)]
                theirs.synchronize()
            assert ours.to_host(result).tolist() == [3.0] * 1000
            ours.synchronize()
            assert ours.counters().pending == 0
        theirs.synchronize()
        until(lambda: theirs.counters().live_bytes == 4 * 4000)
        del fresh


def test_views_are_adopted_as_they_are(runtime, other):
    with kina.session(other) as theirs, kina.session(runtime) as ours:
        source = theirs.from_host(np.arange(12, dtype=np.float32).reshape(3, 4))
        taken = ours.adopt(source[1:, ::2])
        assert (taken.shape, taken.strides) == ((2, 2), (4, 2))
        assert ours.to_host(taken).tolist() == [[4, 6], [8, 10]]
        assert ours.adopt(source.as_readonly()).readonly


def test_a_chain_of_adoptions(runtime, other):
    third = kina.Runtime(0)
    with kina.session(other) as a, kina.session(runtime) as b, kina.session(third) as c:
        with stalled(a):
            last = c.adopt(b.adopt(a.full(100, 2.0)))
            copied = c.copy(last)
            del last
        assert c.to_host(copied).tolist() == [2.0] * 100
        for session in (c, b, a):
            session.synchronize()
        until(lambda: a.counters().live_bytes == 0)


# Runtimes that go -----------------------------------------------------------------------------------------


def test_segments_of_a_dropped_runtime_are_released_later(other):
    """Their staging and modules are the device's, until any Runtime of it has an occasion."""
    with kina.session(other) as session:
        session.synchronize()
    runtime = kina.Runtime(0)
    session = kina.session(runtime)
    session.__enter__()
    add_one(session, session.zeros(10))
    with stalled(session):
        session.from_host(np.ones(100, np.float32))
        session.close()
        del runtime, session
        gc.collect()
    sim = simulation()
    if sim is not None:
        sim.wait_idle()
        modules = sim.live()["modules"]
    with kina.session(other) as session:
        session.synchronize()
    if sim is not None:
        assert sim.live()["modules"] < modules


def test_a_dropped_runtime_lets_go_of_what_it_adopted(other):
    """Dropped without being closed, with a lease on an adopted tensor, whose home it is itself."""
    with kina.session(other) as theirs:
        source = theirs.full(1000, 3.0)
        runtime = kina.Runtime(0)
        with kina.session(runtime) as ours:
            ours.copy(ours.adopt(source))
        del source, runtime, ours
        gc.collect()
        # Of an idle stream: the dropped Runtime's is not waited for.
        until(lambda: (theirs.synchronize(), theirs.counters().live_bytes)[1] == 0)


# Exports --------------------------------------------------------------------------------------------------


def test_an_export_to_the_own_stream_costs_nothing(session):
    from helpers.cuda import stream_of

    tensor = session.zeros(10)
    before = session.counters().events_recorded
    tensor.to_dlpack(stream=stream_of(session))
    del tensor
    assert session.counters().events_recorded == before
    assert session.counters().frees == 1


@pytest.mark.parametrize("known", ["none", "unknown stream"])
def test_a_quarantined_export_is_not_reused_before_a_synchronize(session, known):
    stream = ForeignStream()
    tensor = session.full(MANY, 1.0)
    address = view(session, tensor)
    capsule = tensor.to_dlpack(stream=-1 if known == "none" else stream.handle)
    del tensor
    # Somebody's copy is pending on a stream that nobody tells kina of.
    session.synchronize()
    target = session.zeros(MANY)
    session.synchronize()
    with stalled(stream):
        with on_stack(primary_context()):
            ok(driver.cuMemcpyDtoDAsync(view(session, target), address, MANY * 4, driver.CUstream(stream.handle)))
        del capsule
        gc.collect()
        assert session.counters().frees == 0
        fresh = [session.full(MANY, float(-i)) for i in range(1, 4)]
        assert address not in [view(session, tensor) for tensor in fresh]
    session.synchronize()
    assert session.to_host(target).tolist() == [1.0] * MANY
    assert session.counters().frees == 1
    stream.synchronize()
    stream.destroy()


def test_an_export_to_the_legacy_stream_is_fenced(session):
    """Its last release waits, on the device, for the legacy stream: no quarantine, no host wait."""
    tensor = session.full(MANY, 1.0)
    address = view(session, tensor)
    target = session.zeros(MANY)
    session.synchronize()
    capsule = tensor.to_dlpack()
    del tensor
    waits = session.counters().host_waits
    with stalled(1):
        with on_stack(primary_context()):
            ok(driver.cuMemcpyDtoDAsync(view(session, target), address, MANY * 4, driver.CUstream(1)))
        del capsule
        gc.collect()
        assert session.counters().frees == 1
        fresh = [session.full(MANY, float(-i)) for i in range(1, 4)]
        assert session.counters().host_waits == waits
    assert session.to_host(target).tolist() == [1.0] * MANY
    del fresh


def test_the_consumer_waits_for_the_producer(session):
    stream = ForeignStream()
    target = session.zeros(MANY)
    session.synchronize()
    with stalled(session):
        tensor = session.full(MANY, 5.0)
        capsule = tensor.to_dlpack(stream=stream.handle)
        with on_stack(primary_context()):
            ok(driver.cuMemcpyDtoDAsync(view(session, target), view(session, tensor), MANY * 4,
                                        driver.CUstream(stream.handle)))  # fmt: skip
    stream.synchronize()
    assert session.to_host(target).tolist() == [5.0] * MANY
    del capsule, tensor
    session.synchronize()
    stream.destroy()


def test_exports_that_are_refused(session):
    tensor = session.zeros(3)
    for stream in (0, -2, "1", 1.5, True, 2**64):
        with pytest.raises(kina.DLPackError, match="stream"):
            tensor.to_dlpack(stream=stream)
    with pytest.raises(kina.DLPackError, match="dl_device"):
        tensor.__dlpack__(dl_device=(1, 0))
    with pytest.raises(kina.DLPackError):
        tensor.__dlpack__(copy=True)
    with pytest.raises(TypeError):
        np.asarray(tensor)


@pytest.mark.gpu
def test_round_trip_through_torch(session):
    import torch

    ours = session.from_host(np.arange(1000, dtype=np.float32))
    theirs = torch.from_dlpack(ours)
    assert theirs.data_ptr() == view(session, ours)
    theirs.add_(1)
    torch.cuda.synchronize()
    back = session.adopt(theirs)
    assert view(session, back) == theirs.data_ptr()
    del theirs
    gc.collect()
    assert np.array_equal(session.to_host(back), np.arange(1, 1001, dtype=np.float32))


def test_leases_do_not_survive_a_process():
    def body():
        session = kina.session("cuda:0").__enter__()
        with stalled(session):
            session.from_host(np.ones(1000, np.float32))
            session.close()
        print(session.closed)

    assert run_body(body) == "True\n"
