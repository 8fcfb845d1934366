# ruff: noqa: E731, F821
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

SETUP = """
Advise, Range, Kind = cu.CUmem_advise, cu.CUmem_range_attribute, cu.CUmemLocationType
KIB = 1024

def location(kind, number=0):
    where = cu.CUmemLocation()
    where.type, where.id = kind, number
    return where

def device(number):
    return location(Kind.CU_MEM_LOCATION_TYPE_DEVICE, number)

HOST = location(Kind.CU_MEM_LOCATION_TYPE_HOST)

def managed(nbytes):
    return int(ok(cu.cuMemAllocManaged(nbytes, 1)))

def ask(name, address, nbytes, size=4):
    return ok(cu.cuMemRangeGetAttribute(size, getattr(Range, f"CU_MEM_RANGE_ATTRIBUTE_{name}"), address, nbytes))

def advise(name, address, nbytes, where):
    return cu.cuMemAdvise(address, nbytes, getattr(Advise, f"CU_MEM_ADVISE_{name}"), where)
"""


def test_advice_is_kept_by_range(inside):
    def body():
        start()
        a = managed(64 * KIB)
        preferred = lambda begin, nbytes: ask("PREFERRED_LOCATION", a + begin * KIB, nbytes * KIB)
        assert preferred(0, 64) == -2
        ok(advise("SET_PREFERRED_LOCATION", a, 64 * KIB, device(1)))
        ok(advise("SET_PREFERRED_LOCATION", a + 16 * KIB, 16 * KIB, HOST))
        assert [preferred(*r) for r in ((0, 16), (16, 16), (32, 32), (0, 64), (20, 4))] == [1, -1, 1, -2, -1]
        assert ask("PREFERRED_LOCATION_TYPE", a, KIB) == int(Kind.CU_MEM_LOCATION_TYPE_DEVICE)
        ok(advise("UNSET_PREFERRED_LOCATION", a, 64 * KIB, device(0)))
        assert preferred(0, 64) == -2
        ok(advise("SET_READ_MOSTLY", a, 32 * KIB, device(0)))
        assert (ask("READ_MOSTLY", a, 32 * KIB), ask("READ_MOSTLY", a, 33 * KIB)) == (1, 0)
        ok(advise("SET_ACCESSED_BY", a, 64 * KIB, device(0)))
        ok(advise("SET_ACCESSED_BY", a, 32 * KIB, device(1)))
        assert list(ask("ACCESSED_BY", a, KIB, 12)) == [0, 1, -2]
        assert list(ask("ACCESSED_BY", a, 64 * KIB, 12)) == [0, -2, -2]

    inside(body, setup=SETUP, devices=2)


def test_prefetches_are_stream_work(inside):
    def body():
        start()
        s = stream()
        a = managed(64 * KIB)
        assert ask("LAST_PREFETCH_LOCATION", a, 64 * KIB) == -2
        ok(cu.cuMemPrefetchAsync(a, 64 * KIB, device(0), 0, s))
        assert ask("LAST_PREFETCH_LOCATION", a, 64 * KIB) == 0
        ok(cu.cuMemPrefetchAsync(a, 32 * KIB, HOST, 0, s))
        assert ask("LAST_PREFETCH_LOCATION", a, 32 * KIB) == -1
        ok(cu.cuStreamSynchronize(s))
        assert [r["nbytes"] for r in sim.trace(event="exec", name="prefetch")] == [64 * KIB, 32 * KIB]

    inside(body, setup=SETUP)


def test_only_managed_memory_takes_advice(inside):
    def body():
        start()
        a, b = managed(KIB), ok(cu.cuMemAlloc(KIB))
        assert code(advise("SET_READ_MOSTLY", b, KIB, device(0))) == 1
        assert code(advise("SET_READ_MOSTLY", a, 2 * KIB, device(0))) == 1
        assert code(advise("SET_PREFERRED_LOCATION", a, KIB, device(5))) == 101
        assert code(cu.cuMemPrefetchAsync(b, KIB, device(0), 0, stream())) == 1
        assert code(cu.cuMemPrefetchAsync(a, 0, device(0), 0, stream())) == 1

    inside(body, setup=SETUP)
