"""Compiling small C, C++ and Cython files against kina."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from helpers import driver_sim

import kina

INCLUDE = Path(kina.__file__).parent / "include"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Without what is loaded into each process of a test: under a sanitizer a compiler takes ten times as long."""
    env = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "COVERAGE_PROCESS_START")}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


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
    done = run(command)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return target


def compile_extension(source: Path, folder: Path, *, control: bool = True) -> Path:
    """Compile a Cython file that cimports kina.cuda; with `control`, one that calls the simulated driver's control.

    With its sanitizers, where those are asked for. Gives the path of the extension module.
    """
    sanitize = os.environ.get("KINA_SIM_SANITIZE")
    translated = folder / f"{source.stem}.c"
    command = [sys.executable, "-m", "cython", "--3str", "-I", INCLUDE.parents[1], source, "-o", translated]
    command = [str(word) for word in command]
    done = run(command)
    assert (done.returncode, done.stderr) == (0, ""), f"{shlex.join(command)}\n{done.stderr}"
    own = [f"-I{each}" for each in (INCLUDE.parent / "cuda", driver_sim.SOURCES)]
    others = [f"-isystem{each}" for each in (sysconfig.get_path("include"), driver_sim.cuda_include())]
    linked = [str(driver_sim.library_path(sanitize))] if control else []
    return compile_c(
        translated,
        folder / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}",
        *("-O1", "-g", "-shared", "-fPIC", "-pthread", "-Wl,--no-as-needed", "-Wno-extra", "-Wno-unused-function"),
        *((f"-fsanitize={sanitize}", "-fno-omit-frame-pointer") if sanitize else ()),
        *(*own, *others, *linked),
    )


def compile_c_extension(source: Path, folder: Path) -> Path:
    """Compile an extension module that is written in C and knows kina's public headers alone."""
    return compile_c(
        source,
        folder / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}",
        *("-O2", "-g", "-shared", "-fPIC", "-Wno-unused-parameter", "-Wno-missing-field-initializers"),
        *("-Wno-cast-function-type", f"-isystem{sysconfig.get_path('include')}"),
    )
