"""Entering and leaving a session: kina beside the driver's push and pop in C, torch, CuPy and cuda.core.

    python benchmarks/bench_session.py [--json FILE] [--rounds N] [--batch N] [--only WORD]

Parts (``--only``): enter, nested, adopted, calls. Exit status: 0 all bars met, 1 a bar missed, 2 this machine
cannot run it (no GPU, no kina, no C compiler).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from harness import (
    HOST_WAITS,
    Borrowed,
    Contender,
    Raw,
    Report,
    arguments,
    count_driver_calls,
    interleave,
    load_interposer,
    open_runtime,
    optional,
)

BAR_NS = 500
COUNTED_SESSIONS = 1000


class SessionBench:
    def __init__(self, kina: Any, runtime: Any, raw: Raw, report: Report, options: argparse.Namespace) -> None:
        self.kina, self.runtime, self.raw, self.report = kina, runtime, raw, report
        self.calls, self.rounds = options.batch, options.rounds
        # What libraries set once stays current throughout: kina enters from, and returns to, their state.
        self.context = ctypes.c_void_p(raw.pointer("raw_context"))
        self.stream = raw.pointer("raw_stream")

    def repeat(self) -> Iterator[None]:
        return itertools.repeat(None, self.calls)

    def contender(self, name: str, make: Callable[[Any], AbstractContextManager[object]], what: Any) -> Contender:
        """``with make(what): pass``, over and over."""

        def batch() -> None:
            for _ in self.repeat():
                with make(what):
                    pass

        batch()  # a way that does not work is left out here
        return Contender(name, batch, self.calls)

    def raw_push_pop(self) -> Contender:
        return Contender("raw push + pop", lambda: self.raw.call("raw_push_pop", self.context, self.calls), self.calls)

    def peers(self) -> list[Contender]:
        found = [self.raw_push_pop()]
        if torch := optional(self.report, "torch"):
            with self.report.peer("torch contexts"):
                torch.cuda.init()
                stream = torch.cuda.Stream()
                found.append(self.contender("torch.cuda.device", torch.cuda.device, 0))
                found.append(self.contender("torch.cuda.stream", torch.cuda.stream, stream))
        if cupy := optional(self.report, "cupy"):
            with self.report.peer("cupy.cuda.Device"):
                found.append(self.contender("cupy.cuda.Device", cupy.cuda.Device, 0))
        with self.report.peer("cuda.core set_current"):
            from cuda.core import Device

            core = Device(0)

            def core_batch() -> None:
                for _ in self.repeat():
                    core.set_current()

            core_batch()
            found.append(Contender("cuda.core set_current", core_batch, self.calls))
        return found

    def settle(self) -> None:
        """Nothing is on the device: entering and leaving enqueues nothing."""

    def measure_enter(self) -> None:
        for title, target in (("session(runtime)", self.runtime), ('session("cuda:0")', "cuda:0")):
            kina = self.contender("kina", self.kina.session, target)
            samples = interleave([kina, *self.peers()], self.rounds, self.settle)
            self.report.timed(
                f"{title}, enter + exit",
                samples,
                against="raw push + pop",
                bar=f"<= {BAR_NS} ns",
                ok=lambda value: value <= BAR_NS,
            )

    def measure_nested(self) -> None:
        with self.kina.session(self.runtime):
            kina = self.contender("kina", self.kina.session, self.runtime)
            samples = interleave([kina, self.raw_push_pop()], self.rounds, self.settle)
        self.report.timed("session(runtime) inside itself, enter + exit", samples, against="raw push + pop")

    def measure_adopted(self) -> None:
        session, adopted = self.kina.session, Borrowed(self.stream)

        def batch() -> None:
            for _ in self.repeat():
                with session(0, stream=adopted):
                    pass

        batch()
        contenders = [Contender("kina", batch, self.calls), self.raw_push_pop()]
        if torch := optional(self.report, "torch"):
            with self.report.peer("torch.cuda.stream, external"):
                stream = torch.cuda.ExternalStream(self.stream)
                contenders.append(self.contender("torch.cuda.stream, external", torch.cuda.stream, stream))
        if cupy := optional(self.report, "cupy"):
            with self.report.peer("cupy.cuda.Stream, external"):
                external = cupy.cuda.Stream.from_external(Borrowed(self.stream))

                def cupy_batch() -> None:
                    for _ in self.repeat():
                        with external:
                            pass

                cupy_batch()
                contenders.append(Contender("cupy.cuda.Stream, external", cupy_batch, self.calls))
        samples = interleave(contenders, self.rounds, self.settle)
        self.report.timed("session(0, stream=adopted), enter + exit", samples, against="raw push + pop")


def measure_calls(report: Report) -> None:
    """What entering and leaving asks of the driver, counted by a library between kina and the driver."""
    counted = count_driver_calls(__file__)
    for title, calls in counted.items():
        each = {name: count / COUNTED_SESSIONS for name, count in calls.items() if count}
        report.row(f"driver calls, {title}", "calls", sum(each.values()), each)
        waits = sum(calls[name] for name in HOST_WAITS)
        report.row(f"host waits and event queries, {title}", "calls", waits, bar="= 0", ok=waits == 0)
        events = sum(calls[name] for name in ("cuEventRecord", "cuEventRecordWithFlags"))
        report.row(f"events recorded, {title}", "calls", events, bar="= 0", ok=events == 0)


def count_child() -> None:
    """Runs over the interposer and prints what it saw."""
    kina, runtime = open_runtime()
    calls = load_interposer().Interposer()
    found = {}
    for title, target in (("session(runtime)", runtime), ('session("cuda:0")', "cuda:0")):
        with kina.session(target):
            pass
        calls.reset()
        for _ in range(COUNTED_SESSIONS):
            with kina.session(target):
                pass
        found[title] = calls.counts()
    print(json.dumps(found))


def run(options: argparse.Namespace) -> int:
    kina, runtime = open_runtime()
    raw = Raw()
    with kina.session(runtime):  # a context for the handles below
        report = Report("bench_session", options, raw)
        bench = SessionBench(kina, runtime, raw, report, options)
    for part, measure in (
        ("enter", bench.measure_enter),
        ("nested", bench.measure_nested),
        ("adopted", bench.measure_adopted),
    ):
        if report.wants(part):
            with report.part(part):
                measure()
    if report.wants("calls"):
        with report.part("calls"):
            measure_calls(report)
    return report.finish()


if __name__ == "__main__":
    chosen = arguments(__doc__.splitlines()[0])
    if chosen.count_child:
        count_child()
    else:
        sys.exit(run(chosen))
