# ruff: noqa: E731, F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

import pytest


@pytest.mark.parametrize("bits", [32, 64])
def test_streams_wait_for_words(inside, bits):
    def body():
        start()
        bits = int(os.environ["BITS"])
        wait, write = getattr(cu, f"cuStreamWaitValue{bits}"), getattr(cu, f"cuStreamWriteValue{bits}")
        number = ctypes.c_uint32 if bits == 32 else ctypes.c_uint64
        a, b = stream(), stream()
        host = int(ok(cu.cuMemAllocHost(64)))
        word = number.from_address(host)
        device = int(ok(cu.cuMemAlloc(64)))
        ok(cu.cuMemsetD8(device, 0, 64)), ok(cu.cuCtxSynchronize())
        top = 1 << (bits - 1)
        last = 2**bits - 1
        rounds = (
            (0, 5, 4, 6),
            (1, 5, 6, 5),
            (2, 6, 8, 4),
            (3, top, last, 0),
            (0, last, last - 1, 3),
        )  # the last: cyclic
        for flags, wanted, no, yes in rounds:
            word.value = no
            ok(wait(a, host, wanted, flags))
            time.sleep(0.002)
            assert code(cu.cuStreamQuery(a)) == 600, flags
            word.value = yes
            ok(cu.cuStreamSynchronize(a))
        ok(wait(b, device, top + 3, 1))
        ok(write(a, device, top + 3, 0))
        ok(cu.cuStreamSynchronize(b))
        assert int.from_bytes(sim.read(device, bits // 8), "little") == top + 3
        assert code(write(a, device + 1, 0, 0)) == code(wait(a, device + 1, 0, 0)) == 1
        assert code(write(a, device + 64, 0, 0)) == 1

    inside(body, env={"BITS": str(bits)})


def test_a_context_waits_for_an_event(inside):
    def body():
        context = start()
        a, b, e = stream(), stream(), event()
        x = ok(cu.cuMemAlloc(16))
        sim.stall(int(a))
        ok(cu.cuMemsetD8Async(x, 1, 16, a)), ok(cu.cuEventRecord(e, a))
        ok(cu.cuMemsetD8Async(x, 2, 16, b)), ok(cu.cuStreamSynchronize(b))
        ok(cu.cuCtxWaitEvent(context, e))
        later = stream()
        for s in (b, later):
            ok(cu.cuMemsetD8Async(x, 3, 16, s))
        time.sleep(0.005)
        assert code(cu.cuStreamQuery(b)) == code(cu.cuStreamQuery(later)) == 600
        assert sim.read(int(x), 1) == b"\2"
        sim.resume(int(a))
        ok(cu.cuCtxSynchronize())
        assert sim.read(int(x), 1) == b"\3"
        whole = event()
        sim.stall(int(b))
        ok(cu.cuMemsetD8Async(x, 4, 16, b))
        ok(cu.cuCtxRecordEvent(context, whole))
        assert code(cu.cuEventQuery(whole)) == 600
        sim.resume(int(b))
        ok(cu.cuEventSynchronize(whole))
        ok(cu.cuStreamBeginCapture(a, cu.CUstreamCaptureMode(2)))
        assert code(cu.cuCtxWaitEvent(context, whole)) == 900
        assert code(cu.cuStreamEndCapture(a)) == 901

    inside(body)


def test_host_memory_and_pitches(inside):
    def body():
        start()
        block = np.zeros(8192, np.uint8)
        address = (block.ctypes.data + 4095) & ~4095
        ok(cu.cuMemHostRegister(address, 4096, 0))
        assert code(cu.cuMemHostRegister(address, 4096, 0)) == 712
        assert int(ok(cu.cuMemHostGetDevicePointer(address, 0))) == address
        assert code(cu.cuMemHostRegister(address + 4096, 4096, 64)) == 1
        ok(cu.cuMemHostUnregister(address))
        assert code(cu.cuMemHostUnregister(address)) == 713
        assert code(cu.cuMemHostGetDevicePointer(address, 0)) == 1
        base, pitch = ok(cu.cuMemAllocPitch(100, 3, 4))
        assert pitch == 512 and int(base) % 512 == 0
        assert code(cu.cuMemAllocPitch(100, 3, 3)) == 1
        assert code(cu.cuMemAllocPitch(0, 3, 4)) == 1

    inside(body)


def test_pools_tell_and_grant(inside):
    def body():
        start(1), start(0)
        s = stream()
        place = cu.CUmemLocation()
        place.type, place.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
        pinned = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        pool = ok(cu.cuMemGetDefaultMemPool(place, pinned))
        assert int(pool) == int(ok(cu.cuDeviceGetDefaultMemPool(0))) == int(ok(cu.cuMemGetMemPool(place, pinned)))
        names = cu.CUmemPool_attribute
        ask = lambda name: int(ok(cu.cuMemPoolGetAttribute(pool, getattr(names, f"CU_MEMPOOL_ATTR_{name}"))))
        put = lambda name, value: code(
            cu.cuMemPoolSetAttribute(pool, getattr(names, f"CU_MEMPOOL_ATTR_{name}"), cu.cuuint64_t(value))
        )
        assert put("RELEASE_THRESHOLD", 1 << 40) == 0 and ask("RELEASE_THRESHOLD") == 1 << 40
        a, b = ok(cu.cuMemAllocAsync(1024, s)), ok(cu.cuMemAllocAsync(2048, s))
        ok(cu.cuMemFreeAsync(a, s)), ok(cu.cuStreamSynchronize(s))
        usage = lambda: [ask(f"{k}_MEM_{w}") for k in ("USED", "RESERVED") for w in ("CURRENT", "HIGH")]
        chunk = 32 << 20
        assert usage() == [2048, 3072, chunk, chunk]
        assert put("USED_MEM_HIGH", 7) == put("USED_MEM_CURRENT", 0) == 1
        assert put("USED_MEM_HIGH", 0) == 0
        assert usage() == [2048, 2048, chunk, chunk]
        large = ok(cu.cuMemAllocAsync(3 * chunk, s))
        ok(cu.cuMemFreeAsync(large, s)), ok(cu.cuStreamSynchronize(s))
        assert usage()[2] > chunk
        ok(cu.cuMemPoolTrimTo(pool, 0)), put("RESERVED_MEM_HIGH", 0)
        assert usage()[2:] == [chunk, chunk]
        wanted = cu.CUmemAccessDesc()
        wanted.location.type, wanted.location.id = place.type, 1
        place.id = 1
        for flags in (cu.CUmemAccess_flags(3), cu.CUmemAccess_flags(0)):
            wanted.flags = flags
            ok(cu.cuMemPoolSetAccess(pool, [wanted], 1))
            assert ok(cu.cuMemPoolGetAccess(pool, place)) == flags
        ok(cu.cuMemFreeAsync(b, s))

    inside(body, devices=2)
