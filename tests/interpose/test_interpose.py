"""The interposer over a small fake driver: what it counts, that it forwards exactly, and what it can fail.

Each scenario runs in its own process, because a process keeps the first ``libcuda.so.1`` it loads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import interpose

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.cuda_build  # there is a libcuda.so.1 to stand before where kina.cuda is built


def compile_library(source: Path, target: Path, *options: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [
        "cc",
        "-O2",
        "-shared",
        "-fPIC",
        "-Wall",
        str(source),
        "-o",
        str(target),
        *options,
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver, with the SONAME of the real one: the two must live in one process."""
    folder = tmp_path_factory.mktemp("driver")
    return compile_library(HERE / "fake_driver.c", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")


def run(environment: dict[str, str], scenario: str) -> subprocess.CompletedProcess[str]:
    environment = {**environment, "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "scenarios.py"), scenario]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("preload", [False, True], ids=["search path", "preloaded"])
@pytest.mark.parametrize("scenario", ["counts", "lookups", "forwarding", "failures", "threads"])
def test_scenario(fake: Path, tmp_path: Path, scenario: str, preload: bool) -> None:
    environment = interpose.env(fake, preload=preload)
    if scenario == "threads":
        environment["HAMMER"] = str(compile_library(HERE / "hammer.c", tmp_path / "libhammer.so"))
    done = run(environment, scenario)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == f"passed {scenario}\n"


def test_a_real_library_that_does_not_load_is_said_and_answered(fake: Path) -> None:
    environment = interpose.env(fake)
    environment["KINA_INTERPOSE_REAL"] = "/nonexistent/libcuda.so.1"
    done = run(environment, "missing")
    assert done.returncode == 0, done.stderr
    assert "/nonexistent/libcuda.so.1" in done.stderr


def test_an_interposer_is_never_its_own_driver(fake: Path) -> None:
    environment = interpose.env(fake)
    environment["KINA_INTERPOSE_REAL"] = str(interpose.build(fake) / "libcuda.so.1")
    done = run(environment, "missing")
    assert done.returncode == 0, done.stderr
    assert "interpos" in done.stderr
    # Nor is it found as one, where it is on the path and the driver comes after it.
    found = interpose.find_real({"LD_LIBRARY_PATH": f"{interpose.build(fake)}:{fake.parent}"})
    assert found == fake.resolve()


def test_without_a_driver_the_environment_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        interpose.env(tmp_path / "nothing-here")


def test_the_build_is_kept(fake: Path) -> None:
    library = interpose.build(fake) / "libcuda.so.1"
    before = library.stat().st_mtime_ns
    assert interpose.build(fake) == library.parent
    assert library.stat().st_mtime_ns == before


def test_a_plain_library_is_refused(fake: Path) -> None:
    code = "from helpers.interpose import Interposer; Interposer()"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake.parent), "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "start it with helpers.interpose.env()" in done.stderr


def test_exports_match_the_real_library(fake: Path) -> None:
    def names(library: Path) -> set[str]:
        nm = shutil.which("nm")
        assert nm
        listing = subprocess.run([nm, "-D", library], check=True, capture_output=True, text=True).stdout
        rows = [line.split() for line in listing.splitlines()]
        return {row[2] for row in rows if len(row) == 3 and row[2].startswith("cu")}

    assert names(interpose.build(fake) / "libcuda.so.1") == names(fake)
