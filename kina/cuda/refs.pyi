# Written by tools/stubs.py from refs.pyx; not edited by hand.

"""Refs: what a raw block hands out of a tensor, and the rules for borrowing it."""

from __future__ import annotations

from typing import Final, final
from kina._core.dtype import DType

__all__ = ['DeviceBytes', 'StreamRef', 'TensorMut', 'TensorRef']

class TensorRef:
    """TensorRef()

    A tensor validated for reading by raw kernels: its span, its frozen layout, its owner. From ``raw.ref(tensor)``;
    dead after :meth:`release` or its block.
    """
    def __new__(cls): ...
    def release(self) -> None:
        """End the borrow early. Idempotent."""
    @property
    def alive(self) -> bool:
        """Can it still be used?"""
    @property
    def writable(self) -> bool:
        """Is it a mut?"""
    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the tensor."""
    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the tensor, in elements."""
    @property
    def dtype(self) -> DType:
        """DType of the tensor."""
    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
    def __reduce__(self): ...
    def __repr__(self) -> str: ...

@final
class TensorMut(TensorRef):
    """TensorMut()

    A tensor validated for writing by raw kernels. From ``raw.mut(tensor)``; nothing that overlaps it can be borrowed or
    passed to a kernel while it lives.
    """

@final
class DeviceBytes:
    """DeviceBytes()

    Scratch memory of a raw block, from ``raw.workspace(nbytes)``, for kernels and libraries: an argument of a parameter
    that a signature calls ``ptr``. Its contents are undefined. It ends with :meth:`release`, with its last reference or
    with its block; the memory goes back in the order of the session's stream, so that work enqueued before may still
    use it.

    Attributes
    ----------
    nbytes : int
        Its size in bytes; the address is aligned to 256.
    """
    nbytes: Final[int]

    def __new__(cls): ...
    def release(self) -> None:
        """Give the memory back now, in the order of the stream. Idempotent.

        Raises
        ------
        WrongThreadError
            Its raw block belongs to another thread.
        """
    @property
    def alive(self) -> bool:
        """Can it still be used?"""
    def __len__(self) -> int: ...
    def __reduce__(self): ...
    def __repr__(self) -> str: ...

@final
class StreamRef:
    """StreamRef()

    The one stream of a raw block, for libraries that take ``__cuda_stream__``. Dead after its block; the handle must
    not be kept beyond it.
    """
    def __new__(cls): ...
    def __cuda_stream__(self) -> tuple[int, int]:
        """(version 0, native handle), as the protocol of cuda.core asks.

        Raises
        ------
        SessionClosedError
            The raw block has ended.
        WrongThreadError
            It belongs to another thread.
        """
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
