# cython: annotation_typing=False
"""Memory resources over the driver: device memory, driver pools, managed and pinned memory.

Source: CUDA Driver API, "Memory Management", "Stream Ordered Memory Allocator" and "Unified Addressing".
"""

cimport cython
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.resource cimport MemoryResource, parse_nbytes, wrap
from kina._core.status cimport KINA_DRIVER, KINA_OUT_OF_MEMORY, check, kina_memory_figures, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_RESOURCE_VERSION,
    kina_handle,
    kina_handle_init,
    kina_release,
    kina_resource,
    kina_resource_vtable,
    kina_retain,
    kina_stream,
    release_python_later,
)
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed, device_is_gone, open_device
from kina.cuda.cudatypes cimport (
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    CU_MEM_ATTACH_GLOBAL,
    CU_MEMHOSTALLOC_PORTABLE,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUmemoryPool,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, driver_failed, process_is_forked, relaxed_begin, relaxed_end
from kina.cuda.handles cimport (
    kina_add,
    kina_device,
    kina_idle_pool,
    kina_runtime,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.memory cimport (
    pool_checkin,
    pool_checkout,
    pool_figures,
    stream_or_private,
    trim_all_pools,
    wait_for_all,
)
from kina.cuda.retire cimport harvest_device, harvest_retired
from kina.cuda.runtime cimport Runtime, default_runtime

from kina._core.opening import cuda_ordinal
from kina.errors import ArgumentError, ForeignDeviceError, InvalidConfigError, UnsupportedError

__all__ = [
    "CudaAsyncMemoryResource",
    "CudaMemoryResource",
    "ManagedMemoryResource",
    "PinnedMemoryResource",
    "own_resource",
]


cdef enum driver_memory:
    PLAIN       # cuMemAlloc
    MANAGED
    PINNED
    POOLED


# State ----------------------------------------------------------------------------------------------------

ctypedef struct driver_resource:
    kina_resource base
    kina_device *device         # immortal
    driver_memory kind
    int64_t live_bytes          # atomic
    uint64_t host_waits         # atomic
    kina_idle_pool entry        # POOLED: its pool, in device.lent_pools unless it is adopted
    bint adopted
    void *pool_owner            # Python object, owned: keeps an adopted pool alive


cdef extern from *:
    """
    static int64_t kina_count(int64_t *count, int64_t change) {
        return __atomic_add_fetch(count, change, __ATOMIC_RELAXED);
    }
    """
    int64_t kina_count(int64_t *count, int64_t change) noexcept nogil


cdef driver_resource *make(int ordinal, driver_memory kind, const kina_resource_vtable *functions,
                           int device_type) except NULL:
    cdef kina_device *device = open_device(ordinal)
    cdef driver_resource *made
    check(device_check(device, functions.name))
    made = <driver_resource *> calloc(1, sizeof(driver_resource))
    if made == NULL:
        raise MemoryError
    kina_handle_init(&made.base.handle, destroy)
    made.base.vtable = functions
    made.base.device_type = device_type
    made.base.device_id = 0 if kind == PINNED else ordinal
    made.device = device
    made.kind = kind
    return made


cdef void destroy(kina_handle *handle) noexcept nogil:
    cdef driver_resource *self = <driver_resource *> handle
    cdef uint64_t keep_everything = <uint64_t> -1
    cdef CUstreamCaptureMode mode
    cdef kina_idle_pool **link
    if process_is_forked():
        return  # whoever held the lock at the fork is not here to give it back
    if self.kind == POOLED and not self.adopted:
        pthread_mutex_lock(&self.device.mutex)
        link = &self.device.lent_pools
        while link[0] != &self.entry:
            link = &link[0].next
        link[0] = self.entry.next
        pthread_mutex_unlock(&self.device.mutex)
        if not device_is_gone(self.device):
            mode = relaxed_begin()
            cu.cuMemPoolSetAttribute(self.entry.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_everything)
            relaxed_end(mode)
            pool_checkin(self.device, self.entry.pool)
    release_python_later(self.pool_owner)
    free(self)


# Allocation -----------------------------------------------------------------------------------------------


cdef CUresult take(driver_resource *self, void **out, size_t nbytes, CUstream stream) noexcept nogil:
    cdef CUdeviceptr address = 0
    cdef CUresult code
    if self.kind == PINNED:
        return cu.cuMemHostAlloc(out, nbytes, CU_MEMHOSTALLOC_PORTABLE)
    if self.kind == POOLED:
        code = cu.cuMemAllocFromPoolAsync(&address, nbytes, self.entry.pool, stream)
    elif self.kind == MANAGED:
        code = cu.cuMemAllocManaged(&address, nbytes, CU_MEM_ATTACH_GLOBAL)
    else:
        code = cu.cuMemAlloc(&address, nbytes)
    out[0] = <void *> address
    return code


cdef CUresult climb_ladder(driver_resource *self, void **out, size_t nbytes, CUstream stream) noexcept nogil:
    """The ways out of a full device, cheapest first; each is tried with a new attempt."""
    cdef kina_device *device = self.device
    cdef CUresult code
    harvest_device(device)
    harvest_retired(device, True)
    make_room(self)
    code = take(self, out, nbytes, stream)
    if code != CUDA_ERROR_OUT_OF_MEMORY:
        return code
    kina_add(&self.host_waits, 1)
    code = wait_for_all(device)
    if code != CUDA_SUCCESS:
        return code
    harvest_device(device)
    harvest_retired(device, True)
    code = wait_for_all(device)  # for what the harvest has freed in stream order
    if code != CUDA_SUCCESS:
        return code
    make_room(self)
    return take(self, out, nbytes, stream)


cdef void make_room(driver_resource *self) noexcept nogil:
    trim_all_pools(self.device)
    if self.adopted:
        cu.cuMemPoolTrimTo(self.entry.pool, 0)


cdef int allocate(kina_resource *base, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef driver_resource *self = <driver_resource *> base
    cdef kina_device *device = self.device
    cdef CUstream native = NULL
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int pushed
    cdef int status = device_check(device, b"allocate")
    if status != 0:
        return status
    pushed = context_begin(device, b"allocate")
    if pushed < 0:
        return last_error().detail
    if self.kind == POOLED:
        status = stream_or_private(device, stream, &native)
        if status != 0:
            context_end(pushed)
            return status
    mode = relaxed_begin()
    code = take(self, out, nbytes, native)
    if code == CUDA_ERROR_OUT_OF_MEMORY:
        code = climb_ladder(self, out, nbytes, native)
    if code == CUDA_SUCCESS and self.kind == POOLED and stream == NULL:
        # No stream asked: whoever uses it, on whichever stream, finds it allocated.
        kina_add(&self.host_waits, 1)
        code = cu.cuStreamSynchronize(native)
        if code != CUDA_SUCCESS:
            cu.cuMemFreeAsync(<CUdeviceptr> out[0], native)
    relaxed_end(mode)
    context_end(pushed)
    if code != CUDA_SUCCESS:
        return refused(self, code, nbytes)
    kina_count(&self.live_bytes, <int64_t> nbytes)
    return 0


cdef int refused(driver_resource *self, CUresult code, size_t nbytes) noexcept nogil:
    cdef kina_device *device = self.device
    cdef kina_memory_figures figures
    cdef uint64_t reserved = 0
    cdef uint64_t used = 0
    cdef size_t available = 0
    cdef size_t total = 0
    cdef int pushed
    if code != CUDA_ERROR_OUT_OF_MEMORY:
        return device_failed(device, code, KINA_DRIVER, b"allocate", b"memory could not be allocated")
    memset(&figures, 0xff, sizeof(figures))  # -1: not known
    figures.requested = <int64_t> nbytes
    figures.live = kina_count(&self.live_bytes, 0)
    if self.kind == PINNED:
        snprintf(last_error().message, sizeof(last_error().message),
                 "no room for %zu bytes of pinned host memory: %lld bytes of this resource are live", nbytes,
                 <long long> figures.live)
    else:
        pushed = context_begin(device, b"allocate")
        if pushed >= 0:
            if cu.cuMemGetInfo(&available, &total) == CUDA_SUCCESS:
                figures.limit = <int64_t> total
            context_end(pushed)
        if self.kind == POOLED:
            pool_figures(self.entry.pool, &reserved, &used)
            figures.cached = <int64_t> (reserved - used) if reserved > used else 0
        snprintf(last_error().message, sizeof(last_error().message),
                 "cuda:%d has no room for %zu bytes: %lld bytes of this %s are live, the device has %zu of %zu bytes "
                 "free", device.ordinal, nbytes, <long long> figures.live, self.base.vtable.name, available, total)
    driver_failed(code, KINA_OUT_OF_MEMORY, b"allocate", last_error().message)
    last_error().figures = figures
    last_error().has_figures = True
    return KINA_OUT_OF_MEMORY


cdef void deallocate(kina_resource *base, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    """From any thread. What cannot be freed any more is leaked, and stays counted as live."""
    cdef driver_resource *self = <driver_resource *> base
    cdef CUstream native
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int pushed
    if device_is_gone(self.device):
        return
    pushed = context_begin(self.device, b"free")
    if pushed < 0:
        return
    mode = relaxed_begin()
    if self.kind != POOLED:
        kina_add(&self.host_waits, 1)  # the driver waits for the device
        code = cu.cuMemFreeHost(data) if self.kind == PINNED else cu.cuMemFree(<CUdeviceptr> data)
    elif stream_or_private(self.device, stream, &native) == 0:
        code = cu.cuMemFreeAsync(<CUdeviceptr> data, native)
    else:
        code = CUDA_ERROR_OUT_OF_MEMORY  # there is no private stream
    relaxed_end(mode)
    context_end(pushed)
    if code == CUDA_SUCCESS:
        kina_count(&self.live_bytes, -<int64_t> nbytes)


cdef kina_resource_vtable unordered_functions(const char *name) noexcept:
    cdef kina_resource_vtable functions
    memset(&functions, 0, sizeof(functions))
    functions.version = KINA_RESOURCE_VERSION
    functions.name = name
    functions.allocate = allocate
    functions.deallocate = deallocate
    return functions


cdef kina_resource_vtable plain_functions = unordered_functions(b"CudaMemoryResource")
cdef kina_resource_vtable managed_functions = unordered_functions(b"ManagedMemoryResource")
cdef kina_resource_vtable pinned_functions = unordered_functions(b"PinnedMemoryResource")
cdef kina_resource_vtable async_functions = unordered_functions(b"CudaAsyncMemoryResource")
async_functions.supports_streams = 1


# Faces ----------------------------------------------------------------------------------------------------


@cython.final
@cython.no_gc_clear
cdef class CudaMemoryResource(MemoryResource):
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
        self.serve(&make(cuda_ordinal(device), PLAIN, &plain_functions, KINA_DEVICE_CUDA).base, None, NULL)

    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""
        return live_bytes_of(self)

    @property
    def host_waits(self) -> int:
        """How often the host was made to wait: by each release, and by a full device."""
        return (<driver_resource *> self.ready()).host_waits


@cython.final
@cython.no_gc_clear
cdef class ManagedMemoryResource(MemoryResource):
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
        cdef driver_resource *made = make(ordinal, MANAGED, &managed_functions, KINA_DEVICE_CUDA_MANAGED)
        cdef CUresult code = cu.cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, made.device.device)
        self.serve(&made.base, None, NULL)
        if code != CUDA_SUCCESS:
            check(device_failed(made.device, code, KINA_DRIVER, b"ManagedMemoryResource",
                                b"whether the device has managed memory could not be asked"))
        if not supported:
            raise UnsupportedError(f"cuda:{ordinal} has no managed memory", operation="ManagedMemoryResource")

    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""
        return live_bytes_of(self)

    @property
    def host_waits(self) -> int:
        """How often the host was made to wait: by each release, and by a full device."""
        return (<driver_resource *> self.ready()).host_waits


@cython.final
@cython.no_gc_clear
cdef class PinnedMemoryResource(MemoryResource):
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
        self.serve(&make(cuda_ordinal(device), PINNED, &pinned_functions, KINA_DEVICE_CUDA_HOST).base, None, NULL)

    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""
        return live_bytes_of(self)

    @property
    def host_waits(self) -> int:
        """How often the host was made to wait: by each release, and by a full device."""
        return (<driver_resource *> self.ready()).host_waits


@cython.final
@cython.no_gc_clear
cdef class CudaAsyncMemoryResource(MemoryResource):
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
        made = make(ordinal, PLAIN, &async_functions, KINA_DEVICE_CUDA)
        self.serve(&made.base, None, NULL)
        if made.device.pools_supported:
            take_pool(made, theirs)
            if theirs != NULL and not isinstance(adopt, int):
                Py_INCREF(adopt)
                made.pool_owner = <void *> adopt
            if release_threshold is not None:
                set_threshold(made, threshold)
            if theirs != NULL:
                check_place(made)
        elif theirs != NULL:
            raise UnsupportedError(f"cuda:{ordinal} has no memory pools to adopt one of",
                                   operation="CudaAsyncMemoryResource")
        if initial > 0:
            self.unsafe_deallocate(self.unsafe_allocate(initial), initial)

    @property
    def live_bytes(self) -> int:
        """Bytes that are out now."""
        return live_bytes_of(self)

    @property
    def host_waits(self) -> int:
        """How often the host was made to wait: by allocations without a stream, by a full device, and without pools by
        releases."""
        return (<driver_resource *> self.ready()).host_waits

    def unsafe_pool_handle(self) -> int:
        """The driver's handle of the pool (a CUmemoryPool); 0 on a device without memory pools.

        Notes
        -----
        **Safety.** It is valid as long as the resource or memory of it lives, and must not be destroyed.
        """
        return <uintptr_t> (<driver_resource *> self.ready()).entry.pool


cdef int64_t live_bytes_of(MemoryResource face) except -1:
    return kina_count(&(<driver_resource *> face.ready()).live_bytes, 0)


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


cdef int take_pool(driver_resource *self, CUmemoryPool theirs) except -1:
    cdef CUstreamCaptureMode mode
    cdef CUresult code = CUDA_SUCCESS
    cdef int pushed
    if theirs != NULL:
        self.entry.pool = theirs
        self.adopted = True
        self.kind = POOLED
        return 0
    with nogil:
        pushed = context_begin(self.device, b"CudaAsyncMemoryResource")
        if pushed >= 0:
            mode = relaxed_begin()
            code = pool_checkout(self.device, &self.entry.pool)
            relaxed_end(mode)
            context_end(pushed)
    check(-1 if pushed < 0 else 0)
    check_code(self, code)
    self.kind = POOLED
    pthread_mutex_lock(&self.device.mutex)
    self.entry.next = self.device.lent_pools
    self.device.lent_pools = &self.entry
    pthread_mutex_unlock(&self.device.mutex)
    return 0


cdef int check_place(driver_resource *self) except -1:
    """Where an adopted pool's memory is, the driver tells of the memory alone."""
    cdef void *probe = NULL
    cdef int ordinal = -1
    cdef CUresult code
    cdef int status
    with nogil:
        status = allocate(&self.base, &probe, 1, NULL)
    check(status)
    code = cu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, <CUdeviceptr> probe)
    deallocate(&self.base, probe, 1, NULL)
    check_code(self, code)
    if ordinal != self.device.ordinal:
        raise ForeignDeviceError(f"the memory pool is of cuda:{ordinal}, the resource of cuda:{self.device.ordinal}",
                                 operation="CudaAsyncMemoryResource")
    return 0


# A Runtime's own memory -----------------------------------------------------------------------------------

ctypedef struct runtime_resource:
    kina_resource base
    kina_runtime *runtime       # owned: the pool lives in it


cdef int allocate_from_runtime(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef kina_runtime *runtime = (<runtime_resource *> self).runtime
    cdef int status = device_check(runtime.device, b"allocate")
    if status != 0:
        return status
    return runtime.pool.resource.vtable.allocate(&runtime.pool.resource, out, nbytes, stream)


cdef void deallocate_to_runtime(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef kina_resource *pool = &(<runtime_resource *> self).runtime.pool.resource
    pool.vtable.deallocate(pool, data, nbytes, stream)


cdef void destroy_runtime_resource(kina_handle *self) noexcept nogil:
    kina_release((<runtime_resource *> self).runtime)
    free(self)


cdef kina_resource_vtable runtime_functions
runtime_functions.version = KINA_RESOURCE_VERSION
runtime_functions.supports_streams = 1
runtime_functions.name = b"RuntimeMemoryResource"
runtime_functions.allocate = allocate_from_runtime
runtime_functions.deallocate = deallocate_to_runtime


def own_resource(ordinal: int) -> MemoryResource:
    """The pool of the thread's default Runtime of a device, which it holds, for `kina.memory.current_resource`."""
    cdef Runtime runtime = default_runtime(ordinal)
    cdef runtime_resource *made = <runtime_resource *> calloc(1, sizeof(runtime_resource))
    if made == NULL:
        raise MemoryError
    kina_handle_init(&made.base.handle, destroy_runtime_resource)
    made.base.vtable = &runtime_functions
    made.base.device_type = KINA_DEVICE_CUDA
    made.base.device_id = ordinal
    made.runtime = runtime.c
    kina_retain(runtime.c)
    face = wrap(&made.base)
    kina_release(made)  # the face has its own reference
    return face
