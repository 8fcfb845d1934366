"""Which tests a run takes: decided here alone, by the markers of a test and by what the run has.

A run has what it finds: a driver, real or simulated, with its devices; the compiled modules of kina.cuda; PyTorch, JAX.
Its environment may promise more:

- ``KINA_REQUIRE_GPU=1``, ``KINA_REQUIRE_GPUS=2``: real devices;
- ``KINA_SIM_DEVICES=2``: the simulated driver, and so many devices of it;
- ``KINA_REQUIRE_TORCH=1``: PyTorch;
- ``KINA_REQUIRE_JAX=1``: JAX;
- ``KINA_SIM_SANITIZE=thread``: builds of the simulated driver under sanitizers;
- the modules of kina.cuda, unless ``KINA_EXPECT_NO_CUDA=1``.

A test that has what its markers need runs. One that misses something is deselected; one that misses what was promised
fails. No test is skipped for its lane.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["LANES", "Run", "found", "judge", "mark", "promised", "select"]

TESTS = Path(__file__).resolve().parents[1]
LANES = ("cuda", "gpu", "multi_gpu", "simulated", "no_device", "cuda_build", "torch", "jax", "sanitized")


@dataclass(frozen=True)
class Run:
    """What a run has, or what it was promised."""

    devices: int = 0
    simulated: bool = False
    cuda_build: bool = False
    torch: bool = False
    jax: bool = False
    sanitized: bool = False

    def has(self, marker: str) -> bool:
        match marker:
            case "cuda":
                return self.devices >= 1
            case "gpu":
                return self.devices >= 1 and not self.simulated
            case "multi_gpu":
                return self.devices >= 2
            case "no_device":
                return self.devices == 0
        return bool(getattr(self, marker))


def promised(environ: Mapping[str, str] = os.environ) -> Run:
    """What the environment says that there must be."""
    simulated = "KINA_SIM_DEVICES" in environ
    real = int(environ.get("KINA_REQUIRE_GPUS") or environ.get("KINA_REQUIRE_GPU") or 0)
    return Run(
        devices=int(environ["KINA_SIM_DEVICES"]) if simulated else real,
        simulated=simulated,
        cuda_build=environ.get("KINA_EXPECT_NO_CUDA") != "1",
        torch=environ.get("KINA_REQUIRE_TORCH") == "1",
        jax=environ.get("KINA_REQUIRE_JAX") == "1",
        sanitized="KINA_SIM_SANITIZE" in environ,
    )


@functools.cache
def found() -> Run:
    """What there is. Asks the driver, so it is asked late and once."""
    from helpers.driver_sim import simulated

    import kina

    return Run(
        devices=len(kina.devices()),
        simulated=simulated(),
        cuda_build=importlib.util.find_spec("kina.cuda.driver") is not None,
        torch=importlib.util.find_spec("torch") is not None,
        jax=importlib.util.find_spec("jax") is not None,
        sanitized="KINA_SIM_SANITIZE" in os.environ,
    )


def judge(markers: Iterable[str], has: Run, promise: Run) -> tuple[str, list[str]]:
    """``"run"``, ``"leave out"`` or ``"fail"``, and the markers whose needs are missing."""
    missing = [marker for marker in markers if marker in LANES and not has.has(marker)]
    if not missing:
        return "run", []
    # That there is no device is promised by nobody but a simulation of none.
    kept = [marker for marker in missing if promise.has(marker) and (marker != "no_device" or promise.simulated)]
    # A promise is kept or broken as a whole: what the environment never meant to run here is no failure.
    return ("fail", kept) if len(kept) == len(missing) else ("leave out", missing)


def mark(item: pytest.Item) -> None:
    """What needs a device is `cuda` too, so that ``-m "not cuda"`` is everything without a driver."""
    needs_device = any(item.get_closest_marker(marker) for marker in ("gpu", "multi_gpu", "simulated"))
    if needs_device or TESTS / "cuda" in item.path.parents:
        item.add_marker(pytest.mark.cuda)


def markers_of(item: pytest.Item) -> list[str]:
    return [marker for marker in LANES if item.get_closest_marker(marker)]


def select(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests this run takes, those that will fail for a broken promise included, and those it leaves out."""
    taken: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        markers = markers_of(item)
        left = markers and judge(markers, found(), promised())[0] == "leave out"
        (left_out if left else taken).append(item)
    return taken, left_out


def fail_if_promised(item: pytest.Item) -> None:
    markers = markers_of(item)
    if markers and (outcome := judge(markers, found(), promised()))[0] == "fail":
        import kina

        why = kina.unavailable_reason() or "the driver can be used"
        names = ", ".join(outcome[1])
        pytest.fail(f"promised by the environment and missing: {names}. Found {found()}; {why}", pytrace=False)
