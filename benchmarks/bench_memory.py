"""Allocating and freeing: kina's resources beside the driver's calls, RMM, torch and CuPy.

    python benchmarks/bench_memory.py [--json FILE] [--rounds N] [--batch N] [--only WORD]

Parts (``--only``): warm, mix, blocks, resources, threads, logging, python, using. Exit status: 0 all bars met, 1 a bar
missed, 2 this machine cannot run it (no GPU, no kina, no C compiler).

What is measured without Python runs in memory_loop.c, on the resource's own table of functions.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import (
    HERE,
    Contender,
    Raw,
    Report,
    arguments,
    interleave,
    leave,
    median_difference,
    open_runtime,
    optional,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NBYTES = 256
THREADS = (1, 2, 4, 8, 16, 32)


class Loops:
    """memory_loop.c, compiled for this run."""

    def __init__(self, kina: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "memory_loop.so"
            include = Path(kina.__file__).parent / "include"
            command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", f"-I{include}", HERE / "memory_loop.c"]
            try:
                subprocess.run([*command, "-o", target, "-ldl", "-lpthread"], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                leave(f"needs a C compiler for the loops: {error}")
            self._library = ctypes.CDLL(str(target))

    def call(self, name: str, *values: object) -> None:
        if status := getattr(self._library, name)(*values):
            raise RuntimeError(f"{name}: status {status}")

    def measured(self, name: str, *values: object) -> float:
        """Calls a function that writes a figure into its last argument."""
        figure = ctypes.c_double()
        self.call(name, *values, ctypes.byref(figure))
        return figure.value

    def home(self, session: Any, memory: Any = None) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """The resource and the stream behind a session's tensors."""
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        resource, stream = ctypes.c_void_p(), ctypes.c_void_p()
        capsule = session.empty(1, memory=memory).to_dlpack(versioned=False)
        managed = ctypes.c_void_p(pointer(capsule, b"dltensor"))
        self._library.memory_home(managed, ctypes.byref(resource), ctypes.byref(stream))
        return resource, stream


class MemoryBench:
    def __init__(self, kina: Any, session: Any, report: Report, options: argparse.Namespace) -> None:
        self.kina, self.session, self.report = kina, session, report
        self.memory = __import__("kina.memory").memory
        self.calls, self.rounds = options.batch, options.rounds
        self.loops = Loops(kina)
        self.upstream = self.memory.CudaAsyncMemoryResource(0)
        self.pool = self.memory.PoolMemoryResource(self.upstream)
        self.of_pool, self.stream = self.loops.home(session, self.pool)
        plain, ordered = ctypes.c_void_p(), ctypes.c_void_p()
        self.loops.call("memory_driver", ctypes.byref(plain), ctypes.byref(ordered))
        self.plain, self.ordered = plain, ordered

    def repeat(self) -> Iterator[None]:
        return itertools.repeat(None, self.calls)

    def settle(self) -> None:
        self.session.synchronize()

    def pairs(self, name: str, resource: ctypes.c_void_p, nbytes: int = NBYTES) -> Contender:
        size = ctypes.c_size_t(nbytes)
        return Contender(
            name, lambda: self.loops.call("memory_pairs", resource, self.stream, size, self.calls), self.calls
        )

    # ------------------------------------------------------------------------------------ without Python

    def measure_warm(self) -> None:
        contenders = [
            self.pairs("kina", self.of_pool),
            self.pairs("cuMemAlloc", self.plain),
            self.pairs("cuMemAllocAsync", self.ordered),
        ]
        samples = interleave(contenders, self.rounds, self.settle)
        self.report.timed(f"warm pair, {NBYTES} B", samples, bar="<= 40 ns", ok=lambda value: value <= 40)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        for peer, least in (("cuMemAlloc", 50), ("cuMemAllocAsync", 10)):
            times = medians[peer] / medians["kina"]
            self.report.row(f"{peer} costs so many of kina's", "times", times, bar=f">= {least}", ok=times >= least)
        tail = (ctypes.c_double * 10_000)()
        self.loops.call("memory_tail", self.of_pool, self.stream, ctypes.c_size_t(NBYTES), len(tail), tail)
        worst = statistics.quantiles(tail, n=100)[98]
        self.report.row("p99 of batches of 64 pairs", "ns", worst, bar="<= 60 ns", ok=worst <= 60)
        width, count = 16, max(1, self.calls // 16)
        batches = [
            Contender(
                name,
                lambda resource=resource: self.loops.call(
                    "memory_batches", resource, self.stream, ctypes.c_size_t(NBYTES), width, count
                ),
                width * count,
            )
            for name, resource in (("kina", self.of_pool), ("cuMemAllocAsync", self.ordered))
        ]
        self.report.timed("16 allocated, then 16 freed, a pair", interleave(batches, self.rounds, self.settle))

    def mix(self, resource: ctypes.c_void_p, allocations: int, seed: int) -> float:
        sizes = ctypes.c_size_t(4 * MIB), ctypes.c_size_t(16 * GIB)
        found = self.loops.measured("memory_mix", resource, self.stream, allocations, *sizes, ctypes.c_uint64(seed))
        self.settle()
        return found

    def measure_mix(self) -> None:
        for allocations in (1_000, 10_000, 100_000):
            figures = [self.mix(self.of_pool, allocations, seed) for seed in range(1, 6)]
            peers = {"cuMemAllocAsync": self.mix(self.ordered, min(allocations, 10_000), 1)}
            value = statistics.median(figures)
            self.report.row(
                f"random mix of {allocations:,} up to 4 MiB, an operation", "ns", value, peers, bar="<= 150 ns",
                ok=value <= 150,
            )  # fmt: skip

    def measure_blocks(self) -> None:
        value = self.loops.measured(
            "memory_among_free_blocks", self.of_pool, self.stream, 10_000, ctypes.c_size_t(NBYTES), 100_000
        )
        self.report.row("warm pair among 10,000 free blocks", "ns", value, bar="<= 40 ns", ok=value <= 40)

    def measure_resources(self) -> None:
        """The driver's calls behind a resource, beside the calls alone."""
        for name, resource, peer, peer_name in (
            ("CudaMemoryResource", self.memory.CudaMemoryResource(0), self.plain, "cuMemAlloc"),
            ("CudaAsyncMemoryResource", self.upstream, self.ordered, "cuMemAllocAsync"),
        ):
            pointer, _ = self.loops.home(self.session, resource)
            pair = [self.pairs("kina", pointer), self.pairs(peer_name, peer)]
            samples = interleave(pair, self.rounds, self.settle)
            ratio = statistics.median(samples["kina"]) / statistics.median(samples[peer_name])
            self.report.timed(f"{name}, a pair", samples, against=peer_name)
            self.report.row(f"{name} against {peer_name}", "times", ratio, bar="<= 1.2", ok=ratio <= 1.2)

    def measure_threads(self) -> None:
        count, rates = 200_000, {}
        with ExitStack() as opened:
            streams = (ctypes.c_void_p * max(THREADS))()
            for i in range(len(streams)):
                session = opened.enter_context(self.kina.session(self.kina.Runtime(0)))
                streams[i] = self.loops.home(session, self.pool)[1]
            for threads in THREADS:
                rates[threads] = max(
                    self.loops.measured(
                        "memory_threads", self.of_pool, streams, threads, ctypes.c_size_t(NBYTES), count
                    )
                    for _ in range(3)
                )
                self.report.row(f"pairs a second, {threads} threads", "million", rates[threads] / 1e6)
        scale = rates[8] / rates[1]
        self.report.row("8 threads against one", "times", scale, bar=">= 6", ok=scale >= 6)

    def measure_logging(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.memory.LoggingMemoryResource(self.pool, Path(folder) / "log.csv") as logged:
                pointer, _ = self.loops.home(self.session, logged)
                pair = [self.pairs("kina", pointer), self.pairs("without", self.of_pool)]
                samples = interleave(pair, self.rounds, self.settle)
            record = median_difference(samples["kina"], samples["without"]) / 2
            self.report.row("a record of LoggingMemoryResource", "ns", record, bar="<= 25 ns", ok=record <= 25)

    # ------------------------------------------------------------------------------------ with Python

    def over(self, name: str, make: Callable[[], object]) -> Contender:
        """Make something and drop it, over and over."""

        def batch() -> None:
            for _ in self.repeat():
                make()

        batch()  # a way that does not work is left out here
        return Contender(name, batch, self.calls)

    def peers(self) -> list[Contender]:
        found = []
        if torch := optional(self.report, "torch"):
            with self.report.peer("torch.empty"):
                device = torch.device("cuda:0")
                found.append(self.over("torch.empty", lambda: torch.empty(64, device=device)))
        if cupy := optional(self.report, "cupy"):
            with self.report.peer("cupy.cuda.alloc"):
                found.append(self.over("cupy.cuda.alloc", lambda: cupy.cuda.alloc(NBYTES)))
        if rmm := optional(self.report, "rmm"):
            below = {
                "pool": lambda: rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=64 * MIB),
                "async": lambda: rmm.mr.CudaAsyncMemoryResource(),
                "arena": lambda: rmm.mr.ArenaMemoryResource(rmm.mr.CudaMemoryResource()),
                "binning": lambda: rmm.mr.BinningMemoryResource(rmm.mr.CudaMemoryResource(), 8, 22),
            }
            for name, make in below.items():
                with self.report.peer(f"rmm {name}"):
                    resource = make()
                    found.append(
                        self.over(f"rmm {name}", lambda resource=resource: rmm.DeviceBuffer(size=NBYTES, mr=resource))
                    )
        return found

    def measure_python(self) -> None:
        empty, memory = self.session.empty, self.memory
        peers = self.peers()
        with memory.using(self.pool):
            kina = self.over("kina", lambda: empty(64))
            samples = interleave([kina, *peers], self.rounds, self.settle)
        self.report.timed("Tensor made and dropped", samples, bar="<= 250 ns", ok=lambda value: value <= 250)
        own = interleave([self.over("kina", lambda: empty(64))], self.rounds, self.settle)
        self.report.timed("Tensor made and dropped, the Runtime's own pool", own)

    def measure_using(self) -> None:
        using, pool = self.memory.using, self.pool

        def batch() -> None:
            for _ in self.repeat():
                with using(pool):
                    pass

        samples = interleave([Contender("kina", batch, self.calls)], self.rounds, self.settle)
        self.report.timed("using, enter + exit", samples, bar="<= 150 ns", ok=lambda value: value <= 150)


def run(options: argparse.Namespace) -> int:
    kina, runtime = open_runtime()
    raw = Raw()
    with kina.session(runtime) as session:
        report = Report("bench_memory", options, raw)
        bench = MemoryBench(kina, session, report, options)
        for part in ("warm", "mix", "blocks", "resources", "threads", "logging", "python", "using"):
            if report.wants(part):
                with report.part(part):
                    getattr(bench, f"measure_{part}")()
    return report.finish()


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__.splitlines()[0])))
