"""Allocating and freeing: kina's resources beside the driver's calls, RMM, torch and CuPy.

    python benchmarks/bench_memory.py [--json FILE] [--rounds N] [--batch N] [--only WORD]

Parts (``--only``): warm, mix, streams, handover, blocks, resources, threads, logging, python, using, replay. Exit
status: 0 all bars met, 1 a bar missed, 2 this machine cannot run it (no GPU, no kina, no C compiler).

What is measured without Python runs in memory_loop.c, on the resource's own table of functions. A turn of kina has many
more calls there than one of the driver (``--batch``): what it waits for after the driver's turn, and the call from
Python, would be most of a short one.
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
from collections.abc import Iterator
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
)
from memory_peers import build_peers, mix_contender, pair_contender, random_mix

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NBYTES = 256
#: Calls in a turn of what takes some ten nanoseconds.
CALLS = 10_000
THREADS = (1, 2, 4, 8, 16, 32)
STREAMS = (1, 2, 4)
RECORDED = HERE / "data" / "training_step.csv.gz"


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
    def __init__(self, kina: Any, session: Any, raw: Raw, report: Report, options: argparse.Namespace) -> None:
        self.kina, self.session, self.raw, self.report = kina, session, raw, report
        self.memory = __import__("kina.memory").memory
        self.calls, self.rounds = options.batch, options.rounds
        self.loops = Loops(kina)
        self.upstream = self.memory.CudaAsyncMemoryResource(0)
        self.pool = self.memory.PoolMemoryResource(self.upstream)
        self.of_pool, self.stream = self.loops.home(session, self.pool)
        self.one_stream = (ctypes.c_void_p * 1)(self.stream.value)
        plain, ordered = ctypes.c_void_p(), ctypes.c_void_p()
        self.loops.call("memory_driver", ctypes.byref(plain), ctypes.byref(ordered))
        self.plain, self.ordered = plain, ordered

    def repeat(self) -> Iterator[None]:
        return itertools.repeat(None, self.calls)

    def settle(self) -> None:
        """Wait for all streams."""
        self.raw.settle()

    def open_streams(self, opened: ExitStack, count: int) -> tuple[ctypes.Array[ctypes.c_void_p], list[Any]]:
        """Streams of as many Runtimes, and the sessions that keep them."""
        sessions = [opened.enter_context(self.kina.session(self.kina.Runtime(0))) for _ in range(count)]
        return (ctypes.c_void_p * count)(*(self.loops.home(each, self.pool)[1].value for each in sessions)), sessions

    def pairs(self, name: str, resource: ctypes.c_void_p, calls: int | None = None) -> Contender:
        size, calls = ctypes.c_size_t(NBYTES), calls or self.calls
        return Contender(name, lambda: self.loops.call("memory_pairs", resource, self.stream, size, calls), calls)

    def batches(self, name: str, resource: ctypes.c_void_p, calls: int) -> Contender:
        size, width, count = ctypes.c_size_t(NBYTES), 16, max(1, calls // 16)
        return Contender(
            name,
            lambda: self.loops.call("memory_batches", resource, self.stream, size, width, count),
            width * count,
        )

    # ------------------------------------------------------------------------------------ without Python

    def measure_warm(self) -> None:
        contenders = [
            self.pairs("kina", self.of_pool, CALLS),
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
        batches = [
            self.batches("kina", self.of_pool, CALLS),
            self.batches("cuMemAllocAsync", self.ordered, self.calls),
        ]
        self.report.timed("16 allocated, then 16 freed, a pair", interleave(batches, self.rounds, self.settle))

    def mix(
        self, resource: ctypes.c_void_p, allocations: int, seed: int, streams: ctypes.Array[ctypes.c_void_p]
    ) -> float:
        """Nanoseconds an operation."""
        sizes, number = (ctypes.c_size_t(4 * MIB), ctypes.c_size_t(16 * GIB)), ctypes.c_uint64(seed)
        found = self.loops.measured("memory_mix", resource, streams, len(streams), allocations, *sizes, number)
        self.settle()
        return found

    def fresh_mix(self, allocations: int, seeds: int, streams: ctypes.Array[ctypes.c_void_p]) -> float:
        """Each seed on a new pool, which has to grow."""
        figures = []
        for seed in range(1, seeds + 1):
            pool = self.memory.PoolMemoryResource(self.upstream)
            figures.append(self.mix(self.loops.home(self.session, pool)[0], allocations, seed, streams))
        return statistics.median(figures)

    def mix_rows(
        self, name: str, allocations: int, seeds: int, streams: ctypes.Array[ctypes.c_void_p], bar: float | None = None
    ) -> None:
        self.mix(self.of_pool, allocations, 1, streams)
        value = statistics.median(self.mix(self.of_pool, allocations, seed, streams) for seed in range(1, seeds + 1))
        few = min(allocations, 10_000)
        self.mix(self.ordered, few, 1, streams)
        driver = {"cuMemAllocAsync": statistics.median(self.mix(self.ordered, few, n, streams) for n in (1, 2, 3))}
        judged = {"bar": f"<= {bar} ns", "ok": value <= bar} if bar else {}
        self.report.row(f"{name}, prewarmed, an operation", "ns", value, driver, **judged)
        self.report.row(f"{name}, a new pool, an operation", "ns", self.fresh_mix(allocations, min(seeds, 3), streams))

    def measure_mix(self) -> None:
        for allocations, seeds in ((1_000, 25), (10_000, 9), (100_000, 5)):
            self.mix_rows(f"random mix of {allocations:,} up to 4 MiB", allocations, seeds, self.one_stream, 150)

    def measure_streams(self) -> None:
        """One thread, whose allocations go round."""
        for count in STREAMS:
            with ExitStack() as opened:
                streams, _sessions = self.open_streams(opened, count)
                self.mix_rows(f"random mix of 10,000, streams in turn: {count}", 10_000, 9, streams)

    def measure_handover(self) -> None:
        """One thread allocates, another frees; the pool has nothing but what this took."""
        pool = self.memory.PoolMemoryResource(self.upstream)
        resource, _ = self.loops.home(self.session, pool)
        reserved: list[int] = []
        look = ctypes.CFUNCTYPE(None)(lambda: reserved.append(pool.stats().reserved_bytes))

        def measured(memory: ctypes.c_void_p, largest: int, count: int) -> float:
            found = self.loops.measured("memory_handover", memory, self.stream, ctypes.c_size_t(largest), count, look)
            self.settle()
            return found

        for largest, size in ((NBYTES, f"{NBYTES} B"), (MIB, "up to 1 MiB")):
            measured(resource, largest, 100_000)
            driver = {"cuMemAllocAsync": measured(self.ordered, largest, 500)}
            reserved.clear()
            value = measured(resource, largest, 20_000)
            self.report.row(f"a block of {size}, freed by another thread", "ns", value, driver)
            growth = reserved[-1] / reserved[0]
            name = f"blocks of {size}: reserved after the last tenth, against the first"
            self.report.row(name, "times", growth, bar="<= 1.0", ok=growth <= 1)

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
        count, rates, bare = 200_000, {}, {}
        nothing = ctypes.c_void_p()
        self.loops.call("memory_nothing", ctypes.byref(nothing))
        with ExitStack() as opened:
            streams, _sessions = self.open_streams(opened, max(THREADS))
            for threads in THREADS:
                rates[threads], bare[threads] = (
                    max(
                        self.loops.measured(
                            "memory_threads", resource, streams, threads, ctypes.c_size_t(NBYTES), calls
                        )
                        for _ in range(7)
                    )
                    for resource, calls in ((self.of_pool, count), (nothing, 10 * count))
                )
                peers = {"a resource that does nothing": bare[threads] / 1e6}
                self.report.row(f"pairs a second, {threads} threads", "million", rates[threads] / 1e6, peers)
        scale = rates[8] / rates[1]
        peers = {"a resource that does nothing": bare[8] / bare[1]}
        least = min(6, 0.95 * bare[8] / bare[1])
        bar = ">= 6, or 0.95 of doing nothing"
        self.report.row("8 threads against one", "times", scale, peers, bar=bar, ok=scale >= least)

    def measure_logging(self) -> None:
        """A turn fits into the ring, and is in the file before the next; then turns of many rings."""
        with (
            tempfile.TemporaryDirectory() as folder,
            self.memory.LoggingMemoryResource(self.pool, Path(folder) / "log.csv") as logged,
        ):
            pointer, _ = self.loops.home(self.session, logged)

            def measured(calls: int, rounds: int) -> float:
                pair = [self.pairs("kina", pointer, calls), self.pairs("without", self.of_pool, calls)]
                samples = interleave(pair, rounds, logged.flush)
                return median_difference(samples["kina"], samples["without"]) / 2

            record = measured(CALLS, self.rounds)
            floor = statistics.median(self.loops.measured("memory_record_floor", CALLS) for _ in range(self.rounds))
            self.report.row(
                "a record of LoggingMemoryResource", "ns", record, {"counter, number and line alone": floor},
                bar="<= 25 ns, or 1.3 of those alone", ok=record <= max(25, 1.3 * floor),
            )  # fmt: skip
            self.report.row("a record, more at once than the ring holds", "ns", measured(20 * CALLS, 5))

    # ------------------------------------------------------------------------------------ with Python

    def measure_python(self) -> None:
        session, memory, pool = self.session, self.memory, self.pool
        empty, allocate, peers = session.empty, pool.allocate, build_peers(self.report)
        own = {
            "kina": lambda nbytes: empty(nbytes, "uint8"),
            "kina Buffer": lambda nbytes: allocate(nbytes, session),
        }

        def use_a_pool() -> None:
            with memory.using(pool):
                self.make_tensors()

        line = [
            Contender("kina", self.make_tensors, self.calls),
            Contender("kina using another pool", use_a_pool, self.calls),
        ]
        line += [pair_contender(name, make, NBYTES, self.calls) for name, make in (own | peers).items()][1:]
        samples = interleave(line, self.rounds, self.settle)
        # The bar's host makes and drops a tensor of PyTorch in 2,300 ns.
        most = 250 * max(1, statistics.median(samples.get("torch.empty", [0])) / 2_300)
        bar = "<= 250 ns, or 0.109 of torch.empty"
        self.report.timed("Tensor made and dropped", samples, bar=bar, ok=lambda value: value <= most)
        steps = random_mix(2_000, 2 * MIB, 1)
        line = [mix_contender(name, make, steps) for name, make in (own | peers).items()]
        line.append(mix_contender("the loop alone", lambda _nbytes: None, steps))
        samples = interleave(line, min(self.rounds, 10), self.settle)
        self.report.timed("RMM's random mix up to 2 MiB from Python, an operation", samples)

    def make_tensors(self) -> None:
        empty = self.session.empty
        for _ in self.repeat():
            empty(64)

    def measure_using(self) -> None:
        using, pool = self.memory.using, self.pool

        def batch() -> None:
            for _ in self.repeat():
                with using(pool):
                    pass

        samples = interleave([Contender("kina", batch, self.calls)], self.rounds, self.settle)
        self.report.timed("using, enter + exit", samples, bar="<= 150 ns", ok=lambda value: value <= 150)

    # ------------------------------------------------------------------------------------ a recorded program

    def measure_replay(self) -> None:
        if not RECORDED.exists():
            self.report.leave_out("replay", f"there is no {RECORDED.name} in {RECORDED.parent}")
            return
        memory = self.memory
        trace = memory.read_log(RECORDED)
        pool = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource(0), initial_bytes=0)
        found = memory.replay(trace, pool)
        driver = memory.replay(trace, memory.CudaAsyncMemoryResource(0))
        again = memory.replay(trace, pool)
        name = f"{RECORDED.name.partition('.')[0]} played again"
        for words, report in (("", found), (", prewarmed", again)):
            self.report.row(
                f"{name}{words}, an operation", "ns", report.operation_ns, {"CudaAsync": driver.operation_ns}
            )
        self.report.row(f"{name}, peak live", "MiB", found.peak_live_bytes / MIB)
        reserved = {"CudaAsync": driver.peak_reserved_bytes / MIB} if driver.peak_reserved_bytes else {}
        self.report.row(f"{name}, peak reserved", "MiB", found.peak_reserved_bytes / MIB, reserved)
        ratio = found.peak_reserved_bytes / found.peak_live_bytes
        self.report.row(f"{name}, reserved against live", "times", ratio, bar="<= 1.25", ok=ratio <= 1.25)


PARTS = (
    *("warm", "mix", "streams", "handover", "blocks", "resources", "threads", "logging"),
    *("python", "using", "replay"),
)


def run(options: argparse.Namespace) -> int:
    kina, runtime = open_runtime()
    raw = Raw()
    with kina.session(runtime) as session:
        report = Report("bench_memory", options, raw)
        bench = MemoryBench(kina, session, raw, report, options)
        for part in PARTS:
            if report.wants(part):
                with report.part(part):
                    getattr(bench, f"measure_{part}")()
    return report.finish()


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__.splitlines()[0])))
