"""The pool that libraries share where no resource was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kina._core.opening import cuda_ordinal
from kina.memory.integrations import native

if TYPE_CHECKING:
    from kina._core.identity import DeviceId
    from kina._core.pool import PoolMemoryResource
    from kina.cuda import DeviceInfo

__all__ = ["default_pool"]


def default_pool(device: str | int | DeviceId | DeviceInfo = 0) -> PoolMemoryResource:
    """The pool of a device that serves other libraries where no resource was chosen.

    Parameters
    ----------
    device
        ``"cuda:N"``, an ordinal, a DeviceId or a DeviceInfo.

    Raises
    ------
    UnavailableError
        No driver, no such device.

    Notes
    -----
    One per device, over a :class:`kina.memory.CudaAsyncMemoryResource` of its own, as long as the process. Sessions of
    kina do not use it unless told to, by :func:`kina.memory.set_default_resource` say.
    """
    return native.shared_pool.default_pool(cuda_ordinal(device))
