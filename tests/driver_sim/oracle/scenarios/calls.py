"""A valid call of every driver function that kina uses, and of its neighbours, with what they need."""

from __future__ import annotations

from typing import Any

from driver_sim.oracle.script import KERNELS, Script

__all__ = ["DESTROYING", "LAUNCHING", "QUESTIONS", "WORK", "prepare"]

PINNED_POOL = {"CUmemPoolProps": {"allocType": 1, "type": 1, "id": 0}}
FILL = [["ptr", "$a"], ["f32", 1.0], ["u32", 16]]

#: Called once in each process, nothing is lost by it.
QUESTIONS: list[tuple[Any, ...]] = [
    ("cuInit", 0),
    ("cuDriverGetVersion", "&version"),
    ("cuGetErrorName", 700, "&text"),
    ("cuGetErrorString", 700, "&text"),
    ("cuDeviceGet", "&device", 0),
    ("cuDeviceGetCount", "&count"),
    ("cuDeviceGetName", "&text", 64, 0),
    ("cuDeviceGetUuid", "&uuid", 0),
    ("cuDeviceTotalMem", "&_", 0),
    ("cuDeviceGetAttribute", "&value", 75, 0),
    ("cuDeviceGetPCIBusId", "&_", 32, 0),
    ("cuDeviceGetP2PAttribute", "&value", 2, 0, 0),
    ("cuDeviceGetDefaultMemPool", "&default_pool", 0),
    ("cuDevicePrimaryCtxGetState", 0, "&flags", "&active"),
    ("cuDevicePrimaryCtxRetain", "&ctx0", 0),
    ("cuCtxGetCurrent", "&current"),
    ("cuCtxGetId", "$ctx0", "&id_named"),
    ("cuCtxGetId", None, "&id_current"),
    ("cuCtxGetDevice", "&device", None),
    ("cuCtxGetFlags", "&flags"),
    ("cuCtxGetLimit", "&value", 0),
    ("cuCtxGetStreamPriorityRange", "&least", "&greatest"),
    ("cuStreamGetId", "$s1", "&id_s1"),
    ("cuStreamGetId", 0, "&id_0"),
    ("cuStreamGetId", 1, "&id_1"),
    ("cuStreamGetId", 2, "&id_2"),
    ("cuStreamGetCtx", "$s1", "&ctx", "&_"),
    ("cuStreamGetCtx", 0, "&ctx", "&_"),
    ("cuStreamGetFlags", "$s1", "&flags"),
    ("cuStreamGetPriority", "$s1", "&priority"),
    ("cuStreamGetDevice", "$s1", "&device"),
    ("cuStreamIsCapturing", "$s1", "&status"),
    ("cuStreamIsCapturing", 0, "&status"),
    ("cuStreamIsCapturing", 1, "&status"),
    ("cuStreamGetCaptureInfo", "$s1", "&status", None, None, None, None, None),
    ("cuThreadExchangeStreamCaptureMode", [0, "&mode"]),
    ("cuEventQuery", "$e1"),
    ("cuMemGetInfo", "&_", "&_"),
    ("cuMemPoolGetAttribute", "$p1", 4, "&value"),
    ("cuMemPoolGetAccess", "&access", "$p1", {"CUmemLocation": {"type": 1, "id": 0}}),
    ("cuPointerGetAttribute", "&kind", 2, "$a"),
    ("cuMemGetAddressRange", "&base", "&size", "$a+16"),
    ("cuMemHostGetDevicePointer", "&mapped", "$words", 0),
    ("cuModuleGetFunction", "&again", "$module", "fill"),
    ("cuModuleGetLoadingMode", "&mode"),
    ("cuFuncGetAttribute", "&value", 0, "$fill"),
    ("cuFuncGetParamInfo", "$fill", 1, "&offset", "&size"),
    ("cuFuncIsLoaded", "&state", "$fill"),
    ("cuFuncGetModule", "&of", "$fill"),
]

#: Makes objects, waits, or queues work. In this order they can all be called in one process.
WORK: list[tuple[Any, ...]] = [
    ("cuStreamQuery", "$s1"),
    ("cuStreamQuery", 0),
    ("cuStreamSynchronize", "$s1"),
    ("cuStreamSynchronize", 0),
    ("cuEventSynchronize", "$e1"),
    ("cuCtxSynchronize", None),
    ("cuCtxSynchronize", "$ctx0"),
    ("cuStreamCreate", "&made", 0),
    ("cuStreamCreateWithPriority", "&made", 1, 0),
    ("cuEventCreate", "&made_event", 2),
    ("cuEventRecord", "$e1", "$s1"),
    ("cuEventRecord", "$e1", 0),
    ("cuEventRecord", "$e1", 2),
    ("cuStreamWaitEvent", "$s1", "$e1", 0),
    ("cuStreamWaitEvent", 0, "$e1", 0),
    ("cuCtxRecordEvent", "$ctx0", "$e1"),
    ("cuMemAlloc", "&made_memory", 64),
    ("cuMemAllocManaged", "&made_managed", 64, 1),
    ("cuMemHostAlloc", "&made_host", 64, 1),
    ("cuMemHostRegister", "$buffer", 4096, 0),
    ("cuMemHostUnregister", "$buffer"),
    ("cuMemPoolCreate", "&made_pool", PINNED_POOL),
    ("cuMemPoolSetAttribute", "$p1", 4, [0, "&_"]),
    ("cuMemPoolTrimTo", "$p1", 0),
    ("cuMemAllocAsync", "&made_async", 64, "$s1"),
    ("cuMemAllocAsync", "&made_legacy", 64, 0),
    ("cuMemAllocFromPoolAsync", "&made_pooled", 64, "$p1", "$s1"),
    ("cuMemcpyHtoDAsync", "$a", "$words", 64, "$s1"),
    ("cuMemcpyHtoDAsync", "$a", "$words", 64, 0),
    ("cuMemcpyHtoDAsync", "$a", "$buffer", 64, "$s1"),
    ("cuMemcpyDtoHAsync", "$host", "$a", 64, "$s1"),
    ("cuMemcpyDtoDAsync", "$a", "$b", 64, "$s1"),
    ("cuMemcpyAsync", "$a", "$b", 64, "$s1"),
    ("cuMemcpyHtoD", "$a", "$words", 64),
    ("cuMemcpyDtoH", "$host", "$a", 64),
    ("cuMemcpyDtoD", "$a", "$b", 64),
    ("cuMemsetD8Async", "$a", 1, 64, "$s1"),
    ("cuMemsetD8Async", "$a", 1, 64, 0),
    ("cuMemsetD16Async", "$a", 1, 32, "$s1"),
    ("cuMemsetD32Async", "$a", 1, 16, "$s1"),
    ("cuMemsetD2D32Async", "$a", 32, 1, 4, 2, "$s1"),
    ("cuMemsetD8", "$a", 1, 64),
    ("cuStreamWriteValue32", "$s1", "$host", 1, 0),
    ("cuLaunchHostFunc", "$s1", "$note", None),
    ("cuModuleLoadDataEx", "&made_module", KERNELS, None),
    ("cuModuleGetFunction", "&made_function", "$module", "copy"),
    ("cuFuncSetAttribute", "$fill", 8, 1024),
    ("cuFuncLoad", "$saxpy"),
]

LAUNCHING: list[tuple[Any, ...]] = [
    ("cuLaunchKernel", "$fill", 1, 1, 1, 32, 1, 1, 0, "$s1", FILL, None),
    ("cuLaunchKernel", "$fill", 1, 1, 1, 32, 1, 1, 0, 0, FILL, None),
    (
        "cuLaunchKernelEx",
        {"CUlaunchConfig": {"grid": [1, 1, 1], "block": [32, 1, 1], "stream": "$s1"}},
        "$fill",
        FILL,
        None,
    ),
]

#: Ends what was made for it, once.
DESTROYING: list[tuple[Any, ...]] = [
    ("cuMemFree", None),
    ("cuMemFree", "$b"),
    ("cuMemFreeHost", "$host"),
    ("cuMemFreeAsync", "$async", "$s1"),
    ("cuMemFreeAsync", "$async2", 0),
    ("cuMemPoolDestroy", "$p2"),
    ("cuEventDestroy", "$e2"),
    ("cuStreamDestroy", "$s2"),
    ("cuModuleUnload", "$module2"),
    ("cuCtxPushCurrent", "$ctx0"),
    ("cuCtxPopCurrent", "&popped"),
    ("cuCtxSetCurrent", "$ctx0"),
]


def prepare(s: Script) -> None:
    """Everything that the calls name."""
    s.start()
    s.callback("note")
    s.buffer("buffer")
    s.module("fill", "saxpy", "spin", "trap")
    s.cuModuleLoadData("&module2", KERNELS)
    for name in ("s1", "s2"):
        s.cuStreamCreate(f"&{name}", 1)
    for name in ("e1", "e2"):
        s.cuEventCreate(f"&{name}", 2)
    for name in ("a", "b"):
        s.cuMemAlloc(f"&{name}", 4096)
    s.cuMemHostAlloc("&host", 4096, 1)
    for name in ("p1", "p2"):
        s.cuMemPoolCreate(f"&{name}", PINNED_POOL)
    s.cuMemAllocAsync("&async", 64, "$s1")
    s.cuMemAllocAsync("&async2", 64, "$s1")
    s.cuCtxSynchronize(None)
