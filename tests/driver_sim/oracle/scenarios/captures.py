"""Stream capture: modes, threads, what is forbidden, how captures end."""

from __future__ import annotations

from typing import Any

from driver_sim.oracle.scenarios.calls import LAUNCHING, PINNED_POOL, QUESTIONS, prepare
from driver_sim.oracle.script import KERNELS, Script, scenario

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2

#: Calls that name other streams than the capturing one, or none.
OTHERS: list[tuple[Any, ...]] = [
    ("cuCtxSynchronize", None),
    ("cuCtxGetId", None, "&id"),
    ("cuStreamSynchronize", "$s2"),
    ("cuStreamQuery", "$s2"),
    ("cuStreamSynchronize", 0),
    ("cuStreamQuery", 0),
    ("cuStreamGetId", "$s2", "&stream_id"),
    ("cuStreamGetId", 0, "&legacy_id"),
    ("cuStreamIsCapturing", 0, "&status"),
    ("cuStreamGetCtx", "$s2", "&ctx", "&_"),
    ("cuStreamCreateWithPriority", "&new", 1, 0),
    ("cuStreamDestroy", "$old_stream"),
    ("cuEventCreate", "&new_event", 2),
    ("cuEventRecord", "$old_event", "$s2"),
    ("cuEventQuery", "$old_event"),
    ("cuEventSynchronize", "$old_event"),
    ("cuStreamWaitEvent", "$s2", "$old_event", 0),
    ("cuEventDestroy", "$old_event"),
    ("cuEventRecord", "$e2", 0),
    ("cuStreamWaitEvent", 0, "$e2", 0),
    ("cuCtxRecordEvent", "$ctx0", "$e2"),
    ("cuMemAlloc", "&new_memory", 64),
    ("cuMemFree", "$old_memory"),
    ("cuMemFree", None),
    ("cuMemHostAlloc", "&new_host", 64, 1),
    ("cuMemFreeHost", "$old_host"),
    ("cuMemAllocManaged", "&new_managed", 64, 1),
    ("cuMemHostRegister", "$buffer", 4096, 0),
    ("cuMemHostUnregister", "$buffer"),
    ("cuMemGetInfo", "&_", "&_"),
    ("cuMemPoolCreate", "&new_pool", PINNED_POOL),
    ("cuMemPoolSetAttribute", "$p1", 4, [0, "&_"]),
    ("cuMemPoolGetAttribute", "$p1", 4, "&value"),
    ("cuMemPoolTrimTo", "$p1", 0),
    ("cuMemPoolDestroy", "$old_pool"),
    ("cuMemAllocAsync", "&new_async", 64, "$s2"),
    ("cuMemFreeAsync", "$old_async", "$s2"),
    ("cuMemAllocFromPoolAsync", "&new_pooled", 64, "$p1", "$s2"),
    ("cuMemsetD8Async", "$a", 1, 64, "$s2"),
    ("cuMemsetD8Async", "$a", 1, 64, 0),
    ("cuMemsetD8", "$a", 1, 64),
    ("cuMemcpyHtoDAsync", "$a", "$host", 64, "$s2"),
    ("cuMemcpyHtoDAsync", "$a", "$buffer", 64, "$s2"),
    ("cuMemcpyHtoD", "$a", "$host", 64),
    ("cuMemcpyDtoH", "$host", "$a", 64),
    ("cuModuleLoadData", "&new_module", KERNELS),
    ("cuModuleGetFunction", "&new_function", "$module2", "copy"),
    ("cuFuncGetAttribute", "&value", 0, "$old_function"),
    ("cuFuncSetAttribute", "$old_function", 8, 1024),
    ("cuFuncLoad", "$old_function"),
    ("cuModuleUnload", "$old_module"),
    ("cuLaunchKernel", "$fill", 1, 1, 1, 32, 1, 1, 0, "$s2", [["ptr", "$a"], ["f32", 1.0], ["u32", 16]], None),
    ("cuLaunchHostFunc", "$s2", "$note", None),
    ("cuPointerGetAttribute", "&kind", 2, "$a"),
    ("cuDevicePrimaryCtxRetain", "&again", 0),
    ("cuGraphCreate", "&new_graph", 0),
]


def make_old(s: Script) -> None:
    """What the calls end or name: made before any capture."""
    s.cuStreamCreate("&old_stream", 1)
    s.cuEventCreate("&old_event", 2)
    s.cuMemAlloc("&old_memory", 64)
    s.cuMemHostAlloc("&old_host", 64, 1)
    s.cuMemPoolCreate("&old_pool", PINNED_POOL)
    s.cuMemAllocAsync("&old_async", 64, "$s2")
    s.cuModuleLoadData("&old_module", KERNELS)
    s.cuModuleGetFunction("&old_function", "$module2", "copy")
    s.cuStreamSynchronize("$s2")


def others(s: Script, mode: int) -> None:
    prepare(s)
    s.cuEventRecord("$e2", "$s2")
    s.cuStreamCreate("&s", 1)
    s.cuCtxSetCurrent("$ctx0", on="t1")
    for thread in ("main", "t1"):
        for thread_mode in (GLOBAL, THREAD_LOCAL, RELAXED) if thread == "t1" else (GLOBAL, RELAXED):
            make_old(s)
            s.cuThreadExchangeStreamCaptureMode([thread_mode, "&mode"], on=thread)
            for call in OTHERS:
                s.cuStreamBeginCapture("$s", mode)
                s.call(*call, on=thread, **({"until_ready": True} if call[0].endswith("Query") else {}))
                s.cuStreamEndCapture("$s", "&_")
        s.cuThreadExchangeStreamCaptureMode([GLOBAL, "&mode"], on=thread)


@scenario("calls while a stream captures in global mode, from the same thread and another, plain and relaxed")
def capture_global(s: Script) -> None:
    others(s, GLOBAL)


@scenario("calls while a stream captures in thread-local mode")
def capture_thread_local(s: Script) -> None:
    others(s, THREAD_LOCAL)


@scenario("calls while a stream captures in relaxed mode")
def capture_relaxed(s: Script) -> None:
    others(s, RELAXED)


@scenario("calls while a blocking stream captures: the legacy stream is out of bounds")
def capture_blocking_stream(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&s", 0)
    s.cuStreamCreate("&blocking", 0)
    for call in (
        ("cuStreamQuery", 0),
        ("cuStreamSynchronize", 0),
        ("cuStreamSynchronize", 1),
        ("cuStreamIsCapturing", 0, "&status"),
        ("cuStreamIsCapturing", 1, "&status"),
        ("cuStreamIsCapturing", 2, "&status"),
        ("cuStreamGetId", 0, "&id"),
        ("cuStreamGetCtx", 0, "&ctx", "&_"),
        ("cuStreamGetCaptureInfo", 0, "&status", None, None, None, None, None),
        ("cuEventRecord", "$e1", 0),
        ("cuStreamWaitEvent", 0, "$e2", 0),
        ("cuMemsetD8Async", "$a", 1, 64, 0),
        ("cuMemsetD8Async", "$a", 1, 64, 1),
        ("cuMemsetD8Async", "$a", 1, 64, 2),
        ("cuMemsetD8Async", "$a", 1, 64, "$blocking"),
        ("cuMemsetD8Async", "$a", 1, 64, "$s2"),
        ("cuMemsetD8", "$a", 1, 64),
        ("cuMemcpyHtoD", "$a", "$host", 64),
        ("cuMemcpyDtoD", "$a", "$b", 64),
        ("cuMemAllocAsync", "&new", 64, 0),
        ("cuLaunchKernel", "$fill", 1, 1, 1, 32, 1, 1, 0, 0, [["ptr", "$a"], ["f32", 1.0], ["u32", 16]], None),
        ("cuLaunchHostFunc", 0, "$note", None),
    ):
        s.cuStreamBeginCapture("$s", RELAXED)
        s.call(*call)
        s.cuStreamIsCapturing("$s", "&status")
        s.cuStreamEndCapture("$s", "&_")


@scenario("calls on the capturing stream itself, in relaxed mode; the capture's end tells what they did to it")
def capture_own_stream(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&s", 1)
    s.cuMemAllocAsync("&mine", 64, "$s")
    s.cuStreamSynchronize("$s")
    fill = [["ptr", "$a"], ["f32", 1.0], ["u32", 16]]
    for call in (
        ("cuStreamQuery", "$s"),
        ("cuStreamSynchronize", "$s"),
        ("cuStreamGetId", "$s", "&id"),
        ("cuStreamGetCtx", "$s", "&ctx", "&_"),
        ("cuStreamGetFlags", "$s", "&flags"),
        ("cuStreamGetPriority", "$s", "&priority"),
        ("cuStreamGetDevice", "$s", "&device"),
        ("cuStreamIsCapturing", "$s", "&status"),
        ("cuStreamGetCaptureInfo", "$s", "&status", "&capture", "&graph", None, None, "&count"),
        ("cuStreamBeginCapture", "$s", RELAXED),
        ("cuEventRecord", "$e1", "$s"),
        ("cuStreamWaitEvent", "$s", "$e2", 0),
        ("cuEventRecordWithFlags", "$e1", "$s", 1),
        ("cuStreamWaitEvent", "$s", "$e2", 1),
        ("cuMemsetD8Async", "$a", 1, 64, "$s"),
        ("cuMemsetD8Async", None, 1, 64, "$s"),
        ("cuMemcpyHtoDAsync", "$a", "$host", 64, "$s"),
        ("cuMemcpyHtoDAsync", "$a", "$buffer", 64, "$s"),
        ("cuMemcpyDtoHAsync", "$buffer", "$a", 64, "$s"),
        ("cuMemcpyDtoDAsync", "$a", "$b", 64, "$s"),
        ("cuMemAllocAsync", "&new", 64, "$s"),
        ("cuMemAllocFromPoolAsync", "&new_pooled", 64, "$p1", "$s"),
        ("cuMemFreeAsync", "$async", "$s"),
        ("cuLaunchKernel", "$fill", 1, 1, 1, 32, 1, 1, 0, "$s", fill, None),
        ("cuLaunchKernel", "$fill", 0, 1, 1, 32, 1, 1, 0, "$s", fill, None),
        ("cuLaunchHostFunc", "$s", "$note", None),
        ("cuStreamAddCallback", "$s", "$told", None, 0),
        ("cuStreamWriteValue32", "$s", "$host", 1, 0),
        ("cuStreamWaitValue32", "$s", "$host", 1, 0),
        ("cuMemFree", "$mine"),
        ("cuStreamAttachMemAsync", "$s", "$managed", 0, 1),
    ):
        if call[0] == "cuStreamAddCallback":
            s.callback("told", kind="stream")
        if call[0] == "cuStreamAttachMemAsync":
            s.cuMemAllocManaged("&managed", 64, 1)
        s.cuStreamBeginCapture("$s", RELAXED)
        s.call(*call)
        s.cuStreamIsCapturing("$s", "&status")
        s.cuStreamEndCapture("$s", "&_")


@scenario("questions of every kind on the capturing thread, global mode")
def capture_questions(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&s", 1)
    for call in (*QUESTIONS, *LAUNCHING):
        if call[0] == "cuThreadExchangeStreamCaptureMode":
            continue
        s.cuStreamBeginCapture("$s", GLOBAL)
        s.call(*call)
        s.cuStreamEndCapture("$s", "&_")


@scenario("beginning and ending: not capturing, twice, another thread, another stream, the legacy stream, bad modes")
def capture_begin_end(s: Script) -> None:
    prepare(s)
    s.cuCtxSetCurrent("$ctx0", on="t1")
    s.cuStreamCreate("&s", 1)
    s.cuStreamEndCapture("$s", "&graph")
    for mode in (-1, 3):
        s.cuStreamBeginCapture("$s", mode)
    for stream in (0, 1):
        s.cuStreamBeginCapture(stream, RELAXED)
    s.cuStreamBeginCapture(2, RELAXED)
    s.cuStreamIsCapturing(2, "&status")
    s.cuStreamEndCapture(2, "&graph")
    s.cuThreadExchangeStreamCaptureMode([3, "&mode"])
    s.cuThreadExchangeStreamCaptureMode([-1, "&mode"])
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        s.cuStreamBeginCapture("$s", mode)
        s.cuStreamBeginCapture("$s", mode)
        s.cuStreamEndCapture("$s", "&graph", on="t1")
        s.cuStreamIsCapturing("$s", "&status")
        s.cuStreamEndCapture("$s", "&graph")
        s.cuStreamIsCapturing("$s", "&status")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuStreamEndCapture("$s", None)
    s.cuStreamIsCapturing("$s", "&status")
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuStreamEndCapture("$s", "&graph", on="bare")
    s.cuStreamBeginCapture("$s", GLOBAL, on="bare")
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamIsCapturing("$s", None)


@scenario("a fork through an event: joined, unjoined, ended in the wrong stream")
def capture_fork(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&s", 1)
    s.cuStreamCreate("&t", 1)
    for name in ("forked", "joined"):
        s.cuEventCreate(f"&{name}", 2)

    def fork() -> None:
        s.cuStreamBeginCapture("$s", RELAXED)
        s.fill("$s", "$a", 1.0)
        s.cuEventRecord("$forked", "$s")
        s.cuStreamWaitEvent("$t", "$forked", 0)
        s.cuStreamIsCapturing("$t", "&status")

    fork()
    s.fill("$t", "$b", 2.0)
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamIsCapturing("$t", "&status")
    fork()
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamIsCapturing("$t", "&status")
    fork()
    s.fill("$t", "$b", 2.0)
    s.cuStreamEndCapture("$t", "&graph")
    s.cuStreamIsCapturing("$s", "&status")
    s.cuStreamEndCapture("$s", "&graph")
    fork()
    s.fill("$t", "$b", 2.0)
    s.cuEventRecord("$joined", "$t")
    s.cuStreamWaitEvent("$s", "$joined", 0)
    s.cuEventQuery("$joined")
    s.cuStreamEndCapture("$s", "&graph")
    fork()
    s.fill("$t", "$b", 2.0)
    s.cuEventRecord("$joined", "$t")
    s.cuStreamWaitEvent("$s", "$joined", 0)
    s.cuStreamEndCapture("$s", "&graph")
    s.cuGraphGetNodes("$graph", None, [0, "&count"])
    s.cuStreamIsCapturing("$t", "&status")
    s.cuEventQuery("$joined")
    s.cuEventSynchronize("$joined")
    s.cuStreamWaitEvent("$s2", "$joined", 0)
    s.cuEventElapsedTime("&ms", "$joined", "$joined")
    s.cuEventRecord("$joined", "$s2")
    s.cuEventSynchronize("$joined")
    fork()
    s.cuStreamDestroy("$t")
    s.cuStreamEndCapture("$s", "&graph")


@scenario("captures that meet: merging, isolation, uncaptured events, the legacy stream")
def capture_meeting(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&s", 1)
    s.cuStreamCreate("&t", 1)
    s.cuEventCreate("&e", 2)
    s.cuEventRecord("$e1", "$s2")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuStreamBeginCapture("$t", RELAXED)
    s.cuEventRecord("$e", "$s")
    s.cuStreamWaitEvent("$t", "$e", 0)
    s.cuStreamEndCapture("$t", "&graph")
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuStreamWaitEvent("$s", "$e1", 0)
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuEventRecord("$e", "$s")
    s.cuStreamWaitEvent(0, "$e", 0)
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuEventRecord("$e", "$s")
    s.cuEventQuery("$e")
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuEventRecord("$e", "$s")
    s.cuEventSynchronize("$e")
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuEventRecord("$e", "$s")
    s.cuEventDestroy("$e")
    s.cuStreamEndCapture("$s", "&graph")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuStreamSynchronize("$s")
    s.fill("$s", "$a", 1.0)
    s.cuEventRecord("$e1", "$s")
    s.cuStreamIsCapturing("$s", "&status")
    s.cuStreamGetCaptureInfo("$s", "&status", "&capture", "&graph", None, None, "&count")
    s.cuStreamEndCapture("$s", "&graph")


@scenario("ids and graphs that a capture tells; the status afterwards")
def capture_info(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&s", 1)
    s.cuStreamGetCaptureInfo("$s", "&status", "&_", "&_", None, None, "&_")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuStreamGetCaptureInfo("$s", "&status", "&capture1", "&graph1", None, None, "&count")
    s.fill("$s", "$a", 1.0)
    s.cuStreamGetCaptureInfo("$s", "&status", "&capture2", "&graph2", None, None, "&count")
    s.cuStreamEndCapture("$s", "&ended")
    s.cuStreamBeginCapture("$s", RELAXED)
    s.cuStreamGetCaptureInfo("$s", "&status", "&capture3", "&graph3", None, None, "&count")
    s.cuStreamGetCaptureInfo("$s", None, None, None, None, None, None)
    s.cuStreamEndCapture("$s", "&ended2")


@scenario("destroying the stream that captures, and its context")
def capture_destroyed(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&s", 1)
    s.cuStreamBeginCapture("$s", GLOBAL)
    s.fill("$s", "$a", 1.0)
    s.cuStreamDestroy("$s")
    s.cuMemAlloc("&new", 64)
    s.cuCtxSynchronize(None)
