"""The committed table of driver functions, and of device attributes, is what its generator writes from the headers."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.cuda_build
def test_the_tables_are_current():
    """With the headers of the dependency group `headers`, which are those of the build."""
    command = [sys.executable, ROOT / "tools" / "generate_driver.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
