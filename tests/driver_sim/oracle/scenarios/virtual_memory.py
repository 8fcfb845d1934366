"""Virtual memory management: reserve, create, map, access, and the ways to get them wrong."""

from __future__ import annotations

from driver_sim.oracle.script import Script, scenario

CHUNK = 2 << 20
PROP = {"CUmemAllocationProp": {"allocType": 1, "type": 1, "id": 0}}
HERE = {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": 3}}


@scenario("granularity and properties that are wrong")
def vmm_granularity(s: Script) -> None:
    s.start()
    for option in (0, 1, 2):
        s.cuMemGetAllocationGranularity("&granularity", PROP, option)
    for change in ({"allocType": 0}, {"type": 0}, {"id": 99}, {"handleTypes": 99}):
        prop = {"CUmemAllocationProp": {**PROP["CUmemAllocationProp"], **change}}
        s.cuMemGetAllocationGranularity("&granularity", prop, 0)
        s.cuMemCreate("&h", CHUNK, prop, 0)
    s.cuMemCreate("&h", 0, PROP, 0)
    s.cuMemCreate("&h", 4096, PROP, 0)
    s.cuMemCreate("&h", CHUNK, PROP, 1)
    s.cuMemCreate("&h", 1 << 50, PROP, 0)
    s.cuMemAddressReserve("&r", 0, 0, None, 0)
    s.cuMemAddressReserve("&r", 4096, 0, None, 0)
    s.cuMemAddressReserve("&r", CHUNK, 3, None, 0)
    s.cuMemAddressReserve("&r", CHUNK, 0, None, 1)
    s.cuMemAddressReserve("&r", CHUNK, CHUNK, None, 0)


@scenario("from a reservation to bytes and back")
def vmm_life(s: Script) -> None:
    s.start()
    s.buffer("b")
    s.cuStreamCreate("&s1", 1)
    s.cuMemAddressReserve("&r", 4 * CHUNK, 0, None, 0)
    s.cuPointerGetAttribute("&kind", 2, "$r")
    s.cuMemsetD8Async("$r", 1, 64, "$s1")
    s.cuMemCreate("&h", CHUNK, PROP, 0)
    s.cuMemMap("$r", CHUNK, 0, "$h", 0)
    s.cuPointerGetAttribute("&kind", 2, "$r")
    s.cuMemsetD8Async("$r", 1, 64, "$s1")
    s.cuMemGetAccess("&access", {"CUmemLocation": {"type": 1, "id": 0}}, "$r")
    s.cuMemSetAccess("$r", CHUNK, HERE, 1)
    s.cuMemGetAccess("&access", {"CUmemLocation": {"type": 1, "id": 0}}, "$r")
    s.cuMemsetD8Async("$r", 7, 64, "$s1")
    s.cuMemcpyDtoHAsync("$b", "$r", 64, "$s1")
    s.cuStreamSynchronize("$s1")
    s.read("$b", kind="u8")
    s.cuMemGetAddressRange("&base", "&size", "$r+16")
    s.cuMemFree("$r")
    s.cuMemRelease("$h")
    s.cuMemsetD8Async("$r", 7, 64, "$s1")
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s1")
    s.cuMemUnmap("$r", CHUNK, gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s1")
    s.cuMemAddressFree("$r", 4 * CHUNK)


@scenario("mapping twice, beyond the reservation, unaligned; freeing what is mapped; releasing twice")
def vmm_misuse(s: Script) -> None:
    s.start()
    s.cuMemAddressReserve("&r", 2 * CHUNK, 0, None, 0)
    s.cuMemCreate("&h", CHUNK, PROP, 0)
    s.cuMemMap("$r", CHUNK, 0, "$h", 1)
    s.cuMemMap("$r", CHUNK, CHUNK, "$h", 0)
    s.cuMemMap("$r+4096", CHUNK, 0, "$h", 0)
    s.cuMemMap("$r", 2 * CHUNK, 0, "$h", 0)
    s.cuMemMap("$r", 4096, 0, "$h", 0)
    s.cuMemMap("$r", CHUNK, 0, None, 0)
    s.cuMemMap(1 << 40, CHUNK, 0, "$h", 0)
    s.cuMemSetAccess("$r", CHUNK, HERE, 1)
    s.cuMemMap("$r", CHUNK, 0, "$h", 0)
    s.cuMemMap("$r", CHUNK, 0, "$h", 0)
    s.cuMemSetAccess("$r", 2 * CHUNK, HERE, 1)
    s.cuMemSetAccess("$r", 4096, HERE, 1)
    s.cuMemSetAccess("$r", CHUNK, {"CUmemAccessDesc": {"type": 1, "id": 99, "flags": 3}}, 1)
    s.cuMemSetAccess("$r", CHUNK, {"CUmemAccessDesc": {"type": 1, "id": 0, "flags": 2}}, 1)
    s.cuMemSetAccess("$r", CHUNK, HERE, 1)
    s.cuMemAddressFree("$r", 2 * CHUNK)
    s.cuMemUnmap("$r", 4096)
    s.cuMemUnmap("$r", 2 * CHUNK)
    s.cuMemUnmap("$r", CHUNK)
    s.cuMemUnmap("$r", CHUNK)
    s.cuMemRelease("$h")
    s.cuMemAddressFree("$r", CHUNK)
    s.cuMemAddressFree("$r+4096", CHUNK)
    s.cuMemAddressFree("$r", 2 * CHUNK)


@scenario("the same memory under two addresses; work without access fails")
def vmm_alias(s: Script) -> None:
    s.start()
    s.module("fill")
    s.buffer("b")
    s.cuStreamCreate("&s1", 1)
    s.cuMemAddressReserve("&r", 2 * CHUNK, 0, None, 0)
    s.cuMemCreate("&h", CHUNK, PROP, 0)
    s.cuMemMap("$r", CHUNK, 0, "$h", 0)
    s.cuMemMap(f"$r+{CHUNK}", CHUNK, 0, "$h", 0)
    s.cuMemSetAccess("$r", 2 * CHUNK, HERE, 1)
    s.fill("$s1", "$r", 1.5)
    s.cuMemcpyDtoHAsync("$b", f"$r+{CHUNK}", 64, "$s1")
    s.cuStreamSynchronize("$s1")
    s.read("$b", kind="f32")
    s.cuMemUnmap("$r", CHUNK)
    s.fill("$s1", "$r", 1.5)
    s.cuStreamSynchronize("$s1")
