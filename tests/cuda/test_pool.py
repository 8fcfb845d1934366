"""The pool over memory of a device: what one stream has freed serves another only when that is safe."""

from __future__ import annotations

import gc
import threading

import pytest
from helpers.cuda import (
    driver,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    stalled,
    stalled_until_waited,
    stream_of,
    unchanged,
    view,
)

import kina
from kina import memory

MIB = 1 << 20
WORDS = MIB // 4  # float32 in 1 MiB


@pytest.fixture
def made():
    """A Runtime with an open session on it, as often as it is asked; all of one thread."""
    opened = []

    def make() -> kina.Session:
        session = kina.session(kina.Runtime(0))
        opened.append(session.__enter__())
        return session

    yield make
    for session in reversed(opened):
        session.close()


def pool_of(mib: int | None = None, upstream: type = memory.CudaAsyncMemoryResource) -> memory.PoolMemoryResource:
    maximum = None if mib is None else mib * MIB
    return memory.PoolMemoryResource(upstream(0), maximum_bytes=maximum)


UPSTREAMS = [memory.CudaAsyncMemoryResource, memory.CudaMemoryResource, memory.ManagedMemoryResource]


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("words", [64, 1000, 50_000, 2 * WORDS])
def test_a_stream_has_its_own_memory_again_at_once(made, upstream, words):
    pool, session = pool_of(None, upstream), made()
    with stalled(session):
        first = session.full(words, 1.0, memory=pool)
        address = view(session, first)
        copied = session.copy(first)
        del first
        second = session.full(words, 2.0, memory=pool)
        assert view(session, second) == address
    assert session.to_host(copied).sum() == words
    assert session.to_host(second).sum() == 2 * words


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("words", [64, 50_000, 2 * WORDS])
def test_other_streams_have_it_when_the_device_is_past_the_release(made, upstream, words):
    pool, a, b = pool_of(None, upstream), made(), made()
    b.to_host(b.full(8, 0.0))
    with stalled(a):
        first = a.full(words, 1.0, memory=pool)
        address = view(a, first)
        copied = a.copy(first)
        del first
        assert pool.trim(1 << 40) == 0  # what the thread keeps is anybody's, but for the stream
        assert pool.stats().pending_bytes >= 4 * words
        second = b.full(words, 2.0, memory=pool)
        assert not address <= view(b, second) < address + 4 * words
        assert b.to_host(second).sum() == 2 * words
    assert a.to_host(copied).sum() == words
    a.synchronize()
    del second
    pool.trim(1 << 40)
    b.synchronize()
    pool.trim(1 << 40)
    stats = pool.stats()
    assert (stats.live_bytes, stats.pending_bytes) == (0, 0)
    third = b.full(words, 3.0, memory=pool)
    assert pool.stats().grown == stats.grown
    del third


@pytest.mark.simulated
def test_a_wait_that_fails_says_nothing(made, sim):
    """What was freed before it is pending still, and comes back by a fence."""
    pool, a, b = pool_of(4), made(), made()
    a.full(WORDS * 4, 1.0, memory=pool)
    with sim.failing("cuStreamSynchronize", 1, 1), pytest.raises(kina.KinaError):
        a.synchronize()
    assert pool.stats().pending_bytes == 4 * MIB
    pool.trim(1 << 40)
    a.completion().wait()
    second = b.full(WORDS * 4, 2.0, memory=pool)
    assert (pool.stats().rescued_by_harvest, pool.stats().grown) == (1, 1)
    del second


def test_a_thread_keeps_streams_apart(made):
    """What it has freed in the order of one stream is at hand for that one only."""
    pool, a, b = pool_of(), made(), made()
    for session in (a, b):
        session.full(1000, 0.0, memory=pool)
    with stalled(a):
        first = a.full(1000, 1.0, memory=pool)
        address = view(a, first)
        copied = a.copy(first)
        del first
        second = b.full(1000, 2.0, memory=pool)
        assert view(b, second) != address
    assert a.to_host(copied).sum() == 1000
    assert b.to_host(second).sum() == 2000


def test_three_streams(made):
    """What one stream has in use is merged with what another has, and taken by a third."""
    pool, a, b, c = pool_of(8), made(), made(), made()
    whole = c.empty(2 * WORDS, memory=pool)  # the chunk is there before anything stands still
    c.synchronize()
    del whole
    pool.trim(1 << 40)
    with stalled(a):
        x = a.full(WORDS, 1.0, memory=pool)
        y = b.full(WORDS, 2.0, memory=pool)
        seen = a.copy(x)
        places = {view(a, x), view(b, y)}
        del x, y
        b.synchronize()
        pool.trim(1 << 40)
        taken = [b.full(WORDS, 3.0 + i, memory=pool) for i in range(2)]
        others = [c.full(WORDS, 5.0 + i, memory=pool) for i in range(3)]
        assert len(places & {view(b, t) for t in taken} | places & {view(c, t) for t in others}) <= 1
    assert a.to_host(seen).sum() == WORDS
    assert [b.to_host(t)[-1] for t in taken] == [3.0, 4.0]
    assert [c.to_host(t)[-1] for t in others] == [5.0, 6.0, 7.0]


def test_a_full_pool_lets_one_stream_wait_for_another(made):
    """On the device: the host goes on."""
    pool, a, b = pool_of(4), made(), made()
    first = a.full(WORDS * 4, 1.0, memory=pool)
    address = view(a, first)
    b.to_host(b.full(8, 0.0))
    waits = b.counters().host_waits
    with stalled(a):
        copied = a.copy(first)
        del first
        second = b.full(WORDS * 4, 2.0, memory=pool)
        assert view(b, second) == address
        stats = pool.stats()
        assert (stats.rescued_by_stealing, stats.grown, stats.refused) == (1, 1, 0)
        assert (b.counters().host_waits, b.counters().synchronizations) == (waits, 0)
    assert a.to_host(copied).sum() == 4 * WORDS
    assert b.to_host(second).sum() == 8 * WORDS


def test_what_a_stream_is_past_saves_the_upstream_a_call(made):
    pool, a, b = pool_of(4), made(), made()
    first = a.full(WORDS * 4, 1.0, memory=pool)
    del first
    a.completion().wait()
    pool.trim(1 << 40)  # records the fence, and may see that it has passed
    pending = pool.stats().pending_bytes > 0
    a.completion().wait()
    second = b.full(WORDS * 4, 2.0, memory=pool)
    stats = pool.stats()
    assert (stats.rescued_by_harvest, stats.grown) == (pending, 1)
    del second


def test_a_wait_on_the_host_makes_memory_anybodys(made):
    """Without an event: the pool hears of it."""
    pool, a, b = pool_of(4), made(), made()
    a.full(WORDS * 4, 1.0, memory=pool)
    assert pool.stats().pending_bytes == 4 * MIB
    recorded = a.counters().events_recorded
    a.synchronize()
    assert pool.stats().pending_bytes == 0
    second = b.full(WORDS * 4, 2.0, memory=pool)
    stats = pool.stats()
    assert (stats.rescued_by_harvest, stats.grown, a.counters().events_recorded) == (0, 1, recorded)
    del second


@pytest.mark.simulated
def test_a_full_pool_waits_when_nothing_else_is_left(made):
    """Two halves, each in use on another stream: no single one is enough."""
    pool, a, b, c = pool_of(4), made(), made(), made()
    whole = c.empty(WORDS * 4, memory=pool)
    c.synchronize()
    del whole
    pool.trim(1 << 40)
    c.synchronize()
    pool.trim(1 << 40)
    halves = [a.full(WORDS * 2, 1.0, memory=pool), b.full(WORDS * 2, 2.0, memory=pool)]
    assert pool.stats().grown == 1
    with stalled_until_waited(stream_of(a), "cuEventSynchronize"):
        copies = [a.copy(halves[0]), b.copy(halves[1])]
        halves.clear()
        taken = c.full(WORDS * 4, 3.0, memory=pool)
    stats = pool.stats()
    assert (stats.rescued_by_waiting, stats.grown, stats.refused) == (1, 1, 0)
    assert c.to_host(taken).sum() == 12 * WORDS
    assert [a.to_host(copies[0]).sum(), b.to_host(copies[1]).sum()] == [2 * WORDS, 4 * WORDS]


def test_the_figures_of_a_refusal(made):
    pool, a, b = pool_of(6), made(), made()
    kept = a.full(WORDS, 1.0, memory=pool)
    other = b.full(WORDS, 1.0, memory=pool)
    with pytest.raises(kina.OutOfMemoryError, match="a limit of 6291456") as caught:
        a.full(WORDS * 8, 1.0, memory=pool)
    error, stats = caught.value, pool.stats()
    assert (error.requested, error.live, error.limit) == (8 * MIB, 2 * MIB, 6 * MIB)
    assert (error.cached, error.largest_free) == (stats.cached_bytes, stats.largest_free_bytes)
    assert stats.refused == 1
    assert a.to_host(kept).sum() + b.to_host(other).sum() == 2 * WORDS
    assert a.full(WORDS, 1.0, memory=pool).shape == (WORDS,)


def test_a_runtime_may_go_before_the_memory_that_it_freed(made):
    pool, other = pool_of(), made()
    gone = kina.Runtime(0)
    other.to_host(other.full(8, 0.0))
    with kina.session(gone) as session:
        handle = stream_of(session)
    with stalled(handle):
        with kina.session(gone) as session:
            first = session.full(WORDS * 2, 1.0, memory=pool)
            address = view(session, first)
            del first
        del gone, session
        gc.collect()
        second = other.full(WORDS * 2, 2.0, memory=pool)
        assert view(other, second) != address
        assert pool.stats().pending_bytes >= 8 * WORDS
    assert other.to_host(second).sum() == 4 * WORDS
    del second
    other.synchronize()
    with on_stack(primary_context()):
        ok(driver.cuStreamSynchronize(driver.CUstream(handle)))
    pool.trim()
    assert pool.stats().reserved_bytes == 0


def test_a_pool_may_go_before_the_device_is_past_it():
    def body():
        counted = kina.memory.StatisticsMemoryResource(kina.memory.CudaAsyncMemoryResource(0))
        session = kina.session(kina.Runtime(0)).__enter__()
        session.to_host(session.full(8, 0.0))
        with stalled(session):
            pool = kina.memory.PoolMemoryResource(counted)
            first = session.full(1 << 20, 1.0, memory=pool)
            copied = session.copy(first)
            del first, pool
            gc.collect()
            assert counted.counts().current_bytes > 0
        assert session.to_host(copied).sum() == 1 << 20
        session.synchronize()
        kina.memory.PoolMemoryResource(counted)  # any pool sees to those that are gone
        assert counted.counts().current_bytes == 0
        session.close()

    run_body(body)


def test_a_pool_that_is_gone_makes_nobody_wait(made):
    """The driver's own release waits for the device: it comes where waiting is allowed."""
    a, b = made(), made()
    counted = memory.StatisticsMemoryResource(memory.CudaMemoryResource(0))
    with stalled(a):
        pool = memory.PoolMemoryResource(counted)
        a.full(WORDS * 2, 1.0, memory=pool)
        del pool
        other = pool_of()
        b.full(WORDS * 2, 2.0, memory=other)
        other.trim(1 << 40)
        assert counted.counts().current_bytes > 0
    a.synchronize()
    assert counted.counts().current_bytes == 0


def test_frees_from_other_threads(made):
    pool, session = pool_of(), made()
    with stalled(session):
        held = [[session.full(5000, float(i), memory=pool)] for i in range(40)]
        copies = [session.copy(tensors[0]) for tensors in held]
        in_thread(lambda: [tensors.clear() for tensors in held])
        fresh = [session.full(5000, -1.0, memory=pool) for _ in range(40)]
    assert [session.to_host(copied)[7] for copied in copies] == [float(i) for i in range(40)]
    assert pool.stats().live_allocations == 40
    del fresh


def test_a_forked_child_is_given_nothing_of_a_device():
    """Of what the pools had for the next request, small or large."""

    def body():
        import os

        pools = [kina.memory.PoolMemoryResource(kina.memory.CudaAsyncMemoryResource())]
        pools.append(kina.memory.current_resource("cuda:0"))
        requests = [(pool, nbytes) for pool in pools for nbytes in (100, 70_000, 4 << 20)]
        for pool, nbytes in requests:
            pool.unsafe_deallocate(pool.unsafe_allocate(nbytes), nbytes)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for pool, nbytes in requests:
                    with pytest.raises(kina.UnavailableError, match="forked"):
                        pool.unsafe_allocate(nbytes)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        for pool, nbytes in requests:
            pool.unsafe_deallocate(pool.unsafe_allocate(nbytes), nbytes)

    run_body(body)


def test_many_threads_and_streams():
    pool = pool_of(64)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(4):
                with kina.session(kina.Runtime(0)) as session:
                    kept = []
                    for step in range(25):
                        words = (seed * 7919 + turn * 104729 + step * 31) % 60_000 + 1
                        kept.append((session.full(words, float(seed), memory=pool), words))
                        if step % 3 == 2:
                            tensor, words = kept.pop(0)
                            assert session.to_host(tensor).sum() == float(seed) * words
                    for tensor, words in kept:
                        assert session.to_host(tensor).sum() == float(seed) * words
                    del tensor
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = pool.stats()
    assert (stats.live_bytes, stats.unknown_frees, stats.refused) == (0, 0, 0)


@pytest.mark.simulated
def test_warm_memory_costs_no_call_of_the_driver(made, sim):
    pool, session = pool_of(), made()
    for words in (10, 3000, 2 * WORDS):
        session.empty(words, memory=pool)
    before = session.counters()
    since = sim.position
    for _ in range(50):
        for words in (10, 3000, 2 * WORDS):
            session.empty(words, memory=pool)
    calls = {record["name"] for record in sim.trace(since, event="call")}
    assert calls <= {"cuCtxGetCurrent", "cuCtxGetId"}
    after = session.counters()
    assert (after.events_recorded, after.event_queries) == (before.events_recorded, before.event_queries)


@pytest.mark.simulated
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery", "cuEventCreate", "cuStreamWaitEvent"])
def test_fences_that_fail(made, sim, call, nth):
    """Memory that cannot be put in order serves nobody else, and the request fails or finds other memory."""
    pool, a, b = pool_of(8), made(), made()
    b.to_host(b.full(8, 0.0))
    with stalled(a), unchanged():
        first = a.full(WORDS * 3, 1.0, memory=pool)
        address = view(a, first)
        copied = a.copy(first)
        del first
        sim.fail(call, nth, 1)
        second = b.full(WORDS * 4, 2.0, memory=pool)
        assert view(b, second) != address
    sim.clear_faults()
    assert a.to_host(copied).sum() == 3 * WORDS
    assert b.to_host(second).sum() == 8 * WORDS


@pytest.mark.parametrize("grow", [False, True])
def test_captures_of_others_live(made, grow):
    """Growing, and asking which streams are past what, in the middle of somebody's global capture."""
    pool, a, b = pool_of(), made(), made()
    a.full(WORDS * 2, 1.0, memory=pool)
    a.synchronize()
    with on_stack(primary_context()):
        stream = ok(driver.cuStreamCreate(1))
        ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(0)))
        kept = b.empty(WORDS * (20 if grow else 2), memory=pool)
        graph = ok(driver.cuStreamEndCapture(stream))
        ok(driver.cuGraphDestroy(graph))
        ok(driver.cuStreamDestroy(stream))
    assert pool.stats().grown == (2 if grow else 1)
    assert kept.shape[0] >= 2 * WORDS


@pytest.mark.simulated
def test_what_a_pool_keeps_is_there_for_others():
    """A full device: the Runtime's own pool gets what a PoolMemoryResource has free."""

    def body():
        total = 64 << 20
        pool = kina.memory.PoolMemoryResource(kina.memory.CudaAsyncMemoryResource(0))
        with kina.session("cuda:0") as session:
            session.empty(total // 4 - (8 << 20) // 4, memory=pool)
            session.synchronize()
            assert pool.stats().reserved_bytes >= 40 << 20
            assert session.empty((40 << 20) // 4).shape == (10 << 20,)
            assert pool.stats().reserved_bytes == 0

    run_body(body, KINA_SIM_MEMORY=str(64 << 20))
