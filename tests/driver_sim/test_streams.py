# ruff: noqa: F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

import pytest


def test_stall_step_resume(inside):
    def body():
        start()
        s = stream()
        a = ok(cu.cuMemAlloc(16))
        sim.stall(int(s))
        for value in (1, 2, 3):
            ok(cu.cuMemsetD8Async(a, value, 16, s))
        assert code(cu.cuStreamQuery(s)) == 600 and sim.pending(int(s)) == 3
        sim.step(int(s), 2)
        while sim.pending(int(s)) > 1:
            time.sleep(0.001)
        assert sim.read(int(a), 1) == b"\2"
        sim.resume(int(s))
        ok(cu.cuStreamSynchronize(s))
        assert sim.read(int(a), 1) == b"\3"

    inside(body)


def test_default_stream_order(inside):
    def body():
        start()
        blocking, free = stream(0), stream(1)
        a, b = ok(cu.cuMemAlloc(16)), ok(cu.cuMemAlloc(16))
        sim.stall(int(blocking))
        ok(cu.cuMemsetD8Async(a, 1, 16, blocking))
        ok(cu.cuMemsetD8Async(a, 2, 16, 0))  # the legacy stream waits for the blocking one
        ok(cu.cuMemsetD8Async(b, 3, 16, free))
        ok(cu.cuStreamSynchronize(free))  # which a non-blocking one does not care about
        assert code(cu.cuStreamQuery(0)) == 600
        other = stream(0)
        ok(cu.cuMemsetD8Async(b, 4, 16, other))  # waits for the legacy stream in turn
        time.sleep(0.01)
        assert sim.read(int(b), 1) == b"\3" and sim.read(int(a), 1) == b"\xcb"
        sim.resume(int(blocking))
        ok(cu.cuStreamSynchronize(other))
        assert sim.read(int(a), 1) == b"\2" and sim.read(int(b), 1) == b"\4"

    inside(body)


def test_per_thread_stream_belongs_to_its_thread(inside):
    def body():
        context = start()
        ids = [ok(cu.cuStreamGetId(2)), ok(cu.cuStreamGetId(1)), ok(cu.cuStreamGetId(0))]
        assert ids[1] == ids[2] != ids[0]

        def other():
            ok(cu.cuCtxSetCurrent(context))
            ids.append(ok(cu.cuStreamGetId(2)))

        t = threading.Thread(target=other)
        t.start(), t.join()
        assert ids[3] not in ids[:3]

    inside(body)


def test_event_orders_streams(inside):
    def body():
        start()
        a, b, e = stream(), stream(), event()
        x, y = array([0] * 64), array([0] * 64)
        _, function = kernels()
        assert code(cu.cuEventQuery(e)) == 0  # never recorded
        sim.stall(int(a))
        ok(fill(function("fill"), a, x, 5.0, 64))
        ok(cu.cuEventRecord(e, a))
        ok(cu.cuStreamWaitEvent(b, e, 0))
        ok(copy(function("copy"), b, y, x, 64))
        assert code(cu.cuEventQuery(e)) == 600
        assert code(cu.cuStreamQuery(b)) == 600
        sim.resume(int(a))
        ok(cu.cuStreamSynchronize(b))
        assert (floats(y, 64) == 5).all()
        assert code(cu.cuEventElapsedTime(e, e)) == 400  # made without timing

    inside(body)


def test_missing_dependency_shows(inside):
    def body():
        start()
        a, b = stream(), stream()
        sim.stall(int(a))
        x = ok(cu.cuMemAllocAsync(256, a))
        ok(cu.cuMemsetD8Async(x, 0, 256, b))  # no wait for the allocation
        assert code(cu.cuStreamSynchronize(b)) == 700
        assert "not allocated yet in stream order" in sim.trace(event="violation")[-1]["note"]

    inside(body)


def test_work_after_destruction_still_runs(inside):
    def body():
        start()
        s = stream()
        a = ok(cu.cuMemAlloc(16))
        sim.stall(int(s))
        ok(cu.cuMemsetD8Async(a, 7, 16, s))
        ok(cu.cuStreamDestroy(s))
        assert code(cu.cuStreamQuery(s)) == 400
        assert code(cu.cuStreamDestroy(s)) == 400
        ok(cu.cuCtxSynchronize())
        assert sim.read(int(a), 1) == b"\7"
        assert sim.violations == 2

    inside(body)


def test_host_functions_may_not_call_the_driver(inside):
    def body():
        start()
        s = stream()
        seen = []
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(code(cu.cuMemGetInfo())))
        ok(cu.cuLaunchHostFunc(s, cu.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value), 0))
        ok(cu.cuStreamSynchronize(s))
        assert seen == [800]

    inside(body)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shuffle_is_repeatable_and_legal(inside, seed):
    def body():
        start()
        streams = [stream() for _ in range(4)]
        x = array([0])
        with sim.shuffled(int(os.environ["SEED"])):
            for k in range(5):
                for i, s in enumerate(streams):
                    ok(cu.cuMemsetD32Async(x, 16 * k + i, 1, s))
            for s in streams:
                ok(cu.cuStreamSynchronize(s))
        ran = [(r["stream_id"], r["handle"]) for r in sim.trace(event="exec", name="fill")]
        for s in streams:
            own = [seq for i, seq in ran if i == ok(cu.cuStreamGetId(s))]
            assert own == sorted(own) and len(own) == 5
        print([i for i, _ in ran])

    # Never quiet: on a busy machine the host may be away for longer than any silence that would let work run by itself.
    first, again, other = (inside(body, quiet_ms=0, env={"SEED": str(s)}).stdout for s in (seed, seed, seed + 100))
    assert first == again
    assert first != other


def test_shuffle_runs_work_nobody_waits_for(inside):
    def body():
        start()
        s = stream()
        done = threading.Event()
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: done.set())
        ok(cu.cuLaunchHostFunc(s, cu.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value), 0))
        assert done.wait(10)

    inside(body, seed=5)


def test_a_wait_for_ever_ends_loudly(inside):
    def body():
        start()
        s = stream()
        sim.stall(int(s))
        ok(cu.cuMemsetD8Async(ok(cu.cuMemAlloc(16)), 7, 16, s))
        cu.cuStreamSynchronize(s)

    done = inside(body, timeout_ms=200, check=False)
    assert done.returncode == -6
    assert "cuStreamSynchronize waited more than 200 ms" in done.stderr and "stalled" in done.stderr
