# ruff: noqa: F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

import json

from helpers.driver_sim import run_simulated


def test_nth_failure(inside):
    def body():
        start()
        with sim.failing("cuMemAlloc", 2, 2):
            ok(cu.cuMemAlloc(16))
            assert code(cu.cuMemAlloc(16)) == 2
            ok(cu.cuMemAlloc(16))
            assert sim.faults_delivered == 1
        with sim.failing("cuMemAlloc", 2, 2, from_then_on=True):
            assert [code(cu.cuMemAlloc(16)) for _ in range(4)] == [0, 2, 2, 2]
        with sim.failing("*", 3, 999):
            assert [code(cu.cuCtxGetCurrent()) for _ in range(4)] == [0, 0, 999, 0]
        failed = sim.trace(name="cuMemAlloc")[1]
        assert failed["injected"] and failed["result"] == 2
        assert len(sim.live()["allocations"]) == 3

    inside(body)


def test_trace_and_counts(inside, tmp_path):
    def body():
        context = start()
        s = stream()
        a = ok(cu.cuMemAlloc(64))
        with sim.tracing() as records:
            ok(cu.cuMemsetD8Async(a, 1, 64, s))
            ok(cu.cuStreamSynchronize(s))
        call, work = records[0], next(r for r in records if r["event"] == "exec")
        assert call["name"] == "cuMemsetD8Async" and call["nbytes"] == 64
        assert call["ctx"] == call["ctx_after"] == ok(cu.cuCtxGetId(context))
        assert call["stream"] == int(s) and call["stream_id"] == work["stream_id"] == ok(cu.cuStreamGetId(s))
        assert work["thread"] != call["thread"]
        assert sim.calls("cuMemAlloc") == 1 and sim.call_counts()["cuStreamCreate"] == 1

    path = tmp_path / "trace.jsonl"
    inside(body, trace=path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(r["name"] == "cuStreamSynchronize" for r in records)


def test_missing_entry_point_is_loud():
    code = """
        import ctypes
        lib, f, status = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int(9)
        ask = lambda name, version: lib.cuGetProcAddress_v2(name, ctypes.byref(f), version, ctypes.c_ulonglong(0),
                                                            ctypes.byref(status))
        assert ask(b"cuNoSuchThing", 13000) == 0 and status.value == 1 and not f.value
        assert ask(b"cuMemAllocAsync", 11000) == 0 and status.value == 2 and not f.value
        assert ask(b"cuLaunchKernelEx", 13000) == 0 and status.value == 1 and not f.value  # hidden
        assert ask(b"cuMemAlloc", 13010) == 1  # newer than the driver
        assert ask(b"cuMemAlloc", 13000) == 0 and f.value
        assert ask(b"cuTexRefCreate", 13000) == 0 and f.value
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(f.value)(None)
    """
    import textwrap

    done = run_simulated(textwrap.dedent(code), hide="cuLaunchKernelEx", check=False)
    assert done.returncode == -6 and "cuTexRefCreate" in done.stderr, done.stderr


def test_lost_device(inside):
    def body():
        c0, c1 = start(0), start(1)
        sim.break_device(0, 46)
        for context in (c0, c1):  # the whole process is done for
            ok(cu.cuCtxSetCurrent(context))
            assert code(cu.cuMemAlloc(16)) == 46

    inside(body, devices=2)


def test_handles_come_back_when_asked(inside):
    def body():
        start()
        a = stream()
        first = ok(cu.cuStreamGetId(a))
        handle = int(a)
        ok(cu.cuStreamDestroy(a))
        b = stream()
        assert (int(b) == handle) == (os.environ["KINA_SIM_REUSE_HANDLES"] == "1")
        assert ok(cu.cuStreamGetId(b)) != first

    inside(body, reuse_handles=True)
    inside(body, reuse_handles=False)
