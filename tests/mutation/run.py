#!/usr/bin/env python3
"""Break one promise of kina at a time, and demand that the tests notice.

    python tests/mutation/run.py                  every patch, in copies of the tree that are thrown away
    python tests/mutation/run.py --only quarantine    those whose name has this in it (repeatable)
    python tests/mutation/run.py --work FOLDER    with copies that stay: the next run builds what changed
    python tests/mutation/run.py --list           what is broken, and who must notice
    python tests/mutation/run.py --refresh        write the patches anew, with the line numbers of today

Each file of patches/ is a unified diff below a few words:

    Promise: the sentence that the diff makes untrue
    Tests: pytest node ids, at least one of which must fail (the line may be repeated)

A hunk goes where its old lines stand in the file, which must be in exactly one place; its line numbers are not looked
at, so that a patch outlives what changes around it, and never lands in the wrong function.

First the tree as it is must pass all the named tests, on the simulated driver. Then a patch is killed when the patched
tree builds, still makes a round trip through a session, and pytest reports a failed test of those named. A patch to
which anything else happens (it does not apply, does not build, passes, hangs, crashes pytest) is tried once more when
all the others are done, for some tests notice a race, and a busy machine may hide it. The second verdict counts: any
that is not "killed" makes the whole run fail.

Standard library only; the environment needs the build requirements of pyproject.toml, kina's dependencies, the group
`test`, and a C++ compiler for the simulated driver.
"""

from __future__ import annotations

import argparse
import difflib
import filecmp
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).resolve().parent / "patches"
COPIED = ("kina", "tests", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE")
# Headers are not followed by the incremental build.
PATCHABLE = re.compile(r"kina/.+\.(py|pyx|pxd|c)")
GENERATED = (".c", ".so")
KEPT = ("KINA_CUDA_INCLUDE",)
DEVICES = "2"
BUILD_SECONDS, TEST_SECONDS = 600, 180
BASELINE_SECONDS = 1800  # all tests that any patch names; the machine may have more to do

ROUND_TRIP = """
import kina
with kina.session("cuda:0") as session, session.raw():
    tensor = session.from_host([1.0, 2.0])
    copied = session.copy(tensor)
    assert session.to_host(copied).tolist() == [1.0, 2.0]
print(kina.__file__)
"""


# Patches --------------------------------------------------------------------------------------------------


class PatchError(Exception):
    """A patch that cannot be read, or that does not fit the tree."""


@dataclass(frozen=True)
class Hunk:
    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    path: Path
    header: str
    promise: str
    tests: tuple[str, ...]
    hunks: dict[str, list[Hunk]]  # by the file they change, relative to the root

    @property
    def name(self) -> str:
        return self.path.stem

    def apply(self, root: Path) -> dict[str, str]:
        """The new texts of the files it changes; nothing is written."""
        changed = {}
        for name, hunks in self.hunks.items():
            text = (root / name).read_text() if (root / name).is_file() else ""
            for number, hunk in enumerate(hunks, 1):
                text = replaced(text, hunk, f"{self.name}: hunk {number} of {name}")
            changed[name] = text
        return changed


def replaced(text: str, hunk: Hunk, where: str) -> str:
    """Whole lines; the text begins with a line break here, so that the first line is found like any other."""
    places = f"\n{text}".count(f"\n{hunk.old}")
    if places != 1:
        raise PatchError(f"{where} fits {places} places, not one")
    return f"\n{text}".replace(f"\n{hunk.old}", f"\n{hunk.new}")[1:]


def read_patch(path: Path) -> Patch:
    lines = path.read_text().splitlines(keepends=True)
    begin = next((i for i, line in enumerate(lines) if line.startswith("--- ")), len(lines))
    words: dict[str, list[str]] = {"Promise": [], "Tests": []}
    for line in filter(str.strip, lines[:begin]):
        key, colon, value = line.partition(":")
        if not colon or key not in words:
            raise PatchError(f"{path.name}: {line.strip()!r} is neither 'Promise: ...' nor 'Tests: ...'")
        words[key].append(value.strip())
    if len(words["Promise"]) != 1 or not words["Tests"] or not all(words["Promise"] + words["Tests"]):
        raise PatchError(f"{path.name}: one line 'Promise: ...' and at least one 'Tests: ...' are needed")
    hunks = read_hunks(path.name, iter(lines[begin:]))
    if not hunks:
        raise PatchError(f"{path.name}: it changes nothing")
    return Patch(path, "".join(lines[:begin]), words["Promise"][0], tuple(words["Tests"]), hunks)


def read_hunks(patch: str, lines: Iterator[str]) -> dict[str, list[Hunk]]:
    found: dict[str, list[Hunk]] = {}
    name = None
    for line in lines:
        if line.startswith("--- "):
            continue
        if line.startswith("+++ b/"):
            name = line.removeprefix("+++ b/").rstrip()
            if not PATCHABLE.fullmatch(name):
                raise PatchError(f"{patch}: {name} is no source file of kina")
            continue
        sizes = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)
        if name is None or sizes is None:
            raise PatchError(f"{patch}: {line.rstrip()!r} belongs to no unified diff")
        old, new = (1 if size is None else int(size) for size in sizes.groups())
        before, after = "", ""
        while old > 0 or new > 0:
            sign, text = (following := next(lines, "?"))[:1], following[1:]
            if sign not in (" ", "-", "+"):
                raise PatchError(f"{patch}: a hunk of {name} ends early")
            if sign != "+":
                before += text
                old -= 1
            if sign != "-":
                after += text
                new -= 1
        found.setdefault(name, []).append(Hunk(before, after))
    return found


def read_patches(only: Sequence[str] = ()) -> list[Patch]:
    patches = [read_patch(path) for path in sorted(PATCHES.glob("*.patch"))]
    return [patch for patch in patches if not only or any(part in patch.name for part in only)]


def diff(name: str, before: str, after: str) -> str:
    """With three lines of context, or as many as it takes to fit one place only."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    for context in range(3, len(old) + 3):
        text = "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=context))
        try:
            for hunk in read_hunks(name, iter(text.splitlines(keepends=True)))[name]:
                replaced(before, hunk, name)
        except PatchError:
            continue
        return text
    raise PatchError(f"{name}: the change fits more than one place, whatever is around it")


def refresh(patch: Patch) -> bool:
    """Write it anew for the tree as it is; whether that changed anything."""
    changed = patch.apply(ROOT)
    text = patch.header + "".join(diff(name, (ROOT / name).read_text(), after) for name, after in changed.items())
    if text == patch.path.read_text():
        return False
    patch.path.write_text(text)
    return True


# Trees ----------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Something other than a test failed; the output says how."""


def environment(**extra: str) -> dict[str, str]:
    """What is set for the shell that started this is not meant for the copies.

    Where pytest believes to be on a CI machine, it prints the whole difference of what is not equal: for two lists of
    1000 numbers that takes minutes, which is no hang of the test.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "CI", "BUILD_NUMBER")
    kept = {k: v for k, v in os.environ.items() if k in KEPT or not (k in dropped or k.startswith("KINA_"))}
    return kept | extra


def call(command: Sequence[object], folder: Path, seconds: float, **extra: str) -> tuple[int, str]:
    """Exit status and output; what runs too long is ended with all its children."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise Broken(f"it took more than {seconds:.0f} s", output) from None
    return process.returncode, output


def files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def is_generated(path: Path) -> bool:
    return path.suffix in GENERATED and path.parent.parent.name == "kina"


def take_sources(tree: Path) -> None:
    """Make the tree's sources those of the checkout. What differs gets the time of now: the build goes by times."""
    wanted = set()
    for name in COPIED:
        top = ROOT / name
        wanted |= {path.relative_to(ROOT) for path in (files_below(top) if top.is_dir() else [top])}
    wanted = {path for path in wanted if not is_generated(ROOT / path)}
    for path in wanted:
        target = tree / path
        if not target.is_file() or not filecmp.cmp(ROOT / path, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target)
    for name in ("kina", "tests"):
        for path in files_below(tree / name):
            if path.relative_to(tree) not in wanted and not is_generated(path):
                path.unlink()


def mirror(source: Path, target: Path) -> None:
    """Make `target` what `source` is, times included: nothing of it is to be built again."""
    wanted = {path.relative_to(source): path.stat() for path in files_below(source)}
    for path, there in wanted.items():
        copy = target / path
        here = copy.stat() if copy.is_file() else None
        if here is None or (here.st_size, here.st_mtime_ns) != (there.st_size, there.st_mtime_ns):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / path, copy)
    for path in files_below(target):
        if path.relative_to(target) not in wanted:
            path.unlink()


def build(tree: Path, jobs: int, changed: Sequence[str] = ()) -> None:
    """Only the modules whose sources changed; not optimized, for building takes longer than running.

    Where no more than their own ``.pyx`` files did, which are named, no others are looked at: that takes as long.
    """
    names = [name.removesuffix(".pyx").replace("/", ".") for name in changed if name.endswith(".pyx")]
    only = {"KINA_BUILD_ONLY": ",".join(names)} if names and len(names) == len(changed) else {}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    status, output = call(command, tree, BUILD_SECONDS, KINA_QUICK="1", KINA_BUILD_JOBS=str(jobs), **only)
    if status != 0:
        raise Broken("it does not build", output)


# Tests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    passed: int
    failed: list[str]
    output: str


class Driver:
    """The simulated driver, and processes that find it and the kina of one tree."""

    def __init__(self, tree: Path, folder: Path) -> None:
        status, output = call([sys.executable, "tests/driver_sim/build.py", "--out", folder], tree, BUILD_SECONDS)
        if status != 0:
            raise Broken("the simulated driver does not build", output)
        self.path = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))

    def run(self, tree: Path, *arguments: object, seconds: float = TEST_SECONDS) -> tuple[int, str]:
        setting = {"LD_LIBRARY_PATH": self.path, "KINA_SIM_DEVICES": DEVICES, "PYTHONPATH": str(tree)}
        return call([sys.executable, *arguments], tree, seconds, **setting)

    def round_trip(self, tree: Path) -> None:
        """It is the tree's own kina that runs, and it runs: what follows is about one promise, not about all."""
        status, output = self.run(tree, "-c", ROUND_TRIP)
        where = output.strip().rpartition("\n")[2]
        if status != 0 or not Path(where).resolve().is_relative_to(tree.resolve()):
            raise Broken("a round trip through a session fails", output)

    def test(self, tree: Path, *arguments: str, seconds: float = TEST_SECONDS) -> Outcome:
        """Broken if pytest did anything but run tests to a verdict: collected wrong, crashed, hung."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "junit.xml")
            options = ("-q", "-p", "no:cacheprovider", f"--junit-xml={report}")
            status, output = self.run(tree, "-m", "pytest", *options, *arguments, seconds=seconds)
            if status not in (0, 1) or not report.is_file():
                raise Broken(f"pytest ended with {status}", output)
            cases = list(ElementTree.parse(report).iter("testcase"))
        failed = [case for case in cases if case.find("failure") is not None]
        if status == 1 and not failed:
            raise Broken("no test failed, but something around one did", output)
        names = [f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" for case in failed]
        return Outcome(len(cases) - len(failed), names, output)


def by_file(tests: Iterable[str], shares: int) -> list[list[str]]:
    """Divide node ids into shares, those of one file together."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        files.setdefault(test.partition("::")[0], []).append(test)
    divided: list[list[str]] = [[] for _ in range(shares)]
    for group in sorted(files.values(), key=len, reverse=True):
        min(divided, key=len).extend(group)
    return [share for share in divided if share]


# The run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    patch: Patch
    word: str
    detail: str
    build_seconds: float
    test_seconds: float
    output: str = ""

    @property
    def killed(self) -> bool:
        return self.word == "killed"

    def __str__(self) -> str:
        times = f"{self.build_seconds:5.1f} s build {self.test_seconds:5.1f} s tests"
        return f"{self.word:10} {self.patch.name:36} {times}  {self.detail}"


def judge(patch: Patch, tree: Path, driver: Driver, whole: bool) -> Verdict:
    started = time.monotonic()
    built = started

    def verdict(word: str, detail: str, output: str = "") -> Verdict:
        return Verdict(patch, word, detail, built - started, time.monotonic() - built, output)

    try:
        changed = patch.apply(tree)
        for name, text in changed.items():
            (tree / name).write_text(text)
        build(tree, 1, [*changed])
        built = time.monotonic()
        driver.round_trip(tree)
        outcome = driver.test(tree, "-x", *patch.tests)
        if outcome.failed:
            return verdict("killed", f"by {outcome.failed[0]}")
        detail = f"{outcome.passed} tests pass"
        if whole:
            others = driver.test(tree, "-x", "tests/cuda")
            detail += f"; of all {'nothing' if not others.failed else others.failed[0]} notices"
        return verdict("SURVIVED", detail)
    except PatchError as error:
        return verdict("UNFIT", str(error))
    except Broken as broken:
        return verdict("BROKEN", str(broken.args[0]), broken.args[1])


def baseline(patches: Sequence[Patch], tree: Path, driver: Driver, jobs: int) -> int:
    """How many tests the tree as it is passes; all those named must be among them."""
    driver.round_trip(tree)
    shares = by_file((test for patch in patches for test in patch.tests), jobs)
    with ThreadPoolExecutor(jobs) as executor:
        outcomes = list(executor.map(lambda share: driver.test(tree, *share, seconds=BASELINE_SECONDS), shares))
    for outcome in outcomes:
        if outcome.failed:
            raise Broken(f"the tree as it is fails {', '.join(outcome.failed)}", outcome.output)
    return sum(outcome.passed for outcome in outcomes)


def run(patches: Sequence[Patch], work: Path, jobs: int, whole: bool) -> bool:
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    pristine = work / "tree"
    pristine.mkdir(parents=True, exist_ok=True)
    take_sources(pristine)
    build(pristine, jobs)
    driver = Driver(pristine, work / "driver_sim")
    tell("built")
    tell(f"baseline: {baseline(patches, pristine, driver, jobs)} tests pass")

    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(jobs):
        trees.put(work / f"tree-{number}")

    def attempt(patch: Patch) -> Verdict:
        tree = trees.get()
        try:
            mirror(pristine, tree)
            verdict = judge(patch, tree, driver, whole)
        finally:
            trees.put(tree)
        tell(str(verdict))
        return verdict

    with ThreadPoolExecutor(jobs) as executor:
        verdicts = list(executor.map(attempt, patches))
    verdicts = [verdict if verdict.killed else attempt(verdict.patch) for verdict in verdicts]
    failed = [verdict for verdict in verdicts if not verdict.killed]
    for verdict in failed:
        print(f"\n##### {verdict.patch.name}: {verdict.word}, {verdict.detail}")
        print(f"Promise: {verdict.patch.promise}")
        print("\n".join(verdict.output.splitlines()[-40:]))
    others = "".join(f", {verdict.patch.name} {verdict.word}" for verdict in failed)
    tell(f"{len(verdicts)} patches: {len(verdicts) - len(failed)} killed{others}")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a part of a patch's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="patches in flight, each in its copy")
    parser.add_argument("--work", type=Path, help="folder of the copies; they stay for the next run")
    parser.add_argument("--keep", action="store_true", help="keep the copies also without --work")
    parser.add_argument("--whole", action="store_true", help="let all tests of CUDA look at a survivor")
    parser.add_argument("--list", action="store_true", help="name the patches and stop")
    parser.add_argument("--refresh", action="store_true", help="write the patches anew for this tree and stop")
    chosen = parser.parse_args()
    try:
        patches = read_patches(chosen.only)
        if not patches:
            raise PatchError("there is no such patch")
        if chosen.list:
            for patch in patches:
                print(f"{patch.name}\n    {patch.promise}\n    " + "\n    ".join(patch.tests))
            return 0
        if chosen.refresh:
            print("\n".join(patch.name for patch in patches if refresh(patch)))
            return 0
        work = chosen.work.resolve() if chosen.work else Path(tempfile.mkdtemp(prefix="kina-mutation-"))
        try:
            return 0 if run(patches, work, max(1, chosen.jobs), chosen.whole) else 1
        finally:
            if chosen.work or chosen.keep:
                print(f"the copies are in {work}")
            else:
                shutil.rmtree(work, ignore_errors=True)
    except PatchError as error:
        print(error, file=sys.stderr)
    except Broken as broken:
        print(f"{broken.args[1]}\n{broken.args[0]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
