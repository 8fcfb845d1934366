"""Memory of the driver as memory resources: plain, managed and pinned, and pools of the driver.

Each device has one such pool for the Runtimes there, whose own pools take their chunks from it.

Source: CUDA Driver API, "Memory Management", "Stream Ordered Memory Allocator" and "Unified Addressing".
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.pool cimport FREELY, PATIENTLY, QUIETLY, pools_trim_device
from kina._core.status cimport KINA_DRIVER, KINA_OUT_OF_MEMORY, check, kina_memory_figures, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
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
from kina.cuda.capture cimport record_seal, refuse_capture
from kina.cuda.context cimport (
    context_begin,
    context_end,
    device_check,
    device_failed,
    device_is_gone,
    open_device,
    runtime_after,
)
from kina.cuda.cudatypes cimport (
    CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_ATTACH_GLOBAL,
    CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMHOSTALLOC_PORTABLE,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CUDA_ERROR_CAPTURED_EVENT,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUmemoryPool,
    CUmemPoolProps,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, driver_failed, process_is_forked, relaxed_begin, relaxed_end
from kina.cuda.handles cimport (
    kina_add,
    kina_device,
    kina_held_free,
    kina_idle_pool,
    kina_runtime,
    kina_seal,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.retire cimport harvest_device, harvest_retired, wait_for_quarantined
from kina.cuda.stream cimport stream_checkin, stream_checkout, streams_wait_idle

__all__ = []


cdef extern from *:
    """
    static int64_t kina_count(int64_t *count, int64_t change) {
        return __atomic_add_fetch(count, change, __ATOMIC_RELAXED);
    }
    """
    int64_t kina_count(int64_t *count, int64_t change) noexcept nogil


# Pools of the driver --------------------------------------------------------------------------------------


cdef CUresult pool_checkout(kina_device *device, CUmemoryPool *out) noexcept nogil:
    """A pool that keeps everything it frees: one that was laid aside, or a new one. The context must be current."""
    cdef kina_idle_pool *idle
    cdef CUmemPoolProps properties
    cdef uint64_t keep_everything = <uint64_t> -1
    cdef int never = 0
    cdef CUresult code
    pthread_mutex_lock(&device.mutex)
    idle = device.idle_pools
    if idle != NULL:
        device.idle_pools = idle.next
    pthread_mutex_unlock(&device.mutex)
    if idle != NULL:
        out[0] = idle.pool
        free(idle)
        return CUDA_SUCCESS
    memset(&properties, 0, sizeof(properties))
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    code = cu.cuMemPoolCreate(out, &properties)
    if code != CUDA_SUCCESS:
        return code
    # The driver may reuse what another stream freed where that is known to be over, but not make it so by a
    # dependency of its own, which would be a hidden wait.
    cu.cuMemPoolSetAttribute(out[0], CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &never)
    # Freed memory stays with the pool until the ladder trims it: giving it back would cost every synchronize.
    cu.cuMemPoolSetAttribute(out[0], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_everything)
    return CUDA_SUCCESS


cdef void pool_checkin(kina_device *device, CUmemoryPool pool) noexcept nogil:
    """Not destroyed: frees may be pending on its stream, and drivers were seen to crash over that (docs/adr/0006). So a
    device has as many pools as it ever had resources at once, and its own."""
    cdef kina_idle_pool *idle = <kina_idle_pool *> calloc(1, sizeof(kina_idle_pool))
    cdef CUstreamCaptureMode mode
    if idle == NULL:
        return  # leaked: the driver takes it back at exit
    idle.pool = pool
    mode = relaxed_begin()
    cu.cuMemPoolTrimTo(pool, 0)
    relaxed_end(mode)
    pthread_mutex_lock(&device.mutex)
    idle.next = device.idle_pools
    device.idle_pools = idle
    pthread_mutex_unlock(&device.mutex)


cdef void pool_figures(CUmemoryPool pool, uint64_t *reserved, uint64_t *used) noexcept nogil:
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cu.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, reserved)
    cu.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, used)
    relaxed_end(mode)


cdef CUresult take_pool(driver_resource *self) noexcept nogil:
    cdef kina_device *device = self.device
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cdef CUresult code = pool_checkout(device, &self.entry.pool)
    relaxed_end(mode)
    if code == CUDA_SUCCESS:
        self.kind = POOLED
        pthread_mutex_lock(&device.mutex)
        self.entry.next = device.lent_pools
        device.lent_pools = &self.entry
        pthread_mutex_unlock(&device.mutex)
    return code


cdef void give_pool_back(driver_resource *self) noexcept nogil:
    cdef kina_device *device = self.device
    cdef uint64_t keep_everything = <uint64_t> -1
    cdef CUstreamCaptureMode mode
    cdef kina_idle_pool **link
    pthread_mutex_lock(&device.mutex)
    link = &device.lent_pools
    while link[0] != &self.entry:
        link = &link[0].next
    link[0] = self.entry.next
    pthread_mutex_unlock(&device.mutex)
    if device_is_gone(device):
        return
    mode = relaxed_begin()
    cu.cuMemPoolSetAttribute(self.entry.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_everything)
    relaxed_end(mode)
    pool_checkin(device, self.entry.pool)


# What no stream orders ------------------------------------------------------------------------------------


cdef CUstream private_if_made(kina_device *device) noexcept nogil:
    cdef CUstream found
    pthread_mutex_lock(&device.mutex)
    found = device.private_stream
    pthread_mutex_unlock(&device.mutex)
    return found


cdef int private_stream(kina_device *device, CUstream *out) noexcept nogil:
    cdef CUstream made = NULL
    cdef bint first
    cdef int status
    out[0] = private_if_made(device)
    if out[0] != NULL:
        return 0
    status = stream_checkout(device, &made)
    if status != 0:
        return status
    pthread_mutex_lock(&device.mutex)
    first = device.private_stream == NULL
    if first:
        device.private_stream = made
    out[0] = device.private_stream
    pthread_mutex_unlock(&device.mutex)
    if not first:
        stream_checkin(device, made)
    return 0


cdef int stream_or_private(kina_device *device, kina_stream *stream, CUstream *out) noexcept nogil:
    """The native stream, or for NULL the device's private one, which has nothing on it but allocations and releases
    that no stream orders. The context must be current. 0 or a recorded status."""
    if stream == NULL:
        return private_stream(device, out)
    out[0] = <CUstream> stream.native
    return 0


# A full device --------------------------------------------------------------------------------------------


cdef CUresult wait_for_work(kina_runtime *runtime) noexcept nogil:
    """By an event: it is recorded under the lock that keeps captures of kina's from beginning, and waited for outside
    of it. To wait for the stream itself would end a capture that its thread begins meanwhile."""
    cdef kina_seal *recorded = NULL
    cdef CUresult code
    if record_seal(runtime, &recorded, b"allocate") != 0:
        return CUDA_SUCCESS  # it is being captured; if it is broken, the waits that follow say so
    kina_add(&runtime.counters.events_recorded, 1)
    code = cu.cuEventSynchronize(recorded.event)
    kina_release(recorded)
    return CUDA_SUCCESS if code == CUDA_ERROR_CAPTURED_EVENT else code  # of somebody else's, begun just then


cdef CUresult wait_for_all(kina_device *device) noexcept nogil:
    """Wait for the streams of all Runtimes of the device, those that are gone included. Not for the device: that would
    end captures of others, which even RELAXED mode does not prevent; a stream that is being captured is passed over."""
    cdef kina_runtime *runtime = runtime_after(device, NULL)
    cdef CUstream own
    cdef CUresult code = CUDA_SUCCESS
    while runtime != NULL:
        if code == CUDA_SUCCESS:
            code = wait_for_work(runtime)
        runtime = runtime_after(device, runtime)
    if code == CUDA_SUCCESS:
        code = streams_wait_idle(device)
    own = private_if_made(device)
    if code == CUDA_SUCCESS and own != NULL:
        code = cu.cuStreamSynchronize(own)
    return code


cdef void trim_listed(kina_idle_pool *pool) noexcept nogil:
    while pool != NULL:
        cu.cuMemPoolTrimTo(pool.pool, 0)
        pool = pool.next


cdef void trim_driver_pools(driver_resource *self) noexcept nogil:
    cdef kina_device *device = self.device
    # Under the lock, so that no pool leaves the lists meanwhile; the driver's trim takes no lock of ours.
    pthread_mutex_lock(&device.mutex)
    trim_listed(device.idle_pools)
    trim_listed(device.lent_pools)
    pthread_mutex_unlock(&device.mutex)
    if self.adopted:
        cu.cuMemPoolTrimTo(self.entry.pool, 0)


cdef void count_wait(driver_resource *self, kina_stream *waiter) noexcept nogil:
    kina_add(&self.host_waits, 1)
    if waiter != NULL:
        kina_add(&(<kina_runtime *> waiter).counters.host_waits, 1)


cdef CUresult climb_ladder(driver_resource *self, void **out, size_t nbytes, CUstream stream, kina_stream *waiter,
                           bint may_wait) noexcept nogil:
    """The ways out of a full device, cheapest first; each is tried with a new attempt."""
    cdef kina_device *device = self.device
    cdef CUresult code
    harvest_device(device)
    release_held_frees(device)
    if may_wait:
        harvest_retired(device, True)
    # Every pool of the device gives back what it caches: one's cache must not starve another.
    pools_trim_device(device.ordinal, FREELY if may_wait else QUIETLY)
    trim_driver_pools(self)
    code = take(self, out, nbytes, stream)
    if code != CUDA_ERROR_OUT_OF_MEMORY or not may_wait:
        return code
    # Now it waits: frees of any Runtime that have not come to pass yet do so here.
    count_wait(self, waiter)
    code = wait_for_all(device)
    if code != CUDA_SUCCESS:
        return code
    code = take_after_waiting(self, out, nbytes, stream)
    if code != CUDA_ERROR_OUT_OF_MEMORY:
        return code
    # Quarantined memory is all that is left: only the whole device's end frees it.
    if wait_for_quarantined(device, &code):
        return take_after_waiting(self, out, nbytes, stream)
    # While somebody captures it cannot be waited for: then there is no room, and nothing else is wrong.
    return CUDA_ERROR_OUT_OF_MEMORY if code == CUDA_SUCCESS or 900 <= <int> code < 910 else code


cdef CUresult take_after_waiting(driver_resource *self, void **out, size_t nbytes, CUstream stream) noexcept nogil:
    cdef kina_device *device = self.device
    cdef CUresult code
    harvest_device(device)
    harvest_retired(device, True)
    pools_trim_device(device.ordinal, PATIENTLY)
    code = wait_for_all(device)  # for what has been freed in stream order
    if code != CUDA_SUCCESS:
        return code
    trim_driver_pools(self)
    return take(self, out, nbytes, stream)


# Resources ------------------------------------------------------------------------------------------------


cdef driver_resource *driver_resource_make(int ordinal, driver_memory kind, const kina_resource_vtable *functions,
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
    if process_is_forked():
        return  # whoever held the lock at the fork is not here to give it back
    if self.kind == POOLED and not self.adopted:
        give_pool_back(self)
    release_python_later(self.pool_owner)
    free(self)


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


cdef int take_or_climb(driver_resource *self, void **out, size_t nbytes, kina_stream *stream,
                       bint may_wait) noexcept nogil:
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
        code = climb_ladder(self, out, nbytes, native, stream, may_wait)
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


cdef int allocate(kina_resource *base, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    return take_or_climb(<driver_resource *> base, out, nbytes, stream, True)


cdef int try_allocate(kina_resource *base, void **out, size_t nbytes, kina_stream *stream,
                      bint may_wait) noexcept nogil:
    return take_or_climb(<driver_resource *> base, out, nbytes, stream, may_wait)


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


cdef void hold_free(driver_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef kina_device *device = self.device
    cdef kina_held_free *held = <kina_held_free *> calloc(1, sizeof(kina_held_free))
    if held == NULL:
        return  # leaked, and stays counted as live
    kina_retain(&self.base)
    kina_retain(stream)
    held.resource = &self.base
    held.stream = stream
    held.data = data
    held.nbytes = nbytes
    pthread_mutex_lock(&device.mutex)
    held.next = device.held_frees
    device.held_frees = held
    pthread_mutex_unlock(&device.mutex)


cdef void release_held_frees(kina_device *device) noexcept nogil:
    cdef kina_held_free *held
    cdef kina_held_free *following
    pthread_mutex_lock(&device.mutex)
    held = device.held_frees
    device.held_frees = NULL
    pthread_mutex_unlock(&device.mutex)
    while held != NULL:
        following = held.next
        held.resource.vtable.deallocate(held.resource, held.data, held.nbytes, held.stream)  # or is held again
        kina_release(held.resource)
        kina_release(held.stream)
        free(held)
        held = following


cdef CUresult free_ordered(driver_resource *self, void *data, size_t nbytes, kina_runtime *runtime) noexcept nogil:
    cdef CUresult code = CUDA_ERROR_OUT_OF_MEMORY
    pthread_mutex_lock(&runtime.mutex)  # no capture of kina's begins meanwhile: the free would become part of the graph
    if refuse_capture(runtime, b"free") == 0:
        code = cu.cuMemFreeAsync(<CUdeviceptr> data, <CUstream> runtime.stream.native)
        pthread_mutex_unlock(&runtime.mutex)
        return code
    pthread_mutex_unlock(&runtime.mutex)
    hold_free(self, data, nbytes, &runtime.stream)
    return code


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
    elif stream != NULL:
        code = free_ordered(self, data, nbytes, <kina_runtime *> stream)
    elif private_stream(self.device, &native) == 0:
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
    functions.try_allocate = try_allocate
    return functions


cdef kina_resource_vtable plain = unordered_functions(b"CudaMemoryResource")
cdef kina_resource_vtable managed = unordered_functions(b"ManagedMemoryResource")
cdef kina_resource_vtable pinned = unordered_functions(b"PinnedMemoryResource")
cdef kina_resource_vtable pooled = unordered_functions(b"CudaAsyncMemoryResource")
pooled.supports_streams = 1
plain_functions = &plain
managed_functions = &managed
pinned_functions = &pinned
pooled_functions = &pooled


cdef int64_t driver_resource_live_bytes(driver_resource *self) noexcept nogil:
    return kina_count(&self.live_bytes, 0)


cdef driver_resource *pooled_make(int ordinal) except NULL:
    cdef driver_resource *made = driver_resource_make(ordinal, PLAIN, pooled_functions, KINA_DEVICE_CUDA)
    cdef CUresult code = CUDA_SUCCESS
    cdef int pushed, status = 0
    if not made.device.pools_supported:
        return made
    with nogil:
        pushed = context_begin(made.device, pooled_functions.name)
        if pushed >= 0:
            code = take_pool(made)
            context_end(pushed)
            if code != CUDA_SUCCESS:
                status = device_failed(made.device, code, KINA_DRIVER, pooled_functions.name,
                                       b"the memory pool could not be set up")
    if pushed < 0 or status != 0:
        free(made)
        check(-1 if pushed < 0 else status)
    return made


cdef kina_resource *memory_of_device(kina_device *device) except NULL:
    cdef driver_resource *made
    if device.memory == NULL:
        made = pooled_make(device.ordinal)  # without the GIL for a while
        if device.memory != NULL:
            kina_release(made)
        else:
            device.memory = &made.base
    return device.memory
