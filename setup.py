"""Builds the extension modules. What can be declared stands in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext as _build_ext

ROOT = Path(__file__).parent
JOBS = int(os.environ.get("KINA_BUILD_JOBS", os.cpu_count() or 1))


def candidate_include_folders() -> list[tuple[str, Path]]:
    """Where cuda.h may be, the most explicit place first, each with the name of its origin."""
    found = []
    for variable in ("KINA_CUDA_INCLUDE", "CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            found.append((variable, Path(value) if variable == "KINA_CUDA_INCLUDE" else Path(value) / "include"))
    for package in ("nvidia.cu13", "nvidia.cuda_runtime"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        if spec and spec.submodule_search_locations:
            origin = f"the {package} package (nvidia-cuda-runtime)"
            found.extend((origin, Path(folder) / "include") for folder in spec.submodule_search_locations)
    found.append(("the usual place", Path("/usr/local/cuda/include")))
    return found


def cuda_version(header: Path) -> int:
    for line in header.read_text(errors="replace").splitlines():
        if line.startswith("#define CUDA_VERSION"):
            return int(line.split()[2])
    return 0


def cuda_include_folder() -> Path | None:
    """The folder that holds a usable cuda.h; None where kina.cuda is left out on purpose."""
    wanted = os.environ.get("KINA_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"KINA_CUDA is 'auto', '0' or '1', not {wanted!r}")
    if wanted == "0":
        return None
    looked = []
    for origin, folder in candidate_include_folders():
        header = folder / "cuda.h"
        if not header.is_file():
            looked.append(f"  {folder} ({origin}): no cuda.h")
        elif (version := cuda_version(header)) < 13000:
            looked.append(f"  {header} ({origin}): CUDA {version // 1000}.{version % 1000 // 10}, 13.0 is needed")
        else:
            return folder
    if wanted == "auto" and sys.platform != "linux":
        return None
    raise SystemExit(
        "kina: no CUDA headers were found, so kina.cuda cannot be built. Looked in:\n"
        + "\n".join(looked)
        + "\nRemedy: install them from PyPI (pip install 'nvidia-cuda-runtime>=13.0,<14'), or name a folder with"
        "\ncuda.h in KINA_CUDA_INCLUDE, or build without CUDA (KINA_CUDA=0)."
    )


# C and C++ that need no Python, and the extension module that holds them.
NATIVE = {"_core.pool": ("blocks.c", "pool.c"), "cuda.allocator": ("torch_entry.cpp",)}


def native_sources(room: str, module: str) -> list[str]:
    return [f"kina/{room}/native/{name}" for name in NATIVE.get(f"{room}.{module}", ())]


def native_headers(room: str) -> list[str]:
    return sorted(str(path) for path in (ROOT / "kina" / room / "native").glob("*.h"))


def extensions() -> list[Extension]:
    include = cuda_include_folder()
    folders = [str(ROOT / "kina" / "include")]
    rooms = ["_core"]
    if include is not None:
        rooms.append("cuda")
    else:
        print("kina: building without kina.cuda", file=sys.stderr)
    found = []
    for room in rooms:
        extra = [str(ROOT / "kina" / "cuda"), str(include)] if room == "cuda" else []
        for source in sorted((ROOT / "kina" / room).glob("*.pyx")):
            found.append(
                Extension(
                    f"kina.{room}.{source.stem}",
                    [str(source.relative_to(ROOT)), *native_sources(room, source.stem)],
                    depends=native_headers(room) if f"{room}.{source.stem}" in NATIVE else [],
                    include_dirs=folders + extra,
                    extra_compile_args=[
                        *OPTIMIZED,
                        "-Wall",
                        "-Wno-unused-function",
                        *WERROR,
                    ],
                    extra_link_args=["-Wl,-s"] if sys.platform == "linux" and not DEBUG else [],
                    libraries=["dl", "pthread"] if sys.platform == "linux" else [],
                )
            )
    return [each for each in found if ONLY is None or each.name in ONLY]


# Names of extension modules with a comma between: the others are known to be as they should (tests/mutation/run.py).
ONLY = os.environ["KINA_BUILD_ONLY"].split(",") if "KINA_BUILD_ONLY" in os.environ else None
DEBUG = os.environ.get("KINA_DEBUG") == "1"  # symbols stay in, for a debugger
QUICK = os.environ.get("KINA_QUICK") == "1"  # built in half the time, and slower to run
# Lines are traced, on Python 3.11. Build in place: the .c files must stay beside the .pyx files.
COVERAGE = os.environ.get("KINA_COVERAGE") == "1"
TRACED = [
    *("-O0", "-g0", "-DCYTHON_TRACE=1", "-DCYTHON_TRACE_NOGIL=1"),
    *("-include", str(ROOT / "tools" / "traced_mutex.h")),
]
OPTIMIZED = ["-O1", "-g"] if DEBUG else TRACED if COVERAGE else ["-O0", "-g0"] if QUICK else ["-O2", "-g0"]
# Off by default: a newer compiler's new warning must not break a user's install. The check script sets it.
WERROR = ["-Werror"] if os.environ.get("KINA_WERROR") == "1" else []


class build_ext(_build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or JOBS


setup(
    ext_modules=cythonize(
        extensions(),
        nthreads=JOBS,
        compiler_directives={
            "language_level": 3,
            "binding": True,
            "embedsignature": False,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "freethreading_compatible": False,
            "auto_pickle": False,
            "linetrace": COVERAGE,
        },
    ),
    cmdclass={"build_ext": build_ext},
)
