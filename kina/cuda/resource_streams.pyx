# cython: annotation_typing=False
"""The streams of memory resources: what `stream=` may name, and what resources in Python are told."""

cimport cython
from libc.stdint cimport uintptr_t

from kina._core.python_resource cimport set_stream_wrapper
from kina._core.resource cimport set_stream_finder
from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport check
from kina._core.storage cimport kina_release, kina_retain, kina_stream
from kina.cuda.capture cimport refuse_capture
from kina.cuda.context cimport context_begin, context_end, device_check
from kina.cuda.handles cimport kina_load, kina_runtime
from kina.cuda.runtime cimport Runtime, adopted_runtime, default_runtime
from kina.cuda.session cimport CudaSession

from kina.errors import ForeignDeviceError, SessionClosedError

__all__ = ["HomeStream"]


@cython.final
@cython.no_gc  # nothing it refers to can refer back
cdef class HomeStream:
    """HomeStream()

    The stream that orders an allocation or its release, as a resource in Python is told of it. Good for the ``stream=``
    of another resource, and for any library that takes ``__cuda_stream__``. It holds the stream.
    """

    cdef kina_stream *c     # owned reference

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        with nogil:
            kina_release(self.c)

    @property
    def device(self) -> str:
        """The device it is on: ``"cuda:N"``."""
        return f"cuda:{self.c.device_id}"

    def __cuda_stream__(self) -> tuple[int, int]:
        """(version 0, native handle), as the protocol of cuda.core asks."""
        return 0, <uintptr_t> self.c.native

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HomeStream) and (<HomeStream> other).c.number == self.c.number

    def __hash__(self) -> int:
        return hash(self.c.number)

    def __repr__(self) -> str:
        return f"<kina.cuda.HomeStream of Runtime {self.c.runtime} on cuda:{self.c.device_id}>"

    def __reduce_ex__(self, protocol: int) -> object:
        raise TypeError("a HomeStream is a stream of this process: it cannot be copied or pickled")


cdef object wrap_stream(kina_stream *stream):
    cdef HomeStream face
    begin_construction()
    try:
        face = HomeStream.__new__(HomeStream)
    finally:
        end_construction()
    kina_retain(stream)
    face.c = stream
    return face


cdef object find_stream(int ordinal, object stream, str operation, kina_stream **out):
    cdef Runtime runtime
    cdef CudaSession session
    if isinstance(stream, HomeStream):
        out[0] = (<HomeStream> stream).c
        check_device(ordinal, out[0], operation)
        return stream
    if stream is None:
        runtime = default_runtime(ordinal)
    elif isinstance(stream, Runtime):
        runtime = <Runtime> stream
        if kina_load(&runtime.c.closed):
            raise SessionClosedError(f"{operation}: the Runtime was closed", operation=operation)
    elif isinstance(stream, CudaSession):
        session = <CudaSession> stream
        if session.node == NULL:
            word = "not been entered" if session.thread == 0 else "ended"
            raise SessionClosedError(f"{operation}: the session has {word}", operation=operation)
        runtime = session._runtime
    else:
        runtime = adopted_runtime(ordinal, stream)
    check_device(ordinal, &runtime.c.stream, operation)
    check_uncaptured(runtime.c)
    out[0] = &runtime.c.stream
    return runtime


cdef int check_device(int ordinal, const kina_stream *stream, str operation) except -1:
    if stream.device_id != ordinal:
        raise ForeignDeviceError(f"{operation}: the stream is of cuda:{stream.device_id}, the memory of cuda:{ordinal}",
                                 operation=operation)
    return 0


cdef int check_uncaptured(kina_runtime *runtime) except -1:
    """What a captured stream allocates and frees belongs to its graph."""
    cdef int pushed, status = -1
    check(device_check(runtime.device, b"stream"))
    with nogil:
        pushed = context_begin(runtime.device, b"stream")
        if pushed >= 0:
            status = refuse_capture(runtime, b"stream")
            context_end(pushed)
    check(status)
    return 0


set_stream_finder(find_stream)
set_stream_wrapper(wrap_stream)
