"""Initialisation, devices, primary contexts, the stack of a thread."""

from __future__ import annotations

from driver_sim.oracle.script import Script, scenario


@scenario("cuInit: flags, twice; the version before it")
def initialisation(s: Script) -> None:
    s.cuDriverGetVersion("&before")
    s.cuGetErrorName(1, "&name")
    s.cuGetErrorName(123456, "&unknown")
    s.cuGetErrorString(999, "&text")
    s.cuGetErrorString(123456, "&no_text")
    s.cuDeviceGetCount("&count")
    s.cuInit(1)
    s.cuInit(0)
    s.cuInit(0)
    s.cuInit(7)
    s.cuDeviceGetCount("&count")
    s.cuDriverGetVersion(None)
    s.cuDeviceGetCount(None)


@scenario("names, ordinals that are none, null places")
def device_questions(s: Script) -> None:
    s.cuInit(0)
    s.cuDeviceGet("&device", 0)
    for ordinal in (-1, 99):
        s.cuDeviceGet("&none", ordinal)
        s.cuDeviceGetName("&name", 64, ordinal)
        s.cuDeviceGetUuid("&uuid", ordinal)
        s.cuDeviceTotalMem("&bytes", ordinal)
        s.cuDeviceGetAttribute("&value", 75, ordinal)
        s.cuDeviceGetPCIBusId("&bus", 32, ordinal)
        s.cuDevicePrimaryCtxRetain("&ctx", ordinal)
        s.cuDevicePrimaryCtxRelease(ordinal)
        s.cuDevicePrimaryCtxReset(ordinal)
        s.cuDevicePrimaryCtxGetState(ordinal, "&flags", "&active")
        s.cuDevicePrimaryCtxSetFlags(ordinal, 0)
        s.cuDeviceGetDefaultMemPool("&pool", ordinal)
        s.cuDeviceGetMemPool("&pool", ordinal)
        s.cuDeviceCanAccessPeer("&can", 0, ordinal)
        s.cuDeviceGetP2PAttribute("&value", 2, 0, ordinal)
        s.cuCtxCreate("&ctx", None, 0, ordinal)
    s.cuDeviceGetName("&name", 64, 0)
    s.cuDeviceGetName("&short", 5, 0)
    s.cuDeviceGetName(None, 64, 0)
    s.cuDeviceGetUuid("&uuid", 0)
    s.cuDeviceGetPCIBusId("&bus", 32, 0, any=["out"])
    s.cuDeviceGetPCIBusId("&bus", 4, 0, any=["out"])
    s.cuDeviceGetPCIBusId("&bus", 13, 0, any=["out"])
    s.cuDeviceGetByPCIBusId("&device", "0000:ff:1f.0")
    s.cuDeviceGetByPCIBusId("&device", "nonsense")
    s.cuDeviceGetByPCIBusId("&device", None)
    s.cuDeviceCanAccessPeer("&self", 0, 0)
    s.cuDeviceGetP2PAttribute("&self", 2, 0, 0)
    s.cuDeviceGetAttribute("&value", 0, 0)
    s.cuDeviceGetAttribute("&value", -1, 0)
    s.cuDeviceGetAttribute("&value", 100000, 0)
    s.cuDeviceGetAttribute(None, 75, 0)


#: Those that belong to a machine rather than to an H200: its place on the bus, clocks, numa nodes.
OF_THE_MACHINE = {13, 16, 33, 34, 36, 50, 130, 134, 141}


@scenario("every attribute of the device")
def device_attributes(s: Script) -> None:
    s.cuInit(0)
    for attribute in range(1, 146):
        more = {"any": ["out"]} if attribute in OF_THE_MACHINE else {}
        s.cuDeviceGetAttribute(f"&a{attribute}", attribute, 0, **more)


@scenario("cuGetProcAddress: names, versions, flags")
def proc_addresses(s: Script) -> None:
    for name in ("cuMemAlloc", "cuMemAlloc_v2", "cuNoSuchFunction", "", "cuStreamGetCtx", "cuLaunchKernelEx"):
        s.cuGetProcAddress(name, "&entry", 13000, 0, "&status")
    for version in (0, 1000, 2000, 3020, 11020, 12050, 14000, 99000):
        s.cuGetProcAddress("cuMemAllocAsync", "&entry", version, 0, "&status")
        s.cuGetProcAddress("cuMemAlloc", "&entry", version, 0, "&status")
    for flags in (0, 1, 2, 3, 8):
        s.cuGetProcAddress("cuStreamSynchronize", "&entry", 13000, flags, "&status")
    s.cuGetProcAddress("cuMemAlloc", "&entry", 13000, 0, None)


@scenario("retain and release: same handle, state, release too often")
def primary_context(s: Script) -> None:
    s.cuInit(0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuDevicePrimaryCtxRetain("&ctx0", 0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuCtxGetCurrent("&current")
    s.cuCtxGetId("$ctx0", "&id1")
    s.cuDevicePrimaryCtxRetain("&again", 0)
    s.cuCtxGetId("$ctx0", "&id2")
    s.cuCtxGetDevice("&device", "$ctx0")
    s.cuCtxGetDevice("&device", None)
    s.cuCtxGetApiVersion("$ctx0", "&version")
    s.cuCtxDestroy("$ctx0")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuCtxGetId("$ctx0", "&id3")
    s.cuCtxPushCurrent("$ctx0")
    s.cuCtxPopCurrent("&popped")
    s.cuCtxSetCurrent("$ctx0")
    s.cuCtxGetCurrent("&current")
    s.cuDevicePrimaryCtxRetain("&later", 0)
    s.cuCtxGetId("$later", "&id4")
    s.cuMemAlloc("&a", 64)
    s.cuDevicePrimaryCtxRetain(None, 0)


@scenario("flags of the primary context: before, while active, values that are none")
def primary_flags(s: Script) -> None:
    s.cuInit(0)
    for flags in (0, 1, 2, 4, 8, 3, 5, 16, 128, 256, 1024):
        s.cuDevicePrimaryCtxSetFlags(0, flags)
        s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuDevicePrimaryCtxSetFlags(0, 4)
    s.cuDevicePrimaryCtxRetain("&ctx0", 0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuCtxSetCurrent("$ctx0")
    s.cuCtxGetFlags("&now")
    s.cuDevicePrimaryCtxSetFlags(0, 1)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuCtxGetFlags("&now")
    s.cuCtxSetFlags(2)
    s.cuCtxGetFlags("&now")
    s.cuCtxSetFlags(7)


@scenario("a reset under its holders: ids, the stack, what the retains are worth")
def primary_reset(s: Script) -> None:
    s.cuInit(0)
    s.cuDevicePrimaryCtxReset(0)
    s.cuDevicePrimaryCtxRetain("&ctx0", 0)
    s.cuDevicePrimaryCtxRetain("&ctx0", 0)
    s.cuCtxSetCurrent("$ctx0")
    s.cuCtxGetId(None, "&id1")
    s.cuMemAlloc("&a", 4096)
    s.cuDevicePrimaryCtxReset(0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuCtxGetCurrent("&current")
    s.cuCtxGetId("$ctx0", "&id2")
    s.cuCtxGetId(None, "&id2")
    s.cuCtxSetCurrent("$ctx0")
    s.cuCtxPushCurrent("$ctx0")
    s.cuCtxPopCurrent("&popped")
    s.cuCtxGetDevice("&device", "$ctx0")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuDevicePrimaryCtxRetain("&again", 0)
    s.cuCtxGetId("$again", "&id3")
    s.cuCtxGetId(None, "&id4")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuDevicePrimaryCtxRelease(0)
    s.cuDevicePrimaryCtxGetState(0, "&flags", "&active")
    s.cuDevicePrimaryCtxRelease(0)


@scenario("a reset, then the context is retained again: is it usable where it still is current?")
def primary_reset_and_back(s: Script) -> None:
    s.start()
    s.cuDevicePrimaryCtxReset(0)
    s.cuDevicePrimaryCtxRetain("&again", 0)
    s.cuMemAlloc("&a", 64)
    s.cuStreamCreate("&s1", 1)
    s.cuMemsetD8Async("$a", 1, 64, "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuCtxSynchronize(None)


@scenario("push, pop, set: a stack for each thread")
def context_stack(s: Script) -> None:
    s.cuInit(0)
    s.cuCtxPopCurrent("&popped")
    s.cuCtxSetCurrent(None)
    s.cuCtxPushCurrent(None)
    s.cuDevicePrimaryCtxRetain("&p", 0)
    s.cuCtxCreate("&c", None, 0, 0)
    s.cuCtxGetId("$p", "&id1")
    s.cuCtxGetId("$c", "&id2")
    s.cuCtxPushCurrent("$p")
    s.cuCtxPushCurrent("$p")
    s.cuCtxPopCurrent("&popped")
    s.cuCtxSetCurrent("$c")
    s.cuCtxGetCurrent("&current")
    s.cuCtxPopCurrent("&popped")
    s.cuCtxPopCurrent(None)
    s.cuCtxPopCurrent("&popped")
    s.cuCtxSetCurrent("$p")
    s.cuCtxSetCurrent(None)
    s.cuCtxPopCurrent("&popped")
    s.cuCtxPushCurrent("$p")
    s.cuCtxPushCurrent("$c")
    s.cuCtxSetCurrent(None)
    s.cuCtxGetCurrent("&current")
    s.cuCtxSetCurrent("$c")
    s.cuCtxPopCurrent("&popped")
    s.cuCtxGetCurrent("&elsewhere", on="t1")
    s.cuCtxPopCurrent("&popped", on="t1")
    s.cuCtxSetCurrent("$c", on="t1")
    s.cuCtxGetCurrent("&current")
    s.cuCtxSetCurrent("$p")
    s.cuCtxGetCurrent("&elsewhere", on="t1")
    s.cuCtxGetCurrent(None)


@scenario("a context of one's own: destroyed while current here, elsewhere, below another")
def created_context(s: Script) -> None:
    s.cuInit(0)
    s.cuCtxCreate("&c", None, 0, 0)
    s.cuCtxGetDevice("&device", None)
    s.cuStreamCreate("&s1", 1)
    s.cuCtxSetCurrent("$c", on="t1")
    s.cuCtxDestroy("$c")
    s.cuCtxGetCurrent("&current")
    s.cuCtxCreate("&d", None, 4, 0)
    s.cuCtxGetFlags("&flags")
    s.cuCtxPushCurrent("$d")
    s.cuCtxCreate("&e", None, 0, 0)
    s.cuCtxDestroy("$d")
    s.cuCtxGetCurrent("&current")
    s.cuCtxDestroy("$e")
    s.cuCtxCreate("&f", None, 64, 0)
    s.cuCtxCreate("&f", None, 3, 0)
    s.cuCtxDestroy(None)


@scenario("destroying a context waits for its work")
def context_destroy_waits(s: Script) -> None:
    s.cuInit(0)
    s.cuCtxCreate("&c", None, 0, 0)
    s.cuMemHostAlloc("&words", 16384, 1)
    s.cuDevicePrimaryCtxRetain("&p", 0)
    s.cuStreamCreate("&s1", 1)
    word = s.gate("$s1")
    s.cuCtxDestroy("$c", gate=word)


@scenario("releasing the last hold of a primary context with work pending")
def last_release_waits(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    word = s.gate("$s1")
    s.cuDevicePrimaryCtxRelease(0, gate=word)
    s.cuCtxGetId("$ctx0", "&id")
    s.cuMemAlloc("&a", 64)


@scenario("limits of a context")
def context_limits(s: Script) -> None:
    s.start()
    for limit in (*range(8), 99):
        s.cuCtxGetLimit("&value", limit)
    s.cuCtxSetLimit(0, 2048)
    s.cuCtxGetLimit("&value", 0)
    s.cuCtxSetLimit(99, 1)
    s.cuCtxGetStreamPriorityRange("&least", "&greatest")
    s.cuCtxGetStreamPriorityRange(None, None)
    s.cuCtxGetId("$ctx0", None)
    s.cuCtxGetApiVersion(None, "&version")
