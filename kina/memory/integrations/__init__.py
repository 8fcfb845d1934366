"""kina as the allocator of CuPy, PyTorch and Numba.

Each serves from the resource that is current where memory is asked for: that of the calling thread's innermost
:func:`kina.memory.using`, else the device's of :func:`kina.memory.set_default_resource`, else :func:`default_pool`,
which all of them share. Memory goes back to where it came from, whatever is current then. Importing this package loads
none of the three.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "NumbaMemoryManager": "kina.memory.integrations.numba",
    "TorchStatistics": "kina.memory.integrations.torch",
    "cupy_allocator": "kina.memory.integrations.cupy",
    "default_pool": "kina.memory.integrations.shared_pool",
    "torch_allocator": "kina.memory.integrations.torch",
    "torch_release_stream": "kina.memory.integrations.torch",
    "torch_statistics": "kina.memory.integrations.torch",
}

__all__ = [
    "NumbaMemoryManager",
    "TorchStatistics",
    "cupy_allocator",
    "default_pool",
    "torch_allocator",
    "torch_release_stream",
    "torch_statistics",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kina.memory.integrations' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
