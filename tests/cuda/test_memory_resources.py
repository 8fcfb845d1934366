"""Memory resources over the driver: one suite over all and over compositions; then who serves CUDA sessions."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import pickle
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers.compiler import compile_c
from helpers.cuda import (
    ForeignStream,
    driver,
    during_a_capture,
    fork_body,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    simulation,
    stack,
    stalled,
    stream_of,
    unchanged,
    until,
    view,
)

import kina
from kina import memory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemFree", "cuMemFreeHost")


# Bottoms, and what stands on them --------------------------------------------------------------------------


class Pool:
    """A driver pool of somebody else."""

    def __init__(self, ordinal: int = 0) -> None:
        primary_context(ordinal)
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        self.handle = ok(driver.cuMemPoolCreate(properties))
        self.owned = True

    def attribute(self, name: str) -> int:
        return int(ok(driver.cuMemPoolGetAttribute(self.handle, getattr(driver.CUmemPool_attribute, name))))

    def destroy(self) -> None:
        if self.owned:
            self.owned = False
            ok(driver.cuMemPoolDestroy(self.handle))


def adopting() -> Any:
    return memory.CudaAsyncMemoryResource(adopt=Pool())


BOTTOMS = {
    "cuda": lambda: memory.CudaMemoryResource(),
    "async": lambda: memory.CudaAsyncMemoryResource(),
    "adopting": adopting,
    "managed": lambda: memory.ManagedMemoryResource(0),
    "pinned": lambda: memory.PinnedMemoryResource(),
}
ORDERED = ("async", "adopting")
ON_DEVICE = ("cuda", "async", "adopting", "managed")


class Passing(memory.MemoryResource):
    """An adaptor in Python, without stream order."""

    def __init__(self, upstream: Any) -> None:
        super().__init__(upstream=upstream)

    def _allocate(self, nbytes: int, stream: object) -> int:
        assert stream is None
        return self.upstream.unsafe_allocate(nbytes)

    def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
        assert stream is None
        self.upstream.unsafe_deallocate(address, nbytes)


class PassingInOrder(memory.MemoryResource):
    """One with stream order, where its upstream has it."""

    def __init__(self, upstream: Any) -> None:
        super().__init__(upstream=upstream, supports_streams=upstream.supports_streams)
        self.streams: list[object] = []

    def _allocate(self, nbytes: int, stream: object) -> int:
        self.streams.append(stream)
        return self.upstream.unsafe_allocate(nbytes, stream)

    def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
        self.streams.append(stream)
        self.upstream.unsafe_deallocate(address, nbytes, stream)


ADAPTORS: dict[str, Callable[[Any, Path], Any]] = {
    "statistics": lambda upstream, _folder: memory.StatisticsMemoryResource(upstream),
    "limiting": lambda upstream, _folder: memory.LimitingMemoryResource(upstream, 1 << 40),
    "tracking": lambda upstream, _folder: memory.TrackingMemoryResource(upstream, stacks=True),
    "logging": lambda upstream, folder: memory.LoggingMemoryResource(upstream, folder / "log.csv"),
    "python": lambda upstream, _folder: Passing(upstream),
    "python in order": lambda upstream, _folder: PassingInOrder(upstream),
}
COMPOSITIONS = [
    (),
    *((name,) for name in ADAPTORS),
    ("statistics", "limiting", "tracking"),
    ("tracking", "logging"),
    ("limiting", "python in order", "statistics"),
]
STACKS = [(names, bottom) for bottom in BOTTOMS for names in COMPOSITIONS]


def compose(names: tuple[str, ...], bottom: Any, folder: Path) -> Any:
    """The first name is the outermost."""
    for name in reversed(names):
        bottom = ADAPTORS[name](bottom, folder)
    return bottom


def settle() -> None:
    """What was dropped and waits for the collector, for the device, or for the GIL, is given back."""
    gc.collect()
    with on_stack(primary_context()):
        ok(driver.cuCtxSynchronize())  # streams of Runtimes that are gone too
    with kina.Runtime(0) as runtime, kina.session(runtime) as session:
        session.synchronize()
    memory.HostMemoryResource().allocate(0)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What is given back late may wait for the device, which must not be in a test that holds it up."""
    yield
    settle()


@pytest.fixture(params=STACKS, ids=lambda stack: " over ".join([*stack[0], stack[1]]))
def made(request: Any, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A composition and its bottom, of which nothing is out at the end."""
    names, name = request.param
    bottom = BOTTOMS[name]()
    yield compose(names, bottom, tmp_path), bottom
    settle()
    assert bottom.live_bytes == 0


@pytest.fixture
def resource(made: tuple[Any, Any]) -> Any:
    return made[0]


def watched(name: str) -> Iterator[Any]:
    """A bottom, of which nothing is out at the end."""
    made = BOTTOMS[name]()
    yield made
    settle()
    assert made.live_bytes == 0


@pytest.fixture(params=BOTTOMS)
def bottom(request: Any) -> Iterator[Any]:
    yield from watched(request.param)


@pytest.fixture(params=ON_DEVICE)
def on_device(request: Any) -> Iterator[Any]:
    yield from watched(request.param)


@pytest.fixture(params=ORDERED)
def ordered(request: Any) -> Iterator[Any]:
    yield from watched(request.param)


# The suite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, KIB, MIB])
def test_sizes(made, nbytes):
    resource, bottom = made
    buffer = resource.allocate(nbytes)
    assert (buffer.nbytes, len(buffer), buffer.device, buffer.freed) == (nbytes, nbytes, bottom.device, False)
    assert buffer.resource is resource
    assert buffer.unsafe_address() % 256 == 0
    assert (buffer.unsafe_address() == 0) == (nbytes == 0)
    assert bottom.live_bytes == nbytes
    buffer.free()
    assert buffer.freed
    assert bottom.live_bytes == 0
    with pytest.raises(kina.SessionClosedError):
        buffer.free()


@pytest.mark.simulated
def test_a_large_one():
    def body():
        for resource in (
            kina.memory.CudaMemoryResource(),
            kina.memory.CudaAsyncMemoryResource(),
            kina.memory.ManagedMemoryResource(),
            kina.memory.PinnedMemoryResource(),
        ):
            buffers = [resource.allocate(1 << 30) for _ in range(2)]
            assert resource.live_bytes == 2 << 30
            first, second = (buffer.unsafe_address() for buffer in buffers)
            assert abs(first - second) >= 1 << 30
            buffers.clear()
            assert resource.live_bytes == 0

    fork_body(body, KINA_SIM_POISON="0")


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (-1, kina.InvalidShapeError),
        (2**63, kina.InvalidShapeError),
        (2**64 + 5, kina.InvalidShapeError),
        (True, kina.ArgumentError),
        (1.0, kina.ArgumentError),
        (None, kina.ArgumentError),
    ],
)
def test_sizes_that_are_none(bottom, nbytes, error):
    for call in (bottom.allocate, bottom.unsafe_allocate, lambda n: bottom.unsafe_deallocate(0, n)):
        with pytest.raises(error):
            call(nbytes)
    assert bottom.live_bytes == 0


def test_live_memory_is_distinct(resource):
    buffers = [resource.allocate(nbytes) for nbytes in (1, 255, 256, 257, 1000, KIB, 3 * KIB)]
    spans = sorted((buffer.unsafe_address(), buffer.nbytes) for buffer in buffers)
    for (address, nbytes), (following, _) in itertools.pairwise(spans):
        assert address + nbytes <= following
    assert all(address % 256 == 0 for address, _ in spans)


def test_freed_on_another_thread(made):
    resource, bottom = made
    buffers = [resource.allocate(KIB) for _ in range(4)]
    in_thread(lambda: [buffer.free() for buffer in buffers])
    memory.HostMemoryResource().allocate(0)
    assert bottom.live_bytes == 0


def test_threads_at_once(made):
    resource, bottom = made
    failures = []

    def work():
        try:
            for number in range(20):
                kept = [resource.allocate(64 * (number + 1)) for _ in range(3)]
                kept[1].free()
                del kept
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    memory.HostMemoryResource().allocate(0)
    assert bottom.live_bytes == 0


@pytest.mark.parametrize(("names", "name"), STACKS, ids=lambda value: value if isinstance(value, str) else str(value))
def test_every_face_may_go_first(names, name, tmp_path):
    """The memory keeps what it needs, all the way down: upstreams first, then the outermost."""
    bottom = BOTTOMS[name]()
    stack = compose(names, bottom, tmp_path)
    gone = weakref.ref(bottom)
    watch = memory.StatisticsMemoryResource(bottom)
    del bottom
    gc.collect()
    buffer = stack.allocate(KIB)
    del stack
    gc.collect()
    assert buffer.nbytes == KIB
    buffer.free()
    del buffer, watch
    gc.collect()
    assert gone() is None


def test_cycles_are_collected(bottom):
    class Keeping(Passing):
        pass

    keeping = Keeping(bottom)
    keeping.kept = [keeping.allocate(KIB), keeping.allocate(0)]
    gone = weakref.ref(keeping)
    assert bottom.live_bytes == KIB
    del keeping
    gc.collect()
    assert gone() is None
    assert bottom.live_bytes == 0


def test_the_context_of_the_caller_comes_back(made, foreign):
    resource, bottom = made
    for contexts in ([], [foreign], [primary_context(), foreign]):
        with on_stack(*contexts), unchanged():
            buffer = resource.allocate(KIB)
            resource.unsafe_deallocate(resource.unsafe_allocate(10), 10)
            buffer.free()
            del buffer
            with pytest.raises(kina.ArgumentError):
                resource.allocate(KIB, stream=3.5)
    assert bottom.live_bytes == 0


@pytest.mark.multi_gpu
def test_the_device_is_switched_in_between(made):
    resource, bottom = made
    with on_stack(primary_context(1)), unchanged():
        first = resource.allocate(KIB)
    with on_stack(primary_context(0)):
        second = resource.allocate(KIB)
    if bottom.device == "cuda:0":
        for buffer in (first, second):
            attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            assert ok(driver.cuPointerGetAttribute(attribute, buffer.unsafe_address())) == 0
    with on_stack(primary_context(1)), unchanged():
        second.free()
        del first
    memory.HostMemoryResource().allocate(0)
    assert bottom.live_bytes == 0


def test_what_is_said_of_them(bottom):
    assert bottom.name == type(bottom).__name__
    assert bottom.upstream is None
    assert bottom.supports_streams == (bottom.name == "CudaAsyncMemoryResource")
    assert bottom.device == ("cpu" if bottom.name == "PinnedMemoryResource" else "cuda:0")
    assert bottom.name in repr(bottom)
    with pytest.raises(TypeError):
        pickle.dumps(bottom)
    with pytest.raises(kina.ArgumentError, match="initialised already"):
        bottom.__init__()


@pytest.mark.parametrize("kind", ["CudaMemoryResource", "CudaAsyncMemoryResource", "ManagedMemoryResource"])
def test_devices(kind):
    make = getattr(memory, kind)
    assert make("cuda:0").device == make("cuda").device == make(kina.DeviceId(0)).device == "cuda:0"
    for wrong, error in (
        (99, kina.UnavailableError),
        ("cpu", kina.InvalidConfigError),
        ("tpu", kina.InvalidConfigError),
        (1.5, kina.InvalidConfigError),
    ):
        with pytest.raises(error):
            make(wrong)


# Streams --------------------------------------------------------------------------------------------------


def last_stream(sim: Any, since: int, name: str) -> int:
    return [record["stream"] for record in sim.trace(since, name=name, event="call")][-1]


@pytest.mark.simulated
def test_whose_order(ordered, sim):
    """A Runtime's, a session's, an adopted stream's, that of the thread's default Runtime; none at all."""
    runtime = kina.Runtime(0)
    foreign = ForeignStream()
    with kina.session(runtime) as session, kina.session("cuda:0") as default:
        own, its = stream_of(session), stream_of(default)
        for stream, handle in ((runtime, own), (session, own), (foreign, foreign.handle), (None, its)):
            since = sim.position
            buffer = ordered.allocate(KIB, stream)
            assert last_stream(sim, since, "cuMemAllocFromPoolAsync") == handle
            del buffer
            assert last_stream(sim, since, "cuMemFreeAsync") == handle
            buffer = ordered.allocate(KIB, session)
            buffer.free(stream)
            assert last_stream(sim, since, "cuMemFreeAsync") == (own if stream is None else handle)
            since = sim.position
            address = ordered.unsafe_allocate(KIB, stream)
            ordered.unsafe_deallocate(address, KIB, stream)
            private = {last_stream(sim, since, f"cuMem{name}Async") for name in ("AllocFromPool", "Free")}
            assert len(private) == 1
            assert (private == {handle}) == (stream is not None)
    del runtime


def test_freed_behind_the_work_of_another_stream(ordered):
    """Free in the order of the stream that uses it last: what takes the memory there comes after that."""
    one, other = kina.Runtime(0), kina.Runtime(0)
    with kina.session(one) as first, kina.session(other) as second:
        buffer = ordered.allocate(4 * MIB, first)
        address = buffer.unsafe_address()
        copied = second.zeros(MIB)
        second.synchronize()
        first.synchronize()
        with on_stack(primary_context()), stalled(second):
            stream = driver.CUstream(stream_of(second))
            ok(driver.cuMemsetD32Async(address, 7, MIB, stream))
            ok(driver.cuMemcpyDtoDAsync(view(second, copied), address, 4 * MIB, stream))
            buffer.free(second)
            taken = ordered.allocate(4 * MIB, first)
            ok(driver.cuMemsetD32Async(taken.unsafe_address(), 9, MIB, driver.CUstream(stream_of(first))))
        assert set(second.to_host(copied).view(np.uint32)) == {7}
        first.synchronize()


@pytest.mark.simulated
def test_nothing_waits_in_the_order_of_a_stream(ordered, sim):
    buffers: list[Any] = []
    with kina.session(kina.Runtime(0)) as session, kina.session(kina.Runtime(0)) as other, stalled(session):
        buffers.append(ordered.allocate(KIB, session))  # what is made at the first time
        buffers.clear()
        waited, counts = ordered.host_waits, sim.call_counts()
        for nbytes in (1, KIB, MIB):
            buffers += [ordered.allocate(nbytes, session) for _ in range(4)]
            event = ok(driver.cuEventCreate(0))  # whoever frees on another stream has put it behind the first
            ok(driver.cuEventRecord(event, driver.CUstream(stream_of(session))))
            ok(driver.cuStreamWaitEvent(driver.CUstream(stream_of(other)), event, 0))
            ok(driver.cuEventDestroy(event))
            buffers.pop().free(other)
            ordered.unsafe_deallocate(ordered.unsafe_allocate(nbytes, session), nbytes, session)
        buffers.clear()
        after = sim.call_counts()
        assert {name: after.get(name, 0) - counts.get(name, 0) for name in WAITS} == dict.fromkeys(WAITS, 0)
        assert ordered.host_waits == waited


@pytest.mark.simulated
def test_what_waits_is_counted(sim):
    plain, pooled = memory.CudaMemoryResource(), memory.CudaAsyncMemoryResource()
    plain.allocate(10).free()
    assert plain.host_waits == 1
    waits = sim.calls("cuStreamSynchronize")
    address = pooled.unsafe_allocate(10)
    assert (pooled.host_waits, sim.calls("cuStreamSynchronize") - waits) == (1, 1)
    since = sim.position
    pooled.unsafe_deallocate(address, 10)
    assert pooled.host_waits == 1
    assert not [record for record in sim.trace(since, event="call") if record["name"] in WAITS]


def test_without_a_stream_it_is_usable_at_once(ordered):
    """Nothing of what it was before is still to come, whatever was pending where it was freed."""
    one, other = kina.Runtime(0), kina.Runtime(0)
    with kina.session(one) as first, kina.session(other) as second:
        kept = second.zeros(100)
        second.synchronize()
        with on_stack(primary_context()), stalled(first):
            buffer = ordered.allocate(4 * MIB, first)
            ok(driver.cuMemsetD32Async(buffer.unsafe_address(), 1, MIB, driver.CUstream(stream_of(first))))
            buffer.free()
            address = ordered.unsafe_allocate(4 * MIB)
            stream = driver.CUstream(stream_of(second))
            ok(driver.cuMemsetD32Async(address, 2, MIB, stream))
            ok(driver.cuMemcpyDtoDAsync(view(second, kept), address, 400, stream))
        assert set(second.to_host(kept).view(np.uint32)) == {2}
        ordered.unsafe_deallocate(address, 4 * MIB)


@pytest.mark.multi_gpu
def test_a_stream_of_another_device(ordered):
    there = kina.Runtime(1)
    buffer = ordered.allocate(KIB)
    address = ordered.unsafe_allocate(KIB)
    far = ForeignStream(context=primary_context(1))
    with kina.session(there) as session:
        for stream in (there, session, far):
            for use in (
                lambda stream=stream: ordered.allocate(KIB, stream),
                lambda stream=stream: ordered.unsafe_allocate(KIB, stream),
                lambda stream=stream: ordered.unsafe_deallocate(address, KIB, stream),
                lambda stream=stream: buffer.free(stream),
            ):
                with pytest.raises(kina.ForeignDeviceError):
                    use()
    assert not buffer.freed
    assert ordered.live_bytes == 2 * KIB
    ordered.unsafe_deallocate(address, KIB)
    buffer.free()
    far.destroy()


@pytest.mark.parametrize("wrong", [5, "cuda:0", object(), 0])
def test_what_is_no_stream(ordered, wrong):
    buffer = ordered.allocate(KIB)
    for use in (
        lambda: ordered.allocate(KIB, wrong),
        lambda: ordered.unsafe_allocate(KIB, wrong),
        lambda: ordered.unsafe_deallocate(0, KIB, wrong),
        lambda: buffer.free(wrong),
    ):
        with pytest.raises(kina.ArgumentError, match="is no stream"):
            use()
    assert not buffer.freed


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_default_stream(ordered, handle):
    legacy = ForeignStream(handle)
    kept = [ordered.allocate(KIB, legacy) for _ in range(2)]
    kept.pop().free()
    kept.pop().free(legacy)
    ordered.unsafe_deallocate(ordered.unsafe_allocate(KIB, legacy), KIB, legacy)
    legacy.synchronize()


def test_the_per_thread_default_stream(ordered):
    with pytest.raises(kina.UnsupportedError, match="per-thread"):
        ordered.allocate(1, ForeignStream(2))


def test_streams_that_have_ended(ordered):
    closed = kina.Runtime(0)
    closed.close()
    session = kina.session("cuda:0")
    with pytest.raises(kina.SessionClosedError, match="not been entered"):
        ordered.allocate(1, session)
    with session:
        pass
    for stream in (closed, session):
        with pytest.raises(kina.SessionClosedError, match=r"closed|ended"):
            ordered.allocate(1, stream)


def test_a_captured_stream_is_refused(ordered):
    stream = ForeignStream()
    ordered.allocate(1, stream).free()
    runtime = kina.Runtime(0, stream=stream)
    handle = driver.CUstream(stream.handle)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        for captured in (stream, runtime):
            with pytest.raises(kina.UnsupportedError, match="captured"):
                ordered.allocate(1, captured)
    finally:
        with on_stack(primary_context()):
            ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(handle))))
    ordered.allocate(1, runtime).free()


@pytest.mark.parametrize("name", ["cuda", "managed", "pinned"])
def test_memory_without_stream_order_takes_no_stream(name):
    resource = BOTTOMS[name]()
    buffer = resource.allocate(KIB)
    with kina.session("cuda:0") as session:
        for use in (
            lambda: resource.allocate(1, session),
            lambda: resource.unsafe_allocate(1, session),
            lambda: resource.unsafe_deallocate(0, 1, session),
            lambda: buffer.free(session),
        ):
            with pytest.raises(kina.ArgumentError, match="not ordered by streams"):
                use()
    assert not buffer.freed


def test_a_buffer_holds_its_stream(ordered):
    runtime = kina.Runtime(0)
    buffer = ordered.allocate(KIB, runtime)
    runtime.close()
    del runtime
    gc.collect()
    buffer.free()


def test_what_a_resource_in_python_is_told(ordered):
    told = PassingInOrder(ordered)
    with kina.session(kina.Runtime(0)) as session:
        handle = stream_of(session)
        buffer = told.allocate(KIB, session)
        tensor = session.full(10, 2.0, memory=told)
        buffer.free()
        del tensor
        address = told.unsafe_allocate(1)
        told.unsafe_deallocate(address, 1)
        heard, told.streams = told.streams, []
    assert heard[4:] == [None, None]
    assert [stream.__cuda_stream__() for stream in heard[:4]] == [(0, handle)] * 4
    assert len({*heard[:4]}) == 1
    assert heard[0].device == "cuda:0"
    assert "cuda:0" in repr(heard[0])
    assert isinstance(heard[0], kina.cuda.HomeStream)
    with pytest.raises(TypeError):
        kina.cuda.HomeStream()
    with pytest.raises(TypeError):
        pickle.dumps(heard[0])
    gc.collect()  # it holds the stream
    ordered.allocate(1, heard[0]).free()


# Pools ----------------------------------------------------------------------------------------------------


def test_an_adopted_pool_serves_and_stays_its_owners():
    for form in (lambda pool: pool, lambda pool: int(pool.handle)):
        pool = Pool()
        resource = memory.CudaAsyncMemoryResource(adopt=form(pool))
        assert resource.unsafe_pool_handle() == int(pool.handle)
        with kina.session("cuda:0") as session:
            buffer = resource.allocate(KIB)
            assert pool.attribute("CU_MEMPOOL_ATTR_USED_MEM_CURRENT") >= KIB
            buffer.free()
            session.synchronize()
        del resource, buffer
        settle()
        assert pool.attribute("CU_MEMPOOL_ATTR_USED_MEM_CURRENT") == 0  # it is there
        pool.destroy()


def test_the_owner_of_an_adopted_pool_is_held():
    pool = Pool()
    gone = weakref.ref(pool)
    resource = memory.CudaAsyncMemoryResource(adopt=pool)
    del pool
    gc.collect()
    assert gone() is not None
    buffer = resource.allocate(1)
    del resource
    gc.collect()
    assert gone() is not None
    del buffer
    settle()
    assert gone() is None


def test_what_cannot_be_adopted():
    for wrong, error in (("pool", kina.ArgumentError), (0, kina.InvalidConfigError), (True, kina.InvalidConfigError)):
        with pytest.raises(error):
            memory.CudaAsyncMemoryResource(adopt=wrong)


@pytest.mark.multi_gpu
def test_a_pool_of_another_device():
    pool = Pool(1)
    with unchanged(), pytest.raises(kina.ForeignDeviceError, match="cuda:1"):
        memory.CudaAsyncMemoryResource(0, adopt=pool)
    settle()
    memory.CudaAsyncMemoryResource(1, adopt=pool).allocate(KIB).free()
    with kina.session("cuda:1") as session:
        session.synchronize()
    pool.destroy()


def test_the_release_threshold():
    pool = Pool()
    memory.CudaAsyncMemoryResource(adopt=pool)
    assert pool.attribute("CU_MEMPOOL_ATTR_RELEASE_THRESHOLD") == 0  # as its owner left it
    memory.CudaAsyncMemoryResource(adopt=pool, release_threshold=5 * MIB)
    assert pool.attribute("CU_MEMPOOL_ATTR_RELEASE_THRESHOLD") == 5 * MIB

    def threshold(resource: Any) -> int:
        name = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        return int(ok(driver.cuMemPoolGetAttribute(driver.CUmemoryPool(resource.unsafe_pool_handle()), name)))

    resource = memory.CudaAsyncMemoryResource(release_threshold=MIB)
    assert threshold(resource) == MIB
    handle = resource.unsafe_pool_handle()
    del resource
    resource = memory.CudaAsyncMemoryResource()  # the same pool again, as new
    assert resource.unsafe_pool_handle() == handle
    assert threshold(resource) == 2**64 - 1


def test_initial_bytes():
    resource = memory.CudaAsyncMemoryResource(initial_bytes=64 * MIB)
    name = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
    assert int(ok(driver.cuMemPoolGetAttribute(driver.CUmemoryPool(resource.unsafe_pool_handle()), name))) >= 64 * MIB
    assert resource.live_bytes == 0
    for wrong, error in (
        ({"initial_bytes": -1}, kina.InvalidShapeError),
        ({"release_threshold": -1}, kina.InvalidShapeError),
        ({"release_threshold": 1.5}, kina.ArgumentError),
        ({"initial_bytes": 2 * MIB, "release_threshold": MIB}, kina.InvalidConfigError),
    ):
        with pytest.raises(error):
            memory.CudaAsyncMemoryResource(**wrong)


@pytest.mark.simulated
def test_pools_are_not_destroyed(sim):
    memory.CudaAsyncMemoryResource()
    before = sim.live()["pools"], sim.calls("cuMemPoolDestroy")
    for _ in range(5):
        memory.CudaAsyncMemoryResource().allocate(KIB).free()
    assert (sim.live()["pools"], sim.calls("cuMemPoolDestroy")) == before


@pytest.mark.simulated
def test_a_device_without_pools():
    """Then it is as cuMemAlloc and cuMemFree are, and takes streams all the same."""

    def body():
        sim = simulation()
        resource = kina.memory.CudaAsyncMemoryResource()
        assert resource.supports_streams
        assert resource.unsafe_pool_handle() == 0
        with kina.session("cuda:0", memory=resource) as session:
            with stalled(session):
                tensor = session.full(1000, 3.0)
                copied = session.copy(tensor, memory=resource)
                buffer = resource.allocate(100, session)
            del tensor
            assert session.to_host(copied).tolist() == [3.0] * 1000
            buffer.free(session)
        del copied
        resource.unsafe_deallocate(resource.unsafe_allocate(5), 5)
        assert (resource.live_bytes, resource.host_waits) == (0, 4)
        assert sim.calls("cuMemFree") == 4
        assert sim.calls("cuMemAllocFromPoolAsync") == sim.calls("cuMemPoolCreate") == 0
        with pytest.raises(kina.UnsupportedError, match="no memory pools"):
            kina.memory.CudaAsyncMemoryResource(adopt=5)

    fork_body(body, KINA_SIM_POOLS="0")


# Failures -------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("code", [1, 2, 900, 999])
@pytest.mark.parametrize("kind", ["CudaMemoryResource", "CudaAsyncMemoryResource", "ManagedMemoryResource",
                                  "PinnedMemoryResource"])  # fmt: skip
def test_any_driver_call_fails(kind, code):
    """Typed, with the driver's answer; what was allocated is given back, or stays counted where its release failed."""

    def body(kind, code):
        import logging

        sim = simulation()
        logging.getLogger("kina").addHandler(logging.NullHandler())  # a failed restore is said there
        make = getattr(kina.memory, kind)
        steps = [
            lambda kept: kept.append(make()),
            lambda kept: kept.append(kept[0].allocate(1000)),
            lambda kept: kept.pop().free(),
            lambda kept: kept.append(kept[0].unsafe_allocate(1000)),
            lambda kept: kept[0].unsafe_deallocate(kept.pop(), 1000),
        ]
        for prepared in range(len(steps)):
            for nth in range(1, 100):
                kept, error = [], None
                for step in steps[:prepared]:
                    step(kept)
                since = sim.position
                with unchanged():
                    sim.fail("*", nth, code)
                    try:
                        steps[prepared](kept)
                    except kina.KinaError as raised:
                        error = raised.with_traceback(None)
                    delivered = sim.faults_delivered
                    sim.clear_faults()
                    for _ in stack():  # a failed restore is logged, and this test's to mend
                        ok(driver.cuCtxPopCurrent())
                if not delivered:
                    break
                failed = [r["name"] for r in sim.trace(since, event="call") if r.get("injected")]
                if error is not None:
                    assert error.operation, (failed, error)
                    assert error.driver_error.code == code, (failed, error)
                    if code == 2:
                        assert isinstance(error, (kina.OutOfMemoryError, kina.UnavailableError)), (failed, error)
                if kept and not isinstance(kept[0], list):
                    left = kept[0].live_bytes
                    held = sum(1000 for one in kept[1:] if one)
                    assert left == held or (error is None and prepared in (2, 4)), (failed, left, held)
                for one in kept[1:]:
                    if isinstance(one, int):
                        kept[0].unsafe_deallocate(one, 1000)
                del kept
                again = make()
                again.allocate(10).free()
                assert again.live_bytes == 0
            else:
                raise AssertionError("no end of calls")

    fork_body(body, kind, code)


@pytest.mark.simulated
@pytest.mark.parametrize("kind", ["CudaMemoryResource", "CudaAsyncMemoryResource", "ManagedMemoryResource"])
def test_a_device_that_is_gone(kind):
    """Frees leak in silence, allocations say why."""

    def body(kind):
        sim = simulation()
        resource = getattr(kina.memory, kind)()
        buffer = resource.allocate(100)
        with kina.session("cuda:0", memory=resource) as session:
            tensor = session.zeros(10)
            sim.break_device(0, 700)
            with pytest.raises(kina.SynchronizeError):
                session.synchronize()
        buffer.free()
        del tensor
        gc.collect()
        with pytest.raises(kina.RuntimePoisonedError):
            resource.allocate(1)
        assert resource.live_bytes == 140
        del resource

    fork_body(body, kind)


@pytest.mark.simulated
@pytest.mark.parametrize("kind", ["CudaMemoryResource", "CudaAsyncMemoryResource"])
def test_running_out(kind):
    def body(kind):
        sim = simulation()
        resource = getattr(kina.memory, kind)()
        kept = resource.allocate(100 << 20)
        with pytest.raises(kina.OutOfMemoryError) as raised:
            resource.allocate(500 << 20)
        error = raised.value
        assert (error.requested, error.live) == (500 << 20, 100 << 20)
        assert 0.9 * (256 << 20) < error.limit <= 256 << 20
        assert error.driver_error.code == 2
        assert str(500 << 20) in str(error)
        # What a Runtime and another resource cache, and what is not freed yet, comes back before it is given up.
        other = kina.memory.CudaAsyncMemoryResource()
        with kina.session("cuda:0") as session:
            tensor = session.zeros(60 << 20, "uint8")
            del tensor
            other.allocate(60 << 20, session).free()
            sim.set_latency_us(10000)
            tensor = session.zeros(20 << 20, "uint8", memory=resource)
            del tensor
            sim.set_latency_us(0)
            waits = resource.host_waits
            resource.allocate(150 << 20).free()
            assert resource.host_waits > waits
        kept.free()

    fork_body(body, kind, KINA_SIM_MEMORY=str(256 << 20))


@pytest.mark.simulated
def test_running_out_of_managed_memory(sim):
    """It may be more than the device has, so the driver has to be told to refuse it."""
    resource = memory.ManagedMemoryResource()
    kept = resource.allocate(MIB)
    with sim.failing("cuMemAllocManaged", 1, 2, from_then_on=True), pytest.raises(kina.OutOfMemoryError) as raised:
        resource.allocate(KIB)
    assert (raised.value.requested, raised.value.live, raised.value.driver_error.code) == (KIB, MIB, 2)
    with sim.failing("cuMemAllocManaged", 1, 2):  # once: the next attempt succeeds
        resource.allocate(KIB).free()
    kept.free()


@pytest.mark.simulated
def test_a_runtime_takes_what_a_resource_caches():
    def body():
        resource = kina.memory.CudaAsyncMemoryResource()
        with kina.session("cuda:0") as session:
            resource.allocate(200 << 20, session).free()
            assert session.to_host(session.full(150 << 20, 3, "uint8"))[-1] == 3

    fork_body(body, KINA_SIM_MEMORY=str(256 << 20))


def test_running_out_of_pinned_memory():
    resource = memory.PinnedMemoryResource()
    with pytest.raises(kina.OutOfMemoryError) as raised:
        resource.allocate(2**62)
    assert raised.value.requested == 2**62
    assert raised.value.live == 0
    assert "pinned" in str(raised.value)


@pytest.mark.parametrize("kind", ["CudaMemoryResource", "CudaAsyncMemoryResource", "ManagedMemoryResource",
                                  "PinnedMemoryResource"])  # fmt: skip
def test_a_capture_of_another_thread_lives(kind):
    def body(kind):
        make = getattr(kina.memory, kind)
        resource = make()
        kept = [resource.allocate(100)]

        def act():
            resource.allocate(1000).free()
            kept.pop().free()
            resource.unsafe_deallocate(resource.unsafe_allocate(7), 7)
            assert resource.live_bytes == 0
            make().allocate(8).free()
            if kind == "CudaAsyncMemoryResource":
                make(release_threshold=1 << 20, initial_bytes=1 << 20).allocate(8).free()
            if kind != "PinnedMemoryResource":
                with pytest.raises(kina.OutOfMemoryError):
                    resource.allocate(1 << 60)

        resource.unsafe_deallocate(resource.unsafe_allocate(7), 7)
        during_a_capture(act)

    fork_body(body, kind)


# Sessions: whose memory -----------------------------------------------------------------------------------


@pytest.fixture
def counted() -> list[Any]:
    return [memory.StatisticsMemoryResource(memory.CudaAsyncMemoryResource()) for _ in range(5)]


def served(resources: list[Any]) -> list[int]:
    return [resource.counts().total_count for resource in resources]


MAKERS: dict[str, Callable[..., Any]] = {
    "empty": lambda s, **m: s.empty(3, **m),
    "zeros": lambda s, **m: s.zeros(3, **m),
    "full": lambda s, **m: s.full(3, 1, **m),
    "from_host": lambda s, **m: s.from_host(np.ones(3, np.float32), **m),
    "copy": lambda s, **m: s.copy(s.zeros(3, memory=memory.CudaMemoryResource()), **m),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_whose_memory_it_is(counted, maker):
    """The call's, the innermost block's, the session's, the Runtime's, the default's; else the Runtime's own pool."""
    make = MAKERS[maker]
    of_call, of_block, of_session, of_runtime, default = counted
    runtime = kina.Runtime(0, memory=of_runtime)
    memory.set_default_resource(default, "cuda:0")
    try:
        with kina.session(runtime, memory=of_session) as session, memory.using(of_block):
            make(session, memory=of_call)
            assert served(counted) == [1, 0, 0, 0, 0]
            make(session)
            assert served(counted) == [1, 1, 0, 0, 0]
        with kina.session(runtime, memory=of_session) as session:
            make(session)
            assert served(counted) == [1, 1, 1, 0, 0]
        with kina.session(runtime) as session:
            make(session)
            assert served(counted) == [1, 1, 1, 1, 0]
            own = session.counters().allocations
        with kina.session(kina.Runtime(0)) as session:
            make(session)
            assert served(counted) == [1, 1, 1, 1, 1]
        memory.set_default_resource(None, "cuda:0")
        with kina.session(kina.Runtime(0)) as session:
            make(session)
            assert served(counted) == [1, 1, 1, 1, 1]
            assert session.counters().allocations == own + 1
    finally:
        memory.set_default_resource(None, "cuda:0")


def test_a_block_of_another_device_hides_nothing(counted, session):
    outer, inner = counted[:2]
    with memory.using(outer), memory.using(memory.HostMemoryResource()):
        session.zeros(3)
        with memory.using(inner):
            session.zeros(3)
            kina.zeros(3, device="cpu")
        session.zeros(3)
    session.zeros(3)
    assert served(counted[:2]) == [2, 1]
    assert session.counters().allocations == 1


def test_blocks_are_the_threads_own(counted, runtime):
    def elsewhere():
        with kina.session(runtime) as session:
            session.zeros(3)
            assert memory.current_resource(0).name == "PoolMemoryResource"

    with memory.using(counted[0]):
        in_thread(elsewhere)
    assert served(counted[:1]) == [0]


def test_switching_while_others_allocate():
    stop = threading.Event()
    failures: list[BaseException] = []

    def work():
        try:
            with kina.session("cuda:0") as session:
                while not stop.is_set():
                    assert session.to_host(session.full(16, 2.0)).tolist() == [2.0] * 16
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(40):
            make = (memory.CudaMemoryResource, memory.CudaAsyncMemoryResource)[number % 2]
            memory.set_default_resource(memory.StatisticsMemoryResource(make()), 0)
    finally:
        memory.set_default_resource(None, 0)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_the_current_resource():
    own = memory.current_resource("cuda:0")
    assert (own.name, own.device, own.supports_streams) == ("PoolMemoryResource", "cuda:0", True)
    with kina.session("cuda:0") as session:
        before = session.counters()
        buffer = own.allocate(KIB)
        assert session.counters().allocations == before.allocations + 1
        assert session.counters().live_bytes == before.live_bytes + KIB
        buffer.free()
        own.unsafe_deallocate(own.unsafe_allocate(5), 5)
        assert session.counters().frees == before.frees + 2
        with kina.session(kina.Runtime(0), memory=memory.StatisticsMemoryResource(own)) as other:
            assert other.to_host(other.full(3, 2.0)).tolist() == [2.0] * 3
            assert other.counters().allocations == 0
    chosen = memory.CudaMemoryResource()
    with memory.using(chosen):
        assert memory.current_resource(0) is chosen


def test_the_pool_of_a_runtime_outlives_its_thread():
    own = in_thread(lambda: memory.current_resource("cuda:0"))
    with kina.session(kina.Runtime(0)) as session:
        tensor = session.full(10, 2.0, memory=memory.StatisticsMemoryResource(own))
        del own
        gc.collect()
        assert session.to_host(tensor).tolist() == [2.0] * 10
    del tensor, session
    settle()


@pytest.mark.multi_gpu
def test_memory_of_another_device(session):
    for far in (memory.CudaMemoryResource(1), memory.CudaAsyncMemoryResource(1), memory.ManagedMemoryResource(1),
                memory.HostMemoryResource(), memory.PinnedMemoryResource()):  # fmt: skip
        before = session.counters()
        for use in (
            lambda far=far: session.empty(3, memory=far),
            lambda far=far: session.zeros(3, memory=far),
            lambda far=far: session.full(3, 1, memory=far),
            lambda far=far: session.from_host([1.0], memory=far),
            lambda far=far: kina.session("cuda:0", memory=far),
            lambda far=far: kina.session(session.runtime, memory=far),
            lambda far=far: kina.session("cuda:0", stream=ForeignStream(), memory=far),
            lambda far=far: kina.Runtime(0, memory=far),
            lambda far=far: memory.set_default_resource(far, "cuda:0"),
        ):
            with unchanged(), pytest.raises(kina.ForeignDeviceError, match=r"memory of cuda:0 is needed"):
                use()
        assert session.counters() == before
        with memory.using(far):  # it is for sessions there
            session.zeros(3)
        assert session.counters().allocations == before.allocations + 1


@pytest.mark.parametrize("wrong", [3, "cuda:0", object(), memory.HostMemoryResource])
def test_what_is_no_resource(session, wrong):
    for use in (
        lambda: session.empty(3, memory=wrong),
        lambda: kina.session("cuda:0", memory=wrong),
        lambda: kina.Runtime(0, memory=wrong),
        lambda: memory.set_default_resource(wrong, 0),
    ):
        with pytest.raises(kina.ArgumentError, match="MemoryResource"):
            use()


# Sessions: how the memory is used --------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("statistics",), ("python",), ("python in order",), ("tracking", "limiting")])
def test_tensors(on_device, names, tmp_path):
    """Ordinary tensors of the device, whatever they are made of; they keep it when all else has gone."""
    kind = 13 if isinstance(on_device, memory.ManagedMemoryResource) else 2
    resource = compose(names, on_device, tmp_path)
    with kina.session(kina.Runtime(0), memory=resource) as session:
        del resource
        values = np.arange(1000, dtype=np.float32)
        tensor = session.from_host(values)
        assert tensor.__dlpack_device__() == (kind, 0)
        assert tensor.device == "cuda:0"
        part = session.copy(tensor[100:200])
        assert session.zeros(0).shape == (0,)
        del tensor
        gc.collect()
        assert session.to_host(part).tolist() == values[100:200].tolist()
        assert session.to_host(session.zeros((2, 3))).tolist() == [[0.0] * 3] * 2
        assert session.counters().allocations == 0
        session.synchronize()
        assert on_device.live_bytes == 400
    del session
    gc.collect()
    del part
    settle()
    assert on_device.live_bytes == 0


# The free of the last one waits for nothing: without retirement it would come at once.
UNORDERED = {
    "cuda": ("cuda", ()),
    "statistics over cuda": ("cuda", ("statistics",)),
    "python over managed": ("managed", ("python",)),
    "python over async": ("async", ("python",)),
}


@pytest.mark.parametrize("stacked", UNORDERED)
def test_memory_without_stream_order_is_kept_while_it_is_used(stacked, tmp_path):
    """It is not given back before the device is past its last use, and dropping it does not wait."""
    name, names = UNORDERED[stacked]
    bottom = BOTTOMS[name]()
    resource = compose(names, bottom, tmp_path)
    with kina.session(kina.Runtime(0), memory=resource) as session:
        copied = session.empty(MIB, memory=memory.CudaAsyncMemoryResource())
        kept = [session.empty(MIB)]
        address = view(session, kept[0])
        session.synchronize()
        with on_stack(primary_context()), stalled(session):
            stream = driver.CUstream(stream_of(session))
            ok(driver.cuMemsetD32Async(address, 5, MIB, stream))
            ok(driver.cuMemcpyDtoDAsync(view(session, copied), address, 4 * MIB, stream))
            in_thread(kept.clear)
            assert bottom.live_bytes == 4 * MIB
            fresh = session.empty(MIB)  # looks for what is free, and there is nothing yet
            assert bottom.live_bytes == 8 * MIB
            assert view(session, fresh) != address
        assert set(session.to_host(copied).view(np.uint32)) == {5}
        del fresh
        session.synchronize()
        assert bottom.live_bytes == 0


@pytest.mark.parametrize("names", [(), ("python",)])
def test_what_has_become_free_is_found_by_the_next_allocation(names, tmp_path):
    bottom = memory.CudaMemoryResource()
    with kina.session(kina.Runtime(0), memory=compose(names, bottom, tmp_path)) as session:
        for _ in range(50):
            tensor = session.full(KIB, 1.0)
            del tensor
            session.completion().wait()
            assert bottom.live_bytes <= 2 * 4 * KIB
        counters = session.counters()
        assert counters.synchronizations == 0
        assert counters.leaked == 0
        session.synchronize()
    assert bottom.live_bytes == 0


@pytest.mark.simulated
@pytest.mark.parametrize("names", [("limiting",), ("limiting", "python")])
def test_what_waits_for_the_device_comes_back_before_memory_runs_out(names, sim, tmp_path):
    bottom = memory.CudaMemoryResource()
    below = compose(names[1:], bottom, tmp_path)
    limited = memory.LimitingMemoryResource(below, 10 * KIB)
    with kina.session(kina.Runtime(0), memory=limited) as session:
        kept = session.zeros(KIB, "uint8")
        sim.set_latency_us(10000)
        for _ in range(3):
            tensor = session.full(8 * KIB, 1, "uint8")
            del tensor
        assert session.counters().host_waits >= 2
        sim.set_latency_us(0)
        sim.wait_idle()
        waits = session.counters().host_waits
        for _ in range(3):  # it is free: nothing need wait
            tensor = session.full(8 * KIB, 1, "uint8")
            del tensor
            sim.wait_idle()
        assert session.counters().host_waits == waits
        assert session.counters().synchronizations == 0
        with pytest.raises(kina.OutOfMemoryError) as raised:
            session.zeros(9 * KIB + 1, "uint8")
        assert (raised.value.requested, raised.value.live, raised.value.limit) == (9 * KIB + 1, KIB, 10 * KIB)
        assert session.to_host(kept).sum() == 0


def test_exceptions_of_a_resource_in_python_pass_through(session):
    class Refusing(memory.MemoryResource):
        def __init__(self, error: BaseException) -> None:
            super().__init__(device="cuda:0")
            self.error = error

        def _allocate(self, nbytes: int, stream: object) -> int:
            raise self.error

        def _deallocate(self, address: int, nbytes: int, stream: object) -> None: ...

    for error in (LookupError("none"), MemoryError("full"), kina.OutOfMemoryError("full"), KeyboardInterrupt()):
        refusing = Refusing(error)
        kept = session.zeros(3, memory=memory.CudaMemoryResource())
        del kept  # so that there is something to wait for
        with pytest.raises(type(error)) as raised:
            session.empty(3, memory=refusing)
        assert raised.value is error
    assert session.to_host(session.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("stream", [1, -1])
def test_exported_memory_without_stream_order(stream):
    """First whoever it was exported to, then its own stream."""
    bottom = memory.CudaAsyncMemoryResource()
    with kina.session(kina.Runtime(0), memory=Passing(bottom)) as session:
        tensor = session.full(1000, 5.0)
        session.synchronize()
        capsule = tensor.to_dlpack(stream=stream)
        del tensor
        with stalled(1):
            with on_stack(primary_context()):
                ok(driver.cuMemsetD32Async(address_in(capsule), 1, 1000, driver.CUstream(1)))
            del capsule
            session.empty(1)
            assert bottom.live_bytes >= 4000
        session.synchronize()
        session.synchronize()
        assert bottom.live_bytes == 0


def address_in(capsule: object) -> int:
    from helpers import managed

    return managed.managed_of(capsule).dl_tensor.data


def test_adopted_by_another_runtime(tmp_path):
    bottom = memory.CudaMemoryResource()
    resource = compose(("python",), bottom, tmp_path)
    with kina.session(kina.Runtime(0)) as mine, kina.session(kina.Runtime(0), memory=resource) as theirs:
        tensor = theirs.full(MIB, 4.0)
        adopted = mine.adopt(tensor)
        copied = mine.empty(MIB)
        mine.synchronize()
        theirs.synchronize()
        with stalled(mine):
            copied = mine.copy(adopted)
            del tensor, adopted
            theirs.synchronize()
            assert bottom.live_bytes == 4 * MIB
        assert mine.to_host(copied).sum() == 4 * MIB

        def given_back():
            mine.synchronize()
            theirs.synchronize()
            return bottom.live_bytes == 0

        until(given_back)


@pytest.mark.simulated
def test_the_end_of_the_uses_cannot_be_noted(sim):
    """No event, no order: then only the end of all the device's work frees it."""
    bottom = memory.CudaMemoryResource()
    with kina.session(kina.Runtime(0), memory=bottom) as session:
        tensors = [session.zeros(10)]
        sim.fail("cuEventRecord", 1, 999)
        tensors.clear()
        sim.clear_faults()
        assert bottom.live_bytes == 40
        session.completion().wait()
        session.zeros(1)
        assert bottom.live_bytes >= 40
        session.synchronize()
        assert bottom.live_bytes == 0


@pytest.mark.simulated
def test_dropped_while_its_adopted_stream_is_captured():
    """No event may be put into somebody's graph."""

    def body():
        bottom = kina.memory.CudaMemoryResource()
        stream = ForeignStream()
        with kina.session("cuda:0", stream=stream, memory=bottom) as session:
            tensors = [session.zeros(10)]
            session.synchronize()
            handle = driver.CUstream(stream.handle)
            ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            tensors.clear()
            graph = ok(driver.cuStreamEndCapture(handle))
            assert ok(driver.cuGraphGetNodes(graph))[-1] == 0
            ok(driver.cuGraphDestroy(graph))
            assert bottom.live_bytes == 40
            session.synchronize()
            assert bottom.live_bytes == 0

    fork_body(body)


def test_the_runtime_goes_first():
    bottom = memory.CudaMemoryResource()
    runtime = kina.Runtime(0, memory=bottom)
    with kina.session(runtime) as session:
        tensor = session.full(100, 1.0)
    runtime.close()
    del runtime, session
    gc.collect()
    del tensor
    settle()
    assert bottom.live_bytes == 0


@pytest.mark.parametrize("kept", ["runtime", "session"])
def test_a_resource_may_refer_to_whom_it_serves(kept):
    """The cycle is not for ever."""
    gone = []

    def make():
        resource = Passing(memory.CudaMemoryResource())
        runtime = kina.Runtime(0, memory=resource if kept == "runtime" else None)
        with kina.session(runtime, memory=resource if kept == "session" else None) as session:
            session.zeros(3)
            resource.kept = {"runtime": runtime, "session": session}[kept]
            session.synchronize()
        gone.append(weakref.ref(resource))

    make()
    gc.collect()
    assert gone[0]() is None


@pytest.mark.simulated
def test_nothing_more_is_asked_of_the_driver(sim):
    """Memory that the Runtime's pool has costs no call, a resource over the driver those of allocation and release."""
    with kina.session(kina.Runtime(0)) as session:
        chosen = memory.CudaAsyncMemoryResource()
        chosen.allocate(1, session).free()
        session.empty(1)

        def asked(**choice):
            since = sim.position
            session.empty(1, **choice)
            return {call["name"] for call in sim.trace(since, event="call")} - {"cuCtxGetId", "cuCtxGetCurrent"}

        assert asked() == set()
        assert asked(memory=chosen) == {
            "cuMemAllocFromPoolAsync",
            "cuMemFreeAsync",
            "cuThreadExchangeStreamCaptureMode",
        }


def test_pinned_memory_on_the_host():
    pinned = memory.PinnedMemoryResource()
    with kina.session("cpu", memory=memory.StatisticsMemoryResource(pinned)) as host:
        tensor = host.from_host(np.arange(10, dtype=np.float32))
        assert pinned.live_bytes == 40
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        buffer = pinned.allocate(16)
        assert ok(driver.cuPointerGetAttribute(attribute, buffer.unsafe_address())) == 1  # CU_MEMORYTYPE_HOST
        assert buffer.__dlpack_device__() == (3, 0)
        memoryview(buffer)[:] = bytes(range(16))
        assert np.frombuffer(buffer, np.uint8).tolist() == list(range(16))
        assert host.to_host(host.add(tensor, tensor)).tolist() == [2.0 * i for i in range(10)]
        with kina.session("cuda:0") as session:
            assert session.to_host(session.from_host(np.asarray(buffer, np.uint8))).tolist() == list(range(16))
        with memory.using(pinned):
            kina.zeros(5, device="cpu")
        del tensor, buffer
    assert pinned.live_bytes == 0


def test_counters_end_no_capture():
    def body():
        with kina.session("cuda:0") as session:
            session.zeros(3)
            during_a_capture(session.counters)

    fork_body(body)


def everything_alive():
    """A resource of each kind with memory out, and dropped memory that waits for a stalled stream."""
    memory = kina.memory
    resources = [
        memory.CudaMemoryResource(),
        memory.CudaAsyncMemoryResource(),
        memory.ManagedMemoryResource(),
        memory.PinnedMemoryResource(),
        memory.current_resource("cuda:0"),
    ]
    session = kina.session(kina.Runtime(0), memory=resources[0]).__enter__()
    kept = [resource.allocate(100) for resource in resources]
    kept += [session.zeros(10, memory=resource) for resource in resources if resource.device != "cpu"]
    with stalled(session):
        dropped = session.full(10, 1.0)
        del dropped
    memory.set_default_resource(resources[1], 0)
    memory.using(resources[2]).__enter__()
    return [session, resources, kept]


def test_the_interpreter_ends():
    def body():
        globals()["alive"] = everything_alive()

    run_body(body, also=(everything_alive,))


@pytest.mark.simulated
def test_a_forked_child():
    """There nothing is given back, nothing waits, and an allocation says why there is none."""

    def body():
        sim = simulation()
        session, resources, kept = everything_alive()
        before = sim.calls()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for resource in resources:
                    with pytest.raises(kina.UnavailableError):
                        resource.unsafe_allocate(1)
                del resource
                kept.clear()
                resources.clear()
                gc.collect()
                code = 0 if sim.calls() == before else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        session.synchronize()

    run_body(body, also=(everything_alive,))


# What the streams of Runtimes answer to kina_memory.h ------------------------------------------------------

ASKING = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include "kina_memory.h"
#include "kina_tensor.h"

/* A resource that keeps the stream it is given, and hands out one fixed address. */
static kina_stream *streams[8];
static int count = 0;
static int allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    (void)self; (void)nbytes;
    kina_retain(stream);
    streams[count++] = stream;
    *out = (void *)256;
    return 0;
}
static void deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) {
    (void)self; (void)data; (void)nbytes; (void)stream;
}
static void destroy(kina_handle *self) { free(self); }
static kina_resource_vtable functions = {KINA_RESOURCE_VERSION, 1, "asking", allocate, deallocate, NULL, NULL};
static void drop(PyObject *capsule) { kina_release(PyCapsule_GetPointer(capsule, KINA_RESOURCE_CAPSULE)); }
static PyObject *make(PyObject *self, PyObject *unused) {
    kina_resource *made = calloc(1, sizeof(kina_resource));
    (void)self; (void)unused;
    kina_handle_init(&made->handle, destroy);
    made->vtable = &functions;
    made->device_type = KINA_DEVICE_CUDA;
    return PyCapsule_New(made, KINA_RESOURCE_CAPSULE, drop);
}
static kina_handle *fence_of(PyObject *number) { return (kina_handle *)PyLong_AsVoidPtr(number); }
static PyObject *record(PyObject *self, PyObject *which) {
    kina_stream *stream = streams[PyLong_AsLong(which)];
    kina_handle *fence = NULL;
    int status;
    (void)self;
    Py_BEGIN_ALLOW_THREADS
    status = stream->ordering->record(stream, &fence);
    Py_END_ALLOW_THREADS
    return status ? PyLong_FromLong(-(long)status) : PyLong_FromVoidPtr(fence);
}
static PyObject *query(PyObject *self, PyObject *fence) {
    (void)self;
    return PyLong_FromLong(streams[0]->ordering->query(fence_of(fence)));
}
static PyObject *order(PyObject *self, PyObject *arguments) {
    PyObject *fence;
    int which;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "iO", &which, &fence)) return NULL;
    return PyLong_FromLong(streams[which]->ordering->order(streams[which], fence_of(fence)));
}
static PyObject *wait_for(PyObject *self, PyObject *fence) {
    kina_handle *handle = fence_of(fence);
    int status;
    (void)self;
    Py_BEGIN_ALLOW_THREADS
    status = streams[0]->ordering->wait(handle, streams[0]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}
static PyObject *release(PyObject *self, PyObject *fence) {
    (void)self;
    kina_release(fence_of(fence));
    Py_RETURN_NONE;
}
static PyObject *forget(PyObject *self, PyObject *unused) {
    (void)self; (void)unused;
    while (count) kina_release(streams[--count]);
    Py_RETURN_NONE;
}
static PyMethodDef methods[] = {
    {"make", make, METH_NOARGS, ""}, {"record", record, METH_O, ""}, {"query", query, METH_O, ""},
    {"order", order, METH_VARARGS, ""}, {"wait", wait_for, METH_O, ""}, {"release", release, METH_O, ""},
    {"forget", forget, METH_NOARGS, ""}, {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "asking", "", -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_asking(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def asking(tmp_path_factory: Any) -> ModuleType:
    """A library in C that puts streams of kina in order."""
    folder = tmp_path_factory.mktemp("asking")
    source, library = folder / "asking.c", folder / f"asking{sysconfig.get_config_var('EXT_SUFFIX')}"
    source.write_text(ASKING)
    include = sysconfig.get_path("include")
    compile_c(source, library, "-std=c11", "-D_DEFAULT_SOURCE", "-shared", "-fPIC", f"-isystem{include}")
    spec = importlib.util.spec_from_file_location("asking", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair(asking: ModuleType) -> Iterator[tuple[Any, Any]]:
    """Two sessions whose streams the library knows as 0 and 1."""
    resource = memory.MemoryResource.from_capsule(asking.make())
    with kina.session(kina.Runtime(0)) as first, kina.session(kina.Runtime(0)) as second:
        for session in (first, second):
            resource.unsafe_allocate(1, session)
        yield first, second
    asking.forget()


def test_a_fence(asking, pair):
    """Behind what was enqueued, and not complete before that is; waited for on the host."""
    first, _ = pair
    with unchanged():
        with stalled(first):
            first.zeros(10)
            fence = asking.record(0)
            assert fence > 0
            assert asking.query(fence) == 0
            assert in_thread(lambda: asking.query(fence)) == 0
        assert asking.wait(fence) == 0
        assert asking.query(fence) == 1
        asking.release(fence)
    assert first.counters().events_recorded == 1


def test_one_stream_after_another(asking, pair, foreign):
    first, second = pair
    source, target = first.full(MIB, 1.0), second.zeros(MIB)
    first.synchronize()
    second.synchronize()
    with on_stack(foreign), stalled(first):
        with on_stack(primary_context()):
            ok(driver.cuMemsetD32Async(view(first, source), 7, MIB, driver.CUstream(stream_of(first))))
        with unchanged():
            fence = asking.record(0)
            assert asking.order(1, fence) == 0
            asking.release(fence)  # what was ordered stays so
        with on_stack(primary_context()):
            stream = driver.CUstream(stream_of(second))
            ok(driver.cuMemcpyDtoDAsync(view(second, target), view(first, source), 4 * MIB, stream))
    assert set(second.to_host(target).view(np.uint32)) == {7}


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["cuEventRecord", "cuEventCreate", "cuStreamWaitEvent", "cuCtxPushCurrent"])
def test_a_fence_fails(asking, pair, sim, name):
    first, _ = pair
    held = [first.completion() for _ in range(300)] if name == "cuEventCreate" else []
    with stalled(first), on_stack():
        before = asking.record(0)
        sim.fail(name, 1, 999)
        failed = asking.record(0)
        outcome = asking.order(1, before) if failed > 0 else failed
        sim.clear_faults()
        assert outcome != 0
        if failed > 0:
            asking.release(failed)
    asking.release(before)
    del held


@pytest.mark.simulated
def test_no_wait_and_no_query_on_the_way(asking, pair, sim):
    fence = asking.record(0)
    asking.release(fence)
    since = sim.position
    fence = asking.record(0)
    asking.order(1, fence)
    names = {record["name"] for record in sim.trace(since, event="call")}
    asking.release(fence)
    assert not names & {*WAITS, "cuEventQuery", "cuEventCreate"}
