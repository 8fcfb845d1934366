# Written by tools/stubs.py from runtime.pyx; not edited by hand.

"""Runtimes: one stream, one allocation domain, one retirement queue; and which of them a thread has."""

from __future__ import annotations

from typing import final
from kina._core.identity import AllocationDomainId, DeviceId, RuntimeIdentity
from kina._core.resource import MemoryResource
from kina.cuda.device import DeviceInfo

__all__ = ['Runtime']

@final
class Runtime:
    """Runtime(device, *, stream=None, memory=None, modules=64)

    One real stream, one allocation domain, one retirement queue and one module cache on one GPU.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        ``0``, ``"cuda:0"`` or ``"cuda"`` (the first).
    stream : object with ``__cuda_stream__``, optional
        A stream made elsewhere (PyTorch's, CuPy's, cuda.core's) to adopt; it is kept alive, so it must not itself keep
        the Runtime: such a cycle is never collected. Without one the Runtime
        checks a non-blocking stream out of the device's pool and returns it when its last tensor is gone.
    memory : kina.memory.MemoryResource, optional
        Where the memory of its sessions' tensors comes from, unless they or a call say otherwise; one of the device.
        Default: that of ``kina.memory.set_default_resource``, else a pool of its own. A resource in Python must not
        itself keep a session of the Runtime: that cycle is never collected.
    modules : int
        How many modules it keeps loaded, from 1 to 65,536: what is asked for again is found, the least recently used go
        first. A module that somebody holds, or whose code is in flight, lives on.

    Raises
    ------
    UnavailableError
        No driver, no such device.
    UnsupportedError, ForeignDeviceError
        The stream is per-thread, of a green context, or of another device; the memory is another device's.
    ArgumentError
        `memory` is no MemoryResource, `modules` no int from 1 to 65,536.

    Notes
    -----
    Making one waits for nothing but the first use of its device in the process (0.1 s). A Runtime may be entered from
    any thread, by one thread at a time. Two Runtimes on one GPU share nothing but the GPU and its primary context.
    """
    def __new__(cls, device: int | str | DeviceId | DeviceInfo, *, stream: object | None=None, memory: MemoryResource | None=None, modules: int=64): ...
    @property
    def device(self) -> DeviceId:
        """The device it runs on."""
    @property
    def identity(self) -> RuntimeIdentity:
        """This exact instance; never reused."""
    @property
    def allocation_domain(self) -> AllocationDomainId:
        """The domain that owns and retires what it allocates."""
    @property
    def closed(self) -> bool:
        """Has :meth:`close` been called?"""
    def close(self) -> None:
        """Wait for everything on its stream, release what that protected, and refuse new sessions. Idempotent.

        Tensors that are still alive stay valid to drop; the stream goes back to the pool with the last of them.

        Raises
        ------
        RuntimeBusyError
            A session has it open.
        SynchronizeError
            Earlier asynchronous work failed.
        """
    def __enter__(self) -> Runtime: ...
    def __exit__(self, *exception: object) -> None: ...
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
