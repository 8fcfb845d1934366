# ruff: noqa: E731, F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

SETUP = """
attribute, kind = cu.CUfunction_attribute, cu.CUlaunchAttributeID

def attributes(**wanted):
    made = []
    for name, value in wanted.items():
        a = cu.CUlaunchAttribute()
        if name == "cluster":
            a.id = kind.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = value
        elif name == "cooperative":
            a.id, a.value.cooperative = kind.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value
        elif name == "programmatic":
            a.id = kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            a.value.programmaticStreamSerializationAllowed = value
        made.append(a)
    return made

def config(s, grid=(1, 1, 1), block=(32, 1, 1), shared=0, **wanted):
    c = cu.CUlaunchConfig()
    c.gridDimX, c.gridDimY, c.gridDimZ = grid
    c.blockDimX, c.blockDimY, c.blockDimZ = block
    c.sharedMemBytes = shared
    c.hStream = s
    c.attrs = attributes(**wanted)
    c.numAttrs = len(wanted)
    return c

def spin(f, c):
    return code(cu.cuLaunchKernelEx(c, f, ((0,), (ctypes.c_ulonglong,)), 0))

def ptx(directives, parameters=""):
    text = f".version 8.6\\n.target sm_90\\n.entry spin_test({parameters}.param .u64 ns) {directives} {{ ret; }}"
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(text.encode() + b"\\0")), b"spin_test"))
"""


def test_clusters(inside):
    def body():
        start()
        s = stream()
        f = kernels()[1]("spin")
        launch = lambda grid, cluster: spin(f, config(s, grid=grid, cluster=cluster))
        assert launch((4, 4, 1), (2, 2, 1)) == 0
        assert launch((4, 3, 1), (2, 2, 1)) == 912  # no multiple
        assert launch((4, 4, 1), (2, 0, 1)) == 912
        assert launch((16, 1, 1), (16, 1, 1)) == 912
        ok(cu.cuFuncSetAttribute(f, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        assert launch((16, 1, 1), (16, 1, 1)) == 0
        assert launch((32, 1, 1), (32, 1, 1)) == 912
        own = ptx(".reqnctapercluster 2")
        assert spin(own, config(s, grid=(2, 1, 1))) == 0
        assert spin(own, config(s, grid=(3, 1, 1))) == 912
        assert spin(own, config(s, grid=(4, 1, 1), cluster=(4, 1, 1))) == 912
        any_of_them = ptx(".explicitcluster")
        assert spin(any_of_them, config(s)) == 912
        assert spin(any_of_them, config(s, cluster=(1, 1, 1))) == 0

    inside(body, setup=SETUP)


def test_cooperative_launches_must_fit(inside):
    def body():
        start()
        s = stream()
        f = kernels()[1]("spin")
        blocks = 132 * ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 1024, 0))
        assert blocks == 264
        launch = lambda n: spin(f, config(s, grid=(n, 1, 1), block=(1024, 1, 1), cooperative=1))
        assert (launch(blocks), launch(blocks + 1)) == (0, 720)
        other_way = lambda n: code(
            cu.cuLaunchCooperativeKernel(f, n, 1, 1, 1024, 1, 1, 0, s, ((0,), (ctypes.c_ulonglong,)))
        )
        assert (other_way(blocks), other_way(blocks + 1)) == (0, 720)

    inside(body, setup=SETUP)


def test_programmatic_launches_keep_their_order(inside):
    def body():
        start()
        s = stream()
        f = kernels()[1]("fill")
        x = array([0] * 8)
        for value in (1.0, 2.0):
            arguments = ((cu.CUdeviceptr(int(x)), value, 8), (None, ctypes.c_float, ctypes.c_uint))
            ok(cu.cuLaunchKernelEx(config(s, programmatic=1), f, arguments, 0))
        ok(cu.cuStreamSynchronize(s))
        assert (floats(x, 8) == 2).all()

    inside(body, setup=SETUP)


def test_registers_and_shared_memory_limit_a_block(inside):
    def body():
        start()
        s = stream()
        heavy = ptx(".maxnreg 255")
        assert ok(cu.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, heavy)) == 256
        assert spin(heavy, config(s, block=(256, 1, 1))) == 0
        assert spin(heavy, config(s, block=(257, 1, 1))) == 701
        assert spin(ptx(".maxntid 64"), config(s, block=(65, 1, 1))) == 1
        f = kernels()[1]("spin")
        active = lambda size, shared=0: ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, size, shared))
        assert [active(n) for n in (32, 64, 256, 1024)] == [32, 32, 8, 2]
        assert [active(32, n) for n in (49152, 100000, 232448, 232449)] == [4, 2, 1, 0]
        assert ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(heavy, 256, 0)) == 1
        grid, block = ok(cu.cuOccupancyMaxPotentialBlockSize(f, 0, 0, 0))
        assert grid * block == 132 * 2048
        assert ok(cu.cuOccupancyMaxPotentialBlockSize(f, 0, 0, 128))[1] == 128
        free = ok(cu.cuOccupancyAvailableDynamicSMemPerBlock(f, 2, 128))
        assert active(128, free) == 2 and active(128, free + 128) == 1
        assert code(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 0, 0)) == 1

    inside(body, setup=SETUP)


def test_clusters_that_fit(inside):
    def body():
        start()
        s = stream()
        f = kernels()[1]("spin")
        active = lambda n, **more: cu.cuOccupancyMaxActiveClusters(
            f, config(s, grid=(n, 1, 1), cluster=(n, 1, 1), **more)
        )
        alone = {"block": (1024, 1, 1), "shared": 200000}
        assert [ok(active(n, **alone)) for n in (1, 2, 8)] == [132, 66, 16]
        assert code(active(16)) == 912
        assert ok(cu.cuOccupancyMaxPotentialClusterSize(f, config(s))) == 8
        ok(cu.cuFuncSetAttribute(f, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        assert ok(active(16, **alone)) == 8
        assert ok(cu.cuOccupancyMaxPotentialClusterSize(f, config(s))) == 16

    inside(body, setup=SETUP)
