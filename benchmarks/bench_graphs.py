"""Graphs: one of 20 kernels, captured and replayed by kina, the driver in a C loop, torch and CuPy.

    python benchmarks/bench_graphs.py [--json FILE] [--rounds N] [--batch N] [--only WORD]

Parts (``--only``): replay. Exit status: 0 all bars met, 1 a bar missed, 2 this machine cannot run it (no GPU, no
kina, no C compiler).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from typing import Any

import numpy as np
from harness import Contender, Launch, Raw, Report, arguments, interleave, open_runtime, optional
from saxpy import BLOCK, CUDA_SOURCE, PTX, SCALE, SIGNATURE, N

KERNELS = 20
GRID = -(-N // BLOCK)
#: Launches in a turn; more would fill the device's queue, and then everybody waits for the device.
LAUNCHES = 64


def expected(y: np.ndarray, x: np.ndarray, launches: int) -> np.ndarray:
    return y.astype(np.float64) + launches * KERNELS * SCALE * x.astype(np.float64)


def check(name: str, found: np.ndarray, y: np.ndarray, x: np.ndarray, launches: int) -> None:
    np.testing.assert_allclose(found, expected(y, x, launches), rtol=1e-4, atol=1e-4, err_msg=name)


class GraphBench:
    def __init__(self, kina: Any, session: Any, block: Any, raw: Raw, report: Report, options: Any) -> None:
        self.kina, self.session, self.block, self.raw, self.report = kina, session, block, raw, report
        self.rounds, self.calls = options.rounds, min(options.batch, LAUNCHES)
        generator = np.random.default_rng()
        self.inputs = [generator.standard_normal(N).astype(np.float32) for _ in range(2)]

    def repeat(self) -> Any:
        return itertools.repeat(None, self.calls)

    def kina_graph(self) -> Contender:
        y, x = (self.session.from_host(array) for array in self.inputs)
        saxpy = self.block.module(PTX).function("saxpy", SIGNATURE)
        config = self.kina.LaunchConfig(GRID, BLOCK)
        with self.session.capture() as graph:
            for _ in range(KERNELS):
                saxpy.launch(config, y, x, SCALE, N)
        assert graph.nodes == KERNELS
        session = self.session
        graph.launch(session)
        graph.launch(session)
        check("kina", session.to_host(y), *self.inputs, launches=2)

        def batch() -> None:
            for _ in self.repeat():
                graph.launch(session)

        return Contender("kina", batch, self.calls)

    def raw_graph(self) -> Contender:
        """The same stream, the same parameters; what was captured by kina's side is not looked at."""
        y, x = (self.session.from_host(array) for array in self.inputs)
        self.session.synchronize()
        stream = self.raw.pointer("raw_stream")
        launch = Launch(self.raw.pointer("raw_function", PTX.encode(), b"saxpy"), stream, GRID, BLOCK)
        values = (
            ctypes.c_uint64(self.block.unsafe_address(self.block.mut(y))),
            ctypes.c_uint64(self.block.unsafe_address(self.block.ref(x))),
            ctypes.c_float(SCALE),
            ctypes.c_uint32(N),
        )
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        graph = ctypes.c_void_p(self.raw.pointer("raw_graph", ctypes.byref(launch), pointers, KERNELS))
        handle = ctypes.c_void_p(stream)
        self.raw.call("raw_graph_launch", graph, handle, 2)
        self.raw.settle()
        check("raw", self.session.to_host(y), *self.inputs, launches=2)
        self.kept = (y, x)
        return Contender("raw", lambda: self.raw.call("raw_graph_launch", graph, handle, self.calls), self.calls)

    def torch_graph(self, torch: Any) -> Contender:
        y, x = (torch.from_numpy(array.copy()).cuda() for array in self.inputs)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(KERNELS):
                y.add_(x, alpha=SCALE)  # one kernel
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        check("torch", y.cpu().numpy(), *self.inputs, launches=2)

        def batch() -> None:
            for _ in self.repeat():
                graph.replay()

        return Contender("torch CUDAGraph", batch, self.calls)

    def cupy_graph(self, cupy: Any) -> Contender:
        y, x = (cupy.asarray(array) for array in self.inputs)
        kernel = cupy.RawKernel(CUDA_SOURCE.replace("SCALAR", "float"), "saxpy")
        values = (y, x, cupy.float32(SCALE), cupy.uint32(N))
        kernel.compile()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            for _ in range(KERNELS):
                kernel((GRID,), (BLOCK,), values)
            graph = stream.end_capture()
            graph.launch(stream)
            graph.launch(stream)
            stream.synchronize()
        check("CuPy", cupy.asnumpy(y), *self.inputs, launches=2)

        def batch() -> None:
            for _ in self.repeat():
                graph.launch(stream)

        return Contender("CuPy", batch, self.calls)

    def measure_replay(self) -> None:
        contenders = [self.kina_graph(), self.raw_graph()]
        for name, make in (("torch", self.torch_graph), ("cupy", self.cupy_graph)):
            if module := optional(self.report, name):
                with self.report.peer(f"{name} graph"):
                    contenders.append(make(module))
        samples = interleave(contenders, self.rounds, self.raw.settle)
        bar = 1.2 * sorted(samples["raw"])[len(samples["raw"]) // 2]
        self.report.timed(
            f"launch of a graph of {KERNELS} kernels",
            samples,
            against="raw",
            bar="<= 1.2x raw",
            ok=lambda value: value <= bar,
        )


def run(options: argparse.Namespace) -> int:
    kina, runtime = open_runtime()
    raw = Raw()
    with kina.session(runtime) as session, session.raw("benchmark") as block:
        report = Report("bench_graphs", options, raw)
        bench = GraphBench(kina, session, block, raw, report, options)
        if report.wants("replay"):
            with report.part("replay"):
                bench.measure_replay()
    return report.finish()


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__.splitlines()[0])))
