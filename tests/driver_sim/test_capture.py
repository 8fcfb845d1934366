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


@pytest.mark.parametrize("mode", [0, 2])
def test_what_a_capture_forbids_everywhere(inside, mode):
    """As measured: the capturing thread or another one, plain or in relaxed mode."""

    def body():
        mode = int(os.environ["MODE"])
        context = start()
        other, third, e, pool = stream(), stream(), event(), ok(cu.cuDeviceGetDefaultMemPool(0))
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        rounds = [(there, relaxed) for there in (False, True) for relaxed in (False, True)]
        modules = [kernels()[0] for _ in rounds]
        memory = [ok(cu.cuMemAllocAsync(64, other)) for _ in rounds]
        pools = [ok(cu.cuMemPoolCreate(properties)) for _ in rounds]
        streams = [stream() for _ in rounds]

        def first_error(*results):
            return (next((code(r) for r in results if code(r)), 0),)

        always = [lambda s: cu.cuStreamGetId(s), lambda s: cu.cuCtxSynchronize(), lambda s: cu.cuCtxSynchronize_v2(0)]
        unsafe = [
            lambda s: cu.cuStreamSynchronize(other),
            lambda s: cu.cuModuleUnload(modules.pop()),
            lambda s: cu.cuMemHostAlloc(64, 0),
            lambda s: cu.cuMemPoolTrimTo(pool, 0),
            lambda s: cu.cuMemAllocAsync(64, other),
            lambda s: cu.cuMemFreeAsync(memory.pop(), other),
            lambda s: cu.cuMemPoolCreate(properties),
            lambda s: cu.cuMemPoolDestroy(pools.pop()),
            lambda s: cu.cuMemAlloc(64),
        ]
        never = [
            lambda s: first_error(cu.cuStreamGetCtx(s), cu.cuStreamGetCtx(other)),
            lambda s: first_error(cu.cuStreamGetCtx_v2(s), cu.cuStreamGetCtx_v2(other)),
            lambda s: cu.cuStreamIsCapturing(s),
            lambda s: cu.cuStreamIsCapturing(1),  # the capturing stream does not block
            lambda s: cu.cuModuleLoadData(KERNELS_PTX.read_bytes() + b"\0"),
            lambda s: first_error(created := cu.cuEventCreate(2), cu.cuEventRecord(created[1], other)),
            lambda s: first_error(cu.cuEventRecord(e, other), cu.cuStreamWaitEvent(third, e, 0)),
            lambda s: first_error(cu.cuEventRecord(e, 1), cu.cuStreamWaitEvent(third, e, 0)),
            lambda s: cu.cuStreamGetId(other),
            lambda s: cu.cuStreamCreate(1),
            lambda s: cu.cuStreamDestroy(streams.pop()),
        ]

        def make(call, s, relaxed, results):
            ok(cu.cuCtxSetCurrent(context))
            before = ok(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode(2 if relaxed else 0)))
            results.append(code(call(s)))
            ok(cu.cuThreadExchangeStreamCaptureMode(before))

        for kind, calls in (("always", always), ("unsafe", unsafe), ("never", never)):
            for i, call in enumerate(calls):
                for there, relaxed in rounds:
                    s, results = stream(), []
                    ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode(mode)))
                    if there:
                        t = threading.Thread(target=make, args=(call, s, relaxed, results))
                        t.start(), t.join()
                    else:
                        make(call, s, relaxed, results)
                    results.append(code(cu.cuStreamEndCapture(s)))
                    harmed = kind == "always" or (kind == "unsafe" and mode == 0 and not relaxed)
                    assert results == ([900, 901] if harmed else [0, 0]), (kind, i, there, relaxed, results)

    inside(body, env={"MODE": str(mode)})


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
        assert int(ok(cu.cuStreamIsCapturing(0))) == int(ok(cu.cuStreamIsCapturing(1))) == 0
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
