# cython: annotation_typing=False
"""Memory resources as Python sees them: the face of a C resource, resources written in Python, and buffers."""

import threading
import time

cimport cython
from cpython.buffer cimport PyObject_GetBuffer
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetName, PyCapsule_GetPointer
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport strcmp

from kina._core.dtype cimport DType, as_dtype
from kina._core.host_memory cimport host_domain, host_resource, host_runtime, storage_bytes
from kina._core.layout cimport layout_nbytes, layout_size
from kina._core.python_resource cimport python_resource_new
from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.shape cimport parse_shape
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_MAX_NDIM,
    KINA_RESOURCE_CAPSULE,
    KINA_RESOURCE_PYTHON,
    KINA_RESOURCE_VERSION,
    allocation_failed,
    drain_python_releases,
    kina_dl_device,
    kina_handle_init,
    kina_release,
    kina_retain,
    storage_allocate,
    storage_keep,
)
from kina._core.tensor cimport Tensor, tensor_from_storage

from kina.errors import (
    ArgumentError,
    InvalidConfigError,
    InvalidShapeError,
    SessionClosedError,
    UnsupportedError,
)

__all__ = ["Buffer", "HostMemoryResource", "MemoryResource"]


cdef extern from "Python.h":
    Py_ssize_t PyLong_AsSsize_t(object number) except? -1


# What Python hands over -----------------------------------------------------------------------------------


cdef size_t parse_nbytes(object nbytes, str operation) except? <size_t> -1:
    cdef Py_ssize_t count
    if type(nbytes) is not int:
        if isinstance(nbytes, bool) or not PyIndex_Check(nbytes):
            raise ArgumentError(f"{operation}: bytes are an int, got {type(nbytes).__name__}", operation=operation)
        nbytes = PyNumber_Index(nbytes)
    try:
        count = PyLong_AsSsize_t(nbytes)
    except OverflowError:
        count = -1
    if count < 0:
        raise InvalidShapeError(f"{operation}: {nbytes} bytes are not in 0 to 2**63 - 1", operation=operation)
    return <size_t> count


cdef stream_finder find_stream = NULL
cdef object cuda_loader = None


cdef void set_stream_finder(stream_finder finder) noexcept:
    global find_stream
    find_stream = finder


def set_cuda_loader(loader: object) -> None:
    """`loader()` loads the rooms of CUDA, which lie above this one; they register what finds streams."""
    global cuda_loader
    cuda_loader = loader


cdef object ordering_stream(const kina_resource *resource, object stream, bint always, str operation,
                            kina_stream **out):
    """The stream in whose order a resource shall act, and what keeps it alive meanwhile. NULL for a resource without
    stream order; for None too, unless `always`: then the thread's default Runtime has the stream."""
    out[0] = NULL
    if not resource.vtable.supports_streams or on_host(resource.device_type):
        if stream is None:
            return None
        name = resource.vtable.name.decode("utf-8", "replace")
        raise ArgumentError(f"{operation}: the memory of {name} is not ordered by streams; leave stream= out",
                            operation=operation)
    if stream is None and not always:
        return None
    if find_stream == NULL:
        cuda_loader()  # UnavailableError on a build without CUDA
    return find_stream(resource.device_id, stream, operation, out)


cdef MemoryResource checked_upstream(object upstream):
    if not isinstance(upstream, MemoryResource):
        raise ArgumentError(f"upstream: a MemoryResource is needed, not {type(upstream).__name__}",
                            operation="MemoryResource")
    (<MemoryResource> upstream).ready()
    return <MemoryResource> upstream


cdef kina_dl_device parse_device(object device) except *:
    cdef kina_dl_device parsed
    parsed.device_type = KINA_DEVICE_CPU
    parsed.device_id = 0
    if device == "cpu":
        return parsed
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind != "cuda" or not (number.isascii() and number.isdigit() and len(number) < 10):
        raise InvalidConfigError(f"{device!r} names no device: 'cpu' or 'cuda:N' does", operation="MemoryResource")
    parsed.device_type = KINA_DEVICE_CUDA
    parsed.device_id = int(number)
    return parsed


cdef bint on_host(int device_type) noexcept nogil:
    return device_type == KINA_DEVICE_CPU or device_type == KINA_DEVICE_CUDA_HOST


cdef bint needs_no_gil(const kina_resource *resource) noexcept nogil:
    """Whether its release may wait for a device, whose work may want the GIL, and does not ask Python anything."""
    return not on_host(resource.device_type) and not resource.flags & KINA_RESOURCE_PYTHON


cdef str device_of_resource(const kina_resource *resource):
    return "cpu" if on_host(resource.device_type) else f"cuda:{resource.device_id}"


# Adaptors -------------------------------------------------------------------------------------------------


cdef void adaptor_init(kina_adaptor *adaptor, const kina_resource_vtable *functions, kina_resource *below,
                       void (*destroy)(kina_handle *) noexcept nogil) noexcept:
    adaptor.vtable = functions[0]
    adaptor.vtable.version = KINA_RESOURCE_VERSION
    adaptor.vtable.supports_streams = below.vtable.supports_streams
    if below.vtable.try_allocate == NULL:
        adaptor.vtable.try_allocate = NULL
    adaptor.vtable.make_room = below.vtable.make_room
    if below.vtable.make_room != NULL:
        adaptor.vtable.make_room = adaptor_make_room
    kina_handle_init(&adaptor.resource.handle, destroy)
    kina_retain(below)
    adaptor.resource.vtable = &adaptor.vtable
    adaptor.resource.upstream = below
    adaptor.resource.device_type = below.device_type
    adaptor.resource.device_id = below.device_id
    adaptor.resource.flags = below.flags


cdef int adaptor_make_room(kina_resource *self, size_t nbytes, int *made) noexcept nogil:
    return self.upstream.vtable.make_room(self.upstream, nbytes, made)


cdef void adaptor_destroy(kina_handle *self) noexcept nogil:
    kina_release((<kina_resource *> self).upstream)
    free(self)


# Faces ----------------------------------------------------------------------------------------------------


cdef MemoryResource wrap(kina_resource *resource):
    cdef MemoryResource face = MemoryResource.__new__(MemoryResource)
    kina_retain(resource)
    face.serve(resource, None, NULL)
    return face


cdef kina_storage *allocate_from(MemoryResource memory, size_t nbytes) except NULL:
    cdef kina_storage *storage = storage_of(memory, nbytes, NULL)
    if memory.c.flags & KINA_RESOURCE_PYTHON:
        storage_keep(storage, memory)
    return storage


cdef kina_storage *storage_of(MemoryResource memory, size_t nbytes, kina_stream *home) except NULL:
    """For whoever keeps `memory` as long as the storage."""
    cdef kina_resource *resource = memory.ready()
    cdef kina_storage *storage = NULL
    cdef kina_dl_device device
    cdef uint64_t runtime = 0
    cdef uint64_t domain = 0
    cdef int status
    device.device_type = resource.device_type
    device.device_id = resource.device_id
    if on_host(device.device_type):
        runtime, domain = host_runtime(), host_domain()
    elif home != NULL:
        runtime, domain = home.runtime, home.domain
    with nogil:
        status = storage_allocate(&storage, resource, home, nbytes, device, runtime, domain)
    check(status)
    return storage


cdef int check_subclass(object kind) except -1:
    if kind._allocate is MemoryResource._allocate or kind._deallocate is MemoryResource._deallocate:
        raise TypeError(f"{kind.__name__}: a MemoryResource in Python is a subclass that implements _allocate and "
                        "_deallocate; kina.memory has those that are ready")
    return 0


# Not cleared: what a resource gives back when it goes must find its upstream alive.
@cython.no_gc_clear
cdef class MemoryResource:
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

    def __init__(self, *, device: str | None = None, supports_streams: bool = False,
                 upstream: MemoryResource | None = None) -> None:
        cdef kina_dl_device where
        cdef MemoryResource below = None
        cdef kina_resource *made
        cdef PyObject **named
        check_subclass(type(self))
        if upstream is not None:
            below = checked_upstream(upstream)
        if device is None and below is not None:
            where.device_type, where.device_id = below.c.device_type, below.c.device_id
        else:
            where = parse_device("cpu" if device is None else device)
        named = NULL
        made = python_resource_new(self, where, bool(supports_streams), NULL if below is None else below.c, &named)
        self.serve(made, below, named)

    def __dealloc__(self):
        if self.named != NULL:
            self.named[0] = NULL
        kina_release(self.c)

    cdef int serve(self, kina_resource *c, MemoryResource upstream, PyObject **named) except -1:
        """Be the face of `c`, whose reference it steals. `named` is where `c` names its face, or NULL."""
        if self.c != NULL:
            kina_release(c)
            raise ArgumentError(f"{type(self).__name__}: it is initialised already", operation="MemoryResource")
        self.c = c
        self.named = named
        self._upstream = upstream
        return 0

    cdef kina_resource *ready(self) except NULL:
        if self.c == NULL:
            MemoryResource.__init__(self)  # a subclass whose own __init__ did not call it
        return self.c

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
        cdef kina_resource *found
        cdef const char *name = NULL
        if PyCapsule_CheckExact(capsule):
            name = PyCapsule_GetName(capsule)
        if name == NULL or strcmp(name, KINA_RESOURCE_CAPSULE) != 0:
            what = type(capsule).__name__ if name == NULL else f"a capsule named {name.decode('utf-8', 'replace')!r}"
            raise ArgumentError(f"from_capsule: a capsule named 'kina_resource' is needed, not {what}",
                                operation="from_capsule")
        found = <kina_resource *> PyCapsule_GetPointer(capsule, KINA_RESOURCE_CAPSULE)
        if found.vtable == NULL:
            raise ArgumentError("from_capsule: the resource has no table of functions", operation="from_capsule")
        if found.vtable.version != KINA_RESOURCE_VERSION:
            raise UnsupportedError(f"from_capsule: the resource is of version {found.vtable.version} of the "
                                   f"interface, this is version {KINA_RESOURCE_VERSION}", operation="from_capsule")
        if (found.handle.references < 1 or found.handle.destroy == NULL or found.vtable.name == NULL
                or found.vtable.allocate == NULL or found.vtable.deallocate == NULL):
            raise ArgumentError("from_capsule: the resource lacks references, destroy, name, allocate or deallocate",
                                operation="from_capsule")
        if found.device_type not in (KINA_DEVICE_CPU, KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_HOST,
                                     KINA_DEVICE_CUDA_MANAGED):
            raise UnsupportedError(f"from_capsule: memory of device type {found.device_type} is unknown here",
                                   operation="from_capsule")
        return wrap(found)

    def _allocate(self, nbytes: int, stream: object) -> int:
        raise NotImplementedError

    def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
        raise NotImplementedError

    def allocate(self, nbytes: int, stream: object = None) -> Buffer:
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
        cdef size_t count = parse_nbytes(nbytes, "allocate")
        cdef Buffer buffer
        cdef kina_stream *home
        _keeper = ordering_stream(self.ready(), stream, True, "allocate", &home)
        drain_python_releases()
        buffer = new_buffer()
        buffer.storage = storage_of(self, count, home)
        buffer._resource = self
        buffer._nbytes = count
        return buffer

    def unsafe_allocate(self, nbytes: int, stream: object = None) -> int:
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
        cdef size_t count = parse_nbytes(nbytes, "unsafe_allocate")
        cdef kina_resource *resource = self.ready()
        cdef kina_stream *home
        cdef void *data = NULL
        cdef int status = 0
        _keeper = ordering_stream(resource, stream, False, "unsafe_allocate", &home)
        if count != 0:
            with nogil:
                status = resource.vtable.allocate(resource, &data, count, home)
                if status != 0:
                    allocation_failed(resource, status, count)
            check(status)
        return <uintptr_t> data

    def unsafe_deallocate(self, address: int, nbytes: int, stream: object = None) -> None:
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
        cdef size_t count = parse_nbytes(nbytes, "unsafe_deallocate")
        cdef kina_resource *resource = self.ready()
        cdef uintptr_t place = parse_nbytes(address, "unsafe_deallocate")
        cdef kina_stream *home
        _keeper = ordering_stream(resource, stream, False, "unsafe_deallocate", &home)
        if place != 0:
            if needs_no_gil(resource):
                with nogil:
                    resource.vtable.deallocate(resource, <void *> place, count, home)
            else:
                resource.vtable.deallocate(resource, <void *> place, count, home)
        drain_python_releases()

    @property
    def name(self) -> str:
        """What it is called in messages: the name of its class, or the one that a C library gave."""
        return type(self).__name__ if self.c == NULL else self.c.vtable.name.decode("utf-8", "replace")

    @property
    def device(self) -> str:
        """Where its memory is: ``"cpu"`` or ``"cuda:N"``. Pinned memory is the host's."""
        return device_of_resource(self.ready())

    @property
    def supports_streams(self) -> bool:
        """Whether allocation and release are ordered on a stream."""
        return self.ready().vtable.supports_streams != 0

    @property
    def upstream(self) -> MemoryResource | None:
        """The resource below, where an adaptor gets its memory."""
        cdef kina_resource *below = self.ready().upstream
        if self._upstream is not None or below == NULL:
            return self._upstream
        return wrap(below)

    def __repr__(self) -> str:
        chain = []
        cdef kina_resource *below = self.ready()
        while below != NULL:
            chain.append(below.vtable.name.decode("utf-8", "replace"))
            below = below.upstream
        return f"<kina.memory {' over '.join(chain)}, {device_of_resource(self.c)}>"

    def __reduce_ex__(self, protocol: int) -> object:
        raise TypeError(f"a {type(self).__name__} hands out memory of this process: it cannot be copied or pickled")


@cython.final
@cython.no_gc_clear
cdef class HostMemoryResource(MemoryResource):
    """HostMemoryResource()

    Ordinary host memory, aligned to 256 bytes. All objects of this class are one resource.
    """

    def __init__(self) -> None:
        kina_retain(host_resource())
        self.serve(host_resource(), None, NULL)


# Buffers --------------------------------------------------------------------------------------------------


cdef Buffer new_buffer():
    begin_construction()
    try:
        return Buffer.__new__(Buffer)
    finally:
        end_construction()


@cython.final
cdef class Buffer:
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

    cdef kina_storage *storage      # owned; NULL once freed
    cdef MemoryResource _resource   # for `resource`; it keeps a resource in Python visible to the collector
    cdef size_t _nbytes
    cdef tuple _end                 # name of the thread that freed it, and when
    cdef object __weakref__

    def __cinit__(self):
        check_construction(self)

    def __del__(self):
        # Not in __dealloc__: in a cycle with a resource in Python, that one must be whole when it takes the memory.
        self.let_go()

    def __dealloc__(self):
        kina_release(self.storage)
        drain_python_releases()

    cdef void let_go(self) noexcept:
        cdef kina_storage *storage = self.storage
        self.storage = NULL
        if storage != NULL and needs_no_gil(storage.resource):
            with nogil:
                kina_release(storage)
        else:
            kina_release(storage)
        drain_python_releases()

    cdef kina_storage *alive(self, str operation) except NULL:
        if self.storage == NULL:
            thread, moment = self._end or ("the collector", time.monotonic())
            raise SessionClosedError(f"{operation}: this buffer of {self._nbytes} bytes of {self._resource.name} was "
                                     f"freed {time.monotonic() - moment:.3g} s ago by {thread}", operation=operation)
        return self.storage

    cdef kina_storage *shared(self, str operation) except NULL:
        """The storage, for something that may outlive the buffer."""
        cdef kina_storage *storage = self.alive(operation)
        if storage.resource.flags & KINA_RESOURCE_PYTHON:
            storage_keep(storage, self._resource)
        return storage

    def free(self, stream: object = None) -> None:
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
        cdef kina_storage *storage = self.alive("free")
        cdef kina_stream *home
        cdef kina_stream *before = storage.stream
        _keeper = ordering_stream(storage.resource, stream, False, "free", &home)
        if home != NULL:
            kina_retain(home)
            storage.stream = home
            kina_release(before)
        self._end = (f"thread {threading.current_thread().name!r}", time.monotonic())
        self.let_go()

    @property
    def nbytes(self) -> int:
        """What was asked for."""
        return self._nbytes

    @property
    def device(self) -> str:
        """Where the memory is: ``"cpu"`` or ``"cuda:N"``."""
        return device_of_resource(self._resource.c)

    @property
    def resource(self) -> MemoryResource:
        """The resource that it came from."""
        return self._resource

    @property
    def freed(self) -> bool:
        """Whether :meth:`free` was called."""
        return self.storage == NULL

    def tensor(self, shape: int | tuple[int, ...], dtype: object = "float32") -> Tensor:
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
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef int64_t size = 0
        cdef size_t needed = 0
        cdef kina_storage *storage = self.alive("tensor")
        cdef DType kind = as_dtype(dtype)
        cdef int ndim = parse_shape(shape, extents, b"tensor")
        check(layout_size(b"tensor", ndim, extents, &size))
        check(layout_nbytes(b"tensor", size, kind.itemsize, &needed))
        if needed > self._nbytes:
            raise InvalidShapeError(f"tensor: {size} elements of {kind.name} need {needed} bytes, the buffer has "
                                    f"{self._nbytes}", operation="tensor")
        if not on_host(storage.device.device_type):
            raise UnsupportedError(f"tensor: a buffer of {self.device} is memory without a session, for libraries that "
                                   "take its unsafe_address(); session.empty(shape, memory=resource) makes tensors",
                                   operation="tensor")
        storage = self.shared("tensor")
        kina_retain(storage)
        return tensor_from_storage(storage, kind, ndim, extents, NULL, 0, 0, b"tensor")

    def unsafe_address(self) -> int:
        """The address of the memory; 0 for 0 bytes.

        Notes
        -----
        **Safety.** It is valid until the buffer and everything made of it are gone, and must not be freed by
        anybody else. Host code must not touch memory of a CUDA device, and device work that uses it has to be over
        before it goes.
        """
        return <uintptr_t> self.alive("unsafe_address").data

    def __dlpack__(self, *, stream: object = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> object:
        return self.tensor(self._nbytes, "uint8").__dlpack__(stream=stream, max_version=max_version,
                                                             dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._resource.c.device_type, self._resource.c.device_id

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not on_host(self._resource.c.device_type):
            raise BufferError(f"a buffer of {self.device} is not offered to the host")
        PyObject_GetBuffer(storage_bytes(self.shared("memoryview"), True), view, flags)

    def __len__(self) -> int:
        return self._nbytes

    def __repr__(self) -> str:
        state = ", freed" if self.storage == NULL else ""
        return f"<kina.memory.Buffer, {self._nbytes} bytes of {self._resource.name} on {self.device}{state}>"

    def __reduce_ex__(self, protocol: int) -> object:
        raise TypeError("a Buffer owns memory: it is neither copied nor pickled; s.to_host(buffer.tensor(...)) gives "
                        "the values")
