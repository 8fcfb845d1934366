# Written by tools/stubs.py from current_resource.pyx; not edited by hand.

"""Which resource serves: that of a call, of a with statement of the thread, of a session, of the process."""

from __future__ import annotations

from typing import final
from kina._core.resource import MemoryResource

__all__ = ['ResourceScope', 'current_host_resource', 'set_default_host_resource', 'using']

@final
class ResourceScope:
    """ResourceScope()

    The block of a ``with kina.memory.using(resource)``; it may be entered again after it was left.
    """
    def __new__(cls): ...
    def __enter__(self) -> ResourceScope: ...
    def __exit__(self, kind: object, value: object, trace: object) -> None: ...
    def __reduce_ex__(self, protocol: int) -> object: ...

def using(resource: MemoryResource) -> ResourceScope:
    """``with using(resource):`` host memory of the thread comes from `resource` until the block is left.

    Parameters
    ----------
    resource : MemoryResource
        One of host memory.

    Raises
    ------
    ArgumentError
        Not a MemoryResource.
    ForeignDeviceError
        Its memory is on another device: CUDA sessions allocate from their Runtime's own pool.

    Notes
    -----
    Blocks nest. A ``memory=`` of a call goes before them, they go before the memory of a session and the default.
    What was allocated goes back to where it came from, whatever is in use then.
    """
def set_default_host_resource(resource: MemoryResource | None) -> None: ...
def current_host_resource() -> MemoryResource: ...
