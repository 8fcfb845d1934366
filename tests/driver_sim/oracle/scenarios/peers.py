"""Two devices: peer access, copies between them, objects of the one under the other's context."""

from __future__ import annotations

from driver_sim.oracle.scenarios.calls import PINNED_POOL
from driver_sim.oracle.script import KERNELS, Script, scenario


def two(s: Script) -> None:
    """Context, stream, event, memory, pool, module of each device; that of device 0 is current."""
    s.cuInit(0)
    for device in (1, 0):
        s.cuDevicePrimaryCtxRetain(f"&ctx{device}", device)
        s.cuCtxSetCurrent(f"$ctx{device}")
        s.cuStreamCreate(f"&s{device}", 1)
        s.cuEventCreate(f"&e{device}", 0)
        s.cuMemAlloc(f"&a{device}", 4096)
        s.cuMemPoolCreate(f"&p{device}", {"CUmemPoolProps": {**PINNED_POOL["CUmemPoolProps"], "id": device}})
        s.cuModuleLoadData(f"&m{device}", KERNELS)
        s.cuModuleGetFunction(f"&fill{device}", f"$m{device}", "fill")
        s.cuFuncLoad(f"$fill{device}")
    s.cuMemHostAlloc("&words", 16384, 1)
    s.buffer("b")


@scenario("can they be peers, and what links them", devices=2)
def peer_questions(s: Script) -> None:
    s.cuInit(0)
    for pair in ((0, 1), (1, 0), (0, 0)):
        s.cuDeviceCanAccessPeer("&can", *pair)
        for attribute in (0, 1, 2, 3, 4, 5, 6, 99):
            s.cuDeviceGetP2PAttribute("&value", attribute, *pair, **({"any": ["out"]} if attribute == 1 else {}))
    s.cuDeviceGetP2PAttribute(None, 2, 0, 1)


@scenario("enabling and disabling, twice, to itself, to nothing", devices=2)
def peer_enable(s: Script) -> None:
    two(s)
    s.cuCtxDisablePeerAccess("$ctx1")
    s.cuCtxEnablePeerAccess("$ctx1", 1)
    s.cuCtxEnablePeerAccess("$ctx1", 0)
    s.cuCtxEnablePeerAccess("$ctx1", 0)
    s.cuCtxEnablePeerAccess("$ctx0", 0)
    s.cuCtxEnablePeerAccess("$ctx1", 0, on="bare")
    s.cuCtxDisablePeerAccess("$ctx1")
    s.cuCtxDisablePeerAccess("$ctx1")
    s.cuCtxDisablePeerAccess("$ctx0")
    s.cuCtxEnablePeerAccess("$ctx1", 0)
    s.cuCtxSetCurrent("$ctx1")
    s.cuCtxDisablePeerAccess("$ctx0")
    s.cuCtxEnablePeerAccess("$ctx0", 0)


@scenario("copies between devices without peer access", devices=2)
def peer_copies(s: Script) -> None:
    two(s)
    s.cuMemsetD8("$a0", 7, 4096)
    s.cuCtxSynchronize(None)
    s.cuMemcpyPeerAsync("$a1", "$ctx1", "$a0", "$ctx0", 64, "$s0")
    s.cuStreamSynchronize("$s0")
    s.cuMemcpyDtoH("$b", "$a1", 64)
    s.read("$b", kind="u8")
    s.cuMemcpyPeerAsync("$a1", "$ctx1", "$a0", "$ctx0", 64, "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyPeer("$a1", "$ctx1", "$a0", "$ctx0", 64)
    s.cuMemcpyPeerAsync("$a1", "$ctx1", "$a0", "$ctx0", 0, "$s0")
    s.cuMemcpyPeerAsync("$a1", "$ctx1", "$a0", "$ctx0", 64, 0)
    s.cuMemcpyPeerAsync("$a1", "$ctx1", "$a0", "$ctx0", 64, "$s0", on="bare")
    s.cuMemsetD8Async("$a1", 1, 64, "$s1")
    s.cuCtxSynchronize("$ctx0")
    s.cuCtxSynchronize("$ctx1")


@scenario("a peer copy is ordered in its stream; the other device's streams take no part", devices=2)
def peer_copy_order(s: Script) -> None:
    two(s)
    s.cuMemsetD8("$a0", 7, 4096)
    s.cuMemcpyDtoH("$b", "$a0", 4)
    word = s.gate("$s1")
    s.cuMemcpyPeerAsync("$a1", "$ctx1", "$a0", "$ctx0", 64, "$s0")
    s.cuStreamSynchronize("$s0", gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s0")
    s.cuEventRecord("$e0", "$s0")
    s.cuStreamWaitEvent("$s1", "$e0", 0)
    s.cuMemcpyPeerAsync("$a1", "$ctx1", "$a0", "$ctx0", 64, "$s1")
    s.cuStreamQuery("$s1")
    s.cuMemcpyPeer("$a1", "$ctx1", "$a0", "$ctx0", 64, gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s1")
    s.cuMemcpyPeer("$a1", "$ctx1", "$a0", "$ctx0", 64, gate=word)
    s.open(word)
    s.cuMemcpyDtoH("$b", "$a1", 4)


@scenario("a kernel that touches the other device's memory: enabled, then not", devices=2)
def peer_kernels(s: Script) -> None:
    two(s)
    s.cuCtxEnablePeerAccess("$ctx1", 0)
    s.launch("fill0", "$s0", [["ptr", "$a1"], ["f32", 2.0], ["u32", 16]])
    s.cuStreamSynchronize("$s0")
    s.cuMemcpyDtoH("$b", "$a1", 64)
    s.read("$b", kind="f32")
    s.cuCtxDisablePeerAccess("$ctx1")
    s.launch("fill0", "$s0", [["ptr", "$a1"], ["f32", 3.0], ["u32", 16]])
    s.cuStreamSynchronize("$s0")
    s.cuStreamSynchronize("$s1")


@scenario("objects of device 1 while device 0's context is current", devices=2)
def other_device_objects(s: Script) -> None:
    two(s)
    for call in (
        ("cuStreamQuery", "$s1"),
        ("cuStreamSynchronize", "$s1"),
        ("cuStreamGetId", "$s1", "&id"),
        ("cuStreamGetCtx", "$s1", "&ctx", "&_"),
        ("cuStreamGetDevice", "$s1", "&device"),
        ("cuStreamIsCapturing", "$s1", "&status"),
        ("cuEventRecord", "$e1", "$s1"),
        ("cuEventRecord", "$e0", "$s1"),
        ("cuEventRecord", "$e1", "$s0"),
        ("cuEventRecord", "$e1", 0),
        ("cuEventQuery", "$e1"),
        ("cuEventSynchronize", "$e1"),
        ("cuStreamWaitEvent", "$s0", "$e1", 0),
        ("cuStreamWaitEvent", "$s1", "$e0", 0),
        ("cuEventElapsedTime", "&ms", "$e0", "$e1"),
        ("cuMemsetD8Async", "$a1", 1, 64, "$s1"),
        ("cuMemcpyHtoDAsync", "$a1", "$words", 64, "$s1"),
        ("cuMemcpyDtoHAsync", "$words", "$a1", 64, "$s1"),
        ("cuMemcpyDtoDAsync", "$a1", "$a1+64", 64, "$s1"),
        ("cuMemAllocAsync", "&async", 64, "$s1"),
        ("cuPointerGetAttribute", "&ordinal", 9, "$async"),
        ("cuMemFreeAsync", "$async", "$s1"),
        ("cuMemAllocFromPoolAsync", "&pooled", 64, "$p1", "$s1"),
        ("cuMemFreeAsync", "$pooled", "$s0"),
        ("cuLaunchHostFunc", "$s1", None, None),
        ("cuLaunchKernel", "$fill1", 1, 1, 1, 32, 1, 1, 0, "$s1", [["ptr", "$a1"], ["f32", 1.0], ["u32", 16]], None),
        ("cuFuncGetAttribute", "&value", 0, "$fill1"),
        ("cuModuleGetFunction", "&copy1", "$m1", "copy"),
        ("cuFuncLoad", "$copy1"),
        ("cuCtxRecordEvent", "$ctx1", "$e1"),
        ("cuCtxSynchronize", "$ctx1"),
        ("cuStreamBeginCapture", "$s1", 2),
        ("cuMemsetD8Async", "$a1", 1, 64, "$s1"),
        ("cuStreamEndCapture", "$s1", "&graph"),
        ("cuGraphInstantiateWithFlags", "&exec", "$graph", 0),
        ("cuGraphLaunch", "$exec", "$s1"),
        ("cuGraphLaunch", "$exec", "$s0"),
        ("cuCtxSynchronize", "$ctx0"),
        ("cuMemPoolTrimTo", "$p1", 0),
        ("cuMemPoolDestroy", "$p1"),
        ("cuModuleUnload", "$m1"),
        ("cuMemFree", "$a1"),
        ("cuEventDestroy", "$e1"),
        ("cuStreamDestroy", "$s1"),
        ("cuCtxSynchronize", "$ctx0"),
    ):
        s.call(*call)


#: What may fault later: each in a process of its own.
MIXED = [
    ("cuMemsetD8Async", "$a0", 1, 64, "$s1"),
    ("cuMemsetD8Async", "$a1", 1, 64, "$s0"),
    ("cuMemcpyHtoDAsync", "$a1", "$b", 64, "$s0"),
    ("cuMemcpyDtoHAsync", "$b", "$a1", 64, "$s0"),
    ("cuMemcpyDtoDAsync", "$a1", "$a0", 64, "$s0"),
    ("cuMemcpyDtoDAsync", "$a1", "$a0", 64, "$s1"),
    ("cuMemcpyAsync", "$a1", "$a0", 64, "$s0"),
    ("cuMemcpyPeerAsync", "$a1", "$ctx0", "$a0", "$ctx1", 64, "$s0"),
    ("cuMemcpyPeerAsync", "$a1", None, "$a0", None, 64, "$s0"),
    ("cuMemcpyPeerAsync", "$a1", "$ctx1", "$a0", "$ctx0", 5000 << 20, "$s0"),
    ("cuMemcpyPeerAsync", "$a1", "$ctx1", "$a0", "$ctx0", 64, 0),
    ("cuMemAllocFromPoolAsync", "&across", 64, "$p1", "$s0"),
    ("cuStreamWriteValue32", "$s1", "$a1", 1, 0),
    ("cuStreamWriteValue32", "$s0", "$a1", 1, 0),
    ("cuLaunchKernel", "$fill0", 1, 1, 1, 32, 1, 1, 0, "$s1", [["ptr", "$a1"], ["f32", 1.0], ["u32", 16]], None),
    ("cuLaunchKernel", "$fill1", 1, 1, 1, 32, 1, 1, 0, "$s0", [["ptr", "$a1"], ["f32", 1.0], ["u32", 16]], None),
    ("cuLaunchKernel", "$fill1", 1, 1, 1, 32, 1, 1, 0, 0, [["ptr", "$a1"], ["f32", 1.0], ["u32", 16]], None),
    ("cuCtxEnablePeerAccess", None, 0),
]


@scenario("devices mixed in one call, without peer access", devices=2)
def mixed_devices(s: Script) -> None:
    for call in MIXED:
        s.restart(" ".join(map(str, call[:3])))
        two(s)
        s.call(*call)
        s.cuStreamSynchronize("$s0")
        s.cuStreamSynchronize("$s1")
        s.cuCtxSynchronize("$ctx0")


@scenario("the same with no context current", devices=2)
def other_device_bare(s: Script) -> None:
    two(s)
    for call in (
        ("cuStreamSynchronize", "$s1"),
        ("cuEventRecord", "$e1", "$s1"),
        ("cuStreamWaitEvent", "$s0", "$e1", 0),
        ("cuMemsetD8Async", "$a1", 1, 64, "$s1"),
        ("cuMemcpyDtoDAsync", "$a1", "$a1+64", 64, "$s1"),
        ("cuMemAllocAsync", "&async", 64, "$s1"),
        ("cuMemFreeAsync", "$async", "$s1"),
        ("cuLaunchKernel", "$fill1", 1, 1, 1, 32, 1, 1, 0, "$s1", [["ptr", "$a1"], ["f32", 1.0], ["u32", 16]], None),
        ("cuMemFree", "$a1"),
        ("cuModuleUnload", "$m1"),
        ("cuEventDestroy", "$e1"),
        ("cuStreamDestroy", "$s1"),
    ):
        s.call(*call, on="bare")


@scenario("access of a pool: given to the other device, taken away", devices=2)
def peer_pool_access(s: Script) -> None:
    two(s)
    s.cuMemAllocFromPoolAsync("&x", 4096, "$p1", "$s1")
    s.cuStreamSynchronize("$s1")
    there, here = ({"CUmemLocation": {"type": 1, "id": device}} for device in (1, 0))
    s.cuMemPoolGetAccess("&access", "$p1", here)
    s.cuMemPoolGetAccess("&access", "$p1", there)
    s.cuMemcpyDtoDAsync("$a0", "$x", 64, "$s0")
    s.cuMemsetD8Async("$x", 1, 64, "$s0")
    s.cuMemPoolSetAccess("$p1", {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": 3}}, 1)
    s.cuMemPoolGetAccess("&access", "$p1", here)
    s.cuMemPoolSetAccess("$p1", {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": 1}}, 1)
    s.cuMemPoolGetAccess("&access", "$p1", here)
    s.cuMemPoolSetAccess("$p1", {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": 3}}, 1)
    s.launch("fill0", "$s0", [["ptr", "$x"], ["f32", 2.0], ["u32", 16]])
    s.cuStreamSynchronize("$s0")
    s.cuMemPoolSetAccess("$p1", {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": 0}}, 1)
    s.launch("fill0", "$s0", [["ptr", "$x"], ["f32", 2.0], ["u32", 16]])
    s.cuStreamSynchronize("$s0")


@scenario("peer access does not open pools, nor pool access peers; pinned memory is everybody's", devices=2)
def peer_access_kinds(s: Script) -> None:
    two(s)
    s.cuCtxEnablePeerAccess("$ctx1", 0)
    s.cuMemHostAlloc("&host", 4096, 0)
    s.launch("fill0", "$s0", [["ptr", "$host"], ["f32", 2.0], ["u32", 16]])
    s.cuStreamSynchronize("$s0")
    s.cuCtxSetCurrent("$ctx1")
    s.launch("fill1", "$s1", [["ptr", "$host"], ["f32", 3.0], ["u32", 16]])
    s.cuStreamSynchronize("$s1")
    s.read("$host", kind="f32")
    s.cuMemAllocFromPoolAsync("&x", 4096, "$p1", "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuCtxSetCurrent("$ctx0")
    s.launch("fill0", "$s0", [["ptr", "$x"], ["f32", 2.0], ["u32", 16]])
    s.cuStreamSynchronize("$s0")


@scenario("frees that wait: memory of device 1, work of device 0 that uses it, of device 1 that does not", devices=2)
def peer_free_waits(s: Script) -> None:
    two(s)
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuMemAlloc("&more0", 4096)
    word = s.gate("$s1")
    s.cuMemFree("$more0", gate=word)
    s.open(word)
    s.cuCtxSynchronize("$ctx1")
    word = s.gate("$s0")
    s.cuCtxSetCurrent("$ctx1")
    s.cuMemFree("$a1", gate=word)
    s.cuCtxSetCurrent("$ctx0")
    s.open(word)
    s.cuCtxSynchronize("$ctx0")
    word = s.gate("$s1")
    s.cuMemFreeHost("$host", gate=word)
    s.open(word)
    s.cuCtxSynchronize("$ctx1")
    word = s.gate("$s1")
    s.cuModuleUnload("$m0", gate=word)
    s.open(word)
    s.cuCtxSynchronize("$ctx1")
    word = s.gate("$s1")
    s.cuCtxSynchronize("$ctx0", gate=word)
    s.cuCtxEnablePeerAccess("$ctx1", 0, gate=word)
    s.open(word)
    s.cuCtxSynchronize("$ctx1")


@scenario("a capture on device 0: calls for device 1, from another thread", devices=2)
def peer_capture(s: Script) -> None:
    two(s)
    s.cuCtxSetCurrent("$ctx1", on="t1")
    for call in (
        ("cuMemAlloc", "&made", 64),
        ("cuStreamSynchronize", "$s1"),
        ("cuCtxSynchronize", None),
        ("cuEventCreate", "&made_event", 2),
        ("cuMemAllocAsync", "&async", 64, "$s1"),
        ("cuStreamGetId", "$s1", "&id"),
        ("cuMemsetD8Async", "$a1", 1, 64, 0),
    ):
        s.cuStreamBeginCapture("$s0", 0)
        s.call(*call, on="t1")
        s.cuStreamEndCapture("$s0", "&_")


@scenario("a reset of one device leaves the other alone", devices=2)
def peer_reset(s: Script) -> None:
    two(s)
    s.cuCtxEnablePeerAccess("$ctx1", 0)
    s.cuDevicePrimaryCtxReset(1)
    s.cuMemsetD8Async("$a0", 1, 64, "$s0")
    s.cuStreamSynchronize("$s0")
    s.cuCtxGetId("$ctx0", "&id0")
    s.cuCtxGetId("$ctx1", "&id1")
    s.cuDevicePrimaryCtxRetain("&again", 1)
    s.cuCtxEnablePeerAccess("$again", 0)
    s.cuMemcpyPeer("$a1", "$again", "$a0", "$ctx0", 64)


@scenario("mapping memory of one device for both", devices=2)
def peer_vmm(s: Script) -> None:
    two(s)
    chunk = 2 << 20
    prop = {"CUmemAllocationProp": {"allocType": 1, "type": 1, "id": 1}}
    s.cuMemAddressReserve("&r", chunk, 0, None, 0)
    s.cuMemCreate("&h", chunk, prop, 0)
    s.cuMemMap("$r", chunk, 0, "$h", 0)
    s.cuMemSetAccess("$r", chunk, {"CUmemAccessDesc": {"type": 1, "id": 1, "flags": 3}}, 1)
    s.cuMemGetAccess("&access", {"CUmemLocation": {"type": 1, "id": 0}}, "$r")
    s.cuMemsetD8Async("$r", 1, 64, "$s0")
    s.cuMemsetD8Async("$r", 1, 64, "$s1")
    s.cuMemSetAccess("$r", chunk, {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": 3}}, 1)
    s.cuMemsetD8Async("$r", 1, 64, "$s0")
    s.cuCtxSynchronize("$ctx0")
    s.cuCtxSynchronize("$ctx1")
