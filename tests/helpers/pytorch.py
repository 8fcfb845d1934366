"""PyTorch where a test needs it: skipped by name without it, failed without it where it was promised."""

import importlib.util
import os

import pytest


def require_torch():
    """The torch module. With KINA_REQUIRE_TORCH=1 its absence is a failure, never a skip."""
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("KINA_REQUIRE_TORCH") == "1":
            pytest.fail("KINA_REQUIRE_TORCH=1, and PyTorch is not installed")
        pytest.skip("PyTorch is not installed")
    import torch

    return torch
