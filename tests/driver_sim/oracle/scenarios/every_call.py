"""What every function does before cuInit, without a current context, and in a context that is gone."""

from __future__ import annotations

from driver_sim.oracle.scenarios.calls import DESTROYING, LAUNCHING, PINNED_POOL, QUESTIONS, WORK, prepare
from driver_sim.oracle.script import KERNELS, Script, scenario


@scenario("before cuInit")
def before_init(s: Script) -> None:
    s.cuDriverGetVersion("&version")
    s.cuGetErrorName(3, "&text")
    s.cuDeviceGet("&device", 0)
    s.cuDeviceGetCount("&count")
    s.cuDeviceGetName("&text", 64, 0)
    s.cuDeviceGetAttribute("&value", 75, 0)
    s.cuDevicePrimaryCtxRetain("&ctx", 0)
    s.cuDevicePrimaryCtxRelease(0)
    s.cuCtxGetCurrent("&current")
    s.cuCtxSetCurrent(None)
    s.cuCtxPushCurrent(None)
    s.cuCtxPopCurrent("&popped")
    s.cuCtxGetId(None, "&id")
    s.cuCtxSynchronize(None)
    s.cuStreamCreate("&stream", 0)
    s.cuStreamQuery(0)
    s.cuStreamSynchronize(0)
    s.cuStreamGetId(0, "&id")
    s.cuStreamIsCapturing(0, "&status")
    s.cuThreadExchangeStreamCaptureMode([0, "&mode"])
    s.cuEventCreate("&event", 0)
    s.cuMemAlloc("&a", 64)
    s.cuMemFree(None)
    s.cuMemHostAlloc("&a", 64, 0)
    s.cuMemGetInfo("&free", "&total")
    s.cuMemPoolCreate("&pool", PINNED_POOL)
    s.cuMemAllocAsync("&a", 64, 0)
    s.cuMemFreeAsync(None, 0)
    s.cuMemsetD8Async(None, 0, 0, 0)
    s.cuMemcpyHtoDAsync(None, None, 0, 0)
    s.cuModuleLoadData("&module", KERNELS)
    s.cuModuleGetLoadingMode("&mode")
    s.cuPointerGetAttribute("&kind", 2, 4096)
    s.cuGraphCreate("&graph", 0)


@scenario("every function on a thread without a current context")
def no_current_context(s: Script) -> None:
    prepare(s)
    for call in (*QUESTIONS, *WORK, *LAUNCHING, *DESTROYING):
        s.call(*call, on="bare")
        if call[0] in ("cuCtxPushCurrent", "cuCtxSetCurrent"):
            s.cuCtxPopCurrent("&popped", on="bare")


#: What needs no object of the context that is gone, and what names one that is.
GONE = [
    ("cuCtxGetId", "$ctx0", "&id"),
    ("cuCtxGetId", None, "&id"),
    ("cuCtxGetDevice", "&device", None),
    ("cuCtxGetFlags", "&flags"),
    ("cuCtxGetApiVersion", "$ctx0", "&version"),
    ("cuCtxPushCurrent", "$ctx0"),
    ("cuCtxSetCurrent", "$ctx0"),
    ("cuCtxPopCurrent", "&popped"),
    ("cuCtxSynchronize", None),
    ("cuCtxSynchronize", "$ctx0"),
    ("cuStreamCreateWithPriority", "&made", 1, 0),
    ("cuStreamGetId", "$s1", "&id"),
    ("cuStreamGetId", 0, "&id"),
    ("cuStreamGetCtx", "$s1", "&ctx", "&_"),
    ("cuStreamGetCtx", 0, "&ctx", "&_"),
    ("cuStreamIsCapturing", "$s1", "&status"),
    ("cuStreamQuery", "$s1"),
    ("cuStreamSynchronize", "$s1"),
    ("cuStreamSynchronize", 0),
    ("cuStreamWaitEvent", "$s1", "$e1", 0),
    ("cuStreamDestroy", "$s1"),
    ("cuEventCreate", "&made", 2),
    ("cuEventQuery", "$e1"),
    ("cuEventRecord", "$e1", "$s1"),
    ("cuEventSynchronize", "$e1"),
    ("cuEventDestroy", "$e1"),
    ("cuMemAlloc", "&made", 64),
    ("cuMemFree", "$a"),
    ("cuMemFree", None),
    ("cuMemHostAlloc", "&made", 64, 1),
    ("cuMemFreeHost", "$host"),
    ("cuMemGetInfo", "&_", "&_"),
    ("cuMemPoolCreate", "&made", PINNED_POOL),
    ("cuMemPoolGetAttribute", "$p1", 4, "&value"),
    ("cuMemPoolTrimTo", "$p1", 0),
    ("cuMemPoolDestroy", "$p1"),
    ("cuMemAllocAsync", "&made", 64, 0),
    ("cuMemAllocFromPoolAsync", "&made", 64, "$p1", "$s1"),
    ("cuMemFreeAsync", "$async", "$s1"),
    ("cuMemFreeAsync", "$async", 0),
    ("cuMemsetD8Async", "$a", 1, 16, 0),
    ("cuMemcpyHtoDAsync", "$a", "$buffer", 16, 0),
    ("cuPointerGetAttribute", "&kind", 2, "$a"),
    ("cuPointerGetAttribute", "&kind", 2, "$async"),
    ("cuModuleLoadDataEx", "&made", KERNELS, None),
    ("cuModuleGetFunction", "&made", "$module", "copy"),
    ("cuModuleUnload", "$module"),
    ("cuFuncGetAttribute", "&value", 0, "$fill"),
    ("cuFuncLoad", "$fill"),
    ("cuThreadExchangeStreamCaptureMode", [2, "&mode"]),
    ("cuDevicePrimaryCtxRelease", 0),
]


@scenario("calls after cuDevicePrimaryCtxReset, the dead context still current; each in a process of its own")
def after_reset(s: Script) -> None:
    for call in GONE:
        s.restart(" ".join(map(str, call)))
        s.start()
        s.buffer("buffer")
        s.module("fill")
        s.cuStreamCreate("&s1", 1)
        s.cuEventCreate("&e1", 2)
        s.cuMemAlloc("&a", 4096)
        s.cuMemHostAlloc("&host", 4096, 1)
        s.cuMemPoolCreate("&p1", PINNED_POOL)
        s.cuMemAllocAsync("&async", 64, "$s1")
        s.cuStreamSynchronize("$s1")
        s.cuDevicePrimaryCtxReset(0)
        s.call(*call)


DESTROYED = [
    ("cuCtxGetId", "$c", "&id"),
    ("cuCtxPushCurrent", "$c"),
    ("cuCtxSetCurrent", "$c"),
    ("cuCtxGetDevice", "&device", "$c"),
    ("cuCtxSynchronize", "$c"),
    ("cuCtxDestroy", "$c"),
]


@scenario("calls with a context that was destroyed; each in a process of its own")
def after_destroy(s: Script) -> None:
    for call in DESTROYED:
        s.restart(" ".join(map(str, call)))
        s.start()
        s.cuCtxCreate("&c", None, 0, 0)
        s.cuCtxDestroy("$c")
        s.call(*call)
