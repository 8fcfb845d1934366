"""The C below the pool on its own, under the sanitizers: nothing of Python or of a driver is in the way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers.compiler import INCLUDE, compile_c

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "kina" / "_core" / "native"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress(sanitizer, tmp_path):
    """Threads, streams that open and close, fences that fail, a full upstream; pool_stress.c says what it looks for."""
    sources = [str(NATIVE / "pool.c"), str(NATIVE / "blocks.c")]
    flags = ["-std=gnu11", "-O1", "-g", f"-fsanitize={sanitizer}", f"-I{NATIVE}", f"-I{INCLUDE}", "-pthread"]
    binary = compile_c(Path(__file__).with_name("pool_stress.c"), tmp_path / "stress", *flags, *sources)
    done = subprocess.run([binary, "4", "1000", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("allocations ") == 3
