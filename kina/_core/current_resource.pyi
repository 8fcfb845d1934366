# Written by tools/stubs.py from current_resource.pyx; not edited by hand.

"""Which resource serves: that of a call, of a with statement of the thread, of a session, of the process."""

from __future__ import annotations

from typing import final
from kina._core.resource import MemoryResource

__all__ = ['ResourceScope', 'chosen_resource', 'current_host_resource', 'set_default_of_ordinal', 'using']

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
    """``with using(resource):`` memory of its device comes from `resource` in this thread until the block is left.

    Parameters
    ----------
    resource : MemoryResource
        One of host memory, which serves host sessions, or of a CUDA device, which serves sessions there.

    Raises
    ------
    ArgumentError
        Not a MemoryResource.

    Notes
    -----
    Blocks nest; each device has an innermost one of its own. A ``memory=`` of a call goes before them, they go before
    the memory of a session, of its Runtime and the default. What was allocated goes back to where it came from,
    whatever is in use then.
    """
def set_default_of_ordinal(resource: MemoryResource | None, ordinal: int) -> None:
    """The default for a CUDA device, or for the host where `ordinal` is -1."""
def chosen_resource(ordinal: int) -> MemoryResource | None:
    """That of the thread's innermost scope, else the default; None where neither says anything."""
def current_host_resource() -> MemoryResource: ...
