# Written by tools/stubs.py from raw.pyx; not edited by hand.

"""Raw sessions: inside a session, scoped authority to touch modules, addresses and the stream."""

from __future__ import annotations

from typing import Any, Final
from collections.abc import Sequence
from kina._core.resource import MemoryResource
from kina._core.tensor import Tensor
from kina.cuda.function import Module
from kina.cuda.refs import DeviceBytes, StreamRef, TensorMut, TensorRef
import os

__all__ = ['RawSession']

class RawSession:
    """RawSession()

    Raw CUDA authority over a session's one stream, for one ``with`` block: from ``session.raw("what for")``.

    Everything it hands out is dead after the block: refs, the stream. Modules and functions live on and can be used in
    later raw blocks of the same Runtime. Bound to its session's thread.
    """
    operation: Final[str]

    def __new__(cls): ...
    def __enter__(self) -> RawSession: ...
    def __exit__(self, *exception: object) -> None: ...
    @property
    def stream(self) -> StreamRef:
        """The session's stream, for libraries that take ``__cuda_stream__``. Dead after the block."""
    def ref(self, tensor: Tensor) -> TensorRef:
        """Borrow a tensor of this Runtime for reading by raw kernels; its strides may be any.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        InvalidLayoutError
            Its elements do not lie at multiples of their size, or an overlapping mut lives in the block.
        """
    def mut(self, tensor: Tensor) -> TensorMut:
        """Borrow a tensor of this Runtime for writing by raw kernels: nothing that overlaps it may be borrowed too.

        Overlap is judged by byte spans, so interleaved strides count as overlapping.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        InvalidLayoutError
            It is read-only, overlaps itself (a zero stride), its elements do not lie at multiples of their size, or an
            overlapping ref or mut lives in the block.
        """
    def module(self, image: str | bytes | bytearray | memoryview | os.PathLike, *, options: Sequence[str]=(), name_expressions: Sequence[str]=()) -> Module:
        """Load PTX, a CUBIN or a fatbin, or compile CUDA C++ and load that; or find it in the Runtime's cache.

        Parameters
        ----------
        image : str, bytes, bytearray, memoryview or os.PathLike
            Text whose first directive is ``.version`` is PTX; other text is CUDA C++ (a trailing NUL is optional, one
            inside is refused); bytes of an ELF are a CUBIN. A str is never a path.
        options : sequence of str
            For CUDA C++: NVRTC's options, one word each. Without ``--gpu-architecture`` a CUBIN for the very device is
            made; ``--gpu-architecture=compute_90``, say, asks for PTX. Headers of the compiler's own version are found
            by themselves, and those beside a source that is a file; ``-I`` names other folders (``-I.`` the working
            one).
        name_expressions : sequence of str
            For CUDA C++: what is to be instantiated, ``"scale<float>"``, say. ``function`` takes the same words.

        Raises
        ------
        CompileError
            The source was refused: ``log`` has the compiler's words.
        ModuleLoadError
            The image is cut off, or the driver refused it: ``log`` has the loader's words; for a ``.version`` that is
            too new, or a CUBIN of another architecture, the message has both. Nothing is cached.
        UnavailableError
            CUDA C++ was passed and NVRTC is not installed.
        ArgumentError
            Options or name expressions were passed with an image, or are no sequences of str.

        Notes
        -----
        The Runtime keeps 64 modules, or as many as its ``modules`` says, and 64 MiB of images; the least recently used
        go first. What was compiled is also kept for other Runtimes, and on disk for other processes
        (``KINA_CACHE_DIR``, empty: off; see ``python -m kina cache``), unless it takes in headers that cannot be looked
        through.

        The first load of an image may take tens of milliseconds, and the driver waits for the work of the device's
        context meanwhile; what is found in the cache waits for nothing. The GIL is released while it compiles and
        loads.

        Thread-bound, like the block.
        """
    def workspace(self, nbytes: int, *, memory: MemoryResource | None=None) -> DeviceBytes:
        """Scratch memory for this block, aligned to 256 bytes, with undefined contents.

        Parameters
        ----------
        nbytes : int
            0 allowed: its address is NULL.
        memory : kina.memory.MemoryResource, optional
            As in ``session.empty``.

        Raises
        ------
        InvalidShapeError
            `nbytes` is negative or too large.
        OutOfMemoryError, ArgumentError, ForeignDeviceError
            As ``session.empty``.

        Notes
        -----
        It goes back to its resource in the order of the session's stream, when it is released or dropped or the block
        ends: work enqueued before may still use it.
        """
    def resource(self, type_: type, init: Any, *, nbytes: int=0, pinned: bool=False) -> object:
        """The Runtime's one object of a class, made by `init` when it is first asked for: a library's handle, a plan.

        Parameters
        ----------
        type_ : type
            Whose instance it is: the key.
        init : callable
            Makes it, without arguments, inside the block.
        nbytes : int
            The device memory that it takes up, as far as its maker knows.
        pinned : bool
            It stays until the Runtime ends or :meth:`clear_resources`, as handles that are dear to make should.

        Raises
        ------
        OutOfMemoryError
            It would not fit beside what is pinned: `init` is not called.
        ArgumentError
            `type_` is no class, `init` gave something else or asks for its own class, `nbytes` is negative.

        Notes
        -----
        A Runtime keeps 32 objects and 1 GiB of declared bytes; the least recently used that is not pinned goes first.
        What goes, also when the Runtime is dropped, is kept until the device is past everything that was enqueued on
        the Runtime's stream until then. An object must not itself keep the Runtime: such a cycle lasts until the
        Runtime is closed. What `init` raises passes through, and nothing is kept. Thread-bound, like the
        block.
        """
    def clear_resources(self) -> int:
        """Let go of all objects of :meth:`resource`, pinned ones too; how many there were."""
    def unsafe_stream_handle(self) -> int:
        """The native CUstream of the session.

        Notes
        -----
        **Safety.** It must not be kept or used after the block, nor destroyed. Work that others enqueue on it is not
        covered by leases: what it uses must live until it is complete. The thread's current context is the session's
        device's only inside the session.
        """
    def unsafe_address(self, borrowed: TensorRef | DeviceBytes) -> int:
        """The device address of element (0, ..., 0) of a live ref, or of a workspace, of this Runtime.

        Notes
        -----
        **Safety.** Valid until the ref is released or the block ends; the tensor must live until all work that uses the
        address is complete. Read only within the tensor's span and as its dtype and strides say; write only if the ref
        is a mut, and only on this block's stream, or ordered after it. A workspace may be read and written on this
        block's stream until it is released or the block ends.
        """
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
