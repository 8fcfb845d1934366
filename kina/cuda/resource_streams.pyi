# Written by tools/stubs.py from resource_streams.pyx; not edited by hand.

"""The streams of memory resources: what `stream=` may name, and what resources in Python are told."""

from __future__ import annotations

from typing import final

__all__ = ['HomeStream']

@final
class HomeStream:
    """HomeStream()

    The stream that orders an allocation or its release, as a resource in Python is told of it. Good for the ``stream=``
    of another resource, and for any library that takes ``__cuda_stream__``. It holds the stream.
    """
    def __new__(cls): ...
    @property
    def device(self) -> str:
        """The device it is on: ``"cuda:N"``."""
    def __cuda_stream__(self) -> tuple[int, int]:
        """(version 0, native handle), as the protocol of cuda.core asks."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __reduce_ex__(self, protocol: int) -> object: ...
