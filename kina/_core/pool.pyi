# Written by tools/stubs.py from pool.pyx; not edited by hand.

"""The pool: a memory resource that keeps what it got and hands it out again, in the order of streams.

The work is done in native/pool.c, which needs no Python.
"""

from __future__ import annotations

from typing import NamedTuple, final
from kina._core.resource import MemoryResource

__all__ = ['PoolMemoryResource', 'PoolStatistics', 'PoolStreamStatistics']

class PoolStreamStatistics(NamedTuple):
    """What a :class:`PoolMemoryResource` keeps in the order of one stream.

    Attributes
    ----------
    stream_number : int
        kina's own number of the stream, never used again; 0 is memory without a stream.
    cached_bytes : int
        In the caches of threads and the bins of the stream: the stream's own, at once.
    pending_bytes : int
        Free in its order: its own at once, anybody's when the stream is past the release.
    """
    stream_number: int
    cached_bytes: int
    pending_bytes: int

class PoolStatistics(NamedTuple):
    """What a :class:`PoolMemoryResource` has and did; sizes in bytes.

    Attributes
    ----------
    live_bytes, live_allocations : int
        What is out, as it was asked for.
    total_allocations : int
        Served since the pool was made.
    reserved_bytes, peak_reserved_bytes : int
        What the pool has from its upstream, now and at most.
    cached_bytes : int
        What is free in the pool.
    pending_bytes : int
        How much of that was freed in the order of a stream that has not been seen past the release.
    largest_free_bytes : int
        The largest request that one free block can serve.
    fragmentation : float
        ``1 - largest_free_bytes / cached_bytes``; 0.0 where nothing is free.
    chunks : int
        In how many pieces the upstream gave what is reserved.
    maximum_bytes : int or None
        The limit of `reserved_bytes`.
    grown, returned : int
        How often a chunk came from the upstream, and went back.
    rescued_by_harvest, rescued_by_raid, rescued_by_stealing : int
        How many requests were served only by: taking over what streams are past; emptying the caches of
        threads; taking memory of another stream behind a wait on the device.
    rescued_by_returning, rescued_by_callback, rescued_by_waiting : int
        And how many only by: giving free chunks back to the upstream and asking again; what the callback of a
        :class:`FailureCallbackMemoryResource` below made room for; waiting on the host for the streams.
    refused : int
        Requests that failed.
    unknown_frees : int
        Releases that were left alone, because the pool never gave such memory.
    streams : tuple of PoolStreamStatistics
        By stream.
    """
    live_bytes: int
    live_allocations: int
    total_allocations: int
    reserved_bytes: int
    peak_reserved_bytes: int
    cached_bytes: int
    pending_bytes: int
    largest_free_bytes: int
    fragmentation: float
    chunks: int
    maximum_bytes: int | None
    grown: int
    returned: int
    rescued_by_harvest: int
    rescued_by_raid: int
    rescued_by_stealing: int
    rescued_by_returning: int
    rescued_by_callback: int
    rescued_by_waiting: int
    refused: int
    unknown_frees: int
    streams: tuple[PoolStreamStatistics, ...]

@final
class PoolMemoryResource(MemoryResource):
    """PoolMemoryResource(upstream, *, initial_bytes=0, maximum_bytes=None, alignment=256, growth=None)

    Keeps the memory that it got from `upstream` and hands it out again.

    Parameters
    ----------
    upstream : MemoryResource
        Where memory comes from, in chunks; of the host or of a device.
    initial_bytes : int
        How much the first chunk has at least. It is allocated when memory is first asked for.
    maximum_bytes : int, optional
        The most that the pool takes from `upstream` at any time. Default: no limit.
    alignment : int
        Of the addresses: a power of two, at least 256. Sizes are rounded up to it.
    growth : int, optional
        How many bytes a further chunk has at least. Default: an eighth of what is reserved, 2 to 256 MiB.

    Raises
    ------
    ArgumentError
        `alignment` is no power of two of 256 or more, or `maximum_bytes` is below `initial_bytes`.
    InvalidShapeError
        A size is negative or more than ``2**63 - 1``.

    Notes
    -----
    **Streams.** Over memory of a device, memory that was freed in the order of a stream serves that stream again at
    once, and others once the device is past the release, which the pool finds out by an event that it records and
    asks for when it would have to grow. Nothing is waited for, unless a request can be served in no other way: then
    the pool, in this order, takes over what streams are past, empties the caches of other threads, lets the asking
    stream wait on the device for another stream, gives free chunks back to `upstream` and asks again, calls the
    callback of a :class:`FailureCallbackMemoryResource` below it for as long as that makes room, looking through
    everything again after each call, and waits on the host for the streams. The callback of one above the pool comes
    at the same place: when nothing but a wait is left.

    **Threads.** Any thread may allocate and free, several at once, without the GIL. Each keeps up to 256 KiB of each
    size to itself, which goes back when the thread ends.

    **The end.** Memory goes back to `upstream` by :meth:`trim` and when the pool and all its memory are gone: chunks
    that a stream may still use follow when it is past them, at the next use of any pool; over device memory without
    stream order, whose release waits for the device, at the next ``synchronize()`` of a session. In a forked child,
    host memory works on; what other threads were busy with at the fork stays out.

    Source: per-thread caches and batches as in TCMalloc; two-level segregated fit below them.
    """
    def __init__(self, upstream: MemoryResource, *, initial_bytes: int=0, maximum_bytes: int | None=None, alignment: int=256, growth: int | None=None) -> None: ...
    def __del__(self): ...
    def trim(self, keep_bytes: int=0) -> int:
        """Give free chunks back to the upstream until no more than `keep_bytes` are reserved; how many bytes went.

        Parameters
        ----------
        keep_bytes : int
            What may stay reserved.

        Notes
        -----
        Empties the caches of all threads first. Waits for nothing: a chunk that a stream may still use stays. An
        upstream whose release waits for the device (CudaMemoryResource) does so here.
        """
    def stats(self) -> PoolStatistics:
        """What the pool has and did, read at one moment."""
