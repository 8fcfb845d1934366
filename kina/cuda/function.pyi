# Written by tools/stubs.py from function.pyx; not edited by hand.

"""Modules and functions: what authors look up in an image, and launch.

Source: CUDA Driver API, "Module Management" and "Execution Control".
"""

from __future__ import annotations

from typing import Final, final
from kina.cuda.config import LaunchConfig
from kina.cuda.launch import PreparedLaunch
from kina.cuda.signature import Signature

__all__ = ['Function', 'Module']

@final
class Module:
    """Module()

    Device code loaded for one Runtime, from ``raw.module(image)``. Unloaded when nothing refers to it any more and
    the device is past every launch from it.

    Attributes
    ----------
    kind : str
        ``"ptx"``, ``"cubin"`` or ``"fatbin"``: what the driver was given.
    log : str
        What NVRTC said where it compiled CUDA C++: its warnings.
    """
    log: Final[str]
    kind: Final[str]

    def __new__(cls): ...
    def function(self, name: str, signature: str | None=None) -> Function:
        """Look up an entry and load it eagerly, so that its first launch neither loads nor waits.

        Parameters
        ----------
        name : str
            The entry's name in the image, or a name expression that the source was compiled with.
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

    def __new__(cls): ...
    @property
    def name(self) -> str:
        """The entry's name, as it was asked for."""
    @property
    def signature(self) -> Signature | None:
        """What its author says of its parameters."""
    @property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter in bytes, as the driver reports them."""
    @property
    def max_threads_per_block(self) -> int:
        """The largest block it can run with."""
    @property
    def shared_bytes(self) -> int:
        """Static shared memory per block, in bytes."""
    @property
    def max_dynamic_shared_bytes(self) -> int:
        """The most dynamic shared memory per block that a launch may ask for, in bytes."""
    @property
    def registers(self) -> int:
        """Registers of 32 bits per thread."""
    @property
    def local_bytes(self) -> int:
        """Local memory per thread, in bytes: what did not fit into registers."""
    @property
    def constant_bytes(self) -> int:
        """Constant memory that it declares, in bytes."""
    @property
    def ptx_version(self) -> tuple[int, int]:
        """(major, minor) of the virtual architecture that it was compiled for."""
    @property
    def binary_version(self) -> tuple[int, int]:
        """(major, minor) of the architecture whose code is loaded."""
    def max_active_blocks(self, config: LaunchConfig) -> int:
        """How many blocks of a launch with this configuration a multiprocessor holds at once; 0: it cannot be launched.

        Raises
        ------
        InvalidConfigError
            A limit of the device or the function is exceeded.

        Notes
        -----
        Source: cuOccupancyMaxActiveBlocksPerMultiprocessor. Nothing is enqueued. Any thread, also outside a raw block.
        """
    def max_active_clusters(self, config: LaunchConfig) -> int:
        """How many clusters of a launch with this configuration the device holds at once.

        Raises
        ------
        InvalidConfigError
            It has no ``cluster``, or a limit of the device or the function is exceeded.

        Notes
        -----
        Source: cuOccupancyMaxActiveClusters. Nothing is enqueued. Any thread, also outside a raw block.
        """
    def suggest_block(self, shared_bytes: int=0, max_threads: int=0) -> tuple[int, int]:
        """A block size that fills the multiprocessors as far as this function can.

        Parameters
        ----------
        shared_bytes : int
            Dynamic shared memory per block, in bytes.
        max_threads : int
            The largest block that is wanted; 0: any.

        Returns
        -------
        tuple of int
            Threads in a block, and the blocks that are needed to fill the device.

        Raises
        ------
        InvalidConfigError
            A number is negative, or so much shared memory is not to be had.

        Notes
        -----
        Source: cuOccupancyMaxPotentialBlockSize. Nothing is enqueued. Any thread, also outside a raw block.
        """
    def prepare(self, config: LaunchConfig) -> PreparedLaunch:
        """Check a configuration once, for any number of launches.

        Parameters
        ----------
        config : LaunchConfig

        Returns
        -------
        PreparedLaunch
            ``prepared.launch(*arguments)`` does what ``function.launch(config, *arguments)`` does.

        Raises
        ------
        InvalidConfigError
            A limit of the device or the function is exceeded; the message has both numbers.
        UnsupportedError
            The device has no such launches.
        LaunchError
            The driver did not let the function have the shared memory or the cluster that it takes.

        Notes
        -----
        Nothing is enqueued. Any thread, also outside a raw block. A function that is launched again with the very
        configuration of its last launch does not check it again either.
        """
    def launch(self, config: LaunchConfig, *arguments: object) -> None:
        """Enqueue one launch on the session's stream; nothing waits.

        Parameters
        ----------
        config : LaunchConfig
        *arguments
            One per parameter. With a signature: tensors (or refs) of the declared dtype, C-ordered and compact, of this
            Runtime or of another library, and Python or NumPy numbers that fit. Without: refs, ``kina.f32(2)``-style or
            NumPy scalars, and ``bytes`` of a parameter's exact size. Workspaces go where a parameter takes an address.

        Raises
        ------
        ArgumentError
            Wrong number, type, size or range of arguments.
        InvalidConfigError
            A limit of the device or the function is exceeded; the message has both numbers.
        InvalidLayoutError, NonContiguousError, DTypeError, ForeignRuntimeError, ForeignDeviceError
            A tensor cannot be passed as declared.
        DLPackError
            Another library's tensor does not hold its values (``requires_grad``, a conjugate or negative bit), is not
            what DLPack allows, or was refused by that library; the message names the field.
        UnsupportedError
            The wait for another library's stream would end a capture.
        SessionClosedError, WrongThreadError, RuntimePoisonedError
            There is no raw block of its Runtime to launch in.
        LaunchError
            The driver refused.

        Notes
        -----
        All checks come before anything is enqueued. Memory of this Runtime is protected by stream order; the module
        and foreign memory are leased until the device is past the launch.

        A tensor of another library is any object whose type has the C exchange table of DLPack, ``torch.Tensor`` say,
        in memory of the session's device or within its reach (pinned, managed). It is borrowed without a copy, and the
        object is kept until the device is past the launch, or as long as the graph that captures it. If the library
        works on another stream just now, the session's stream waits for that one, on the device, before the launch:
        once for each library. Nothing orders the library's stream after the launch:
        ``session.stream_ordered_with(stream)`` does.

        **Safety.** The kernel runs with the authority of this process. The arguments must be what it expects, in its
        order; without a signature only sizes are checked. It must stay within the memory of the tensors it is given,
        write only to those passed as ``mut``, read nothing it has not initialised, and must not alias what the
        signature says is apart. A ref passed without a signature may be written through only if it is a mut. Handles
        and addresses hidden in scalars or bytes are not protected by leases: what they point to must live until the
        work is complete. A borrowed tensor does not say that it is read-only; until the work is complete nobody may
        give its object other memory (``resize_``, ``set_``), and work of other streams that uses it must be ordered.

        References
        ----------
        DLPack 1.3, "C exchange API"; cuLaunchKernel, cuLaunchKernelEx.
        """
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
