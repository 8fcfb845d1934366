"""Build the simulated libcuda.so.1.

    python tests/driver_sim/build.py --out DIR [--include DIR] [--sanitize address|thread|undefined]

Needs a C++17 compiler and the cuda.h of CUDA 13.0 (the nvidia-cuda-runtime wheel has it). Two small
tables are generated from the headers first: the names of results, and the names and versions that
cuGetProcAddress answers for.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SONAME = "libcuda.so.1"
DRIVER_VERSION = 13000


def find_include() -> Path:
    """The folder of cuda.h: KINA_CUDA_INCLUDE, the PyPI wheel, or a system toolkit."""
    candidates = []
    if os.environ.get("KINA_CUDA_INCLUDE"):
        candidates.append(Path(os.environ["KINA_CUDA_INCLUDE"]))
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        spec = None
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(p) / "include" for p in spec.submodule_search_locations]
    candidates.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include")
    for folder in candidates:
        if (folder / "cuda.h").is_file():
            return folder
    raise SystemExit("cuda.h not found: pip install nvidia-cuda-runtime==13.0.96, or give --include")


def error_table(header: str) -> str:
    body = re.search(r"typedef enum cudaError_enum \{(.*?)\} CUresult;", header, re.S)
    if body is None:
        raise SystemExit("cuda.h has no enum of results")
    rows = re.findall(r"^\s*(CUDA_\w+)\s*=\s*(\d+)", body.group(1), re.M)
    return "".join(f'{{{code}, "{name}"}},\n' for name, code in rows)


def proc_table(typedefs: str) -> str:
    """Rows (name, version, symbol or null, stub) for every function pointer type of the header."""
    versions: dict[str, set[int]] = {}
    for name, version, suffix in re.findall(r"\*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)", typedefs):
        if not suffix and int(version) <= DRIVER_VERSION:
            versions.setdefault(name, set()).add(int(version))
    # Graph instantiation got its present form under another symbol.
    versions["cuGraphInstantiate"].add(12000)
    symbols = {("cuGraphInstantiate", 12000): "cuGraphInstantiateWithFlags"}
    declared, stubs, rows = [], [], []
    for name in sorted(versions):
        for index, version in enumerate(sorted(versions[name])):
            symbol = symbols.get((name, version), name if index == 0 else f"{name}_v{index + 1}")
            # Weak, so that what is not implemented is null; the one is defined beside the table.
            weak = "" if symbol == "cuGetProcAddress_v2" else "__attribute__((weak)) "
            declared.append(f'extern "C" {weak}void {symbol}_(void) __asm__("{symbol}");\n')
            stub = f"stub_{name}_{version}"
            stubs.append(f'[[noreturn]] static void {stub}() {{ missing("{name}", {version}); }}\n')
            pointers = ", ".join(f"reinterpret_cast<void *>(&{f})" for f in (f"{symbol}_", stub))
            rows.append(f'    {{"{name}", {version}, {pointers}}},\n')
    members = "    const char *name;\n    int version;\n    void *function;\n    void *stub;\n"
    head = f"struct ProcRow {{\n{members}}};\n"
    return (
        "".join(sorted(set(declared)))
        + "".join(stubs)
        + head
        + "static const ProcRow kProcTable[] = {\n"
        + "".join(rows)
        + "};\n"
    )


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}")


def build(out: Path, include: Path | None = None, sanitize: str | None = None, jobs: int | None = None) -> Path:
    """Compile everything into `out` and return the library's path. Unchanged sources are kept."""
    include = include or find_include()
    work = out / "objects"
    work.mkdir(parents=True, exist_ok=True)
    write_if_changed(work / "error_names.inc", error_table((include / "cuda.h").read_text()))
    write_if_changed(work / "proc_table.inc", proc_table((include / "cudaTypedefs.h").read_text()))
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror",
             "-fvisibility=hidden", f"-isystem{include}", f"-I{work}", f"-I{HERE}"]  # fmt: skip
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    headers = max(p.stat().st_mtime for p in [*HERE.glob("*.h"), *work.glob("*.inc"), Path(__file__)])

    def compile_one(source: Path) -> Path:
        target = work / (source.stem + ".o")
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, headers):
            run([*compiler, *flags, "-c", str(source), "-o", str(target)])
        return target

    sources = sorted(HERE.glob("*.cpp"))
    with ThreadPoolExecutor(jobs or min(4, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compile_one, sources))
    library = out / SONAME
    # -Bsymbolic: calls inside the library stay inside, whatever else the process has loaded.
    link = [
        "-shared",
        f"-Wl,-soname,{SONAME}",
        "-Wl,-Bsymbolic",
        f"-Wl,--version-script={HERE / 'exports.map'}",
    ]
    run([*compiler, *flags, *link, *map(str, objects), "-o", str(library)])
    return library


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the simulated libcuda.so.1.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--include", type=Path)
    parser.add_argument("--sanitize")
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args(argv)
    print(build(args.out.resolve(), args.include, args.sanitize, args.jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
