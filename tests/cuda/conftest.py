"""Fixtures of the tests of kina.cuda, on the simulated driver or on hardware; helpers/lanes.py says which run where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def module_stack() -> Iterator[None]:
    """What fixtures of a module leave on the context stack (PyTorch's first use does) ends with the module.

    So does what the thread keeps of adopted streams: their owners' ends make contexts current too, and tests destroy
    streams whose owners they keep, which the last resort of a full device would ask.
    """
    from helpers.cuda import forget_adopted_streams, own_stack

    with own_stack():
        yield
        forget_adopted_streams()


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the context stack of its thread alone, and breaks no rule of the simulated driver.

    Those with other libraries look for themselves where kina's part begins: such a library makes its context current at
    its first use, for good.
    """
    from helpers.cuda import own_stack, simulation, unchanged

    sim = simulation()
    since = sim.position if sim is not None else 0
    with own_stack() if request.node.get_closest_marker("gpu") else unchanged():
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
