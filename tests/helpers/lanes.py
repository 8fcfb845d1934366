"""Which devices this run has, and which it was promised."""

from __future__ import annotations

import functools
import os

import pytest

_NEEDED = {"cuda": 1, "gpu": 1, "multi_gpu": 2}


@functools.cache
def device_count() -> int:
    """GPUs that the driver, real or simulated, shows; 0 without one."""
    import kina

    return len(kina.devices()) if kina.unavailable_reason() is None else 0


def promised() -> int:
    """GPUs that the environment promises: their absence is a failure, never a skip."""
    if count := os.environ.get("KINA_REQUIRE_GPUS"):
        return int(count)
    return 1 if os.environ.get("KINA_REQUIRE_GPU") == "1" else 0


def enter_lane(marker: str) -> None:
    """Skip a test whose devices are not here; fail it if they were promised."""
    import kina

    needed = _NEEDED[marker]
    simulated = "KINA_SIM_DEVICES" in os.environ
    if device_count() >= needed and (marker != "gpu" or not simulated):
        return
    kind = "real CUDA device(s)" if marker == "gpu" else "CUDA device(s)"
    why = f"{needed} {kind} needed, {device_count()} found ({kina.unavailable_reason() or 'driver usable'})"
    if promised() >= needed:
        pytest.fail(f"promised by the environment, and missing: {why}")
    pytest.skip(why)
