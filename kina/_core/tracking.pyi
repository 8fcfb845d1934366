# Written by tools/stubs.py from tracking.pyx; not edited by hand.

"""A memory resource that knows what is out, since when and from where, and refuses frees of anything else."""

from __future__ import annotations

from typing import NamedTuple, final
from kina._core.resource import MemoryResource

__all__ = ['TrackedAllocation', 'TrackingMemoryResource']

class TrackedAllocation(NamedTuple):
    """One allocation that has not been freed.

    Attributes
    ----------
    number : int
        Ascending from 1, never reused in its resource.
    nbytes : int
        What was asked for.
    age_s : float
        Seconds since it was made.
    thread : int
        kina's number of the thread that made it, never reused.
    stack : str or None
        Where Python was, innermost call first, if stacks are kept.
    """
    number: int
    nbytes: int
    age_s: float
    thread: int
    stack: str | None

@final
class TrackingMemoryResource(MemoryResource):
    """TrackingMemoryResource(upstream, stacks=False)

    Remembers every allocation from `upstream` until it is freed.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from.
    stacks : bool
        Keep also where in Python each was made (32 calls deep). This takes the GIL at each allocation.

    Notes
    -----
    A free of what is not outstanding (freed twice, or foreign) frees nothing; one with a wrong size frees what was
    allocated. Both are kept in :meth:`errors`, and the first one is also an error of the logger ``"kina.memory"``.
    """
    def __init__(self, upstream: MemoryResource, stacks: bool=False) -> None: ...
    def outstanding(self) -> list[TrackedAllocation]:
        """What is allocated and not freed, oldest first."""
    def errors(self) -> list[str]:
        """What was freed wrongly, in words: the first 64."""
    @property
    def error_count(self) -> int:
        """How many frees were wrong."""
    def report(self) -> str:
        """A text for people: what is outstanding, largest first, and what was freed wrongly."""
