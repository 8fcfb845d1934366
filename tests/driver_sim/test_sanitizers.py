# ruff: noqa: F821
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
"""What a lane without a report is worth: a fault that is planted is reported, and fails."""

from __future__ import annotations

import os

import pytest

SANITIZERS = os.environ.get("KINA_SIM_SANITIZE", "").split(",")

pytestmark = pytest.mark.sanitized


def overrun():
    """The driver reads 16 bytes of a host block of 8."""
    start()
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    ok(cu.cuMemcpyHtoD(ok(cu.cuMemAlloc(16)), libc.malloc(8), 16))


def unordered():
    """Two streams fill the same bytes."""
    start()
    address = ok(cu.cuMemAlloc(1 << 20))
    for s in [stream(), stream()] * 10:
        ok(cu.cuMemsetD8Async(address, 1, 1 << 20, s))
    ok(cu.cuCtxSynchronize())


PLANTED = {"address": (overrun, "heap-buffer-overflow"), "thread": (unordered, "data race")}


@pytest.mark.parametrize("sanitizer", [name for name in SANITIZERS if name in PLANTED])
def test_what_is_planted_is_reported(inside, monkeypatch, tmp_path, sanitizer):
    body, words = PLANTED[sanitizer]
    monkeypatch.setenv("KINA_SIM_REPORTS", str(tmp_path))
    done = inside(body, check=False)
    assert done.returncode != 0
    (report,) = tmp_path.iterdir()
    assert words in report.read_text()
    assert "/driver_sim/" in report.read_text()  # it is the simulation that is instrumented, down to its lines
