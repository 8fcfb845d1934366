"""The driver as tests ask it: what is current, what is stacked, contexts and streams that are not kina's.

Everything works alike on the simulated driver and on hardware.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import inspect
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from helpers import driver_sim
from helpers.forks import Forks

__all__ = [
    "KERNELS",
    "ForeignStream",
    "current_context",
    "driver",
    "during_a_capture",
    "foreign_context",
    "forget_adopted_streams",
    "fork_body",
    "in_thread",
    "ok",
    "on_stack",
    "primary_context",
    "run_body",
    "simulation",
    "stack",
    "stalled",
    "stalled_until_waited",
    "stream_of",
    "unchanged",
    "until",
    "view",
]

KERNELS = driver_sim.KERNELS_PTX.read_text()

SPIN_NS = 300_000_000  # how long work is held up on hardware


@functools.cache
def simulation() -> driver_sim.Sim | None:
    """Control of the simulated driver; None on hardware."""
    return driver_sim.Sim() if driver_sim.simulated() else None


def ok(result: tuple) -> Any:
    """What a call of cuda.bindings gave, its success asserted."""
    assert int(result[0]) == 0, f"the driver answered {result[0]!r}"
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


# Contexts -------------------------------------------------------------------------------------------------


def current_context() -> int:
    """The calling thread's current context, 0 for none."""
    return int(ok(driver.cuCtxGetCurrent()))


def stack() -> list[int]:
    """The calling thread's whole stack of contexts, lowest first: everything is popped and pushed back."""
    ok(driver.cuInit(0))
    found: list[int] = []
    while current := current_context():
        found.append(current)
        ok(driver.cuCtxPopCurrent())
    for context in reversed(found):
        ok(driver.cuCtxPushCurrent(driver.CUcontext(context)))
    return found[::-1]


def device_of_runtime() -> int | None:
    """What ``cudaGetDevice`` says. The simulation has no cudart: there, the device of the current context."""
    if simulation() is None:
        from cuda.bindings import runtime

        return int(ok(runtime.cudaGetDevice()))
    return int(ok(driver.cuCtxGetDevice())) if current_context() else None


@contextlib.contextmanager
def unchanged() -> Iterator[list[int]]:
    """The block leaves the whole context stack, and ``cudaGetDevice``, as they were."""
    before, device = stack(), device_of_runtime()
    yield before
    after, device_after = stack(), device_of_runtime()
    assert after == before, f"the context stack was {before}, it is {after}"
    assert device_after == device, f"the device of the runtime library was {device}, it is {device_after}"


@contextlib.contextmanager
def own_stack() -> Iterator[None]:
    """Whatever the block leaves on the context stack is taken away after it."""
    before = stack()
    yield
    while current_context():
        ok(driver.cuCtxPopCurrent())
    for context in before:
        ok(driver.cuCtxPushCurrent(driver.CUcontext(context)))


def primary_context(ordinal: int = 0) -> int:
    """The primary context of a device, retained for the life of the process."""
    return _primary(ordinal)


@functools.cache
def _primary(ordinal: int) -> int:
    ok(driver.cuInit(0))
    return int(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(ordinal)))))


@contextlib.contextmanager
def foreign_context(ordinal: int = 0) -> Iterator[int]:
    """A context that another library made. It is not current."""
    ok(driver.cuInit(0))
    context = ok(driver.cuCtxCreate(None, 0, ok(driver.cuDeviceGet(ordinal))))
    ok(driver.cuCtxPopCurrent())
    try:
        yield int(context)
    finally:
        ok(driver.cuCtxDestroy(context))


@contextlib.contextmanager
def on_stack(*contexts: int) -> Iterator[None]:
    """The thread's stack holds exactly these contexts, lowest first; what was there before comes back."""
    before = stack()
    _set_stack(contexts)
    try:
        yield
    finally:
        _set_stack(before)


def _set_stack(contexts: Any) -> None:
    while current_context():
        ok(driver.cuCtxPopCurrent())
    for context in contexts:
        ok(driver.cuCtxPushCurrent(driver.CUcontext(context)))


def push(context: int) -> None:
    ok(driver.cuCtxPushCurrent(driver.CUcontext(context)))


def pop() -> int:
    return int(ok(driver.cuCtxPopCurrent()))


def set_current(context: int) -> None:
    """What ``cudaSetDevice`` does to the driver's stack."""
    ok(driver.cuCtxSetCurrent(driver.CUcontext(context)))


# Streams and work -----------------------------------------------------------------------------------------


class ForeignStream:
    """A stream of another library, or a bare handle, with the ``__cuda_stream__`` protocol."""

    def __init__(self, handle: int | None = None, *, context: int | None = None, flags: int = 1) -> None:
        self.context = context if context is not None else primary_context()
        self.owned = handle is None
        with on_stack(self.context):
            self.handle = int(ok(driver.cuStreamCreate(flags))) if handle is None else handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def synchronize(self) -> None:
        with on_stack(self.context):
            ok(driver.cuStreamSynchronize(driver.CUstream(self.handle)))

    def destroy(self) -> None:
        with on_stack(self.context):
            ok(driver.cuStreamDestroy(driver.CUstream(self.handle)))


@functools.cache
def _resident_streams() -> list[ForeignStream]:
    return [ForeignStream() for _ in range(32)]


def forget_adopted_streams() -> None:
    """The thread keeps the Runtimes of as many streams as it can: from here on, of those alone."""
    import kina

    for stream in _resident_streams():
        with kina.session(0, stream=stream):
            pass
    gc.collect()


def stream_of(session: Any) -> int:
    """The native handle of a session's stream."""
    with session.raw() as raw:
        return raw.unsafe_stream_handle()


@functools.cache
def _spin(context: int) -> Any:
    module = ok(driver.cuModuleLoadData(KERNELS.encode() + b"\0"))
    return ok(driver.cuModuleGetFunction(module, b"spin"))


@contextlib.contextmanager
def stalled(stream: Any) -> Iterator[None]:
    """A stream of the first device (a session, a ForeignStream or a handle) stands still inside the block.

    On hardware a kernel holds it up for 0.3 s from here: the block is short and never waits for the stream.
    """
    handle = (
        stream
        if isinstance(stream, int)
        else (stream.handle if isinstance(stream, ForeignStream) else stream_of(stream))
    )
    sim = simulation()
    with on_stack(primary_context()):
        if sim is not None:
            sim.stall(handle)
        else:
            function = _spin(primary_context())
            values = ((SPIN_NS,), (np.ctypeslib.as_ctypes_type(np.uint64),))
            ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, driver.CUstream(handle), values, 0))
    try:
        yield
    finally:
        if sim is not None:
            with on_stack(primary_context()):
                sim.resume(handle)


@contextlib.contextmanager
def stalled_until_waited(handle: int, call: str) -> Iterator[None]:
    """Of the simulated driver: the stream stands still until the host waits, by the driver's function of this name."""
    sim = simulation()
    assert sim is not None
    before, over = sim.calls(call), threading.Event()

    def let_go() -> None:
        while sim.calls(call) == before and not over.wait(0.001):
            pass
        sim.resume(handle)

    sim.stall(handle)
    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def during_a_capture(act: Callable[[], object]) -> None:
    """Act while another thread captures a stream in global mode, as PyTorch does; the capture must outlive it."""
    stream = ForeignStream()
    begun, over = threading.Event(), threading.Event()
    codes: list[int] = []

    def capture() -> None:
        handle = driver.CUstream(stream.handle)
        with on_stack(primary_context()):
            ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
            begun.set()
            over.wait(60)
            code, graph = driver.cuStreamEndCapture(handle)
            codes.append(int(code))
            if codes == [0]:
                ok(driver.cuGraphDestroy(graph))

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert begun.wait(60)
        act()
    finally:
        over.set()
        thread.join(60)
    assert codes == [0]
    stream.destroy()


def view(session: Any, tensor: Any) -> int:
    """The device address of a tensor's first element."""
    with session.raw() as raw:
        return raw.unsafe_address(raw.ref(tensor))


# Threads and processes ------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait for what the device or another thread does.

    One of them is kina's reaper: of what foreign owners lent, a synchronize releases what it finds, and the reaper may
    have some of it in hand, which it releases a little later.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def in_thread(function: Callable[[], Any]) -> Any:
    """Run it in a thread of its own, to the very end of the thread; its result, or its exception."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread hangs"
    # Python calls it ended when its code is; what the system does at the end of a thread comes after.
    until = time.monotonic() + 10
    while Path(f"/proc/self/task/{thread.native_id}").exists() and time.monotonic() < until:
        time.sleep(0.001)
    if failure:
        try:
            raise failure[0]
        finally:
            failure.clear()
    return outcome[0]


PRELUDE = """
import gc, os, sys
sys.path.insert(0, {tests!r})
import threading
import numpy as np
import kina
from helpers.cuda import *
sim = simulation()
"""


def source_of(body: Callable[..., None], arguments: tuple[Any, ...], also: Sequence[Callable[..., Any]]) -> str:
    texts = (textwrap.dedent(inspect.getsource(function)) for function in (*also, body))
    return "\n".join((*texts, f"{body.__name__}(*{arguments!r})\n"))


def run_body(
    body: Callable[..., None],
    *arguments: Any,
    also: Sequence[Callable[..., Any]] = (),
    timeout: float = 120,
    **env: str,
) -> str:
    """Run a function's body in a process of its own, which must end with 0 and write nothing to stderr.

    The body sees the names of this module, `kina`, `np`, `pytest`, `sim`, and the functions and classes in `also`.
    Returns what it printed.
    """
    prelude = PRELUDE.format(tests=str(Path(__file__).resolve().parents[1]))
    source = source_of(body, arguments, also)
    if "pytest." in source:  # which takes longer to import than all the rest
        prelude += "import pytest\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{prelude}\n{source}"],
        # Python 3.12 warns of forking with threads, and a driver has threads: that is what some bodies are about.
        env={**os.environ, "PYTHONWARNINGS": "ignore:This process:DeprecationWarning", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"exit code {done.returncode}, stderr:\n{done.stderr}"
    return done.stdout


@functools.cache
def _ready() -> tuple[Forks, dict[str, str]]:
    ready = Forks("helpers.bodies")
    atexit.register(ready.close)
    return ready, dict(os.environ)


def fork_body(
    body: Callable[..., None],
    *arguments: Any,
    also: Sequence[Callable[..., Any]] = (),
    timeout: float = 120,
    **env: str,
) -> None:
    """As `run_body`, in a fork of a process that has imported everything, which takes a tenth of the time.

    For bodies that neither fork nor leave in a way of their own, print nothing, and are not about how a process begins.
    """
    ready, before = _ready()
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    source = source_of(body, arguments, also)
    done = ready.run("run", source, timeout=timeout, leave=True, env={**changed, **env})
    assert (done.status, done.error, done.stderr) == (0, "", ""), (
        f"exit code {done.status}, stderr:\n{done.stderr}\n{done.error}"
    )
