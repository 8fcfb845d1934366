# Written by tools/stubs.py from replaying.pyx; not edited by hand.

"""The loop that plays a trace of allocations on a memory resource, without the GIL.

One thread at a time has the turn: that of the next event. It plays until an event of another thread comes and hands the
turn over, so all events happen in the order of the log, each on the thread it belongs to.
"""

from __future__ import annotations

from typing import final
from kina._core.allocation_trace import AllocationTrace
from kina._core.resource import MemoryResource

__all__ = ['Playback']

@final
class Playback:
    """Playback(trace, resource, streams=())

    One run of a trace on a resource; :func:`kina.memory.replay` drives it.

    Parameters
    ----------
    trace : AllocationTrace
        Read to its end.
    resource : MemoryResource
        Where the memory comes from.
    streams : sequence
        One for each stream of the trace, for a resource with stream order; else empty.
    """
    pause: int

    def __new__(cls, trace: AllocationTrace, resource: MemoryResource, streams: object=()): ...
    def run(self, thread: int=-1) -> bool:
        """Play the events of a thread, each in its turn, or all of them if none is named.

        Returns
        -------
        bool
            True: the pause has come, the turn is still this thread's; call again, with a later :attr:`pause`. False:
            there is nothing more to do for it.

        Raises
        ------
        Exception
            What the resource raised for an allocation, with a note which line of the log it is.
        """
    def thread_to_start(self) -> int | None:
        """Wait a moment for a thread to be started: its number; -1 if there was none; None when all is over."""
    def stop(self) -> None:
        """No thread gets another turn; the one that has it is done at its next pause."""
    def give_back(self) -> tuple[int, int]:
        """Stop, and free what is live: how many allocations, and how many bytes."""
    @property
    def position(self) -> int:
        """The number of the next event."""
    @property
    def allocations(self) -> int:
        """Allocations that were made."""
    @property
    def deallocations(self) -> int:
        """Frees that were made, without those of :meth:`give_back`."""
    @property
    def allocate_ns(self) -> int:
        """Nanoseconds in allocations, the loop's own included."""
    @property
    def deallocate_ns(self) -> int:
        """Nanoseconds in frees, the loop's own included."""
    @property
    def allocate_overhead_ns(self) -> float:
        """What the loop costs an allocation."""
    @property
    def deallocate_overhead_ns(self) -> float:
        """What the loop costs a free."""
