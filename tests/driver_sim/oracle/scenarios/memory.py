"""Allocations, frees, copies and fills that are wrong or empty; what the driver knows of an address."""

from __future__ import annotations

from driver_sim.oracle.script import Script, scenario


@scenario("sizes that cannot be, and null places")
def allocation_sizes(s: Script) -> None:
    s.start()
    for name in ("cuMemAlloc", "cuMemAllocHost"):
        s.call(name, "&a", 0)
        s.call(name, None, 64)
        s.call(name, "&small", 1)
    for nbytes in (1 << 60, (1 << 64) - 1, 1 << 48):
        s.cuMemAlloc("&a", nbytes)
    s.cuMemAllocHost("&a", 1 << 60)
    s.cuMemHostAlloc("&a", 0, 0)
    for flags in (0, 1, 2, 4, 7, 8, 16):
        s.cuMemHostAlloc(f"&host{flags}", 64, flags)
    for flags in (0, 1, 2, 3, 4):
        s.cuMemAllocManaged(f"&managed{flags}", 64, flags)
    s.cuMemAllocManaged("&none", 0, 1)
    s.cuMemAllocPitch("&pitched", "&pitch", 100, 4, 4)
    s.cuMemAllocPitch("&pitched", "&pitch", 100, 4, 3)
    s.cuMemAllocPitch("&pitched", "&pitch", 0, 4, 4)
    s.cuMemAllocPitch("&pitched", "&pitch", 1025, 2, 16)
    s.cuMemGetInfo(None, "&_")
    s.cuMemGetInfo("&_", None)
    s.cuMemGetInfo(None, None)


@scenario("frees of what is no base address of the right kind")
def frees(s: Script) -> None:
    s.start()
    s.buffer("b")
    s.cuStreamCreate("&s1", 1)
    s.cuMemAlloc("&a", 4096)
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuMemAllocManaged("&managed", 4096, 1)
    s.cuMemAllocAsync("&async", 4096, "$s1")
    s.cuMemFree(None)
    s.cuMemFreeHost(None)
    s.cuMemFree("$a+16")
    s.cuMemFree("$host")
    s.cuMemFree("$b")
    s.cuMemFree(4096)
    s.cuMemFreeHost("$a")
    s.cuMemFreeHost("$managed")
    s.cuMemFreeHost("$b")
    s.cuMemFreeHost("$host+16")
    s.cuMemFreeAsync("$host", "$s1")
    s.cuMemFreeAsync("$managed", "$s1")
    s.cuMemFreeAsync("$a", "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuMemFree("$a")
    s.cuMemFree("$async")
    s.cuMemFree("$async")
    s.cuMemFree("$managed")
    s.cuMemFree("$managed")
    s.cuMemFreeHost("$host")
    s.cuMemFreeHost("$host")


@scenario("freeing device memory twice, and using it after the free")
def double_free(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.buffer("b")
    for nbytes in (512, 64 << 20):
        s.cuMemAlloc("&a", nbytes)
        s.cuMemFree("$a")
        s.cuMemFree("$a")
        s.cuMemsetD8Async("$a", 1, 64, "$s1")
        s.cuMemcpyDtoH("$b", "$a", 64)
        s.cuMemcpyHtoDAsync("$a", "$b", 64, "$s1")
        s.cuPointerGetAttribute("&kind", 2, "$a")
        s.cuMemGetAddressRange("&base", "&size", "$a")
        s.cuStreamSynchronize("$s1")


@scenario("memory of another context: freed under this one")
def free_under_another_context(s: Script) -> None:
    s.start()
    s.cuMemAlloc("&a", 4096)
    s.cuMemHostAlloc("&host", 4096, 0)
    s.cuCtxCreate("&c", None, 0, 0)
    s.cuStreamCreate("&s2", 1)
    s.cuMemAlloc("&b", 4096)
    s.cuMemsetD8Async("$a", 1, 64, "$s2")
    s.cuMemcpyDtoDAsync("$b", "$a", 64, "$s2")
    s.cuStreamSynchronize("$s2")
    s.cuMemFreeHost("$host")
    s.cuMemFree("$a")
    s.cuPointerGetAttribute("&ctx", 1, "$b")
    s.cuCtxDestroy("$c")
    s.cuPointerGetAttribute("&ctx", 1, "$b")


@scenario("copies and fills of nothing")
def empty_work(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuMemAlloc("&a", 64)
    s.buffer("b")
    s.cuMemsetD8Async("$a", 0, 0, "$s1")
    s.cuMemsetD8Async(None, 0, 0, "$s1")
    s.cuMemsetD32Async(None, 0, 0, "$s1")
    s.cuMemsetD8("$a", 0, 0)
    s.cuMemsetD8(None, 0, 0)
    s.cuMemcpyHtoDAsync("$a", "$b", 0, "$s1")
    s.cuMemcpyHtoDAsync(None, None, 0, "$s1")
    s.cuMemcpyDtoHAsync(None, None, 0, "$s1")
    s.cuMemcpyDtoDAsync(None, None, 0, "$s1")
    s.cuMemcpyAsync(None, None, 0, "$s1")
    s.cuMemcpyHtoD(None, None, 0)
    s.cuMemcpyDtoD("$a", "$a", 0)
    s.cuMemsetD2D32Async("$a", 32, 1, 0, 2, "$s1")
    s.cuMemsetD2D32Async("$a", 32, 1, 2, 0, "$s1")
    s.cuMemsetD2D32Async(None, 0, 1, 0, 0, "$s1")


WRONG = [
    ("cuMemsetD8Async", None, 0, 16, "$s1"),
    ("cuMemsetD8Async", "$b", 0, 16, "$s1"),
    ("cuMemsetD8Async", "$host", 9, 16, "$s1"),
    ("cuMemsetD8Async", 4096, 0, 16, "$s1"),
    ("cuMemsetD32Async", "$a+2", 0, 4, "$s1"),
    ("cuMemsetD16Async", "$a+1", 0, 4, "$s1"),
    ("cuMemsetD2D32Async", "$a", 30, 1, 4, 2, "$s1"),
    ("cuMemsetD2D32Async", "$a", 8, 1, 4, 2, "$s1"),
    ("cuMemsetD2D32Async", "$a", 8, 1, 4, 1, "$s1"),
    ("cuMemcpyHtoDAsync", None, "$b", 16, "$s1"),
    ("cuMemcpyHtoDAsync", "$b", "$b", 16, "$s1"),
    ("cuMemcpyHtoDAsync", "$host", "$b", 16, "$s1"),
    ("cuMemcpyHtoDAsync", "$a", "$a+64", 16, "$s1"),
    ("cuMemcpyDtoHAsync", "$a", "$a+64", 16, "$s1"),
    ("cuMemcpyDtoHAsync", "$b", "$b", 16, "$s1"),
    ("cuMemcpyDtoHAsync", "$b", "$host", 16, "$s1"),
    ("cuMemcpyDtoDAsync", "$a", "$host", 16, "$s1"),
    ("cuMemcpyDtoDAsync", "$a", "$b", 16, "$s1"),
    ("cuMemcpyDtoDAsync", "$b", "$a", 16, "$s1"),
    ("cuMemcpyDtoDAsync", None, "$a", 16, "$s1"),
    ("cuMemcpyAsync", "$b", "$b+64", 16, "$s1"),
    ("cuMemcpyAsync", "$a", "$b", 16, "$s1"),
    ("cuMemcpyAsync", "$b", "$a", 16, "$s1"),
    ("cuMemcpyAsync", None, "$a", 16, "$s1"),
    ("cuMemsetD8Async", "$small", 0, 65, "$s1"),
    ("cuMemsetD8Async", "$a", 0, (2 << 20) + 1, "$s1"),
    ("cuMemsetD8Async", "$a", 0, 1 << 40, "$s1"),
    ("cuMemcpyDtoHAsync", "$b", "$small", 128, "$s1"),
    ("cuMemcpyDtoDAsync", "$a", "$small", 1 << 40, "$s1"),
]


@scenario("copies and fills of null, host and unknown addresses, and past the end; each in a process of its own")
def wrong_ranges(s: Script) -> None:
    for call in WRONG:
        s.restart(" ".join(map(str, call)))
        s.start()
        s.cuStreamCreate("&s1", 1)
        s.cuMemAlloc("&a", 2 << 20)
        s.cuMemAlloc("&small", 64)
        s.cuMemHostAlloc("&host", 4096, 1)
        s.buffer("b", 8192)
        s.call(*call)
        s.cuStreamSynchronize("$s1")


@scenario("two-dimensional copies: pitches, kinds of memory, empty")
def copies_2d(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuMemAlloc("&a", 4096)
    s.cuMemAlloc("&c", 4096)
    s.buffer("b")

    def copy(**fields: object) -> None:
        base = {
            "srcMemoryType": 2, "srcDevice": "$a", "srcPitch": 64, "dstMemoryType": 2, "dstDevice": "$c",
            "dstPitch": 64, "WidthInBytes": 16, "Height": 4,
        }  # fmt: skip
        s.cuMemcpy2DAsync({"CUDA_MEMCPY2D": {**base, **fields}}, "$s1")

    copy()
    copy(WidthInBytes=0)
    copy(Height=0)
    copy(srcPitch=8)
    copy(dstPitch=8)
    copy(dstPitch=0)
    copy(srcXInBytes=60)
    copy(srcMemoryType=1, srcHost="$b")
    copy(dstMemoryType=1, dstHost="$b")
    copy(srcMemoryType=4, dstMemoryType=4)
    copy(srcMemoryType=4, srcDevice="$b")
    copy(srcMemoryType=0)
    copy(srcMemoryType=7)
    copy(dstDevice=0)
    copy(Height=1 << 20)
    s.cuMemcpy2DAsync(None, "$s1")
    s.cuStreamSynchronize("$s1")


ATTRIBUTES = (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 17)


@scenario("what the driver tells of an address, of each kind of memory")
def pointer_attributes(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.buffer("b")
    s.buffer("registered")
    s.cuMemAlloc("&a", 4096)
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuMemAllocManaged("&managed", 4096, 1)
    s.cuDeviceGetDefaultMemPool("&default_pool", 0)
    s.cuMemAllocAsync("&async", 4096, "$s1")
    s.cuMemHostRegister("$registered", 4096, 0)
    for name in ("a", "a+16", "host", "host+16", "managed", "async", "async+16", "registered", "b"):
        for attribute in ATTRIBUTES:
            s.cuPointerGetAttribute(f"&{name.replace('+', '_')}_{attribute}", attribute, f"${name}")
    for attribute in ATTRIBUTES:
        s.cuPointerGetAttribute("&null", attribute, None)
        s.cuPointerGetAttribute("&low", attribute, 4096)
    s.cuPointerGetAttribute("&value", 0, "$a")
    s.cuPointerGetAttribute("&value", 99, "$a")
    s.cuPointerGetAttribute(None, 2, "$a")
    s.cuMemFreeAsync("$async", "$s1")
    s.cuPointerGetAttribute("&freed", 2, "$async")
    s.cuStreamSynchronize("$s1")
    s.cuPointerGetAttribute("&freed", 2, "$async")


@scenario("ranges, flags and device addresses of host memory; registering twice")
def host_memory(s: Script) -> None:
    s.start()
    s.buffer("b", 8192)
    s.cuMemAlloc("&a", 1000)
    s.cuMemHostAlloc("&host", 1000, 0)
    s.cuMemGetAddressRange("&base", "&size", "$a+999")
    s.cuMemGetAddressRange("&base", "&size", "$a")
    s.cuMemGetAddressRange("&base", "&size", "$host+10")
    s.cuMemGetAddressRange("&base", "&size", "$b")
    s.cuMemGetAddressRange(None, None, "$a")
    s.cuMemHostGetDevicePointer("&mapped", "$host", 0)
    s.cuMemHostGetDevicePointer("&mapped", "$host+16", 0)
    s.cuMemHostGetDevicePointer("&mapped", "$host", 1)
    s.cuMemHostGetDevicePointer("&mapped", "$a", 0)
    s.cuMemHostGetDevicePointer("&mapped", "$b", 0)
    s.cuMemHostGetFlags("&flags", "$host")
    s.cuMemHostGetFlags("&flags", "$words")
    s.cuMemHostGetFlags("&flags", "$b")
    s.cuMemHostGetFlags("&flags", "$a")
    s.cuMemHostRegister("$b", 4096, 0)
    s.cuMemHostRegister("$b", 4096, 0)
    s.cuMemHostRegister("$b", 8192, 0)
    s.cuMemHostGetFlags("&flags", "$b")
    s.cuMemHostGetDevicePointer("&mapped", "$b", 0)
    s.cuMemHostUnregister("$b")
    s.cuMemHostUnregister("$b")
    s.cuMemHostUnregister("$host")
    s.cuMemHostRegister("$b", 0, 0)
    s.cuMemHostRegister(None, 4096, 0)
    s.cuMemHostRegister("$b+16", 100, 0)
    s.cuMemHostUnregister("$b+16")
    s.cuMemHostRegister("$b", 4096, 64)
    s.cuMemHostRegister("$host", 1000, 0)


@scenario("free memory falls and rises with large allocations")
def memory_info(s: Script) -> None:
    s.start()
    s.cuMemGetInfo("&free0", "&total", any=["out"])
    s.cuMemAlloc("&a", 1 << 30)
    s.cuMemGetInfo("&free1", "&_")
    s.cuMemFree("$a")
    s.cuMemGetInfo("&free2", "&_")


@scenario("the size of an allocation is what was asked, not what was set aside")
def allocation_granularity(s: Script) -> None:
    s.start()
    s.buffer("b")
    for nbytes in (1, 511, 513):
        s.cuMemAlloc("&a", nbytes)
        s.cuMemGetAddressRange("&base", "&size", "$a")
        s.cuPointerGetAttribute("&size", 12, "$a")
        s.cuMemcpyDtoH("$b", "$a", nbytes + 1)
        s.cuMemcpyDtoH("$b", "$a", 512)
        s.cuMemsetD8("$a", 1, nbytes + 1)
