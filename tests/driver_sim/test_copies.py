# ruff: noqa: E731, F821
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

SETUP = """
DEVICE, HOST, UNIFIED = (cu.CUmemorytype(v) for v in (2, 1, 4))

def fields(struct, **values):
    for name, value in values.items():
        setattr(struct, name, value)
    return struct

def attributes(order):
    return fields(cu.CUmemcpyAttributes(), srcAccessOrder=cu.CUmemcpySrcAccessOrder(order))

def done(s):
    ok(cu.cuStreamSynchronize(s))
    return [r["kind"] for r in sim.trace(event="exec", name="copy")]
"""


def test_slices(inside):
    def body():
        start()
        s = stream()
        host = np.arange(4 * 5 * 16, dtype=np.uint8).reshape(4, 5, 16)
        a = ok(cu.cuMemAlloc(3 * 6 * 32))
        ok(cu.cuMemsetD8Async(a, 0, 3 * 6 * 32, s))
        up = fields(
            cu.CUDA_MEMCPY3D(), srcMemoryType=HOST, srcHost=host.ctypes.data, srcXInBytes=2, srcY=1, srcZ=1,
            srcPitch=16, srcHeight=5, dstMemoryType=DEVICE, dstDevice=a, dstXInBytes=3, dstY=2, dstZ=0, dstPitch=32,
            dstHeight=6, WidthInBytes=7, Height=4, Depth=3,
        )  # fmt: skip
        ok(cu.cuMemcpy3DAsync(up, s))
        assert done(s) == ["HtoD"]
        there = np.frombuffer(sim.read(int(a), 3 * 6 * 32), np.uint8).reshape(3, 6, 32)
        assert (there[:, 2:6, 3:10] == host[1:4, 1:5, 2:9]).all()
        assert there.sum() == host[1:4, 1:5, 2:9].sum()
        back = np.zeros((3, 4, 7), np.uint8)
        down = fields(
            cu.CUDA_MEMCPY3D(), srcMemoryType=UNIFIED, srcDevice=a, srcXInBytes=3, srcY=2, srcPitch=32, srcHeight=6,
            dstMemoryType=HOST, dstHost=back.ctypes.data, WidthInBytes=7, Height=4, Depth=3,
        )  # fmt: skip
        ok(cu.cuMemcpy3D(down))
        assert (back == host[1:4, 1:5, 2:9]).all()
        for wrong in (
            {"srcPitch": 9}, {"srcHeight": 5}, {"srcLOD": 1}, {"Depth": 4}, {"srcPitch": 1 << 31},
            {"srcHeight": 1 << 62}, {"srcMemoryType": cu.CUmemorytype(3)},
        ):  # fmt: skip
            before = {name: getattr(down, name) for name in wrong}
            assert code(cu.cuMemcpy3DAsync(fields(down, **wrong), s)) == 1, wrong
            fields(down, **before)
        ok(cu.cuMemcpy3DAsync(fields(down, Depth=0, srcPitch=1), s))

    inside(body, setup=SETUP)


def test_rows(inside):
    def body():
        start()
        s = stream()
        a = ok(cu.cuMemAlloc(16 * 8))
        for unit, memset in ((1, cu.cuMemsetD2D8Async), (2, cu.cuMemsetD2D16Async), (4, cu.cuMemsetD2D32Async)):
            ok(cu.cuMemsetD8Async(a, 0, 16 * 8, s))
            ok(memset(a, 16, 0x01010101 & ((1 << 8 * unit) - 1), 8 // unit, 5, s))
            host = np.zeros((5, 12), np.uint8)
            rows = fields(
                cu.CUDA_MEMCPY2D(), srcMemoryType=DEVICE, srcDevice=a, srcPitch=16, dstMemoryType=HOST,
                dstHost=host.ctypes.data, dstPitch=12, WidthInBytes=12, Height=5,
            )  # fmt: skip
            ok(cu.cuMemcpy2DAsync(rows, s))
            assert host.tolist() == [[1] * 8 + [0] * 4] * 5
        assert code(cu.cuMemsetD2D32Async(a, 6, 0, 1, 2, s)) == 1
        assert code(cu.cuMemsetD2D32Async(int(a) + 2, 8, 0, 1, 2, s)) == 1
        assert code(cu.cuMemcpy2DAsync(fields(rows, dstPitch=11), s)) == 1

    inside(body, setup=SETUP)


def test_between_contexts(inside):
    def body():
        c0, c1 = start(0), start(1)
        b = ok(cu.cuMemAlloc(64))
        ok(cu.cuMemsetD8(b, 1, 64)), ok(cu.cuCtxSynchronize())
        ok(cu.cuCtxSetCurrent(c0))
        s = stream()
        a = ok(cu.cuMemAlloc(64))
        ok(cu.cuMemsetD8Async(a, 9, 64, s))
        box = fields(
            cu.CUDA_MEMCPY3D_PEER(), srcMemoryType=DEVICE, srcDevice=a, srcContext=c0, srcPitch=16,
            dstMemoryType=DEVICE, dstDevice=b, dstContext=c1, dstPitch=8, WidthInBytes=8, Height=2, Depth=1,
        )  # fmt: skip
        ok(cu.cuMemcpy3DPeerAsync(box, s))
        assert done(s) == ["PtoP"]
        assert sim.read(int(b), 17) == b"\x09" * 16 + b"\1"
        assert code(cu.cuMemcpy3DPeerAsync(fields(box, srcContext=0x1230), s)) == 201
        ok(cu.cuMemcpyPeerAsync(b, c1, a, c0, 64, s))
        assert done(s) == ["PtoP", "PtoP"]
        assert sim.read(int(b), 64) == b"\x09" * 64

    inside(body, setup=SETUP, devices=2, peers="0000")


def test_batches(inside):
    def body():
        start()
        s = stream()
        a, b = (ok(cu.cuMemAlloc(64)) for _ in range(2))
        pinned = int(ok(cu.cuMemAllocHost(64)))
        ctypes.memset(pinned, 3, 64)
        pageable = np.full(64, 4, np.uint8)
        sim.stall(int(s))
        to, source = (
            [cu.CUdeviceptr(int(p)) for p in group]
            for group in ((a, int(a) + 16, b), (pageable.ctypes.data, pinned, pinned))
        )
        ok(cu.cuMemcpyBatchAsync(to, source, [16, 16, 8], 3, [attributes(2), attributes(1)], [0, 2], 2, s))
        ctypes.memset(pinned, 5, 64)  # the first two were read before the call returned
        pageable[:] = 5
        sim.resume(int(s))
        assert done(s) == ["HtoD"] * 3
        assert sim.read(int(a), 32) == b"\4" * 16 + b"\3" * 16
        assert sim.read(int(b), 8) == b"\5" * 8
        assert sim.trace(name="cuMemcpyBatchAsync")[0]["nbytes"] == 40
        batch = lambda attrs, first, handle=s: code(
            cu.cuMemcpyBatchAsync(to, source, [8, 8, 8], 3, attrs, first, len(attrs), handle)
        )
        assert batch([attributes(1)], [1]) == 1
        assert batch([attributes(0)], [0]) == 1
        assert batch([attributes(1)] * 2, [0, 0]) == 1
        assert batch([attributes(1)] * 2, [0, 3]) == 1
        assert batch([attributes(1)], [0], 0) == 1
        assert batch([attributes(1)], [0], 2) == 0

    inside(body, setup=SETUP)
