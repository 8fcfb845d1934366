# Written by tools/stubs.py from launch.pyx; not edited by hand.

"""Launches: of a function with a configuration that has been checked, from Python and without it.

Source: CUDA Driver API, "Execution Control" (cuLaunchKernel with the `extra` parameter buffer, cuLaunchKernelEx).
"""

from __future__ import annotations

from typing import Final, final
from kina.cuda.config import LaunchConfig

__all__ = ['PreparedLaunch']

@final
class PreparedLaunch:
    """PreparedLaunch()

    A function with a configuration that has been checked once, from ``function.prepare(config)``: reusable in later raw
    blocks of its Runtime. It keeps the code loaded.

    Attributes
    ----------
    config : LaunchConfig

    Notes
    -----
    Cython code launches it without the GIL by ``launch_prepared`` of ``kina/cuda/launch.pxd``.
    """
    config: Final[LaunchConfig]

    def __new__(cls): ...
    @property
    def name(self) -> str:
        """The entry's name."""
    def launch(self, *arguments: object) -> None:
        """Enqueue one launch on the session's stream; nothing waits.

        Parameters
        ----------
        *arguments
            One per parameter, as :meth:`kina.cuda.Function.launch` takes them.

        Raises
        ------
        ArgumentError, InvalidLayoutError, NonContiguousError, DTypeError, ForeignRuntimeError, ForeignDeviceError, DLPackError, UnsupportedError, SessionClosedError, WrongThreadError, RuntimePoisonedError, LaunchError
            As :meth:`kina.cuda.Function.launch`.

        Notes
        -----
        All checks of the arguments and of the raw block come before anything is enqueued; the configuration was checked
        when it was prepared. What the launch uses is protected as by :meth:`kina.cuda.Function.launch`, and tensors of
        other libraries are borrowed and waited for as there.

        **Safety.** That of :meth:`kina.cuda.Function.launch`: the kernel runs with the authority of this process, must
        stay within the memory of its arguments and write only what is passed as ``mut``, and what is hidden in scalars
        or bytes is not protected.
        """
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
