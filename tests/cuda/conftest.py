"""Tests of kina.cuda, on the simulated driver or on hardware. Without a usable device they fail by name."""

from __future__ import annotations

import contextlib
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.driver_sim import simulated

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simulated: needs the control of the simulated driver")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test here is `cuda`; those of another kind of driver, or of more devices, are deselected."""
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    from helpers.cuda import promised_devices

    for item in ours:
        item.add_marker(pytest.mark.cuda)
    unfit = "gpu" if simulated() else "simulated"
    few = promised_devices() < 2
    dropped = [
        item for item in ours if item.get_closest_marker(unfit) or (few and item.get_closest_marker("multi_gpu"))
    ]
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)


@functools.cache
def _missing() -> str | None:
    import kina

    return kina.unavailable_reason()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := _missing():
        pytest.fail(f"no usable CUDA device: {reason}", pytrace=False)


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the context stack of its thread alone, and breaks no rule of the simulated driver.

    Those with other libraries look for themselves where kina's part begins: such a library makes its context current at
    its first use, for good.
    """
    from helpers.cuda import simulation, unchanged

    sim = simulation()
    since = sim.position if sim is not None else 0
    with contextlib.nullcontext() if request.node.get_closest_marker("gpu") else unchanged():
        yield
    if sim is not None:
        sim.clear_faults()
        sim.resume_all()
        assert sim.trace(since, event="violation") == []


@pytest.fixture
def sim() -> Any:
    """Control of the simulated driver (only for tests marked `simulated`)."""
    from helpers.cuda import simulation

    return simulation()


@pytest.fixture
def runtime() -> Iterator[Any]:
    """A Runtime of the first device, the test's own."""
    import kina

    made = kina.Runtime(0)
    yield made
    if not made.closed:
        made.close()


@pytest.fixture
def session(runtime: Any) -> Iterator[Any]:
    """An open session of the test's own Runtime."""
    import kina

    with kina.session(runtime) as opened:
        yield opened


@pytest.fixture(scope="session")
def foreign_contexts() -> Iterator[list[int]]:
    """Four contexts of other libraries on the first device, not current: making one takes hardware 0.1 s."""
    from helpers.cuda import foreign_context

    with contextlib.ExitStack() as made:
        yield [made.enter_context(foreign_context()) for _ in range(4)]


@pytest.fixture
def foreign(foreign_contexts: list[int]) -> int:
    """A context of another library on the first device, not current."""
    return foreign_contexts[0]
