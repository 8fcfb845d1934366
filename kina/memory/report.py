"""What a log of allocations says, for people: figures, and live bytes over time as a picture."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kina._core.allocation_trace import AllocationTrace
from kina.errors import InvalidConfigError, UnavailableError
from kina.memory.log_reader import EVENT, EVENT_KINDS, read_log

if TYPE_CHECKING:
    import numpy
    from _typeshed import StrPath

__all__ = ["LogSummary", "draw", "summarize"]

# As wide as a picture has pixels: more points show nothing more.
_POINTS = 2000
_SHOWN = 10


@dataclass(frozen=True)
class LogSummary:
    """What :func:`summarize` found; ``str(summary)`` shows it.

    Attributes
    ----------
    log : str
        What was read.
    events : dict[str, int]
        How many there are of each kind.
    threads, streams : int
        Those that the log names.
    seconds : float
        From the first event to the last.
    was_cut : bool
        Whether the file ends within a line.
    wrong_sizes : int
        Frees of another size than their allocation.
    total_bytes : int
        All that was allocated.
    peak_live_bytes, peak_live_line : int
        The most that was live at once, and the line that brought it about.
    peak_live_s : float
        When, in seconds from the first event.
    peak_reserved_bytes : int or None
        The most that the log of the resource below has live.
    never_freed_count, never_freed_bytes : int
        What is live at the end.
    never_freed : list of (nbytes, count, line)
        That, by size, the sizes with most bytes first, each with the line of its first allocation.
    largest : list of (nbytes, line)
        The largest allocations.
    sizes : list of (least, most, count, nbytes)
        Allocations by powers of two: sizes from `least` to `most`, how many, and their bytes together.
    """

    log: str
    events: dict[str, int]
    threads: int
    streams: int
    seconds: float
    was_cut: bool
    wrong_sizes: int
    total_bytes: int
    peak_live_bytes: int
    peak_live_line: int
    peak_live_s: float
    peak_reserved_bytes: int | None
    never_freed_count: int
    never_freed_bytes: int
    never_freed: list[tuple[int, int, int]]
    largest: list[tuple[int, int]]
    sizes: list[tuple[int, int, int, int]]

    @property
    def fragmentation(self) -> float | None:
        """1 - peak live / peak reserved; None without the log of the resource below."""
        if not self.peak_reserved_bytes:
            return None
        return 1 - self.peak_live_bytes / self.peak_reserved_bytes

    def __str__(self) -> str:
        events = self.events
        lines = [
            self.log + (", which ends within a line" if self.was_cut else ""),
            f"  {events['allocate']:,} allocations of {_bytes(self.total_bytes)}, {events['free']:,} frees, "
            f"{events['failure']:,} failures",
            f"  {self.threads:,} threads, {self.streams:,} streams, {self.seconds:.6g} s",
            f"  peak live      {_bytes(self.peak_live_bytes)}, after {self.peak_live_s:.6g} s, "
            f"line {self.peak_live_line}",
        ]
        if self.peak_reserved_bytes is not None:
            lines.append(f"  peak reserved  {_bytes(self.peak_reserved_bytes)}")
        if self.fragmentation is not None:
            lines.append(f"  fragmentation  {100 * self.fragmentation:.1f} %")
        if events["unknown free"]:
            lines.append(f"  {events['unknown free']:,} frees of what was allocated before the log begins")
        if events["empty"]:
            lines.append(f"  {events['empty']:,} events of 0 bytes")
        if self.wrong_sizes:
            lines.append(f"  {self.wrong_sizes:,} frees of another size than their allocation")
        lines += ["", f"Never freed: {self.never_freed_count:,} allocations, {_bytes(self.never_freed_bytes)}"]
        for nbytes, count, line in self.never_freed[:_SHOWN]:
            lines.append(f"  {count:,} x {_bytes(nbytes)}, the first in line {line}")
        if len(self.never_freed) > _SHOWN:
            lines.append(f"  and {len(self.never_freed) - _SHOWN:,} more sizes")
        lines += ["", "Largest allocations"]
        lines += [f"  {_bytes(nbytes)}, line {line}" for nbytes, line in self.largest]
        lines += ["", "Sizes"]
        most = max((count for _, _, count, _ in self.sizes), default=1)
        for least, greatest, count, nbytes in self.sizes:
            bar = "#" * max(1, round(40 * count / most))
            lines.append(f"  {_short(least):>9} to {_short(greatest + 1):>9}  {count:>12,}  {_short(nbytes):>9}  {bar}")
        return "\n".join(lines)


def summarize(log: StrPath | AllocationTrace, *, reserved_from: StrPath | AllocationTrace | None = None) -> LogSummary:
    """The figures of a log.

    Parameters
    ----------
    log : str, os.PathLike or AllocationTrace
        The log, or what :func:`kina.memory.read_log` made of it.
    reserved_from : optional
        The log of the resource below, written in the same run: what is live there is reserved here.

    Raises
    ------
    InvalidConfigError, OSError, UnsupportedError
        As :func:`kina.memory.read_log`.
    """
    import numpy as np

    trace = _trace(log)
    events = _events(trace)
    below = None if reserved_from is None else _trace(reserved_from)
    kinds = np.bincount(events["action"], minlength=len(EVENT_KINDS))
    nbytes = events["nbytes"]
    allocated = np.flatnonzero(events["action"] == 0)
    sizes = nbytes[allocated]
    times = events["time_us"]
    peak = trace.peak_live_event if len(trace) else 0
    never = np.frombuffer(trace.outstanding(), dtype=np.uint32)
    values, first, counts = np.unique(nbytes[never], return_index=True, return_counts=True)
    order = np.argsort(-(values.astype(np.float64) * counts), kind="stable")
    greatest = allocated[np.argpartition(sizes, -_SHOWN)[-_SHOWN:]] if len(sizes) > _SHOWN else allocated
    greatest = greatest[np.argsort(-nbytes[greatest].astype(np.int64), kind="stable")]
    # Exact where a logarithm is not: how many powers of two are at most the size.
    powers = 2 ** np.arange(63, dtype=np.uint64)
    exponents = np.searchsorted(powers, sizes, side="right") - 1
    by_power = np.bincount(exponents, minlength=64)
    used = np.flatnonzero(by_power)
    return LogSummary(
        log=trace.name,
        events=dict(zip(EVENT_KINDS, kinds.tolist(), strict=True)),
        threads=len(trace.thread_names),
        streams=len(trace.stream_names),
        seconds=float(times.max() - times[0]) / 1e6 if len(times) else 0.0,
        was_cut=trace.was_cut,
        wrong_sizes=trace.wrong_size_count,
        total_bytes=int(sizes.sum(dtype=np.uint64)),
        peak_live_bytes=trace.peak_live_bytes,
        peak_live_line=int(events["line"][peak]) if len(trace) else 0,
        peak_live_s=float(times[peak] - times[0]) / 1e6 if len(trace) else 0.0,
        peak_reserved_bytes=None if below is None else below.peak_live_bytes,
        never_freed_count=trace.live_at_end_count,
        never_freed_bytes=trace.live_at_end_bytes,
        never_freed=[(int(values[n]), int(counts[n]), int(events["line"][never[first[n]]])) for n in order],
        largest=[(int(nbytes[n]), int(events["line"][n])) for n in greatest],
        sizes=[
            (1 << int(n), (2 << int(n)) - 1, int(by_power[n]), int(sizes[exponents == n].sum(dtype=np.uint64)))
            for n in used
        ],
    )


def draw(
    log: StrPath | AllocationTrace,
    out: StrPath,
    *,
    reserved_from: StrPath | AllocationTrace | None = None,
) -> None:
    """Live bytes over time, and reserved ones if they are known, to a file.

    Parameters
    ----------
    log, reserved_from
        As in :func:`summarize`.
    out : str or os.PathLike
        A name in ``.png``; or in ``.html``: one file with picture and figures that loads nothing from elsewhere.

    Raises
    ------
    InvalidConfigError
        `out` has another ending; and as :func:`summarize`.
    UnavailableError
        Matplotlib is missing; ``pip install 'kina[report]'`` brings it.
    OSError
        A file cannot be read or written.

    Notes
    -----
    Where there are more events than points, a point shows the most and the least that was live in its span: no peak is
    lost, however short.
    """
    import io

    path = os.fspath(out)
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".png", ".html"):
        raise InvalidConfigError(f"report: {path}: a name in .png or .html is needed", operation="report")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            f"report: drawing needs Matplotlib ({error}); it comes with: pip install 'kina[report]'", operation="report"
        ) from error
    trace = _trace(log)
    below = None if reserved_from is None else _trace(reserved_from)
    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    curves = [(trace, "live", "tab:blue")]
    if below is not None:
        curves.insert(0, (below, "reserved", "tab:orange"))
    begin = min((_events(each)["time_us"][0] for each, _, _ in curves if len(each)), default=0)
    greatest = max(each.peak_live_bytes for each, _, _ in curves)
    unit, name = _unit(greatest)
    for each, label, colour in curves:
        seconds, least, most = envelope(each, begin)
        axes.fill_between(seconds, least / unit, most / unit, step="post", color=colour, alpha=0.4, linewidth=0)
        axes.step(seconds, most / unit, where="post", color=colour, linewidth=1, label=label)
    axes.set(xlabel="seconds", ylabel=name)
    axes.set_title(os.path.basename(trace.name), parse_math=False)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.legend(loc="upper left")
    if suffix == ".png":
        FigureCanvasAgg(figure).print_png(path)
        return
    picture = io.StringIO()
    FigureCanvasSVG(figure).print_svg(picture, metadata={"Date": None})
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :]
    title = html.escape(os.path.basename(trace.name))
    figures = html.escape(str(summarize(trace, reserved_from=below)))
    with open(path, "w", encoding="utf-8") as page:
        page.write(
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            "<style>body { font-family: sans-serif; margin: 2em } svg { max-width: 100%; height: auto }</style>\n"
            f"</head><body>\n{svg}\n<pre>{figures}</pre>\n</body></html>\n"
        )


def envelope(
    trace: AllocationTrace, begin_us: int, points: int = _POINTS
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Seconds from `begin_us`, and the least and most bytes that were live from there to the next point."""
    import numpy as np

    events = _events(trace)
    if not len(events):
        return np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64)
    changes = np.where(events["action"] < 2, events["nbytes"], 0).astype(np.int64)
    np.negative(changes, out=changes, where=events["action"] == 1)
    live = np.cumsum(changes)
    # Threads draw their places in the log a little later than they read the clock.
    times = np.maximum.accumulate(events["time_us"])
    if len(times) <= points:
        return (times - begin_us) / 1e6, live, live
    edges = np.linspace(times[0], times[-1], points, endpoint=False)
    starts = np.unique(np.searchsorted(times, edges, side="left"))
    most, least = np.maximum.reduceat(live, starts), np.minimum.reduceat(live, starts)
    return (times[starts] - begin_us) / 1e6, least, most


def _trace(log: StrPath | AllocationTrace) -> AllocationTrace:
    return log if isinstance(log, AllocationTrace) else read_log(log)


def _events(trace: AllocationTrace) -> Any:
    import numpy as np

    return np.frombuffer(trace, dtype=EVENT)


def _unit(nbytes: int) -> tuple[int, str]:
    for exponent, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << exponent:
            return 1 << exponent, name
    return 1, "bytes"


def _short(nbytes: int) -> str:
    unit, name = _unit(nbytes)
    return f"{nbytes / unit:.4g} {name}"


def _bytes(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1024 else f"{nbytes:,} bytes ({_short(nbytes)})"
