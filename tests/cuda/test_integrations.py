"""kina as the allocator of other libraries.

PyTorch and CuPy do not run on the simulated driver: there, what PyTorch calls is called by its symbols.
On hardware each library works in a process of its own, because PyTorch changes its allocator once.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import random
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers.cuda import (
    ForeignStream,
    driver,
    foreign_context,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    simulation,
    stalled,
    stalled_until_waited,
)
from helpers.processes import run_python
from helpers.torch_calls import TorchCalls

import kina
from kina import memory
from kina.memory import integrations

MIB = 1 << 20


@pytest.fixture
def torch() -> TorchCalls:
    return TorchCalls()


@pytest.fixture
def streams() -> Iterator[Callable[[], ForeignStream]]:
    """Streams of another library, as many as are asked for; they live as long as the process, as PyTorch's do."""
    return ForeignStream


@pytest.fixture
def pool() -> Iterator[memory.PoolMemoryResource]:
    made = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0))
    with memory.using(made):
        yield made


def live() -> tuple[int, int]:
    found = integrations.torch_statistics()
    return found.live_allocations, found.pending_allocations


def test_importing_it_loads_none_of_the_libraries():
    loaded = run_python(
        """
        import sys
        from kina.memory import integrations
        assert set(integrations.__all__) <= set(dir(integrations))
        for name in ("cupy", "torch", "numba", "kina.cuda.driver"):
            assert name not in sys.modules, name
        print(integrations.torch_statistics(), integrations.NumbaMemoryManager.__name__)
        assert "cupy" not in sys.modules and "torch" not in sys.modules
        """
    )
    assert loaded.startswith("TorchStatistics(live_allocations=0, live_bytes=0, pending_allocations=0")


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match=r"kina\.memory\.integrations.*no_such"):
        integrations.no_such  # noqa: B018


# PyTorch's functions --------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_memory_comes_from_what_is_current_and_goes_back_there(torch, streams):
    first, second, default = (memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0)) for _ in range(3))
    shared = integrations.default_pool(0)
    before = shared.stats().live_bytes
    stream = streams().handle
    a = torch.allocate(100, stream)
    assert shared.stats().live_bytes == before + 100
    memory.set_default_resource(default, 0)
    try:
        b = torch.allocate(200, stream)
        with memory.using(first):
            c = torch.allocate(300, stream)
            with memory.using(second), memory.using(memory.HostMemoryResource()):
                d = torch.allocate(400, stream)
            e = in_thread(lambda: torch.allocate(500, stream))  # of the default: no block there
    finally:
        memory.set_default_resource(None, 0)
    assert [pool.stats().live_bytes for pool in (default, first, second)] == [700, 300, 400]
    assert len({a, b, c, d, e}) == 5
    with memory.using(second):
        for address in (a, b, c, d, e):
            torch.free(address)
    assert [pool.stats().live_bytes for pool in (default, first, second)] == [0, 0, 0]
    assert shared.stats().live_bytes == before
    assert integrations.default_pool("cuda:0") is shared


@pytest.mark.simulated
def test_a_block_given_up_by_its_thread_serves_nobody(torch, pool):
    other = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0))
    block = memory.using(other)
    block.__enter__()

    def leave() -> None:
        with pytest.raises(kina.WrongThreadError):
            block.__exit__(None, None, None)

    in_thread(leave)
    address = torch.allocate(64)
    assert (pool.stats().live_bytes, other.stats().live_bytes) == (64, 0)
    torch.free(address)


@pytest.mark.simulated
def test_no_bytes_and_no_memory_of_ours(torch, pool):
    assert torch.allocate(0) == 0
    unknown = integrations.torch_statistics().unknown_frees
    torch.free(0)
    torch.record_stream(0, 0)
    torch.record_stream(0xDEAD00, 0)
    torch.free(0xDEAD00, 100)
    address = torch.allocate(1000)
    torch.free(address + 256, 1000)
    assert integrations.torch_statistics().unknown_frees == unknown + 2
    torch.free(address)
    torch.free(address)  # twice
    assert integrations.torch_statistics().unknown_frees == unknown + 3
    assert pool.stats().live_bytes == 0


@pytest.mark.simulated
def test_many(torch, pool):
    """Beyond the first table."""
    assert live() == (0, 0)
    addresses = [torch.allocate(size) for size in range(1, 2001)]
    assert len(set(addresses)) == 2000
    assert integrations.torch_statistics()[:2] == (2000, 2000 * 2001 // 2)
    random.Random(1).shuffle(addresses)
    for address in addresses:
        torch.free(address)
    assert live() == (0, 0)
    assert pool.stats().live_allocations == 0


@pytest.mark.simulated
def test_the_same_stream_has_it_again_at_once(torch, streams, pool):
    stream, other = streams().handle, streams().handle
    torch.free(torch.allocate(64, other))
    with stalled(stream):
        first = torch.allocate(MIB, stream)
        torch.free(first)
        assert torch.allocate(MIB, stream) == first
        torch.free(first)
        second = torch.allocate(MIB, other)
        assert second != first
    torch.free(second)


@pytest.mark.simulated
def test_what_is_served_from_the_cache_asks_the_driver_for_two_things(torch, streams, pool, sim):
    """Whether the stream is being captured, and which it is. The legacy stream is known."""
    for handle, asked in ((streams().handle, {"cuStreamGetId"}), (0, set())):
        torch.free(torch.allocate(1000, handle))
        before = sim.call_counts()
        for _ in range(100):
            torch.free(torch.allocate(1000, handle))
        called = {name for name, count in sim.call_counts().items() if count != before.get(name, 0)}
        called -= {"cuCtxGetCurrent", "cuCtxGetId", "cuCtxPushCurrent", "cuCtxPopCurrent"}
        assert called - {"cuThreadExchangeStreamCaptureMode"} == {"cuStreamIsCapturing"} | asked


@pytest.mark.simulated
def test_record_stream(torch, streams, pool, sim):
    """Memory that another stream uses comes back once that is past it; nobody waits."""
    home, other = streams().handle, streams()
    torch.free(torch.allocate(64, other.handle))
    keep = torch.allocate(4 * MIB, home)
    torch.free(keep)  # the pool has room for all that follows
    waits = sum(sim.calls(name) for name in ("cuStreamWaitEvent", "cuEventSynchronize", "cuStreamSynchronize"))
    with stalled(other):
        address = torch.allocate(MIB, home)
        torch.record_stream(address, other.handle)
        torch.record_stream(address, other.handle)  # known
        torch.record_stream(address, home)  # its own
        events = sim.calls("cuEventRecord")
        torch.free(address)
        assert sim.calls("cuEventRecord") == events + 1
        assert live() == (0, 1)
        assert integrations.torch_statistics().pending_bytes == MIB
        assert pool.stats().live_bytes == MIB
        second = torch.allocate(MIB, home)
        assert second != address
        torch.free(second)
        assert live() == (0, 1)
    other.synchronize()
    waits += 1
    torch.free(torch.allocate(64, home))
    assert live() == (0, 0)
    assert pool.stats().live_bytes == 0
    queries = sim.calls("cuEventQuery")
    for _ in range(10):
        torch.free(torch.allocate(64, home))
    assert sim.calls("cuEventQuery") == queries
    now = sum(sim.calls(name) for name in ("cuStreamWaitEvent", "cuEventSynchronize", "cuStreamSynchronize"))
    assert now == waits


@pytest.mark.simulated
def test_several_streams_use_it(torch, streams, pool):
    home, a, b = streams().handle, streams(), streams()
    address = torch.allocate(MIB, home)
    torch.record_stream(address, a.handle)
    torch.record_stream(address, b.handle)
    torch.record_stream(address, 0)  # the legacy stream
    with stalled(b):
        with stalled(a):
            torch.free(address)
            torch.empty_cache()
            assert live() == (0, 1)
        a.synchronize()
        torch.empty_cache()
        assert live() == (0, 1)
    b.synchronize()
    ForeignStream(1).synchronize()
    torch.empty_cache()
    assert live() == (0, 0)
    assert pool.stats().live_bytes == 0


@pytest.mark.simulated
def test_what_is_pending_costs_two_questions_a_call(torch, streams, pool, sim):
    home, other = streams().handle, streams()
    with stalled(other):
        for address in [torch.allocate(1000, home) for _ in range(20)]:
            torch.record_stream(address, other.handle)
            torch.free(address)
        assert live() == (0, 20)
        before = sim.calls("cuEventQuery")
        last = torch.allocate(1000, home)
        assert sim.calls("cuEventQuery") <= before + 2
        torch.free(last)
    other.synchronize()
    torch.free(torch.allocate(1000, home))
    assert live() == (0, 0)


@pytest.mark.simulated
def test_without_room_what_is_pending_is_waited_for(torch, streams, sim):
    home, other = streams().handle, streams()
    with memory.using(memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0), maximum_bytes=4 * MIB)) as _:
        first = torch.allocate(3 * MIB, home)
        torch.record_stream(first, other.handle)
        with stalled_until_waited(other.handle, "cuEventSynchronize"):
            torch.free(first)
            second = torch.allocate(3 * MIB, home)
        assert live() == (1, 0)
        torch.free(second)


@pytest.mark.simulated
def test_failures_say_why(torch, streams, pool):
    tight = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0), maximum_bytes=4 * MIB)
    with memory.using(tight):
        kept = torch.allocate(MIB)
        words = f"^kina: the pool has no room for {8 * MIB} bytes: {MIB} bytes are live, .*a limit of {4 * MIB}"
        with pytest.raises(MemoryError, match=words):
            torch.allocate(8 * MIB)
        torch.free(kept)
    with pytest.raises(RuntimeError, match="no CUDA device of that ordinal"):
        torch.allocate(64, 0, 1000)
    with pytest.raises(RuntimeError, match="cuda:99 does not exist"):
        torch.allocate(64, 0, 99)
    with pytest.raises(RuntimeError, match="per-thread default stream"):
        torch.allocate(64, 2)
    with pytest.raises(RuntimeError, match="negative"):
        torch.allocate(-1)
    with foreign_context() as context, pytest.raises(RuntimeError, match="primary context of cuda:0"):
        torch.allocate(64, ForeignStream(context=context).handle)
    assert (live(), pool.stats().live_bytes, tight.stats().live_bytes) == ((0, 0), 0, 0)


@pytest.mark.simulated
def test_a_driver_that_refuses(torch, streams, pool, sim):
    stream = streams().handle
    torch.free(torch.allocate(64, stream))
    with sim.failing("cuStreamGetId", 1, 999), pytest.raises(RuntimeError, match=r"CUDA_ERROR_UNKNOWN \(999\)"):
        torch.allocate(64, stream)
    with sim.failing("cuMemAllocFromPoolAsync", 1, 2, from_then_on=True), pytest.raises(MemoryError, match="no room"):
        torch.allocate(64 * MIB, stream)
    torch.free(torch.allocate(64, stream))
    assert pool.stats().live_bytes == 0


@pytest.mark.simulated
def test_a_fence_that_fails_is_made_later(torch, streams, pool, sim):
    home, other = streams().handle, streams()
    address = torch.allocate(1000, home)
    torch.record_stream(address, other.handle)
    with sim.failing("cuEventRecord", 1, 1):
        torch.free(address)
    assert live() == (0, 1)
    torch.empty_cache()
    other.synchronize()
    torch.empty_cache()
    assert live() == (0, 0)


@pytest.mark.simulated
def test_other_contexts_are_no_obstacle(torch, streams, pool):
    stream = streams()
    with foreign_context() as context:
        for contexts in ((), (context,), (primary_context(), context)):
            with on_stack(*contexts):
                address = torch.allocate(1000, stream.handle)
                torch.record_stream(address, 0)
                torch.free(address)
    with on_stack(primary_context()):
        ok(driver.cuStreamSynchronize(driver.CUstream(1)))
    torch.empty_cache()
    assert live() == (0, 0)


@pytest.mark.simulated
@pytest.mark.multi_gpu
def test_two_devices(torch, pool):
    there = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(1))
    with memory.using(there):
        a, b = torch.allocate(100, 0, 0), torch.allocate(200, 0, 1)
    assert (pool.stats().live_bytes, there.stats().live_bytes) == (100, 200)
    torch.free(a)
    torch.free(b)
    assert (pool.stats().live_bytes, there.stats().live_bytes) == (0, 0)
    with pytest.raises(RuntimeError, match="primary context of cuda:0"):
        torch.allocate(64, ForeignStream(context=primary_context(1)).handle, 0)


def captured(stream: ForeignStream, act: Callable[[], None], mode: int = 0) -> None:
    """Act while this thread captures the stream, in global mode as PyTorch does; the capture must outlive it."""
    handle = driver.CUstream(stream.handle)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(mode)))
        act()
        graph = ok(driver.cuStreamEndCapture(handle))
        assert ok(driver.cuGraphGetNodes(graph))[1] == 0
        ok(driver.cuGraphDestroy(graph))


@pytest.mark.simulated
def test_a_captured_stream_is_refused(torch, streams, pool):
    fresh, known, beside = streams(), streams(), streams()
    for stream in (known, beside):
        torch.free(torch.allocate(64, stream.handle))

    def act() -> None:
        for stream in (fresh, known):
            with pytest.raises(RuntimeError, match="allocate before the capture begins"):
                torch.allocate(64, stream.handle)
        address = torch.allocate(8 * MIB, beside.handle)  # grows
        with pytest.raises(RuntimeError, match="allocate before the capture begins"):
            torch.record_stream(address, known.handle)
        torch.free(address)

    captured(known, lambda: captured_too(fresh, act))
    assert live() == (0, 0)
    torch.free(torch.allocate(64, fresh.handle))


def captured_too(stream: ForeignStream, act: Callable[[], None]) -> None:
    captured(stream, act, 2)  # in relaxed mode


@pytest.mark.simulated
@pytest.mark.parametrize("upstream", [memory.CudaAsyncMemoryResource, memory.PoolMemoryResource])
def test_what_is_dropped_in_a_capture_is_kept_until_it_ends(torch, streams, upstream):
    home, other = streams(), streams()
    below = memory.CudaAsyncMemoryResource(0)
    resource = below if upstream is memory.CudaAsyncMemoryResource else upstream(below)
    with memory.using(memory.StatisticsMemoryResource(resource)) as _:
        mine, lent = torch.allocate(MIB, home.handle), torch.allocate(MIB, other.handle)
        torch.record_stream(lent, home.handle)

        def act() -> None:
            torch.free(mine)
            torch.free(lent)
            torch.empty_cache()
            assert live() == (0, 2)

        captured(home, act)
        torch.empty_cache()
        home.synchronize()
        torch.empty_cache()
        assert live() == (0, 0)


@pytest.mark.simulated
def test_streams_that_end(torch, pool):
    """They are let go of before, whether memory of theirs is pending in the pool or not; ids tell them apart."""
    known = integrations.torch_statistics().streams
    for _ in range(50):
        stream = ForeignStream()
        first = torch.allocate(1000, stream.handle)
        with stalled(stream):
            torch.free(first)
            assert integrations.torch_statistics().streams == known + 1
            integrations.torch_release_stream(stream)
        integrations.torch_release_stream(stream)
        assert integrations.torch_statistics().streams == known
        stream.destroy()
    integrations.torch_release_stream(ForeignStream(0))
    with on_stack(primary_context()):
        ok(driver.cuCtxSynchronize())
    torch.free(torch.allocate(100 * MIB))
    pool.trim()
    assert pool.stats().live_bytes == 0
    with pytest.raises(kina.ArgumentError):
        integrations.torch_release_stream(object())


@pytest.mark.simulated
def test_a_handle_that_comes_back_names_another_stream():
    """The driver's ids tell streams apart; nothing of the old one is taken for the new one's."""

    def body():
        from helpers.torch_calls import TorchCalls

        from kina import memory
        from kina.memory import integrations

        torch, pool = TorchCalls(), memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0))
        keeper = ForeignStream()
        with memory.using(pool):
            kept = torch.allocate(1000, keeper.handle)
            numbers, handles = set(), set()
            for _ in range(3):
                stream = ForeignStream()
                address = torch.allocate(1000, stream.handle)
                torch.record_stream(kept, stream.handle)
                torch.free(address)
                numbers.update(each.stream_number for each in pool.stats().streams)
                handles.add(stream.handle)
                stream.synchronize()
                stream.destroy()
            assert len(handles) == 1
            assert len(numbers - {0}) == 4  # that of the keeper too
            assert integrations.torch_statistics().streams == 2

    run_body(body, KINA_SIM_REUSE_HANDLES="1")


@pytest.mark.simulated
def test_eight_threads(torch, streams, pool):
    """Each with its stream and one of all; some memory is used by a neighbour; half of them have a pool each."""
    handles = [streams().handle for _ in range(8)]
    shared = streams().handle
    own = [memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0)) for _ in range(8)]
    handed: list[int] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        mine: list[int] = []
        try:
            with memory.using(own[number] if number % 2 else pool):
                for _ in range(300):
                    address = torch.allocate(
                        draw.choice((64, 1000, 70_000, MIB)), draw.choice((handles[number], shared))
                    )
                    if draw.random() < 0.3:
                        torch.record_stream(address, handles[(number + 1) % 8])
                    (handed if draw.random() < 0.2 else mine).append(address)
                    if len(mine) > 5:
                        torch.free(mine.pop(draw.randrange(len(mine))))
                    if draw.random() < 0.1 and handed:
                        torch.free(handed.pop())  # of another thread, maybe
            for address in mine:
                torch.free(address)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for address in handed:
        torch.free(address)
    with on_stack(primary_context()):
        ok(driver.cuCtxSynchronize())
    torch.empty_cache()
    assert live() == (0, 0)
    assert [each.stats().live_allocations for each in (pool, *own)] == [0] * 9
    assert integrations.torch_statistics().unknown_frees >= 0


class BesideTheGil(TorchCalls):
    """PyTorch's functions in a thread that Python never saw, while the calling thread has the GIL and waits for it."""

    NAMES = ("allocate", "record_stream", "deallocate", "empty_cache")
    TRACED = "COVERAGE_PROCESS_START" in os.environ  # lines that are traced take the GIL

    def lend(self, nbytes: int, home: int, user: int) -> None:
        functions = [ctypes.cast(getattr(self._library, f"kina_torch_{name}"), ctypes.c_void_p) for name in self.NAMES]
        handles = ctypes.c_void_p(home), ctypes.c_void_p(user)
        hold = ctypes.c_int(not self.TRACED)
        self._call("call_beside_the_gil", *functions, ctypes.c_ssize_t(nbytes), *handles, hold)


@pytest.mark.simulated
@pytest.mark.parametrize("chosen", [True, False])
def test_the_first_use_of_a_stream_needs_no_gil(streams, chosen):
    """PyTorch may hold a lock meanwhile that a thread with the GIL waits for."""
    shared = integrations.default_pool(0)
    pool = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0)) if chosen else shared
    before, known = pool.stats(), integrations.torch_statistics()
    memory.set_default_resource(pool if chosen else None, 0)
    try:
        BesideTheGil().lend(1000, streams().handle, streams().handle)
    finally:
        memory.set_default_resource(None, 0)
    with on_stack(primary_context()):
        ok(driver.cuCtxSynchronize())
    TorchCalls().empty_cache()
    now = integrations.torch_statistics()
    assert (now.streams, now.unknown_frees) == (known.streams + 2, known.unknown_frees)
    assert live() == (0, 0)
    after = pool.stats()
    assert (after.total_allocations, after.live_bytes) == (before.total_allocations + 2, before.live_bytes)


@pytest.mark.simulated
def test_threads_that_use_a_new_stream_at_once_find_one(torch, streams, pool):
    barrier = threading.Barrier(4)
    handles = [streams().handle for _ in range(25)]
    known = integrations.torch_statistics().streams

    def work() -> None:
        for handle in handles:
            barrier.wait(60)
            with memory.using(pool):
                torch.free(torch.allocate(1000, handle))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert integrations.torch_statistics().streams == known + 25
    numbers = [each.stream_number for each in pool.stats().streams if each.stream_number]
    assert len(set(numbers)) == len(numbers) == 25
    assert pool.stats().live_bytes == 0


@pytest.mark.simulated
def test_a_failure_needs_no_gil(streams):
    memory.set_default_resource(memory.LimitingMemoryResource(memory.CudaAsyncMemoryResource(0), MIB), 0)
    try:
        with pytest.raises(MemoryError, match=f"{2 * MIB}"):
            BesideTheGil().lend(2 * MIB, streams().handle, 0)
    finally:
        memory.set_default_resource(None, 0)
    with pytest.raises(RuntimeError, match="per-thread default stream"):
        BesideTheGil().lend(64, streams().handle, 2)
    TorchCalls().empty_cache()


@pytest.mark.simulated
def test_resources_in_python(torch, streams):
    below = memory.CudaAsyncMemoryResource(0)

    class Counted(memory.MemoryResource):
        def __init__(self) -> None:
            super().__init__(upstream=below, supports_streams=True)
            self.live = 0
            self.refuse = False

        def _allocate(self, nbytes, stream):
            if self.refuse:
                raise ValueError("not today")
            self.live += 1
            return below.unsafe_allocate(nbytes, stream)

        def _deallocate(self, address, nbytes, stream):
            self.live -= 1
            below.unsafe_deallocate(address, nbytes, stream)

    resource = Counted()
    stream = streams().handle
    with memory.using(resource):
        address = torch.allocate(1000, stream)
        assert resource.live == 1
        resource.refuse = True
        with pytest.raises(RuntimeError, match="kina: ValueError: not today"):
            torch.allocate(1000, stream)
    torch.free(address)
    kina.memory.HostMemoryResource().allocate(1)  # whoever has the GIL next empties the queue
    assert resource.live == 0


@pytest.mark.simulated
def test_memory_without_stream_order_waits_for_its_stream(torch, streams, pool):
    stream, resource = streams(), memory.CudaMemoryResource(0)
    with memory.using(resource):
        torch.free(torch.allocate(64, stream.handle))
        stream.synchronize()
        with stalled(stream):
            torch.free(torch.allocate(MIB, stream.handle))
            assert resource.live_bytes >= MIB
            with memory.using(pool):
                torch.free(torch.allocate(64, stream.handle))
            assert resource.live_bytes >= MIB
        stream.synchronize()
        kept = torch.allocate(64, stream.handle)
        assert resource.live_bytes == 64
        torch.free(kept)


@pytest.mark.simulated
def test_memory_without_stream_order_that_is_short_is_waited_for(torch, streams):
    stream = streams().handle
    with memory.using(memory.LimitingMemoryResource(memory.CudaMemoryResource(0), 4 * MIB)):
        first = torch.allocate(3 * MIB, stream)
        with stalled_until_waited(stream, "cuEventSynchronize"):
            torch.free(first)
            second = torch.allocate(3 * MIB, stream)
        with pytest.raises(MemoryError, match=str(2 * MIB)):
            torch.allocate(2 * MIB, stream)
        torch.free(second)


@pytest.mark.simulated
def test_the_interpreter_ends_with_memory_out():
    def body():
        import atexit

        from helpers.torch_calls import TorchCalls

        sim = simulation()
        torch, home, other = TorchCalls(), ForeignStream(), ForeignStream()
        atexit._clear()  # kina's own comes first now, as it does for whoever was imported before it
        kept = [torch.allocate(1000, home.handle) for _ in range(8)]
        torch.record_stream(kept[0], other.handle)
        sim.stall(other.handle)
        torch.free(kept.pop(0))

    def freed_after_the_end():
        import atexit

        from helpers.torch_calls import TorchCalls

        atexit.register(lambda: [torch.free(address) for address in kept])
        import kina._core.storage  # noqa: F401

        torch = TorchCalls()
        kept = [torch.allocate(1000) for _ in range(8)]
        globals()["last"] = torch.allocate(1000)

    run_body(body)
    run_body(freed_after_the_end)


@pytest.mark.simulated
def test_a_forked_child():
    """There nothing is given back, and an allocation says why there is none."""

    def body():
        from helpers.torch_calls import TorchCalls

        sim = simulation()
        kina.Runtime(0)  # before the first fork of all, which a compiler may be
        torch, home, other = TorchCalls(), ForeignStream(), ForeignStream()
        address = torch.allocate(1000, home.handle)
        torch.record_stream(address, other.handle)
        before = sim.calls()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for handle in (home.handle, 0):
                    with pytest.raises(RuntimeError, match="forked"):
                        torch.allocate(1000, handle)
                torch.record_stream(address, home.handle)
                torch.free(address)
                torch.empty_cache()
                code = 0 if sim.calls() == before else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        torch.free(address)

    run_body(body)


@pytest.fixture
def fake_torch(monkeypatch) -> types.ModuleType:
    """What kina uses of PyTorch to make an allocator."""

    class Allocator:
        def __init__(self, path: str, allocate: str, free: str) -> None:
            self.names, self.addresses = (path, allocate, free), {}

        def allocator(self) -> Allocator:
            return self

        def set_record_stream_fn(self, address: int) -> None:
            self.addresses["record_stream"] = address

        def set_reset_fn(self, address: int) -> None:
            self.addresses["empty_cache"] = address

    made = types.ModuleType("torch")
    made.__version__ = "2.0"
    made._C = types.SimpleNamespace(_cuda_customAllocator=None)
    made.cuda = types.SimpleNamespace(memory=types.SimpleNamespace(CUDAPluggableAllocator=Allocator))
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.mark.simulated
def test_the_allocator_names_the_functions(fake_torch, monkeypatch):
    made = integrations.torch_allocator()
    library = ctypes.CDLL(made.names[0])
    assert made.names[1:] == ("kina_torch_allocate", "kina_torch_deallocate")
    for name in made.names[1:]:
        assert getattr(library, name)
    for name, address in made.addresses.items():
        assert address == ctypes.cast(getattr(library, f"kina_torch_{name}"), ctypes.c_void_p).value
    assert set(made.addresses) == {"record_stream", "empty_cache"}
    monkeypatch.delattr(fake_torch.cuda.memory.CUDAPluggableAllocator, "set_record_stream_fn")
    with pytest.raises(kina.UnsupportedError, match=r"PyTorch 2\.0 takes no record_stream"):
        integrations.torch_allocator()
    del fake_torch._C._cuda_customAllocator
    with pytest.raises(kina.UnsupportedError, match="built without CUDA"):
        integrations.torch_allocator()


# CuPy's and Numba's ---------------------------------------------------------------------------------------


def test_an_allocation_is_in_the_order_of_its_stream(pool):
    from kina.cuda.allocation import Allocation, allocate

    stream = ForeignStream()
    first = allocate(MIB, 0, stream)
    assert isinstance(first, Allocation)
    assert (first.nbytes, first.address % 256, pool.stats().live_bytes) == (MIB, 0, MIB)
    assert repr(first) == f"<kina.cuda.allocation.Allocation, {MIB} bytes>"
    address = first.address
    with stalled(stream):
        del first
        assert pool.stats().live_bytes == 0
        second = allocate(MIB, 0, stream)
        assert second.address == address
        other = allocate(MIB, 0)
        assert other.address != address
    assert allocate(0, 0).address == 0
    del second, other
    assert pool.stats().live_bytes == 0
    for wrong in (lambda: Allocation(), lambda: allocate(0, 0).__reduce__()):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(kina.ArgumentError):
        allocate("1", 0)
    with pytest.raises(kina.UnavailableError):
        allocate(1, 99)


def test_an_allocation_keeps_its_stream(pool):
    from kina.cuda.allocation import allocate

    made = [ForeignStream()]
    known = weakref.ref(made[0])
    held = in_thread(lambda: allocate(1000, 0, made[0]))  # the thread's own table of streams goes with it
    made.clear()
    gc.collect()
    assert known() is not None
    del held
    kina.memory.HostMemoryResource().allocate(1)  # whoever has the GIL next empties the queue
    assert known() is None


def test_the_driver_tells_how_much_is_free():
    from kina.cuda.allocation import memory_info

    free, total = memory_info(0)
    assert 0 < free <= total


@pytest.mark.simulated
def test_the_driver_does_not_tell(sim):
    from kina.cuda.allocation import memory_info

    memory_info(0)
    with sim.failing("cuMemGetInfo", 1, 999), pytest.raises(kina.DriverError, match="how much it has free"):
        memory_info(0)


@pytest.fixture
def cupy(monkeypatch) -> types.SimpleNamespace:
    """What kina uses of CuPy, which does not run on the simulated driver."""

    class OutOfMemoryError(MemoryError):
        def __init__(self, size, total, limit=0):
            raise AssertionError("its figures are CuPy's own")

    def memory_of(ptr, size, owner, device_id=-1):
        return types.SimpleNamespace(ptr=ptr, size=size, owner=owner, device_id=device_id)

    def pointer(mem, offset):
        return types.SimpleNamespace(mem=mem, ptr=mem.ptr + offset)

    stream = ForeignStream()
    cuda = types.SimpleNamespace(
        MemoryPointer=pointer,
        UnownedMemory=memory_of,
        device=types.SimpleNamespace(get_device_id=lambda: 0),
        get_current_stream=lambda: stream,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    )
    made = types.SimpleNamespace(cuda=cuda, stream=stream)
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr("kina.memory.integrations.cupy._error_class", None)
    return made


@pytest.mark.simulated
def test_memory_for_cupy(cupy, pool):
    array = integrations.cupy_allocator(1000)
    assert (array.mem.size, array.mem.device_id, pool.stats().live_bytes) == (1000, 0, 1000)
    assert array.ptr == array.mem.owner.address
    del array
    assert pool.stats().live_bytes == 0
    nothing = integrations.cupy_allocator(0)
    assert (nothing.ptr, nothing.mem.size, nothing.mem.device_id) == (0, 0, 0)


@pytest.mark.simulated
def test_cupy_has_no_memory(cupy):
    import pickle

    with memory.using(memory.LimitingMemoryResource(memory.CudaAsyncMemoryResource(0), MIB)):
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match=f"{2 * MIB}") as raised:
            integrations.cupy_allocator(2 * MIB)
        error = raised.value
        assert isinstance(error, kina.OutOfMemoryError)
        assert (error.requested, error.limit) == (2 * MIB, MIB)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kina.OutOfMemoryError
        assert (str(again), again.requested) == (str(error), error.requested)


@pytest.mark.simulated
def test_numba_asks_for_its_plugin_only_where_numba_is():
    """Its methods as Numba calls them, over a stand-in for Numba."""

    def body():
        import types

        class Base:
            def __init__(self, *args, **kwargs):
                self.context = kwargs.pop("context")
                self.allocations = {}

            def reset(self):
                self.allocations.clear()

        class Pointer:
            def __init__(self, context, pointer, size, finalizer):
                self.pointer, self.size, self.finalizer = pointer, size, finalizer

        cuda = types.ModuleType("numba.cuda")
        cuda.HostOnlyCUDAMemoryManager, cuda.MemoryPointer = Base, Pointer
        cuda.MemoryInfo = lambda free, total: (free, total)
        numba = types.ModuleType("numba")
        numba.cuda = cuda
        sys.modules.update({"numba": numba, "numba.cuda": cuda})
        from kina.memory.integrations import numba as room

        assert room._numba_memory_manager is room.NumbaMemoryManager
        assert room.NumbaMemoryManager(context=None).interface_version == 1
        manager = room.NumbaMemoryManager(context=types.SimpleNamespace(device=types.SimpleNamespace(id=0)))
        manager.initialize()
        pool = kina.memory.integrations.default_pool()
        first, second = manager.memalloc(1000), manager.memalloc(2000)
        assert (first.size, pool.stats().live_bytes) == (1000, 3000)
        assert manager.name == "kina"
        first.finalizer()
        first.finalizer()
        assert pool.stats().live_bytes == 2000
        with pytest.raises(kina.UnsupportedError, match="get_ipc_handle"):
            manager.get_ipc_handle(second)
        free, total = manager.get_memory_info()
        assert 0 < free <= total
        manager.reset()
        assert pool.stats().live_bytes == 0
        third = manager.memalloc(1000)
        second.finalizer()  # an array of the context that was reset
        assert pool.stats().live_bytes == 1000
        del third

    run_body(body)
    run_python(
        """
        import sys
        sys.modules["numba"] = None
        import kina
        from kina.memory.integrations import NumbaMemoryManager
        try:
            NumbaMemoryManager(context=None)
        except kina.UnsupportedError as error:
            assert "pip install numba-cuda" in str(error)
        else:
            raise AssertionError
        """
    )


# On hardware ----------------------------------------------------------------------------------------------


def run_libraries(*bodies: Callable[[], None], **env: str) -> str:
    """Run the bodies of functions, one after the other, in a process of its own; what they print.

    Other libraries may warn, so stderr is not looked at unless the process fails.
    """
    source = ["import gc, os, sys", "import numpy as np", "import pytest", "import kina"]
    source += ["from kina import memory", "from kina.memory import integrations", "MIB = 1 << 20"]
    for body in bodies:
        source += [textwrap.dedent(inspect.getsource(body)), f"{body.__name__}()"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(source)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def kina_for_torch() -> None:
    import torch

    pool = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0))
    memory.set_default_resource(pool, 0)  # for the threads of autograd too
    torch.cuda.memory.change_current_allocator(integrations.torch_allocator())
    globals().update(torch=torch, pool=pool)


def training() -> None:
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(512, 256, device="cuda"), torch.randn(512, 8, device="cuda")
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())


@pytest.mark.gpu
def test_torch_trains_on_it():
    """To the bit what it does with its own allocator."""

    def served() -> None:
        import torch

        stats, known = pool.stats(), integrations.torch_statistics()
        assert stats.total_allocations > 100
        assert stats.grown < 10
        assert stats.live_bytes == known.live_bytes > 0
        assert (known.pending_allocations, known.unknown_frees) == (0, 0)
        torch.cuda.empty_cache()
        with pytest.raises(RuntimeError, match="does not yet support"):
            torch.cuda.memory_stats()

    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    losses = run_libraries(kina_for_torch, training, served, **workspace)
    assert len(losses.split()) == 20
    assert losses == run_libraries(training, **workspace)


@pytest.mark.gpu
def test_torch_records_streams():
    def body() -> None:
        count = 1 << 20
        side = torch.cuda.Stream()

        def step(recorded: bool) -> None:
            x = torch.ones(count, device="cuda")
            with torch.cuda.stream(side):
                copied = torch.empty(count, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(400_000_000)  # a fifth of a second
                copied.copy_(x)
            if recorded:
                x.record_stream(side)
                x.record_stream(torch.cuda.current_stream())
            address = x.data_ptr()
            del x
            pending = integrations.torch_statistics().pending_allocations
            y = torch.full((count,), 7.0, device="cuda")
            assert pending == recorded
            assert not recorded or y.data_ptr() != address
            torch.cuda.synchronize()
            if recorded:
                assert copied.eq(1.0).all()
            assert y.eq(7.0).all()

        step(True)  # the first use of a kernel loads it, which may wait
        step(True)
        step(False)
        z = torch.ones(10, device="cuda")
        assert integrations.torch_statistics().pending_allocations == 0
        before = pool.stats().live_bytes
        del z
        assert pool.stats().live_bytes == before - 40
        foreign = torch.from_dlpack(kina.zeros(10, device="cuda:0"))
        foreign.record_stream(side)  # not PyTorch's memory: passed over

    run_libraries(kina_for_torch, body)


@pytest.mark.gpu
def test_torch_has_pools_of_its_own_over_it():
    """PyTorch holds a lock while it asks kina, which a thread with the GIL waits for to drop its tensors."""

    def body() -> None:
        import threading

        import torch

        integrations.default_pool(0)
        allocator = integrations.torch_allocator()
        pool = torch.cuda.MemPool(allocator.allocator())
        done = threading.Event()

        def churn() -> None:
            while not done.is_set():
                torch.empty(1000, device="cuda")

        threads = [threading.Thread(target=churn) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(32):  # as many streams as PyTorch has
                with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(pool):
                    x = torch.ones(MIB, device="cuda")
                    assert x.sum().item() == MIB
        finally:
            done.set()
            for thread in threads:
                thread.join()
        known = integrations.torch_statistics()
        assert known.live_bytes >= 4 * MIB
        assert known.streams >= 2
        assert integrations.default_pool(0).stats().live_bytes == known.live_bytes

    run_libraries(body)


@pytest.mark.gpu
def test_torch_is_told_why():
    def body() -> None:
        x = torch.ones(10, device="cuda")
        with memory.using(memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0), maximum_bytes=MIB)):
            with pytest.raises(RuntimeError, match=f"kina: the pool has no room for {4 * MIB} bytes"):
                torch.empty(MIB, device="cuda")
            y = torch.empty(1000, device="cuda")
        assert y.fill_(1.0).sum().item() == 1000
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="allocate before the capture begins"), torch.cuda.graph(graph):
            x + 1
        assert (x + 1).sum().item() == 20

    run_libraries(kina_for_torch, body)


@pytest.mark.gpu
def test_torch_ends_with_memory_out():
    """At exit, from threads, and from a thread that Python did not make."""

    def body() -> None:
        import threading

        failures = []

        def work() -> None:
            try:
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for size in range(1, 200):
                        x = torch.full((1000 * size,), 1.0, device="cuda", requires_grad=True)
                        (x * 2).sum().backward()
                        assert x.grad.sum().item() == 2000 * size
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        globals()["kept"] = [torch.ones(1000, device="cuda") for _ in range(10)]

    run_libraries(kina_for_torch, body)


@pytest.mark.gpu
def test_cupy_works_on_it():
    def body() -> None:
        import cupy

        cupy.cuda.set_allocator(integrations.cupy_allocator)
        count = 1 << 20
        pool = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0))
        stream = cupy.cuda.Stream(non_blocking=True)
        with memory.using(pool):
            a = cupy.arange(count, dtype="float64")
            assert pool.stats().live_bytes == 8 * count
            with stream:
                b = cupy.arange(count, dtype="float64") * 2
                assert float(b.sum()) == count * (count - 1)
            assert float(a.sum()) == count * (count - 1) / 2
            assert cupy.zeros(0).size == 0
            stream.synchronize()
            del a, b
            assert pool.stats().live_bytes == 0
        tight = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0), maximum_bytes=MIB)
        with memory.using(tight), pytest.raises(cupy.cuda.memory.OutOfMemoryError) as raised:
            cupy.empty(4 * MIB, dtype="uint8")
        assert isinstance(raised.value, kina.OutOfMemoryError)
        assert (raised.value.requested, raised.value.limit) == (4 * MIB, MIB)
        shared = integrations.default_pool(0)
        c = cupy.ones(count, dtype="float32")
        assert shared.stats().live_bytes == 4 * count
        assert float(c.sum()) == count

    run_libraries(body)


@pytest.mark.gpu
def test_numba_works_on_it():
    def body() -> None:
        np.row_stack = getattr(np, "row_stack", np.vstack)  # numba-cuda 0.30 asks for what NumPy 2.5 has no more
        from numba import cuda

        count = 1 << 16
        pool = integrations.default_pool(0)

        @cuda.jit
        def double(y, x):
            i = cuda.grid(1)
            if i < y.size:
                y[i] = 2 * x[i]

        x = cuda.to_device(np.arange(count, dtype=np.float32))
        assert pool.stats().live_bytes == 4 * count
        stream = cuda.stream()
        y = cuda.device_array(count, np.float32, stream=stream)
        double[count // 256, 256, stream](y, x)
        assert np.array_equal(y.copy_to_host(stream=stream), 2 * np.arange(count, dtype=np.float32))
        free, total = cuda.current_context().get_memory_info()
        assert 0 < free < total
        with pytest.raises(kina.UnsupportedError):
            x.get_ipc_handle()
        del x, y
        assert pool.stats().live_bytes == 0

    run_libraries(body, NUMBA_CUDA_MEMORY_MANAGER="kina.memory.integrations.numba")


@pytest.mark.gpu
def test_one_pool_under_all():
    def body() -> None:
        import cupy
        from numba import cuda

        cupy.cuda.set_allocator(integrations.cupy_allocator)
        cuda.set_memory_manager(integrations.NumbaMemoryManager)
        count = 1 << 20
        nbytes = 4 * count

        def step() -> None:
            before = pool.stats().live_bytes
            with kina.session("cuda:0") as session:
                k = session.full(count, 1.0)
                assert pool.stats().live_bytes - before == nbytes
                t = torch.full((count,), 2.0, device="cuda")
                assert pool.stats().live_bytes - before == 2 * nbytes
                c = cupy.full(count, 3.0, dtype="float32")
                assert pool.stats().live_bytes - before == 3 * nbytes
                n = cuda.to_device(np.full(count, 4.0, dtype=np.float32))
                assert pool.stats().live_bytes - before == 4 * nbytes
                parts = [torch.from_dlpack(k), t, torch.from_dlpack(c), torch.as_tensor(n, device="cuda")]
                total = torch.stack(parts).sum(0)
                assert total.eq(10.0).all()
                back = session.adopt(total)
                assert (session.to_host(back) == 10.0).all()
                del k, t, c, n, parts, total, back
                gc.collect()
                session.synchronize()
            gc.collect()
            assert pool.stats().live_bytes == before

        step()
        step()

    run_libraries(kina_for_torch, body)
