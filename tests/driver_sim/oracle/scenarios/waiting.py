"""Implicit synchronization: which calls return only when work of another stream is done."""

from __future__ import annotations

from driver_sim.oracle.scenarios.calls import PINNED_POOL, prepare
from driver_sim.oracle.script import KERNELS, Script, scenario

CALLS = [
    ("cuMemAlloc", "&made", 64),
    ("cuMemAlloc", "&made_large", 256 << 20),
    ("cuMemFree", "$made"),
    ("cuMemFree", "$b"),
    ("cuMemHostAlloc", "&made_host", 64, 1),
    ("cuMemHostAlloc", "&made_host2", 64 << 20, 1),
    ("cuMemAllocHost", "&made_host3", 4096),
    ("cuMemFreeHost", "$made_host"),
    ("cuMemFreeHost", "$made_host2"),
    ("cuMemAllocManaged", "&managed", 4096, 1),
    ("cuMemFree", "$managed"),
    ("cuMemHostRegister", "$buffer", 4096, 0),
    ("cuMemHostUnregister", "$buffer"),
    ("cuMemGetInfo", "&_", "&_"),
    ("cuMemPoolCreate", "&pool", PINNED_POOL),
    ("cuMemAllocFromPoolAsync", "&pooled", 64, "$pool", "$s2"),
    ("cuMemFreeAsync", "$pooled", "$s2"),
    ("cuStreamSynchronize", "$s2"),
    ("cuMemPoolTrimTo", "$pool", 0),
    ("cuMemPoolDestroy", "$pool"),
    ("cuModuleLoadData", "&loaded", KERNELS),
    ("cuModuleGetFunction", "&copy", "$loaded", "copy"),
    ("cuFuncGetAttribute", "&value", 0, "$copy"),
    ("cuFuncGetParamInfo", "$copy", 0, "&offset", "&size"),
    ("cuFuncSetAttribute", "$copy", 8, 1024),
    ("cuFuncLoad", "$copy"),
    ("cuModuleUnload", "$loaded"),
    ("cuStreamCreate", "&made_stream", 1),
    ("cuStreamDestroy", "$made_stream"),
    ("cuEventCreate", "&made_event", 2),
    ("cuEventDestroy", "$made_event"),
    ("cuEventSynchronize", "$e2"),
    ("cuPointerGetAttribute", "&kind", 2, "$a"),
    ("cuMemsetD8Async", "$a", 1, 64, "$s2"),
    ("cuMemcpyHtoDAsync", "$a", "$buffer", 64, "$s2"),
    ("cuMemcpyHtoDAsync", "$a", "$buffer", 4096, "$s2"),
    ("cuMemcpyDtoHAsync", "$buffer", "$a", 64, "$s2"),
    ("cuMemcpyHtoD", "$a", "$buffer", 64),
    ("cuMemcpyDtoH", "$buffer", "$a", 64),
    ("cuMemsetD8", "$a", 1, 64),
    ("cuMemcpyDtoD", "$a", "$a+64", 64),
    ("cuDevicePrimaryCtxRetain", "&again", 0),
    ("cuCtxGetId", None, "&id"),
    ("cuStreamGetId", "$s1", "&stream_id"),
    ("cuCtxSetLimit", 0, 2048),
    ("cuCtxCreate", "&c", None, 0, 0),
    ("cuCtxSetCurrent", "$ctx0"),
    ("cuCtxDestroy", "$c"),
    ("cuCtxSynchronize", None),
]


@scenario("which calls wait for a non-blocking stream that is held")
def implicit_waits(s: Script) -> None:
    prepare(s)
    for call in CALLS:
        word = s.gate("$s1")
        s.call(*call, gate=word)
        s.open(word)
        s.cuStreamSynchronize("$s1")


@scenario("freeing what queued work still uses: the free waits, the work is done")
def free_in_use(s: Script) -> None:
    prepare(s)
    word = s.gate("$s1")
    s.cuMemsetD8Async("$b", 1, 64, "$s1")
    s.cuMemFree("$b", gate=word)
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s1")
    s.cuMemcpyHtoDAsync("$a", "$host", 64, "$s1")
    s.cuMemFreeHost("$host", gate=word)
    s.cuStreamSynchronize("$s1")


@scenario("unloading a module whose kernel is pending, and one that nothing uses")
def unload_pending(s: Script) -> None:
    prepare(s)
    word = s.gate("$s1")
    s.fill("$s1", "$a", 2.0)
    s.cuModuleUnload("$module2", gate=word)
    word = s.gate("$s1")
    s.fill("$s1", "$a", 2.0)
    s.cuModuleUnload("$module", gate=word)
    s.cuStreamSynchronize("$s1")
    s.cuLaunchKernel("$fill", 1, 1, 1, 32, 1, 1, 0, "$s1", [["ptr", "$a"], ["f32", 1.0], ["u32", 16]], None)


@scenario("lazy loading: the first launch, the first load, while a stream is held, and while a kernel runs")
def lazy_loading(s: Script) -> None:
    prepare(s)
    s.cuModuleGetLoadingMode("&mode")
    for name in ("copy", "add_one", "write_args"):
        s.cuModuleGetFunction(f"&{name}", "$module", name)
        s.cuFuncIsLoaded("&state", f"${name}")
    word = s.gate("$s1")
    s.launch("add_one", "$s2", [["ptr", "$a"], ["u32", 16]], gate=word)
    s.cuFuncIsLoaded("&state", "$add_one")
    s.cuStreamQuery("$s1")
    s.open(word)
    s.cuCtxSynchronize(None)
    word = s.gate("$s1")
    s.cuFuncLoad("$copy", gate=word)
    s.cuFuncIsLoaded("&state", "$copy")
    s.open(word)
    s.cuCtxSynchronize(None)
    s.launch("spin", "$s1", [["u64", 700_000_000]])
    s.cuEventRecord("$e1", "$s1")
    s.cuFuncLoad("$write_args")
    s.cuEventQuery("$e1")
    s.cuModuleLoadData("&loaded", KERNELS)
    s.cuModuleGetFunction("&fresh", "$loaded", "saxpy")
    s.launch("fresh", "$s2", [["ptr", "$a"], ["ptr", "$b"], ["f32", 1.0], ["u32", 16]])
    s.cuEventQuery("$e1")
    s.cuMemAlloc("&made", 64)
    s.cuEventQuery("$e1")
    s.cuEventSynchronize("$e1")
    s.cuEventQuery("$e1")
    s.cuFuncIsLoaded("&state", "$write_args")


@scenario("attributes asked of a function do not load it; a module's first function loads its globals?")
def lazy_questions(s: Script) -> None:
    prepare(s)
    s.cuModuleGetFunction("&copy", "$module2", "copy")
    s.cuFuncIsLoaded("&state", "$copy")
    s.cuFuncGetAttribute("&value", 0, "$copy")
    s.cuFuncIsLoaded("&state", "$copy")
    s.cuFuncGetParamInfo("$copy", 0, "&offset", "&size")
    s.cuFuncIsLoaded("&state", "$copy")
    s.cuFuncSetAttribute("$copy", 8, 1024)
    s.cuFuncIsLoaded("&state", "$copy")
    s.cuFuncLoad("$copy")
    s.cuFuncIsLoaded("&state", "$copy")


@scenario("pageable copies: when does the call return, and what does it read?")
def pageable_copies(s: Script) -> None:
    prepare(s)
    s.buffer("small", 4096, fill=1)
    s.buffer("large", 1 << 20, fill=2)
    s.cuMemAlloc("&to", 1 << 20)
    for nbytes in (4, 4096, 65536, 65540, 1 << 20):
        word = s.gate("$s1")
        s.cuMemcpyHtoDAsync("$to", "$large", nbytes, "$s1", gate=word)
        s.open(word)
        s.cuStreamSynchronize("$s1")
    for nbytes in (4, 4096, 1 << 20):
        word = s.gate("$s1")
        s.cuMemcpyDtoHAsync("$large", "$to", nbytes, "$s1", gate=word)
        s.open(word)
        s.cuStreamSynchronize("$s1")
    # A source that is overwritten after the call returned: staged, or read late?
    word = s.gate("$s1")
    s.cuMemcpyHtoDAsync("$to", "$small", 64, "$s1", gate=word)
    s.step(write="$small", value=77)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyDtoH("$large", "$to", 4)
    s.read("$large")
    # The same from pinned memory: read when the copy runs.
    word = s.gate("$s1")
    s.step(write="$host", value=5)
    s.cuMemcpyHtoDAsync("$to", "$host", 64, "$s1", gate=word)
    s.step(write="$host", value=6)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyDtoH("$large", "$to", 4)
    s.read("$large")
    # Registered memory behaves as pinned.
    s.cuMemHostRegister("$large", 1 << 20, 0)
    word = s.gate("$s1")
    s.cuMemcpyDtoHAsync("$large", "$to", 1 << 20, "$s1", gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    # Managed memory.
    s.cuMemAllocManaged("&managed", 4096, 1)
    word = s.gate("$s1")
    s.cuMemcpyDtoHAsync("$managed", "$to", 4096, "$s1", gate=word)
    s.cuMemcpyHtoDAsync("$to", "$managed", 4096, "$s1", gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s1")


@scenario("synchronous copies and fills: do they return before the copy is done?")
def synchronous_copies(s: Script) -> None:
    prepare(s)
    s.cuStreamCreate("&blocking", 0)
    for call in (
        ("cuMemcpyDtoD", "$a", "$b", 64),
        ("cuMemsetD32", "$a", 1, 16),
        ("cuMemcpyHtoD", "$a", "$host", 64),
        ("cuMemcpyHtoD", "$a", "$buffer", 64),
        ("cuMemcpyDtoH", "$host", "$a", 64),
        ("cuMemcpy", "$a", "$b", 64),
        ("cuMemcpyHtoDAsync", "$a", "$host", 64, 0),
        ("cuMemcpyDtoHAsync", "$host", "$a", 64, 0),
        ("cuMemsetD8", "$host", 1, 64),
    ):
        word = s.gate("$blocking")
        s.call(*call, gate=word)
        s.open(word)
        s.cuCtxSynchronize(None)
