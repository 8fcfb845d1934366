"""Programs of kina: lists of operations, run one after the other on the simulated driver, every result compared.

A program is made elsewhere (tests/cuda/test_interleavings.py), where a model says what each operation must give. Here
it is only run: in a process of its own, its host threads taking turns, so that the same program and the same seed give
the same order of everything.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.testing  # and what it imports, once for all children
from cuda.bindings import driver
from helpers.cuda import KERNELS, ok, stack, stream_of, until
from helpers.driver_sim import Sim
from helpers.invariants import assert_all_idle, assert_counters_settled, settle, unbroken
from helpers.managed import CUDA, Producer, managed_of

import kina
import kina.cuda.raw  # what a child would load first
import kina.cuda.resources
import kina.memory

__all__ = ["HOST_THREADS", "SIGNATURES", "Operation", "run_program"]

HOST_THREADS = 2
SIGNATURES = {
    "fill": "mut f32[], f32, u32",
    "add_one": "mut f32[], u32",
    "copy": "mut f32[], f32[], u32",
    "saxpy": "mut f32[], f32[], f32, u32",
}
CACHED_MODULES = 64  # that a Runtime keeps
#: What enters or leaves sessions, and what a thread has on its stack itself.
STACK_CHANGES = {"enter", "leave", "abandon", "drop_what_runs", "set_stack", "clear_stack"}


class Operation(NamedTuple):
    """One step: in which host thread, what, and the name of the error that it must end in."""

    thread: int
    name: str
    arguments: dict[str, Any]
    raises: str | None = None

    def __str__(self) -> str:
        words = ", ".join(f"{key}={_brief(value)}" for key, value in self.arguments.items())
        return f"thread {self.thread}: {self.name}({words})" + (f" raises {self.raises}" if self.raises else "")


def _brief(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array of {value.shape}, first {value.flat[0]}"
    return repr(value)


class HostThread:
    """A thread that does one thing at a time, and is waited for."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                answer: tuple[Any, BaseException | None] = (task(), None)
            except BaseException as error:
                answer = (None, error)
            del task
            self._results.put(answer)
            del answer

    def do(self, task: Callable[[], Any]) -> Any:
        self._tasks.put(task)
        result, error = self._results.get()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        self._tasks.put(None)
        self._thread.join()
        # Python calls it ended when its code is; what the system does at the end of a thread comes after.
        while Path(f"/proc/self/task/{self._thread.native_id}").exists():
            time.sleep(0.001)


class Lender(Producer):
    """Memory of another library, offered through DLPack in the order of its own stream.

    Once the last user has let go of it, it is overwritten at once: by then nobody's work may be using it.
    """

    GARBAGE = np.float32(-12345.0)

    def __init__(self, sim: Sim, device: int, address: int, size: int, order: Callable[[int], None]) -> None:
        super().__init__((size,), device=(CUDA, device), data=address)
        self._sim, self._size, self._order = sim, size, order

    def __dlpack__(self, *, stream: int | None = None, **wishes: Any) -> object:
        assert stream is not None
        self._order(stream)
        return self.capsule()

    def _delete(self, address: int) -> None:
        super()._delete(address)
        self._sim.write(self.first, np.full(self._size, self.GARBAGE).tobytes())


class Machine:
    """What operations work on; each method that an Operation may name is one of the second half."""

    def __init__(self, sim: Sim, devices: int) -> None:
        self.sim = sim
        self.threads = [HostThread() for _ in range(HOST_THREADS)]
        self.contexts = [int(ok(driver.cuDevicePrimaryCtxRetain(ordinal))) for ordinal in range(devices)]
        self.handles: dict[Any, int] = {("legacy", ordinal): 1 for ordinal in range(devices)}
        self.foreign_streams: dict[Any, int] = {}
        self.foreign_contexts: list[int] = []
        self.stacks: dict[int, list[int]] = {}
        self.runtimes: dict[int, Any] = {}
        self.sessions: dict[int, Any] = {}
        self.tensors: dict[int, Any] = {}
        self.capsules: dict[int, Any] = {}
        self.buffers: dict[int, tuple[int, int]] = {}  # device and address
        self.lenders: list[Lender] = []
        self.pools: list[kina.memory.PoolMemoryResource] = []
        self.resources: list[kina.memory.CudaAsyncMemoryResource] = []
        self.functions: dict[int, dict[str, Any]] = {}
        self.witnesses: dict[int, Any] = {}

    # -------------------------------------------------------------------------------- running

    def run(self, operation: Operation) -> None:
        keeps_the_stack = operation.name not in STACK_CHANGES

        def task() -> str | None:
            before = stack()
            try:
                getattr(self, operation.name)(**operation.arguments)
            except kina.KinaError as error:
                return type(error).__name__
            finally:
                if keeps_the_stack:
                    assert stack() == before, "the context stack has changed"
            return None

        raised = self.threads[operation.thread].do(task)
        self.trim_pools()
        assert raised == operation.raises, f"it must raise {operation.raises}, it raised {raised}"

    def finish(self, devices: int) -> None:
        """Everything is let go of in its thread; then nothing may be left, and nothing may have been broken."""
        self.sim.resume_all()
        self.functions.clear()
        self.tensors.clear()
        self.capsules.clear()
        self.witnesses.clear()
        self.sessions.clear()
        for thread in self.threads:
            thread.end()
        settle(self.sim, *range(devices))  # the Runtimes that the threads kept, and what these leased of others
        self.check_counters()
        self.runtimes.clear()
        settle(self.sim, *range(devices))
        self.end_pools()
        settle(self.sim, *range(devices))
        until(lambda: all(lender.deleted for lender in self.lenders))
        assert [lender.deleted for lender in self.lenders] == [1] * len(self.lenders)
        for stream in self.foreign_streams.values():
            ok(driver.cuStreamDestroy(driver.CUstream(stream)))
        for device, address in self.buffers.values():
            self.on_device(device, driver.cuMemFree, address)
        for context in self.foreign_contexts:
            ok(driver.cuCtxDestroy(driver.CUcontext(context)))
        assert stack() == []
        unbroken(self.sim)
        live = self.sim.live()
        assert live["contexts"] == devices
        assert live["retains"] == [2] * devices  # kina's and this one's
        assert_all_idle(self.sim, *range(devices), private_streams=devices)

    def check_counters(self) -> None:
        for check in (False, True):  # what one Runtime leases, another one's counters wait for
            for runtime in self.runtimes.values():
                if not runtime.closed:
                    with kina.session(runtime) as session:
                        session.synchronize()
                        if check:
                            assert_counters_settled(session)

    def on_device(self, ordinal: int, call: Callable[..., tuple], *arguments: Any) -> Any:
        """A call of another library, which makes the context current around it."""
        ok(driver.cuCtxPushCurrent(driver.CUcontext(self.contexts[ordinal])))
        try:
            return ok(call(*arguments))
        finally:
            ok(driver.cuCtxPopCurrent())

    def order(self, device: int, first: int, then: int) -> None:
        """What comes next on the stream `then` waits, on the device, for what is on `first`."""
        event = self.on_device(device, driver.cuEventCreate, 2)
        self.on_device(device, driver.cuEventRecord, event, driver.CUstream(first))
        self.on_device(device, driver.cuStreamWaitEvent, driver.CUstream(then), event, 0)
        self.on_device(device, driver.cuEventDestroy, event)

    def function(self, session: Any, runtime: int, entry: str) -> Any:
        known = self.functions.setdefault(runtime, {})
        if entry not in known:
            with session.raw() as raw:
                known[entry] = raw.module(KERNELS).function(entry, SIGNATURES[entry])
        return known[entry]

    # -------------------------------------------------------------------------------- contexts, streams, Runtimes

    def set_stack(self, contexts: list[str]) -> None:
        """What the thread's own program has on its stack before kina comes."""
        for name in contexts:
            if name == "foreign":
                context = ok(driver.cuCtxCreate(None, 0, 0))  # and it is current
                self.foreign_contexts.append(int(context))
            else:
                ok(driver.cuCtxPushCurrent(driver.CUcontext(self.contexts[0 if name == "first" else -1])))
        self.stacks[threading.get_ident()] = stack()

    def check_stack(self) -> None:
        assert stack() == self.stacks.get(threading.get_ident(), []), "not the stack from before the sessions"

    def clear_stack(self) -> None:
        for _ in stack():
            ok(driver.cuCtxPopCurrent())

    def new_stream(self, stream: Any, device: int, blocking: bool) -> None:
        made = int(self.on_device(device, driver.cuStreamCreate, 0 if blocking else 1))
        self.handles[stream] = self.foreign_streams[stream] = made

    def stall(self, stream: Any) -> None:
        self.sim.stall(self.handles[stream])

    def step(self, stream: Any, operations: int) -> None:
        self.sim.step(self.handles[stream], operations)

    def resume(self, streams: list[Any]) -> None:
        for stream in streams:
            self.sim.resume(self.handles[stream])

    def share_pools(self, devices: int) -> None:
        """All Runtimes of a device get their memory from one pool: what one has freed serves another next."""
        for device in range(devices):
            # So coarse that there are few blocks, and each is soon another Runtime's.
            pool = kina.memory.PoolMemoryResource(
                kina.memory.CudaAsyncMemoryResource(device), alignment=1 << 20, initial_bytes=6 << 20
            )
            kina.memory.set_default_resource(pool, device)
            with kina.session(kina.Runtime(device)) as session:
                session.empty(1)
                session.synchronize()
            self.pools.append(pool)

    def share_drivers_memory(self, devices: int) -> None:
        """Each allocation and each release is a call of the driver, which sees what is used after its release."""
        for device in range(devices):
            resource = kina.memory.CudaAsyncMemoryResource(device)
            kina.memory.set_default_resource(resource, device)
            self.resources.append(resource)

    def trim_pools(self, keep_bytes: int = 1 << 40) -> None:
        """What threads keep of them to themselves, others may have from now on, as far as their streams allow."""
        for pool in self.pools:
            pool.trim(keep_bytes)

    def end_pools(self) -> None:
        """Nothing is live in them, and all they have goes back."""
        for device, resource in enumerate(self.resources):
            kina.memory.set_default_resource(None, device)
            assert resource.live_bytes == 0
        self.resources.clear()
        for device, pool in enumerate(self.pools):
            kina.memory.set_default_resource(None, device)
            stats = pool.stats()
            assert (stats.live_bytes, stats.live_allocations, stats.unknown_frees) == (0, 0, 0)
            assert stats.cached_bytes == stats.reserved_bytes
            pool.trim()
            assert pool.stats().reserved_bytes == 0
        self.pools.clear()

    def new_runtime(self, runtime: int, device: int, stream: Any) -> None:
        self.runtimes[runtime] = kina.Runtime(device, stream=None if stream is None else self.owner_of(stream))

    def owner_of(self, stream: Any) -> Any:
        handle = self.handles[stream]

        class Owner:
            def __cuda_stream__(self) -> tuple[int, int]:
                return (0, handle)

        return Owner()

    def close_runtime(self, runtime: int) -> None:
        self.functions.pop(runtime, None)
        self.runtimes[runtime].close()

    def drop_runtime(self, runtime: int) -> None:
        self.functions.pop(runtime, None)
        del self.runtimes[runtime]
        gc.collect()

    # -------------------------------------------------------------------------------- sessions

    def enter(self, session: int, target: Any, stream: Any, key: Any) -> None:
        """`target` is a number for a Runtime, a name for a device; `stream` one to adopt, `key` what it will run on."""
        opened = kina.session(
            self.runtimes[target] if isinstance(target, int) else target,
            stream=None if stream is None else self.owner_of(stream),
        )
        opened.__enter__()
        assert stack()[-1] == self.contexts[int(opened.device[5:])]
        self.sessions[session] = opened
        with opened.raw() as raw:
            self.handles[key] = raw.unsafe_stream_handle()

    def leave(self, session: int, how: str, seals: bool | None) -> None:
        """With None it may seal, or not: on a stream of somebody else's, whatever of kina's work was done."""
        opened = self.sessions[session]
        before = self.sim.calls("cuEventRecord")
        if how == "close":
            opened.close()
        elif how == "raise":
            error = ValueError("the block's own")
            opened.__exit__(ValueError, error, None)
        else:
            opened.__exit__(None, None, None)
        assert opened.closed
        if seals is not None:
            assert (self.sim.calls("cuEventRecord") > before) == seals, "foreign owners and staging are sealed at exit"

    def abandon(self, session: int) -> None:
        del self.sessions[session]
        gc.collect()

    def use(self, session: int, what: str, tensor: int | None = None) -> None:
        """A use that must be refused."""
        opened = self.sessions[session]
        given = None if tensor is None else self.tensors[tensor]
        if what == "launch":
            with opened.raw() as raw:
                function = raw.module(KERNELS).function("add_one", SIGNATURES["add_one"])
                function.launch(kina.LaunchConfig.linear(1), given, 1)
        elif what == "saxpy on itself":
            with opened.raw() as raw:
                function = raw.module(KERNELS).function("saxpy", SIGNATURES["saxpy"])
                function.launch(kina.LaunchConfig.linear(1), given, given, 1.0, 1)
        elif what == "borrowed":
            with opened.raw() as raw:
                function = raw.module(KERNELS).function("add_one", SIGNATURES["add_one"])
                borrow = raw.ref(given)
                try:
                    function.launch(kina.LaunchConfig.linear(1), given, 1)
                finally:
                    borrow.release()
        elif what in ("empty", "zeros"):
            getattr(opened, what)(3)
        elif tensor is None:
            getattr(opened, what)()
        else:
            getattr(opened, what)(given)

    # -------------------------------------------------------------------------------- tensors

    def make(self, session: int, tensor: int, kind: str, values: np.ndarray) -> None:
        opened = self.sessions[session]
        if kind == "from_host":
            copied = values.copy()
            made = opened.from_host(copied)
            copied.fill(np.nan)  # it has been read to its end
        elif kind == "zeros":
            made = opened.zeros(values.shape)
        else:
            made = opened.full(values.shape, float(values.flat[0]))
        self.tensors[tensor] = made

    def view(self, tensor: int, source: int, how: str) -> None:
        given = self.tensors[source]
        self.tensors[tensor] = given.as_readonly() if how == "readonly" else VIEWS[how](given)

    def copy(self, session: int, tensor: int, source: int) -> None:
        self.tensors[tensor] = self.sessions[session].copy(self.tensors[source])

    def launch(
        self, session: int, runtime: int, entry: str, tensors: list[int], numbers: list[float], refs: bool
    ) -> None:
        opened = self.sessions[session]
        given = [self.tensors[tensor] for tensor in tensors]
        function = self.function(opened, runtime, entry)
        config = kina.LaunchConfig.linear(given[0].size, 64)
        with opened.raw() as raw:
            if refs:
                given = [raw.mut(given[0]), *(raw.ref(tensor) for tensor in given[1:])]
            function.launch(config, *given, *numbers, self.tensors[tensors[0]].size)

    def read(self, session: int, tensor: int, expected: np.ndarray) -> None:
        found = self.sessions[session].to_host(self.tensors[tensor])
        np.testing.assert_array_equal(found, expected)

    def adopt(self, session: int, tensor: int, source: int) -> None:
        self.tensors[tensor] = self.sessions[session].adopt(self.tensors[source])

    def drop(self, tensors: list[int], capsules: list[int]) -> None:
        for tensor in tensors:
            del self.tensors[tensor]
        for capsule in capsules:
            del self.capsules[capsule]

    def collect(self) -> None:
        gc.collect()

    # -------------------------------------------------------------------------------- modules

    def drop_functions(self, runtime: int) -> None:
        self.functions.pop(runtime, None)

    def churn_modules(self, session: int, runtime: int) -> None:
        """Load as many modules as the cache holds: whatever it held is out."""
        self.functions.pop(runtime, None)
        with self.sessions[session].raw() as raw:
            for number in range(CACHED_MODULES):
                raw.module(TINY_PTX.format(number))

    def load_functions(self, session: int, runtime: int) -> None:
        for entry in SIGNATURES:
            self.function(self.sessions[session], runtime, entry)

    def drop_what_runs(self, device: int) -> None:
        """The last name of a module goes while a launch from it stands still: it is not unloaded, which would wait."""
        runtime, other = kina.Runtime(device), kina.Runtime(device)
        with kina.session(runtime) as session:
            tensor = session.zeros(8)
            function = self.function(session, 0, "add_one")
        settle(self.sim, device)  # so that nothing else is dead, or in quarantine
        with kina.session(runtime) as session:
            stream = stream_of(session)
        with self.sim.stalled(stream):
            with kina.session(runtime) as session, session.raw():
                function.launch(kina.LaunchConfig.linear(8), tensor, 8)
            del self.functions[0], function, session, runtime
            gc.collect()
            with kina.session(other) as session:
                session.synchronize()
        with kina.session(other) as session:
            np.testing.assert_array_equal(session.to_host(session.adopt(tensor)), np.ones(8))

    # -------------------------------------------------------------------------------- waiting

    def synchronize(self, session: int) -> None:
        self.sessions[session].synchronize()

    def complete(self, session: int, witness: int) -> None:
        self.witnesses[witness] = self.sessions[session].completion()

    def wait(self, witness: int) -> None:
        self.witnesses[witness].wait()
        assert self.witnesses[witness].done()

    def ask(self, witness: int, must_be_done: bool) -> None:
        done = self.witnesses[witness].done()
        assert done or not must_be_done, "what the host has waited for is done"

    def count(self, session: int, expected: dict[str, int]) -> None:
        counters = self.sessions[session].counters()
        if self.pools or self.resources:
            expected = {name: count for name, count in expected.items() if name != "allocations"}
        assert {name: getattr(counters, name) for name in expected} == expected
        assert counters.leaked == 0
        assert counters.frees <= counters.allocations
        assert counters.retired + counters.pending <= counters.leases
        assert counters.reserved_bytes >= counters.live_bytes

    # -------------------------------------------------------------------------------- another library

    def new_buffer(self, buffer: int, device: int, values: np.ndarray) -> None:
        address = int(self.on_device(device, driver.cuMemAlloc, values.nbytes))
        self.buffers[buffer] = (device, address)
        self.sim.write(address, values.tobytes())

    def lend(self, session: int, tensor: int, buffer: int, device: int, size: int, stream: Any) -> None:
        """A session adopts the memory of another library, which has work pending on it."""
        address = self.buffers[buffer][1]
        lender = Lender(self.sim, device, address, size, lambda then: self.order(device, self.handles[stream], then))
        self.lenders.append(lender)
        self.tensors[tensor] = self.sessions[session].adopt(lender)

    def export(self, capsule: int, tensor: int, stream: Any) -> None:
        self.capsules[capsule] = self.tensors[tensor].to_dlpack(stream=-1 if stream is None else self.handles[stream])

    def address(self, where: tuple[str, int]) -> int:
        kind, number = where
        if kind == "buffer":
            return self.buffers[number][1]
        tensor = managed_of(self.capsules[number]).dl_tensor
        return int(tensor.data) + tensor.byte_offset

    def foreign_copy(self, device: int, stream: Any, to: tuple, source: tuple, nbytes: int) -> None:
        self.on_device(
            device, driver.cuMemcpyDtoDAsync, self.address(to), self.address(source), nbytes,
            driver.CUstream(self.handles[stream]),
        )  # fmt: skip

    def foreign_fill(self, device: int, stream: Any, to: tuple, value: float, size: int) -> None:
        self.on_device(
            device, driver.cuMemsetD32Async, self.address(to), int(np.float32(value).view(np.uint32)), size,
            driver.CUstream(self.handles[stream]),
        )  # fmt: skip

    def foreign_read(self, device: int, stream: Any, buffer: int, expected: np.ndarray) -> None:
        self.foreign_wait(device, stream)
        found = self.sim.read(self.buffers[buffer][1], expected.nbytes)  # a copy by the driver would wait for more
        np.testing.assert_array_equal(np.frombuffer(found, np.float32), expected)

    def foreign_wait(self, device: int, stream: Any) -> None:
        self.on_device(device, driver.cuStreamSynchronize, driver.CUstream(self.handles[stream]))

    def foreign_order(self, device: int, first: Any, then: Any) -> None:
        self.order(device, self.handles[first], self.handles[then])


#: Views by name: the same expressions on a tensor and on the array that stands for it.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "rest": lambda x: x[1:],
    "half": lambda x: x[: max(1, x.shape[0] // 2)],
    "even": lambda x: x[::2],
    "reversed": lambda x: x[::-1],
    "flat": lambda x: x.reshape(-1),
}

TINY_PTX = """.version 7.0
.target sm_70
.address_size 64
.visible .entry tiny_{}() {{ ret; }}
"""


def run_program(devices: int, seed: int, operations: list[Operation]) -> str:
    """Run it, in a process that has not used CUDA yet. Returns "" or what went wrong, and where."""
    sim = Sim()
    ok(driver.cuInit(0))
    machine = Machine(sim, devices)
    done = 0
    try:
        with sim.shuffled(seed):
            for operation in operations:
                machine.run(operation)
                done += 1
            machine.finish(devices)
        unbroken(sim)
    except BaseException:
        lines = [f"{'=>' if i == done else '  '} {i}: {o}" for i, o in enumerate([*operations, "the end"])]
        broken = [f"{v['name']}: {v.get('note')}" for v in sim.trace(event="violation")]
        return "\n".join([*lines, *broken, traceback.format_exc()])
    return ""
