"""The rule of helpers/lanes.py: a test runs, is left out by its lane, or fails for a broken promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.lanes import LANES, Run, judge, promised
from helpers.tools import load_tool

TESTS = Path(__file__).resolve().parent
HOST = Run(cuda_build=True, torch=True)
NO_CUDA = Run()
TWO_SIMULATED = Run(devices=2, simulated=True, cuda_build=True)
SANITIZED = Run(devices=2, simulated=True, cuda_build=True, sanitized=True)
ONE_GPU = Run(devices=1, cuda_build=True, torch=True)


@pytest.mark.parametrize(
    ("has", "runs"),
    [
        (HOST, {"no_device", "cuda_build", "torch"}),
        (NO_CUDA, {"no_device"}),
        (TWO_SIMULATED, {"cuda", "multi_gpu", "simulated", "cuda_build"}),
        (SANITIZED, {"cuda", "multi_gpu", "simulated", "cuda_build", "sanitized"}),
        (ONE_GPU, {"cuda", "gpu", "cuda_build", "torch"}),
    ],
    ids=["host", "no CUDA", "two simulated", "sanitized", "one GPU"],
)
def test_a_run_takes_what_it_has(has, runs):
    for marker in LANES:
        assert judge([marker], has, Run())[0] == ("run" if marker in runs else "leave out"), marker


@pytest.mark.parametrize(
    ("environ", "markers", "has", "outcome"),
    [
        ({"KINA_REQUIRE_GPU": "1"}, ["cuda"], HOST, "fail"),
        ({"KINA_REQUIRE_GPU": "1"}, ["cuda", "gpu"], HOST, "fail"),
        ({"KINA_REQUIRE_GPU": "1"}, ["cuda", "gpu"], TWO_SIMULATED, "fail"),
        ({"KINA_REQUIRE_GPU": "1"}, ["cuda", "multi_gpu"], HOST, "leave out"),
        ({"KINA_REQUIRE_GPU": "1"}, ["cuda", "multi_gpu"], ONE_GPU, "leave out"),
        ({"KINA_REQUIRE_GPUS": "2"}, ["cuda", "multi_gpu"], ONE_GPU, "fail"),
        ({"KINA_SIM_DEVICES": "2"}, ["cuda", "multi_gpu"], ONE_GPU, "fail"),
        ({"KINA_SIM_DEVICES": "2"}, ["cuda", "simulated"], ONE_GPU, "fail"),
        ({"KINA_SIM_DEVICES": "2"}, ["cuda", "gpu"], HOST, "leave out"),
        ({"KINA_SIM_DEVICES": "1"}, ["cuda", "multi_gpu"], HOST, "leave out"),
        ({"KINA_SIM_DEVICES": "0"}, ["no_device"], ONE_GPU, "fail"),
        ({"KINA_SIM_DEVICES": "0"}, ["cuda"], HOST, "leave out"),
        ({}, ["no_device"], ONE_GPU, "leave out"),
        ({}, ["cuda_build"], NO_CUDA, "fail"),
        ({"KINA_EXPECT_NO_CUDA": "1"}, ["cuda_build"], NO_CUDA, "leave out"),
        ({"KINA_REQUIRE_TORCH": "1"}, ["torch"], NO_CUDA, "fail"),
        ({"KINA_REQUIRE_JAX": "1"}, ["gpu", "jax"], ONE_GPU, "fail"),
        ({}, ["gpu", "jax"], ONE_GPU, "leave out"),
        ({"KINA_SIM_SANITIZE": "thread"}, ["sanitized"], TWO_SIMULATED, "fail"),
        ({}, ["sanitized"], TWO_SIMULATED, "leave out"),
        ({}, [], NO_CUDA, "run"),
    ],
)
def test_a_promise_is_kept_or_the_test_fails(environ, markers, has, outcome):
    assert judge(markers, has, promised(environ))[0] == outcome


def test_a_lane_is_left_out_only_where_it_cannot_run(monkeypatch):
    lanes = {lane.name: lane for lane in load_tool("check").LANES}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    assert [name for name, lane in lanes.items() if lane.missing(with_torch=True)] == []
    assert [name for name, lane in lanes.items() if lane.missing(with_torch=False)] == ["examples"]
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert lanes["coverage"].missing(with_torch=True) == "on Python 3.11 only"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert lanes["simulated"].missing(with_torch=True) == "not on darwin"
    assert lanes["host"].missing(with_torch=True) is None


@pytest.mark.parametrize(
    ("line", "closes"),
    [
        ("===== 1764 passed, 3575 deselected in 266.42s (0:04:26) ======", True),
        ("============== 1764 passed in 195.18s (0:03:15) ==============", True),
        ("================== 1 failed, 9 passed in 7.01s ===============", True),
        ("10 passed in 0.43s", True),
        ("bringing up nodes...", False),
        ("============================= slowest 3 durations ============", False),
    ],
)
def test_the_closing_line_of_pytest_is_known(line, closes):
    """With workers or without."""
    assert bool(load_tool("check").SUMMARY.match(line)) == closes


@pytest.mark.no_device
@pytest.mark.parametrize("promise", [{}, {"KINA_REQUIRE_GPU": "1"}], ids=["nothing promised", "a GPU promised"])
def test_tests_of_cuda_without_a_device(promise, tmp_path):
    """Collected, and either all left out or failed; never skipped, never passed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINA_", "LD_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", TESTS.parent / "pyproject.toml"]
    command += ["--rootdir", TESTS.parent, TESTS / "test_never.py", "-k", "caches_are_bounded"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ | {"KINA_EXPECT_NO_CUDA": os.environ.get("KINA_EXPECT_NO_CUDA", "")} | promise,
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = done.stdout.splitlines()[-1]
    if promise:
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
        assert "promised by the environment and missing: cuda" in done.stdout
        assert "1 error" in last or "1 failed" in last
    else:
        assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "skipped" not in last
    assert "passed" not in last
