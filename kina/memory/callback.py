"""A memory resource of two functions."""

from __future__ import annotations

from collections.abc import Callable

from kina._core.resource import MemoryResource
from kina.errors import ArgumentError

__all__ = ["CallbackMemoryResource"]


class CallbackMemoryResource(MemoryResource):
    """A resource that two functions in Python make.

    Parameters
    ----------
    allocate : callable
        ``allocate(nbytes, stream)`` gives the address of at least `nbytes` bytes, aligned to 256.
    deallocate : callable
        ``deallocate(address, nbytes, stream)`` takes them back.
    device : str
        Where the memory is: ``"cpu"`` or ``"cuda:N"``.

    Notes
    -----
    As a subclass of :class:`MemoryResource`: exceptions of `allocate` pass through, `stream` is None on the host.
    """

    def __init__(
        self,
        allocate: Callable[[int, object], int],
        deallocate: Callable[[int, int, object], object],
        device: str = "cpu",
    ) -> None:
        for name, function in (("allocate", allocate), ("deallocate", deallocate)):
            if not callable(function):
                raise ArgumentError(
                    f"{name}: a callable is needed, not {type(function).__name__}", operation="CallbackMemoryResource"
                )
        super().__init__(device=device)
        self._functions = (allocate, deallocate)

    def _allocate(self, nbytes: int, stream: object) -> int:
        return self._functions[0](nbytes, stream)

    def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
        self._functions[1](address, nbytes, stream)
