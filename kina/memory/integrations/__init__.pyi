# Written by tools/stubs.py from __init__.py; not edited by hand.

from __future__ import annotations

from kina.memory.integrations.cupy import (
    cupy_allocator as cupy_allocator,
)
from kina.memory.integrations.numba import (
    NumbaMemoryManager as NumbaMemoryManager,
)
from kina.memory.integrations.shared_pool import (
    default_pool as default_pool,
)
from kina.memory.integrations.torch import (
    TorchStatistics as TorchStatistics,
    torch_allocator as torch_allocator,
    torch_release_stream as torch_release_stream,
    torch_statistics as torch_statistics,
)

__all__ = [
    'NumbaMemoryManager',
    'TorchStatistics',
    'cupy_allocator',
    'default_pool',
    'torch_allocator',
    'torch_release_stream',
    'torch_statistics',
]
