# Written by tools/stubs.py from resources.pyx; not edited by hand.

"""Memory resources over the driver: device memory, driver pools, managed and pinned memory.

Source: CUDA Driver API, "Memory Management", "Stream Ordered Memory Allocator" and "Unified Addressing".
"""

from __future__ import annotations

from typing import final
from kina._core.identity import DeviceId
from kina._core.resource import MemoryResource
from kina.cuda.device import DeviceInfo

__all__ = ['CudaAsyncMemoryResource', 'CudaMemoryResource', 'ManagedMemoryResource', 'PinnedMemoryResource', 'own_resource']

class DriverMemoryResource(MemoryResource):
    """What the resources of this module have in common."""
    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""
    @property
    def host_waits(self) -> int:
        """How often the host was made to wait: by a full device, and by what the Notes of the class say."""

@final
class CudaMemoryResource(DriverMemoryResource):
    """CudaMemoryResource(device=0)

    Memory of a CUDA device, each allocation and each release a call of the driver (cuMemAlloc, cuMemFree).

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        ``0``, ``"cuda:0"`` or ``"cuda"`` (the first).

    Raises
    ------
    UnavailableError
        No driver, no such device.

    Notes
    -----
    It has no stream order: memory may be used at once, on any stream, and the driver waits for the device when it
    takes memory back (counted in `host_waits`). Tensors of a session give theirs back once their Runtime's stream is
    past their last use, at a later allocation or wait.

    When the device is full, what kina caches there is given back, then the streams of its Runtimes are waited for,
    before OutOfMemoryError is raised with ``requested``, ``live`` and ``limit``. What the driver does not take back
    (its context is gone) is leaked and stays in `live_bytes`.

    References
    ----------
    CUDA Driver API: cuMemAlloc, cuMemFree.
    """
    def __init__(self, device: int | str | DeviceId | DeviceInfo=0) -> None: ...

@final
class ManagedMemoryResource(DriverMemoryResource):
    """ManagedMemoryResource(device=0)

    Managed memory, which the host may use as well (cuMemAllocManaged). Sessions of the device take it for their tensors
    and present it as ordinary memory of the device.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        Whose sessions may use it.

    Raises
    ------
    UnavailableError
        No driver, no such device.
    UnsupportedError
        The device has no managed memory.

    Notes
    -----
    As :class:`CudaMemoryResource`: no stream order, and the driver waits when it takes memory back. Host and device are
    to be kept apart by waiting: kina puts nothing in order between them.

    References
    ----------
    CUDA Driver API: cuMemAllocManaged, cuMemFree.
    """
    def __init__(self, device: int | str | DeviceId | DeviceInfo=0) -> None: ...

@final
class PinnedMemoryResource(DriverMemoryResource):
    """PinnedMemoryResource(device=0)

    Host memory that stays where it is, for copies that run beside the host (cuMemHostAlloc). Host sessions and
    ``kina.memory.using`` take it as memory of ``"cpu"``; DLPack sees it as pinned.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        Through whose context it is made; every device can use it (CU_MEMHOSTALLOC_PORTABLE).

    Raises
    ------
    UnavailableError
        No driver, no such device.

    Notes
    -----
    An allocation takes about as long as clearing the memory, and both it and the release may make the driver wait for
    the device (releases are counted in `host_waits`). Copies that use it have to be over before it goes.

    References
    ----------
    CUDA Driver API: cuMemHostAlloc, cuMemFreeHost.
    """
    def __init__(self, device: int | str | DeviceId | DeviceInfo=0) -> None: ...

@final
class CudaAsyncMemoryResource(DriverMemoryResource):
    """CudaAsyncMemoryResource(device=0, *, release_threshold=None, initial_bytes=0, adopt=None)

    Memory of a CUDA device from a pool of the driver, allocated and released in the order of a stream.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        ``0``, ``"cuda:0"`` or ``"cuda"`` (the first).
    release_threshold : int, optional
        Bytes that the pool keeps when the host waits for a stream; what it has beyond them, and nobody uses, the driver
        then gives back. Default: a pool of its own keeps everything, an adopted one what it was told before.
    initial_bytes : int
        Let the pool reserve so much now.
    adopt : int, or object with ``handle``, optional
        A pool made elsewhere (a CUmemoryPool) on the same device, in place of one of its own. An object is kept alive;
        a bare handle is believed, and whoever made it must not destroy it while memory of it is out.

    Raises
    ------
    UnavailableError
        No driver, no such device.
    ForeignDeviceError
        The adopted pool is another device's.
    InvalidConfigError
        `release_threshold` is less than `initial_bytes`, or `adopt` names no pool.
    InvalidShapeError
        Bytes out of range.
    UnsupportedError
        `adopt` on a device without memory pools.

    Notes
    -----
    An allocation or a release with a stream only enqueues. Without one, an allocation is usable at once on any
    stream: it is made on a private stream of the device, which is waited for (counted in `host_waits`) and has nothing
    else on it; a release means that all uses are over, and waits for nothing. The driver reuses what was freed on
    another stream once that is known to be over, never by an order of its own.

    Where the device has no memory pools it is as :class:`CudaMemoryResource`: a release in stream order then waits for
    the device. When the device is full it does as that one does. The pool is not destroyed: the next resource or
    Runtime of the device takes it over.

    References
    ----------
    CUDA Driver API: cuMemPoolCreate, cuMemAllocFromPoolAsync, cuMemFreeAsync.
    """
    def __init__(self, device: int | str | DeviceId | DeviceInfo=0, *, release_threshold: int | None=None, initial_bytes: int=0, adopt: object | None=None) -> None: ...
    def unsafe_pool_handle(self) -> int:
        """The driver's handle of the pool (a CUmemoryPool); 0 on a device without memory pools.

        Notes
        -----
        **Safety.** It is valid as long as the resource or memory of it lives, and must not be destroyed.
        """

def own_resource(ordinal: int) -> MemoryResource:
    """The pool of the thread's default Runtime of a device, for `kina.memory.current_resource`."""
