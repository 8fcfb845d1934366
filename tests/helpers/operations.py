"""Every operation of kina on CUDA, as it stands before it runs and as it must be afterwards.

A case prepares an operation, yields it, and is sent its result, None where it failed; then it looks at what is there.
Who runs it may let any part of it fail: helpers/faults.py does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.testing  # and what it imports, once for all children
from helpers.arrays import CudaArray
from helpers.cuda import KERNELS, ForeignStream, driver, ok, on_stack, primary_context, stack, stalled, stream_of
from helpers.driver_sim import Sim
from helpers.kernels import fill_entry, module_text
from helpers.managed import CUDA, Producer

import kina
import kina.cuda.raw  # what a child would load first

__all__ = ["CASES", "SMALL", "WITHOUT_CALLS", "Kit", "equal", "run_add_one", "the_foreign_stream"]

SMALL, LARGE, HUGE = 10, 100_000, 1_100_000  # elements: within a small pinned block, a large one, several

CASES: dict[str, Callable[[Kit], Any]] = {}

#: These ask nothing of the driver, so that nothing of them can fail.
WITHOUT_CALLS = {
    "function: attributes",
    "raw: stream",
    "raw: release of a ref",
    "release: a workspace",
    "release: a workspace, by the end of its block",
}


def case(name: str, *arguments: Any) -> Callable[[Any], Any]:
    """The function prepares an operation, yields it, and is sent its result, None if it failed."""

    def register(function: Any) -> Any:
        CASES[name] = functools.partial(function, *arguments)
        return function  # for the next name

    return register


@functools.cache
def the_foreign_stream() -> ForeignStream:
    """One for all: a thread keeps the Runtimes of the streams that it adopted lately."""
    return ForeignStream()


class Kit:
    """A Runtime of its own and what else a case needs, let go of at the end."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.runtime = kina.Runtime(0)
        self.opened: list[Any] = []
        self.ends: list[Callable[[], None]] = []
        self.leaked = 0
        self.caller: list[int] = []  # the context stack outside of the sessions

    def session(self, target: Any = None, stream: Any = None) -> Any:
        opened = kina.session(self.runtime if target is None else target, stream=stream)
        opened.__enter__()
        self.opened.append(opened)
        return opened

    def foreign_stream(self) -> ForeignStream:
        return the_foreign_stream()

    def other_tensor(self, size: int = LARGE) -> Any:
        """Of another Runtime of the device, whose work is done."""
        with kina.session(kina.Runtime(0)) as session:
            tensor = session.full(size, 3.0)
            session.synchronize()
        return tensor

    def lender(self) -> Producer:
        with on_stack(primary_context()):
            address = int(ok(driver.cuMemAlloc(4 * SMALL)))
            self.ends.append(lambda: ok(driver.cuMemFree(address)))
        self.sim.write(address, np.full(SMALL, 3.0, np.float32).tobytes())
        return Producer((SMALL,), device=(CUDA, 0), data=address)

    def close(self, usable: bool) -> None:
        for session in reversed(self.opened):
            if usable and not session.closed:
                self.leaked += session.counters().leaked
            session.close()
        self.opened.clear()
        if usable and not self.runtime.closed:
            with kina.session(self.runtime) as session:
                session.synchronize()
                self.leaked = max(self.leaked, session.counters().leaked)
        self.runtime.close()
        with on_stack(primary_context()):
            for end in self.ends:
                end()


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found, expected)


# Sessions and Runtimes ------------------------------------------------------------------------------------


@case("enter: own Runtime", "own")
@case("enter: default Runtime", "default")
@case("enter: adopted stream", "adopted")
@case("enter: nested, other device", "nested")
def enter(kind: str, kit: Kit) -> Iterator[Any]:
    stream = kit.foreign_stream() if kind == "adopted" else None
    if kind == "nested":
        kit.session()
    target = {"own": kit.runtime, "nested": "cuda:1"}.get(kind, "cuda:0")
    session = yield lambda: kit.session(target, stream)
    if session is not None:
        equal(session.to_host(session.full(SMALL, 2)), np.full(SMALL, 2.0))


@case("leave: idle", "idle")
@case("leave: staging under way", "staging")
@case("leave: adopted tensor in use", "adopted")
@case("leave: by an exception", "raise")
@case("leave: out of order", "out of order")
@case("leave: the inner one", "inner")
@case("leave: adopted stream", "adopted stream")
@case("leave: the caller's context is another device's", "other context")
def leave(kind: str, kit: Kit) -> Iterator[Any]:
    if kind == "other context":
        ok(driver.cuCtxPushCurrent(driver.CUcontext(primary_context(1))))
        kit.caller = stack()
    session = kit.session("cuda:0", kit.foreign_stream()) if kind == "adopted stream" else kit.session()
    inner = kit.session("cuda:1") if kind == "out of order" else None
    if kind == "inner":
        outer, session = session, kit.session("cuda:1")
        assert not outer.closed
    if kind == "staging":
        session.from_host(np.ones(LARGE))
    if kind == "adopted":
        session.copy(session.adopt(kit.other_tensor()))
    error = (ValueError, ValueError("the block's own"), None) if kind == "raise" else (None, None, None)

    def act() -> None:
        session.__exit__(*error)
        if inner is not None:
            inner.close()

    yield act
    assert session.closed


@case("enter: after one was abandoned")
def enter_after_abandoned(kit: Kit) -> Iterator[Any]:
    kit.session("cuda:1").from_host([1.0])
    kit.opened.clear()
    gc.collect()
    yield kit.session


@case("Runtime: own stream", False)
@case("Runtime: adopted stream", True)
def make_runtime(adopting: bool, kit: Kit) -> Iterator[Any]:
    stream = kit.foreign_stream() if adopting else None
    runtime = yield lambda: kina.Runtime(0, stream=stream)
    if runtime is not None:
        with kina.session(runtime) as session:
            equal(session.to_host(session.full(SMALL, 2)), np.full(SMALL, 2.0))


@case("Runtime: more than are kept")
def make_many_runtimes(kit: Kit) -> Iterator[Any]:
    held = [kina.Runtime(0) for _ in range(33)]
    made = yield lambda: kina.Runtime(0)
    del held, made


@case("Runtime: close", "close")
@case("Runtime: drop with work under way", "drop")
@case("Runtime: drop, nothing sealed", "unsealed")
def end_runtime(how: str, kit: Kit) -> Iterator[Any]:
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        tensor = session.from_host(np.ones(SMALL, np.float32))
        if how != "unsealed":
            session.completion()
        run_add_one(session, tensor, SMALL)
        del tensor
    del session

    def drop() -> None:
        nonlocal runtime
        del runtime
        gc.collect()

    yield runtime.close if how == "close" else drop


# Tensors --------------------------------------------------------------------------------------------------


@case("empty")
def empty(kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = yield lambda: session.empty(LARGE)
    assert tensor is None or tensor.size == LARGE


@case("empty: memory without stream order", "CudaMemoryResource")
@case("empty: managed memory", "ManagedMemoryResource")
@case("empty: a pool of its own", "CudaAsyncMemoryResource")
def empty_of_a_resource(kind: str, kit: Kit) -> Iterator[Any]:
    resource = getattr(kina.memory, kind)()
    session = kit.session()
    tensor = yield lambda: session.empty(LARGE, memory=resource)
    assert tensor is None or tensor.size == LARGE


@case("empty: something waits to be given back")
def empty_after_a_drop(kit: Kit) -> Iterator[Any]:
    resource = kina.memory.CudaMemoryResource()
    session = kit.session()
    session.full(SMALL, 3.0, memory=resource)
    kit.sim.wait_idle()
    tensor = yield lambda: session.empty(SMALL, memory=resource)
    del tensor
    session.synchronize()
    kit.leaked += resource.live_bytes > 0  # what could not be given back stays counted there


@case("zeros", 0, "float32")
@case("full, 2 bytes", 1.5, "float16")
@case("full, 4 bytes", 1.5, "float32")
@case("full, 16 bytes", 1 + 2j, "complex128")
def full(value: Any, dtype: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = yield lambda: session.full(SMALL, value, dtype)
    if tensor is not None:
        equal(session.to_host(tensor), np.full(SMALL, value, dtype))


@case("from_host: small", SMALL)
@case("from_host: large", LARGE)
@case("from_host: in chunks", HUGE)
def from_host(size: int, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    values = np.arange(size, dtype=np.float32)
    tensor = yield lambda: session.from_host(values)
    if tensor is not None:
        equal(session.to_host(tensor), values)


@case("to_host: small", SMALL, "own")
@case("to_host: large", LARGE, "own")
@case("to_host: in chunks", HUGE, "own")
@case("to_host: a view", LARGE, "view")
@case("to_host: adopted", LARGE, "adopted")
def to_host(size: int, kind: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    values = np.arange(size, dtype=np.float32)
    tensor = session.adopt(kit.other_tensor(size)) if kind == "adopted" else session.from_host(values)
    expected = np.full(size, 3.0) if kind == "adopted" else values
    if kind == "view":
        tensor, expected = tensor[::-3], expected[::-3]
    found = yield lambda: session.to_host(tensor)
    if found is not None:
        equal(found, expected)


@case("copy", False)
@case("copy: adopted", True)
def copy(adopted: bool, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    source = session.adopt(kit.other_tensor()) if adopted else session.full(LARGE, 3.0)
    made = yield lambda: session.copy(source)
    if made is not None:
        del source
        gc.collect()
        equal(session.to_host(made), np.full(LARGE, 3.0))


@case("adopt: of another Runtime")
def adopt(kit: Kit) -> Iterator[Any]:
    session, source = kit.session(), kit.other_tensor()
    taken = yield lambda: session.adopt(source)
    if taken is not None:
        equal(session.to_host(taken), np.full(LARGE, 3.0))


@case("adopt: of another library")
def adopt_foreign(kit: Kit) -> Iterator[Any]:
    session, lender = kit.session(), kit.lender()
    taken = yield lambda: session.adopt(lender)
    if taken is not None:
        equal(session.to_host(taken), np.full(SMALL, 3.0))
        kit.ends.append(lambda: equal(lender.deleted, 1))


@case("adopt: an array interface", None)
@case("adopt: an array interface with a stream", "other")
def adopt_described(stream: str | None, kit: Kit) -> Iterator[Any]:
    session, lender = kit.session(), kit.lender()
    named = None if stream is None else kit.foreign_stream().handle
    data = (lender.managed.dl_tensor.data, False)
    source = CudaArray(None, version=3, shape=(SMALL,), typestr="<f4", data=data, stream=named)
    alive = weakref.finalize(source, lambda: None)
    taken = yield functools.partial(session.adopt, source)
    if taken is not None:
        equal(session.to_host(taken), np.full(SMALL, 3.0))
    del taken, source
    kit.ends.append(lambda: equal(alive.alive, False))


@case("export: an array interface", True)
@case("export: an array interface outside of a session", False)
def describe(inside: bool, kit: Kit) -> Iterator[Any]:
    with kina.session(kit.runtime) as session:
        tensor = session.full(SMALL, 3.0)
    session = kit.session() if inside else None
    yield functools.partial(getattr, tensor, "__cuda_array_interface__")
    del tensor
    session = session or kit.session()
    session.synchronize()
    kit.sim.wait_idle()


@case("export: to the legacy stream", "legacy", True)
@case("export: to another stream", "other", True)
@case("export: to the stream of a Runtime", "Runtime", True)
@case("export: to an adopted stream", "adopted", True)
@case("export: to the own stream", "own", True)
@case("export: to nobody", "none", True)
@case("export: outside of a session", "other", False)
def export(to: str, inside: bool, kit: Kit) -> Iterator[Any]:
    with kina.session(kit.runtime) as session, session.raw() as raw:
        tensor = session.full(SMALL, 3.0)
        own = raw.unsafe_stream_handle()
    stream = {"legacy": None, "own": own, "none": -1}.get(to, kit.foreign_stream().handle)
    if to == "Runtime":
        with kit.session(kina.Runtime(0)).raw() as raw:
            stream = raw.unsafe_stream_handle()
    elif to == "adopted":
        kit.session("cuda:0", kit.foreign_stream())
    session = kit.session() if inside else None
    capsule = yield functools.partial(tensor.to_dlpack, stream=stream)
    del capsule, tensor
    session = session or kit.session()
    session.synchronize()
    kit.sim.wait_idle()


@case("release: after the legacy stream had it", "legacy", False)
@case("release: after an unknown stream had it", "unknown", False)
@case("release: after the stream of a Runtime had it", "Runtime", False)
@case("release: after an adopted stream had it", "adopted", False)
@case("release: adopted, after the legacy stream had it", "legacy", True)
def release(exported: str, lent: bool, kit: Kit) -> Iterator[Any]:
    stream = {"legacy": None, "unknown": -1}.get(exported, kit.foreign_stream().handle)
    if exported == "Runtime":
        with kit.session(kina.Runtime(0)).raw() as raw:
            stream = raw.unsafe_stream_handle()
    elif exported == "adopted":
        kit.session("cuda:0", kit.foreign_stream())
    with kina.session(kit.runtime) as session:
        tensor = session.adopt(kit.lender()) if lent else session.full(SMALL, 3.0)
    tensor.to_dlpack(stream=stream)

    def drop() -> None:
        nonlocal tensor
        del tensor

    yield drop


@case("release: memory in stream order", True)
@case("release: memory in stream order, outside of a session", False)
def release_ordered(inside: bool, kit: Kit) -> Iterator[Any]:
    resource = kina.memory.CudaAsyncMemoryResource()
    with kina.session(kit.runtime) as session:
        tensor = session.full(SMALL, 3.0, memory=resource)
    if inside:
        kit.session()

    def drop() -> None:
        nonlocal tensor
        del tensor

    yield drop
    kit.leaked += resource.live_bytes > 0  # what could not be given back stays counted there


@case("release: memory without stream order", True, False)
@case("release: memory without stream order, outside of a session", False, False)
@case("release: memory without stream order, exported", False, True)
def release_unordered(inside: bool, exported: bool, kit: Kit) -> Iterator[Any]:
    resource = kina.memory.CudaMemoryResource()
    with kina.session(kit.runtime) as session:
        tensor = session.full(SMALL, 3.0, memory=resource)
    if exported:
        tensor.to_dlpack(stream=None)
    if inside:
        kit.session()

    def drop() -> None:
        nonlocal tensor
        del tensor

    yield drop


@case("resource: Cuda", "CudaMemoryResource")
@case("resource: CudaAsync", "CudaAsyncMemoryResource")
@case("resource: Managed", "ManagedMemoryResource")
@case("resource: Pinned", "PinnedMemoryResource")
def use_resource(kind: str, kit: Kit) -> Iterator[Any]:
    """Made, and asked without a session."""
    buffer = yield lambda: getattr(kina.memory, kind)().allocate(LARGE)
    if buffer is not None:
        buffer.free()
        assert buffer.resource.live_bytes == 0


@case("resource: for no stream")
def use_for_no_stream(kit: Kit) -> Iterator[Any]:
    resource = kina.memory.CudaAsyncMemoryResource()
    address = yield lambda: resource.unsafe_allocate(LARGE)
    if address is not None:
        resource.unsafe_deallocate(address, LARGE)
    assert resource.live_bytes == 0


@case("release: a buffer", "CudaMemoryResource")
@case("release: a buffer in stream order", "CudaAsyncMemoryResource")
@case("release: a pinned buffer", "PinnedMemoryResource")
def release_buffer(kind: str, kit: Kit) -> Iterator[Any]:
    buffer = getattr(kina.memory, kind)().allocate(LARGE)
    yield buffer.free
    assert buffer.freed
    kit.leaked += buffer.resource.live_bytes > 0  # what could not be given back stays counted there


@case("release: a resource")
def release_resource(kit: Kit) -> Iterator[Any]:
    resource = kina.memory.CudaAsyncMemoryResource(release_threshold=0)
    resource.allocate(LARGE).free()

    def drop() -> None:
        nonlocal resource
        del resource

    yield drop


@case("allocate: the device is full")
def allocate_when_full(kit: Kit) -> Iterator[Any]:
    """Another Runtime holds all memory, by pending frees and in quarantine: every rung of the ladder is climbed."""
    session = kit.session()
    other = kina.Runtime(0)

    def taken(theirs: Any) -> Any:
        # What the driver still has of an attempt before may be larger, and is not split in the simulation.
        for _ in range(3):
            with contextlib.suppress(kina.OutOfMemoryError):
                return theirs.empty(384 << 10, "u8")
            theirs.synchronize()
            kit.sim.wait_idle()
        return theirs.empty(384 << 10, "u8")

    with kina.session(other) as theirs:
        cached, exported = taken(theirs), taken(theirs)
        exported.to_dlpack(stream=-1)
        del cached, exported
    tensor = yield lambda: session.empty(768 << 10, "u8")
    assert tensor is None or tensor.nbytes == 768 << 10


# Other streams --------------------------------------------------------------------------------------------


class Event:
    """As PyTorch has it."""

    __module__ = "torch.cuda.streams"

    def __init__(self, stream: int) -> None:
        with on_stack(primary_context()):
            self.made = ok(driver.cuEventCreate(2))
            ok(driver.cuEventRecord(self.made, driver.CUstream(stream)))

    @property
    def cuda_event(self) -> int:
        return int(self.made)

    def __del__(self) -> None:
        with on_stack(primary_context()):
            ok(driver.cuEventDestroy(self.made))


@case("wait: for a stream", "foreign")
@case("wait: for an adopted stream", "adopted")
@case("wait: for the legacy stream", "legacy")
@case("wait: for a session", "session")
@case("wait: for a Completion", "completion")
@case("wait: for an event", "event")
@case("hand over: to a stream", "to foreign")
@case("hand over: to an adopted stream", "to adopted")
@case("hand over: and back", "back")
def use_streams(what: str, kit: Kit) -> Iterator[Any]:
    stream = ForeignStream(1) if what == "legacy" else kit.foreign_stream()
    if "adopted" in what:
        kit.session("cuda:0", stream)
    other = kit.session(kina.Runtime(0))
    session = kit.session()
    with stalled(stream_of(other)):
        tensor = other.full(SMALL, 3.0)
        completion, event = other.completion(), Event(stream_of(other))
        there = session.stream_ordered_with(stream) if what == "back" else None

        def wait(target: Any) -> Any:
            return functools.partial(session.wait, target)

        yield {
            **dict.fromkeys(("foreign", "adopted", "legacy"), wait(stream)),
            **dict.fromkeys(("to foreign", "to adopted"), lambda: session.stream_ordered_with(stream)),
            "session": wait(other),
            "completion": wait(completion),
            "event": wait(event),
            "back": lambda: there.__exit__(None, None, None),
        }[what]
    run_add_one(session, session.zeros(SMALL), SMALL)
    other.synchronize()
    del tensor


# Waiting and asking ---------------------------------------------------------------------------------------


@case("synchronize", "plain")
@case("synchronize: memory in quarantine", "quarantine")
@case("synchronize: a dead module", "module")
@case("synchronize: of a Runtime that is gone", "orphans")
def synchronize(kind: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = session.from_host(np.ones(SMALL, np.float32))
    if kind == "quarantine":
        tensor.to_dlpack(stream=-1)
        del tensor
    if kind == "module":
        runtime = kina.Runtime(0)
        with kina.session(runtime) as theirs:
            run_add_one(theirs, theirs.zeros(SMALL), SMALL)
            theirs.synchronize()
        runtime.close()
        del runtime, theirs
    if kind == "orphans":
        runtime = kina.Runtime(0)
        with kina.session(runtime) as theirs:
            theirs.from_host([1.0])
        del runtime, theirs
        gc.collect()
    yield session.synchronize


@case("completion")
def completion(kit: Kit) -> Iterator[Any]:
    session = kit.session()
    session.from_host([1.0])
    witness = yield session.completion
    if witness is not None:
        witness.wait()
        assert witness.done()


@case("completion: done", True, "done")
@case("completion: wait", True, "wait")
@case("completion: done, outside of a session", False, "done")
@case("completion: wait, outside of a session", False, "wait")
def ask(inside: bool, how: str, kit: Kit) -> Iterator[Any]:
    with kina.session(kit.runtime) as session:
        session.from_host([1.0])
        witness = session.completion()
    if inside:
        kit.session()
    kit.sim.wait_idle()
    answer = yield getattr(witness, how)
    assert answer is not False
    witness.wait()
    assert witness.done()


@case("counters")
def counters(kit: Kit) -> Iterator[Any]:
    session = kit.session()
    session.zeros(SMALL)
    found = yield session.counters
    assert found is None or found.allocations == 1


# Modules and launches -------------------------------------------------------------------------------------


def run_add_one(session: Any, tensor: Any, size: int) -> None:
    with session.raw() as raw:
        raw.module(KERNELS).function("add_one", "mut f32[], u32").launch(kina.LaunchConfig.linear(size), tensor, size)


@case("module", False)
@case("module: after one has died", True)
def load_module(after: bool, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    if after:
        runtime = kina.Runtime(0)
        with kina.session(runtime) as theirs, theirs.raw() as raw:
            raw.module(module_text(fill_entry()))
        del runtime, theirs, raw
        gc.collect()
    with session.raw() as raw:
        module = yield lambda: raw.module(KERNELS)
        if module is not None:
            assert module.function("add_one").parameters == ((0, 8), (8, 4))
        again = raw.module(KERNELS)  # nothing is cached on failure, and the module is found on success
        assert module is None or again is module


IMAGES = Path(__file__).resolve().parents[1] / "data" / "cubin"
#: What raw.module takes beside PTX; each has the entry `fill`.
BINARY: dict[str, Any] = {
    "CUBIN": (IMAGES / "kernels_sm90.cubin").read_bytes(),
    "fatbin": (IMAGES / "kernels_sm80_sm90.fatbin").read_bytes(),
    "a file": IMAGES / "kernels_sm90.cubin",
    "CUDA C++": """
        extern "C" __global__ void fill(float *y, float value, unsigned n) {
            unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) y[i] = value;
        }
    """,
}
FILL = "mut f32[], f32, u32"


@case("module: CUBIN", "CUBIN")
@case("module: fatbin", "fatbin")
@case("module: a file", "a file")
@case("module: CUDA C++", "CUDA C++")
def load_binary(kind: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = session.zeros(SMALL)
    with session.raw() as raw:
        module = yield lambda: raw.module(BINARY[kind])
        again = raw.module(BINARY[kind])
        assert module is None or again is module
        again.function("fill", FILL).launch(kina.LaunchConfig.linear(SMALL), tensor, 2.0, SMALL)
    equal(session.to_host(tensor), np.full(SMALL, 2.0))


@case("module: the cache is full")
def load_beyond_the_cache(kit: Kit) -> Iterator[Any]:
    """One that is evicted may be in flight: it is sealed."""
    runtime = kina.Runtime(0, modules=1)
    session = kit.session(runtime)
    tensor = session.zeros(SMALL)
    with session.raw() as raw:
        for number in range(2):
            module = raw.module(module_text(fill_entry(f"fill_{number}")))
            module.function(f"fill_{number}", FILL).launch(kina.LaunchConfig.linear(SMALL), tensor, 2.0, SMALL)
        del module
        yield lambda: raw.module(KERNELS)
        run_add_one(session, tensor, SMALL)
    equal(session.to_host(tensor), np.full(SMALL, 3.0))


@case("function: no signature", "function")
@case("function: how many blocks fit", "blocks")
@case("function: how many clusters fit", "clusters")
@case("function: the block that fills the device", "suggest")
@case("function: the block that fills it, with much shared memory", "suggest much")
@case("function: attributes", "attributes")
def ask_function(what: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = session.zeros(SMALL)
    with session.raw() as raw:
        module = raw.module(module_text(fill_entry(), version="7.8", target="sm_90"))
        function = module.function("fill", FILL)
        asked = {
            "function": lambda: module.function("fill"),
            "blocks": lambda: function.max_active_blocks(kina.LaunchConfig(1, 256)),
            "clusters": lambda: function.max_active_clusters(kina.LaunchConfig(16, 32, cluster=4)),
            "suggest": function.suggest_block,
            "suggest much": lambda: function.suggest_block(shared_bytes=100_000),
            "attributes": lambda: (function.registers, function.parameters, function.max_dynamic_shared_bytes),
        }[what]
        found = yield asked
        again = asked()  # a failure is not remembered
        assert found is None or what == "function" or found == again
        function.launch(kina.LaunchConfig.linear(SMALL), tensor, 2.0, SMALL)
    equal(session.to_host(tensor), np.full(SMALL, 2.0))


@case("function")
def get_function(kit: Kit) -> Iterator[Any]:
    session = kit.session()
    with session.raw() as raw:
        module = raw.module(KERNELS)
        function = yield lambda: module.function("saxpy", "mut f32[], f32[], f32, u32")
        function = function or module.function("saxpy", "mut f32[], f32[], f32, u32")
        assert [size for _, size in function.parameters] == [8, 8, 4, 4]
        x, y = session.full(SMALL, 1.0), session.full(SMALL, 2.0)
        function.launch(kina.LaunchConfig.linear(SMALL), y, x, 3.0, SMALL)
        equal(session.to_host(y), np.full(SMALL, 5.0))


CONFIGURATIONS = {
    "plain": kina.LaunchConfig(1, 32),
    "much shared memory": kina.LaunchConfig(1, 32, shared_bytes=100_000),
    "cooperative": kina.LaunchConfig(1, 32, cooperative=True),
    "small cluster": kina.LaunchConfig(2, 32, cluster=2),
    "large cluster": kina.LaunchConfig(16, 32, cluster=16),
    "programmatic": kina.LaunchConfig(1, 32, programmatic=True),
}


@case("launch: no signature", "plain", None)
@case("launch: adopted tensor", "plain", "adopted")
@case("launch: prepared", "plain", "prepared")
@case("launch: prepared, much shared memory", "much shared memory", "prepared")
@case("launch: prepared, large cluster", "large cluster", "prepared")
def _launch_adopted(configuration: str, kind: str | None, kit: Kit) -> Iterator[Any]:
    return launch(configuration, kit, kind)


def launch(configuration: str, kit: Kit, kind: str | None = "typed") -> Iterator[Any]:
    session = kit.session()
    tensor = session.adopt(kit.other_tensor(SMALL)) if kind == "adopted" else session.full(SMALL, 3.0)
    with session.raw() as raw:
        module = raw.module(module_text(fill_entry(), version="7.8", target="sm_90"))
        function = module.function("fill", "mut f32[], f32, u32" if kind else None)
        config = CONFIGURATIONS[configuration]
        done = []

        def act() -> None:
            if kind is None:
                function.launch(config, raw.mut(tensor), kina.f32(7), kina.u32(SMALL))
            elif kind == "prepared":
                function.prepare(config).launch(tensor, 7.0, SMALL)
            else:
                function.launch(config, tensor, 7.0, SMALL)
            done.append(True)

        yield act
    equal(session.to_host(tensor), np.full(SMALL, 7.0 if done else 3.0))


for _name in CONFIGURATIONS:
    CASES[f"launch: {_name}"] = functools.partial(launch, _name)


@case("launch: the segment is full")
def launch_until_sealed(kit: Kit) -> Iterator[Any]:
    """The 512th lease seals the segment, behind the launch."""
    session = kit.session()
    parts = [session.adopt(tensor) for tensor in [kit.other_tensor(SMALL)] for _ in range(511)]
    for part in parts:
        session.copy(part)
    assert session.counters().leases == 511
    target = session.zeros(SMALL)
    with session.raw() as raw:
        function = raw.module(KERNELS).function("fill", "mut f32[], f32, u32")
        yield lambda: function.launch(CONFIGURATIONS["plain"], target, 1.0, SMALL)


# Borrowing and scratch memory ------------------------------------------------------------------------------


@case("raw: enter", "enter")
@case("raw: ref", "ref")
@case("raw: mut", "mut")
@case("raw: stream", "stream")
@case("raw: unsafe_stream_handle", "handle")
@case("raw: unsafe_address", "address")
@case("raw: release of a ref", "release")
def borrow(what: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = session.full(SMALL, 3.0)
    with session.raw() as raw:
        held = [raw.mut(tensor)] if what in ("address", "release") else []
        found = yield {
            "enter": lambda: session.raw().__enter__(),
            "ref": lambda: raw.ref(tensor),
            "mut": lambda: raw.mut(tensor),
            "stream": lambda: raw.stream,
            "handle": raw.unsafe_stream_handle,
            "address": lambda: raw.unsafe_address(held[0]),
            "release": lambda: held[0].release(),
        }[what]
        if what == "enter" and found is not None:
            found.__exit__(None, None, None)
        if what in ("ref", "mut") and found is not None:
            found.release()
        held.clear()
        gc.collect()
        raw.mut(tensor).release()  # what could not be borrowed is not borrowed
        run_add_one(session, tensor, SMALL)
    equal(session.to_host(tensor), np.full(SMALL, 4.0))


@case("workspace", False, False)
@case("workspace: of a resource", True, False)
@case("release: a workspace", False, True)
@case("release: a workspace of a resource", True, True)
@case("release: a workspace, by the end of its block", False, None)
def use_workspace(named: bool, giving_back: bool | None, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    resource = kina.memory.CudaAsyncMemoryResource() if named else None
    raw = session.raw()
    raw.__enter__()
    fill = raw.module(KERNELS).function("fill", "ptr, f32, u32")
    if giving_back is False:
        made = yield lambda: raw.workspace(4 * LARGE, memory=resource)
    else:
        made = raw.workspace(4 * LARGE, memory=resource)
    if made is not None:
        fill.launch(kina.LaunchConfig.linear(LARGE), made, 1.0, LARGE)
    if giving_back is not False:
        yield made.release if giving_back else lambda: raw.__exit__(None, None, None)
        assert not made.alive
    raw.__exit__(None, None, None)
    session.synchronize()
    if resource is not None:
        kit.leaked += resource.live_bytes > 0  # what could not be given back stays counted there


class Handle:
    """A handle of a library, say."""


@case("resource of a Runtime", "make")
@case("resource of a Runtime: found", "find")
@case("resource of a Runtime: another makes way", "evict")
@case("resource of a Runtime: cleared", "clear")
def use_object(what: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    ended = []
    with session.raw() as raw:
        others = [type(f"Kind{number}", (Handle,), {}) for number in range(32)]
        if what != "make":
            kept = raw.resource(Handle, Handle)
            weakref.finalize(kept, ended.append, True)
            run_add_one(session, session.zeros(SMALL), SMALL)
        if what == "evict":
            for kind in others[:31]:
                raw.resource(kind, kind)
        if what in ("evict", "clear"):
            del kept
        acts = {
            "make": lambda: raw.resource(Handle, Handle),
            "find": lambda: raw.resource(Handle, Handle) is kept,
            "evict": lambda: raw.resource(others[31], others[31]),
            "clear": raw.clear_resources,
        }
        found = yield acts[what]
        if what == "find":
            assert found is not False
            del kept
        raw.clear_resources()
    session.synchronize()
    kina.memory.HostMemoryResource().allocate(0)  # what waits for the GIL
    gc.collect()
    assert ended or what == "make"


# Captures and graphs --------------------------------------------------------------------------------------


@case("capture: a block", False)
@case("capture: a block with memory of its own", True)
def capture(allocating: bool, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = session.full(SMALL, 3.0)
    with session.raw() as raw:
        raw.module(KERNELS).function("add_one", "mut f32[], u32")

    def act() -> Any:
        with session.capture() as graph:
            run_add_one(session, tensor, SMALL)
            if allocating:
                session.copy(tensor)
        return graph

    graph = yield act
    equal(session.to_host(tensor), np.full(SMALL, 3.0))
    with session.capture() as again:
        run_add_one(session, tensor, SMALL)
    for ready in [again] if graph is None else [again, graph]:
        ready.launch(session)
    equal(session.to_host(tensor), np.full(SMALL, 4.0 if graph is None else 5.0))


@case("leave: a capture, by an exception", "raise")
@case("leave: in the middle of a capture", "leave")
@case("release: an open capture", "drop")
def end_capture(how: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = session.full(SMALL, 3.0)
    graphs = [session.capture()]
    graphs[0].__enter__()
    session.copy(tensor)

    def act() -> None:
        if how == "raise":
            graphs[0].__exit__(ValueError, ValueError("the block's own"), None)
        elif how == "leave":
            session.close()
        graphs.clear()

    yield act
    session = kit.session() if how == "leave" else session
    run_add_one(session, tensor, SMALL)
    equal(session.to_host(tensor), np.full(SMALL, 4.0))


@case("graph: launch", "launch")
@case("release: a graph", "drop")
@case("graph: launched and dropped", "drop, running")
def use_graph(what: str, kit: Kit) -> Iterator[Any]:
    session = kit.session()
    tensor = session.full(SMALL, 3.0)
    with session.capture() as graph:
        run_add_one(session, tensor, SMALL)
        session.copy(tensor)
    session.synchronize()
    graphs = [graph]
    del graph
    done = []

    def act() -> None:
        if what != "drop":
            graphs[0].launch(session)
            done.append(True)
        if what != "launch":
            graphs.clear()

    yield act
    equal(session.to_host(tensor), np.full(SMALL, 4.0 if done else 3.0))
    graphs.clear()


@case("capture of another library: enter", "enter")
@case("capture of another library: memory", "memory")
@case("capture of another library: a launch in an open session", "launch")
def others_capture(what: str, kit: Kit) -> Iterator[Any]:
    stream = kit.foreign_stream()
    tensor = kit.session("cuda:0", stream).full(SMALL, 3.0)
    run_add_one(kit.opened[0], tensor, SMALL)
    equal(kit.opened[0].to_host(tensor), np.full(SMALL, 4.0))
    kit.opened[0].close()
    if what == "launch":
        kit.session("cuda:0", stream)
    handle = driver.CUstream(stream.handle)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(0)))
    if what == "memory":
        kit.session("cuda:0", stream)

    def act() -> None:
        if what == "enter":
            kit.session("cuda:0", stream)
        elif what == "memory":
            kit.opened[-1].full(SMALL, 1.0)
        else:
            run_add_one(kit.opened[-1], tensor, SMALL)

    yield act
    with on_stack(primary_context()):
        code, graph = driver.cuStreamEndCapture(handle)
        if int(code) == 0:
            ok(driver.cuGraphDestroy(graph))
    session = kit.session("cuda:0", stream)
    equal(session.to_host(tensor), np.full(SMALL, 4.0))
