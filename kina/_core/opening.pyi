# Written by tools/stubs.py from opening.pyx; not edited by hand.

"""kina.session: from a target to a session. On the path of every with statement, so it is short."""

from __future__ import annotations

from kina._core.host_session import HostSession
from kina._core.identity import DeviceId
from kina._core.resource import MemoryResource
from kina.cuda.device import DeviceInfo
from kina.cuda.runtime import Runtime
from kina.cuda.session import CudaSession

__all__ = ['cuda_ordinal', 'device_ordinal', 'session']

def session(target: str | int | DeviceId | DeviceInfo | Runtime, *, stream: object | None=None, memory: MemoryResource | None=None) -> HostSession | CudaSession:
    """A new session of the calling thread, to be entered by ``with``.

    Parameters
    ----------
    target : str, int, DeviceId, DeviceInfo or Runtime
        ``"cpu"``; ``"cuda:N"``, the ordinal `N` itself, a DeviceId or a DeviceInfo (``"cuda"`` is
        ``"cuda:0"``): the thread's default Runtime of that device, made at first use; or a Runtime.
    stream : object with ``__cuda_stream__``, optional
        CUDA only: a stream of PyTorch, CuPy or cuda.core to run on; its owner is held.
    memory : kina.memory.MemoryResource, optional
        Where the memory of the session's tensors comes from: a resource of the target's device. Default: that of the
        Runtime, else that of ``kina.memory.set_default_resource``, else the Runtime's own pool.

    Returns
    -------
    Session
        Not entered yet; nothing happened on the device.

    Raises
    ------
    InvalidConfigError
        `target` names no device, or `stream` does not go with it.
    ForeignDeviceError
        `memory` hands out memory of another device than `target`.
    ArgumentError
        `memory` is no MemoryResource.
    UnavailableError
        CUDA cannot be used here; the message says what is missing.

    Notes
    -----
    Sessions nest, of the same and of different Runtimes. A session belongs to the thread that enters it;
    entering a Runtime that is open in another thread raises RuntimeBusyError.
    """
def device_ordinal(device: str | int | DeviceId | DeviceInfo) -> int:
    """The ordinal of ``"cuda:N"``, an int, a DeviceId or a DeviceInfo; -1 for ``"cpu"``.

    Whether the device exists is not asked.

    Raises
    ------
    InvalidConfigError
        Anything else.
    """
def cuda_ordinal(device: str | int | DeviceId | DeviceInfo) -> int:
    """The same for what must be a CUDA device."""
