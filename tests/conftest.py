"""Fixtures, and the lanes of helpers/lanes.py applied to what was collected."""

from __future__ import annotations

import gc

import pytest
from helpers import lanes
from hypothesis import settings

import kina

# A shared machine is slow at times; that is no failure.
settings.register_profile("kina", deadline=None, print_blob=True)
settings.load_profile("kina")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First, so that ``-m`` sees the markers that the lanes add."""
    for item in items:
        lanes.mark(item)
    items[:], left_out = lanes.select(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: a test that collects looks at what came after them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def old_objects() -> None:
    """Nor is what the module before left: PyTorch's objects alone make each collection take 0.1 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    lanes.fail_if_promised(item)


@pytest.fixture
def host():
    """An open host session."""
    with kina.session("cpu") as session:
        yield session
