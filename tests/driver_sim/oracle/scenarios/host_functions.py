"""Host functions and callbacks: order, threads, the driver inside them."""

from __future__ import annotations

from driver_sim.oracle.script import Script, scenario


@scenario("host functions of one stream run in order, after what is before them")
def host_function_order(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    for name in ("first", "second", "third"):
        s.callback(name)
    word = s.gate("$s1")
    for name in ("first", "second", "third"):
        s.cuLaunchHostFunc("$s1", f"${name}", None)
    s.cuStreamQuery("$s1")
    s.log(1, within_ms=50)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    s.log(3)
    s.cuLaunchHostFunc("$s1", None, None)
    s.cuLaunchHostFunc(0, "$first", None)
    s.cuStreamSynchronize(0)
    s.log(1)


INSIDE = [
    ("cuDriverGetVersion", "&_"),
    ("cuGetErrorName", 1, "&_"),
    ("cuInit", 0),
    ("cuDeviceGetCount", "&_"),
    ("cuCtxGetCurrent", "&_"),
    ("cuCtxGetId", "$ctx0", "&_"),
    ("cuCtxPushCurrent", "$ctx0"),
    ("cuStreamQuery", "$s1"),
    ("cuStreamIsCapturing", "$s1", "&_"),
    ("cuStreamSynchronize", "$s2"),
    ("cuEventQuery", "$e"),
    ("cuEventRecord", "$e", "$s2"),
    ("cuEventCreate", "&_", 2),
    ("cuMemAlloc", "&_", 64),
    ("cuMemFree", "$a"),
    ("cuMemFreeAsync", "$b", "$s2"),
    ("cuMemsetD8Async", "$a", 1, 16, "$s2"),
    ("cuPointerGetAttribute", "&_", 2, "$a"),
    ("cuModuleUnload", "$module"),
]


@scenario("driver calls inside a host function; each in a process of its own")
def host_function_calls(s: Script) -> None:
    for call in INSIDE:
        s.restart(" ".join(map(str, call)))
        s.start()
        s.module("fill")
        for name in ("s1", "s2"):
            s.cuStreamCreate(f"&{name}", 1)
        s.cuEventCreate("&e", 2)
        s.cuMemAlloc("&a", 64)
        s.cuMemAllocAsync("&b", 64, "$s2")
        s.callback("inside", call)
        s.cuLaunchHostFunc("$s1", "$inside", None)
        s.cuStreamSynchronize("$s1")
        s.log(1)
        s.cuStreamQuery("$s1")


@scenario("a host function that waits holds its stream, and maybe the host functions of others")
def host_function_gate(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuStreamCreate("&s1", 1)
    s.cuStreamCreate("&s2", 1)
    s.callback("waiter", waits_for="$words")
    s.callback("other")
    s.cuLaunchHostFunc("$s1", "$waiter", None)
    s.cuStreamWriteValue32("$s1", "$host", 1, 0)
    s.cuStreamWriteValue32("$s2", "$host+64", 1, 0)
    s.cuStreamSynchronize("$s2")
    s.read("$host")
    s.read("$host+64")
    s.cuStreamQuery("$s1")
    s.cuLaunchHostFunc("$s2", "$other", None)
    s.cuStreamSynchronize("$s1", gate="$words")
    s.cuStreamSynchronize("$s2")
    s.read("$host")
    s.log(2, unordered=True)


@scenario("stream callbacks: status, flags")
def stream_callbacks(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.callback("told", kind="stream")
    s.cuStreamAddCallback("$s1", "$told", None, 0)
    s.cuStreamSynchronize("$s1")
    s.log(1)
    s.cuStreamAddCallback("$s1", "$told", None, 1)
    s.cuStreamAddCallback("$s1", None, None, 0)


@scenario("a user object's destructor runs when its last reference goes")
def user_objects(s: Script) -> None:
    s.start()
    s.callback("gone", ("cuCtxGetCurrent", "&_"), ("cuDeviceGetCount", "&_"), ("cuStreamQuery", 0))
    s.cuUserObjectCreate("&o", None, "$gone", 0, 1)
    s.cuUserObjectCreate("&o", None, "$gone", 1, 0)
    s.cuUserObjectCreate("&o", None, None, 1, 1)
    s.cuUserObjectCreate("&o", None, "$gone", 2, 1)
    s.cuUserObjectRetain("$o", 1)
    s.cuUserObjectRelease("$o", 2)
    s.log(1, within_ms=50)
    s.cuUserObjectRelease("$o", 1)
    s.log(1)
    s.cuUserObjectRetain(None, 1)
