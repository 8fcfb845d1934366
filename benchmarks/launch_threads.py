"""Launches from several threads at once: kina's entry for code without the GIL beside driver calls, both in C loops."""

from __future__ import annotations

import ctypes
import statistics
import threading
from typing import Any

import numpy as np
from harness import Contender, Launch, interleave
from launch_peers import Bench, Parameters
from saxpy import BLOCK, PTX, SCALE, SIGNATURE, N, check_saxpy

__all__ = ["measure_threads"]

THREADS = 8
#: Launches of a thread in a turn: enough to make the start of the threads small, too few to fill a stream's queue.
LAUNCHES = 768


def exported(name: str) -> int:
    """The address of a C function of kina.cuda.launch, where Cython modules find it too."""
    import kina.cuda.launch as room

    capsule = ctypes.py_object(room.__pyx_capi__[name])
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer_of(capsule, name_of(capsule)))


class Crew:
    """Threads with a Runtime each, which do the same thing at once when they are told."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.entry = ctypes.c_void_p(exported("launch_prepared"))
        self.struct_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(exported("prepared_of"))
        self.function = bench.raw.pointer("raw_function", PTX.encode(), b"saxpy")
        self.begin, self.end = threading.Barrier(THREADS + 1), threading.Barrier(THREADS + 1)
        self.task: str | None = None
        self.failure: BaseException | None = None
        self.threads = [threading.Thread(target=self.guarded, daemon=True) for _ in range(THREADS)]

    def guarded(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.failure = error
            self.begin.abort()
            self.end.abort()

    def work(self) -> None:
        bench, kina, raw = self.bench, self.bench.kina, self.bench.raw
        with kina.session(kina.Runtime("cuda:0")) as session, session.raw("threads") as block:
            own = Bench(kina, session, block, raw, bench.report, LAUNCHES, np.random.default_rng())
            prepared = block.module(PTX).function("saxpy", SIGNATURE).prepare(own.config)
            struct = ctypes.c_void_p(self.struct_of(prepared))
            launch = Launch(self.function, raw.pointer("raw_stream"), own.grid, BLOCK)
            tasks: dict[str, Any] = {}
            held = []
            for name in ("kina", "raw"):
                y, x = own.inputs()
                ty, tx = session.from_host(y), session.from_host(x)
                session.synchronize()  # before the other stream reads them
                values = Parameters(own.address(ty), own.address(tx), SCALE, N)
                held.append((ty, tx, values))
                if name == "kina":
                    tasks[name] = ("raw_launch_prepared", self.entry, struct, ctypes.byref(values))
                else:
                    size = ctypes.c_size_t(ctypes.sizeof(values))
                    tasks[name] = ("raw_launch_extra", ctypes.byref(launch), ctypes.byref(values), size)
                raw.call(*tasks[name], 1)
                raw.settle()
                check_saxpy(f"{name}, threads", session.to_host(ty), y, x, SCALE)
            while True:
                self.begin.wait()
                if self.task is None:
                    return
                raw.call(*tasks[self.task], LAUNCHES)
                self.end.wait()

    def run(self, task: str) -> None:
        self.task = task
        try:
            self.begin.wait()
            self.end.wait()
        except threading.BrokenBarrierError:
            raise self.failure or RuntimeError("a thread is gone") from None

    def __enter__(self) -> Crew:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.task = None
        if self.failure is None:
            self.begin.wait()
        for thread in self.threads:
            thread.join()


def measure_threads(bench: Bench, rounds: int) -> None:
    """The time per launch of all threads together."""
    with Crew(bench) as crew:
        contenders = [
            Contender(name, lambda task=task: crew.run(task), THREADS * LAUNCHES)  # type: ignore[misc]
            for name, task in (("kina, without the GIL", "kina"), ("raw", "raw"))
        ]
        samples = interleave(contenders, rounds, bench.raw.settle)
    report, name = bench.report, f"{THREADS} threads on {THREADS} Runtimes, per launch"
    report.timed(name, samples, against="raw")
    kina, raw = (statistics.median(values) for values in samples.values())
    report.row(f"{THREADS} threads: throughput against raw", "", raw / kina, bar=">= 0.95", ok=raw / kina >= 0.95)
