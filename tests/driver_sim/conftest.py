"""Each test of the simulation runs the body of a function in a process of its own."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.driver_sim import run_simulated

PRELUDE = """
import ctypes, json, os, sys, threading, time
import numpy as np
from cuda.bindings import driver as cu
from helpers.driver_sim import KERNELS_PTX, Sim

def ok(result):
    assert result[0] == 0, (result[0], traceback_name())
    return result[1] if len(result) == 2 else result[1:] if len(result) > 2 else None

def traceback_name():
    return sys._getframe(2).f_lineno

def code(result):
    return int(result[0])

def start(device=0):
    ok(cu.cuInit(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxSetCurrent(context))
    return context

def stream(flags=1):
    return ok(cu.cuStreamCreate(flags))

def event():
    return ok(cu.cuEventCreate(2))

def array(values, s=None):
    data = np.asarray(values, dtype=np.float32)
    address = ok(cu.cuMemAlloc(data.nbytes))
    ok(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
    return address

def floats(address, n):
    return np.frombuffer(sim.read(int(address), 4 * n), np.float32)

def kernels():
    module = ok(cu.cuModuleLoadData(KERNELS_PTX.read_bytes() + b"\\0"))
    return module, lambda name: ok(cu.cuModuleGetFunction(module, name.encode()))

def fill(f, s, address, value, n):
    args = ((cu.CUdeviceptr(int(address)), value, n), (None, ctypes.c_float, ctypes.c_uint))
    return cu.cuLaunchKernel(f, (n + 255) // 256, 1, 1, 256, 1, 1, 0, s, args, 0)

def copy(f, s, to, source, n):
    args = ((cu.CUdeviceptr(int(to)), cu.CUdeviceptr(int(source)), n), (None, None, ctypes.c_uint))
    return cu.cuLaunchKernel(f, (n + 255) // 256, 1, 1, 256, 1, 1, 0, s, args, 0)

sim = Sim()
"""


@pytest.fixture
def inside() -> Callable[..., Any]:
    """Run a function's body, after `setup`, in a simulated process: `inside(body, devices=2)`."""

    def call(body: Callable[[], None], *, setup: str = "", **settings: Any) -> Any:
        source = setup + textwrap.dedent(inspect.getsource(body))
        tests = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
        env = {"PYTHONPATH": path, **settings.pop("env", {})}
        return run_simulated(f"{PRELUDE}\n{source}\n{body.__name__}()\n", env=env, **settings)

    return call
