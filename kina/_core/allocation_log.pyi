# Written by tools/stubs.py from allocation_log.pyx; not edited by hand.

"""A memory resource that writes every allocation and free to a file, in the columns of RMM's logs.

Producers put records into a ring without a lock; one native thread for each log writes them out. A producer draws a
ticket, waits until the place of that ticket is free, fills it, and publishes it by its sequence number. So nothing is
lost, and the order of each thread is kept. The writer stays behind: it looks every 20 ms, or when another half of the
ring is full, so that it seldom wants a cache line that a producer is writing.

Reading the clock would be the dearest part of a record. So producers read the processor's own counter (x86-64: the
time-stamp counter; AArch64: the virtual counter), and the writer turns it into time. Before it writes what was drawn
up to then, it reads counter and clock together; a record between two such moments has its time on the straight line
between them. The lines join, so the times of a thread never go back unless the clock does; a step of the clock is
spread over the moments around it. Where the counter is not steady, producers read the clock.
"""

from __future__ import annotations

from typing import final
from kina._core.resource import MemoryResource

__all__ = ['LoggingMemoryResource']

@final
class LoggingMemoryResource(MemoryResource):
    """LoggingMemoryResource(upstream, path, stacks=False, *, ring_records=65536)

    Writes every allocation and free to a file: comma-separated, with RMM's columns ``Thread``, ``Time``, ``Action``,
    ``Pointer``, ``Size`` and ``Stream``, so RMM's tools read it.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    path : str or os.PathLike
        The file; what it held is gone.
    stacks : bool
        One more column, ``Stack``: where in Python it happened. This takes the GIL at each record.
    ring_records : int
        How many records wait for the writer at most, a power of two from 2 on; 64 bytes each.

    Raises
    ------
    OSError
        The file cannot be written; also from :meth:`flush` and :meth:`close`, for what failed in between.

    Notes
    -----
    Actions are ``allocate``, ``free`` and ``allocate failure``. Threads are kina's numbers, never reused; times are
    local, to the microsecond. A record costs a reading of the processor's counter (of the clock, where that counter is
    not steady) and a place in a ring, which one native thread empties every 20 ms, or when it is half full. The thread
    begins with the first record and ends with :meth:`close`, the resource or the process. When the ring is full,
    whoever allocates waits for room (:attr:`waits`): nothing is lost, and the order of each thread is kept. What a
    forked child allocates is not logged.
    """
    def __init__(self, upstream: MemoryResource, path: object, stacks: bool=False, *, ring_records: int=65536) -> None: ...
    def flush(self) -> None:
        """Wait until everything recorded so far is in the file.

        Raises
        ------
        OSError
            Writing failed: from there on the log misses everything.
        """
    def close(self) -> None:
        """Write what is recorded and end the log; the resource goes on without one. Closing twice is harmless.

        Raises
        ------
        OSError
            As :meth:`flush`.
        """
    def __enter__(self) -> LoggingMemoryResource: ...
    def __exit__(self, kind: object, value: object, trace: object) -> None: ...
    @property
    def path(self) -> str:
        """The file."""
    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
    @property
    def records(self) -> int:
        """How many allocations, frees and failures were recorded."""
    @property
    def waits(self) -> int:
        """How often a thread had to wait for room in the ring."""
