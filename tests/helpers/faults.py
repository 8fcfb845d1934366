"""What an operation of kina is worth when any of its driver calls fails.

`sweep` lets the k-th driver call of an operation fail, for every k that there is, and looks after each failure at all
that must hold. It runs in a process of its own (helpers/forks.py), for a failure may poison the device for good.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.cuda import KERNELS, driver, ok, stack
from helpers.driver_sim import Sim
from helpers.invariants import settle, unbroken
from helpers.operations import CASES, SMALL, Kit, equal, run_add_one, the_foreign_stream

import kina

__all__ = ["CODES", "FIRST_USES", "at_exit", "first_use", "sweep"]

#: Answers of the driver. A run that only counts lines leaves out those that go the way of another.
CODES = [int(each) for each in os.environ.get("KINA_FAULT_CODES", "1,2,4,700,900,999").split(",")]
INVALID_VALUE, OUT_OF_MEMORY, DEINITIALIZED, STICKY, CAPTURE = 1, 2, 4, 700, 900

#: What an operation can do without, or does again later: its failure may go unseen.
BEST_EFFORT = {
    "cuCtxGetCurrent",  # unknown: the context is pushed
    "cuCtxGetId",  # unknown: nobody reset the context
    "cuCtxPopCurrent",  # the restore itself
    "cuEventDestroy",  # of one beyond what is kept
    "cuEventQuery",  # a harvest asks again
    "cuFuncLoad",
    "cuGraphDestroy",  # lost
    "cuGraphExecDestroy",
    "cuMemFree",  # leaked, and counted so
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemGetInfo",  # words for a message
    "cuMemPoolGetAttribute",  # counters
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuModuleUnload",  # lost
    "cuThreadExchangeStreamCaptureMode",
}
#: Answers that have a way out of their own: the ladder of a full device; the session's stream instead of the device;
#: memory of no context, as what is mapped may be (memory of nobody is refused before).
ALLOCATIONS = {"cuMemAlloc", "cuMemAllocFromPoolAsync", "cuMemAllocManaged", "cuMemHostAlloc", "cuMemPoolCreate"}
TOLERATED = {
    OUT_OF_MEMORY: ALLOCATIONS,
    CAPTURE: {"cuCtxSynchronize"},
    INVALID_VALUE: {"cuPointerGetAttribute"},
}
#: Questions about what may be of another context, whose fault poisons no device of kina's.
OF_OTHERS = {"cuDeviceGetCount", "cuStreamGetCtx", "cuStreamGetId"}
#: These never raise: what they cannot do now is done later, or leaked and counted.
SILENT = ("leave", "release", "Runtime: drop")
#: And these parts of an operation are done later.
DEFERRED = {
    "Runtime: close": {"cuCtxPushCurrent"},  # what was waited for is released, or counted as leaked
    "synchronize: memory in quarantine": {"cuCtxPushCurrent"},
    "launch: the segment is full": {"cuEventRecord"},  # it stays open
    "module: the cache is full": {"cuEventCreate", "cuEventRecord"},  # what was evicted stays leased
    "capture: a block with memory of its own": {"cuStreamSynchronize"},  # the pool asks for less
    "capture of another library: memory": {"cuStreamSynchronize"},
    # Another rung serves.
    "allocate: the device is full": {"cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize"},
}
#: What these are asked to take back and do not is lost.
RELEASES = {
    *("cuMemFree", "cuMemFreeAsync", "cuMemFreeHost", "cuModuleUnload", "cuEventDestroy"),
    *("cuGraphExecDestroy", "cuGraphDestroy"),
}

#: After these, memory that is free is not known to be.
LOSES_MEMORY = {
    *("cuCtxSynchronize", "cuEventCreate", "cuEventQuery", "cuEventRecord", "cuEventSynchronize"),
    "cuMemFreeAsync",
}

#: These end with a graph's memory.
GRAPHS = {
    *("leave: a capture, by an exception", "leave: in the middle of a capture"),
    *("release: an open capture", "release: a graph", "capture of another library: memory"),
}

#: What can fail to restore the context stack.
RESTORES = {"cuCtxPopCurrent", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent"}

#: Another process for each failure: what one leaks may not be missing to the next.
ALONE = {"allocate: the device is full"}


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def clear_stack() -> None:
    for _ in stack():
        ok(driver.cuCtxPopCurrent())


def kept(sim: Sim) -> Counter[str]:
    live = sim.live()
    counts = Counter({name: live[name] for name in ("contexts", "streams", "events", "modules", "pools")})
    counts["retains"] = sum(live["retains"])
    for allocation in live["allocations"]:
        counts["pinned" if allocation["kind"] == "pinned" else "memory"] += 1
    return counts


def check_first_cause(error: kina.RuntimePoisonedError) -> None:
    assert error.driver_error is not None, "the error has no driver_error"
    assert error.driver_error.code == STICKY
    assert "First cause" in str(error)


class Attempt:
    """One failure, and all that must hold of it."""

    def __init__(
        self, sim: Sim, name: str, nth: int, code: int, from_then_on: bool, clean: tuple | None = None
    ) -> None:
        self.sim, self.name, self.nth, self.code, self.from_then_on = sim, name, nth, code, from_then_on
        self.clean = clean  # the context stack before and after the operation without a failure
        self.poisoned = False
        self.failed: list[str] = []  # the driver calls, in their order
        self.error: kina.KinaError | None = None
        self.log: list[str] = []
        self.leaked = 0

    def __str__(self) -> str:
        how = "all calls from" if self.from_then_on else "call"
        seen = f"{type(self.error).__name__}: {self.error}" if self.error else "success"
        return f"{self.name}: {how} {self.nth} answered {self.code}: {self.failed[:5]}, {seen}, log {self.log}"

    def run(self) -> bool:
        """False if the operation has no such call."""
        kit = Kit(self.sim)
        steps = CASES[self.name](kit)
        act = next(steps)
        before = stack()
        records = Records()
        logging.getLogger("kina").addHandler(records)
        since, result = self.sim.position, None
        self.sim.fail("*", self.nth, self.code, from_then_on=self.from_then_on)
        try:
            result = act()
        except kina.KinaError as error:
            self.error = error.with_traceback(None)
        finally:
            delivered = self.sim.faults_delivered
            self.sim.clear_faults()
        self.failed = [r["name"] for r in self.sim.trace(since, event="call") if r.get("injected")]
        del act
        assert delivered == len(self.failed)
        if delivered:
            self.check_error()
        self.log = records.messages  # what was noted without the GIL is logged by now
        logging.getLogger("kina").removeHandler(records)
        self.check_stack(kit, before)
        self.poisoned = self.check_usable()
        if self.poisoned:
            steps.close()
        else:
            with contextlib.suppress(StopIteration):
                steps.send(result)
        del result
        kit.close(usable=not self.poisoned)
        self.leaked, caller = kit.leaked, kit.caller
        del kit, steps
        # What the driver refused to take back is the caller's own for all that comes later.
        assert stack() == caller or "cuCtxPopCurrent" in self.failed, "the caller's stack"
        clear_stack()
        return delivered > 0

    def check_error(self) -> None:
        """Typed, named, and with the driver's answer; none only where the operation can do without the call."""
        if self.code == INVALID_VALUE and "cuFuncGetParamInfo" in self.failed:
            return  # also what the driver says past the last parameter
        if self.error is None:
            allowed = BEST_EFFORT | DEFERRED.get(self.name, set()) | TOLERATED.get(self.code, set())
            unseen = [name for name in self.failed if name not in allowed]
            assert not unseen or self.name.startswith(SILENT), "the failure went unseen"
            return
        assert self.error.operation, "the error names no operation"
        failure = self.error.driver_error
        assert failure is not None, "the error has no driver_error"
        # Memory that the driver did not take back, or that nobody could wait for, may be what is missing in the end.
        full = isinstance(self.error, kina.OutOfMemoryError) and LOSES_MEMORY & {*self.failed}
        # Without the relaxed mode a thread that captures may not allocate.
        strict = "cuThreadExchangeStreamCaptureMode" in self.failed and 900 <= failure.code < 910
        assert failure.code == self.code or (full and failure.code == OUT_OF_MEMORY) or strict, failure
        assert not isinstance(self.error, kina.InternalError)
        if self.name in ("Runtime: own stream", "Runtime: more than are kept"):
            assert not isinstance(self.error, kina.ForeignDeviceError)
        if self.code == STICKY:
            told = isinstance(self.error, (kina.SynchronizeError, kina.RuntimePoisonedError))
            assert told or full or strict or OF_OTHERS & {*self.failed}
        else:
            assert not isinstance(self.error, kina.RuntimePoisonedError)
        if self.code == OUT_OF_MEMORY and not strict:
            assert isinstance(self.error, (kina.OutOfMemoryError, kina.UnavailableError, kina.ForeignDeviceError))

    def leaks(self, before: Counter[str], after: Counter[str]) -> list[str]:
        """What is there now and was not before, unless it was counted, or asked to go and did not."""
        grown = after - before
        if not any(name in RELEASES for name in self.failed):
            for what in ("memory", "pinned"):
                if grown[what] <= self.leaked:
                    del grown[what]
            if self.name.startswith("Runtime: drop"):
                del grown["modules"]  # the last segment could not be sealed: when it is done will not be known
                del grown["memory"]  # the chunk of its pool could not be given back, and nobody is left to count it
            if self.name in GRAPHS and (self.from_then_on or "cuCtxPushCurrent" in self.failed):
                del grown["memory"]  # the same of the graph's pools
            return [f"{count} {what}" for what, count in grown.items()]
        return []

    def check_stack(self, kit: Kit, before: list[int]) -> None:
        """As it was, or as the operation leaves it; where the restore itself failed, that was said once."""
        assert self.from_then_on or len(self.log) <= 1, "said more than once"
        after = stack()
        if self.clean is None:
            self.clean = (before, after)
        expected = self.clean[1] if self.error is None else self.clean[0]
        if self.error is not None and not kit.opened:
            expected = kit.caller
        if after != expected and not (self.name == "enter: after one was abandoned" and after[: len(before)] == before):
            # (What an abandoned session left may stay until the next occasion: the end of this attempt looks again.)
            assert any(name in RESTORES for name in self.failed), ("the context stack", expected, after)
            assert self.log or self.code == DEINITIALIZED, "said once"  # then nothing is left to restore it for
            clear_stack()
            for context in expected:
                ok(driver.cuCtxPushCurrent(driver.CUcontext(context)))

    def check_usable(self) -> bool:
        """Everything works, or the device is poisoned and says of what. Returns whether it is."""
        values = np.arange(SMALL, dtype=np.int32)
        with kina.session("cpu") as host:
            equal(host.to_host(host.from_host(values)), values)
        try:
            for ordinal in (0, 1):
                with kina.session(f"cuda:{ordinal}") as session:
                    equal(session.to_host(session.copy(session.from_host(values))), values)
        except kina.RuntimePoisonedError as error:
            poisoned = error.with_traceback(None)
        except kina.OutOfMemoryError:  # all memory there is was to be released, and was lost
            assert self.name in ALONE
            assert (RELEASES | LOSES_MEMORY) & {*self.failed}
            return False
        else:
            return False
        assert self.code == STICKY, "poisoned by what is not sticky"
        check_first_cause(poisoned)
        return True


def sweep(name: str, code: int, from_then_on: bool, first: int = 1) -> tuple[int | None, int, list[str]]:
    """Let each call of the operation fail, beginning with the `first`.

    Returns
    -------
    next : int or None
        Where another process has to go on, if the device was poisoned; None if there are no more calls.
    count : int
        Failures made.
    problems : list of str
    """
    sim = Sim()
    importlib.import_module("kina.cuda.reaper")._end()  # its calls would be counted as the operation's
    problems: list[str] = []
    clean = None
    for _ in range(1 if name in ALONE else 3):  # what is kept idle is there afterwards
        attempt = Attempt(sim, name, 10**9, code, False)
        attempt.run()
        clean = attempt.clean
        settle(sim, 0, 1)
    before = kept(sim)
    for nth in itertools.count(first):
        attempt = Attempt(sim, name, nth, code, from_then_on, clean)
        since = sim.position
        try:
            found = attempt.run()
            # A thread that is not in relaxed mode may lose a capture of its own.
            if "cuThreadExchangeStreamCaptureMode" not in attempt.failed:
                unbroken(sim, since)
            if not found:
                return None, nth - first, problems
            if attempt.poisoned or name in ALONE:
                return nth + 1, nth - first + 1, problems
            settle(sim, 0, 1)
            before, earlier = kept(sim), before
            left = attempt.leaks(earlier, before)
            for _ in range(4):
                if not left:
                    break
                # Something more may be kept idle from now on. What leaks, leaks each time.
                attempt = Attempt(sim, name, nth, code, from_then_on, clean)
                attempt.run()
                if attempt.poisoned:  # this time another call was the nth
                    return nth + 1, nth - first + 1, problems
                settle(sim, 0, 1)
                before, earlier = kept(sim), before
                left = attempt.leaks(earlier, before)
            problems += [f"{attempt}: left {what}" for what in left]
        except Exception:
            problems.append(f"{attempt}: {traceback.format_exc(limit=-3)}")
            return nth + 1, nth - first + 1, problems  # nothing can be said of what this process does next
    raise AssertionError("unreachable")


# First uses and the end ---------------------------------------------------------------------------------


def _open_a_session() -> Any:
    with kina.session("cuda:0") as session:
        return session.to_host(session.full(SMALL, 2))


FIRST_USES: dict[str, Callable[[], Any]] = {
    "devices": lambda: importlib.import_module("kina.cuda.device").devices(),
    "device_info": lambda: kina.cuda.device_info(0),
    "peer_matrix": lambda: importlib.import_module("kina.cuda.device").peer_matrix(),
    "driver_version": lambda: kina.cuda.driver_version(),
    "session": _open_a_session,
    "Runtime": lambda: kina.Runtime(1),
}


def first_use(name: str, nth: int, code: int, from_then_on: bool) -> tuple[bool, str]:
    """The first use of CUDA in the process, with a failure. Returns whether there was such a call, and problems."""
    sim = Sim()
    logging.getLogger("kina").addHandler(Records())  # a failed restore is said there
    act = FIRST_USES[name]
    sim.fail("*", nth, code, from_then_on=from_then_on)
    error = result = None
    try:
        result = act()
    except kina.KinaError as raised:
        error = raised.with_traceback(None)
    delivered = sim.faults_delivered
    sim.clear_faults()
    failed = [r["name"] for r in sim.trace(event="call") if r.get("injected")]
    try:
        if error is not None:
            assert error.operation, "the error names no operation"
            assert error.driver_error is not None, "the error has no driver_error"
            assert error.driver_error.code == code
        elif delivered:
            allowed = BEST_EFFORT | TOLERATED.get(code, set())
            if from_then_on:
                allowed = allowed | RESTORES  # of its end
            assert not [name for name in failed if name not in allowed], "the failure went unseen"
        clear_stack()  # the restore may be what failed
        poisoned = None
        try:
            again = act()
        except kina.RuntimePoisonedError as raised:
            poisoned = raised.with_traceback(None)
        if poisoned is not None:
            assert code == STICKY, "poisoned by what is not sticky"
            check_first_cause(poisoned)
        else:
            if error is None and name != "Runtime":
                equal(again, result)  # nothing wrong is remembered
            for ordinal in (0, 1):
                with kina.session(ordinal) as session:
                    run_add_one(session, session.zeros(SMALL), SMALL)
                    session.synchronize()
        assert stack() == []
        assert max(sim.live()["retains"]) <= 1
        unbroken(sim)
    except Exception:
        return True, f"{name}: {nth} {code} {from_then_on} {failed[:5]} {error!r}: {traceback.format_exc(limit=-3)}"
    return delivered > 0, ""


def at_exit(code: int) -> None:
    """Something of each kind is alive and at work, every call fails from here on: the interpreter ends in silence."""
    sim = Sim()
    runtime = kina.Runtime(0)
    session = kina.session(runtime).__enter__()
    raw = session.raw().__enter__()
    tensor = session.from_host(np.ones(SMALL, np.float32))
    function = raw.module(KERNELS).function("add_one", "mut f32[], u32")
    function.launch(kina.LaunchConfig.linear(SMALL), tensor, SMALL)
    adopting = kina.session("cuda:0", stream=the_foreign_stream()).__enter__()
    taken = adopting.adopt(tensor)
    witness = session.completion()
    globals()["held"] = [runtime, session, raw, raw.mut(tensor), function, adopting, taken, witness, tensor.to_dlpack()]
    sim.fail("*", 1, code, from_then_on=True)
