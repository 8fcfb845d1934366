"""The compiled modules below the integrations: names of this one, each loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from kina.cuda import load_sessions

__all__ = ["allocation", "allocator", "foreign_streams", "shared_pool"]

allocation: ModuleType
allocator: ModuleType
foreign_streams: ModuleType
shared_pool: ModuleType


def __getattr__(name: str) -> ModuleType:
    """UnavailableError on a build without CUDA."""
    if name not in __all__:
        raise AttributeError(f"module 'kina.memory.integrations.native' has no attribute {name!r}")
    load_sessions()
    value = globals()[name] = import_module(f"kina.cuda.{name}")
    return value
