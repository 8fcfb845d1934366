# ruff: noqa: E731, F821, RUF059
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations


def test_calls_that_need_a_context_say_so(inside):
    def body():
        assert code(cu.cuDeviceGetCount()) == 3
        ok(cu.cuInit(0))
        assert code(cu.cuStreamCreate(0)) == 201
        assert code(cu.cuMemAlloc(16)) == 201
        assert code(cu.cuCtxGetDevice()) == 201
        assert code(cu.cuCtxPopCurrent()) == 201
        assert int(ok(cu.cuCtxGetCurrent())) == 0

    inside(body)


def test_a_stream_of_its_own_handle_needs_no_current_context(inside):
    def body():
        context = start()
        s = stream()
        ok(cu.cuCtxSetCurrent(0))
        assert code(cu.cuCtxGetDevice()) == 201
        ok(cu.cuStreamSynchronize(s))
        ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(64, s)), s))
        ok(cu.cuStreamGetId(s))
        assert int(ok(cu.cuStreamIsCapturing(s))) == 0
        assert int(ok(cu.cuStreamGetCtx(s))) == int(context)
        assert code(cu.cuEventCreate(2)) == 201
        for legacy in (0, 1):
            assert code(cu.cuStreamIsCapturing(legacy)) == 201
            assert code(cu.cuStreamGetId(legacy)) == 201
        assert sim.violations == 0

    inside(body)


def test_a_stream_that_never_was(inside):
    def body():
        start()
        assert code(cu.cuStreamIsCapturing(0x1234560)) == 400
        assert code(cu.cuStreamGetId(0x1234560)) == 400

    inside(body)


def test_stack_rules(inside):
    def body():
        ok(cu.cuInit(0))
        a, b = ok(cu.cuDevicePrimaryCtxRetain(0)), ok(cu.cuDevicePrimaryCtxRetain(1))
        current = lambda: int(ok(cu.cuCtxGetCurrent()))
        ok(cu.cuCtxSetCurrent(0))  # nothing to pop: no error
        ok(cu.cuCtxSetCurrent(a))
        ok(cu.cuCtxPushCurrent(b))
        assert current() == int(b)
        ok(cu.cuCtxSetCurrent(a))  # replaces the top
        assert current() == int(a)
        ok(cu.cuCtxSetCurrent(0))  # pops
        assert current() == int(a)
        assert int(ok(cu.cuCtxPopCurrent())) == int(a)
        assert current() == 0
        seen = []
        ok(cu.cuCtxSetCurrent(a))
        t = threading.Thread(target=lambda: seen.append(current()))
        t.start(), t.join()
        assert seen == [0]

    inside(body, devices=2)


def test_reset_of_a_primary_context(inside):
    def body():
        context = start()
        first = ok(cu.cuCtxGetId(context))
        s, e, address = stream(), event(), ok(cu.cuMemAlloc(64))
        ok(cu.cuDevicePrimaryCtxReset(0))
        assert code(cu.cuMemAlloc(16)) == 709
        assert code(cu.cuStreamIsCapturing(1)) == 709
        noted = sim.violations
        assert code(cu.cuCtxGetId(context)) == 709
        ok(cu.cuCtxPushCurrent(context))  # the handle is still one, and its context gone
        assert code(cu.cuMemAlloc(16)) == 709
        ok(cu.cuCtxPopCurrent())
        assert sim.violations == noted + 1
        again = ok(cu.cuDevicePrimaryCtxRetain(0))
        assert int(again) == int(context)
        assert ok(cu.cuCtxGetId(again)) > first
        noted = sim.violations
        assert code(cu.cuStreamQuery(s)) == 709  # hardware: the process crashes
        assert code(cu.cuStreamIsCapturing(s)) == 709
        assert sim.violations == noted + 2
        assert code(cu.cuEventQuery(e)) == 709
        assert code(cu.cuMemFree(address)) == 1
        ok(cu.cuMemAlloc(16))

    inside(body)


def test_foreign_context(inside):
    def body():
        primary = start()
        foreign = ok(cu.cuCtxCreate(None, 0, 0))
        assert int(ok(cu.cuCtxGetCurrent())) == int(foreign)
        s = stream()
        assert int(ok(cu.cuStreamGetCtx(s))) == int(foreign)
        ok(cu.cuCtxPopCurrent())
        module, function = kernels()
        address = ok(cu.cuMemAlloc(16))
        assert code(fill(function("fill"), s, address, 1.0, 4)) == 400
        assert code(cu.cuCtxDestroy(primary)) == 201
        ok(cu.cuCtxDestroy(foreign))
        assert code(cu.cuStreamQuery(s)) == 709

    inside(body)


def test_fork_and_exit(inside):
    def body():
        start()
        s = stream()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if code(cu.cuStreamQuery(s)) == 3 and code(cu.cuInit(0)) == 3 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        sim.stall(int(s))  # leaving with work queued is no error
        ok(cu.cuMemsetD8Async(ok(cu.cuMemAlloc(16)), 1, 16, s))

    inside(body)


def test_a_forked_child_can_ask_the_simulation(inside):
    def body():
        start()
        work = [(stream(), ok(cu.cuMemAlloc(16))) for _ in range(4)]
        for _ in range(60):
            for s, address in work * 5:
                ok(cu.cuMemsetD8Async(address, 1, 16, s))
            pid = os.fork()  # while the workers count and trace
            if pid == 0:
                calls = sim.calls()
                os._exit(0 if calls and sim.position and sim.live() and sim.calls() == calls else 1)
            assert os.waitpid(pid, 0)[1] == 0

    inside(body)


def test_no_device(inside):
    def body():
        assert code(cu.cuInit(0)) == 100

    inside(body, devices=0)


def test_visible_devices(inside):
    def body():
        ok(cu.cuInit(0))
        assert ok(cu.cuDeviceGetCount()) == 2
        assert ok(cu.cuDeviceCanAccessPeer(0, 1)) == 1  # physical 2 -> 0
        assert ok(cu.cuDeviceCanAccessPeer(1, 0)) == 0

    inside(body, devices=3, peers="000000100", env={"CUDA_VISIBLE_DEVICES": "2,0"})
