"""Streams: making and ending them, their order, the default streams."""

from __future__ import annotations

from driver_sim.oracle.script import Script, scenario

LEGACY, PER_THREAD = 1, 2


@scenario("flags, priorities, ids, devices")
def stream_properties(s: Script) -> None:
    s.start()
    for flags in (0, 1, 2, 3, 4):
        s.cuStreamCreate(f"&flags{flags}", flags)
    for priority in (-100, -6, -5, -3, 0, 1, 100):
        s.cuStreamCreateWithPriority("&s", 1, priority)
        s.cuStreamGetPriority("$s", "&priority")
        s.cuStreamGetFlags("$s", "&flags")
    s.cuStreamCreate(None, 0)
    s.cuStreamGetId("$flags0", "&id0")
    s.cuStreamGetId("$flags1", "&id1")
    s.cuStreamGetId("$flags0", "&id2")
    s.cuStreamGetDevice("$flags0", "&device")
    s.cuStreamGetCtx("$flags0", "&ctx", "&_")
    s.cuStreamGetFlags("$flags0", None)
    s.cuStreamGetId("$flags0", None)


@scenario("the default streams by their handles 0, 1 and 2, on two threads")
def default_stream_handles(s: Script) -> None:
    s.start()
    s.cuCtxSetCurrent("$ctx0", on="t1")
    for thread in ("main", "t1"):
        for stream in (0, LEGACY, PER_THREAD):
            s.cuStreamGetId(stream, f"&id_{thread}_{stream}", on=thread)
            s.cuStreamGetFlags(stream, "&flags", on=thread)
            s.cuStreamGetPriority(stream, "&priority", on=thread)
            s.cuStreamGetCtx(stream, "&ctx", "&_", on=thread)
            s.cuStreamGetDevice(stream, "&device", on=thread)
            s.cuStreamIsCapturing(stream, "&status", on=thread)
            s.cuStreamQuery(stream, on=thread)
            s.cuStreamSynchronize(stream, on=thread)
            s.cuStreamDestroy(stream, on=thread)


@scenario("ids are never given out again")
def stream_ids(s: Script) -> None:
    s.start()
    for i in range(6):
        s.cuStreamCreate("&s", 1)
        s.cuStreamGetId("$s", f"&id{i}")
        s.cuStreamDestroy("$s")


@scenario("destroying a stream with work pending returns; the work is done all the same")
def stream_destroy_pending(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuStreamCreate("&s1", 1)
    s.cuEventCreate("&e", 2)
    word = s.gate("$s1")
    s.cuStreamWriteValue32("$s1", "$host", 7, 0)
    s.cuEventRecord("$e", "$s1")
    s.cuStreamDestroy("$s1", gate=word)
    s.cuEventQuery("$e")
    s.read("$host")
    s.open(word)
    s.cuEventSynchronize("$e")
    s.read("$host")


#: Each in a process of its own: some of these die on hardware.
USES = [
    ("cuStreamQuery", "$dead"),
    ("cuStreamSynchronize", "$dead"),
    ("cuStreamDestroy", "$dead"),
    ("cuStreamGetId", "$dead", "&id"),
    ("cuStreamGetFlags", "$dead", "&flags"),
    ("cuStreamGetCtx", "$dead", "&ctx", "&_"),
    ("cuStreamIsCapturing", "$dead", "&status"),
    ("cuStreamWaitEvent", "$dead", "$e", 0),
    ("cuEventRecord", "$e", "$dead"),
    ("cuMemsetD8Async", "$a", 1, 16, "$dead"),
    ("cuMemAllocAsync", "&p", 64, "$dead"),
    ("cuStreamQuery", 4096),
    ("cuStreamIsCapturing", 4096, "&status"),
]


@scenario("calls with a stream that was destroyed, or never was")
def dead_stream_uses(s: Script) -> None:
    for use in USES:
        s.restart(" ".join(map(str, use)))
        s.start()
        s.cuMemAlloc("&a", 64)
        s.cuEventCreate("&e", 2)
        s.cuStreamCreate("&dead", 1)
        s.cuStreamDestroy("$dead")
        s.call(*use)


@scenario("cuStreamQuery and the events of a gated stream")
def stream_order(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    for name in ("s1", "s2"):
        s.cuStreamCreate(f"&{name}", 1)
    for name in ("before", "behind"):
        s.cuEventCreate(f"&{name}", 2)
    s.cuStreamQuery("$s1")
    s.cuEventRecord("$before", "$s1")
    s.cuEventSynchronize("$before")
    word = s.gate("$s1")
    s.cuStreamWriteValue32("$s1", "$host", 1, 0)
    s.cuEventRecord("$behind", "$s1")
    s.cuStreamQuery("$s1")
    s.cuStreamQuery("$s2")
    s.cuEventQuery("$before")
    s.cuEventQuery("$behind")
    s.cuStreamWriteValue32("$s2", "$host+64", 2, 0)
    s.cuStreamSynchronize("$s2")
    s.cuStreamWaitEvent("$s2", "$behind", 0)
    s.cuStreamWriteValue32("$s2", "$host+128", 3, 0)
    s.cuStreamQuery("$s2")
    s.read("$host")
    s.read("$host+64")
    s.read("$host+128")
    s.open(word)
    s.cuStreamSynchronize("$s2")
    s.read("$host")
    s.read("$host+128")
    s.cuStreamQuery("$s1", until_ready=True)


@scenario("a synchronize returns when its stream is done, not before")
def stream_synchronize_waits(s: Script) -> None:
    s.start()
    for name in ("s1", "s2"):
        s.cuStreamCreate(f"&{name}", 1)
    s.cuEventCreate("&e", 2)
    for call in (("cuStreamSynchronize", "$s1"), ("cuEventSynchronize", "$e"), ("cuCtxSynchronize", None)):
        word = s.gate("$s1")
        s.cuEventRecord("$e", "$s1")
        s.cuStreamSynchronize("$s2", gate=word)
        s.call(*call, gate=word)


@scenario("legacy stream: waits for blocking streams, and they for it; non-blocking ones take no part")
def legacy_order(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuStreamCreate("&blocking", 0)
    s.cuStreamCreate("&other", 0)
    s.cuStreamCreate("&apart", 1)
    word = s.gate("$blocking")
    s.cuStreamQuery(0)
    s.cuStreamWriteValue32("$other", "$host", 1, 0)
    s.cuStreamQuery("$other", until_ready=True)
    s.cuStreamWriteValue32(0, "$host+64", 1, 0)
    s.cuStreamQuery(0)
    s.cuStreamQuery(LEGACY)
    s.cuStreamWriteValue32("$other", "$host+128", 1, 0)
    s.cuStreamQuery("$other")
    s.cuStreamWriteValue32("$apart", "$host+192", 1, 0)
    s.cuStreamQuery("$apart", until_ready=True)
    s.cuStreamWriteValue32(PER_THREAD, "$host+256", 1, 0)
    s.cuStreamQuery(PER_THREAD)
    for i in range(5):
        s.read(f"$host+{64 * i}")
    s.cuStreamSynchronize(0, gate=word)
    s.cuCtxSynchronize(None)
    for i in range(5):
        s.read(f"$host+{64 * i}")


@scenario("a gated legacy stream holds blocking streams, not the others")
def legacy_gated(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuMemAlloc("&a", 64)
    s.cuStreamCreate("&blocking", 0)
    s.cuStreamCreate("&apart", 1)
    word = s.gate(0)
    s.cuStreamWriteValue32("$blocking", "$host", 1, 0)
    s.cuMemsetD8Async("$a", 1, 64, "$blocking")
    s.cuStreamWriteValue32("$apart", "$host+64", 1, 0)
    s.cuStreamQuery("$apart", until_ready=True)
    s.cuStreamQuery("$blocking")
    s.cuStreamQuery(0)
    s.read("$host")
    s.cuStreamSynchronize("$apart", gate=word)
    s.cuStreamSynchronize("$blocking", gate=word)
    s.read("$host")


@scenario("per-thread streams: one for each thread, blocking")
def per_thread_streams(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuCtxSetCurrent("$ctx0", on="t1")
    word = s.gate(PER_THREAD)
    s.cuStreamQuery(PER_THREAD)
    s.cuStreamQuery(PER_THREAD, on="t1")
    s.cuStreamWriteValue32(PER_THREAD, "$host", 1, 0, on="t1")
    s.cuStreamSynchronize(PER_THREAD, on="t1", gate=word)
    s.cuStreamQuery(0)
    s.cuStreamWriteValue32(0, "$host+64", 1, 0)
    s.cuStreamQuery(PER_THREAD, on="t1")
    s.read("$host+64")
    s.cuStreamSynchronize(0, gate=word)
    s.read("$host+64")


@scenario("the legacy stream's waits: cuStreamSynchronize(0) with a blocking stream busy; cuMemcpy through it")
def legacy_synchronize(s: Script) -> None:
    s.start()
    s.cuMemAlloc("&a", 64)
    s.buffer("b")
    s.cuStreamCreate("&blocking", 0)
    s.cuStreamCreate("&apart", 1)
    word = s.gate("$apart")
    s.cuStreamSynchronize(0, gate=word)
    s.cuMemcpyHtoD("$a", "$b", 64, gate=word)
    s.cuMemcpyDtoH("$b", "$a", 64, gate=word)
    s.cuMemsetD8("$a", 1, 64, gate=word)
    s.open(word)
    for call in (
        ("cuStreamSynchronize", 0),
        ("cuMemcpyHtoD", "$a", "$b", 64),
        ("cuMemcpyDtoH", "$b", "$a", 64),
        ("cuMemcpyDtoD", "$a+32", "$a", 16),
        ("cuMemsetD8", "$a", 1, 64),
        ("cuMemsetD8Async", "$a", 1, 64, 0),
        ("cuMemcpyHtoDAsync", "$a", "$b", 64, 0),
        ("cuMemcpyDtoHAsync", "$b", "$a", 64, 0),
    ):
        word = s.gate("$blocking")
        s.call(*call, gate=word)
        s.open(word)
        s.cuCtxSynchronize(None)


@scenario("waiting for and writing words: flags, alignment, memory that is none")
def stream_values(s: Script) -> None:
    s.start()
    s.cuMemAlloc("&a", 64)
    s.cuMemHostAlloc("&host", 4096, 1)
    s.buffer("b")
    s.cuStreamCreate("&s1", 1)
    s.cuStreamWriteValue32("$s1", "$host", 5, 0)
    s.cuStreamWaitValue32("$s1", "$host", 5, 0)
    s.cuStreamWaitValue32("$s1", "$host", 4, 0)
    s.cuStreamWaitValue32("$s1", "$host", 5, 1)
    s.cuStreamWaitValue32("$s1", "$host", 1, 2)
    s.cuStreamWaitValue32("$s1", "$host", 5, 3)
    s.cuStreamWaitValue32("$s1", "$host", 5, 4)
    s.cuStreamSynchronize("$s1")
    s.cuStreamWriteValue32("$s1", "$host", 5, 1)
    s.cuStreamWriteValue32("$s1", "$host+2", 5, 0)
    s.cuStreamWriteValue32("$s1", None, 5, 0)
    s.cuStreamWriteValue32("$s1", "$b", 5, 0)
    s.cuStreamWaitValue32("$s1", None, 0, 0)
    s.cuStreamWriteValue32("$s1", "$a", 9, 0)
    s.cuStreamWaitValue32("$s1", "$a", 9, 0)
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyDtoH("$b", "$a", 4)
    s.read("$b")


@scenario("attaching managed memory")
def stream_attach(s: Script) -> None:
    s.start()
    s.cuMemAllocManaged("&m", 4096, 1)
    s.cuMemAlloc("&a", 4096)
    s.cuStreamCreate("&s1", 1)
    for flags in (1, 2, 3, 4):
        s.cuStreamAttachMemAsync("$s1", "$m", 0, flags)
    s.cuStreamAttachMemAsync("$s1", "$m", 4096, 1)
    s.cuStreamAttachMemAsync("$s1", "$m", 64, 1)
    s.cuStreamAttachMemAsync("$s1", "$m+64", 0, 1)
    s.cuStreamAttachMemAsync("$s1", "$a", 0, 1)
    s.cuStreamAttachMemAsync("$s1", None, 0, 1)
    s.cuStreamAttachMemAsync(0, "$m", 0, 4)
    s.cuStreamSynchronize("$s1")
