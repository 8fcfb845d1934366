# Written by tools/stubs.py from resource.pyx; not edited by hand.

"""Memory resources as Python sees them: the face of a C resource, resources written in Python, and buffers."""

from __future__ import annotations

from typing import final
from kina._core.tensor import Tensor
import typing_extensions

__all__ = ['Buffer', 'HostMemoryResource', 'MemoryResource']

class MemoryResource:
    """MemoryResource(*, device=None, supports_streams=False, upstream=None)

    Where memory comes from. kina's own are its subclasses; a subclass in Python implements
    ``_allocate(nbytes, stream)``, which gives the address of at least `nbytes` bytes aligned to 256, and
    ``_deallocate(address, nbytes, stream)``. Both may be composed in any order: an adaptor is a resource over
    another one, its `upstream`.

    Parameters
    ----------
    device : str, optional
        Where its memory is: ``"cpu"`` or ``"cuda:N"``. Default: where that of `upstream` is, else ``"cpu"``.
    supports_streams : bool
        Whether allocation and release are ordered on a stream.
    upstream : MemoryResource, optional
        What the resource gets its own memory from, for :attr:`upstream`; it is kept alive.

    Notes
    -----
    Any thread may allocate and free, several at once. `nbytes` is never 0 in ``_allocate``. `stream` is None unless
    the resource supports streams and one orders the call: then it is an object with ``__cuda_stream__``, good for the
    ``stream=`` of another resource. What is allocated for None may be used at once, on any stream; of what is
    deallocated for None all uses are over. An exception of ``_allocate`` passes through to whoever asked, unchanged;
    one of ``_deallocate`` goes to ``sys.unraisablehook``. Memory that is dropped where Python cannot run is given to
    ``_deallocate`` where it can; after interpreter exit has begun it is left alone.

    A buffer keeps its resource and all below it alive. A resource in Python that keeps its own buffers is
    collected with them; one that keeps tensors over its own memory never is.
    """
    def __init__(self, *, device: str | None=None, supports_streams: bool=False, upstream: MemoryResource | None=None) -> None: ...
    @staticmethod
    def from_capsule(capsule: object) -> MemoryResource:
        """The resource of a C library, from a capsule named ``"kina_resource"``.

        Parameters
        ----------
        capsule : capsule
            Holds a ``kina_resource *`` as ``kina_memory.h`` defines it. The resource is retained; the capsule
            keeps the reference that it lends.

        Raises
        ------
        ArgumentError
            Not such a capsule, or what it holds is not complete.
        UnsupportedError
            The resource is of another version of the interface, or its memory is on a device that kina has not.
        """
    def allocate(self, nbytes: int, stream: object | None=None) -> Buffer:
        """Memory of at least `nbytes` bytes, aligned to 256, uninitialised.

        Parameters
        ----------
        nbytes : int
            0 gives a buffer without memory; the resource is not asked.
        stream
            In whose order the memory becomes usable, and is freed later: a Runtime, an open CUDA session (its Runtime),
            or an object with ``__cuda_stream__``, which the thread adopts. None: the thread's default Runtime of the
            device; for a resource without stream order the only choice, and its memory is usable at once.

        Raises
        ------
        ArgumentError
            `nbytes` is no int, `stream` is no stream, or was given to a resource that has no stream order.
        ForeignDeviceError
            The stream is another device's.
        InvalidShapeError
            `nbytes` is negative, or more than ``2**63 - 1``.
        OutOfMemoryError
            The resource cannot serve it; the figures that it knows are attributes.

        Notes
        -----
        The GIL is released. May be called from any thread. With a stream nothing waits: what is enqueued there
        afterwards may use the memory, other streams have to be ordered behind it.
        """
    def unsafe_allocate(self, nbytes: int, stream: object | None=None) -> int:
        """The address of at least `nbytes` bytes, aligned to 256; 0 for 0 bytes. Raises as :meth:`allocate`.

        Parameters
        ----------
        nbytes : int
        stream
            As in :meth:`allocate`, but None stands for no stream: the memory may be used at once on any. A resource
            with stream order may have to wait for that.

        Notes
        -----
        **Safety.** Nothing owns the memory: it must go back by :meth:`unsafe_deallocate` of this resource, once,
        with the same size, and the resource must live until then. Meant for resources in Python over others and
        for allocators of other libraries.
        """
    def unsafe_deallocate(self, address: int, nbytes: int, stream: object | None=None) -> None:
        """Give back what :meth:`unsafe_allocate` gave.

        Parameters
        ----------
        address, nbytes : int
            As they were given.
        stream
            In whose order, as in :meth:`allocate`: the uses of the memory are over when what is enqueued there is.
            None: they are over now.

        Notes
        -----
        **Safety.** `address` and `nbytes` are believed: anything else than one release of each allocation
        corrupts memory, unless a :class:`TrackingMemoryResource` looks.
        """
    @property
    def name(self) -> str:
        """What it is called in messages: the name of its class, or the one that a C library gave."""
    @property
    def device(self) -> str:
        """Where its memory is: ``"cpu"`` or ``"cuda:N"``. Pinned memory is the host's."""
    @property
    def supports_streams(self) -> bool:
        """Whether allocation and release are ordered on a stream."""
    @property
    def upstream(self) -> MemoryResource | None:
        """The resource below, where an adaptor gets its memory."""
    def __repr__(self) -> str: ...
    def __reduce_ex__(self, protocol: int) -> object: ...

@final
class HostMemoryResource(MemoryResource):
    """HostMemoryResource()

    Ordinary host memory, aligned to 256 bytes. All objects of this class are one resource.
    """
    def __init__(self) -> None: ...

@final
class Buffer(typing_extensions.Buffer):
    """Buffer()

    Memory that one resource gave, and the duty to give it back: :meth:`free` does, and so does dropping the last
    reference. Made by :meth:`MemoryResource.allocate`; cannot be constructed, copied or pickled.

    Host memory offers the buffer protocol and DLPack (as bytes). Tensors and views over the memory keep it: it
    goes back when all of them and the buffer are gone.

    Notes
    -----
    May be used and dropped on any thread. Memory of a resource with stream order goes back in the order of the stream
    it was allocated for. That of a CUDA resource without is given back at once: work that uses it has to be over.
    """
    def __new__(cls): ...
    def __del__(self): ...
    def free(self, stream: object | None=None) -> None:
        """Give the memory back now, or with the last tensor or view over it.

        Parameters
        ----------
        stream
            In whose order, as in :meth:`MemoryResource.allocate`: the uses of the memory are over when what is enqueued
            there now is. None: in that of the stream it was allocated for.

        Raises
        ------
        SessionClosedError
            It was freed before: by which thread and when, the message says.
        ArgumentError, ForeignDeviceError
            As for :meth:`MemoryResource.allocate`; nothing was freed.
        """
    @property
    def nbytes(self) -> int:
        """What was asked for."""
    @property
    def device(self) -> str:
        """Where the memory is: ``"cpu"`` or ``"cuda:N"``."""
    @property
    def resource(self) -> MemoryResource:
        """The resource that it came from."""
    @property
    def freed(self) -> bool:
        """Whether :meth:`free` was called."""
    def tensor(self, shape: int | tuple[int, ...], dtype: object='float32') -> Tensor:
        """A tensor in C order over the memory, from its beginning; nothing is copied or initialised.

        Parameters
        ----------
        shape
            Extents, or one int.
        dtype
            Any spelling of a dtype.

        Raises
        ------
        InvalidShapeError
            The elements need more bytes than the buffer has.
        SessionClosedError
            The buffer was freed.
        UnsupportedError
            The memory is a CUDA device's: a session makes tensors of its resource (``memory=``).
        """
    def unsafe_address(self) -> int:
        """The address of the memory; 0 for 0 bytes.

        Notes
        -----
        **Safety.** It is valid until the buffer and everything made of it are gone, and must not be freed by
        anybody else. Host code must not touch memory of a CUDA device, and device work that uses it has to be over
        before it goes.
        """
    def __dlpack__(self, *, stream: object | None=None, max_version: tuple[int, int] | None=None, dl_device: tuple[int, int] | None=None, copy: bool | None=None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __reduce_ex__(self, protocol: int) -> object: ...
