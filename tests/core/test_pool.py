"""The pool over memory of the host: what it keeps and gives back, and how it grows; streams are in tests/cuda."""

from __future__ import annotations

import gc
import queue
import resource as system
import threading
from typing import Any

import pytest
from helpers.cycles import cycle
from helpers.processes import run_python
from helpers.resources import PythonResource
from hypothesis import given, settings
from hypothesis import strategies as st

import kina
from kina import memory

KIB, MIB = 1 << 10, 1 << 20


def pool_over(below: memory.MemoryResource | None = None, **options: object) -> memory.PoolMemoryResource:
    return memory.PoolMemoryResource(below or memory.HostMemoryResource(), **options)


# What it keeps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 256, 257, 5000, 100 * KIB, MIB, MIB + 1, 30 * MIB])
def test_memory_comes_again(nbytes):
    counted = memory.StatisticsMemoryResource(memory.HostMemoryResource())
    pool = pool_over(counted)
    first = pool.allocate(nbytes)
    address = first.unsafe_address()
    first.free()
    grown = counted.counts().total_count
    for _ in range(100):
        again = pool.allocate(nbytes)
        assert again.unsafe_address() == address
        del again
    assert counted.counts().total_count == grown == pool.stats().grown


def test_what_it_says():
    pool = pool_over()
    assert pool.stats().reserved_bytes == 0
    assert (pool.name, pool.device, pool.supports_streams) == ("PoolMemoryResource", "cpu", False)
    small, large = pool.allocate(1000), pool.allocate(3 * MIB)
    stats = pool.stats()
    assert (stats.live_bytes, stats.live_allocations, stats.total_allocations) == (3 * MIB + 1000, 2, 2)
    assert stats.reserved_bytes == stats.peak_reserved_bytes == 6 * MIB
    assert (stats.chunks, stats.grown, stats.returned, stats.maximum_bytes) == (2, 2, 0, None)
    assert stats.cached_bytes == 6 * MIB - 3 * MIB - KIB
    assert (stats.pending_bytes, stats.refused, stats.unknown_frees) == (0, 0, 0)
    assert stats.largest_free_bytes == 2 * MIB - KIB
    assert stats.fragmentation == pytest.approx(1 - stats.largest_free_bytes / stats.cached_bytes)
    assert [stream.stream_number for stream in stats.streams] == [0]
    small.free()
    large.free()
    stats = pool.stats()
    assert (stats.live_bytes, stats.live_allocations, stats.cached_bytes) == (0, 0, 6 * MIB)
    assert stats.streams[0].cached_bytes == KIB


def test_neighbours_merge():
    """Everything cut out of a chunk is one block again, once nobody keeps a part of it."""
    pool = pool_over()
    buffers = [pool.allocate(nbytes) for nbytes in (300, 40 * KIB, 300, 700 * KIB, 90 * KIB, 256, 200 * KIB)]
    assert pool.stats().chunks == 1
    for index in (1, 5, 0, 3, 6, 2, 4):
        buffers[index].free()
    pool.trim(keep_bytes=2 * MIB)
    stats = pool.stats()
    assert (stats.chunks, stats.largest_free_bytes, stats.fragmentation) == (1, 2 * MIB, 0.0)


@given(
    alignment=st.sampled_from([256, 512, 4096]),
    turns=st.lists(st.tuples(st.booleans(), st.integers(1, 6 * MIB) | st.integers(1, 4 * KIB)), max_size=80),
)
@settings(deadline=None)
def test_live_memory_is_distinct_and_accounted_for(alignment, turns):
    counted = memory.StatisticsMemoryResource(memory.HostMemoryResource())
    pool = pool_over(counted, alignment=alignment)
    live: dict[int, int] = {}
    for freeing, nbytes in turns:
        if freeing and live:
            address = list(live)[nbytes % len(live)]
            pool.unsafe_deallocate(address, live.pop(address))
            continue
        address = pool.unsafe_allocate(nbytes)
        assert address % alignment == 0
        assert all(address + nbytes <= other or other + size <= address for other, size in live.items())
        live[address] = nbytes
    stats = pool.stats()
    assert (stats.live_bytes, stats.live_allocations) == (sum(live.values()), len(live))
    assert stats.reserved_bytes == counted.counts().current_bytes <= stats.peak_reserved_bytes
    assert stats.cached_bytes + stats.live_bytes <= stats.reserved_bytes
    for address, nbytes in live.items():
        pool.unsafe_deallocate(address, nbytes)
    pool.trim()
    assert counted.counts().current_bytes == pool.stats().reserved_bytes == 0


# How it grows -------------------------------------------------------------------------------------------------


def test_nothing_is_reserved_before_it_is_asked_for():
    below = PythonResource()
    pool = pool_over(below, initial_bytes=10 * MIB)
    assert below.asked == 0
    kept = pool.allocate(1)
    assert sum(below.live.values()) == pool.stats().reserved_bytes == 10 * MIB
    kept.free()


def test_growth():
    pool = pool_over()
    kept = [pool.allocate(2 * MIB) for _ in range(40)]
    stats = pool.stats()
    assert stats.reserved_bytes < 1.25 * 80 * MIB
    assert stats.chunks < 30  # later chunks are larger
    del kept
    pool = pool_over(growth=5 * MIB)
    kept = [pool.allocate(MIB) for _ in range(7)]
    assert len(kept) == pool.stats().live_allocations
    assert (pool.stats().chunks, pool.stats().reserved_bytes) == (2, 12 * MIB)


def test_a_smaller_chunk_is_better_than_none():
    limited = memory.LimitingMemoryResource(memory.HostMemoryResource(), 3 * MIB)
    pool = pool_over(limited, growth=64 * MIB)
    buffer = pool.allocate(3 * MIB)
    assert pool.stats().reserved_bytes == 3 * MIB
    with pytest.raises(kina.OutOfMemoryError):
        pool.allocate(1)
    buffer.free()
    assert pool.allocate(1).nbytes == 1


def test_the_maximum():
    pool = pool_over(maximum_bytes=8 * MIB)
    kept = [pool.allocate(3 * MIB), pool.allocate(3 * MIB), pool.allocate(600)]
    with pytest.raises(kina.OutOfMemoryError, match="no room for 4194304 bytes") as caught:
        pool.allocate(4 * MIB)
    error = caught.value
    assert (error.requested, error.live, error.limit) == (4 * MIB, 6 * MIB + 600, 8 * MIB)
    stats = pool.stats()
    assert error.cached == stats.cached_bytes
    assert (error.largest_free, error.pending) == (stats.largest_free_bytes, 0)
    assert stats.reserved_bytes <= 8 * MIB
    assert (stats.refused, stats.maximum_bytes) == (1, 8 * MIB)
    kept[0].free()
    assert pool.allocate(3 * MIB).nbytes == 3 * MIB  # and it goes on


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"alignment": 128}, kina.ArgumentError),
        ({"alignment": 384}, kina.ArgumentError),
        ({"alignment": 2**31}, kina.ArgumentError),
        ({"alignment": 0}, kina.ArgumentError),
        ({"alignment": "256"}, kina.ArgumentError),
        ({"initial_bytes": 2, "maximum_bytes": 1}, kina.ArgumentError),
        ({"initial_bytes": -1}, kina.InvalidShapeError),
        ({"maximum_bytes": -1}, kina.InvalidShapeError),
        ({"growth": 2**63}, kina.InvalidShapeError),
        ({"maximum_bytes": 1.5}, kina.ArgumentError),
    ],
    ids=str,
)
def test_bad_options(options, error):
    with pytest.raises(error, match="PoolMemoryResource"):
        pool_over(**options)


def test_the_upstream_is_a_resource():
    with pytest.raises(kina.ArgumentError, match="upstream"):
        memory.PoolMemoryResource(5)
    with pytest.raises(kina.InvalidShapeError):
        pool_over().trim(-1)


# The ways out of a full upstream ------------------------------------------------------------------------------


def test_free_chunks_make_way_for_a_larger_one():
    """What is free and too small does not add up: as much goes back as comes."""
    pool = pool_over(growth=2 * MIB)
    buffers = [pool.allocate(2 * MIB) for _ in range(5)]
    for buffer in buffers:
        buffer.free()
    large = pool.allocate(6 * MIB)
    stats = pool.stats()
    assert (stats.returned, stats.grown, stats.reserved_bytes) == (3, 6, 10 * MIB)
    assert stats.peak_reserved_bytes == 10 * MIB
    large.free()


def test_chunks_that_threads_keep_go_back_for_a_larger_one():
    """Nothing but emptying a thread's cache, and then giving back what that sets free, serves the request."""
    pool = pool_over(maximum_bytes=4 * MIB, growth=2 * MIB)
    kept, over = threading.Event(), threading.Event()

    def keep() -> None:
        buffers = [pool.allocate(MIB) for _ in range(4)]  # two in each chunk
        for which in (1, 3, 0, 2):  # the last stays in the cache of this thread
            buffers[which].free()
        kept.set()
        over.wait(30)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert kept.wait(30)
        large = pool.allocate(4 * MIB)
    finally:
        over.set()
        thread.join()
    stats = pool.stats()
    assert (stats.returned, stats.grown, stats.refused) == (2, 3, 0)
    large.free()


def test_threads_give_up_what_they_keep_before_the_pool_grows():
    """What one thread allocates and another frees would else add up to a full cache of each size for both."""
    pool = pool_over(growth=2 * MIB)
    sizes = [64 * KIB, 80 * KIB, 96 * KIB, 112 * KIB, 128 * KIB, 160 * KIB, 192 * KIB, 224 * KIB, 256 * KIB]
    given: queue.SimpleQueue[Any] = queue.SimpleQueue()
    freed = threading.Semaphore(0)

    def free() -> None:
        while (buffer := given.get()) is not None:
            buffer.free()
            del buffer
            freed.release()

    thread = threading.Thread(target=free)
    thread.start()
    try:
        for nbytes in sizes * 20:
            for _ in range(4):
                given.put(pool.allocate(nbytes))
                freed.acquire()
    finally:
        given.put(None)
        thread.join()
    stats = pool.stats()
    assert (stats.reserved_bytes, stats.grown) == (2 * MIB, 1)
    assert stats.rescued_by_raid > 0


def test_other_threads_give_up_what_they_keep():
    pool = pool_over(maximum_bytes=2 * MIB)
    done, over = threading.Event(), threading.Event()

    def keep() -> None:
        buffers = [pool.allocate(100 * KIB) for _ in range(10)]
        del buffers
        done.set()
        over.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    done.wait()
    try:
        assert pool.stats().streams[0].cached_bytes > 0
        whole = pool.allocate(2 * MIB)
        stats = pool.stats()
        assert (stats.rescued_by_raid, stats.grown, stats.refused) == (1, 1, 0)
    finally:
        over.set()
        thread.join()
    whole.free()


def test_all_that_is_free_goes_back_where_some_does_not_help():
    """An upstream in pieces: for much it needs all of it."""

    class Pieces(PythonResource):
        def _allocate(self, nbytes, stream):
            if nbytes > 2 * MIB and self.live:
                raise MemoryError("in pieces")
            return super()._allocate(nbytes, stream)

    pool = pool_over(Pieces(), growth=2 * MIB)
    buffers = [pool.allocate(2 * MIB) for _ in range(4)]
    for buffer in buffers:
        buffer.free()
    large = pool.allocate(3 * MIB)  # 4 MiB go back for it, then the rest
    stats = pool.stats()
    assert (stats.rescued_by_returning, stats.returned, stats.grown, stats.refused) == (1, 4, 5, 0)
    large.free()


def test_a_failure_that_came_to_nothing_is_forgotten():
    """The upstream's exception is not kept when the pool finds another way."""
    tried = []

    class Small(PythonResource):
        def _allocate(self, nbytes, stream):
            tried.append(nbytes)
            if nbytes > 3 * MIB:
                raise LookupError if nbytes == 12 * MIB else MemoryError("too much")
            return super()._allocate(nbytes, stream)

    pool = pool_over(Small(), growth=8 * MIB)
    assert pool.allocate(2 * MIB).nbytes == 2 * MIB
    assert tried == [8 * MIB, 2 * MIB]
    with pytest.raises(kina.OutOfMemoryError, match="beyond the limit"):
        memory.LimitingMemoryResource(memory.HostMemoryResource(), 1).allocate(2)
    with pytest.raises(MemoryError, match="too much"):
        pool.allocate(9 * MIB)
    tried.clear()
    with pytest.raises(LookupError):  # no want of memory: nothing else is tried
        pool.allocate(12 * MIB)
    assert tried == [12 * MIB]


def test_a_callback_below_is_asked_when_nothing_else_helps():
    kept, asked = [], []
    limited = memory.LimitingMemoryResource(memory.HostMemoryResource(), 4 * MIB)

    def give_up(nbytes: int) -> bool:
        asked.append(nbytes)
        if kept:
            kept.clear()
            return True
        return False

    kept.append(limited.allocate(3 * MIB))
    pool = pool_over(memory.FailureCallbackMemoryResource(limited, give_up))
    assert pool.allocate(4 * MIB).nbytes == 4 * MIB
    assert asked == [4 * MIB]
    stats = pool.stats()
    assert (stats.rescued_by_callback, stats.refused) == (1, 0)


def test_a_callback_below_a_limit_is_not_asked_for_what_the_limit_refuses():
    """Whatever it gave up, that would not be served."""
    asked = []
    full = memory.LimitingMemoryResource(memory.HostMemoryResource(), 2 * MIB)
    limited = memory.LimitingMemoryResource(memory.FailureCallbackMemoryResource(full, asked.append), 8 * MIB)
    pool = pool_over(limited)

    def refused(nbytes: int) -> list[int]:
        asked.clear()
        with pytest.raises(kina.OutOfMemoryError):
            pool.allocate(nbytes)
        return asked

    assert refused(4 * MIB) == [4 * MIB]
    assert refused(8 * MIB) == [8 * MIB]
    assert refused(9 * MIB) == []
    taken = limited.allocate(MIB)
    assert refused(8 * MIB) == []
    assert refused(7 * MIB) == [7 * MIB]
    taken.free()
    assert refused(8 * MIB) == [8 * MIB]


ADAPTORS = {
    "statistics": memory.StatisticsMemoryResource,
    "limiting": lambda below: memory.LimitingMemoryResource(below, 100 * MIB),
    "tracking": memory.TrackingMemoryResource,
    "pool": pool_over,
    "callback": lambda below: memory.FailureCallbackMemoryResource(below, lambda nbytes: False),
}


@pytest.mark.parametrize("between", ADAPTORS)
def test_what_the_callback_gives_back_to_the_pool_is_found(between):
    """The pool looks through what it has after each call, and calls no more than it must."""
    kept, asked = [], []
    limited = memory.LimitingMemoryResource(memory.HostMemoryResource(), 4 * MIB)

    def drop_one(nbytes: int) -> bool:
        asked.append(nbytes)
        kept.pop()
        return True

    pool = pool_over(ADAPTORS[between](memory.FailureCallbackMemoryResource(limited, drop_one)))
    kept += [pool.allocate(2 * MIB), pool.allocate(2 * MIB)]
    small = pool.allocate(MIB)
    assert (asked, len(kept)) == ([MIB], 1)
    stats = pool.stats()
    assert (stats.rescued_by_callback, stats.grown, stats.refused) == (1, 2, 0)
    small.free()


@pytest.mark.parametrize("kind", [LookupError, MemoryError])
def test_what_a_callback_below_raises_ends_the_request(kind):
    error = kind("mine")

    def fail(nbytes: int) -> bool:
        raise error

    limited = memory.LimitingMemoryResource(memory.HostMemoryResource(), MIB)
    counted = memory.StatisticsMemoryResource(memory.FailureCallbackMemoryResource(limited, fail))
    pool = pool_over(counted)
    with pytest.raises(kind) as caught:
        pool.allocate(4 * MIB)
    assert caught.value is error
    assert (pool.stats().refused, pool.stats().rescued_by_callback) == (1, 0)


def test_a_callback_below_a_pool_at_its_limit_is_not_called():
    pool = pool_over(
        memory.FailureCallbackMemoryResource(memory.HostMemoryResource(), lambda nbytes: 1 / 0), maximum_bytes=2 * MIB
    )
    with pytest.raises(kina.OutOfMemoryError, match="a limit of 2097152"):
        pool.allocate(3 * MIB)


def test_a_failure_that_a_callback_could_not_mend_is_told_once(host):
    """It is refused once, whoever asked before in vain."""
    asked = []
    pool = pool_over(memory.LimitingMemoryResource(memory.HostMemoryResource(), 4 * MIB))
    counted = memory.StatisticsMemoryResource(pool)
    resource = memory.FailureCallbackMemoryResource(counted, asked.append)
    with pytest.raises(kina.OutOfMemoryError, match="below it"):
        host.zeros(5 * MIB, "uint8", memory=resource)
    assert asked == [5 * MIB]
    assert (pool.stats().refused, counted.counts().failed_count) == (1, 1)


def test_a_pool_that_is_gone_has_given_everything_back():
    below = PythonResource()
    pool = pool_over(below)
    buffers = [pool.allocate(nbytes) for nbytes in (1, 5 * MIB, 300 * KIB)]
    del pool
    assert sum(below.live.values()) > 0
    del buffers
    gc.collect()
    assert below.live == {}


def test_trim():
    pool = pool_over(growth=2 * MIB)
    buffers = [pool.allocate(2 * MIB) for _ in range(5)]
    assert pool.trim() == 0
    for buffer in buffers[1:]:
        buffer.free()
    assert pool.trim(keep_bytes=7 * MIB) == 4 * MIB
    assert pool.stats().reserved_bytes == 6 * MIB
    assert pool.trim() == 4 * MIB
    assert pool.stats().reserved_bytes == 2 * MIB
    buffers[0].free()
    assert pool.trim() == 2 * MIB


def test_memory_that_it_never_gave():
    pool = pool_over()
    large = pool.allocate(3 * MIB)
    pool.unsafe_deallocate(large.unsafe_address(), 2 * MIB)  # another size
    pool.unsafe_deallocate(large.unsafe_address() + 256, 3 * MIB)
    pool.unsafe_deallocate(0x1000, 5 * MIB)
    assert pool.stats().unknown_frees == 3
    other = pool.allocate(3 * MIB)
    assert other.unsafe_address() != large.unsafe_address()


# Threads, forks, the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 8, 32])
def test_a_million_cycles(threads):
    counted = memory.StatisticsMemoryResource(memory.HostMemoryResource())
    pool = pool_over(counted)
    cycle(pool, threads, 300_000)
    warm = system.getrusage(system.RUSAGE_SELF).ru_maxrss
    cycle(pool, threads, 1_000_000)
    stats = pool.stats()
    assert (stats.live_bytes, stats.live_allocations, stats.unknown_frees) == (0, 0, 0)
    assert stats.cached_bytes == stats.reserved_bytes <= 16 * MIB  # at most 3 MiB are live at once
    assert system.getrusage(system.RUSAGE_SELF).ru_maxrss - warm < 64 * KIB  # KiB: 64 MiB, of 3 GiB that went through
    pool.trim()
    assert counted.counts().current_bytes == 0


def test_producer_and_consumer_keep_it_flat():
    """What one thread allocates and another frees comes back to the first."""
    pool = pool_over()
    handed: list[memory.Buffer] = []
    items, room = threading.Semaphore(0), threading.Semaphore(8)
    after_a_while = []

    def consume() -> None:
        for turn in range(20_000):
            items.acquire()
            handed.pop(0).free()
            room.release()
            if turn == 2_000:
                after_a_while.append(pool.stats().reserved_bytes)

    thread = threading.Thread(target=consume)
    thread.start()
    for turn in range(20_000):
        room.acquire()
        handed.append(pool.allocate((1 << (turn % 19)) + 1))
        items.release()
    thread.join()
    assert pool.stats().reserved_bytes <= 2 * after_a_while[0]


def test_a_thread_that_ends_leaves_nothing_behind():
    pool = pool_over()

    def work() -> None:
        buffers = [pool.allocate(size) for size in (1, 300, 5000) for _ in range(30)]
        del buffers

    for _ in range(50):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    stats = pool.stats()
    assert (stats.chunks, stats.live_bytes) == (1, 0)
    assert stats.total_allocations == 50 * 90


def test_a_forked_child_goes_on():
    """Whatever the other threads were busy with at the fork."""
    printed = run_python(
        """
        import os, threading
        from kina import memory
        pool = memory.PoolMemoryResource(memory.HostMemoryResource())
        over = False
        def work():
            while not over:
                held = [pool.allocate(size) for size in (1, 1000, 70_000, 2_000_000)]
                del held
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads: thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                held = [pool.allocate(size) for size in (1, 1000, 70_000, 2_000_000) for _ in range(20)]
                for buffer in held: memoryview(buffer)[:1] = b"x"
                del held
                pool.trim()
                os._exit(0 if pool.stats().live_allocations >= 0 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        over = True
        for thread in threads: thread.join()
        assert pool.stats().live_bytes == 0
        print("flat")
        """,
        # Python 3.12 warns of forking with threads, and that is what this is about.
        flags=("-W", "ignore:This process:DeprecationWarning"),
    )
    assert printed == "flat\n"


def test_the_interpreter_may_end_at_any_time():
    printed = run_python(
        """
        import threading
        from kina import memory
        pool = memory.PoolMemoryResource(memory.HostMemoryResource())
        kept = [pool.allocate(1000) for _ in range(10)]
        def work():
            while True:
                pool.allocate(100).free()
        for _ in range(3): threading.Thread(target=work, daemon=True).start()
        """
    )
    assert printed == ""
