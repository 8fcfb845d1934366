# Written by tools/stubs.py from session.pyx; not edited by hand.

"""What all sessions are: authority that cannot be constructed, copied or pickled."""

from __future__ import annotations

__all__ = ['Session']

class Session:
    """Session()

    A thread's scoped authority over one Runtime: the only way to run anything. ``kina.session(...)`` opens
    one; it cannot be constructed, copied or pickled.
    """
    def __new__(cls): ...
    def __reduce_ex__(self, protocol: int) -> object: ...
