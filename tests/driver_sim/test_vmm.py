# ruff: noqa: E731, F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE and of SETUP here.
from __future__ import annotations

import functools

import pytest

SETUP = """
MIB = 1 << 20
G = 2 * MIB
NONE, READ, READWRITE = (cu.CUmemAccess_flags(v) for v in (0, 1, 3))

def props(device=0):
    p = cu.CUmemAllocationProp()
    p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.location.id = device
    return p

def reserve(nbytes, wanted=0, alignment=0):
    return int(ok(cu.cuMemAddressReserve(nbytes, alignment, wanted, 0)))

def create(nbytes=G, device=0):
    return ok(cu.cuMemCreate(nbytes, props(device), 0))

def place(address, memory, nbytes=G):
    ok(cu.cuMemMap(address, nbytes, 0, memory, 0))

def access(address, nbytes, *rights):
    wanted = []
    for device, flags in rights:
        d = cu.CUmemAccessDesc()
        d.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        d.location.id = device
        d.flags = flags
        wanted.append(d)
    return cu.cuMemSetAccess(address, nbytes, wanted, len(wanted))

def last_violation():
    return sim.trace(event="violation")[-1]["note"]
"""


@pytest.fixture
def inside(inside):
    return functools.partial(inside, setup=SETUP)


def test_a_mapping_is_memory(inside):
    def body():
        start()
        free = ok(cu.cuMemGetInfo())[0]
        assert ok(cu.cuMemGetAllocationGranularity(props(), cu.CUmemAllocationGranularity_flags(0))) == G
        a = reserve(2 * G)
        memory = create()
        assert free - ok(cu.cuMemGetInfo())[0] == G
        place(a, memory)
        ok(access(a, G, (0, READWRITE)))
        _, function = kernels()
        s = stream()
        ok(fill(function("fill"), s, a, 3.0, 1000))
        back = np.zeros(1000, np.float32)
        ok(cu.cuMemcpyDtoHAsync(back.ctypes.data, a, back.nbytes, s))
        assert (back == 3).all()
        ok(cu.cuMemUnmap(a, G))
        ok(cu.cuMemRelease(memory))
        ok(cu.cuMemAddressFree(a, 2 * G))
        assert ok(cu.cuMemGetInfo())[0] == free
        assert sim.live()["physical"] == sim.live()["reservations"] == sim.violations == 0

    inside(body)


def test_neighbors_serve_as_one(inside):
    def body():
        start()
        a = reserve(3 * G)
        for i in range(3):
            place(a + i * G, create())
        ok(access(a, 3 * G, (0, READWRITE)))
        n = 3 * G // 4
        _, function = kernels()
        s = stream()
        ok(fill(function("fill"), s, a, 7.0, n))
        ok(cu.cuStreamSynchronize(s))
        assert (floats(a, n) == 7).all()
        ok(cu.cuMemsetD32Async(a + G - 4, 0, 2, s)), ok(cu.cuStreamSynchronize(s))
        assert code(cu.cuMemsetD32Async(a, 0, n + 1, s)) == 1
        ok(cu.cuMemUnmap(a + G, G))
        assert code(cu.cuMemsetD32Async(a, 0, n, s)) == 1
        ok(fill(function("fill"), s, a, 8.0, n))  # a kernel finds the hole by itself
        assert code(cu.cuStreamSynchronize(s)) == 700

    inside(body)


def test_the_same_memory_at_two_addresses(inside):
    def body():
        start()
        a, b = reserve(G), reserve(G)
        memory = create()
        place(a, memory), place(b, memory)
        ok(access(a, G, (0, READWRITE))), ok(access(b, G, (0, READWRITE)))
        ok(cu.cuMemsetD8(a, 5, G)), ok(cu.cuCtxSynchronize())
        assert sim.read(b + 12345, 1) == b"\5"
        ok(cu.cuMemUnmap(a, G))
        place(a, memory)  # the bytes stay with the memory
        assert sim.read(a + 12345, 1) == b"\5"

    inside(body)


def test_the_last_owner_frees_the_memory(inside):
    def body():
        start()
        free = lambda: ok(cu.cuMemGetInfo())[0]
        all_of_it = free()
        a = reserve(G)
        memory = create()
        place(a, memory)
        ok(cu.cuMemRelease(memory))  # the mapping keeps it
        assert free() == all_of_it - G
        assert code(cu.cuMemRelease(memory)) == 1 and "released" in last_violation()
        assert code(cu.cuMemMap(a, G, 0, memory, 0)) == 1
        assert int(ok(cu.cuMemRetainAllocationHandle(a + 4096))) == int(memory)
        assert ok(cu.cuMemGetAllocationPropertiesFromHandle(memory)).location.id == 0
        ok(cu.cuMemUnmap(a, G))
        assert free() == all_of_it - G  # the handle keeps it
        assert code(cu.cuMemRetainAllocationHandle(a)) == 1
        ok(cu.cuMemRelease(memory))
        assert free() == all_of_it

    inside(body)


def test_access_is_per_device(inside):
    def body():
        c0, c1 = start(0), start(1)
        streams, fills = [], []
        for c in (c0, c1):
            ok(cu.cuCtxSetCurrent(c))
            streams.append(stream())
            fills.append(kernels()[1]("fill"))
        a = reserve(G)
        place(a, create())
        host = np.zeros(4, np.float32)
        flags = lambda device: int(ok(cu.cuMemGetAccess(location(device), a)))

        def location(device):
            where = cu.CUmemLocation()
            where.type, where.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
            return where

        assert code(cu.cuMemcpyHtoD(a, host.ctypes.data, 16)) == 1
        assert "no device has access" in last_violation()
        ok(access(a, G, (0, READWRITE)))
        assert (flags(0), flags(1)) == (3, 0)
        ok(cu.cuMemcpyHtoD(a, host.ctypes.data, 16))
        ok(access(a, G, (0, READWRITE), (1, READWRITE)))
        assert (flags(0), flags(1)) == (3, 3)
        ok(fill(fills[1], streams[1], a, 2.0, 4)), ok(cu.cuStreamSynchronize(streams[1]))
        assert (floats(a, 4) == 2).all()
        ok(access(a, G, (1, NONE)))
        ok(fill(fills[1], streams[1], a, 3.0, 4))
        assert code(cu.cuStreamSynchronize(streams[1])) == 700
        assert "no access to mapped memory of device 0" in last_violation()

    def read_only():
        start()
        s, function = stream(), kernels()[1]
        a, b = reserve(G), array([0] * 4)
        place(a, create())
        ok(access(a, G, (0, READ)))
        ok(copy(function("copy"), s, b, a, 4)), ok(cu.cuStreamSynchronize(s))
        ok(fill(function("fill"), s, a, 3.0, 4))
        assert code(cu.cuStreamSynchronize(s)) == 700

    inside(body, devices=2)
    inside(read_only)


def test_access_needs_a_link(inside):
    def body():
        start()
        a = reserve(G)
        place(a, create())
        assert code(access(a, G, (1, READWRITE))) == 101
        b = reserve(G)
        place(b, create(device=1))
        ok(access(b, G, (0, READWRITE)))

    inside(body, devices=2, peers="0100")


def test_misuse(inside):
    def body():
        start()
        assert code(cu.cuMemCreate(G + 4096, props(), 0)) == 1
        assert code(cu.cuMemCreate(0, props(), 0)) == 1
        assert code(cu.cuMemCreate(G, props(7), 0)) == 101
        assert code(cu.cuMemCreate(32 * MIB, props(), 0)) == 2
        assert code(cu.cuMemAddressReserve(G, 3, 0, 0)) == 1
        assert code(cu.cuMemAddressReserve(100, 0, 0, 0)) == 1
        assert code(cu.cuMemAddressReserve(1 << 50, 0, 0, 0)) == 2
        a = reserve(4 * G, alignment=8 * G)
        assert a % (8 * G) == 0
        b, c = reserve(G), reserve(G)
        ok(cu.cuMemAddressFree(b, G)), ok(cu.cuMemAddressFree(c, G))
        assert reserve(G, wanted=c) == c and reserve(G, wanted=c) == b
        assert reserve(G, wanted=a) != a  # taken: only a hint
        memory, other = create(2 * G), create(G)
        assert code(cu.cuMemMap(a, 2 * G, G, memory, 0)) == 801
        assert code(cu.cuMemMap(a, 3 * G, 0, memory, 0)) == code(cu.cuMemMap(a, G, 0, memory, 0)) == 801
        assert code(cu.cuMemMap(a + 4096, 2 * G, 0, memory, 0)) == 1
        assert code(cu.cuMemMap(a + 3 * G, 2 * G, 0, memory, 0)) == 1 and "not reserved" in last_violation()
        place(a, memory, 2 * G)
        assert code(cu.cuMemMap(a + G, G, 0, other, 0)) == 1 and "mapped already" in last_violation()
        assert code(cu.cuMemAddressFree(a, 4 * G)) == 1 and "still holds mappings" in last_violation()
        assert code(cu.cuMemAddressFree(a, G)) == 1 and "no reservation" in last_violation()
        assert code(access(a, G, (0, READWRITE))) == 1
        assert code(cu.cuMemUnmap(a, G)) == 1 and "whole mappings" in last_violation()
        assert code(cu.cuMemFree(a)) == 1 and "wrong free for mapped" in last_violation()
        ok(cu.cuMemUnmap(a, 4 * G))
        ok(cu.cuMemUnmap(a, 2 * G))  # nothing there is no error

    inside(body, memory=16 << 20)


def test_unmapping_waits_for_nothing(inside):
    def body():
        start()
        s = stream()
        a = reserve(G)
        place(a, create())
        ok(access(a, G, (0, READWRITE)))
        sim.stall(int(s))
        ok(cu.cuMemsetD8Async(a, 1, G, s))
        ok(cu.cuMemUnmap(a, G))
        sim.resume(int(s))
        assert code(cu.cuStreamSynchronize(s)) == 700
        assert "was unmapped" in last_violation()

    inside(body)


def test_what_a_pointer_tells(inside):
    def body():
        start(0), start(1)
        a = reserve(4 * G)
        memory = create(device=0)
        place(a + G, memory)
        attribute = cu.CUpointer_attribute
        ask = lambda name, address: cu.cuPointerGetAttribute(
            getattr(attribute, f"CU_POINTER_ATTRIBUTE_{name}"), address
        )
        tell = lambda name: ok(ask(name, a + G + 100))
        assert code(ask("DEVICE_ORDINAL", a)) == 1
        assert tell("DEVICE_ORDINAL") == 0
        assert int(tell("MEMORY_TYPE")) == 2
        assert int(tell("MAPPED")) == 1
        assert int(tell("MAPPING_BASE_ADDR")) == a + G and int(tell("MAPPING_SIZE")) == G
        assert int(tell("IS_MANAGED")) == 0
        block = tell("MEMORY_BLOCK_ID")
        place(a + 2 * G, memory)
        assert ok(ask("MEMORY_BLOCK_ID", a + 2 * G)) == block
        ok(access(a + G, G, (1, READ)))
        kinds = [attribute.CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, attribute.CU_POINTER_ATTRIBUTE_MAPPED]
        assert [int(v) for v in ok(cu.cuPointerGetAttributes(2, kinds, a + G))] == [1, 1]
        assert [int(v) for v in ok(cu.cuPointerGetAttributes(2, kinds, a))] == [0, 0]

    inside(body, devices=2)
