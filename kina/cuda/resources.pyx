# cython: annotation_typing=False
"""Memory resources over the driver: device memory, driver pools, managed and pinned memory.

Source: CUDA Driver API, "Memory Management", "Stream Ordered Memory Allocator" and "Unified Addressing".
"""

cimport cython
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

from kina._core.pool cimport pool_face
from kina._core.resource cimport MemoryResource, parse_nbytes
from kina._core.status cimport KINA_DRIVER, check
from kina._core.storage cimport KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_HOST, KINA_DEVICE_CUDA_MANAGED
from kina.cuda.context cimport device_failed
from kina.cuda.cudatypes cimport (
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUmemoryPool,
    CUresult,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.memory cimport (
    MANAGED,
    PINNED,
    PLAIN,
    POOLED,
    driver_resource,
    driver_resource_live_bytes,
    driver_resource_make,
    managed_functions,
    pinned_functions,
    plain_functions,
    pooled_functions,
    pooled_make,
)
from kina.cuda.runtime cimport default_runtime

from kina._core.opening import cuda_ordinal
from kina.errors import ArgumentError, ForeignDeviceError, InvalidConfigError, UnsupportedError

__all__ = [
    "CudaAsyncMemoryResource",
    "CudaMemoryResource",
    "ManagedMemoryResource",
    "PinnedMemoryResource",
    "own_resource",
]


# Faces ----------------------------------------------------------------------------------------------------


cdef class DriverMemoryResource(MemoryResource):
    """What the resources of this module have in common."""

    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""
        return driver_resource_live_bytes(<driver_resource *> self.ready())

    @property
    def host_waits(self) -> int:
        """How often the host was made to wait: by a full device, and by what the Notes of the class say."""
        return (<driver_resource *> self.ready()).host_waits


@cython.final
@cython.no_gc_clear
cdef class CudaMemoryResource(DriverMemoryResource):
    """CudaMemoryResource(device=0)

    Memory of a CUDA device, each allocation and each release a call of the driver (cuMemAlloc, cuMemFree).

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        ``0``, ``"cuda:0"`` or ``"cuda"`` (the first).

    Raises
    ------
    UnavailableError
        No driver, no such device.

    Notes
    -----
    It has no stream order: memory may be used at once, on any stream, and the driver waits for the device when it
    takes memory back (counted in `host_waits`). Tensors of a session give theirs back once their Runtime's stream is
    past their last use, at a later allocation or wait.

    When the device is full, what kina caches there is given back, then the streams of its Runtimes are waited for,
    before OutOfMemoryError is raised with ``requested``, ``live`` and ``limit``. What the driver does not take back
    (its context is gone) is leaked and stays in `live_bytes`.

    References
    ----------
    CUDA Driver API: cuMemAlloc, cuMemFree.
    """

    def __init__(self, device: int | str | DeviceId | DeviceInfo = 0) -> None:
        self.serve(&driver_resource_make(cuda_ordinal(device), PLAIN, plain_functions, KINA_DEVICE_CUDA).base,
                   None, NULL)


@cython.final
@cython.no_gc_clear
cdef class ManagedMemoryResource(DriverMemoryResource):
    """ManagedMemoryResource(device=0)

    Managed memory, which the host may use as well (cuMemAllocManaged). Sessions of the device take it for their tensors
    and present it as ordinary memory of the device.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        Whose sessions may use it.

    Raises
    ------
    UnavailableError
        No driver, no such device.
    UnsupportedError
        The device has no managed memory.

    Notes
    -----
    As :class:`CudaMemoryResource`: no stream order, and the driver waits when it takes memory back. Host and device are
    to be kept apart by waiting: kina puts nothing in order between them.

    References
    ----------
    CUDA Driver API: cuMemAllocManaged, cuMemFree.
    """

    def __init__(self, device: int | str | DeviceId | DeviceInfo = 0) -> None:
        cdef int supported = 0
        cdef int ordinal = cuda_ordinal(device)
        cdef driver_resource *made = driver_resource_make(ordinal, MANAGED, managed_functions, KINA_DEVICE_CUDA_MANAGED)
        cdef CUresult code = cu.cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, made.device.device)
        self.serve(&made.base, None, NULL)
        if code != CUDA_SUCCESS:
            check(device_failed(made.device, code, KINA_DRIVER, b"ManagedMemoryResource",
                                b"whether the device has managed memory could not be asked"))
        if not supported:
            raise UnsupportedError(f"cuda:{ordinal} has no managed memory", operation="ManagedMemoryResource")


@cython.final
@cython.no_gc_clear
cdef class PinnedMemoryResource(DriverMemoryResource):
    """PinnedMemoryResource(device=0)

    Host memory that stays where it is, for copies that run beside the host (cuMemHostAlloc). Host sessions and
    ``kina.memory.using`` take it as memory of ``"cpu"``; DLPack sees it as pinned.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        Through whose context it is made; every device can use it (CU_MEMHOSTALLOC_PORTABLE).

    Raises
    ------
    UnavailableError
        No driver, no such device.

    Notes
    -----
    An allocation takes about as long as clearing the memory, and both it and the release may make the driver wait for
    the device (releases are counted in `host_waits`). Copies that use it have to be over before it goes.

    References
    ----------
    CUDA Driver API: cuMemHostAlloc, cuMemFreeHost.
    """

    def __init__(self, device: int | str | DeviceId | DeviceInfo = 0) -> None:
        self.serve(&driver_resource_make(cuda_ordinal(device), PINNED, pinned_functions, KINA_DEVICE_CUDA_HOST).base,
                   None, NULL)


@cython.final
@cython.no_gc_clear
cdef class CudaAsyncMemoryResource(DriverMemoryResource):
    """CudaAsyncMemoryResource(device=0, *, release_threshold=None, initial_bytes=0, adopt=None)

    Memory of a CUDA device from a pool of the driver, allocated and released in the order of a stream.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        ``0``, ``"cuda:0"`` or ``"cuda"`` (the first).
    release_threshold : int, optional
        Bytes that the pool keeps when the host waits for a stream; what it has beyond them, and nobody uses, the driver
        then gives back. Default: a pool of its own keeps everything, an adopted one what it was told before.
    initial_bytes : int
        Let the pool reserve so much now.
    adopt : int, or object with ``handle``, optional
        A pool made elsewhere (a CUmemoryPool) on the same device, in place of one of its own. An object is kept alive;
        a bare handle is believed, and whoever made it must not destroy it while memory of it is out.

    Raises
    ------
    UnavailableError
        No driver, no such device.
    ForeignDeviceError
        The adopted pool is another device's.
    InvalidConfigError
        `release_threshold` is less than `initial_bytes`, or `adopt` names no pool.
    InvalidShapeError
        Bytes out of range.
    UnsupportedError
        `adopt` on a device without memory pools.

    Notes
    -----
    An allocation or a release with a stream only enqueues. Without one, an allocation is usable at once on any
    stream: it is made on a private stream of the device, which is waited for (counted in `host_waits`) and has nothing
    else on it; a release means that all uses are over, and waits for nothing. The driver reuses what was freed on
    another stream once that is known to be over, never by an order of its own.

    Where the device has no memory pools it is as :class:`CudaMemoryResource`: a release in stream order then waits for
    the device. When the device is full it does as that one does. The pool is not destroyed: the next resource or
    Runtime of the device takes it over.

    References
    ----------
    CUDA Driver API: cuMemPoolCreate, cuMemAllocFromPoolAsync, cuMemFreeAsync.
    """

    def __init__(self, device: int | str | DeviceId | DeviceInfo = 0, *, release_threshold: int | None = None,
                 initial_bytes: int = 0, adopt: object = None) -> None:
        cdef int ordinal = cuda_ordinal(device)
        cdef size_t initial = parse_nbytes(initial_bytes, "CudaAsyncMemoryResource")
        cdef uint64_t threshold = 0
        cdef CUmemoryPool theirs = NULL
        cdef driver_resource *made
        if release_threshold is not None:
            threshold = parse_nbytes(release_threshold, "CudaAsyncMemoryResource")
            if threshold < initial:
                raise InvalidConfigError(f"CudaAsyncMemoryResource: release_threshold={threshold} is less than "
                                         f"initial_bytes={initial}", operation="CudaAsyncMemoryResource")
        if adopt is not None:
            theirs = pool_of(adopt)
        if theirs == NULL:
            made = pooled_make(ordinal)
            self.serve(&made.base, None, NULL)
        else:
            made = driver_resource_make(ordinal, PLAIN, pooled_functions, KINA_DEVICE_CUDA)
            self.serve(&made.base, None, NULL)
            adopt_pool(made, theirs, adopt)
        if release_threshold is not None and made.kind == POOLED:
            set_threshold(made, threshold)
        if initial > 0:
            self.unsafe_deallocate(self.unsafe_allocate(initial), initial)

    def unsafe_pool_handle(self) -> int:
        """The driver's handle of the pool (a CUmemoryPool); 0 on a device without memory pools.

        Notes
        -----
        **Safety.** It is valid as long as the resource or memory of it lives, and must not be destroyed.
        """
        return <uintptr_t> (<driver_resource *> self.ready()).entry.pool


cdef CUmemoryPool pool_of(object adopt) except NULL:
    cdef uintptr_t handle = 0
    found = adopt
    if not isinstance(adopt, int):
        try:
            found = adopt.handle
        except AttributeError:
            raise ArgumentError(f"CudaAsyncMemoryResource: adopt= takes a handle or an object with one, not "
                                f"{type(adopt).__name__}", operation="CudaAsyncMemoryResource") from None
    try:
        handle = int(found)
    except (TypeError, ValueError, OverflowError):
        pass
    if handle == 0 or isinstance(adopt, bool):
        raise InvalidConfigError(f"CudaAsyncMemoryResource: {found!r} is not the handle of a memory pool",
                                 operation="CudaAsyncMemoryResource")
    return <CUmemoryPool> <void *> handle


cdef int check_code(driver_resource *self, CUresult code) except -1:
    if code != CUDA_SUCCESS:
        check(device_failed(self.device, code, KINA_DRIVER, b"CudaAsyncMemoryResource",
                            b"the memory pool could not be set up"))
    return 0


cdef int set_threshold(driver_resource *self, uint64_t threshold) except -1:
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cdef CUresult code = cu.cuMemPoolSetAttribute(self.entry.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold)
    relaxed_end(mode)
    return check_code(self, code)


cdef int adopt_pool(driver_resource *self, CUmemoryPool theirs, object owner) except -1:
    if not self.device.pools_supported:
        raise UnsupportedError(f"cuda:{self.device.ordinal} has no memory pools to adopt one of",
                               operation="CudaAsyncMemoryResource")
    self.entry.pool = theirs
    self.adopted = True
    self.kind = POOLED
    if not isinstance(owner, int):
        Py_INCREF(owner)
        self.pool_owner = <void *> owner
    return check_place(self)


cdef int check_place(driver_resource *self) except -1:
    """Where an adopted pool's memory is, the driver tells of the memory alone."""
    cdef void *probe = NULL
    cdef int ordinal = -1
    cdef CUresult code
    cdef int status
    with nogil:
        status = pooled_functions.allocate(&self.base, &probe, 1, NULL)
    check(status)
    code = cu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, <CUdeviceptr> probe)
    pooled_functions.deallocate(&self.base, probe, 1, NULL)
    check_code(self, code)
    if ordinal != self.device.ordinal:
        raise ForeignDeviceError(f"the memory pool is of cuda:{ordinal}, the resource of cuda:{self.device.ordinal}",
                                 operation="CudaAsyncMemoryResource")
    return 0


def own_resource(ordinal: int) -> MemoryResource:
    """The pool of the thread's default Runtime of a device, for `kina.memory.current_resource`."""
    return pool_face(default_runtime(ordinal).c.memory)
