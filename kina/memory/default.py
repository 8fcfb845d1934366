"""The resource that serves where nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kina._core.current_resource import chosen_resource, current_host_resource, set_default_of_ordinal
from kina._core.opening import device_ordinal

if TYPE_CHECKING:
    from kina._core.identity import DeviceId
    from kina._core.resource import MemoryResource
    from kina.cuda import DeviceInfo

__all__ = ["current_resource", "set_default_resource"]


def set_default_resource(resource: MemoryResource | None, device: str | int | DeviceId | DeviceInfo = "cpu") -> None:
    """Let memory of `device` come from `resource` wherever no call, block, session or Runtime says otherwise.

    Parameters
    ----------
    resource : MemoryResource or None
        None: kina's own, as at the beginning: on a CUDA device the pool of each Runtime.
    device
        ``"cpu"``, ``"cuda:N"``, an ordinal, a DeviceId or a DeviceInfo. Whether it exists is not asked.

    Raises
    ------
    ArgumentError, ForeignDeviceError
        Not a resource, or one of another device.

    Notes
    -----
    For the whole process; may be called while other threads allocate. What was allocated goes back to where it came
    from.
    """
    set_default_of_ordinal(resource, device_ordinal(device))


def current_resource(device: str | int | DeviceId | DeviceInfo = "cpu") -> MemoryResource:
    """The resource that memory of `device` comes from, for a call of this thread outside of any session.

    That of the innermost :func:`using`, else the default, else kina's own: on a CUDA device that of the thread's
    default Runtime, which is made if need be.

    Raises
    ------
    UnavailableError
        A CUDA device that cannot be used, and nothing was chosen for it.
    """
    ordinal = device_ordinal(device)
    if ordinal < 0:
        return current_host_resource()
    chosen = chosen_resource(ordinal)
    if chosen is not None:
        return chosen
    from kina.cuda import load_sessions

    load_sessions()
    from kina.cuda.resources import own_resource

    return own_resource(ordinal)
