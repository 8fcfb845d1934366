# ruff: noqa: E731, F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

import pytest

SETUP = """
RELAXED = cu.CUstreamCaptureMode(2)

def kernel_params(f, values, types, grid=1, block=256):
    p = cu.CUDA_KERNEL_NODE_PARAMS()
    p.func = f
    p.gridDimX, p.blockDimX = grid, block
    p.gridDimY = p.gridDimZ = p.blockDimY = p.blockDimZ = 1
    p.kernelParams = (values, types)
    return p

def fill_params(f, address, value, n):
    return kernel_params(f, (cu.CUdeviceptr(int(address)), value, n), (None, ctypes.c_float, ctypes.c_uint))

def begin(s):
    ok(cu.cuStreamBeginCapture(s, RELAXED))

def end(s):
    return ok(cu.cuStreamEndCapture(s))

def nodes_of(graph):
    count = ok(cu.cuGraphGetNodes(graph))[1]
    return ok(cu.cuGraphGetNodes(graph, count))[0]

def types_of(graph):
    return [int(ok(cu.cuGraphNodeGetType(node))) for node in nodes_of(graph)]

def run(executable, s):
    ok(cu.cuGraphLaunch(executable, s))
    ok(cu.cuStreamSynchronize(s))
"""


def test_everything_is_captured(inside):
    def body():
        start()
        s, other, e = stream(), stream(), event()
        _, function = kernels()
        x, y, word = array([0] * 8), array([0] * 8), int(ok(cu.cuMemAllocHost(8)))
        ctypes.memset(word, 0, 8)
        seen = []
        note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(floats(x, 1)[0]))
        begin(s)
        ok(cu.cuMemsetD32Async(y, 0, 8, s))
        ok(fill(function("fill"), s, x, 4.0, 8))
        ok(cu.cuMemcpyDtoDAsync(y, x, 32, s))
        ok(cu.cuLaunchHostFunc(s, cu.CUhostFn(ctypes.cast(note, ctypes.c_void_p).value), 0))
        ok(cu.cuEventRecordWithFlags(e, s, 1))
        ok(cu.cuStreamWaitEvent(s, e, 1))
        ok(cu.cuStreamWriteValue32(s, word, 7, 0))
        ok(cu.cuStreamWaitValue32(s, word + 4, 1, 0))
        ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(64, s)), s))
        graph = end(s)
        assert types_of(graph) == [2, 0, 1, 3, 7, 6, 12, 12, 10, 11]
        assert code(cu.cuEventQuery(e)) == 0 and seen == []
        executable = ok(cu.cuGraphInstantiate(graph, 0))
        for expected in (1, 2):
            ok(cu.cuGraphLaunch(executable, s))
            while sim.pending(int(s)) > 3:
                time.sleep(0.001)
            assert code(cu.cuEventQuery(e)) == 0  # recorded by its node, ahead of the wait for the word
            assert code(cu.cuStreamQuery(s)) == 600
            ok(cu.cuStreamWriteValue32(other, word + 4, 1, 0))  # atomic, as what somebody waits for has to be
            ok(cu.cuStreamSynchronize(s))
            assert len(seen) == expected and seen[-1] == 4 and (floats(y, 8) == 4).all()
            assert ctypes.c_uint.from_address(word).value == 7
            ctypes.memset(word, 0, 8)

    inside(body, setup=SETUP)


def test_shape_of_a_graph(inside):
    def body():
        start()
        s, t, fork, join = stream(), stream(), event(), event()
        _, function = kernels()
        x, y = array([0] * 8), array([0] * 8)
        begin(s)
        ok(fill(function("fill"), s, x, 1.0, 8))
        ok(cu.cuEventRecord(fork, s)), ok(cu.cuStreamWaitEvent(t, fork, 0))
        ok(fill(function("fill"), t, y, 2.0, 8))
        ok(fill(function("fill"), s, x, 3.0, 8))
        ok(cu.cuEventRecord(join, t)), ok(cu.cuStreamWaitEvent(s, join, 0))
        ok(copy(function("copy"), s, x, y, 8))
        graph = end(s)
        a, b, c, d = nodes_of(graph)
        count = ok(cu.cuGraphGetEdges(graph))[3]
        begins, ends, _, _ = ok(cu.cuGraphGetEdges(graph, count))
        assert {(int(i), int(j)) for i, j in zip(begins, ends, strict=True)} == {
            (int(i), int(j)) for i, j in ((a, b), (a, c), (b, d), (c, d))
        }
        handles = lambda result: [int(node) for node in ok(result)[0]]
        assert handles(cu.cuGraphGetRootNodes(graph, 1)) == [int(a)]
        assert sorted(handles(cu.cuGraphNodeGetDependencies(d, 2))) == sorted([int(b), int(c)])
        assert sorted(handles(cu.cuGraphNodeGetDependentNodes(a, 2))) == sorted([int(b), int(c)])
        p = ok(cu.cuGraphKernelNodeGetParams(b))
        assert int(p.func) == int(function("fill")) and p.blockDimX == 256
        ok(cu.cuGraphDestroy(graph))
        assert code(cu.cuGraphNodeGetType(a)) == 1
        assert code(cu.cuGraphDestroy(graph)) == 1

    inside(body, setup=SETUP)


def test_parameters_change(inside):
    def body():
        start()
        s = stream()
        _, function = kernels()
        x, y = array([0] * 8), array([0] * 8)
        f = function("fill")
        begin(s)
        ok(fill(f, s, x, 1.0, 8))
        graph = end(s)
        (node,) = nodes_of(graph)
        executable = ok(cu.cuGraphInstantiate(graph, 0))
        ok(cu.cuGraphExecKernelNodeSetParams(executable, node, fill_params(f, y, 2.0, 8)))
        run(executable, s)
        assert (floats(x, 8) == 0).all() and (floats(y, 8) == 2).all()
        ok(cu.cuGraphKernelNodeSetParams(node, fill_params(f, x, 3.0, 4)))  # of the graph, not of the executable
        run(executable, s)
        assert (floats(x, 8) == 0).all()
        again = ok(cu.cuGraphInstantiate(graph, 0))
        sim.stall(int(s))
        ok(cu.cuGraphLaunch(again, s))
        ok(cu.cuGraphExecKernelNodeSetParams(again, node, fill_params(f, x, 9.0, 8)))  # too late for that launch
        sim.resume(int(s)), ok(cu.cuStreamSynchronize(s))
        assert floats(x, 8).tolist() == [3] * 4 + [0] * 4
        too_many = kernel_params(f, (cu.CUdeviceptr(int(x)), 1.0, 8), (None, ctypes.c_float, ctypes.c_uint), block=2048)
        assert code(cu.cuGraphExecKernelNodeSetParams(again, node, too_many)) == 1
        ok(cu.cuGraphNodeSetEnabled(again, node, 0))
        ok(cu.cuMemsetD32Async(x, 0, 8, s))
        run(again, s)
        assert (floats(x, 8) == 0).all() and ok(cu.cuGraphNodeGetEnabled(again, node)) == 0

    inside(body, setup=SETUP)


def test_an_executable_takes_another_graph(inside):
    def body():
        start()
        s = stream()
        _, function = kernels()
        x, host = array([0] * 8), np.zeros(8, np.float32)

        def captured(value, *more):
            begin(s)
            ok(fill(function("fill"), s, x, value, 8))
            for f in more:
                ok(f())
            return end(s)

        down = lambda: cu.cuMemcpyDtoHAsync(host.ctypes.data, x, 32, s)
        up = lambda: cu.cuMemcpyHtoDAsync(x, host.ctypes.data, 32, s)
        clear = lambda: cu.cuMemsetD32Async(x, 0, 8, s)
        executable = ok(cu.cuGraphInstantiate(captured(1.0, down), 0))
        ok(cu.cuGraphExecUpdate(executable, captured(5.0, down)))
        run(executable, s)
        assert (host == 5).all()
        update = ctypes.CDLL("libcuda.so.1").cuGraphExecUpdate_v2
        results = cu.CUgraphExecUpdateResult
        for graph, expected in (
            (captured(1.0), results.CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED),
            (captured(1.0, clear), results.CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED),
            (captured(1.0, up), results.CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED),
        ):
            info = (ctypes.c_int * 6)()  # the result, and two nodes
            assert update(ctypes.c_void_p(int(executable)), ctypes.c_void_p(int(graph)), info) == 910
            assert info[0] == int(expected)
        run(executable, s)
        assert (host == 5).all()
        assert int(ok(cu.cuGraphExecGetFlags(executable))) == 0
        assert code(cu.cuGraphInstantiate(captured(1.0), 1 << 20)) == 1

    inside(body, setup=SETUP)


def test_launches_of_an_executable_are_ordered(inside):
    def body():
        start()
        s, t = stream(), stream()
        _, function = kernels()
        x = array([0] * 8)
        begin(s)
        ok(cu.cuLaunchKernel(function("add_one"), 1, 1, 1, 8, 1, 1, 0, s, ((x, 8), (None, ctypes.c_uint)), 0))
        executable = ok(cu.cuGraphInstantiate(end(s), 0))
        sim.stall(int(s))
        ok(cu.cuGraphLaunch(executable, s))
        ok(cu.cuGraphLaunch(executable, t))
        assert code(cu.cuStreamQuery(t)) == 600
        time.sleep(0.01)
        assert (floats(x, 8) == 0).all()
        sim.resume(int(s)), ok(cu.cuStreamSynchronize(t))
        assert (floats(x, 8) == 2).all()

    inside(body, setup=SETUP)


def test_a_graph_in_a_graph(inside):
    def body():
        start()
        s = stream()
        _, function = kernels()
        x = array([0] * 8)
        begin(s)
        ok(fill(function("fill"), s, x, 2.0, 8))
        inner = ok(cu.cuGraphInstantiate(end(s), 0))
        begin(s)
        ok(cu.cuGraphLaunch(inner, s))
        ok(cu.cuLaunchKernel(function("add_one"), 1, 1, 1, 8, 1, 1, 0, s, ((x, 8), (None, ctypes.c_uint)), 0))
        graph = end(s)
        assert types_of(graph) == [4, 0]
        run(ok(cu.cuGraphInstantiate(graph, 0)), s)
        assert (floats(x, 8) == 3).all()

    inside(body, setup=SETUP)


def test_capture_into_a_graph(inside):
    def body():
        start()
        s = stream()
        _, function = kernels()
        x = array([0] * 8)
        graph = ok(cu.cuGraphCreate(0))
        first = ok(cu.cuGraphAddKernelNode(graph, [], 0, fill_params(function("fill"), x, 1.0, 8)))
        empty = ok(cu.cuGraphAddEmptyNode(graph, [first], 1))
        ok(cu.cuStreamBeginCaptureToGraph(s, graph, [empty], None, 1, RELAXED))
        assert code(cu.cuGraphInstantiate(graph, 0)) == 1
        ok(cu.cuLaunchKernel(function("add_one"), 1, 1, 1, 8, 1, 1, 0, s, ((x, 8), (None, ctypes.c_uint)), 0))
        assert int(end(s)) == int(graph)
        assert types_of(graph) == [0, 5, 0]
        run(ok(cu.cuGraphInstantiate(graph, 0)), s)
        assert (floats(x, 8) == 2).all()
        ok(cu.cuStreamBeginCaptureToGraph(s, graph, [], None, 0, RELAXED))
        assert code(cu.cuStreamGetId(s)) == 900
        assert code(cu.cuStreamEndCapture(s)) == 901
        assert len(nodes_of(graph)) == 3  # the caller's graph outlives its capture
        assert sim.live()["graphs"] == 1

    inside(body, setup=SETUP)


def test_memory_of_a_graph(inside):
    def body():
        start()
        s = stream()
        _, function = kernels()
        y = array([0] * 8)
        begin(s)
        x = int(ok(cu.cuMemAllocAsync(32, s)))
        ok(fill(function("fill"), s, x, 2.0, 8))
        ok(copy(function("copy"), s, y, x, 8))
        ok(cu.cuMemFreeAsync(x, s))
        graph = end(s)
        assert code(cu.cuMemFreeAsync(x, s)) == 1  # not live before a launch
        executable = ok(cu.cuGraphInstantiate(graph, 0))
        assert code(cu.cuGraphInstantiate(graph, 0)) == 801  # one executable for memory of one address
        for _ in range(3):
            run(executable, s)
        assert (floats(y, 8) == 2).all()
        ok(copy(function("copy"), s, y, x, 8))  # freed by the graph
        assert code(cu.cuStreamSynchronize(s)) == 700

    def left_over():
        start()
        s = stream()
        _, function = kernels()
        free = lambda: ok(cu.cuMemGetInfo())[0]
        before = free()
        begin(s)
        x = int(ok(cu.cuMemAllocAsync(32, s)))
        ok(fill(function("fill"), s, x, 2.0, 8))
        graph = end(s)
        executable = ok(cu.cuGraphInstantiate(graph, 0))
        run(executable, s)
        assert (floats(x, 8) == 2).all()
        assert code(cu.cuGraphLaunch(executable, s)) == 1  # what it allocated is still there
        ok(cu.cuMemFreeAsync(x, s))
        assert code(cu.cuMemFreeAsync(x, s)) == 1
        run(executable, s)
        ok(cu.cuMemFree(x))
        ok(cu.cuGraphExecDestroy(executable))
        freeing = ok(cu.cuGraphInstantiate(graph, 1))  # frees by itself what the last launch left
        for _ in range(3):
            run(freeing, s)
        ok(cu.cuGraphDestroy(graph)), ok(cu.cuGraphExecDestroy(freeing))
        assert (floats(x, 8) == 2).all()
        assert free() < before  # the last launch's memory outlives the graph
        ok(cu.cuMemFreeAsync(x, s)), ok(cu.cuStreamSynchronize(s))
        assert free() == before
        assert code(cu.cuMemFree(x)) == 1

    inside(body, setup=SETUP)
    inside(left_over, setup=SETUP)


@pytest.mark.parametrize("joined", [True, False])
def test_a_missing_edge_shows_when_shuffled(inside, joined):
    def body():
        start()
        s, t, fork, join = stream(), stream(), event(), event()
        _, function = kernels()
        x, y = array([0] * 8), array([0] * 8)
        begin(s)
        ok(cu.cuEventRecord(fork, s)), ok(cu.cuStreamWaitEvent(t, fork, 0))
        ok(fill(function("fill"), s, x, 1.0, 8))
        if os.environ["JOINED"] == "True":
            ok(cu.cuEventRecord(fork, s)), ok(cu.cuStreamWaitEvent(t, fork, 0))
        ok(copy(function("copy"), t, y, x, 8))
        ok(cu.cuEventRecord(join, t)), ok(cu.cuStreamWaitEvent(s, join, 0))
        executable = ok(cu.cuGraphInstantiate(end(s), 0))
        seen = set()
        for _ in range(20):
            ok(cu.cuMemsetD32Async(x, 0, 8, s)), ok(cu.cuMemsetD32Async(y, 0, 8, s))
            run(executable, s)
            seen.add(float(floats(y, 8)[0]))
        assert seen == ({1.0} if os.environ["JOINED"] == "True" else {0.0, 1.0})

    inside(body, setup=SETUP, seed=3, quiet_ms=0, env={"JOINED": str(joined)})


def test_an_abandoned_capture_leaves_nothing(inside):
    def body():
        start()
        s = stream()
        begin(s)
        ok(cu.cuMemAllocAsync(64, s))
        ok(cu.cuStreamGetCaptureInfo(s))
        assert code(cu.cuStreamGetId(s)) == 900
        assert code(cu.cuStreamEndCapture(s)) == 901
        ok(cu.cuMemGetInfo())
        live = sim.live()
        assert live["graphs"] == 0 and live["allocations"] == []

    inside(body, setup=SETUP)


def test_a_graph_does_not_keep_modules(inside):
    """Their unloading is found out by the next launch; on hardware it is not."""

    def body():
        start()
        s = stream()
        module, function = kernels()
        x = array([0] * 8)
        begin(s)
        ok(fill(function("fill"), s, x, 1.0, 8))
        executable = ok(cu.cuGraphInstantiate(end(s), 0))
        run(executable, s)
        since = sim.position
        ok(cu.cuModuleUnload(module))
        assert code(cu.cuGraphLaunch(executable, s)) == 400
        assert [record["name"] for record in sim.trace(since, event="violation")] == ["cuGraphLaunch"]

    inside(body, setup=SETUP)
