# Written by tools/stubs.py from allocation_trace.pyx; not edited by hand.

"""Logs of allocations in memory: one record of 32 bytes for each line, frees joined with their allocations."""

from __future__ import annotations

from typing import final
from array import array
from typing_extensions import Buffer

__all__ = ['AllocationTrace']

@final
class AllocationTrace(Buffer):
    """AllocationTrace(source="a log")

    The events of a log, in its order, with each free joined to its allocation; what :func:`kina.memory.read_log` gives.

    Parameters
    ----------
    source : str
        What messages call it.

    Notes
    -----
    An event takes 32 bytes. As a buffer it is those records; ``numpy.frombuffer(trace, kina.memory.log_reader.EVENT)``
    reads them in place.
    """
    def __new__(cls, source: str='a log'): ...
    def feed(self, data: bytes) -> None:
        """Read on: `data` is the next piece of the file, of any length.

        Raises
        ------
        InvalidConfigError
            A line is no line of such a log; the message says which and why.
        SessionClosedError
            :meth:`finish` was called.
        """
    def finish(self, cut: bool=False) -> None:
        """The file ends here; `cut` says that it ends too early. A last line without its newline is left out.

        Raises
        ------
        InvalidConfigError
            There is no header.
        """
    def __len__(self) -> int: ...
    def outstanding(self) -> array:
        """The numbers of the events that allocated what was never freed, in the log's order: an array of uint32."""
    @property
    def name(self) -> str:
        """What messages call the log."""
    @property
    def thread_names(self) -> tuple[str, ...]:
        """The threads as the log names them; an event has the place of its own."""
    @property
    def stream_names(self) -> tuple[str, ...]:
        """The streams as the log names them; an event has the place of its own."""
    @property
    def was_cut(self) -> bool:
        """Whether the file ends within a line, or its compressed data too early."""
    @property
    def peak_live_bytes(self) -> int:
        """The most bytes that were live at once, as they were asked for."""
    @property
    def peak_live_event(self) -> int:
        """The number of the event that brought them about."""
    @property
    def live_at_end_bytes(self) -> int:
        """Bytes that were never freed."""
    @property
    def live_at_end_count(self) -> int:
        """Allocations that were never freed."""
    @property
    def wrong_size_count(self) -> int:
        """Frees that told another size than their allocation."""
