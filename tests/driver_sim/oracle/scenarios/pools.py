"""Stream-ordered memory: pools, reuse, order of frees, attributes."""

from __future__ import annotations

from driver_sim.oracle.scenarios.calls import PINNED_POOL
from driver_sim.oracle.script import Script, scenario

FOLLOW, OPPORTUNISTIC, INTERNAL, THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = range(1, 9)
UNLIMITED = (1 << 64) - 1


def begin(s: Script) -> None:
    s.start()
    for name in ("s1", "s2"):
        s.cuStreamCreate(f"&{name}", 1)
    s.cuEventCreate("&e", 2)
    s.cuMemPoolCreate("&p", PINNED_POOL)


@scenario("making pools: properties that are wrong; the default and the current pool")
def pool_creation(s: Script) -> None:
    s.start()
    for change in (
        {},
        {"allocType": 0},
        {"allocType": 2},
        {"type": 0},
        {"type": 2},
        {"id": 99},
        {"id": -1},
        {"handleTypes": 1},
        {"handleTypes": 99},
        {"maxSize": 1 << 20},
        {"usage": 1},
    ):
        s.cuMemPoolCreate("&p", {"CUmemPoolProps": {**PINNED_POOL["CUmemPoolProps"], **change}})
    s.cuMemPoolCreate(None, PINNED_POOL)
    s.cuMemPoolCreate("&p", None)
    s.cuMemPoolCreate("&q", PINNED_POOL)
    s.cuDeviceGetDefaultMemPool("&default_pool", 0)
    s.cuDeviceGetMemPool("&current", 0)
    s.cuDeviceSetMemPool(0, "$q")
    s.cuDeviceGetMemPool("&current", 0)
    s.cuMemPoolDestroy("$q")
    s.cuDeviceGetMemPool("&current", 0)
    s.cuMemPoolDestroy("$default_pool")
    s.cuMemPoolDestroy(None)
    s.cuDeviceSetMemPool(0, None)
    s.cuDeviceGetDefaultMemPool("&default_pool", 0)


@scenario("attributes: defaults, values that are refused, high marks")
def pool_attributes(s: Script) -> None:
    begin(s)
    s.cuDeviceGetDefaultMemPool("&default_pool", 0)
    for pool in ("$p", "$default_pool"):
        for attribute in range(10):
            s.cuMemPoolGetAttribute(pool, attribute, "&value")
    for attribute in range(10):
        s.cuMemPoolSetAttribute("$p", attribute, [0, "&_"])
        s.cuMemPoolSetAttribute("$p", attribute, [1, "&_"])
        s.cuMemPoolGetAttribute("$p", attribute, "&value")
    s.cuMemPoolGetAttribute("$p", THRESHOLD, None)
    s.cuMemPoolGetAttribute(None, THRESHOLD, "&value")


def usage(s: Script) -> None:
    for attribute in (USED, USED_HIGH, RESERVED, RESERVED_HIGH):
        s.cuMemPoolGetAttribute("$p", attribute, f"&value{attribute}")


@scenario("used and reserved bytes through allocations, frees, waits and trims, without a threshold")
def pool_usage(s: Script) -> None:
    begin(s)
    usage(s)
    s.cuMemAllocFromPoolAsync("&a", 1000, "$p", "$s1")
    usage(s)
    s.cuMemAllocFromPoolAsync("&b", 100 << 20, "$p", "$s1")
    usage(s)
    s.cuMemFreeAsync("$b", "$s1")
    usage(s)
    s.cuStreamSynchronize("$s1")
    usage(s)
    s.cuMemPoolTrimTo("$p", 0)
    usage(s)
    s.cuMemFreeAsync("$a", "$s1")
    s.cuStreamSynchronize("$s2")
    usage(s)
    s.cuStreamSynchronize("$s1")
    usage(s)


@scenario("the same with an unlimited threshold, and trims to a size")
def pool_threshold(s: Script) -> None:
    begin(s)
    s.cuMemPoolSetAttribute("$p", THRESHOLD, [UNLIMITED, "&_"])
    s.cuMemAllocFromPoolAsync("&a", 100 << 20, "$p", "$s1")
    s.cuMemAllocFromPoolAsync("&b", 10 << 20, "$p", "$s1")
    s.cuMemFreeAsync("$a", "$s1")
    s.cuStreamSynchronize("$s1")
    usage(s)
    s.cuMemPoolTrimTo("$p", 64 << 20)
    usage(s)
    s.cuMemPoolTrimTo("$p", 0)
    usage(s)
    s.cuMemFreeAsync("$b", "$s1")
    s.cuEventRecord("$e", "$s1")
    s.cuEventSynchronize("$e")
    usage(s)
    s.cuMemPoolSetAttribute("$p", RESERVED_HIGH, [0, "&_"])
    s.cuMemPoolSetAttribute("$p", USED_HIGH, [0, "&_"])
    usage(s)
    s.cuMemPoolTrimTo("$p", 0)
    usage(s)


@scenario("a free that is pending: trim keeps its memory, the waits for other streams too")
def pool_pending_free(s: Script) -> None:
    begin(s)
    s.cuMemAllocFromPoolAsync("&a", 100 << 20, "$p", "$s1")
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s1")
    s.cuMemFreeAsync("$a", "$s1", gate=word)
    usage(s)
    s.cuMemPoolTrimTo("$p", 0, gate=word)
    usage(s)
    s.cuStreamSynchronize("$s2", gate=word)
    usage(s)
    s.open(word)
    s.cuStreamQuery("$s1", until_ready=True)
    usage(s)
    s.cuMemPoolTrimTo("$p", 0)
    usage(s)


@scenario("reuse: in the same stream at once; in another after an event; without order not while pending")
def pool_reuse(s: Script) -> None:
    begin(s)
    s.cuMemPoolSetAttribute("$p", THRESHOLD, [UNLIMITED, "&_"])
    s.cuMemAllocFromPoolAsync("&a", 1 << 20, "$p", "$s1")
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s1")
    s.cuMemFreeAsync("$a", "$s1")
    s.cuMemAllocFromPoolAsync("&same_stream", 1 << 20, "$p", "$s1", gate=word)
    s.cuMemFreeAsync("$same_stream", "$s1")
    s.cuMemAllocFromPoolAsync("&other_stream", 1 << 20, "$p", "$s2", gate=word)
    s.cuMemFreeAsync("$other_stream", "$s2")
    s.cuEventRecord("$e", "$s1")
    s.cuStreamWaitEvent("$s2", "$e", 0)
    s.cuMemAllocFromPoolAsync("&after_event", 1 << 20, "$p", "$s2", gate=word)
    s.open(word)
    s.cuCtxSynchronize(None)
    s.cuMemFreeAsync("$after_event", "$s2")
    s.cuStreamSynchronize("$s2")
    s.cuMemAllocFromPoolAsync("&when_done", 1 << 20, "$p", "$s1")
    s.cuStreamSynchronize("$s1")


@scenario("reuse after an event when opportunistic reuse is off, and when following events is off")
def pool_reuse_policies(s: Script) -> None:
    for off in (FOLLOW, OPPORTUNISTIC, INTERNAL):
        s.restart(f"attribute {off} off")
        begin(s)
        s.cuMemPoolSetAttribute("$p", THRESHOLD, [UNLIMITED, "&_"])
        s.cuMemPoolSetAttribute("$p", off, [0, "&_"])
        s.cuMemAllocFromPoolAsync("&a", 1 << 20, "$p", "$s1")
        s.cuStreamSynchronize("$s1")
        word = s.gate("$s1")
        s.cuMemFreeAsync("$a", "$s1")
        s.cuEventRecord("$e", "$s1")
        s.cuStreamWaitEvent("$s2", "$e", 0)
        s.cuMemAllocFromPoolAsync("&after_event", 1 << 20, "$p", "$s2", gate=word)
        s.open(word)
        s.cuCtxSynchronize(None)
        s.cuMemFreeAsync("$after_event", "$s2")
        s.cuStreamSynchronize("$s2")
        s.cuMemAllocFromPoolAsync("&when_done", 1 << 20, "$p", "$s1")
        s.cuStreamSynchronize("$s1")


@scenario("sizes that cannot be; freed twice; freed from a stream without order; freed by cuMemFree")
def pool_frees(s: Script) -> None:
    begin(s)
    s.cuMemAllocFromPoolAsync("&a", 0, "$p", "$s1")
    s.cuMemAllocAsync("&a", 0, "$s1")
    s.cuMemAllocAsync(None, 64, "$s1")
    s.cuMemAllocAsync("&a", 1 << 60, "$s1")
    s.cuMemAllocFromPoolAsync("&a", 1 << 48, "$p", "$s1")
    s.cuMemAllocFromPoolAsync("&a", 64, None, "$s1")
    s.cuMemAllocFromPoolAsync("&a", 4096, "$p", "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuMemFreeAsync("$a+16", "$s1")
    s.cuMemFreeAsync(None, "$s1")
    s.cuMemFreeAsync("$a", "$s2")
    s.cuMemFreeAsync("$a", "$s1")
    s.cuStreamSynchronize("$s2")
    s.cuMemFreeAsync("$a", "$s2")
    s.cuMemAllocFromPoolAsync("&b", 4096, "$p", "$s1")
    word = s.gate("$s1")
    s.cuMemFree("$b", gate=word)
    s.open(word)
    s.cuMemFree("$b")
    s.cuStreamSynchronize("$s1")
    s.cuMemAllocFromPoolAsync("&c", 4096, "$p", 0)
    s.cuMemFreeAsync("$c", 0)
    s.cuStreamSynchronize(0)
    s.cuMemAllocFromPoolAsync("&c", 4096, "$p", 2)
    s.cuMemFreeAsync("$c", 2)
    s.cuCtxSynchronize(None)
    usage(s)


@scenario("the address of memory whose allocation has not run yet: host calls, work in another stream")
def pool_not_yet(s: Script) -> None:
    begin(s)
    word = s.gate("$s1")
    s.cuMemAllocFromPoolAsync("&a", 4096, "$p", "$s1")
    s.cuPointerGetAttribute("&kind", 2, "$a")
    s.cuMemsetD8Async("$a", 1, 64, "$s1")
    s.cuMemsetD8Async("$a", 1, 5000, "$s1")
    s.cuMemFreeAsync("$a", "$s1")
    s.cuMemsetD8Async("$a", 1, 64, "$s1")
    s.open(word)
    s.cuStreamSynchronize("$s1")
    s.cuMemsetD8Async("$a", 1, 64, "$s1")
    s.cuStreamSynchronize("$s1")


@scenario("destroying a pool with memory out, and a pool with a free pending")
def pool_destruction(s: Script) -> None:
    begin(s)
    s.buffer("buffer")
    s.cuMemAllocFromPoolAsync("&a", 4096, "$p", "$s1")
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s1")
    s.cuMemPoolDestroy("$p", gate=word)
    s.open(word)
    s.cuMemsetD8Async("$a", 5, 64, "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyDtoH("$buffer", "$a", 64)
    s.read("$buffer", kind="u8")
    s.cuMemFreeAsync("$a", "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuMemPoolCreate("&q", PINNED_POOL)
    s.cuMemAllocFromPoolAsync("&b", 4096, "$q", "$s1")
    word = s.gate("$s1")
    s.cuMemFreeAsync("$b", "$s1")
    s.cuMemPoolDestroy("$q", gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s1")


@scenario("calls with a pool that was destroyed; each in a process of its own")
def dead_pool_uses(s: Script) -> None:
    for call in (
        ("cuMemPoolGetAttribute", "$p", 4, "&value"),
        ("cuMemPoolTrimTo", "$p", 0),
        ("cuMemAllocFromPoolAsync", "&a", 64, "$p", "$s1"),
        ("cuMemPoolDestroy", "$p"),
    ):
        s.restart(" ".join(map(str, call)))
        begin(s)
        s.cuMemPoolDestroy("$p")
        s.call(*call)


@scenario("a pool with a largest size")
def pool_maximum(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuMemPoolCreate("&p", {"CUmemPoolProps": {**PINNED_POOL["CUmemPoolProps"], "maxSize": 64 << 20}})
    s.cuMemAllocFromPoolAsync("&a", 128 << 20, "$p", "$s1")
    s.cuMemAllocFromPoolAsync("&b", 32 << 20, "$p", "$s1")
    s.cuMemAllocFromPoolAsync("&c", 33 << 20, "$p", "$s1")
    s.cuStreamSynchronize("$s1")


@scenario("access of a pool: its own device")
def pool_access(s: Script) -> None:
    begin(s)
    here = {"CUmemLocation": {"type": 1, "id": 0}}
    s.cuMemPoolGetAccess("&access", "$p", here)
    s.cuMemPoolGetAccess("&access", "$p", {"CUmemLocation": {"type": 1, "id": 99}})
    for flags in (0, 1, 3, 2):
        s.cuMemPoolSetAccess("$p", {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": flags}}, 1)
        s.cuMemPoolGetAccess("&access", "$p", here)
    s.cuMemPoolSetAccess("$p", {"CUmemAccessDesc": {"type": 1, "id": 99, "flags": 3}}, 1)
    s.cuMemPoolSetAccess("$p", None, 0)
    s.cuMemPoolSetAccess("$p", None, 1)


@scenario("a stream that is destroyed: what it freed can be used again by others")
def pool_stream_gone(s: Script) -> None:
    begin(s)
    s.cuMemPoolSetAttribute("$p", THRESHOLD, [UNLIMITED, "&_"])
    s.cuMemAllocFromPoolAsync("&a", 1 << 20, "$p", "$s1")
    s.cuMemFreeAsync("$a", "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuStreamDestroy("$s1")
    s.cuMemAllocFromPoolAsync("&b", 1 << 20, "$p", "$s2")
    s.cuStreamSynchronize("$s2")
    usage(s)
