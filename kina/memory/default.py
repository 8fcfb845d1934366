"""The resource that serves where nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kina._core.current_resource import current_host_resource, set_default_host_resource
from kina._core.opening import device_ordinal
from kina.errors import UnsupportedError

if TYPE_CHECKING:
    from kina._core.identity import DeviceId
    from kina._core.resource import MemoryResource
    from kina.cuda import DeviceInfo

__all__ = ["current_resource", "set_default_resource"]


def set_default_resource(resource: MemoryResource | None, device: str | int | DeviceId | DeviceInfo = "cpu") -> None:
    """Let memory of `device` come from `resource` wherever no call, block or session says otherwise.

    Parameters
    ----------
    resource : MemoryResource or None
        None: kina's own, as at the beginning.
    device
        ``"cpu"``, ``"cuda:N"``, an ordinal, a DeviceId or a DeviceInfo.

    Raises
    ------
    ArgumentError, ForeignDeviceError
        Not a resource, or one of another device.
    UnsupportedError
        A CUDA device: its sessions allocate from their Runtime's own pool.

    Notes
    -----
    For the whole process; may be called while other threads allocate. What was allocated goes back to where it came
    from.
    """
    _check_host(device, "set_default_resource")
    set_default_host_resource(resource)


def current_resource(device: str | int | DeviceId | DeviceInfo = "cpu") -> MemoryResource:
    """The resource that memory of `device` comes from, for a call of this thread outside of any session.

    That of the innermost :func:`using`, else the default.

    Raises
    ------
    UnsupportedError
        A CUDA device: its sessions allocate from their Runtime's own pool.
    """
    _check_host(device, "current_resource")
    return current_host_resource()


def _check_host(device: str | int | DeviceId | DeviceInfo, operation: str) -> None:
    if device_ordinal(device) >= 0:
        raise UnsupportedError(
            f"{operation}: CUDA sessions allocate from their Runtime's own pool; only that of 'cpu' can be chosen",
            operation=operation,
        )
