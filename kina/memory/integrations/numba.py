"""kina as the memory manager of Numba: ``NUMBA_CUDA_MEMORY_MANAGER=kina.memory.integrations.numba``."""

from __future__ import annotations

import functools
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any

from kina.errors import UnsupportedError
from kina.memory.integrations import native

if TYPE_CHECKING:
    Base = object
else:
    try:
        from numba.cuda import HostOnlyCUDAMemoryManager as Base
    except ImportError:  # the class is there to be read about; it cannot be used
        Base = object

__all__ = ["NumbaMemoryManager"]


class NumbaMemoryManager(Base):  # type: ignore[misc]
    """Numba's device memory from kina: ``numba.cuda.set_memory_manager(NumbaMemoryManager)`` before its first use.

    An External Memory Management plugin (interface version 1) that hands out device memory; pinned and mapped host
    memory is Numba's own. Numba makes one per context.

    Notes
    -----
    Memory is allocated and goes back in the order of the legacy default stream, with which Numba's own streams are
    ordered. On an external stream that does not block with it, order that stream after the default stream before an
    array is first used there, and keep the array until the work there is over. When the last reference to an array
    goes, nothing waits, unlike with Numba's own manager; a reset of the context gives back all that is out.

    References
    ----------
    Numba for CUDA GPUs: External Memory Management (EMM) Plugin interface.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if Base is object:
            raise UnsupportedError(
                "NumbaMemoryManager: Numba with CUDA is not installed (pip install numba-cuda)",
                operation="NumbaMemoryManager",
            )
        super().__init__(*args, **kwargs)

    @property
    def name(self) -> str:
        """What it is called."""
        return "kina"

    @property
    def interface_version(self) -> int:
        """Of Numba's plugin interface: 1."""
        return 1

    def initialize(self) -> None:
        """Nothing: the device is opened by the first allocation."""

    def memalloc(self, size: int) -> Any:
        """Memory of the context's device from the resource that is current in the calling thread.

        Parameters
        ----------
        size : int
            In bytes.

        Returns
        -------
        numba.cuda.MemoryPointer

        Raises
        ------
        OutOfMemoryError
            With kina's figures.
        """
        from numba.cuda import MemoryPointer

        memory = native.allocation.allocate(size, self.context.device.id)
        key = object()  # no address: that may be somebody else's after a reset, when old arrays go
        self.allocations[key] = memory
        release = functools.partial(self.allocations.pop, key, None)
        return MemoryPointer(self.context, c_void_p(memory.address), size, finalizer=release)

    def get_memory_info(self) -> Any:
        """``(free, total)`` bytes of the device, as the driver tells them: what pools keep is not free."""
        from numba.cuda import MemoryInfo

        return MemoryInfo(*native.allocation.memory_info(self.context.device.id))

    def get_ipc_handle(self, memory: Any) -> Any:
        """Memory of kina cannot be shared with other processes by a handle: UnsupportedError."""
        raise UnsupportedError(
            "get_ipc_handle: memory of kina is not shared between processes; copy it to memory of Numba's own manager",
            operation="get_ipc_handle",
        )


_numba_memory_manager = NumbaMemoryManager  # the name that Numba looks for
