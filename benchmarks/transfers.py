"""Host to device and back: what submitting costs the caller, and when the data has arrived."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import Raw, Report, optional

__all__ = ["measure_transfers"]

#: Size in bytes and turns of each contender.
SIZES = ((4 << 10, 200), (1 << 20, 100), (64 << 20, 15), (1 << 30, 5))


@dataclass
class Way:
    """One way to move an array. ``start()`` returns the result, perhaps before the device is done with it."""

    name: str
    start: Callable[[], Any]
    read: Callable[[Any], np.ndarray]


def words(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def ways(session: Any, report: Report, host: np.ndarray) -> tuple[list[Way], list[Way]]:
    """The ways up and down for one array; kina's first."""
    resident = session.from_host(host)
    up = [Way("kina", lambda: session.from_host(host), session.to_host)]
    down = [Way("kina", lambda: session.to_host(resident), np.asarray)]
    if torch := optional(report, "torch"):
        with report.peer("torch copies"):
            pageable = torch.from_numpy(host)
            pinned = pageable.pin_memory()
            target = torch.empty_like(pinned).pin_memory()
            on_device = pageable.cuda()

            def download_pinned() -> Any:
                return target.copy_(on_device, non_blocking=True)

            up += [
                Way("torch pageable", lambda: pageable.to("cuda"), lambda t: t.cpu().numpy()),
                Way(
                    "torch pinned",
                    lambda: pinned.to("cuda", non_blocking=True),
                    lambda t: t.cpu().numpy(),
                ),
            ]
            down += [
                Way("torch pageable", on_device.cpu, lambda t: t.numpy()),
                Way("torch pinned", download_pinned, lambda t: t.numpy()),
            ]
    if cupy := optional(report, "cupy"):
        with report.peer("CuPy copies"):
            in_cupy = cupy.asarray(host)
            up.append(Way("CuPy", lambda: cupy.asarray(host), cupy.asnumpy))
            down.append(Way("CuPy", lambda: cupy.asnumpy(in_cupy), np.asarray))
    return up, down


def time_ways(line: list[Way], host: np.ndarray, rounds: int, session: Any, raw: Raw) -> tuple[Any, Any]:
    """Nanoseconds until the call returned, and until the device was done, for each way."""
    for way in line:
        result = way.start()
        raw.settle()
        if not np.array_equal(way.read(result), host):
            raise AssertionError(f"{way.name} moved {host.nbytes} bytes wrongly")
        del result
    submitted: dict[str, list[float]] = {way.name: [] for way in line}
    arrived: dict[str, list[float]] = {way.name: [] for way in line}
    gc.collect()
    for number in range(rounds):
        for way in line if number % 2 == 0 else reversed(line):
            begin = time.perf_counter_ns()
            result = way.start()
            returned = time.perf_counter_ns()
            raw.settle()
            end = time.perf_counter_ns()
            del result
            session.synchronize()  # kina takes back what its copies used
            raw.settle()
            submitted[way.name].append(returned - begin)
            arrived[way.name].append(end - begin)
    return submitted, arrived


def measure_transfers(session: Any, raw: Raw, report: Report) -> None:
    generator = np.random.default_rng()
    for nbytes, rounds in SIZES:
        host = generator.random(nbytes // 4, dtype=np.float32)
        up, down = ways(session, report, host)
        for name, line in (("from_host", up), ("to_host", down)):
            submitted, arrived = time_ways(line, host, rounds, session, raw)
            against = "torch pageable" if "torch pageable" in arrived else None
            if name == "from_host":
                title = f"from_host {words(nbytes)}, submission"
                report.timed(title, submitted, unit="us", scale=1e-3, against=against)
            if nbytes < 64 << 20:
                title = f"{name} {words(nbytes)}, arrived"
                report.timed(title, arrived, unit="us", scale=1e-3, against=against)
                continue
            rates = {key: nbytes / statistics.median(values) for key, values in arrived.items()}
            report.row(
                f"{name} {words(nbytes)}, arrived",
                "GB/s",
                rates.pop("kina"),
                rates,
                against=rates.get("torch pageable"),
            )
