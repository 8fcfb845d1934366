"""What must hold of kina and the simulated driver whatever happened: nothing leaks, no rule of the driver is broken."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import Any

import numpy as np
from helpers.cuda import stream_of, until

import kina

__all__ = ["LARGE_BLOCK", "SMALL_BLOCK", "assert_all_idle", "assert_counters_settled", "settle", "unbroken"]

SMALL_BLOCK, LARGE_BLOCK = 64 << 10, 4 << 20  # bytes of a pinned block of each class
RING = 16  # blocks of a class that a device makes before a Runtime waits for its own transfers


def unbroken(sim: Any, since: int = 0) -> None:
    """No rule of the driver was broken: no double free, no use after free, no access out of order."""
    assert [f"{v['name']}: {v.get('note')}" for v in sim.trace(since, event="violation")] == []


def settle(sim: Any, *devices: int) -> None:
    """Everything that was dropped is released: quarantine, leases of Runtimes that are gone, dead modules."""
    gc.collect()
    for ordinal in devices:
        with kina.Runtime(ordinal) as runtime:
            for _ in range(3):  # what one wait releases may be the last holder of something that the next releases
                with kina.session(runtime) as session:
                    session.synchronize()
                sim.wait_idle()  # the streams of Runtimes that are gone, for which no session waits
    gc.collect()


def assert_counters_settled(session: Any) -> None:
    """Of a Runtime that was waited for, and whose tensors are all gone, or in the hand of the reaper."""
    with contextlib.suppress(AssertionError):
        until(lambda: (now := session.counters()).retired == now.leases and now.live_bytes == 0)
    c = session.counters()
    assert c.pending == 0, c
    assert c.leaked == 0, c
    assert c.retired == c.leases, c
    assert c.allocations == c.frees, c
    assert c.live_bytes == 0, c


def assert_all_idle(sim: Any, *devices: int, private_streams: int = 0) -> None:
    """What lives in the driver is what kina keeps idle, and it is handed out again before anything new is made.

    To be called when no Runtime is left and `settle` was. What is made here stays, so the process should end after.
    `private_streams`: how many devices may have one of their own, for memory that was given back in no stream's order.
    """
    with contextlib.suppress(AssertionError):  # the reaper may have the last of it in hand
        until(lambda: not any(sim.live()[kind] for kind in ("modules", "libraries", "graphs", "user_objects")))
    live = sim.live()
    kinds = Counter((a["kind"], a["nbytes"]) for a in live["allocations"])
    assert set(kinds) <= {("pinned", SMALL_BLOCK), ("pinned", LARGE_BLOCK)}, live["allocations"]
    assert (live["modules"], live["libraries"], live["graphs"], live["user_objects"]) == (0, 0, 0, 0), live
    idle: Counter[str] = Counter()
    for ordinal in devices:
        idle += _hand_out(sim, ordinal)
    assert idle["streams"] <= live["streams"] <= idle["streams"] + private_streams, (idle, live)
    assert idle["pools"] + len(devices) == live["pools"], (idle, live)  # each has one for all its Runtimes
    assert idle["events"] == live["events"], (idle, live)
    for name, nbytes in (("small blocks", SMALL_BLOCK), ("large blocks", LARGE_BLOCK)):
        assert idle[name] == kinds["pinned", nbytes], (name, idle, kinds)


def _hand_out(sim: Any, ordinal: int) -> Counter[str]:
    """How many of each a device hands out before it makes a new one."""
    idle: Counter[str] = Counter()

    def take(what: str, count: Any, one: Any, at_most: int) -> None:
        had = count()
        while idle[what] < at_most:
            one()
            if count() > had:
                return
            idle[what] += 1

    def pinned(nbytes: int) -> int:
        return sum(a["kind"] == "pinned" and a["nbytes"] == nbytes for a in sim.live()["allocations"])

    runtimes: list[Any] = []
    resources: list[Any] = []
    take("streams", lambda: sim.live()["streams"], lambda: runtimes.append(kina.Runtime(ordinal)), 32)
    take(
        "pools",
        lambda: sim.live()["pools"],
        lambda: resources.append(kina.memory.CudaAsyncMemoryResource(ordinal)),
        32,
    )
    with kina.session(runtimes[0]) as session:
        witnesses: list[Any] = []
        # An event is idle until a seal has it, and a pinned block until a copy that has not run has it.
        with sim.stalled(stream_of(session)):
            take("events", lambda: sim.live()["events"], lambda: witnesses.append(session.completion()), 256)
            for what, nbytes, size in (
                ("small blocks", SMALL_BLOCK, 1),
                ("large blocks", LARGE_BLOCK, SMALL_BLOCK + 1),
            ):
                data = np.zeros(size, np.uint8)
                take(what, lambda nbytes=nbytes: pinned(nbytes), lambda data=data: session.from_host(data), RING)
        session.synchronize()
    return idle
