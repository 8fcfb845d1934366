"""Interpreter exit with everything alive: exit code 0, silence."""

import pytest
from helpers.processes import run_python

ALIVE = """
    import gc, sys, threading
    import numpy as np, kina
    s = kina.session("cpu"); s.__enter__()
    array = np.arange(6.0)
    kept = [s.zeros(3), s.adopt(array), s.adopt(array.__dlpack__()), s.adopt(bytearray(8)), s.zeros((2,) * 9)]
    kept += [t.to_dlpack() for t in kept] + [t.to_dlpack(versioned=False) for t in kept]
    kept += [np.from_dlpack(t) for t in kept[:2]] + [t[1:] for t in kept[:3]] + [s.completion(), kina.f32(2)]
    cycle = [s, *kept]
    cycle.append(cycle)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "del array, kept, s",
        "sys.exit(0)",
        "gc.disable(); del kept",
        "sys.keep = cycle",
        "import builtins; builtins.keep = kept",
        "import atexit; atexit.register(lambda: kept.clear() or cycle.clear())",
        "threading.Thread(target=lambda: [kina.zeros(3) for _ in range(3)]).start()",
        "t = threading.Thread(target=kina.session('cpu').__enter__); t.start(); t.join()",
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
)
def test_exit_is_silent(ending):
    assert run_python(ALIVE + "    " + ending) == ""


@pytest.mark.torch
def test_torch_holds_kina_and_kina_holds_torch():
    run_python(
        ALIVE
        + """
    import torch
    theirs = torch.arange(4)
    mine = [s.adopt(theirs), s.adopt(theirs.__dlpack__()), torch.from_dlpack(kept[0])]
    """
    )


def test_an_unhandled_exception_is_the_only_thing_said():
    import subprocess
    import sys
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ALIVE) + "raise LookupError('mine')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("LookupError: mine")
    assert done.stderr.count("Traceback") == 1
    assert "ignored" not in done.stderr


def test_fork_in_the_middle():
    run_python(
        ALIVE
        + """
    import os
    child = os.fork()
    if child == 0:
        assert s.to_host(kept[0]).tolist() == [0, 0, 0]
        kept.clear()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    )
