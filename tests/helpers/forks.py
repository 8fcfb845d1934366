"""Children that start in milliseconds: forks of a process that has imported everything and initialised nothing.

A test that may poison a device, crash or hang runs each of its cases in a child of its own. A fresh interpreter takes a
third of a second for that; a fork of one that stands ready takes some milliseconds, and CUDA works in it as in any
process that never used it before.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Forks", "Outcome", "serve"]

TESTS = Path(__file__).resolve().parents[1]


class Outcome(NamedTuple):
    """How a child ended."""

    status: int  # exit code, or the negative number of the signal
    result: Any  # what the function returned, None if it did not come to that
    error: str  # its traceback, "" if there was none
    stderr: str


class Forks:
    """A process that stands ready, and the children it forks.

    Parameters
    ----------
    module : str
        Imported there once; its functions are what children run.
    env
        Added to the environment of the process. It takes its name for CUDA's driver from there.
    """

    def __init__(self, module: str, **env: str) -> None:
        self.module = module
        self._process: subprocess.Popen[bytes] | None = None
        # Forking beside threads is what Python 3.12 warns of: NumPy's own are told not to be.
        self._env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **env}

    def run(
        self, function: str, *arguments: Any, timeout: float = 60, leave: bool = False, env: Mapping[str, str] = {}
    ) -> Outcome:
        """Run `function(*arguments)` of the module in a new child.

        Parameters
        ----------
        timeout
            Seconds after which the child is killed (status -9).
        leave
            The child ends as an interpreter does, exit handlers and all, not at once.
        env
            Set in the child before the function runs.
        """
        if self._process is None:
            path = f"import sys; sys.path.insert(0, {str(TESTS)!r})"
            code = f"{path}; from helpers.forks import serve; serve({self.module!r})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._env
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((function, arguments, timeout, leave, dict(env)), self._process.stdin)
            self._process.stdin.flush()
            return Outcome(*pickle.load(self._process.stdout))
        except (BrokenPipeError, EOFError):
            raise RuntimeError(f"the process that forks has ended: {self._process.wait()}") from None

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError), self._process:
                pass  # its end of the input is what ends it
            self._process = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _wait(child: int, until: float) -> int:
    """The child's exit status; it is killed when its time is over."""
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], max(0.0, until - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(handle)


def serve(module: str) -> None:
    """Fork a child for each request until the input ends. Returns in a child that leaves as an interpreter does."""
    loaded = importlib.import_module(module)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    gc.freeze()  # what a child collects is its own, and the pages of the rest stay shared
    while True:
        try:
            function, arguments, timeout, leave, env = pickle.load(requests)
        except EOFError:
            return
        with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as stderr:
            child = os.fork()
            if child == 0:
                os.dup2(stderr.fileno(), 2)
                os.dup2(2, 1)
                os.environ.update(env)
                answer, error = None, ""
                try:
                    answer = getattr(loaded, function)(*arguments)
                except BaseException:
                    error = traceback.format_exc()
                pickle.dump((answer, error), result)
                result.flush()
                if leave:
                    return
                os._exit(1 if error else 0)
            status = _wait(child, time.monotonic() + timeout)
            result.seek(0)
            answer, error = None, ""
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                answer, error = pickle.load(result)
            stderr.seek(0)
            pickle.dump((status, answer, error, stderr.read().decode(errors="replace")), answers)
            answers.flush()
