# Written by tools/stubs.py from foreign_streams.pyx; not edited by hand.

"""Streams that other libraries name by their handle, each with the one Runtime that the process has of it.

Nobody can be held for such a stream: it has to live as long as the memory in its order.
"""

from __future__ import annotations

__all__ = ['release_stream']


def release_stream(stream: object) -> None:
    """Let go of a stream that was served; see :func:`kina.memory.integrations.torch_release_stream`."""
