"""The compiled module below the integrations, loaded when one of them is first used."""

from __future__ import annotations

from types import ModuleType

from kina.cuda import load_sessions

__all__ = ["native"]


_loaded: ModuleType | None = None


def native() -> ModuleType:
    """``kina.cuda.allocator``. UnavailableError on a build without CUDA."""
    global _loaded
    if _loaded is None:
        load_sessions()
        from kina.cuda import allocator

        _loaded = allocator
    return _loaded
