#!/usr/bin/env python3
"""Build kina, install it into environments of its own and pass every check that needs no GPU.

Standard library only: a fresh machine needs Python 3.11+ and a C compiler, nothing else.

    python3 tools/check.py                  every lane
    python3 tools/check.py --lane host      one lane (repeatable)
    python3 tools/check.py --list           what the lanes are

The environments live in .venv-check and are used again by the next run; kina is built anew each time.

Lanes, and passes of one lane, run two at a time (--jobs), for most of them wait a lot. What a pass prints appears as a
whole when it is over; the summaries come at the end, in the order of the lanes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
# kina asks how many devices there are for their list, for the table of peers and to refuse an ordinal, which
# tests/test_house.py holds. These tests see to that, or name devices; a second device makes no difference to others.
ONE_DEVICE = (
    *("cuda/test_arguments.py", "cuda/test_context.py", "cuda/test_device.py", "cuda/test_driver.py"),
    *("cuda/test_exchange_table.py", "cuda/test_exit.py", "cuda/test_refusals.py", "cuda/test_runtime.py"),
    *("cuda/test_session.py", "cuda/test_stream.py", "test_cli.py", "test_examples.py", "test_never.py"),
    "test_session.py",
)
# Lines are traced, and all that counts is which of them run: what only repeats them the other lanes have. The last has
# a thread that Python has never seen, which tracing holds up when the interpreter ends.
UNTRACED = (
    "test_cycles.py",
    "test_exchange_downstream.py::test_a_million_exchanges_leave_nothing",
    "test_module.py::test_ten_thousand_modules_leave_bounded_memory",
    "test_faults_of_exchange.py::test_deleters_on_a_thread_without_anything_and_after_the_interpreter",
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
class Pass:
    """A part of a lane that runs by itself."""

    lane: str
    name: str
    work: Callable[[], None]
    shown: list[str] = field(default_factory=list)  # what it printed, where that is kept until it is over
    summaries: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failure: str | None = None

    @property
    def title(self) -> str:
        return f"{self.lane} ({self.name})" if self.name else self.lane

    @property
    def result(self) -> str:
        return "ok" if self.failure is None else f"FAILED: {self.failure}"


@dataclass
class Check:
    folder: Path
    with_torch: bool
    pytest_arguments: list[str] = field(default_factory=list)
    needed: tuple[str, ...] = ()  # what the environment of the full build has beside what all tests need
    live: bool = True  # output is shown as it comes
    here: threading.local = field(default_factory=threading.local)  # `current`: the thread's pass
    _main: Path | Failure | None = None

    # -- passes

    def say(self, text: str) -> None:
        if self.live:
            print(text, flush=True)
        else:
            self.here.current.shown.append(text)

    def perform(self, passes: list[Pass], jobs: int) -> None:
        """All of them, whichever fails before. Each has a thread, which waits for commands."""
        self.live = min(jobs, len(passes)) == 1
        printing = threading.Lock()

        def one(each: Pass) -> None:
            self.here.current = each
            with printing:
                print(f"\n##### {each.title} begins", flush=True)
            begun = time.monotonic()
            try:
                each.work()
            except Failure as failure:
                each.failure = str(failure)
            except Exception as error:  # of this script; the other passes go on
                each.failure = repr(error)
                self.say(traceback.format_exc())
            each.seconds = time.monotonic() - begun
            with printing:
                print(f"\n##### {each.title}:", *each.shown, sep="\n")
                print(f"##### {each.title}: {each.result}", flush=True)

        with ThreadPoolExecutor(jobs) as executor:
            list(executor.map(one, passes))

    # -- commands

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in KEPT or not (name in SCRUBBED or name.startswith("KINA_"))
        }
        return kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"} | extra

    def run(self, *command: object, cwd: Path = ROOT, **extra: str) -> list[str]:
        """Run a command and show its output; the lines are returned."""
        words = [str(word) for word in command]
        self.say(" ".join(("+", *words)))
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
                lines.append(line.rstrip("\n"))
                self.say(lines[-1])
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
                # All that any lane needs: nothing is installed while lanes run.
                self.install(binaries, wheel, *self.group("test"), *self.group("toolkit"), *self.group("peers"))
                self.install(binaries, *self.needed)
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
            self.summarize(lane, summary.strip("= "))
        if failure is not None:
            raise Failure(summary.strip("= ") if summary else f"{failure}, without a summary", lines)
        if summary is None or " passed" not in summary:
            raise Failure("pytest passed no test", lines)

    def summarize(self, lane: str, summary: str) -> None:
        self.here.current.summaries.append(f"{lane:18} {summary}")


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
    extra = {"KINA_REQUIRE_TORCH": "1"} if check.with_torch else {}
    check.pytest(check.main, "host", "-m", HOST_TESTS, ROOT / "tests", **extra)


def nocuda(check: Check) -> None:
    """The build without CUDA (what macOS gets) and its host tests, with nothing of CUDA installed."""
    binaries = check.venv("nocuda")
    wheel = check.build("nocuda", binaries, KINA_CUDA="0", KINA_QUICK="1")
    needed = [line for line in check.project["project"]["dependencies"] if "sys_platform" not in line]
    check.install(binaries, *needed, *check.group("test"))
    check.put(binaries, wheel)
    tests = [path for path in sorted((ROOT / "tests").iterdir()) if path.name not in NEED_CUDA]
    found = [path for path in tests if path.is_dir() or path.name.startswith("test_")]
    check.pytest(binaries, "nocuda", "-m", HOST_TESTS, *found, KINA_EXPECT_NO_CUDA="1")


def simulated(check: Check, devices: int) -> None:
    """The tests of CUDA on the simulated driver with two devices, none and one; four has the coverage lane."""
    marked = "cuda" if devices else "no_device"
    tests = [ROOT / "tests" / name for name in ONE_DEVICE] if devices == 1 else [ROOT / "tests"]
    check.pytest(check.main, f"simulated-{devices}", "-m", marked, *tests, **check.driver(devices))


def sanitizers(check: Check, driver: str) -> None:
    """The simulated driver, and what kina does with threads, under ASan with UBSan and under TSan."""
    own = SANITIZERS[driver]
    tests = [ROOT / "tests" / name for name in ("driver_sim", *CONCURRENT)]
    reports = check.folder / "run" / f"reports-{own}"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    flags = f"-fsanitize={own} -fno-omit-frame-pointer"
    tree = check.tree(own, CFLAGS=flags, LDFLAGS=flags, KINA_DEBUG="1")
    environment = check.driver(2, driver, reports) | {"PYTHONPATH": str(tree)}
    # Forked while another thread is in ASan's allocator, a child waits for its lock for ever; all other lanes fork.
    chosen = ("-k", "not child and not fork") if own == "address" else ()
    try:
        check.pytest(check.main, f"sanitizers-{own}", *chosen, *tests, **environment)
    finally:
        found = sorted(reports.iterdir())
        for report in found:
            check.say(report.read_text(errors="replace"))
    if found:  # of processes that end as a test expects, and of those that nobody waits for
        raise Failure(f"reports in {reports}")


def coverage(check: Check) -> None:
    """The tests of CUDA with four devices and with none, on a build that says which lines of kina.cuda ran."""
    binaries = check.main
    tree = check.tree("coverage", KINA_COVERAGE="1")
    away = check.folder / "run" / "coverage"
    shutil.rmtree(away, ignore_errors=True)
    settings = ROOT / "pyproject.toml"
    measured = {"PYTHONPATH": str(tree), "COVERAGE_FILE": str(away / "data")}

    def run(devices: int, marked: str, lane: str) -> None:
        environment = check.driver(devices) | measured | {"COVERAGE_PROCESS_START": str(settings)}
        environment |= {"KINA_HYPOTHESIS_PROFILE": "short", "KINA_FAULT_CODES": "2,700"}
        left_out = [f"--deselect=tests/cuda/{test}" for test in UNTRACED]
        check.pytest(binaries, lane, "-m", marked, *left_out, ROOT / "tests", **environment)

    failures = []
    for devices, marked, lane in ((4, "cuda", "coverage"), (0, "no_device", "coverage-0")):
        try:
            run(devices, marked, lane)
        except Failure as failure:
            failures.append(f"{devices} devices: {failure}")
    if failures:
        raise Failure("; ".join(failures))
    report = away / "coverage.json"
    for words in (("combine",), ("json", "-o", report)):
        # In the tree: Cython's plugin takes one .pxd for another where their names lead nowhere.
        check.run(binaries / "python", "-m", "coverage", *words, "-q", f"--rcfile={settings}", cwd=tree, **measured)
    tool = (binaries / "python", ROOT / "tools" / "validation.py", "coverage", report)
    *_, last = check.run(*tool, "--at-least", COVERED)
    check.summarize("coverage", last)


def mutation(check: Check) -> None:
    """Every patch that breaks a promise of kina is noticed by the tests it names."""
    folder = check.folder / "mutation"
    lines: list[str] = []
    try:
        lines = check.run(check.main / "python", ROOT / "tests" / "mutation" / "run.py", "--work", folder)
    except Failure as failure:
        lines = failure.lines
        raise
    finally:
        told = next((line for line in reversed(lines) if " patches: " in line), None)
        if told is not None:
            check.summarize("mutation", told.strip())


def lint(check: Check) -> None:
    """Linters, formats, and the stubs against the installed package."""
    check.run(check.main / "python", ROOT / "tools" / "lint.py")


def docs(check: Check) -> None:
    """The documentation, without a warning."""
    built = ROOT / "docs" / "_build" / "html"
    shutil.rmtree(built, ignore_errors=True)
    sphinx = (check.main / "python", "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html")
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
    check.run("bash", "-euo", "pipefail", "-c", commands[0], cwd=copy, PATH=path, KINA_QUICK="1")


@dataclass(frozen=True)
class Lane:
    run: Callable[..., None]
    passes: dict[str, object] = field(default_factory=dict)  # what `run` is given, by the name of the pass
    group: str | None = None  # of requirements, beside those of tests
    needs_main: bool = True
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

    def divided(self, check: Check) -> list[Pass]:
        if not self.passes:
            return [Pass(self.name, "", partial(self.run, check))]
        return [Pass(self.name, name, partial(self.run, check, given)) for name, given in self.passes.items()]


# The longest come first, so that none is left alone in the end; the host lane last, so that its summary is.
LANES = [
    # Later Pythons trace Cython's lines in another way.
    Lane(coverage, group="coverage", needs_linux=True, needs_python=(3, 11)),
    Lane(sanitizers, {"thread": "thread", "address": "address,undefined"}, needs_linux=True),
    Lane(mutation, needs_linux=True),
    Lane(simulated, {"2 devices": 2, "1 device": 1, "none": 0}, needs_linux=True),
    Lane(nocuda, needs_main=False),
    Lane(examples, needs_main=False, needs_torch=True),
    Lane(lint, group="lint", needs_linux=True),
    Lane(docs, group="docs"),
    Lane(host),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", action="append", choices=[lane.name for lane in LANES], help="run only this one")
    parser.add_argument("--list", action="store_true", help="name the lanes and stop")
    parser.add_argument("--jobs", type=int, default=2, help="lanes, or passes of a lane, at a time (2)")
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
    with_torch = not chosen.without_torch
    lanes = [lane for lane in LANES if not chosen.lane or lane.name in chosen.lane]
    left_out = {} if chosen.lane else {lane.name: why for lane in lanes if (why := lane.missing(with_torch))}
    lanes = [lane for lane in lanes if lane.name not in left_out]
    check = Check(chosen.venv_folder.resolve(), with_torch, chosen.pytest)
    needed = [each for lane in lanes if lane.group for each in check.group(lane.group)]
    check.needed = (*needed, TORCH) if with_torch and any(lane.run is host for lane in lanes) else (*needed,)
    check.folder.mkdir(parents=True, exist_ok=True)
    passes = [each for lane in lanes for each in lane.divided(check)]
    begun = time.monotonic()
    if any(lane.needs_main for lane in lanes):
        print("##### the full build", flush=True)
        with contextlib.suppress(Failure):  # the lanes that need it say so
            _ = check.main
    built = time.monotonic() - begun
    check.perform(passes, max(1, chosen.jobs))

    print(f"\nPython {sys.version.split()[0]}")
    print(f"{'the full build':24} {built:7.1f} s")
    for each in passes:
        print(f"{each.title:24} {each.seconds:7.1f} s  {each.result}")
    for name, why in left_out.items():
        print(f"{name:24} {'':7}    left out ({why})")
    print(f"{'together':24} {time.monotonic() - begun:7.1f} s\n")
    for summary in (line for each in passes for line in each.summaries):
        print(summary, flush=True)
    return any(each.failure is not None for each in passes)


if __name__ == "__main__":
    sys.exit(main())
