"""Work that fails: what every function says afterwards."""

from __future__ import annotations

from driver_sim.oracle.scenarios.calls import DESTROYING, LAUNCHING, QUESTIONS, WORK, prepare
from driver_sim.oracle.script import Script, scenario


@scenario("after an illegal address: questions and work, in the order of the tables")
def fault_then_everything(s: Script) -> None:
    prepare(s)
    s.trap("$s1")
    s.cuStreamSynchronize("$s1")
    for call in (*QUESTIONS, *WORK, *LAUNCHING):
        s.call(*call)
        if call[0] == "cuLaunchHostFunc":
            s.log(1, within_ms=100)


@scenario("after an illegal address: ending things, popping, releasing")
def fault_then_destroy(s: Script) -> None:
    prepare(s)
    s.trap("$s1")
    s.cuStreamSynchronize("$s1")
    for call in DESTROYING:
        s.call(*call)
    s.cuCtxSetCurrent(None)
    s.cuCtxGetCurrent("&current")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")


@scenario("which call tells first: each in a process of its own, with the fault already there")
def fault_first_seen(s: Script) -> None:
    for call in (
        ("cuStreamQuery", "$s1"),
        ("cuStreamQuery", "$s2"),
        ("cuEventQuery", "$e1"),
        ("cuEventSynchronize", "$e1"),
        ("cuCtxSynchronize", None),
        ("cuMemAlloc", "&made", 64),
        ("cuMemFree", "$b"),
        ("cuMemsetD8Async", "$a", 1, 64, "$s2"),
        ("cuEventCreate", "&made_event", 0),
        ("cuStreamDestroy", "$s2"),
        ("cuEventDestroy", "$e2"),
        ("cuCtxGetId", None, "&id"),
        ("cuMemGetInfo", "&_", "&_"),
        ("cuModuleUnload", "$module2"),
        ("cuDevicePrimaryCtxRetain", "&again", 0),
    ):
        s.restart(" ".join(map(str, call)))
        prepare(s)
        word = s.gate("$s1")
        s.trap("$s1")
        s.cuEventRecord("$e1", "$s1")
        s.open(word)
        s.step(sleep=100)
        s.call(*call)


@scenario("a fault on one thread is seen on another; work queued before it, elsewhere, is lost or done")
def fault_elsewhere(s: Script) -> None:
    prepare(s)
    s.cuCtxSetCurrent("$ctx0", on="t1")
    word = s.gate("$s2")
    s.cuStreamWriteValue32("$s2", "$host", 7, 0)
    s.trap("$s1")
    s.cuStreamSynchronize("$s1", on="t1")
    s.cuStreamQuery("$s2")
    s.open(word)
    s.cuStreamSynchronize("$s2")
    s.read("$host", any=["values"])
    s.cuMemAlloc("&made", 64, on="t1")


@scenario("a reset after a fault, and a new retain: is the device usable again?")
def fault_reset(s: Script) -> None:
    prepare(s)
    s.trap("$s1")
    s.cuStreamSynchronize("$s1")
    s.cuDevicePrimaryCtxReset(0)
    s.cuCtxSetCurrent(None)
    s.cuDevicePrimaryCtxRetain("&again", 0)
    s.cuCtxSetCurrent("$again")
    s.cuMemAlloc("&made", 64)
    s.cuStreamCreate("&fresh", 1)
    s.cuStreamSynchronize("$fresh")


@scenario("a fault in one context, another context of the same device and process")
def fault_other_context(s: Script) -> None:
    prepare(s)
    s.cuCtxCreate("&c", None, 0, 0)
    s.cuStreamCreate("&sc", 1)
    s.cuMemAlloc("&mc", 64)
    s.cuCtxPopCurrent("&popped")
    s.trap("$s1")
    s.cuStreamSynchronize("$s1")
    s.cuCtxPushCurrent("$c")
    s.cuMemsetD8Async("$mc", 1, 64, "$sc")
    s.cuStreamSynchronize("$sc")
    s.cuMemAlloc("&more", 64)
    s.cuCtxDestroy("$c")
    s.cuMemAlloc("&more", 64)


@scenario("host functions and callbacks behind a fault")
def fault_host_functions(s: Script) -> None:
    prepare(s)
    s.callback("told", kind="stream")
    word = s.gate("$s1")
    s.trap("$s1")
    s.cuLaunchHostFunc("$s1", "$note", None)
    s.cuStreamAddCallback("$s1", "$told", None, 0)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    s.log(2, within_ms=300)


@scenario("a device's own out-of-bounds access: fill beyond an allocation")
def fault_unmapped(s: Script) -> None:
    prepare(s)
    s.fill("$s1", 4096, 1.0)
    s.cuStreamSynchronize("$s1")
    s.cuStreamQuery("$s2")


@scenario("a misaligned address")
def fault_misaligned(s: Script) -> None:
    prepare(s)
    s.fill("$s1", "$a+2", 1.0)
    s.cuStreamSynchronize("$s1")
    s.cuStreamQuery("$s2")


@scenario("memory that was freed before the kernel runs")
def fault_after_free(s: Script) -> None:
    prepare(s)
    s.cuMemAlloc("&big", 256 << 20)
    s.cuMemFree("$big")
    s.fill("$s1", "$big", 1.0)
    s.cuStreamSynchronize("$s1")


@scenario("a fault on one device leaves the other alone", devices=2)
def fault_two_devices(s: Script) -> None:
    prepare(s)
    s.cuDevicePrimaryCtxRetain("&ctx1", 1)
    s.cuCtxPushCurrent("$ctx1")
    s.cuStreamCreate("&t1", 1)
    s.cuMemAlloc("&m1", 64)
    s.cuCtxPopCurrent("&popped")
    s.trap("$s1")
    s.cuStreamSynchronize("$s1")
    s.cuCtxPushCurrent("$ctx1")
    s.cuMemsetD8Async("$m1", 1, 64, "$t1")
    s.cuStreamSynchronize("$t1")
    s.cuMemAlloc("&m2", 64)
    s.cuStreamQuery("$s1")
    s.cuStreamWaitEvent("$t1", "$e1", 0)
    s.cuMemcpyPeerAsync("$m1", "$ctx1", "$a", "$ctx0", 64, "$t1")
    s.cuMemFree("$m1")
    s.cuMemFree("$a")
    s.cuCtxSynchronize(None)
