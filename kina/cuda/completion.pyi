# Written by tools/stubs.py from completion.pyx; not edited by hand.

"""Completions: witnesses of what a session had enqueued."""

from __future__ import annotations

from typing import final

__all__ = ['Completion']

@final
class Completion:
    """Completion()

    A witness of everything its session had enqueued when :meth:`CudaSession.completion` made it. Usable from any
    thread, after its session and its Runtime are gone too.
    """
    def __new__(cls): ...
    def done(self) -> bool:
        """Has the device finished? Asks the driver (1.3 us) until it once says yes; never waits.

        Raises
        ------
        SynchronizeError
            The work, or work before it, failed.
        """
    def wait(self) -> None:
        """Wait on the host until the device has finished (counted in ``host_waits``).

        Raises
        ------
        SynchronizeError
            The work, or work before it, failed.
        """
    def __reduce__(self): ...
