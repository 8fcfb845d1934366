#!/usr/bin/env python3
"""One command for every linter and formatter, on the tools of the dependency group `lint`.

    python tools/lint.py            report
    python tools/lint.py --fix      repair what the tools can repair, then report
    python tools/lint.py --only ruff --only codespell

`python3 tools/check.py --lane lint` installs the tools, installs kina (the stubs are compared with it) and
runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARIES = Path(sys.executable).parent
CODE = ("kina", "kernels", "tests", "benchmarks", "examples", "tools")
PROSE = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "setup.py", ".ci")
GENERATED = {"kina/cuda/driver_table.h", "kina/cuda/driver_table.pxd"}
LINE_LENGTH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["line-length"]


def sources(*suffixes: str) -> Iterator[Path]:
    """Hand-written files of these kinds, relative to the root."""
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT)
            made_by_cython = path.suffix in (".c", ".cpp") and path.with_suffix(".pyx").exists()
            if path.suffix in suffixes and str(name) not in GENERATED and not made_by_cython:
                yield name


def run(*command: object, cwd: Path = ROOT, **extra: str) -> bool:
    environment = os.environ | {"PATH": f"{BINARIES}{os.pathsep}{os.environ.get('PATH', '')}"} | extra
    return subprocess.run([str(word) for word in command], cwd=cwd, env=environment).returncode == 0


def ruff(fix: bool) -> bool:
    where = [name for name in (*CODE, "docs", "setup.py") if (ROOT / name).exists()]
    if fix:
        run(BINARIES / "ruff", "check", "--fix", "--quiet", *where)
        run(BINARIES / "ruff", "format", "--quiet", *where)
    checked = run(BINARIES / "ruff", "check", "--quiet", *where)
    return run(BINARIES / "ruff", "format", "--check", "--quiet", *where) and checked


def cython_lint(fix: bool) -> bool:
    length = f"--max-line-length={LINE_LENGTH}"
    return run(BINARIES / "cython-lint", length, *sources(".pyx", ".pxd", ".pxi"))


def codespell(fix: bool) -> bool:
    write = ["--write-changes"] if fix else []
    prose = [name for name in PROSE if (ROOT / name).exists()]
    return run(BINARIES / "codespell", *write, *(name for name in CODE if (ROOT / name).exists()), *prose)


def clang_format(fix: bool) -> bool:
    files = list(sources(".c", ".h", ".cpp", ".cu", ".cuh"))
    if fix:
        run(BINARIES / "clang-format", "-i", *files)
    return run(BINARIES / "clang-format", "--dry-run", "-Werror", *files)


def stubs(fix: bool) -> bool:
    write = [] if fix else ["--check"]
    return run(sys.executable, ROOT / "tools" / "stubs.py", *write)


def modules_without_stubs() -> list[str]:
    sources = (path.relative_to(ROOT) for path in sorted((ROOT / "kina").rglob("*.pyx")))
    return [".".join(name.with_suffix("").parts) for name in sources if not name.with_suffix(".pyi").exists()]


def stubtest(fix: bool) -> bool:
    """The stubs of the tree against the installed package, from a folder where the tree is not imported."""
    with tempfile.TemporaryDirectory() as away:
        # What has no public name has no stub, and stubtest is told so.
        without = Path(away) / "without_stubs.txt"
        without.write_text("".join(f"{re.escape(name)}\n" for name in modules_without_stubs()))
        command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--ignore-disjoint-bases"]
        command += ["--mypy-config-file", ROOT / "tools" / "stubtest.ini"]
        command += ["--allowlist", ROOT / "tools" / "stubtest_allowlist.txt", "--ignore-unused-allowlist"]
        command += ["--allowlist", without]
        return run(*command, "kina", cwd=Path(away), MYPYPATH=str(ROOT))


CHECKS: dict[str, Callable[[bool], bool]] = {
    "ruff": ruff,
    "cython-lint": cython_lint,
    "codespell": codespell,
    "clang-format": clang_format,
    "stubs": stubs,
    "stubtest": stubtest,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="repair what can be repaired")
    parser.add_argument("--only", action="append", choices=CHECKS, help="run only this one")
    chosen = parser.parse_args()
    failed = []
    for name, check in CHECKS.items():
        if chosen.only and name not in chosen.only:
            continue
        print(f"== {name}", flush=True)
        if not check(chosen.fix):
            failed.append(name)
    print(f"lint: {', '.join(failed)} failed" if failed else "lint: clean")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
