"""Build the simulated libcuda.so.1.

    python tests/driver_sim/build.py --out DIR [--include DIR] [--sanitize address,undefined|thread]

Needs a C++17 compiler and the cuda.h of CUDA 13.0 (the nvidia-cuda-runtime wheel has it). Two small
tables are generated from the headers first: the names of results, and the names and versions that
cuGetProcAddress answers for.

The sources are compiled as two units: reading the headers of the standard library once for each source cost three
times the work. So names must differ across sources, anonymous namespaces or not.
"""

from __future__ import annotations

import argparse
import hashlib
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
UNITS = 2


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


def compile_unit(number: int, sources: list[Path], command: list[str], work: Path, common: bytes) -> Path:
    """One object of several sources, named by everything it was made of: a stale one is never taken."""
    unit = work / f"unit_{number}.cpp"
    write_if_changed(unit, "".join(f'#include "{source}"\n' for source in sources))
    digest = hashlib.sha256(common + repr(command).encode())
    for source in sources:
        digest.update(str(source).encode() + b"\0" + source.read_bytes() + b"\0")
    target = work / f"unit_{number}_{digest.hexdigest()[:16]}.o"
    if not target.exists():
        for stale in work.glob(f"unit_{number}_*.o"):
            stale.unlink()
        # Under its name only when whole, should the compiler be interrupted.
        run([*command, "-c", str(unit), "-o", str(target.with_suffix(".partial"))])
        target.with_suffix(".partial").replace(target)
    return target


def build(out: Path, include: Path | None = None, sanitize: str | None = None, jobs: int | None = None) -> Path:
    """Compile everything into `out` and return the library's path. Units whose sources did not change are kept."""
    include = include or find_include()
    work = out / "objects"
    work.mkdir(parents=True, exist_ok=True)
    headers = {name: (include / name).read_text() for name in ("cuda.h", "cudaTypedefs.h")}
    tables = [error_table(headers["cuda.h"]), proc_table(headers["cudaTypedefs.h"])]
    for name, table in zip(("error_names.inc", "proc_table.inc"), tables, strict=True):
        write_if_changed(work / name, table)
    own = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    common = repr((headers, tables, own)).encode()
    # -g1: lines for stack traces, at a third of the time that full debugging information takes.
    flags = ["-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror",
             "-fvisibility=hidden", f"-isystem{include}", f"-I{work}", f"-I{HERE}"]  # fmt: skip
    if sanitize:
        # Not enum: callers in C may pass any number where cuda.h has an enumeration, and tests do.
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize=enum", "-fno-sanitize-recover=undefined"]
        flags += ["-fno-omit-frame-pointer"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    sources = sorted(HERE.glob("*.cpp"))
    with ThreadPoolExecutor(jobs or min(UNITS, os.cpu_count() or 1)) as pool:
        made = [
            pool.submit(compile_unit, number, sources[number::UNITS], [*compiler, *flags], work, common)
            for number in range(UNITS)
        ]
        objects = [unit.result() for unit in made]
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
