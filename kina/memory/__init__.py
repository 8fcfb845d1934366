"""Memory resources: where memory comes from, and what watches over it.

A resource hands out buffers; adaptors are resources over others and compose in any order. ``using`` and ``memory=`` say
which one serves. Resources of C libraries come in through ``kina_memory.h`` and ``MemoryResource.from_capsule``; a
subclass of :class:`MemoryResource` is one in Python.
"""

from __future__ import annotations

from kina._core.adaptors import (
    AllocationCounts,
    FailureCallbackMemoryResource,
    LimitingMemoryResource,
    StatisticsMemoryResource,
    StatisticsScope,
)
from kina._core.allocation_log import LoggingMemoryResource
from kina._core.current_resource import ResourceScope, using
from kina._core.resource import Buffer, HostMemoryResource, MemoryResource
from kina._core.tracking import TrackedAllocation, TrackingMemoryResource
from kina.memory.callback import CallbackMemoryResource
from kina.memory.default import current_resource, set_default_resource

__all__ = [
    "AllocationCounts",
    "Buffer",
    "CallbackMemoryResource",
    "FailureCallbackMemoryResource",
    "HostMemoryResource",
    "LimitingMemoryResource",
    "LoggingMemoryResource",
    "MemoryResource",
    "ResourceScope",
    "StatisticsMemoryResource",
    "StatisticsScope",
    "TrackedAllocation",
    "TrackingMemoryResource",
    "current_resource",
    "set_default_resource",
    "using",
]
