"""The simulated CUDA driver, from Python.

Three ways of use:

- `sim_env(devices=2)`: the environment in which any process finds the simulated `libcuda.so.1`;
- `run_simulated(code)`: run Python code, or a command, in such a process;
- `Sim()`: inside such a process, control of the driver: stall streams, order faults, read the trace.

The library is built once per state of its sources, into a folder under the system's temporary one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["KERNELS_PTX", "Sim", "library_path", "run_simulated", "sim_env", "simulated"]

SOURCES = Path(__file__).resolve().parents[1] / "driver_sim"
KERNELS_PTX = SOURCES / "kernels.ptx"

_SETTINGS = {
    "devices": "KINA_SIM_DEVICES",  # number of physical devices
    "memory": "KINA_SIM_MEMORY",  # bytes of each
    "peers": "KINA_SIM_PEERS",  # row-major matrix of 0 and 1, "0110" for two devices
    "trace": "KINA_SIM_TRACE",  # file to append JSON lines to
    "hide": "KINA_SIM_HIDE",  # names that cuGetProcAddress does not find
    "driver_version": "KINA_SIM_DRIVER_VERSION",
    "reuse_handles": "KINA_SIM_REUSE_HANDLES",
    "host_readable": "KINA_SIM_HOST_READABLE",
    "host_alloc_syncs": "KINA_SIM_HOST_ALLOC_SYNCS",
    "poison": "KINA_SIM_POISON",
    "latency_us": "KINA_SIM_LATENCY_US",
    "timeout_ms": "KINA_SIM_TIMEOUT_MS",
    "quiet_ms": "KINA_SIM_QUIET_MS",
    "seed": "KINA_SIM_SEED",  # shuffle the streams from the start
}

# Runtime library, variable of its options, and the options. Signals stay with the simulation and its tests: a read of
# device memory by the host is one. A process with threads, which every user of the simulation is, waits at its end for
# races with what they do then: a second by default, which is ages for work that takes microseconds.
_SANITIZERS = {
    "address": ("libasan.so", "ASAN_OPTIONS", "detect_leaks=0:handle_segv=0:handle_abort=0"),
    "thread": (
        "libtsan.so",
        "TSAN_OPTIONS",
        "handle_segv=0:report_signal_unsafe=0:die_after_fork=0:atexit_sleep_ms=50:"
        f"suppressions={SOURCES / 'tsan.supp'}:print_suppressions=0",
    ),
    "undefined": ("libubsan.so", "UBSAN_OPTIONS", "print_stacktrace=1"),
}


def _builder() -> Any:
    spec = importlib.util.spec_from_file_location("kina_driver_sim_build", SOURCES / "build.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"no builder in {SOURCES}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuda_include() -> Path:
    """The folder of cuda.h that the library is built with."""
    found: Path = _builder().find_include()
    return found


@functools.cache
def library_path(sanitize: str | None = None) -> Path:
    """Build the library if these sources were not built yet, and return its path.

    Safe when several processes ask at once: one builds under a lock, the others wait for it.
    """
    builder = _builder()
    include = builder.find_include()
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), SOURCES / "build.py", SOURCES / "exports.map"]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for header in ("cuda.h", "cudaTypedefs.h"):
        digest.update((include / header).read_bytes())
    digest.update(f"{sanitize}|{os.environ.get('CXX', 'c++')}".encode())
    root = Path(tempfile.gettempdir()) / f"kina-driver-sim-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user")
    folder = root / digest.hexdigest()[:20]
    library: Path = folder / builder.SONAME
    if library.exists():
        return library
    with open(root / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            # Objects of the last build are kept beside: what did not change is not compiled again.
            stage = root / f"stage-{sanitize or 'plain'}"
            with open(root / f"{stage.name}.lock", "w") as stage_lock:
                fcntl.flock(stage_lock, fcntl.LOCK_EX)
                built = builder.build(stage, include, sanitize)
                folder.mkdir(exist_ok=True)
                shutil.copy2(built, folder / f"{builder.SONAME}.partial")
            os.replace(folder / f"{builder.SONAME}.partial", library)
    return library


@functools.cache
def _sanitizer_libraries(sanitize: str) -> str:
    """What must be loaded before everything else, for the interpreter is not instrumented.

    libstdc++ is, because the runtime looks at its start for the exception functions that it wraps.
    """
    names = [*(_SANITIZERS[part][0] for part in sanitize.split(",")), "libstdc++.so.6"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    asked = [[*compiler, f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(a, check=True, capture_output=True, text=True).stdout.strip() for a in asked]
    return ":".join(found)


def _sanitizer_env(sanitize: str, reports: str | None) -> dict[str, str]:
    """The environment of an instrumented process: the first report ends it, or (TSan) gives it an exit status."""
    env = {"KINA_SIM_SANITIZE": sanitize, "LD_PRELOAD": _sanitizer_libraries(sanitize)}
    for _, variable, options in (_SANITIZERS[part] for part in sanitize.split(",")):
        env[variable] = options if reports is None else f"{options}:log_path={reports}/report"
    return env


def sim_env(
    devices: int = 1,
    *,
    base: Mapping[str, str] | None = None,
    sanitize: str | None = None,
    **settings: Any,
) -> dict[str, str]:
    """The environment of a process that shall see `devices` simulated GPUs.

    Settings are the keys of `_SETTINGS`; `base` is the environment to start from (os.environ).
    `sanitize` ("address", "thread", "undefined", or two with a comma between), or KINA_SIM_SANITIZE in the
    environment, picks an instrumented build and preloads its runtime. What that reports goes to stderr, or
    into files in the folder that KINA_SIM_REPORTS names.
    """
    env = dict(os.environ if base is None else base)
    for name in [*_SETTINGS.values(), "CUDA_VISIBLE_DEVICES"]:
        env.pop(name, None)
    for key, value in {"devices": devices, **settings}.items():
        if key not in _SETTINGS:
            raise TypeError(f"unknown setting of the simulated driver: {key}")
        if value is None:
            continue
        if not isinstance(value, (str, os.PathLike)):
            value = int(value)
        env[_SETTINGS[key]] = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    sanitize = sanitize or env.get("KINA_SIM_SANITIZE") or None
    if sanitize:
        env.update(_sanitizer_env(sanitize, env.get("KINA_SIM_REPORTS")))
    folder = str(library_path(sanitize).parent)
    rest = env.get("LD_LIBRARY_PATH")
    env["LD_LIBRARY_PATH"] = f"{folder}:{rest}" if rest else folder
    return env


def run_simulated(
    code: str | Sequence[str],
    *,
    devices: int = 1,
    check: bool = True,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    sanitize: str | None = None,
    **settings: Any,
) -> subprocess.CompletedProcess[str]:
    """Run Python source, or an argument list, in a process on the simulated driver.

    With `check`, a failure raises AssertionError that shows the output.
    """
    args = [sys.executable, "-c", code] if isinstance(code, str) else list(code)
    full = sim_env(devices, sanitize=sanitize, **settings)
    full.update(env or {})
    done = subprocess.run(args, env=full, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}")
    return done


def simulated() -> bool:
    """Whether the libcuda.so.1 of this process is the simulation."""
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "kina_sim_trace_position")
    except OSError:
        return False


class _Launch(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("parameters", ctypes.POINTER(ctypes.c_ubyte)),
        ("parameter_bytes", ctypes.c_size_t),
        ("parameter_count", ctypes.c_size_t),
        ("offsets", ctypes.POINTER(ctypes.c_size_t)),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("opaque", ctypes.c_void_p),
    ]


_BODY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch), ctypes.c_void_p)


class Launch:
    """One launch, as a kernel body of a test sees it."""

    def __init__(self, raw: Any, library: Any) -> None:
        self._raw = raw
        self._library = library
        self.name: str = raw.contents.name.decode()
        self.grid = tuple(raw.contents.grid)
        self.block = tuple(raw.contents.block)
        self.shared_bytes: int = raw.contents.shared_bytes
        self.bytes = bytes(raw.contents.parameters[: raw.contents.parameter_bytes])

    def __len__(self) -> int:
        return int(self._raw.contents.parameter_count)

    def parameter(self, index: int) -> bytes:
        """The bytes of one parameter."""
        offset = self._raw.contents.offsets[index]
        return self.bytes[offset : offset + self._raw.contents.sizes[index]]

    def address(self, index: int) -> int:
        return int.from_bytes(self.parameter(index), "little")

    def memory(self, address: int, nbytes: int, *, write: bool = False) -> memoryview:
        """The bytes of a device range; raises if the launch may not touch it now."""
        where = self._library.kina_sim_launch_at(self._raw, address, nbytes, int(write))
        if not where:
            raise MemoryError(f"illegal device range {address:#x} + {nbytes}")
        return memoryview((ctypes.c_ubyte * nbytes).from_address(where)).cast("B")


class Sim:
    """Control of the simulated driver in this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        if not hasattr(library, "kina_sim_trace_position"):
            raise RuntimeError("libcuda.so.1 of this process is not the simulated driver")
        u64, voidp, text = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "stall": (ctypes.c_int, [voidp]),
            "step": (ctypes.c_int, [voidp, u64]),
            "resume": (ctypes.c_int, [voidp]),
            "pending": (ctypes.c_int64, [voidp]),
            "stall_all": (None, []),
            "resume_all": (None, []),
            "stall_new_streams": (None, [ctypes.c_int]),
            "wait_idle": (ctypes.c_int, [u64]),
            "shuffle": (None, [u64]),
            "stop_shuffle": (None, []),
            "set_latency_us": (None, [u64]),
            "fail": (None, [text, u64, ctypes.c_int, ctypes.c_int]),
            "clear_faults": (None, []),
            "faults_delivered": (u64, []),
            "break_device": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
            "calls": (u64, [text]),
            "call_counts": (voidp, []),
            "reset_counts": (None, []),
            "trace_position": (u64, []),
            "trace": (voidp, [u64]),
            "clear_trace": (None, []),
            "violations": (u64, []),
            "live": (voidp, []),
            "free": (None, [voidp]),
            "read": (ctypes.c_int, [ctypes.c_ulonglong, voidp, ctypes.c_size_t]),
            "write": (ctypes.c_int, [ctypes.c_ulonglong, voidp, ctypes.c_size_t]),
            "register_kernel": (None, [text, _BODY, voidp]),
            "launch_at": (
                voidp,
                [ctypes.POINTER(_Launch), ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_int],
            ),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, f"kina_sim_{name}")
            function.restype = result
            function.argtypes = arguments
        self._library = library
        self._bodies: list[Any] = []  # ctypes callbacks must outlive every launch

    def _stream(self, name: str, stream: int, *rest: int) -> None:
        if getattr(self._library, f"kina_sim_{name}")(int(stream), *rest) < 0:
            raise ValueError(f"no live stream with handle {int(stream):#x}")

    def _text(self, name: str, *args: int) -> str:
        pointer = getattr(self._library, f"kina_sim_{name}")(*args)
        try:
            return ctypes.string_at(pointer).decode()
        finally:
            self._library.kina_sim_free(pointer)

    # Streams: handles as integers; 0 or 1 is the legacy stream of the current context.
    def stall(self, stream: int) -> None:
        """Let the stream run nothing until it is resumed or stepped."""
        self._stream("stall", stream)

    def step(self, stream: int, operations: int = 1) -> None:
        self._stream("step", stream, operations)

    def resume(self, stream: int) -> None:
        self._stream("resume", stream)

    @contextlib.contextmanager
    def stalled(self, stream: int) -> Iterator[None]:
        self.stall(stream)
        try:
            yield
        finally:
            self.resume(stream)

    def pending(self, stream: int) -> int:
        """Operations queued and not done."""
        count: int = self._library.kina_sim_pending(int(stream))
        if count < 0:
            raise ValueError(f"no live stream with handle {int(stream):#x}")
        return count

    def stall_all(self) -> None:
        self._library.kina_sim_stall_all()

    def resume_all(self) -> None:
        self._library.kina_sim_resume_all()

    @contextlib.contextmanager
    def new_streams_stalled(self) -> Iterator[None]:
        self._library.kina_sim_stall_new_streams(1)
        try:
            yield
        finally:
            self._library.kina_sim_stall_new_streams(0)

    def wait_idle(self, timeout_ms: int = 10000) -> None:
        if self._library.kina_sim_wait_idle(timeout_ms) < 0:
            raise TimeoutError("streams of the simulated driver are still busy")

    @contextlib.contextmanager
    def shuffled(self, seed: int) -> Iterator[None]:
        """Run one operation at a time, each on a stream drawn from the seed, as late as possible."""
        self._library.kina_sim_shuffle(seed)
        try:
            yield
        finally:
            self._library.kina_sim_stop_shuffle()

    def set_latency_us(self, latency_us: int) -> None:
        self._library.kina_sim_set_latency_us(latency_us)

    # Faults
    def fail(self, name: str, nth: int = 1, result: int = 999, *, from_then_on: bool = False) -> None:
        """Let the nth call of `name` from now ("*": of any name) return `result` and do nothing."""
        self._library.kina_sim_fail(name.encode(), nth, int(result), int(from_then_on))

    def clear_faults(self) -> None:
        self._library.kina_sim_clear_faults()

    @property
    def faults_delivered(self) -> int:
        return int(self._library.kina_sim_faults_delivered())

    @contextlib.contextmanager
    def failing(self, name: str, nth: int = 1, result: int = 999, *, from_then_on: bool = False) -> Iterator[None]:
        self.fail(name, nth, result, from_then_on=from_then_on)
        try:
            yield
        finally:
            self.clear_faults()

    def break_device(self, device: int, result: int = 700) -> None:
        """Make every context of the device fail from now on, as after a fault of its work."""
        if self._library.kina_sim_break_device(device, int(result)) < 0:
            raise ValueError(f"no device {device}")

    # Counters and trace
    def calls(self, name: str = "*") -> int:
        return int(self._library.kina_sim_calls(name.encode()))

    def call_counts(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self._text("call_counts"))
        return counts

    def reset_counts(self) -> None:
        self._library.kina_sim_reset_counts()

    @property
    def position(self) -> int:
        """Number of the last trace record; give it to `trace` later."""
        return int(self._library.kina_sim_trace_position())

    def trace(self, since: int = 0, *, name: str | None = None, event: str | None = None) -> list[dict[str, Any]]:
        """Records after `since`: calls ("call"), stream work ("exec"), broken rules ("violation")."""
        records = [json.loads(line) for line in self._text("trace", since).splitlines()]
        return [r for r in records if (name is None or r["name"] == name) and (event is None or r["event"] == event)]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[list[dict[str, Any]]]:
        """A list that holds, after the block, the records of the block."""
        since = self.position
        records: list[dict[str, Any]] = []
        try:
            yield records
        finally:
            records.extend(self.trace(since))

    def clear_trace(self) -> None:
        self._library.kina_sim_clear_trace()

    @property
    def violations(self) -> int:
        return int(self._library.kina_sim_violations())

    def live(self) -> dict[str, Any]:
        """What exists now: contexts, streams, events, modules, pools, graphs, allocations, retains."""
        report: dict[str, Any] = json.loads(self._text("live"))
        return report

    # Memory and kernels
    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of memory, now, whatever work is queued."""
        buffer = ctypes.create_string_buffer(nbytes)
        if self._library.kina_sim_read(address, buffer, nbytes) < 0:
            raise ValueError(f"{address:#x} is no address of the driver's")
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        if self._library.kina_sim_write(address, data, len(data)) < 0:
            raise ValueError(f"{address:#x} is no address of the driver's")

    def kernel(self, prefix: str) -> Callable[[Callable[[Launch], int | None]], Callable[[Launch], int | None]]:
        """Decorator: the host code of every entry whose name begins with `prefix`.

        It runs on the stream's worker thread; a returned number, or an exception (700), is the
        fault that its context dies of.
        """

        def register(function: Callable[[Launch], int | None]) -> Callable[[Launch], int | None]:
            def body(raw: Any, _user: Any) -> int:
                try:
                    return int(function(Launch(raw, self._library)) or 0)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    return 700

            callback = _BODY(body)
            self._bodies.append(callback)
            self._library.kina_sim_register_kernel(prefix.encode(), callback, None)
            return function

        return register
