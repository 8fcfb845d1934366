"""Modules: what is looked up again, and what is compiled, loaded from disk or found in memory.

    python benchmarks/bench_modules.py [--json FILE] [--rounds N] [--batch N] [--only WORD]

Parts (``--only``): lookup, compile. Exit status: 0 all bars met, 1 a bar missed, 2 this machine cannot run it (no
GPU, no kina, no C compiler).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Contender, Raw, Report, arguments, interleave, open_runtime, optional
from saxpy import CUDA_SOURCE, PTX, SCALE, SIGNATURE, N, check_saxpy

SOURCE = CUDA_SOURCE.replace("SCALAR", "float")
LOOKUP_NS = 500
DISK_MS = 2
COMPILATIONS = 15


class ModuleBench:
    def __init__(self, kina: Any, session: Any, block: Any, report: Report, options: argparse.Namespace) -> None:
        self.kina, self.session, self.block, self.report = kina, session, block, report
        self.calls, self.rounds = options.batch, options.rounds
        self.numbers = itertools.count()

    def settle(self) -> None:
        """Nothing is enqueued."""

    def again(self, name: str, ask: Callable[[], object]) -> Contender:
        def batch() -> None:
            for _ in itertools.repeat(None, self.calls):
                ask()

        batch()
        return Contender(name, batch, self.calls)

    def measure_lookup(self) -> None:
        module, name = self.block.module, "saxpy"
        contenders = [self.again("kina", lambda: module(PTX).function(name, SIGNATURE))]
        if cupy := optional(self.report, "cupy"):
            with self.report.peer("cupy get_function"):
                loaded = cupy.RawModule(code=SOURCE)
                contenders.append(self.again("cupy get_function", lambda: loaded.get_function("saxpy")))
        with self.report.peer("cuda.core get_kernel"):
            from cuda.core import Device, Program, ProgramOptions

            device = Device(0)
            device.set_current()
            options = ProgramOptions(arch=f"sm_{device.arch}")
            code = Program(SOURCE, "c++", options).compile("cubin")
            contenders.append(self.again("cuda.core get_kernel", lambda: code.get_kernel("saxpy")))
        samples = interleave(contenders, self.rounds, self.settle)
        self.report.timed(
            "module and function, cached",
            samples,
            bar=f"<= {LOOKUP_NS} ns",
            ok=lambda value: value <= LOOKUP_NS,
        )

    def fresh(self) -> str:
        return f"// {os.getpid()} {time.time_ns()} {next(self.numbers)}\n{SOURCE}"

    def milliseconds(self, make: Callable[[str], object], sources: list[str]) -> float:
        figures = []
        for source in sources:
            begin = time.perf_counter()
            make(source)
            figures.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(figures)

    def check(self, source: str) -> None:
        """The numbers of what was compiled, against float64."""
        generator = np.random.default_rng()
        x, y = (generator.standard_normal(N).astype(np.float32) for _ in range(2))
        on_device = self.session.from_host(y)
        saxpy = self.block.module(source).function("saxpy", SIGNATURE)
        saxpy.launch(self.kina.LaunchConfig.linear(N), on_device, self.session.from_host(x), SCALE, N)
        check_saxpy("kina", self.session.to_host(on_device), y, x, SCALE)

    def measure_compile(self) -> None:
        from kina.cuda import compiler

        capability = self.session.device_info.compute_capability
        sources = [self.fresh() for _ in range(COMPILATIONS)]
        self.check(self.fresh())

        def compile_(source: str) -> None:
            compiler.compile_source(source.encode(), (), (), capability)

        def forgotten(source: str) -> None:
            compiler._kept.clear()  # as another process would come
            compile_(source)

        cold = {"kina": self.milliseconds(compile_, sources)}
        with self.report.peer("cuda.core Program"):
            from cuda.core import Device, Program, ProgramOptions

            device = Device(0)
            device.set_current()
            options = ProgramOptions(arch=f"sm_{device.arch}")
            make = lambda source: Program(source, "c++", options).compile("cubin")  # noqa: E731
            make(self.fresh())
            cold["cuda.core"] = self.milliseconds(make, [self.fresh() for _ in range(COMPILATIONS)])
        if cupy := optional(self.report, "cupy"):
            with self.report.peer("cupy RawModule"):
                make = lambda source: cupy.RawModule(code=source).compile()  # noqa: E731
                make(self.fresh())
                cold["cupy, with loading"] = self.milliseconds(make, [self.fresh() for _ in range(COMPILATIONS)])
        value = cold.pop("kina")
        self.report.row("NVRTC, cold", "ms", value, cold)
        value = self.milliseconds(forgotten, sources)
        self.report.row("the same from disk", "ms", value, bar=f"<= {DISK_MS} ms", ok=value <= DISK_MS)
        self.report.row("the same from memory", "ms", self.milliseconds(compile_, sources[-1:] * COMPILATIONS))
        self.report.row("load of one from memory", "ms", self.milliseconds(self.block.module, sources))


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KINA_CACHE_DIR"] = f"{folder}/cache"
        kina, runtime = open_runtime()
        raw = Raw()
        with kina.session(runtime) as session, session.raw("benchmark") as block:
            report = Report("bench_modules", options, raw)
            bench = ModuleBench(kina, session, block, report, options)
            for part in ("lookup", "compile"):
                if report.wants(part):
                    with report.part(part):
                        getattr(bench, f"measure_{part}")()
    return report.finish()


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__.splitlines()[0])))
