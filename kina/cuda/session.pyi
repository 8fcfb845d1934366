# Written by tools/stubs.py from session.pyx; not edited by hand.

"""Sessions: a thread's scoped authority over one Runtime, and the only way to run anything.

Source: the session protocol is kina's own (docs/concepts); the driver calls are named where they are made.
"""

from __future__ import annotations

from typing import final
from collections.abc import Sequence
from kina._core.capability import Capability
from kina._core.counters import Counters
from kina._core.identity import AllocationDomainId, RuntimeIdentity
from kina._core.resource import MemoryResource
from kina._core.session import Session
from kina._core.tensor import Tensor
from kina.cuda.completion import Completion
from kina.cuda.device import DeviceInfo
from kina.cuda.graph import Graph
from kina.cuda.hand_over import HandOver
from kina.cuda.raw import RawSession
from kina.cuda.runtime import Runtime
import numpy

__all__ = ['CudaSession']

@final
class CudaSession(Session):
    """CudaSession()

    A thread's scoped authority over one Runtime: made by :func:`kina.session`, entered by ``with``.

    Entering makes the device's primary context current and binds the Runtime's one stream; leaving puts the caller's
    context stack back as it was and never waits. Everything below enqueues on that stream and returns, unless its
    text says that it waits.

    Raises
    ------
    SessionClosedError
        Any use before it is entered or after it is left.
    WrongThreadError
        Any use from another thread.
    RuntimePoisonedError
        Any use after the device's context has failed.
    """
    def __enter__(self) -> CudaSession: ...
    def __exit__(self, kind: object, exception: object, traceback: object) -> None: ...
    def close(self) -> None:
        """Leave the session, as the end of its ``with`` block does. Idempotent."""
    @property
    def device(self) -> str:
        """The device it runs on: ``"cuda:0"``."""
    @property
    def runtime(self) -> Runtime:
        """The Runtime it is open on."""
    @property
    def runtime_identity(self) -> RuntimeIdentity:
        """RuntimeIdentity of its Runtime."""
    @property
    def allocation_domain(self) -> AllocationDomainId:
        """AllocationDomainId of what it allocates."""
    @property
    def closed(self) -> bool:
        """Has it been left?"""
    @property
    def device_info(self) -> DeviceInfo:
        """The DeviceInfo of its device."""
    def supports(self, capability: Capability) -> bool:
        """Can this build, on this device and now, do what a :class:`kina.Capability` names?

        ``True`` does not promise that one particular load, compilation or launch succeeds. Nothing is true of a device
        that an earlier failure has made unusable. RUNTIME_COMPILATION takes an NVRTC that is installed and knows the
        device, or one before it; KERNEL_DSL and PEER_COPY are not in this version.

        Raises
        ------
        ArgumentError
            It is not a Capability.
        """
    def counters(self) -> Counters:
        """What its Runtime has done so far; see :class:`kina._core.counters.Counters`."""
    def __repr__(self) -> str: ...
    def synchronize(self) -> None:
        """Wait on the host for everything enqueued on the session's stream, and release what it protected.

        Waits for the whole device instead while exported memory is quarantined: its users' streams are unknown.

        Raises
        ------
        SynchronizeError
            Earlier asynchronous work failed; the device is poisoned from then on.
        """
    def completion(self) -> Completion:
        """A witness of everything enqueued so far: one event is recorded; nothing waits."""
    def empty(self, shape: int | Sequence[int], dtype: object='float32', *, memory: MemoryResource | None=None) -> Tensor:
        """A tensor with undefined contents, C-ordered, on the session's device.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype, str or NumPy dtype
        memory : kina.memory.MemoryResource, optional
            A resource of the session's device to take the memory from. Default: that of the innermost
            ``kina.memory.using``, else of the session, of its Runtime, the default of the device, else the Runtime's
            own pool.

        Raises
        ------
        InvalidShapeError, DTypeError
        OutOfMemoryError
            With ``requested``, ``live``, ``cached`` and ``limit`` in bytes, as far as the resource knows them.
        ArgumentError
            `memory` is no MemoryResource.
        ForeignDeviceError
            `memory` hands out memory of another device.

        Notes
        -----
        When the last tensor over the memory goes, it is given back in the order of the session's stream. To a resource
        without stream order that means later: at an allocation from such a resource or a wait, once the stream is past
        what was enqueued.
        """
    def zeros(self, shape: int | Sequence[int], dtype: object='float32', *, memory: MemoryResource | None=None) -> Tensor:
        """A tensor of zeros; parameters and errors as for :meth:`empty`. The fill is enqueued, nothing waits."""
    def full(self, shape: int | Sequence[int], value: object, dtype: object='float32', *, memory: MemoryResource | None=None) -> Tensor:
        """A tensor whose elements all are ``value``, converted to ``dtype`` with a range check.

        As :meth:`empty` otherwise.

        Raises
        ------
        ArgumentError
            ``value`` does not fit the dtype.
        """
    def from_host(self, array: object, dtype: object | None=None, *, memory: MemoryResource | None=None) -> Tensor:
        """Copy host data to a new C-ordered tensor.

        Parameters
        ----------
        array : array_like
            Anything ``numpy.asarray`` takes, tensors in host memory too. It has been read to its end on return and may
            be changed.
        dtype : optional
            Convert on the host first; the array's own by default.
        memory : kina.memory.MemoryResource, optional
            As in :meth:`empty`.

        Notes
        -----
        Goes through a bounded ring of pinned blocks and returns while the last copies may still run; later work of the
        session is ordered after them. Waits for the session's own oldest transfer when the ring is full.
        """
    def to_host(self, tensor: Tensor) -> numpy.ndarray:
        """Copy a tensor to a new, C-ordered NumPy array. Waits for it, as its name says.

        A view that is not compact is downloaded as the byte span it touches and put in order on the host.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        SynchronizeError
            Earlier asynchronous work failed.
        """
    def copy(self, tensor: Tensor, *, memory: MemoryResource | None=None) -> Tensor:
        """A new C-ordered tensor with the same elements, copied on the device; nothing waits.

        `memory` as in :meth:`empty`.

        Raises
        ------
        NonContiguousError
            The tensor is not C-ordered and compact: nothing is materialised behind the caller's back.
        """
    def adopt(self, source: object) -> Tensor:
        """Take in an array that lives on this device, without a copy.

        The session's stream waits, on the device, for the producer's; the host never waits. The owner is released only
        after everything enqueued on the session with it is done.

        Parameters
        ----------
        source : object
            A kina tensor of another Runtime; an array whose type has a DLPack exchange table; any DLPack producer; a
            DLPack capsule, which says nothing of streams: the legacy stream is waited for; anything with
            ``__cuda_array_interface__``, whose ``stream`` is waited for. The first way that is open
            is taken. Memory of the device, managed memory, and pinned host memory, which the device reaches too.

        Raises
        ------
        DLPackError
            The producer refuses, has copied, or describes something impossible; the message names the field. Tensors
            that autograd watches, or whose memory holds conjugated or negated values.
        DTypeError
            Elements that kina does not store: smaller than a byte, opaque, vectors.
        ForeignDeviceError
            It lives elsewhere.
        UnsupportedError
            The session's stream, or the producer's, is being captured into a graph.

        Notes
        -----
        What is read-only stays so.
        """
    def wait(self, other: object) -> None:
        """Make the session's stream wait, on the device, for everything enqueued so far on another one.

        Parameters
        ----------
        other : stream, session, Completion or event
            What has ``__cuda_stream__`` (PyTorch's, CuPy's, cuda.core's streams); another open session of this thread
            and device; a :class:`Completion`; or a CUDA event of PyTorch, CuPy, cuda.core or cuda.bindings. An event
            stands for what was enqueued before it was recorded. Completions and events may be another device's.

        Raises
        ------
        UnsupportedError
            Either stream is being captured into a graph, or the event was recorded in a capture. Neither is harmed.
        ForeignDeviceError
            The stream or the session is another device's: wait for its event or its Completion.
        WrongThreadError, SessionClosedError
            The other session is not this thread's to ask, or not open.
        ArgumentError
            It is none of these (a bare handle is not: it says neither what it is nor how long it lives), or an event
            that is gone, or that its library has not made yet.

        Notes
        -----
        Nothing waits on the host. What is enqueued on `other` afterwards is not waited for. A graph cannot wait for
        what is outside of it, so in a capture the session has nothing to wait for: call it before. Of the per-thread
        default stream, it is the calling thread's.

        Source: cuEventRecord and cuStreamWaitEvent.
        """
    def stream_ordered_with(self, other: object) -> HandOver:
        """Hand what the session has made over to another stream, and take it back at the end of a ``with`` block.

        At the call `other` waits, on the device, for everything enqueued so far on the session's stream. At the end of
        a ``with`` block over what this returns, the session's stream waits for everything that `other` has got::

            with session.stream_ordered_with(torch.cuda.current_stream()):
                library_call(tensor)            # on PyTorch's stream
            session.copy(tensor)                # after it

        Parameters
        ----------
        other : object with ``__cuda_stream__``
            A stream of the session's device. It is held until the result goes.

        Raises
        ------
        UnsupportedError
            Either stream is being captured into a graph. Neither is harmed.
        ForeignDeviceError
            The stream is another device's.
        ArgumentError
            It is no stream.

        Notes
        -----
        Nothing waits on the host. Without a ``with`` block nothing is taken back: :meth:`wait` does that. Memory is not
        held for the other stream: tensors have to live until the session's stream has taken it back. Thread-bound, like
        the session, which has to be open at the end of the block.

        Source: cuEventRecord and cuStreamWaitEvent.
        """
    def capture(self) -> Graph:
        """Record what a ``with`` block enqueues instead of running it; the Graph that this gives then launches it.

        Launches, copies, fills and memory are recorded: ``empty``, ``zeros``, ``full``, ``copy``, workspaces and raw
        launches. What is allocated in the block is the graph's, from the resource that would serve otherwise, and
        lives as long as the graph or its tensor, whichever is longer; what is dropped in the block may be used again
        in it.

        Raises
        ------
        UnsupportedError
            The stream is being captured already, or is the legacy stream. In the block: what waits, reads the host or
            depends on other streams (``to_host``, ``from_host``, ``synchronize``, ``completion``, ``adopt``), before it
            is enqueued; the block may go on. At its end: something else on the stream could not be captured.

        Notes
        -----
        Source: cuStreamBeginCapture, in thread-local mode. Other threads and other sessions go on as ever. A block
        that is left by an exception drops what it recorded. Thread-bound, like the session.
        """
    def raw(self, operation: str='raw') -> RawSession:
        """Raw CUDA authority for one ``with`` block: refs, modules, the stream.

        Parameters
        ----------
        operation : str
            Names the block in errors.
        """
