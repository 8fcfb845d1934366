# Written by tools/stubs.py from adaptors.pyx; not edited by hand.

"""Memory resources over others that count, limit, or ask for help: nothing on their way takes the GIL or allocates."""

from __future__ import annotations

from typing import NamedTuple, final
from kina._core.resource import MemoryResource

__all__ = ['AllocationCounts', 'FailureCallbackMemoryResource', 'LimitingMemoryResource', 'StatisticsMemoryResource', 'StatisticsScope']

@final
class LimitingMemoryResource(MemoryResource):
    """LimitingMemoryResource(upstream, limit_bytes)

    Serves from `upstream` as long as no more than `limit_bytes` are out at once.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    limit_bytes : int
        The most bytes, as they were asked for, that may be live together.

    Notes
    -----
    Beyond the limit ``allocate`` raises OutOfMemoryError with the attributes ``requested``, ``live`` and ``limit``,
    and `upstream` is not asked. The limit holds exactly, however many threads allocate.
    """
    def __init__(self, upstream: MemoryResource, limit_bytes: int) -> None: ...
    @property
    def limit_bytes(self) -> int:
        """The most bytes that may be live together."""
    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""

class AllocationCounts(NamedTuple):
    """What a :class:`StatisticsMemoryResource`, or one scope of it, has counted.

    Attributes
    ----------
    current_bytes, current_count : int
        Allocated and not freed. In a scope: since its beginning, so negative where more was freed.
    peak_bytes, peak_count : int
        The most that these ever were; at least 0.
    total_bytes, total_count : int
        All allocations.
    failed_count : int
        Allocations that were not served.
    """
    current_bytes: int = 0
    peak_bytes: int = 0
    total_bytes: int = 0
    current_count: int = 0
    peak_count: int = 0
    total_count: int = 0
    failed_count: int = 0

@final
class StatisticsMemoryResource(MemoryResource):
    """StatisticsMemoryResource(upstream)

    Counts what is allocated from `upstream`: bytes as they were asked for, and allocations.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    """
    def __init__(self, upstream: MemoryResource) -> None: ...
    def counts(self) -> AllocationCounts:
        """What was counted since the resource was made; of one moment."""
    def scope(self) -> StatisticsScope:
        """``with resource.scope() as scope:`` counts, from nothing, what happens until the block is left.

        Notes
        -----
        It counts all threads. Scopes nest, overlap and may be left in any order and on any thread: each counts for
        itself. After the block, ``scope.counts()`` stays as it was at its end.
        """

@final
class StatisticsScope:
    """StatisticsScope()

    What :meth:`StatisticsMemoryResource.scope` gives: entered once, it counts until it is left.
    """
    def __new__(cls): ...
    def __enter__(self) -> StatisticsScope: ...
    def __exit__(self, kind: object, value: object, trace: object) -> None: ...
    def counts(self) -> AllocationCounts:
        """What was counted in the block, so far or until it was left."""
    def __reduce_ex__(self, protocol: int) -> object: ...

@final
class FailureCallbackMemoryResource(MemoryResource):
    """FailureCallbackMemoryResource(upstream, callback)

    Asks `callback` for help when `upstream` is out of memory.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    callback : callable
        ``callback(nbytes) -> bool``: true if it has made room and `upstream` shall be asked again; false, and the
        failure of `upstream` is raised.

    Notes
    -----
    `callback` runs on the allocating thread, with the GIL and no lock of kina held, so it may allocate and free. It is
    called until `upstream` serves or it gives false. Its exceptions pass through to whoever allocates. Other failures
    than OutOfMemoryError and MemoryError are not shown to it.

    It comes when nothing is left but to wait on the host: for memory of a device before the streams are waited for, and
    with a pool above or below after all that the pool can do without a wait. Only when it has given false is the rest
    tried, and it is not called again for that request. A pool that is at its own `maximum_bytes` does not call one
    below it, whose upstream is not what is full.
    """
    def __init__(self, upstream: MemoryResource, callback: object) -> None: ...
