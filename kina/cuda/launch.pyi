# Written by tools/stubs.py from launch.pyx; not edited by hand.

"""Functions and their launches.

Source: CUDA Driver API, "Execution Control" (cuLaunchKernel with the `extra` parameter buffer, cuLaunchKernelEx,
cuFuncGetParamInfo, cuFuncLoad).
"""

from __future__ import annotations

from typing import Final, final
from kina.cuda.config import LaunchConfig
from kina.cuda.signature import Signature

__all__ = ['Function', 'Module']

@final
class Module:
    """Module()

    Device code loaded for one Runtime, from ``raw.module(image)``. Unloaded when nothing refers to it any more and
    the device is past every launch from it.
    """
    def __new__(cls): ...
    def function(self, name: str, signature: str | None=None) -> Function:
        """Look up an entry and load it eagerly, so that its first launch neither loads nor waits.

        Parameters
        ----------
        name : str
            The entry's name in the image.
        signature : str, optional
            Parameters in the author's words, such as ``"mut f32[], f32[], f32, u32"``: see :class:`Signature`. With
            one, tensors and Python numbers are accepted and converted; without, only typed scalars, refs and bytes.

        Raises
        ------
        SymbolLookupError
            The module has no such entry.
        ArgumentError
            The signature contradicts the parameters that the driver reports.
        """
    def __reduce__(self): ...

@final
class Function:
    """Function()

    One entry of a Module, ready to launch, from ``module.function(name, signature)``. Reusable in later raw blocks of
    its Runtime.
    """
    module: Final[Module]
    name: Final[str]
    signature: Final[Signature]

    def __new__(cls): ...
    @property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter in bytes, as the driver reports them."""
    @property
    def max_threads_per_block(self) -> int:
        """The largest block it can run with."""
    @property
    def shared_bytes(self) -> int:
        """Static shared memory per block, in bytes."""
    def launch(self, config: LaunchConfig, *arguments: object) -> None:
        """Enqueue one launch on the session's stream; nothing waits.

        Parameters
        ----------
        config : LaunchConfig
        *arguments
            One per parameter. With a signature: tensors (or refs) of the declared dtype, C-ordered and compact, of this
            Runtime, and Python or NumPy numbers that fit. Without: refs, ``kina.f32(2)``-style or NumPy scalars, and
            ``bytes`` of a parameter's exact size.

        Raises
        ------
        ArgumentError
            Wrong number, type, size or range of arguments.
        InvalidConfigError
            A limit of the device or the function is exceeded; the message has both numbers.
        InvalidLayoutError, NonContiguousError, DTypeError, ForeignRuntimeError, ForeignDeviceError
            A tensor cannot be passed as declared.
        SessionClosedError, WrongThreadError, RuntimePoisonedError
            There is no raw block of its Runtime to launch in.
        LaunchError
            The driver refused.

        Notes
        -----
        All checks come before anything is enqueued. Memory of this Runtime is protected by stream order; the module
        and foreign memory are leased until the device is past the launch.

        **Safety.** The kernel runs with the authority of this process. The arguments must be what it expects, in its
        order; without a signature only sizes are checked. It must stay within the memory of the tensors it is given,
        write only to those passed as ``mut``, read nothing it has not initialised, and must not alias what the
        signature says is apart. A ref passed without a signature may be written through only if it is a mut. Handles
        and addresses hidden in scalars or bytes are not protected by leases: what they point to must live until the
        work is complete.
        """
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
