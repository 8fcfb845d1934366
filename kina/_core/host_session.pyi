# Written by tools/stubs.py from host_session.pyx; not edited by hand.

"""The session of the host: the surface of a CUDA session, computed by NumPy, complete when a call returns."""

from __future__ import annotations

from typing import Any, Final, final
from kina._core.capability import Capability
from kina._core.counters import Counters
from kina._core.identity import AllocationDomainId, RuntimeIdentity
from kina._core.resource import MemoryResource
from kina._core.session import Session
from kina._core.tensor import Tensor
import numpy

__all__ = ['HostCompletion', 'HostDeviceInfo', 'HostSession']

@final
class HostDeviceInfo:
    """HostDeviceInfo()

    The host as a device.

    Attributes
    ----------
    name : str
        The processor's name as the system tells it.
    type : str
        ``"cpu"``.
    """
    name: Final[str]
    type: Final[str]

    def __new__(cls): ...
    def __repr__(self) -> str: ...

@final
class HostCompletion:
    """HostCompletion()

    Witness that everything a host session was asked for before it is done: on the host, always.
    """
    def __new__(cls): ...
    def done(self) -> bool:
        """True: host operations are complete when they return."""
    def wait(self) -> None:
        """Return at once."""

@final
class HostSession(Session):
    """HostSession()

    A session of the host: the surface of a CUDA session, computed by NumPy, complete when a call returns.
    Opened by ``kina.session("cpu")`` and used in a ``with`` block, which may nest.

    Notes
    -----
    Bound to the thread that entered it: elsewhere every call is a WrongThreadError. After the outermost
    exit or :meth:`close`, a SessionClosedError. The host is one Runtime with one allocation domain for the
    process, so host tensors may be used in every host session, of any thread, whichever resource their memory
    comes from.
    """
    def __enter__(self) -> HostSession: ...
    def __exit__(self, kind: object, value: object, trace: object) -> None: ...
    def close(self) -> None:
        """End the session, however often it was entered. Closing twice is harmless."""
    @property
    def device(self) -> str:
        """The device it runs on: ``"cpu"``."""
    @property
    def closed(self) -> bool:
        """Has it been left for good?"""
    @property
    def device_info(self) -> HostDeviceInfo:
        """Name and type of the host."""
    @property
    def runtime_identity(self) -> RuntimeIdentity:
        """The host Runtime, the same for the whole process."""
    @property
    def allocation_domain(self) -> AllocationDomainId:
        """The domain of host tensors, the same for the whole process."""
    def supports(self, capability: Capability) -> bool:
        """Whether the session can do `capability`: on the host, none of them."""
    def synchronize(self) -> None:
        """Wait for all work of the session: on the host nothing is ever pending."""
    def completion(self) -> HostCompletion:
        """A witness of the work asked for so far, with ``done()`` and ``wait()``."""
    def counters(self) -> Counters:
        """What the host Runtime did so far, in all sessions: tensors made, bytes copied in and out."""
    def capture(self) -> Any:
        """Work recorded into a graph: UnsupportedError, the host's is done at once."""
    def wait(self, other: object) -> Any:
        """Order after another stream: UnsupportedError, the host has none."""
    def stream_ordered_with(self, other: object) -> Any:
        """Hand over to another stream: UnsupportedError, the host has none."""
    def raw(self, operation: str='raw') -> Any:
        """Raw CUDA authority: UnsupportedError, the host has none."""
    def __repr__(self) -> str: ...
    def empty(self, shape: int | tuple[int, ...], dtype: object='float32', *, memory: MemoryResource | None=None) -> Tensor:
        """A new tensor in C order whose elements are whatever the memory held.

        Parameters
        ----------
        shape
            Extents, or one int.
        dtype
            Any spelling of a dtype.
        memory
            A resource of ``kina.memory`` to take the memory from. Default: that of the innermost
            ``kina.memory.using``, else of the session, else the default of the host.

        Raises
        ------
        InvalidShapeError, DTypeError, OutOfMemoryError
        ArgumentError
            `memory` is no MemoryResource.
        ForeignDeviceError
            `memory` hands out memory of another device.
        """
    def zeros(self, shape: int | tuple[int, ...], dtype: object='float32', *, memory: MemoryResource | None=None) -> Tensor:
        """A new tensor in C order, all bytes zero. As :meth:`empty` otherwise."""
    def full(self, shape: int | tuple[int, ...], value: object, dtype: object='float32', *, memory: MemoryResource | None=None) -> Tensor:
        """A new tensor in C order, every element `value`.

        Parameters
        ----------
        shape
            Extents, or one int.
        value
            A number that the dtype can hold: integers are range-checked, floats rounded once.
        dtype
            Any spelling of a dtype.
        memory
            As in :meth:`empty`.

        Raises
        ------
        ArgumentError
            `value` is out of range or of the wrong kind.
        InvalidShapeError, DTypeError, OutOfMemoryError
        """
    def from_host(self, array: object, dtype: object | None=None, *, memory: MemoryResource | None=None) -> Tensor:
        """A new tensor in C order with the values of `array`, copied.

        Parameters
        ----------
        array
            Whatever ``numpy.asarray`` takes.
        dtype
            The dtype of the tensor; default: that of the array.
        memory
            As in :meth:`empty`.

        Raises
        ------
        ArgumentError
            NumPy cannot read it; its own error is the cause.
        DTypeError, OutOfMemoryError

        Notes
        -----
        The source may be changed or dropped when the call returns. `dtype` converts as ``asarray`` does.
        """
    def to_host(self, tensor: Tensor) -> numpy.ndarray:
        """The values as a fresh NumPy array in C order, which shares nothing with the tensor.

        Raises
        ------
        ForeignRuntimeError
            A tensor of a CUDA Runtime: its own session brings it.
        """
    def copy(self, tensor: Tensor, *, memory: MemoryResource | None=None) -> Tensor:
        """A new tensor in C order with the values of another in C order; `memory` as in :meth:`empty`.

        Raises
        ------
        NonContiguousError
            The source is not compact in C order: nothing is materialised behind the caller's back.
        """
    def adopt(self, source: object) -> Tensor:
        """A tensor over the memory of somebody else's array: nothing is copied.

        Parameters
        ----------
        source
            A NumPy array; anything with ``__dlpack__`` on the host; a DLPack capsule; anything with the
            buffer protocol, or with ``__array_interface__``. A host tensor of kina is given back as it is; pinned and
            managed memory of its CUDA sessions is taken once the device is past it.

        Raises
        ------
        DLPackError
            The producer refuses, or its description is not to be believed; the message names the field. Memory that a
            device may still use: call ``synchronize()`` of its session.
        DTypeError
            Elements that kina does not store: sub-byte, vector, byte-swapped, structured.
        ForeignDeviceError
            A tensor of kina in the memory of a CUDA device.

        Notes
        -----
        What was read-only stays so. The owner is kept until the last tensor over its memory is gone, then
        released on the thread where that happens (an owner in Python: where the GIL is held next).
        """
    def add(self, a: Tensor, b: Tensor, *, out: Tensor | None=None) -> Tensor:
        """Elementwise ``a + b``; shapes broadcast, dtypes must be the same.

        Parameters
        ----------
        a, b
            Host tensors.
        out
            Where the result goes; may be `a` or `b` itself, but may not overlap them otherwise.

        Raises
        ------
        DTypeError
            The dtypes differ, or can only be stored (complex, fp8).
        InvalidShapeError
            The shapes do not broadcast, or `out` does not have the shape of the result.
        InvalidLayoutError
            `out` is read-only, repeats elements, or overlaps an operand.

        Notes
        -----
        Integers wrap, bool is a logical or, floats follow IEEE 754; no warnings.
        """
    def multiply(self, a: Tensor, b: Tensor, *, out: Tensor | None=None) -> Tensor:
        """Elementwise ``a * b``; everything else as :meth:`add` (bool is a logical and)."""
    def matmul(self, a: Tensor, b: Tensor, *, out: Tensor | None=None) -> Tensor:
        """Matrix product ``a @ b`` by NumPy's rules for vectors and for stacks of matrices.

        Parameters
        ----------
        a
            Shape ``(..., M, K)`` or ``(K,)``.
        b
            Shape ``(..., K, N)`` or ``(K,)``.
        out
            Where the result goes, ``(..., M, N)``; may not overlap an operand.

        Raises
        ------
        DTypeError, InvalidShapeError, InvalidLayoutError
            As :meth:`add`.

        Notes
        -----
        float16 and bfloat16 are summed in float32 and rounded once. ``K == 0`` gives zeros. Integers wrap.
        """
