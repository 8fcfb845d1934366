"""Ends: the interpreter exits with anything alive, and a process forks. Exit code 0, and not a word."""

from __future__ import annotations

import gc
import os
import sys
import threading

import numpy as np
import pytest
from helpers.cuda import KERNELS, ForeignStream, run_body, simulation, stalled

import kina


def everything():
    """Something of each kind, all of it alive, some of it at work."""
    runtime = kina.Runtime(0)
    session = kina.session(runtime).__enter__()
    raw = session.raw().__enter__()
    function = raw.module(KERNELS).function("add_one", "mut f32[], u32")
    tensor = session.from_host(np.ones(1000, np.float32))
    other = kina.zeros(10, device="cuda:0")
    stream = ForeignStream()
    adopted = kina.session("cuda:0", stream=stream).__enter__()
    for _ in range(100):
        function.launch(kina.LaunchConfig.linear(1000), tensor, 1000)
    taken = adopted.adopt(tensor)
    witnesses = [session.completion(), adopted.completion()]
    adopted.copy(taken)  # leased, and not sealed yet
    session.from_host(np.ones(10))
    return [runtime, session, raw, raw.mut(tensor), raw.stream, function, other, stream, adopted, taken,
            *witnesses, tensor.to_dlpack(), tensor[::2]]  # fmt: skip


def leave(how):
    globals()["kept"] = held = everything()
    if how == "cycle":

        class Knot:
            pass

        knot = Knot()
        knot.knot, knot.held = knot, held
        del held, globals()["kept"]
    elif how == "sys.exit inside a session":
        with kina.session("cuda:0") as session:
            globals()["more"] = session.zeros(10)
            sys.exit(0)
    elif how == "in an atexit handler":
        import atexit

        atexit.register(lambda: held.clear())
    elif how == "work in flight":
        context = stalled(held[1])
        context.__enter__()
        held[1].zeros(10)
        globals()["context"] = context
    elif how == "daemon thread inside a session":
        entered = threading.Event()

        def work():
            with kina.session("cuda:0") as session:
                while True:
                    session.to_host(session.from_host(np.ones(10)))
                    entered.set()

        threading.Thread(target=work, daemon=True).start()
        entered.wait()
    elif how == "daemon thread that sleeps in a session":
        entered = threading.Event()

        def work():
            with kina.session("cuda:0"):
                entered.set()
                threading.Event().wait()

        threading.Thread(target=work, daemon=True).start()
        entered.wait()
    elif how == "thread that ends late":

        def work():
            with kina.session("cuda:0") as session:
                threading.main_thread().join()
                session.to_host(session.from_host(np.ones(10)))

        threading.Thread(target=work).start()


WAYS = [
    "module globals",
    "cycle",
    "sys.exit inside a session",
    "in an atexit handler",
    "work in flight",
    "daemon thread inside a session",
    "daemon thread that sleeps in a session",
    "thread that ends late",
]


@pytest.mark.parametrize("how", WAYS)
def test_leaving_with_everything_alive(how):
    def body(how):
        leave(how)

    assert run_body(body, how, also=(everything, leave)) == ""


def test_leaving_by_an_exception_says_only_that():
    def body():
        import subprocess

        code = (
            f"import sys; sys.path[:0] = {sys.path!r}\nimport kina\nkept = kina.zeros(3, device='cuda:0')\n"
            "with kina.session('cuda:0') as session:\n    raise KeyError('mine')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
        assert "kina" not in done.stderr.split("KeyError")[-1]

    run_body(body)


@pytest.mark.simulated
def test_nothing_is_asked_of_the_driver_at_exit():
    """Nor is anything waited for: the streams that are stalled stay so."""

    def body():
        held = everything()
        simulation().stall_all()
        held[1].zeros(10)
        globals()["kept"] = held

    assert run_body(body, also=(everything,), KINA_SIM_TIMEOUT_MS="5000") == ""


# Fork -----------------------------------------------------------------------------------------------------


def fork(what):
    """Fork, run what() in the child, and demand that it leaves as a child does: by sys.exit, with code 0."""
    child = os.fork()
    if child == 0:
        what()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status


def test_a_child_gets_a_clear_error():
    def body():
        held = everything()
        session, tensor, adopted, info = held[1], held[9], held[8], kina.devices()[0]

        def child():
            calls = [
                lambda: kina.session("cuda:0").__enter__(), lambda: kina.zeros(3, device="cuda:0"),
                lambda: kina.Runtime(0), session.synchronize, lambda: session.zeros(3), session.completion,
                lambda: adopted.to_host(tensor), lambda: kina.session(held[0]).__enter__(), session.counters,
                held[10].wait, tensor.to_dlpack, lambda: info.attributes,
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(kina.UnavailableError, match=r"forked.*spawn"):
                    call()
            assert not any(session.supports(capability) for capability in kina.Capability)
            with kina.session("cpu") as host:
                assert host.to_host(host.full(3, 1)).tolist() == [1, 1, 1]

        fork(child)
        session.synchronize()

    assert run_body(body, also=(everything, fork)) == ""


@pytest.mark.parametrize("how", ["drop", "close", "leave by an exception", "thread"])
def test_a_child_lets_go_in_silence(how):
    """Destructors do nothing there: not one call reaches the driver."""

    def body(how):
        sim = simulation()
        held = everything()

        def child():
            calls = sim.calls() if sim is not None else 0
            if how == "drop":
                held.clear()
                gc.collect()
            elif how == "close":
                held[8].close()
                held[2].__exit__(None, None, None)
                held[1].close()
                held[0].close()
            elif how == "leave by an exception":
                held[1].__exit__(KeyError, KeyError(), None)
            else:
                thread = threading.Thread(target=held.clear)
                thread.start()
                thread.join()
            if sim is not None:
                assert sim.calls() == calls, sim.call_counts()

        fork(child)
        if sim is not None:
            sim.wait_idle()

    assert run_body(body, how, also=(everything, fork)) == ""


def test_a_child_of_an_open_session_leaves_its_block():
    def body():
        with kina.session("cuda:0") as session:
            session.from_host(np.ones(100))
            child = os.fork()
            if child == 0:
                sys.exit(0)  # through the with block
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
            session.synchronize()

    assert run_body(body) == ""


def test_forking_before_the_first_use_is_fine():
    def body():
        child = os.fork()
        with kina.session("cuda:0") as session:
            assert session.to_host(session.full(3, 1)).tolist() == [1] * 3
        if child:
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status

    assert run_body(body) == ""
