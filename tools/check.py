#!/usr/bin/env python3
"""Build kina, install it into environments of its own and pass every check that needs no GPU.

Standard library only: a fresh machine needs Python 3.11+ and a C compiler, nothing else.

    python3 tools/check.py                  every lane
    python3 tools/check.py --lane host      one lane (repeatable)
    python3 tools/check.py --list           what the lanes are

The environments live in .venv-check and are used again by the next run; kina is built anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
SUMMARY = re.compile(r"^(=+ )?(\d+ [a-z]+(, )?)+ in [\d.]+s")
HOST_TESTS = "not cuda"  # tests/helpers/lanes.py marks all that need a driver so
# Tests whose files cannot even be read without cuda-bindings or the headers of CUDA.
NEED_CUDA = ("cuda", "driver_sim", "interpose")
# Sanitizers of the simulated driver, and those of kina beside them: UBSan triples the time that building kina takes.
SANITIZERS = {"address,undefined": "address", "thread": "thread"}
# Tests of kina where threads meet, and of what ends late or never.
CONCURRENT = (
    *("cuda/test_context.py", "cuda/test_exit.py", "cuda/test_hostile.py", "cuda/test_integrations.py"),
    *("cuda/test_pool.py", "cuda/test_promises.py", "cuda/test_reaper.py", "cuda/test_refs.py", "cuda/test_retire.py"),
    *("cuda/test_runtime.py", "cuda/test_session.py", "cuda/test_stream.py", "native/test_retire_stress.py"),
)
COVERED = 90  # percent of the lines of kina.cuda, at least

# What a check must not inherit from the shell that started it, and what of kina's own it may.
SCRUBBED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
KEPT = ("KINA_BUILD_JOBS", "KINA_CUDA_INCLUDE")


class Failure(Exception):
    """A lane failed; the output above says how."""

    def __init__(self, message: str, lines: list[str] | None = None) -> None:
        super().__init__(message)
        self.lines = lines or []


@dataclass
class Check:
    folder: Path
    with_torch: bool
    pytest_arguments: list[str] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)
    _main: Path | Failure | None = None

    # -- commands

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in KEPT or not (name in SCRUBBED or name.startswith("KINA_"))
        }
        return kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"} | extra

    def run(self, *command: object, cwd: Path = ROOT, **extra: str) -> list[str]:
        """Run a command with its output shown as it comes; the lines are returned."""
        words = [str(word) for word in command]
        print("+", *words, flush=True)
        lines = []
        with subprocess.Popen(
            words,
            cwd=cwd,
            env=self.environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
        if process.returncode != 0:
            raise Failure(f"{Path(words[0]).name} ended with {process.returncode}", lines)
        return lines

    # -- environments

    @cached_property
    def project(self) -> dict:
        return tomllib.loads((ROOT / "pyproject.toml").read_text())

    def group(self, name: str) -> list[str]:
        """The requirements of a dependency group (pip learned --group only in 25.1)."""
        found = []
        for item in self.project["dependency-groups"][name]:
            found += self.group(item["include-group"]) if isinstance(item, dict) else [item]
        return found

    def venv(self, name: str) -> Path:
        """The bin folder of an environment, made if there is none for this Python."""
        folder = self.folder / name
        marker = folder / "made-by"
        identity = f"{sys.version}\n{sys.executable}\n"
        if not marker.is_file() or marker.read_text() != identity:
            shutil.rmtree(folder, ignore_errors=True)
            self.run(sys.executable, "-m", "venv", folder)
            marker.write_text(identity)
        return folder / "bin"

    def install(self, binaries: Path, *requirements: object) -> None:
        if requirements:
            self.run(binaries / "python", "-m", "pip", "install", "-qq", *requirements)

    def build(self, name: str, binaries: Path, **extra: str) -> Path:
        """A wheel of the tree as it is, made in a clean copy so that nothing stale can enter it."""
        source = self.folder / "source" / name
        wheels = self.folder / "wheels" / name
        for folder in (source, wheels):
            shutil.rmtree(folder, ignore_errors=True)
        copy_tree(source)
        pip = (binaries / "python", "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", wheels)
        self.run(*pip, source, KINA_WERROR="1", **extra)
        (wheel,) = wheels.glob("kina-*.whl")
        return wheel

    def put(self, binaries: Path, wheel: Path) -> None:
        """Install exactly this wheel, and see that it is the one that is imported."""
        self.install(binaries, "--force-reinstall", "--no-deps", wheel)
        code = "import kina; print(kina.__file__)"
        (where,) = self.run(binaries / "python", "-c", code, cwd=self.folder)
        if not Path(where).resolve().is_relative_to(binaries.parent.resolve()):
            raise Failure(f"kina was imported from {where}, not from the environment under test")

    @property
    def main(self) -> Path:
        """The environment with the full build, which every lane but `nocuda` and `examples` shares."""
        if isinstance(self._main, Failure):
            raise Failure("the build failed before", self._main.lines)
        if self._main is None:
            try:
                binaries = self.venv("main")
                wheel = self.build("main", binaries)
                self.install(binaries, wheel, *self.group("test"), *self.group("toolkit"), *self.group("peers"))
                self.put(binaries, wheel)
            except Failure as failure:
                self._main = failure
                raise
            self._main = binaries
        return self._main

    def tree(self, name: str, **extra: str) -> Path:
        """A clean copy of the tree with the extension modules beside their sources, for PYTHONPATH."""
        source = self.folder / "source" / name
        shutil.rmtree(source, ignore_errors=True)
        copy_tree(source)
        if "KINA_COVERAGE" not in extra:  # what Cython made for the wheel; a source that has changed since is newer
            for made in (self.folder / "source" / "main").glob("kina/*/*.c"):
                if made.with_suffix(".pyx").exists():
                    shutil.copy2(made, source / made.relative_to(self.folder / "source" / "main"))
        self.run(self.main / "python", "setup.py", "-q", "build_ext", "--inplace", cwd=source, **extra)
        # Only looked for: an instrumented module is loaded by a process that has the runtime of its sanitizer.
        code = "import importlib.util; print(importlib.util.find_spec('kina').origin)"
        (where,) = self.run(self.main / "python", "-c", code, cwd=self.folder, PYTHONPATH=str(source))
        if not Path(where).is_relative_to(source):
            raise Failure(f"kina was imported from {where}, not from {source}")
        return source

    def driver(self, devices: int, sanitize: str | None = None, reports: Path | None = None) -> dict[str, str]:
        """What the environment of a test needs to find the simulated driver, which is built if it changed."""
        kept = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH"), "KINA_SIM_REPORTS": reports and str(reports)}
        base = {name: value for name, value in kept.items() if value}
        code = f"print(json.dumps(sim_env({devices}, base={base}, sanitize={sanitize!r})))"
        code = f"import json; from helpers.driver_sim import sim_env; {code}"
        (line,) = self.run(self.main / "python", "-c", code, PYTHONPATH=str(ROOT / "tests"))
        return json.loads(line)

    # -- pytest

    def pytest(self, binaries: Path, lane: str, *arguments: object, **extra: str) -> None:
        """Run pytest from a folder where the checkout cannot be imported by accident."""
        away = self.folder / "run" / lane
        away.mkdir(parents=True, exist_ok=True)
        report = away / "junit.xml"
        command = [
            binaries / "pytest",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            ROOT,
            f"--junit-xml={report}",
        ]
        command += ["-o", f"cache_dir={away / 'cache'}", *arguments, *self.pytest_arguments]
        failure = None
        try:
            lines = self.run(*command, cwd=away, **extra)
        except Failure as caught:
            failure, lines = caught, caught.lines
        summary = next((line for line in reversed(lines) if SUMMARY.match(line)), None)
        if summary is not None:
            self.summaries.append(f"{lane:12} {summary.strip('= ')}")
        if failure is not None:
            raise Failure(summary.strip("= ") if summary else f"{failure}, without a summary", lines)
        if summary is None or " passed" not in summary:
            raise Failure("pytest passed no test", lines)


def copy_tree(target: Path) -> None:
    """What a build reads, without what earlier builds in the checkout left behind."""
    shutil.copytree(ROOT / "kina", target / "kina", ignore=generated)
    for name in ("kernels", "examples", "tools"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=generated)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target / name)


def generated(folder: str, names: list[str]) -> list[str]:
    made = {"__pycache__"}
    for name in names:
        stem = Path(folder, name)
        if name.endswith(".so") or (name.endswith((".c", ".cpp")) and stem.with_suffix(".pyx").exists()):
            made.add(name)
    return sorted(made)


# -- lanes


def host(check: Check) -> None:
    """Tests of the installed wheel that need no CUDA driver."""
    binaries = check.main
    extra = {}
    if check.with_torch:
        check.install(binaries, TORCH)
        extra["KINA_REQUIRE_TORCH"] = "1"
    check.pytest(binaries, "host", "-m", HOST_TESTS, ROOT / "tests", **extra)


def nocuda(check: Check) -> None:
    """The build without CUDA (what macOS gets) and its host tests, with nothing of CUDA installed."""
    binaries = check.venv("nocuda")
    wheel = check.build("nocuda", binaries, KINA_CUDA="0")
    needed = [line for line in check.project["project"]["dependencies"] if "sys_platform" not in line]
    check.install(binaries, *needed, *check.group("test"))
    check.put(binaries, wheel)
    tests = [path for path in sorted((ROOT / "tests").iterdir()) if path.name not in NEED_CUDA]
    found = [path for path in tests if path.is_dir() or path.name.startswith("test_")]
    check.pytest(binaries, "nocuda", "-m", HOST_TESTS, *found, KINA_EXPECT_NO_CUDA="1")


def every(runs: dict[str, Callable[[], None]]) -> None:
    """Each of them, whichever fails before."""
    failures = []
    for name, run in runs.items():
        try:
            run()
        except Failure as failure:
            failures.append(f"{name}: {failure}")
    if failures:
        raise Failure("; ".join(failures))


def simulated(check: Check) -> None:
    """The tests of CUDA on the simulated driver with two devices, none and one; four has the coverage lane."""

    def run(devices: int, marked: str) -> None:
        check.pytest(check.main, f"simulated-{devices}", "-m", marked, ROOT / "tests", **check.driver(devices))

    passes = {2: "cuda", 0: "no_device", 1: "cuda"}
    every({f"{devices} devices": partial(run, devices, marked) for devices, marked in passes.items()})


def sanitizers(check: Check) -> None:
    """The simulated driver, and what kina does with threads, under ASan with UBSan and under TSan."""
    tests = [ROOT / "tests" / name for name in ("driver_sim", *CONCURRENT)]

    def run(driver: str, own: str) -> None:
        reports = check.folder / "run" / f"reports-{own}"
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir(parents=True)
        flags = f"-fsanitize={own} -fno-omit-frame-pointer"
        tree = check.tree(own, CFLAGS=flags, LDFLAGS=flags, KINA_DEBUG="1")
        environment = check.driver(2, driver, reports) | {"PYTHONPATH": str(tree)}
        try:
            check.pytest(check.main, f"sanitizers-{own}", *tests, **environment)
        finally:
            found = sorted(reports.iterdir())
            for report in found:
                print(report.read_text(errors="replace"), flush=True)
        if found:  # of processes that end as a test expects, and of those that nobody waits for
            raise Failure(f"reports in {reports}")

    every({driver: partial(run, driver, own) for driver, own in SANITIZERS.items()})


def coverage(check: Check) -> None:
    """The tests of CUDA with four devices and with none, on a build that says which lines of kina.cuda ran."""
    binaries = check.main
    check.install(binaries, *check.group("coverage"))
    tree = check.tree("coverage", KINA_COVERAGE="1")
    away = check.folder / "run" / "coverage"
    shutil.rmtree(away, ignore_errors=True)
    settings = ROOT / "pyproject.toml"
    measured = {"PYTHONPATH": str(tree), "COVERAGE_FILE": str(away / "data")}

    def run(devices: int, marked: str, lane: str) -> None:
        environment = check.driver(devices) | measured | {"COVERAGE_PROCESS_START": str(settings)}
        # Millions of lines of Python, each of them traced; the other lanes have it.
        slow = f"--ignore={ROOT / 'tests' / 'cuda' / 'test_cycles.py'}"
        check.pytest(binaries, lane, "-m", marked, slow, ROOT / "tests", **environment)

    every({"4 devices": partial(run, 4, "cuda", "coverage"), "none": partial(run, 0, "no_device", "coverage-0")})
    report = away / "coverage.json"
    for words in (("combine",), ("json", "-o", report)):
        # In the tree: Cython's plugin takes one .pxd for another where their names lead nowhere.
        check.run(binaries / "python", "-m", "coverage", *words, "-q", f"--rcfile={settings}", cwd=tree, **measured)
    tool = (binaries / "python", ROOT / "tools" / "validation.py", "coverage", report)
    *_, last = check.run(*tool, "--at-least", COVERED)
    check.summaries.append(f"{'coverage':12} {last}")


def mutation(check: Check) -> None:
    """Every patch that breaks a promise of kina is noticed by the tests it names."""
    folder = check.folder / "mutation"
    check.run(check.main / "python", ROOT / "tests" / "mutation" / "run.py", "--work", folder)


def lint(check: Check) -> None:
    """Linters, formats, and the stubs against the installed package."""
    binaries = check.main
    check.install(binaries, *check.group("lint"))
    check.run(binaries / "python", ROOT / "tools" / "lint.py")


def docs(check: Check) -> None:
    """The documentation, without a warning."""
    binaries = check.main
    check.install(binaries, *check.group("docs"))
    built = ROOT / "docs" / "_build" / "html"
    shutil.rmtree(built, ignore_errors=True)
    sphinx = (binaries / "python", "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html")
    check.run(*sphinx, "-d", check.folder / "doctrees", "-E", ROOT / "docs", built, cwd=check.folder)


def examples(check: Check) -> None:
    """The first set-up command of the README, word for word, in a fresh copy of the tree."""
    commands = [
        line
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        for line in block.splitlines()
        if "examples/quickstart.py" in line
    ]
    if len(commands) != 1:
        raise Failure(f"README.md has {len(commands)} commands that run the quickstart, not one")
    copy = check.folder / "source" / "examples"
    shutil.rmtree(copy, ignore_errors=True)
    copy_tree(copy)
    tools = check.folder / "path"  # `python3` is the Python under test; a symlink would not find its library
    tools.mkdir(exist_ok=True)
    (tools / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python3").chmod(0o755)
    path = os.pathsep.join((str(tools), os.environ.get("PATH", "")))
    check.run("bash", "-euo", "pipefail", "-c", commands[0], cwd=copy, PATH=path)


@dataclass(frozen=True)
class Lane:
    run: Callable[[Check], None]
    needs_torch: bool = False
    needs_linux: bool = False
    needs_python: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.run.__name__

    def missing(self, with_torch: bool) -> str | None:
        """Why it cannot run here."""
        if self.needs_torch and not with_torch:
            return "--without-torch"
        if self.needs_linux and sys.platform != "linux":
            return f"not on {sys.platform}"
        if self.needs_python not in (None, sys.version_info[:2]):
            return f"on Python {'.'.join(map(str, self.needs_python))} only"
        return None


# The host lane comes last, so that its summary ends the output.
LANES = [
    Lane(lint, needs_linux=True),
    Lane(docs),
    Lane(examples, needs_torch=True),
    Lane(nocuda),
    Lane(simulated, needs_linux=True),
    Lane(sanitizers, needs_linux=True),
    Lane(coverage, needs_linux=True, needs_python=(3, 11)),  # later ones trace Cython's lines in another way
    Lane(mutation, needs_linux=True),
    Lane(host),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", action="append", choices=[lane.name for lane in LANES], help="run only this one")
    parser.add_argument("--list", action="store_true", help="name the lanes and stop")
    parser.add_argument("--venv-folder", type=Path, default=ROOT / ".venv-check", help="where the environments live")
    parser.add_argument(
        "--without-torch",
        action="store_true",
        help="leave PyTorch out, with its tests and the examples lane",
    )
    parser.add_argument("pytest", nargs="*", help="after --: passed on to pytest")
    chosen = parser.parse_args()
    if chosen.list:
        for lane in LANES:
            print(f"{lane.name:10} {lane.run.__doc__}")
        return 0
    check = Check(chosen.venv_folder.resolve(), not chosen.without_torch, chosen.pytest)
    check.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for lane in LANES:
        if chosen.lane and lane.name not in chosen.lane:
            continue
        print(f"\n##### {lane.name}: {lane.run.__doc__}", flush=True)
        if not chosen.lane and (reason := lane.missing(with_torch=not chosen.without_torch)):
            rows.append((lane.name, 0.0, f"left out ({reason})"))
            continue
        start = time.monotonic()
        try:
            lane.run(check)
        except Failure as failure:
            result = f"FAILED: {failure}"
        else:
            result = "ok"
        rows.append((lane.name, time.monotonic() - start, result))
        print(f"##### {lane.name}: {result}", flush=True)
    print(f"\nPython {sys.version.split()[0]}")
    for name, seconds, result in rows:
        print(f"{name:10} {seconds:7.1f} s  {result}")
    print(f"{'together':10} {sum(row[1] for row in rows):7.1f} s\n")
    for summary in check.summaries:
        print(summary, flush=True)
    return any(result.startswith("FAILED") for _, _, result in rows)


if __name__ == "__main__":
    sys.exit(main())
