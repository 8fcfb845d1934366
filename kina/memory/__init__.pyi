# Written by tools/stubs.py from __init__.py; not edited by hand.

from __future__ import annotations

from kina._core.adaptors import (
    AllocationCounts as AllocationCounts,
    FailureCallbackMemoryResource as FailureCallbackMemoryResource,
    LimitingMemoryResource as LimitingMemoryResource,
    StatisticsMemoryResource as StatisticsMemoryResource,
    StatisticsScope as StatisticsScope,
)
from kina._core.allocation_log import (
    LoggingMemoryResource as LoggingMemoryResource,
)
from kina._core.allocation_trace import (
    AllocationTrace as AllocationTrace,
)
from kina._core.current_resource import (
    ResourceScope as ResourceScope,
    using as using,
)
from kina._core.pool import (
    PoolMemoryResource as PoolMemoryResource,
    PoolStatistics as PoolStatistics,
    PoolStreamStatistics as PoolStreamStatistics,
)
from kina._core.resource import (
    Buffer as Buffer,
    HostMemoryResource as HostMemoryResource,
    MemoryResource as MemoryResource,
)
from kina._core.tracking import (
    TrackedAllocation as TrackedAllocation,
    TrackingMemoryResource as TrackingMemoryResource,
)
from kina.cuda.resources import (
    CudaAsyncMemoryResource as CudaAsyncMemoryResource,
    CudaMemoryResource as CudaMemoryResource,
    ManagedMemoryResource as ManagedMemoryResource,
    PinnedMemoryResource as PinnedMemoryResource,
)
from kina.memory.callback import (
    CallbackMemoryResource as CallbackMemoryResource,
)
from kina.memory.default import (
    current_resource as current_resource,
    set_default_resource as set_default_resource,
)
from kina.memory.log_reader import (
    read_log as read_log,
)
from kina.memory.log_replay import (
    ReplayReport as ReplayReport,
    replay as replay,
)

__all__ = [
    'AllocationCounts',
    'AllocationTrace',
    'Buffer',
    'CallbackMemoryResource',
    'CudaAsyncMemoryResource',
    'CudaMemoryResource',
    'FailureCallbackMemoryResource',
    'HostMemoryResource',
    'LimitingMemoryResource',
    'LoggingMemoryResource',
    'ManagedMemoryResource',
    'MemoryResource',
    'PinnedMemoryResource',
    'PoolMemoryResource',
    'PoolStatistics',
    'PoolStreamStatistics',
    'ReplayReport',
    'ResourceScope',
    'StatisticsMemoryResource',
    'StatisticsScope',
    'TrackedAllocation',
    'TrackingMemoryResource',
    'current_resource',
    'read_log',
    'replay',
    'set_default_resource',
    'using',
]
