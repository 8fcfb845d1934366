# ruff: noqa: F821, PT018, RUF059
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations


def test_address_tells_device(inside):
    def body():
        start(0)
        a = ok(cu.cuMemAlloc(100))
        start(1)
        b = ok(cu.cuMemAlloc(100))
        attribute = cu.CUpointer_attribute
        for address, device in ((a, 0), (b, 1)):
            assert ok(cu.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)) == device
            assert int(ok(cu.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))) == 2
        host = np.zeros(4)
        assert code(cu.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host.ctypes.data)) == 1

    inside(body, devices=2)


def test_host_code_cannot_follow_a_device_address(inside):
    def body():
        start()
        ctypes.string_at(int(ok(cu.cuMemAlloc(100))), 1)

    assert inside(body, check=False).returncode == -11
    inside(body, host_readable=True)


def test_misuse_is_an_error_and_is_noted(inside):
    def body():
        start()
        s = stream()
        a = ok(cu.cuMemAlloc(100))
        host = np.zeros(200, np.uint8)
        assert code(cu.cuMemcpyHtoD(a, host.ctypes.data, 101)) == 1
        assert "runs past" in sim.trace(event="violation")[-1]["note"]
        assert code(cu.cuMemFree(int(a) + 4)) == 1
        ok(cu.cuMemFree(a))
        assert code(cu.cuMemFree(a)) == 1
        assert sim.trace(event="violation")[-1]["note"] == "double free"
        assert code(cu.cuMemcpyDtoH(host.ctypes.data, a, 4)) == 1
        assert sim.trace(event="violation")[-1]["note"] == "use after free"
        p = ok(cu.cuMemAllocHost(64))
        assert code(cu.cuMemFree(int(p))) == 1
        ok(cu.cuMemFreeHost(p))
        assert code(cu.cuMemFreeHost(p)) == 1
        assert code(cu.cuMemcpyHtoDAsync(ok(cu.cuMemAlloc(64)), p, 64, s)) == 1
        assert code(cu.cuMemAlloc(0)) == 1

    inside(body)


def test_memory_runs_out(inside):
    def body():
        start()
        free, total = ok(cu.cuMemGetInfo())
        assert total == 1 << 20
        a = ok(cu.cuMemAlloc(700 << 10))
        assert code(cu.cuMemAlloc(400 << 10)) == 2
        ok(cu.cuMemFree(a))
        ok(cu.cuMemAlloc(1 << 20))

    inside(body, memory=1 << 20)


def test_pool_reuses_along_stream_order(inside):
    def body():
        start()
        a, b = stream(), stream()
        pool = ok(cu.cuDeviceGetDefaultMemPool(0))
        used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        reserved = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(1 << 40)))
        sim.stall(int(a))
        x = ok(cu.cuMemAllocAsync(1024, a))
        ok(cu.cuMemFreeAsync(x, a))
        y = ok(cu.cuMemAllocAsync(1024, a))
        assert int(x) == int(y)  # same stream: at once
        ok(cu.cuMemFreeAsync(y, a))
        z = ok(cu.cuMemAllocAsync(1024, b))
        assert int(z) != int(x)  # other stream: not before the free is done
        sim.resume(int(a))
        ok(cu.cuStreamSynchronize(a))
        w = ok(cu.cuMemAllocAsync(1024, b))
        assert int(w) == int(x)
        assert int(ok(cu.cuMemPoolGetAttribute(pool, used))) == 2048
        ok(cu.cuMemFreeAsync(w, b)), ok(cu.cuMemFreeAsync(z, b)), ok(cu.cuStreamSynchronize(b))
        assert int(ok(cu.cuMemPoolGetAttribute(pool, reserved))) == 32 << 20  # whole chunks
        ok(cu.cuMemPoolTrimTo(pool, 0))
        assert int(ok(cu.cuMemPoolGetAttribute(pool, reserved))) == 0

    inside(body)


def test_pool_waits_rather_than_fails(inside):
    def body():
        start()
        a, b = stream(), stream()
        x = ok(cu.cuMemAllocAsync(700 << 10, a))
        sim.stall(int(a))
        ok(cu.cuMemsetD8Async(x, 1, 700 << 10, a))
        ok(cu.cuMemFreeAsync(x, a))
        y = ok(cu.cuMemAllocAsync(700 << 10, b))  # only a dependency makes room
        ok(cu.cuMemsetD8Async(y, 2, 700 << 10, b))
        assert int(x) == int(y) and code(cu.cuStreamQuery(b)) == 600
        sim.resume(int(a))
        ok(cu.cuStreamSynchronize(b))
        assert sim.read(int(y), 1) == b"\2"

    inside(body, memory=1 << 20)


def test_frees_that_wait(inside):
    def body():
        context = start()
        s = stream()
        a, b = ok(cu.cuMemAlloc(64)), ok(cu.cuMemAlloc(64))
        sim.stall(int(s))
        ok(cu.cuMemsetD8Async(a, 1, 64, s))
        done = threading.Event()

        def free():
            ok(cu.cuCtxSetCurrent(context))
            ok(cu.cuMemFree(b))
            done.set()

        threading.Thread(target=free).start()
        assert not done.wait(0.05)
        sim.resume(int(s))
        assert done.wait(10)

    inside(body)


def test_peers_are_directional(inside):
    def body():
        c0, c1 = start(0), start(1)
        _, function = kernels()
        s1 = stream()
        y = array([0] * 8)
        ok(cu.cuCtxSetCurrent(c0))
        x = array([3] * 8)
        assert code(cu.cuCtxEnablePeerAccess(c1, 0)) == 217  # 0 may not reach 1
        ok(cu.cuCtxSetCurrent(c1))
        ok(cu.cuMemcpyPeerAsync(y, c1, x, c0, 32, s1))  # works without any access
        ok(cu.cuStreamSynchronize(s1))
        assert (floats(y, 8) == 3).all()
        ok(cu.cuCtxEnablePeerAccess(c0, 0))
        assert code(cu.cuCtxEnablePeerAccess(c0, 0)) == 704
        ok(copy(function("copy"), s1, y, x, 8))
        ok(cu.cuStreamSynchronize(s1))
        ok(cu.cuCtxDisablePeerAccess(c0))
        ok(copy(function("copy"), s1, y, x, 8))
        assert code(cu.cuStreamSynchronize(s1)) == 700

    inside(body, devices=2, peers="0010")


def test_pageable_copies(inside):
    def body():
        start()
        s = stream()
        a = ok(cu.cuMemAlloc(64))
        host = np.full(64, 9, np.uint8)
        sim.stall(int(s))
        ok(cu.cuMemcpyHtoDAsync(a, host.ctypes.data, 64, s))  # staged before it returns
        host[:] = 0
        sim.resume(int(s))
        ok(cu.cuMemcpyDtoHAsync(host.ctypes.data, a, 64, s))  # returns when it is done
        assert (host == 9).all()

    inside(body)
