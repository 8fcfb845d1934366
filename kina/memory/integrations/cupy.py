"""kina as CuPy's allocator."""

from __future__ import annotations

from typing import Any

from kina.errors import OutOfMemoryError
from kina.memory.integrations import native

__all__ = ["cupy_allocator"]


def cupy_allocator(nbytes: int) -> Any:
    """Memory for CuPy: ``cupy.cuda.set_allocator(kina.memory.integrations.cupy_allocator)``.

    Parameters
    ----------
    nbytes : int
        0 gives a null pointer on the current device, as CuPy's own allocators do.

    Returns
    -------
    cupy.cuda.MemoryPointer
        Memory of CuPy's current device, in the order of its current stream.

    Raises
    ------
    OutOfMemoryError
        CuPy's class of that name and kina's at once, with kina's figures.
    UnsupportedError
        The current stream is being captured, or it is the per-thread default stream (``Stream.ptds``).

    Notes
    -----
    Nothing waits, unless the current resource does. When the last array over the memory goes, it is given back in the
    order of the stream it was allocated for, from whichever thread; that stream is kept alive until then. An array that
    another stream still uses must be kept until the streams are ordered, as with CuPy's own pool. Needs CuPy 14, whose
    streams have ``__cuda_stream__``.
    """
    import cupy

    ordinal = cupy.cuda.device.get_device_id()
    if nbytes == 0:
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, ordinal), 0)
    try:
        memory = native.allocation.allocate(nbytes, ordinal, cupy.cuda.get_current_stream())
    except OutOfMemoryError as error:
        raise _out_of_memory()(error) from error
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.address, nbytes, memory, ordinal), 0)


_error_class: Any = None


def _out_of_memory() -> Any:
    """The class that both CuPy's users and kina's catch."""
    global _error_class
    if _error_class is not None:
        return _error_class
    import cupy

    class CupyOutOfMemoryError(OutOfMemoryError, cupy.cuda.memory.OutOfMemoryError):  # type: ignore[misc]
        def __init__(self, error: OutOfMemoryError) -> None:
            MemoryError.__init__(self, str(error))
            self.__dict__.update(error.__dict__)

        def __reduce__(self) -> tuple:
            return OutOfMemoryError, (str(self),), self.__dict__

    _error_class = CupyOutOfMemoryError
    return CupyOutOfMemoryError
