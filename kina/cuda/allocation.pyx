# cython: annotation_typing=False
"""What CuPy and Numba are given: memory that an object holds."""

cimport cython
from libc.stdint cimport uintptr_t

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.resource cimport parse_nbytes
from kina._core.status cimport KINA_DRIVER, check
from kina._core.storage cimport drain_python_releases, kina_release, kina_retain
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed, open_device
from kina.cuda.cudatypes cimport CU_STREAM_LEGACY, CUDA_SUCCESS, CUresult, CUstream, CUstreamCaptureMode
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.foreign_streams cimport open_stream
from kina.cuda.handles cimport kina_device, kina_runtime
from kina.cuda.lending cimport allocation, give_back, make_allocation
from kina.cuda.runtime cimport Runtime, adopted_runtime
from kina.cuda.stream cimport stream_of

__all__ = ["Allocation", "allocate", "memory_info"]


@cython.final
@cython.no_gc  # nothing it refers to can refer back
cdef class Allocation:
    """Allocation()

    Memory for another library, made by :func:`allocate`; it goes back when this object goes.
    """

    cdef allocation *c      # owned
    cdef size_t _nbytes

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        cdef allocation *held = self.c
        if held != NULL:
            self.c = NULL
            with nogil:
                give_back(held)
            drain_python_releases()

    @property
    def address(self) -> int:
        """Where it begins; 0 for 0 bytes."""
        return <uintptr_t> self.c.address

    @property
    def nbytes(self) -> int:
        """What was asked for."""
        return self._nbytes

    def __repr__(self) -> str:
        return f"<kina.cuda.allocation.Allocation, {self._nbytes} bytes>"

    def __reduce__(self):
        raise TypeError("an Allocation owns memory: it is neither copied nor pickled")


def allocate(nbytes: int, ordinal: int, stream: object = None) -> Allocation:
    """Memory of a device from the resource that is current in the calling thread, in the order of a stream.

    Parameters
    ----------
    nbytes : int
    ordinal : int
        Of the device.
    stream : object with ``__cuda_stream__``, optional
        It is kept alive as long as the memory. Default: the legacy stream.

    Raises
    ------
    OutOfMemoryError
        With kina's figures.
    UnsupportedError
        The stream is being captured, or is the per-thread default stream.
    ForeignDeviceError, UnavailableError, ArgumentError, InvalidShapeError

    Notes
    -----
    Waits for nothing, unless the resource does. The memory is given back in the order of `stream` when the object
    goes, from any thread.
    """
    cdef size_t count = parse_nbytes(nbytes, "allocate")
    cdef int number = ordinal
    cdef CUstream native = CU_STREAM_LEGACY if stream is None else stream_of(stream)
    cdef kina_runtime *runtime = NULL
    cdef Runtime adopted
    cdef Allocation made
    cdef int status = 0
    drain_python_releases()
    if native == CU_STREAM_LEGACY:
        with nogil:
            status = open_stream(&runtime, number, NULL, b"allocate")
        check(status)
    else:
        adopted = adopted_runtime(number, stream)
        runtime = adopted.c
        kina_retain(runtime)
    try:
        begin_construction()
        try:
            made = Allocation.__new__(Allocation)
        finally:
            end_construction()
        with nogil:
            status = make_allocation(&made.c, runtime, count)
        check(status)
    finally:
        kina_release(runtime)
    made._nbytes = count
    return made


def memory_info(ordinal: int) -> tuple[int, int]:
    """Free and total bytes of a device, as the driver tells them (cuMemGetInfo). DriverError, UnavailableError."""
    cdef kina_device *device = open_device(ordinal)
    cdef size_t available = 0
    cdef size_t total = 0
    cdef CUstreamCaptureMode mode
    cdef CUresult code = CUDA_SUCCESS
    cdef int pushed, status = -1
    check(device_check(device, b"memory_info"))
    with nogil:
        pushed = context_begin(device, b"memory_info")
        if pushed >= 0:
            mode = relaxed_begin()
            code = cu.cuMemGetInfo(&available, &total)
            relaxed_end(mode)
            context_end(pushed)
            status = 0
        if code != CUDA_SUCCESS:
            status = device_failed(device, code, KINA_DRIVER, b"memory_info",
                                   b"the device does not tell how much it has free")
    check(status)
    return available, total
