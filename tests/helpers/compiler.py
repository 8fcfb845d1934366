"""Compiling small C and C++ files against kina's headers."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import kina

INCLUDE = Path(kina.__file__).parent / "include"


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    """Compile with warnings as errors; the compiler's words are the failure."""
    plus = source.suffix == ".cpp"
    compiler = shlex.split(os.environ.get("CXX" if plus else "CC", "c++" if plus else "cc"))
    command = [
        *compiler,
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{INCLUDE}",
        *flags,
        str(source),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return target
