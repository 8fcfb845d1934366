"""Memory resources: where memory comes from, and what watches over it.

A resource hands out buffers; adaptors are resources over others and compose in any order. ``using`` and ``memory=`` say
which one serves. Resources of C libraries come in through ``kina_memory.h`` and ``MemoryResource.from_capsule``; a
subclass of :class:`MemoryResource` is one in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kina._core.adaptors import (
    AllocationCounts,
    FailureCallbackMemoryResource,
    LimitingMemoryResource,
    StatisticsMemoryResource,
    StatisticsScope,
)
from kina._core.allocation_log import LoggingMemoryResource
from kina._core.current_resource import ResourceScope, using
from kina._core.pool import PoolMemoryResource, PoolStatistics, PoolStreamStatistics
from kina._core.resource import Buffer, HostMemoryResource, MemoryResource, set_cuda_loader
from kina._core.tracking import TrackedAllocation, TrackingMemoryResource
from kina.memory.callback import CallbackMemoryResource
from kina.memory.default import current_resource, set_default_resource

if TYPE_CHECKING:
    from kina.cuda.resources import (
        CudaAsyncMemoryResource,
        CudaMemoryResource,
        ManagedMemoryResource,
        PinnedMemoryResource,
    )

# name -> the room that has it, loaded when it is first used: importing this package loads neither CUDA nor the driver.
_HOMES = {
    "CudaAsyncMemoryResource": "kina.cuda.resources",
    "CudaMemoryResource": "kina.cuda.resources",
    "ManagedMemoryResource": "kina.cuda.resources",
    "PinnedMemoryResource": "kina.cuda.resources",
    "AllocationTrace": "kina._core.allocation_trace",
    "read_log": "kina.memory.log_reader",
    "ReplayReport": "kina.memory.log_replay",
    "replay": "kina.memory.log_replay",
}

__all__ = [
    "AllocationCounts",
    "AllocationTrace",
    "Buffer",
    "CallbackMemoryResource",
    "CudaAsyncMemoryResource",
    "CudaMemoryResource",
    "FailureCallbackMemoryResource",
    "HostMemoryResource",
    "LimitingMemoryResource",
    "LoggingMemoryResource",
    "ManagedMemoryResource",
    "MemoryResource",
    "PinnedMemoryResource",
    "PoolMemoryResource",
    "PoolStatistics",
    "PoolStreamStatistics",
    "ReplayReport",
    "ResourceScope",
    "StatisticsMemoryResource",
    "StatisticsScope",
    "TrackedAllocation",
    "TrackingMemoryResource",
    "current_resource",
    "read_log",
    "replay",
    "set_default_resource",
    "using",
]


def _load_cuda() -> None:
    from kina.cuda import load_sessions

    load_sessions()  # UnavailableError on a build without CUDA


set_cuda_loader(_load_cuda)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kina.memory' has no attribute {name!r}")
    if home.startswith("kina.cuda."):
        _load_cuda()
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
