# ruff: noqa: F821
# Bodies run in a process of their own, behind the names of helpers.cuda.PRELUDE.
"""Storage and retirement under threads that Python has never seen; retire_stress.pyx says what it looks for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.compiler import compile_extension

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return str(compile_extension(Path(__file__).with_name("retire_stress.pyx"), tmp_path_factory.mktemp("stress")))


def load(path):
    import importlib.util

    from kina.cuda import load_sessions

    load_sessions()
    spec = importlib.util.spec_from_file_location("retire_stress", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stress(library):
    """Nothing is given back while the device uses it, everything is in the end, and no rule of the driver is broken."""
    from helpers.cuda import run_body

    def body(path):
        import importlib

        from helpers.invariants import assert_all_idle, settle, unbroken

        stress = load(path)
        asynchronous, plain = kina.memory.CudaAsyncMemoryResource(0), kina.memory.CudaMemoryResource(0)
        done = stress.stress(asynchronous, plain, threads=4, generations=3, rounds=200, seed=1)
        assert all(done.values()), done
        settle(sim, 0)
        importlib.import_module("kina.cuda.reaper")._end()  # it may have in hand what is looked for now
        stress.finish()
        assert (asynchronous.live_bytes, plain.live_bytes) == (0, 0)
        del asynchronous, plain
        gc.collect()
        unbroken(sim)
        assert_all_idle(sim, 0)

    run_body(body, library, also=[load], timeout=300)


def test_a_harvest_that_is_late_takes_no_newer_segment(library):
    """Even at the address of the one that it found complete; where memory is checked, or lines are traced (which takes
    memory meanwhile), addresses may not come again."""
    from helpers.cuda import run_body

    def body(path, checked):
        reused, kept = load(path).late_harvest()
        assert reused or checked
        assert kept

    checked = "KINA_SIM_SANITIZE" in os.environ or "COVERAGE_PROCESS_START" in os.environ
    run_body(body, library, checked, also=[load])


def test_what_another_thread_looks_at_is_not_gone(library):
    """Who finds no room for more waits for it, and is not told that there is nothing to wait for."""
    from helpers.cuda import run_body

    def body(path):
        plain = kina.memory.CudaMemoryResource(0)
        assert load(path).looked_at_meanwhile(plain) == (False, 0)
        assert plain.live_bytes == 0

    run_body(body, library, also=[load])
