# ruff: noqa: F821, RUF059
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

import pytest


@pytest.mark.parametrize(("mode", "harmed"), [(0, True), (1, False), (2, False)])
def test_calls_of_another_thread(inside, mode, harmed):
    def body():
        mode, harmed = int(os.environ["MODE"]), os.environ["HARMED"] == "True"
        context = start()
        e, s2, pool = event(), stream(), ok(cu.cuDeviceGetDefaultMemPool(0))
        calls = [
            lambda: cu.cuEventQuery(e),
            lambda: cu.cuEventSynchronize(e),
            lambda: cu.cuMemAllocFromPoolAsync(64, pool, s2),
            lambda: cu.cuMemAlloc(64),
            lambda: cu.cuMemAllocHost(64),
            lambda: cu.cuStreamSynchronize(s2),
        ]
        results = []

        def elsewhere(call, relaxed):
            ok(cu.cuCtxSetCurrent(context))
            if relaxed:
                assert int(ok(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode(2)))) == 0
            results.append(code(call()))

        for call in calls:
            for relaxed in (False, True):
                s = stream()
                ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(mode)))
                t = threading.Thread(target=elsewhere, args=(call, relaxed))
                t.start(), t.join()
                end = code(cu.cuStreamEndCapture(s))
                expected = (900, 901) if harmed and not relaxed else (0, 0)
                assert (results[-1], end) == expected, (call, relaxed)

    inside(body, env={"MODE": str(mode), "HARMED": str(harmed)})


def test_module_loads_are_allowed_while_capturing(inside):
    def body():
        start()
        s = stream()
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(0)))
        kernels()
        ok(cu.cuStreamEndCapture(s))

    inside(body)


def test_capture_and_replay(inside):
    def body():
        start()
        s, t, e, joined = stream(), stream(), event(), event()
        module, function = kernels()
        x, y = array([0] * 8), array([0] * 8)
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(0)))
        ok(fill(function("fill"), s, x, 4.0, 8))
        ok(cu.cuEventRecord(e, s))
        ok(cu.cuStreamWaitEvent(t, e, 0))
        assert int(ok(cu.cuStreamIsCapturing(t))) == 1
        ok(copy(function("copy"), t, y, x, 8))
        assert code(cu.cuEventQuery(e)) == 900  # asked by the capturing thread itself
        graph = cu.cuStreamEndCapture(s)
        assert code(graph) == 901
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(1)))
        ok(fill(function("fill"), s, x, 4.0, 8))
        ok(cu.cuEventRecord(e, s))
        ok(cu.cuStreamWaitEvent(t, e, 0))
        ok(copy(function("copy"), t, y, x, 8))
        assert code(cu.cuStreamEndCapture(t)) == 903
        assert code(cu.cuStreamEndCapture(s)) == 901
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(1)))
        ok(cu.cuEventRecord(e, s))
        ok(cu.cuStreamWaitEvent(t, e, 0))
        ok(copy(function("copy"), t, y, x, 8))
        assert code(cu.cuStreamEndCapture(s)) == 904  # unjoined
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(1)))
        ok(fill(function("fill"), s, x, 4.0, 8))
        ok(cu.cuEventRecord(e, s))
        ok(cu.cuStreamWaitEvent(t, e, 0))
        ok(copy(function("copy"), t, y, x, 8))
        ok(cu.cuEventRecord(joined, t))
        ok(cu.cuStreamWaitEvent(s, joined, 0))
        graph = ok(cu.cuStreamEndCapture(s))
        assert int(ok(cu.cuStreamIsCapturing(t))) == 0
        assert (floats(y, 8) == 0).all()
        run = ok(cu.cuGraphInstantiate(graph, 0))
        ok(cu.cuGraphDestroy(graph))
        for _ in range(2):
            ok(cu.cuMemsetD32Async(y, 0, 8, s))
            ok(cu.cuGraphLaunch(run, s))
            ok(cu.cuStreamSynchronize(s))
            assert (floats(y, 8) == 4).all()
        ok(cu.cuGraphExecDestroy(run))

    inside(body)


def test_legacy_stream_while_a_blocking_stream_captures(inside):
    def body():
        start()
        a = ok(cu.cuMemAlloc(64))
        s = stream(0)
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(2)))
        assert code(cu.cuStreamIsCapturing(0)) == 906
        assert code(cu.cuMemsetD8Async(a, 0, 64, 0)) == 906
        assert code(cu.cuStreamEndCapture(s)) == 901
        s = stream(1)
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(2)))
        ok(cu.cuMemsetD8Async(a, 0, 64, 0))
        ok(cu.cuStreamEndCapture(s))

    inside(body)


def test_user_objects_follow_the_graph(inside):
    def body():
        start()
        s = stream()
        gone = threading.Event()
        destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gone.set())
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(2)))
        graph = ok(cu.cuStreamGetCaptureInfo(s))[2]
        fn = cu.CUhostFn(ctypes.cast(destroy, ctypes.c_void_p).value)
        thing = ok(cu.cuUserObjectCreate(0, fn, 1, 1))
        ok(cu.cuGraphRetainUserObject(graph, thing, 1, 1))  # moves our reference
        graph = ok(cu.cuStreamEndCapture(s))
        run = ok(cu.cuGraphInstantiate(graph, 0))
        ok(cu.cuGraphDestroy(graph))
        assert not gone.wait(0.02)
        sim.stall(int(s))
        ok(cu.cuGraphLaunch(run, s))
        ok(cu.cuGraphExecDestroy(run))
        assert not gone.wait(0.02)
        sim.resume(int(s))
        assert gone.wait(10)
        assert sim.live()["user_objects"] == 0

    inside(body)
