# Written by tools/stubs.py from tensor.pyx; not edited by hand.

"""Tensor: a storage and a frozen layout. Views share the storage; nothing here touches elements."""

from __future__ import annotations

from typing import final
from kina._core.dtype import DType
from kina._core.identity import AllocationDomainId, RuntimeIdentity
from typing_extensions import Buffer
import numpy

__all__ = ['Tensor']

@final
class Tensor(Buffer):
    """Tensor()

    An array on the host or on a CUDA device: a counted storage and a layout frozen at creation. Sessions
    make tensors (``s.zeros``, ``s.from_host``, ``s.adopt``); calling the class is a TypeError.

    Indexing with ints, slices, ``...`` and ``None``, :meth:`reshape`, :meth:`permute`,
    :meth:`broadcast_to` and :meth:`as_readonly` give views: they share the storage, keep it alive and
    move no element. Nothing crosses to the host on its own: ``numpy.asarray(t)`` of a tensor on a device
    raises, and ``bool(t)``, ``float(t)`` and iteration do so everywhere.

    Others get the memory itself, without a copy: by DLPack (``from_dlpack`` of NumPy, PyTorch, CuPy and JAX); by
    ``__cuda_array_interface__`` where it is on a device; by ``numpy.asarray(t)``, ``memoryview(t)`` and
    ``__array_interface__`` where it is on the host. What is read-only, or repeats elements, leaves read-only.

    Notes
    -----
    ``==`` and ``hash`` go by identity, as for any object without values on the host.
    All faces are immutable and cheap, and may be read from any thread; the last reference may be dropped
    on any thread. ``t.strides`` counts elements, not bytes.
    """
    __array_ufunc__ = None

    def __new__(cls, *args, **kwargs): ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
    @property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbours along each axis, in elements; may be negative or zero in views."""
    @property
    def dtype(self) -> DType:
        """The element type."""
    @property
    def device(self) -> str:
        """Where the elements are: ``"cpu"``, or ``"cuda:"`` and the device ordinal."""
    @property
    def ndim(self) -> int:
        """Number of axes."""
    @property
    def size(self) -> int:
        """Number of elements."""
    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
    @property
    def nbytes(self) -> int:
        """Bytes of all elements, ``size * itemsize``; a strided view spans more, a broadcast one less."""
    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps. True for empty tensors."""
    @property
    def readonly(self) -> bool:
        """Whether writing is refused by name. Views that repeat elements are not written to either."""
    @property
    def allocation_domain(self) -> AllocationDomainId:
        """Who owns and retires the storage."""
    @property
    def runtime_identity(self) -> RuntimeIdentity:
        """The Runtime that the tensor belongs to."""
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __getitem__(self, key: object, /) -> Tensor: ...
    def reshape(self, *shape: object) -> Tensor:
        """The same elements in C order under another shape, as a view.

        Parameters
        ----------
        *shape
            Extents, as one sequence or as separate ints; one of them may be -1 and is worked out.

        Raises
        ------
        InvalidShapeError
            The sizes differ.
        NonContiguousError
            Only a copy could have this shape (NumPy's rule for views); none is made.
        """
    def permute(self, *axes: int) -> Tensor:
        """The axes in another order, as a view.

        Parameters
        ----------
        *axes
            Every axis once, as one sequence or as separate ints; negative ones count from the end.

        Raises
        ------
        InvalidShapeError
            An axis is missing, named twice or does not exist.
        """
    def broadcast_to(self, *shape: object) -> Tensor:
        """The elements repeated to a larger shape, as a view with stride 0 along the repeated axes.

        Parameters
        ----------
        *shape
            Extents, as one sequence or as separate ints.

        Raises
        ------
        InvalidShapeError
            An axis that is neither 1 nor equal would have to be stretched.

        Notes
        -----
        A view that repeats elements cannot be written to, and leaves through DLPack read-only.
        """
    def as_readonly(self) -> Tensor:
        """A view of the same layout through which nothing can be written."""
    def __dlpack__(self, *, stream: int | None=None, max_version: tuple[int, int] | None=None, dl_device: tuple[int, int] | None=None, copy: bool | None=None) -> object:
        """A DLPack capsule that shares the storage (versioned if `max_version` allows, else legacy).

        Parameters
        ----------
        stream
            Host: None. CUDA: the consumer's stream, ordered after this tensor's pending work by an event:
            None or 1 legacy default, 2 per-thread default, a handle; -1: the consumer orders for itself. Managed
            memory without a stream is the host's to read.
        max_version
            The newest DLPack version that the consumer understands.
        dl_device
            Where the consumer wants it; only where it is already. Managed memory may be named as its device's (for
            PyTorch, which does not know it) or the host's, pinned memory as the host's.
        copy
            True: a compact copy (host only). Otherwise the storage is shared.

        Raises
        ------
        DLPackError
            A request that cannot be honoured, named; a legacy capsule of a read-only tensor. Pinned and managed memory
            for the host while a device may not be past it: call ``synchronize()`` of the session first.

        Notes
        -----
        The storage lives until the consumer drops it. No host wait.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def to_dlpack(self, *, stream: int | None=None, versioned: bool=True) -> object:
        """A DLPack capsule that shares the storage: versioned, or legacy where told.

        Same rules as ``__dlpack__``. A capsule that nobody consumes frees itself.
        """
    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The CUDA Array Interface, version 3, of memory on a device.

        ``stream`` is the home stream: whatever the tensor's session enqueued so far is done when that is past it, and
        the consumer waits for it. Who reads this may use the memory on any stream, so that it goes back only when the
        whole device has been waited for (``s.synchronize()``). The consumer keeps the tensor.

        Raises
        ------
        AttributeError
            The tensor is in host memory, or of a dtype that the protocol cannot say (bfloat16, fp8): DLPack can.
        UnsupportedError
            The home stream is being captured into a graph, which whoever waits for it would end.

        Notes
        -----
        Source: Numba, "CUDA Array Interface (Version 3)". No host wait. Any thread.
        """
    @property
    def __array_interface__(self) -> dict[str, object]:
        """NumPy's array interface, version 3, of host memory. The consumer keeps the tensor.

        Raises
        ------
        AttributeError
            The tensor is on a device, or of a dtype that the protocol cannot say (bfloat16, fp8).
        DLPackError
            Pinned or managed memory that the device may not be past; ``s.synchronize()`` waits for it.
        """
    def __array__(self, dtype: object | None=None, copy: bool | None=None) -> numpy.ndarray:
        """The memory of a host tensor as a NumPy array; ml_dtypes has the dtypes that NumPy lacks.

        Parameters
        ----------
        dtype
            What NumPy calls a dtype. Another than the tensor's is a converted copy.
        copy
            True: a copy. False: never one. None: only where `dtype` needs it.

        Raises
        ------
        TypeError
            The tensor is on a device: nothing crosses to the host on its own.
        ValueError
            `copy` is False, and only a copy could have that dtype.
        DLPackError
            Pinned or managed memory that the device may not be past; ``s.synchronize()`` waits for it.

        Notes
        -----
        The array keeps the storage. It cannot be written to where the tensor is read-only or repeats elements.
        """
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __float__(self) -> float: ...
    def __complex__(self) -> complex: ...
    def __iter__(self) -> object: ...
    def __reduce_ex__(self, protocol: int) -> object: ...
