"""Playing a log of allocations again, on any resource, to see what it costs there."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kina._core.adaptors import StatisticsMemoryResource
from kina._core.allocation_trace import AllocationTrace
from kina._core.replaying import Playback
from kina._core.resource import MemoryResource
from kina.errors import ArgumentError
from kina.memory.log_reader import read_log

if TYPE_CHECKING:
    from _typeshed import StrPath

__all__ = ["ReplayReport", "replay"]

# The run looks for signals, and at the resource's statistics, that often; in events.
_LOOK_EVERY = 4096


@dataclass(frozen=True)
class ReplayReport:
    """What :func:`kina.memory.replay` found; ``print(report)`` shows it as a table.

    Attributes
    ----------
    log, resource : str
        What was played, and on what.
    threads, streams : int
        Those that the log names; each had its own in the replay (streams: on a resource with stream order).
    allocations, deallocations : int
        What was done, one for each line of the log that is one. What was left live and then given back is not in it.
    left_count, left_bytes : int
        What the log never frees; it was given back at the end.
    skipped : int
        Lines that change nothing: failed allocations, frees of what the log did not see allocated, 0 bytes.
    seconds : float
        From the first event to the last, with everything.
    allocate_ns, deallocate_ns : float
        The mean time of one in the resource, in nanoseconds: measured from the end of the event before to its own end,
        less what the loop costs itself.
    operation_ns : float
        The mean of both together.
    allocate_overhead_ns, deallocate_overhead_ns : float
        What the loop costs an event, and was subtracted: the same events on a resource that does nothing. It reads the
        clock, once.
    peak_live_bytes : int
        The most bytes that were live at once, as they were asked for.
    peak_reserved_bytes : int or None
        The most bytes that the resource had from below, if that is known.
    reserved_source : str or None
        Where that is known from.
    """

    log: str
    resource: str
    threads: int
    streams: int
    allocations: int
    deallocations: int
    left_count: int
    left_bytes: int
    skipped: int
    seconds: float
    allocate_ns: float
    deallocate_ns: float
    operation_ns: float
    allocate_overhead_ns: float
    deallocate_overhead_ns: float
    peak_live_bytes: int
    peak_reserved_bytes: int | None
    reserved_source: str | None

    @property
    def operations(self) -> int:
        """Allocations and deallocations together."""
        return self.allocations + self.deallocations

    @property
    def fragmentation(self) -> float | None:
        """The part of the reserved bytes that was not needed: 1 - peak live / peak reserved. None if not known."""
        if not self.peak_reserved_bytes:
            return None
        return 1 - self.peak_live_bytes / self.peak_reserved_bytes

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return found | {"operations": self.operations, "fragmentation": self.fragmentation}

    def __str__(self) -> str:
        reserved = "not known: this resource has no stats(); upstream_statistics= tells"
        fragmentation = "not known"
        if self.peak_reserved_bytes is not None:
            reserved = f"{self.peak_reserved_bytes:,} bytes, from {self.reserved_source}"
        if self.fragmentation is not None:
            fragmentation = f"{100 * self.fragmentation:.1f} %"
        rows = [
            ("log", self.log),
            ("resource", self.resource),
            ("threads, streams", f"{self.threads:,}, {self.streams:,}"),
            ("operations", f"{self.operations:,} in {self.seconds:.3f} s; {self.skipped:,} lines change nothing"),
            ("allocate", f"{self.allocate_ns:.1f} ns, {self.allocations:,} times"),
            ("deallocate", f"{self.deallocate_ns:.1f} ns, {self.deallocations:,} times"),
            ("both", f"{self.operation_ns:.1f} ns an operation"),
            (
                "the loop itself",
                f"{self.allocate_overhead_ns:.1f} and {self.deallocate_overhead_ns:.1f} ns, subtracted above",
            ),
            ("peak live", f"{self.peak_live_bytes:,} bytes"),
            ("peak reserved", reserved),
            ("fragmentation", fragmentation),
            ("never freed", f"{self.left_count:,} allocations, {self.left_bytes:,} bytes; given back at the end"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def replay(
    log: StrPath | AllocationTrace,
    resource: MemoryResource,
    *,
    upstream_statistics: StatisticsMemoryResource | None = None,
) -> ReplayReport:
    """Do what a log says again, with memory of `resource`, and measure it.

    Parameters
    ----------
    log : str, os.PathLike or AllocationTrace
        A log of RMM or of :class:`LoggingMemoryResource`, or what :func:`read_log` made of it, to play it more often.
    resource : MemoryResource
        Any, with any adaptors. Its memory is never written to.
    upstream_statistics : StatisticsMemoryResource, optional
        The one below a pool in `resource`: what it hands out counts as reserved, to the byte. Without it, the first
        resource of the chain whose ``stats()`` has ``reserved_bytes`` is asked, every 4,096 events, at the peak of the
        live bytes, and at the end; and for its ``peak_reserved_bytes``, if there is one and it grew.

    Returns
    -------
    ReplayReport

    Raises
    ------
    InvalidConfigError, OSError, UnsupportedError
        The log cannot be read; as :func:`read_log`.
    OutOfMemoryError
        The resource cannot serve an allocation that was served when the log was written. A note of the error names the
        line. So with any exception of a resource in Python.
    ArgumentError
        `resource` is no MemoryResource, or `upstream_statistics` no StatisticsMemoryResource.

    Notes
    -----
    The events happen one after the other in the order of the log, each on a real thread that stands for the one that
    logged it, so that a free on another thread comes after its allocation, as it did. What is measured is what an
    operation costs there, without the waiting between threads; it is not how threads hinder each other. The log of a
    single thread is played on the calling one. A thread begins with its first event, and ends with its last.

    On CUDA resources with stream order each stream of the log becomes a Runtime of its own, in whose order memory is
    taken, and goes back: that of the stream that the log names for the free.

    Whatever happens, an exception or a KeyboardInterrupt included, what is live at the end is given back.
    """
    if not isinstance(resource, MemoryResource):
        raise ArgumentError(f"replay: a MemoryResource is needed, not {type(resource).__name__}", operation="replay")
    if upstream_statistics is not None and not isinstance(upstream_statistics, StatisticsMemoryResource):
        raise ArgumentError(
            "replay: upstream_statistics takes the StatisticsMemoryResource below the pool, not "
            f"{type(upstream_statistics).__name__}",
            operation="replay",
        )
    trace = log if isinstance(log, AllocationTrace) else read_log(log)
    streams: list[Any] = []
    if resource.supports_streams and resource.device != "cpu":
        from kina.cuda import Runtime

        streams = [Runtime(resource.device) for _ in trace.stream_names]
    playback = Playback(trace, resource, streams)
    reserved = _Reserved(resource, upstream_statistics)
    looks = _Looks(playback, trace, reserved)
    with reserved:
        try:
            begin = time.perf_counter()
            if len(trace.thread_names) <= 1:
                _play(playback, looks)
            else:
                _play_in_threads(playback, looks)
            seconds = time.perf_counter() - begin
            reserved.look()
        finally:
            left_count, left_bytes = playback.give_back()
    return _report(trace, resource, playback, reserved, seconds, left_count, left_bytes)


def _report(
    trace: AllocationTrace,
    resource: MemoryResource,
    playback: Playback,
    reserved: _Reserved,
    seconds: float,
    left_count: int,
    left_bytes: int,
) -> ReplayReport:
    allocations, deallocations = playback.allocations, playback.deallocations
    allocating = max(0.0, playback.allocate_ns - allocations * playback.allocate_overhead_ns)
    deallocating = max(0.0, playback.deallocate_ns - deallocations * playback.deallocate_overhead_ns)
    return ReplayReport(
        log=trace.name,
        resource=repr(resource),
        threads=len(trace.thread_names),
        streams=len(trace.stream_names),
        allocations=allocations,
        deallocations=deallocations,
        left_count=left_count,
        left_bytes=left_bytes,
        skipped=len(trace) - allocations - deallocations,
        seconds=seconds,
        allocate_ns=allocating / max(1, allocations),
        deallocate_ns=deallocating / max(1, deallocations),
        operation_ns=(allocating + deallocating) / max(1, allocations + deallocations),
        allocate_overhead_ns=playback.allocate_overhead_ns,
        deallocate_overhead_ns=playback.deallocate_overhead_ns,
        peak_live_bytes=trace.peak_live_bytes,
        peak_reserved_bytes=reserved.peak_bytes,
        reserved_source=reserved.source,
    )


def _play(playback: Playback, looks: _Looks) -> None:
    looks.next()
    while playback.run():
        looks.look()


def _play_in_threads(playback: Playback, looks: _Looks) -> None:
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []

    def play(number: int) -> None:
        try:
            while playback.run(number):
                looks.look()
        except BaseException as error:
            failures.append(error)
            playback.stop()

    looks.next()
    try:
        while (number := playback.thread_to_start()) is not None:
            if number >= 0:
                thread = threading.Thread(target=play, args=(number,), name=f"kina replay {number}")
                threads.append(thread)
                thread.start()
    finally:
        # Without an exception all is played already, and this stops nothing.
        playback.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]


class _Looks:
    """When the loop comes back to Python, and what happens then. Used by whichever thread has the turn."""

    def __init__(self, playback: Playback, trace: AllocationTrace, reserved: _Reserved) -> None:
        self.playback = playback
        self.after_peak = trace.peak_live_event + 1
        self.reserved = reserved

    def next(self) -> None:
        position = self.playback.position
        pause = position + _LOOK_EVERY
        if position < self.after_peak < pause:
            pause = self.after_peak
        self.playback.pause = pause

    def look(self) -> None:
        self.reserved.look()
        self.next()


class _Reserved:
    """How many bytes the resource has from below: the most of them."""

    def __init__(self, resource: MemoryResource, statistics: StatisticsMemoryResource | None) -> None:
        self.peak_bytes: int | None = None
        self.source: str | None = None
        self.stats = None
        self.scope = None
        if statistics is not None:
            self.before = statistics.counts().current_bytes
            self.scope = statistics.scope()
            self.source = "upstream_statistics"
            return
        below: MemoryResource | None = resource
        while below is not None:
            stats = getattr(below, "stats", None)
            found = stats() if callable(stats) else None
            if isinstance(getattr(found, "reserved_bytes", None), int):
                self.stats = stats
                self.source = f"{below.name}.stats()"
                self.peak_bytes = found.reserved_bytes
                self.peak_ever = getattr(found, "peak_reserved_bytes", None)
                return
            below = below.upstream

    def __enter__(self) -> _Reserved:
        if self.scope is not None:
            self.scope.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.scope is not None:
            self.scope.__exit__(None, None, None)
            self.peak_bytes = self.before + self.scope.counts().peak_bytes

    def look(self) -> None:
        if self.stats is None:
            return
        found = self.stats()
        self.peak_bytes = max(self.peak_bytes, found.reserved_bytes)
        # Its own record is exact; but an old one says nothing of this run.
        if self.peak_ever is not None and found.peak_reserved_bytes > self.peak_ever:
            self.peak_bytes = max(self.peak_bytes, found.peak_reserved_bytes)
