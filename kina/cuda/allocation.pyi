# Written by tools/stubs.py from allocation.pyx; not edited by hand.

"""What CuPy and Numba are given: memory that an object holds."""

from __future__ import annotations

from typing import final

__all__ = ['Allocation', 'allocate', 'memory_info']

@final
class Allocation:
    """Allocation()

    Memory for another library, made by :func:`allocate`; it goes back when this object goes.
    """
    def __new__(cls): ...
    @property
    def address(self) -> int:
        """Where it begins; 0 for 0 bytes."""
    @property
    def nbytes(self) -> int:
        """What was asked for."""
    def __repr__(self) -> str: ...
    def __reduce__(self): ...

def allocate(nbytes: int, ordinal: int, stream: object | None=None) -> Allocation:
    """Memory of a device from the resource that is current in the calling thread, in the order of a stream.

    Parameters
    ----------
    nbytes : int
    ordinal : int
        Of the device.
    stream : object with ``__cuda_stream__``, optional
        It is kept alive as long as the memory. Default: the legacy stream.

    Raises
    ------
    OutOfMemoryError
        With kina's figures.
    UnsupportedError
        The stream is being captured, or is the per-thread default stream.
    ForeignDeviceError, UnavailableError, ArgumentError, InvalidShapeError

    Notes
    -----
    Waits for nothing, unless the resource does. The memory is given back in the order of `stream` when the object
    goes, from any thread.
    """
def memory_info(ordinal: int) -> tuple[int, int]:
    """Free and total bytes of a device, as the driver tells them (cuMemGetInfo). DriverError, UnavailableError."""
