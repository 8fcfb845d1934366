"""What the benchmarks share: interleaved timing, rows with their bars, the C loops, driver call counts.

Figures on a shared host drift, so contenders are timed in turns (a batch of each, over and over) and compared
by medians and by the median of the differences within a round. Nothing is timed before it was checked.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

__all__ = [
    "HOST_WAITS",
    "Borrowed",
    "Contender",
    "Launch",
    "Raw",
    "Report",
    "arguments",
    "count_driver_calls",
    "interleave",
    "leave",
    "load_interposer",
    "median_difference",
    "open_runtime",
    "optional",
]

HERE = Path(__file__).resolve().parent
#: Calls that make the host wait or ask the device how far it is: none belongs on a success path.
HOST_WAITS = (
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuStreamQuery",
)


def leave(what: str) -> NoReturn:
    """End with status 2: this machine cannot run the benchmark."""
    print(f"{Path(sys.argv[0]).name}: {what}", file=sys.stderr)
    raise SystemExit(2)


def open_runtime() -> tuple[ModuleType, Any]:
    """kina and a Runtime of the first GPU."""
    try:
        import kina
    except ImportError as error:
        leave(f"needs kina installed (pip install .): {error}")
    try:
        return kina, kina.Runtime("cuda:0")
    except kina.UnavailableError as error:
        leave(f"needs an NVIDIA GPU and its driver: {error}")


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--rounds", type=int, default=120, help="turns of each contender (default 120)")
    parser.add_argument("--batch", type=int, default=256, help="calls in a turn (default 256)")
    parser.add_argument("--only", metavar="WORD", help="run the parts whose name contains this word")
    parser.add_argument("--count-child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------- timing


@dataclass
class Contender:
    """One way to do the measured thing.

    ``batch()`` does it ``calls`` times; ``scope()`` makes what is current for it, outside the clock.
    """

    name: str
    batch: Callable[[], object]
    calls: int
    scope: Callable[[], AbstractContextManager[object]] = nullcontext


def interleave(
    contenders: Iterable[Contender], rounds: int, settle: Callable[[], object], warmup: int = 3
) -> dict[str, list[float]]:
    """Nanoseconds per call of each contender, one figure a round.

    ``settle()`` empties the device's queues between two batches, outside the clock. Every other round runs
    backwards, so that nobody always follows the same predecessor.
    """
    line = list(contenders)
    samples: dict[str, list[float]] = {contender.name: [] for contender in line}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + warmup):
            for contender in line if number % 2 == 0 else reversed(line):
                batch = contender.batch
                with contender.scope():
                    begin = time.perf_counter_ns()
                    batch()
                    end = time.perf_counter_ns()
                settle()
                if number >= warmup:
                    samples[contender.name].append((end - begin) / contender.calls)
    finally:
        gc.enable()
    return samples


def median_difference(samples: list[float], others: list[float]) -> float:
    """The median of the differences within a round."""
    return statistics.median(a - b for a, b in zip(samples, others, strict=True))


# ---------------------------------------------------------------------------------------------- rows


@dataclass
class Row:
    name: str
    unit: str
    value: float
    peers: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    bar: str | None = None
    ok: bool | None = None
    spread: tuple[float, float] | None = None


class Report:
    """Rows as they come, printed at once and written as JSON at the end."""

    def __init__(self, title: str, options: argparse.Namespace, raw: Raw) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.left_out: dict[str, str] = {}
        self.about = {
            "title": title,
            "device": raw.device_name(),
            "driver": raw.driver_version(),
            "python": platform.python_version(),
            "rounds": options.rounds,
            "batch": options.batch,
        }
        print(f"{title}: {self.about['device']}, driver for CUDA {self.about['driver']}", flush=True)

    def wants(self, part: str) -> bool:
        return not self.options.only or self.options.only in part

    def leave_out(self, name: str, error: object) -> None:
        """A peer that cannot take part is named once, with the reason."""
        if name in self.left_out:
            return
        self.left_out[name] = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        print(f"  left out: {name}: {self.left_out[name]}", flush=True)

    @contextlib.contextmanager
    def peer(self, name: str) -> Any:
        """A peer's preparation: where it fails, the peer is left out and the benchmark goes on."""
        try:
            yield
        except Exception as error:
            self.leave_out(name, error)

    @contextlib.contextmanager
    def part(self, name: str) -> Any:
        """A part of the benchmark: where it breaks, that is a missed bar, and the others still run."""
        try:
            yield
        except Exception:
            traceback.print_exc()
            self.row(f"{name}: ran to its end", "", 0, bar="= 1", ok=False)

    def row(
        self,
        name: str,
        unit: str,
        value: float,
        peers: dict[str, float] | None = None,
        *,
        against: float | None = None,
        bar: str | None = None,
        ok: bool | None = None,
        spread: tuple[float, float] | None = None,
    ) -> None:
        """Adds a row; ``against`` is the peer figure that the ratio refers to."""
        ratio = value / against if against else None
        row = Row(name, unit, value, peers or {}, ratio, bar, None if ok is None else bool(ok), spread)
        self.rows.append(row)
        verdict = {None: "", True: "  ok", False: "  MISSED"}[row.ok]
        head = f"  {name}: {value:,.4g} {unit}" if abs(value) < 10 else f"  {name}: {value:,.0f} {unit}"
        head += f", ratio {ratio:.3f}" if ratio is not None else ""
        head += f", bar {bar}" if bar else ""
        print(head + verdict, flush=True)
        if row.peers:
            figures = (f"{peer} {n:,.0f}" if n >= 10 else f"{peer} {n:,.4g}" for peer, n in row.peers.items())
            print("      " + ", ".join(figures), flush=True)

    def timed(
        self,
        name: str,
        samples: dict[str, list[float]],
        *,
        unit: str = "ns",
        scale: float = 1.0,
        against: str | None = None,
        bar: str | None = None,
        ok: Callable[[float], bool] | None = None,
    ) -> None:
        """A row of medians; the first contender is kina's."""
        medians = {key: statistics.median(values) * scale for key, values in samples.items() if values}
        first = next(iter(samples))
        value = medians.pop(first)
        spread = tuple(float(p) * scale for p in np.percentile(samples[first], [5, 95]))
        self.row(
            name,
            unit,
            value,
            medians,
            against=medians.get(against) if against else None,
            bar=bar,
            ok=ok(value) if ok else None,
            spread=(spread[0], spread[1]),
        )

    def finish(self) -> int:
        """Writes the file and returns the exit status: 1 if a bar was missed."""
        missed = [row.name for row in self.rows if row.ok is False]
        if self.options.json:
            packages = ("kina", "numpy", "torch", "cupy-cuda13x", "cuda-core", "cuda-bindings", "triton", "rmm-cu13")
            versions = {}
            for package in packages:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    versions[package] = importlib.metadata.version(package)
            content = {
                **self.about,
                "versions": versions,
                "left_out": self.left_out,
                "rows": [asdict(row) for row in self.rows],
            }
            self.options.json.write_text(json.dumps(content, indent=1) + "\n")
        judged = sum(row.ok is not None for row in self.rows)
        print(f"{self.about['title']}: {judged - len(missed)} of {judged} bars met", flush=True)
        for name in missed:
            print(f"  missed: {name}", flush=True)
        return 1 if missed else 0


def optional(report: Report, name: str) -> Any:
    """A peer's module, or None (then it is named as left out)."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken peer must not end the benchmark
        report.leave_out(name, error)
        return None


# ---------------------------------------------------------------------------------------------- C loops


@dataclass
class Borrowed:
    """A stream handle in the form that every library takes."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class Launch(ctypes.Structure):
    """What raw_loop.c launches."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
    )


class Raw:
    """raw_loop.c, compiled for this run."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "raw_loop.so"
            command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(HERE / "raw_loop.c")]
            try:
                subprocess.run([*command, "-o", str(target), "-ldl"], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                leave(f"needs a C compiler for the raw loop: {error}")
            self._library = ctypes.CDLL(str(target))
        self.call("raw_open")

    def call(self, name: str, *values: object) -> None:
        if result := getattr(self._library, name)(*values):
            raise RuntimeError(f"{name}: CUDA error {result}")

    def pointer(self, name: str, *values: object) -> int:
        """Calls a function that writes a handle into its last argument."""
        handle = ctypes.c_void_p()
        self.call(name, *values, ctypes.byref(handle))
        return handle.value or 0

    def settle(self) -> None:
        """Waits for everything in the current context."""
        self.call("raw_settle")

    def driver_version(self) -> str:
        version = ctypes.c_int()
        self.call("raw_driver_version", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def device_name(self) -> str:
        name = ctypes.create_string_buffer(256)
        self.call("raw_device_name", name, 256)
        return name.value.decode()


# ---------------------------------------------------------------------------------------------- counting


def load_interposer() -> ModuleType:
    """tests/helpers/interpose.py."""
    path = HERE.parent / "tests" / "helpers" / "interpose.py"
    spec = importlib.util.spec_from_file_location("kina_interpose", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def count_driver_calls(script: str) -> Any:
    """What ``script --count-child`` prints (JSON, its last line), run over an interposed driver library.

    An own process, because the library must be the first libcuda.so.1 that it loads; and not kina's own
    counters, because they could only count what kina knows that it does.
    """
    done = subprocess.run(
        [sys.executable, script, "--count-child"],
        env=load_interposer().env(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"the counting run of {Path(script).name} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
