"""Tensors between libraries: what it costs to take one in, to give one away, and to do so without the GIL.

    python benchmarks/bench_exchange.py [--json FILE] [--rounds N] [--batch N] [--only WORD]

Parts (``--only``): import, export, native. Exit status: 0 all bars met, 1 a bar missed, 2 this machine cannot run it
(no GPU, no kina, no C compiler).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from harness import Contender, Raw, Report, arguments, interleave, open_runtime, optional

IMPORT_NS = 500
EXPORT_NS = 200
SHAPE = (64, 48)
WORK_STREAM = -2  # KINA_CONSUMER_WORK_STREAM


def exported(room: Any, name: str) -> int:
    """The address of a C function of a module of kina, where Cython modules find it too."""
    capsule = ctypes.py_object(room.__pyx_capi__[name])
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer_of(capsule, name_of(capsule)))


class ExchangeBench:
    def __init__(self, kina: Any, session: Any, report: Report, raw: Raw, options: argparse.Namespace) -> None:
        self.kina, self.session, self.report, self.raw = kina, session, report, raw
        self.calls, self.rounds = options.batch, options.rounds
        self.values = np.random.default_rng().standard_normal(SHAPE).astype(np.float32)

    def again(
        self, name: str, act: Callable[[], object], scope: Callable[[], AbstractContextManager] = nullcontext
    ) -> Contender:
        def batch() -> None:
            for _ in itertools.repeat(None, self.calls):
                act()

        with scope():
            batch()
        return Contender(name, batch, self.calls, scope)

    def interleave(self, contenders: list[Contender]) -> dict[str, list[float]]:
        return interleave(contenders, self.rounds, self.raw.settle)

    def check(self, what: str, found: np.ndarray) -> None:
        if not np.array_equal(found, self.values):
            raise AssertionError(f"{what}: the values did not come over")

    def measure_import(self) -> None:
        """An array of PyTorch, into a session of its own stream and into one of PyTorch's."""
        torch = optional(self.report, "torch")
        if torch is None:
            raise RuntimeError("PyTorch is what is imported from")
        kina, take = self.kina, self.kina.from_dlpack
        theirs = torch.tensor(self.values, device="cuda")
        torch.cuda.synchronize()
        # A current stream that is not the legacy one: with that, a session of it is an ordinary adopted one.
        side = torch.cuda.Stream()
        peers = [
            self.again("torch.from_dlpack", lambda: torch.from_dlpack(theirs)),
        ]
        if cupy := optional(self.report, "cupy"):
            with self.report.peer("cupy.from_dlpack"):
                peers.append(self.again("cupy.from_dlpack", lambda: cupy.from_dlpack(theirs)))
        with self.report.peer("cuda.core StridedMemoryView"):
            from cuda.core.utils import StridedMemoryView

            view = lambda: StridedMemoryView.from_dlpack(theirs, stream_ptr=-1)  # noqa: E731
            peers.append(self.again("cuda.core StridedMemoryView", view))

        self.check("from_dlpack", self.session.to_host(take(theirs)))
        samples = self.interleave([self.again("kina", lambda: take(theirs)), *peers])
        bar = {"bar": f"<= {IMPORT_NS} ns", "ok": lambda value: value <= IMPORT_NS}
        self.report.timed("kina.from_dlpack of a torch tensor, the session's stream waits for torch's", samples, **bar)
        with torch.cuda.stream(side), kina.session(0, stream=side) as session:
            self.check("from_dlpack on one stream", session.to_host(take(theirs)))
            samples = self.interleave([self.again("kina", lambda: take(theirs))])
        self.report.timed("kina.from_dlpack of a torch tensor, both on one stream", samples, **bar)
        self.session.synchronize()

    def measure_export(self) -> None:
        """The same array of kina's and of CuPy's, into PyTorch."""
        torch = optional(self.report, "torch")
        if torch is None:
            raise RuntimeError("PyTorch is what is exported to")
        ours = self.session.from_host(self.values)
        self.check("torch.from_dlpack", torch.from_dlpack(ours).cpu().numpy())
        contenders = [self.again("kina", lambda: torch.from_dlpack(ours))]
        if cupy := optional(self.report, "cupy"):
            with self.report.peer("cupy"):
                array = cupy.asarray(self.values)
                cupy.cuda.runtime.deviceSynchronize()
                contenders.append(self.again("cupy", lambda: torch.from_dlpack(array)))
        samples = self.interleave(contenders)
        peer = sum(samples.get("cupy", [])) > 0
        self.report.timed(
            "torch.from_dlpack",
            samples,
            against="cupy" if peer else None,
            bar="<= 0.5 of CuPy's",
            ok=lambda value: peer and value <= 0.5 * float(np.median(samples["cupy"])),
        )
        if cupy:
            with self.report.peer("cupy.from_dlpack"):
                theirs = torch.tensor(self.values, device="cuda")
                self.check("cupy.from_dlpack", cupy.asnumpy(cupy.from_dlpack(ours)))
                contenders = [self.again("kina", lambda: cupy.from_dlpack(ours))]
                contenders.append(self.again("torch", lambda: cupy.from_dlpack(theirs)))
                self.report.timed("cupy.from_dlpack", self.interleave(contenders))
        self.session.synchronize()

    def measure_native(self) -> None:
        """Export and deleter, in a loop in C that holds no GIL."""
        import kina._core.dlpack as dlpack

        import kina._core.tensor as tensor

        ours = self.session.from_host(self.values)
        struct_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(exported(tensor, "tensor_of"))
        struct = ctypes.c_void_p(struct_of(ours))
        give = ctypes.c_void_p(exported(dlpack, "export_tensor"))

        def loop(consumer: int) -> Callable[[], None]:
            return lambda: self.raw.call("raw_exports", give, struct, ctypes.c_int64(consumer), self.calls)

        contenders = [Contender("kina", loop(WORK_STREAM), self.calls)]
        contenders[0].batch()
        samples = self.interleave(contenders)
        self.report.timed(
            "export and deleter without the GIL",
            samples,
            bar=f"<= {EXPORT_NS} ns",
            ok=lambda value: value <= EXPORT_NS,
        )
        self.session.synchronize()


def run(options: argparse.Namespace) -> int:
    raw = Raw()
    kina, runtime = open_runtime()
    report = Report("bench_exchange", options, raw)
    with kina.session(runtime) as session:
        bench = ExchangeBench(kina, session, report, raw, options)
        for part in ("import", "export", "native"):
            if report.wants(part):
                with report.part(part):
                    getattr(bench, f"measure_{part}")()
    return report.finish()


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__.splitlines()[0])))
