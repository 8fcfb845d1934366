# Written by tools/stubs.py from allocator.pyx; not edited by hand.

"""Memory for other libraries: what PyTorch calls without the GIL, and what CuPy and Numba are given.

Memory comes from the resource that is current in the calling thread, in the order of the stream that it is asked for
on, and goes back in that order; if other streams were named as users of it, once those are past what they had enqueued
when it was dropped.
"""

from __future__ import annotations

from typing import final
from kina._core.pool import PoolMemoryResource

__all__ = ['Allocation', 'allocate', 'default_pool', 'memory_info', 'release_stream', 'torch_counts', 'torch_functions']


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





def release_stream(stream: object) -> None:
    """Let go of a stream that was served; see :func:`kina.memory.integrations.torch_release_stream`."""
def default_pool(ordinal: int) -> PoolMemoryResource:
    """The pool of a device that serves other libraries where no resource was chosen: one, as long as the process."""
def torch_functions() -> tuple[int, int]:
    """The addresses of ``kina_torch_record_stream`` and ``kina_torch_empty_cache``, for PyTorch alone to call."""
def torch_counts() -> dict[str, int]:
    """What PyTorch has from kina, by the names of :class:`kina.memory.integrations.TorchStatistics`."""
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
