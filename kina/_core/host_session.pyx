# cython: annotation_typing=False
"""The session of the host: the surface of a CUDA session, computed by NumPy, complete when a call returns."""

import sys
from _thread import _local

cimport cython
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.pycapsule cimport PyCapsule_CheckExact
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from kina._core.array_interface cimport adopt_array_interface
from kina._core.buffers cimport adopt_buffer
from kina._core.current_resource cimport HOST_MEMORY, check_memory, memory_of
from kina._core.dlpack cimport (
    adopt_host_side,
    adopt_managed,
    capsule_device,
    consume_capsule,
    declared_device,
    drop_managed,
    managed_device,
    request_capsule,
)
from kina._core.dtype cimport DType, as_dtype, pack_scalar
from kina._core.exchange_table cimport offer_table
from kina._core.foreign_types cimport foreign_type, request_managed, type_of
from kina._core.host_array cimport as_host_array
from kina._core.host_memory cimport host_device, host_domain, host_runtime
from kina._core.host_tensor cimport adopt_array, host_empty, numpy_view
from kina._core.host_operations cimport host_add, host_matmul, host_multiply
from kina._core.layout cimport layout_fill, layout_gather
from kina._core.resource cimport MemoryResource
from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.session cimport Session
from kina._core.shape cimport parse_shape
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA_HOST,
    KINA_MAX_NDIM,
    KINA_TENSOR_C_CONTIGUOUS,
    drain_python_releases,
    kina_dl_device,
    kina_dl_exchange_api,
    kina_dl_managed_tensor_versioned,
)
from kina._core.tensor cimport Tensor, is_host_readable
from kina._core.tokens cimport issue_number, thread_token

from kina._core.capability import Capability
from kina._core.counters import Counters
from kina._core.identity import AllocationDomainId, RuntimeIdentity
from kina.errors import (
    ArgumentError,
    DLPackError,
    ForeignDeviceError,
    ForeignRuntimeError,
    NonContiguousError,
    SessionClosedError,
    UnsupportedError,
    WrongThreadError,
)

__all__ = ["HostCompletion", "HostDeviceInfo", "HostSession"]


offer_table()


@cython.final
cdef class HostDeviceInfo:
    """HostDeviceInfo()

    The host as a device.

    Attributes
    ----------
    name : str
        The processor's name as the system tells it.
    type : str
        ``"cpu"``.
    """

    cdef readonly str name
    cdef readonly str type

    def __cinit__(self):
        check_construction(self)

    def __repr__(self) -> str:
        return f"<HostDeviceInfo {self.name!r}>"


@cython.final
cdef class HostCompletion:
    """HostCompletion()

    Witness that everything a host session was asked for before it is done: on the host, always.
    """

    def __cinit__(self):
        check_construction(self)

    def done(self) -> bool:
        """True: host operations are complete when they return."""
        return True

    def wait(self) -> None:
        """Return at once."""


cdef object guarded(type kind):
    begin_construction()
    try:
        return kind.__new__(kind)
    finally:
        end_construction()


# The open host sessions of each thread, innermost last: (session, its _entry before this entry).
cdef object of_thread = _local()
cdef HostDeviceInfo the_info = None
cdef uint64_t tensors_made = 0
cdef uint64_t nbytes_in = 0
cdef uint64_t nbytes_out = 0
cdef object the_identity = RuntimeIdentity._issue(host_runtime())
cdef object the_domain = AllocationDomainId._issue(host_domain())


cdef Tensor made(Tensor tensor):
    global tensors_made
    tensors_made += 1
    return tensor


cdef list open_sessions():
    try:
        return <list> of_thread.sessions
    except AttributeError:
        sessions = of_thread.sessions = []
        return sessions


def open_host_session(memory: MemoryResource | None = None) -> HostSession:
    """A new host session of the calling thread, not entered yet; its tensors' memory comes from `memory`."""
    cdef HostSession session = guarded(HostSession)
    session._memory = check_memory(memory, HOST_MEMORY, "session")
    return session


def innermost_host_session() -> HostSession | None:
    """The host session that the calling thread entered last and has not left."""
    return innermost_host()


cdef HostSession innermost_host():
    cdef list sessions = open_sessions()
    while sessions:
        session = <HostSession> (<tuple> sessions[len(sessions) - 1])[0]
        if not (<HostSession> session)._closed:
            return session
        sessions.pop()  # given up from another thread, which may not touch this list
    return None


cdef str processor_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


@cython.final
cdef class HostSession(Session):
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

    # Scope ------------------------------------------------------------------------------------------------

    def __enter__(self) -> HostSession:
        if self._thread == 0:
            self._thread = thread_token()
        self.check_thread()
        if self._closed:
            raise SessionClosedError("this session has ended; kina.session('cpu') opens another",
                                     operation="enter")
        open_sessions().append((self, self._entry))
        self._entry = issue_number()
        self._depth += 1
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if self._closed:
            return
        if self._thread != thread_token():
            self.give_up(kind is not None)
        elif self._depth > 0:
            self.leave_once()

    def close(self) -> None:
        """End the session, however often it was entered. Closing twice is harmless."""
        if self._closed:
            return
        if self._depth > 0 and self._thread != thread_token():
            self.give_up(False)
        while self._depth > 0:
            self.leave_once()
        self._closed = True

    cdef int give_up(self, bint unwinding) except -1:
        """Left in another thread, as by a generator collected there. Only its own thread touches its list."""
        self._closed = True
        if not unwinding:
            raise WrongThreadError("a session can only be left in the thread that entered it; it has been "
                                   "given up",
                                   operation="leave session")
        return 0

    cdef int leave_once(self) except -1:
        cdef list sessions = open_sessions()
        cdef Py_ssize_t place
        for place in range(len(sessions) - 1, -1, -1):  # not always the last: exits may come out of order
            session, entry = <tuple> sessions[place]
            if session is self:
                self._entry = entry
                del sessions[place]
                break
        self._depth -= 1
        if self._depth == 0:
            self._closed = True
        return 0

    cdef int check_thread(self) except -1:
        if self._thread != thread_token() and self._thread != 0:
            raise WrongThreadError("this session belongs to the thread that entered it; open one here with "
                                   "kina.session('cpu')")
        return 0

    cdef int check_usable(self) except -1:
        self.check_thread()
        if self._closed:
            raise SessionClosedError("this session has ended; kina.session('cpu') opens another")
        if self._depth == 0:
            raise SessionClosedError("this session has not been entered; use it as 'with kina.session(...) "
                                     "as s:'")
        return 0

    cdef Tensor own(self, object tensor, str operation):
        if type(tensor) is not Tensor:
            raise ArgumentError(f"{operation}: a kina.Tensor is needed, not {type(tensor).__name__}; "
                                "s.from_host copies and s.adopt shares an array", operation=operation)
        if (<Tensor> tensor).c.storage.runtime != host_runtime():
            raise ForeignRuntimeError(f"{operation}: the tensor on {tensor.device} belongs to another "
                                      f"Runtime; "
                                      "bring it here with its own session's to_host", operation=operation)
        return <Tensor> tensor

    # What it is -------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """The device it runs on: ``"cpu"``."""
        return "cpu"

    @property
    def closed(self) -> bool:
        """Has it been left for good?"""
        return self._closed

    @property
    def device_info(self) -> HostDeviceInfo:
        """Name and type of the host."""
        global the_info
        if the_info is None:
            info = <HostDeviceInfo> guarded(HostDeviceInfo)
            info.name = processor_name()
            info.type = "cpu"
            the_info = info
        return the_info

    @property
    def runtime_identity(self) -> RuntimeIdentity:
        """The host Runtime, the same for the whole process."""
        return the_identity

    @property
    def allocation_domain(self) -> AllocationDomainId:
        """The domain of host tensors, the same for the whole process."""
        return the_domain

    def supports(self, capability: Capability) -> bool:
        """Whether the session can do `capability`: on the host, none of them."""
        if not isinstance(capability, Capability):
            raise ArgumentError(f"supports: a kina.Capability is needed, not {type(capability).__name__}",
                                operation="supports")
        return False

    def synchronize(self) -> None:
        """Wait for all work of the session: on the host nothing is ever pending."""
        self.check_usable()

    def completion(self) -> HostCompletion:
        """A witness of the work asked for so far, with ``done()`` and ``wait()``."""
        self.check_usable()
        return guarded(HostCompletion)

    def counters(self) -> Counters:
        """What the host Runtime did so far, in all sessions: tensors made, bytes copied in and out."""
        self.check_usable()
        return Counters(allocations=tensors_made, bytes_to_device=nbytes_in, bytes_to_host=nbytes_out)

    def capture(self) -> NoReturn:
        """Work recorded into a graph: UnsupportedError, the host's is done at once."""
        self.check_usable()
        raise UnsupportedError("a graph is work of a CUDA stream, recorded; a host session does it at once",
                               operation="capture")

    def wait(self, other: object) -> NoReturn:
        """Order after another stream: UnsupportedError, the host has none."""
        self.check_usable()
        raise UnsupportedError("a host session has no stream that could wait for another: synchronize what is to be "
                               "waited for", operation="wait")

    def stream_ordered_with(self, other: object) -> NoReturn:
        """Hand over to another stream: UnsupportedError, the host has none."""
        self.check_usable()
        raise UnsupportedError("a host session has no stream that another could be ordered with: its work is done when "
                               "a call returns", operation="stream_ordered_with")

    def raw(self, operation: str = "raw") -> NoReturn:
        """Raw CUDA authority: UnsupportedError, the host has none."""
        self.check_usable()
        raise UnsupportedError("raw sessions are authority over a CUDA stream; a host session has none",
                               operation=operation if isinstance(operation, str) else "raw")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._depth else "not entered"
        return f"<kina.HostSession, {state}>"

    # Making tensors ---------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: object = "float32", *,
              memory: MemoryResource | None = None) -> Tensor:
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
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef DType kind
        self.check_usable()
        kind = as_dtype(dtype)
        ndim = parse_shape(shape, extents, b"empty")
        return made(host_empty(kind, ndim, extents, memory_of(memory, self._memory, HOST_MEMORY, "empty"), b"empty"))

    def zeros(self, shape: int | tuple[int, ...], dtype: object = "float32", *,
              memory: MemoryResource | None = None) -> Tensor:
        """A new tensor in C order, all bytes zero. As :meth:`empty` otherwise."""
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef DType kind
        cdef Tensor tensor
        self.check_usable()
        kind = as_dtype(dtype)
        ndim = parse_shape(shape, extents, b"zeros")
        tensor = host_empty(kind, ndim, extents, memory_of(memory, self._memory, HOST_MEMORY, "zeros"), b"zeros")
        if tensor.c.size_bytes > 0:
            with nogil:
                memset(tensor.c.data, 0, tensor.c.size_bytes)
        return made(tensor)

    def full(self, shape: int | tuple[int, ...], value: object, dtype: object = "float32", *,
             memory: MemoryResource | None = None) -> Tensor:
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
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef unsigned char element[16]
        cdef DType kind
        cdef Tensor tensor
        cdef int itemsize
        self.check_usable()
        kind = as_dtype(dtype)
        itemsize = pack_scalar(kind, value, element)
        ndim = parse_shape(shape, extents, b"full")
        tensor = host_empty(kind, ndim, extents, memory_of(memory, self._memory, HOST_MEMORY, "full"), b"full")
        with nogil:
            layout_fill(<char *> tensor.c.data, itemsize, tensor.c.size, element)
        return made(tensor)

    def from_host(self, array: object, dtype: object = None, *, memory: MemoryResource | None = None) -> Tensor:
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
        global nbytes_in
        import numpy

        cdef Tensor tensor
        cdef int64_t extents[KINA_MAX_NDIM]
        self.check_usable()
        array, kind = as_host_array(array, dtype, "K")
        ndim = parse_shape(array.shape, extents, b"from_host")
        tensor = host_empty(kind, ndim, extents, memory_of(memory, self._memory, HOST_MEMORY, "from_host"),
                            b"from_host")
        if tensor.c.size > 0:
            numpy.copyto(numpy_view(tensor, True), array)
        nbytes_in += tensor.c.size_bytes
        return made(tensor)

    def to_host(self, tensor: Tensor) -> numpy.ndarray:
        """The values as a fresh NumPy array in C order, which shares nothing with the tensor.

        Raises
        ------
        ForeignRuntimeError
            A tensor of a CUDA Runtime: its own session brings it.
        """
        global nbytes_out
        import numpy

        cdef Tensor source
        self.check_usable()
        source = self.own(tensor, "to_host")
        nbytes_out += source.c.size_bytes
        return numpy.array(numpy_view(source, False), order="C", copy=True)

    def copy(self, tensor: Tensor, *, memory: MemoryResource | None = None) -> Tensor:
        """A new tensor in C order with the values of another in C order; `memory` as in :meth:`empty`.

        Raises
        ------
        NonContiguousError
            The source is not compact in C order: nothing is materialised behind the caller's back.
        """
        cdef Tensor source, target
        self.check_usable()
        source = self.own(tensor, "copy")
        if not source.c.flags & KINA_TENSOR_C_CONTIGUOUS:
            raise NonContiguousError(f"copy: a compact tensor in C order is needed, got the shape "
                                     f"{source.shape} with "
                                     f"the strides {source.strides}", operation="copy")
        target = host_empty(source._dtype, source.c.ndim, source.c.shape,
                            memory_of(memory, self._memory, HOST_MEMORY, "copy"), b"copy")
        with nogil:
            layout_gather(&source.c, <char *> target.c.data)
        return made(target)

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
        cdef const kina_dl_exchange_api *api
        cdef kina_dl_device device
        self.check_usable()
        drain_python_releases()
        if type(source) is Tensor:
            if (<Tensor> source).c.storage.runtime == host_runtime():
                return source
            if not is_host_readable(<Tensor> source):
                raise ForeignDeviceError(f"adopt: the tensor is on {source.device}; only its own session's to_host "
                                         "brings it to the host", operation="adopt")
            device = host_device()
            if (<Tensor> source).c.device.device_type == KINA_DEVICE_CUDA_HOST:
                device = (<Tensor> source).c.device
            return adopt_host_side(<Tensor> source, device, NULL, host_runtime(), host_domain())
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(source, numpy.ndarray):
            return adopt_array(source)
        if PyCapsule_CheckExact(source):
            device = capsule_device(source)
            return consume_capsule(source, host_form(device), NULL, host_runtime(), host_domain())
        api = foreign_type(type_of(source)).api
        if api != NULL:
            return self.take_managed(request_managed(source, api), api, False)
        if hasattr(type(source), "__dlpack__"):
            device = declared_device(source, "adopt")
            if device.device_type != KINA_DEVICE_CPU and device.device_type != KINA_DEVICE_CUDA_HOST:
                raise DLPackError(f"device: the array is on device type {device.device_type}, number "
                                  f"{device.device_id}; a host session adopts host memory", operation="adopt")
            capsule = request_capsule(source, None, None, None)
            return consume_capsule(capsule, host_form(device), NULL, host_runtime(), host_domain())
        if not PyObject_CheckBuffer(source):
            tensor = adopt_array_interface(source)
            if tensor is not None:
                return tensor
        return adopt_buffer(source)

    cdef object take_managed(self, kina_dl_managed_tensor_versioned *managed, const kina_dl_exchange_api *api,
                             bint outside):
        cdef kina_dl_device device
        try:
            self.check_usable()  # the producer's code has run
            device = host_form(managed_device(managed))
        except BaseException:
            drop_managed(managed)
            raise
        return adopt_managed(managed, device, NULL, host_runtime(), host_domain())

    # Operations -------------------------------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
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
        return self.operate(host_add, a, b, out, "add")

    def multiply(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Elementwise ``a * b``; everything else as :meth:`add` (bool is a logical and)."""
        return self.operate(host_multiply, a, b, out, "multiply")

    def matmul(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
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
        return self.operate(host_matmul, a, b, out, "matmul")

    cdef Tensor operate(self, host_operation operation, object a, object b, object out, str name):
        self.check_usable()
        left = self.own(a, name)
        right = self.own(b, name)
        if out is not None:
            return operation(left, right, self.own(out, name), None)
        return made(operation(left, right, None, memory_of(None, self._memory, HOST_MEMORY, name)))


cdef kina_dl_device host_form(kina_dl_device device) noexcept:
    """What consume_capsule must insist on: pinned memory is host memory, everything else has to be plain."""
    if device.device_type != KINA_DEVICE_CUDA_HOST:
        return host_device()
    return device
