# Written by tools/stubs.py from shared_pool.pyx; not edited by hand.

"""The devices that serve other libraries, each with the pool that they share where no resource was chosen."""

from __future__ import annotations

from kina._core.pool import PoolMemoryResource

__all__ = ['default_pool']

def default_pool(ordinal: int) -> PoolMemoryResource:
    """The pool of a device that serves other libraries where no resource was chosen: one, as long as the process."""
