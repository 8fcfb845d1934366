"""Fixtures and lanes: a lane without its device is skipped by name, or fails where it was promised."""

from __future__ import annotations

import pytest
from helpers.lanes import enter_lane
from hypothesis import settings

import kina

# A shared machine is slow at times; that is no failure.
settings.register_profile("kina", deadline=None, print_blob=True)
settings.load_profile("kina")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("cuda", "gpu", "multi_gpu"):
        if item.get_closest_marker(marker):
            enter_lane(marker)


@pytest.fixture
def host():
    """An open host session."""
    with kina.session("cpu") as session:
        yield session
