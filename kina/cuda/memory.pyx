"""Device memory: one driver memory pool per Runtime, its releases ordered on the Runtime's stream.

Source: CUDA Driver API, "Stream Ordered Memory Allocator".
"""

from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.pool cimport pools_trim_device
from kina._core.status cimport KINA_DRIVER, KINA_OUT_OF_MEMORY, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_RESOURCE_VERSION,
    kina_handle,
    kina_handle_init,
    kina_resource,
    kina_resource_vtable,
    kina_stream,
)
from kina.cuda.context cimport context_begin, context_end, device_failed, device_is_gone, runtime_after
from kina.cuda.cudatypes cimport (
    CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CU_STREAM_CAPTURE_STATUS_ACTIVE,
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUmemoryPool,
    CUmemPoolProps,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
)
from kina.cuda.driver cimport cu, driver_failed, relaxed_begin, relaxed_end
from kina.cuda.handles cimport (
    kina_add,
    kina_device,
    kina_device_pool,
    kina_idle_pool,
    kina_runtime,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.stream cimport stream_checkin, stream_checkout

__all__ = []


cdef enum:
    POOL_UNTRIED = 0
    POOL_READY = 1
    POOL_UNSUPPORTED = 2


cdef CUresult create_pool(kina_device_pool *pool) noexcept nogil:
    cdef CUresult code
    if not pool.runtime.device.pools_supported:
        pool.pool_state = POOL_UNSUPPORTED
        return CUDA_SUCCESS
    code = pool_checkout(pool.runtime.device, &pool.pool)
    if code == CUDA_SUCCESS:
        pool.pool_state = POOL_READY
    return code


cdef CUresult pool_checkout(kina_device *device, CUmemoryPool *out) noexcept nogil:
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


cdef CUresult try_allocate(kina_device_pool *pool, CUdeviceptr *out, size_t nbytes, CUstream stream) noexcept nogil:
    cdef CUresult code
    if pool.pool_state == POOL_UNTRIED:
        code = create_pool(pool)
        if code != CUDA_SUCCESS:
            return code
    if pool.pool_state == POOL_UNSUPPORTED:
        return cu.cuMemAlloc(out, nbytes)
    return cu.cuMemAllocFromPoolAsync(out, nbytes, pool.pool, stream)


cdef void trim_all_pools(kina_device *device) noexcept nogil:
    """Every pool, Runtime and resource of the device gives back what it caches: one's cache must not starve another."""
    cdef kina_runtime *runtime
    pools_trim_device(device.ordinal)
    # Under the lock, so that no Runtime leaves the list meanwhile; the driver's trim takes no lock of ours.
    pthread_mutex_lock(&device.mutex)
    runtime = device.runtimes
    while runtime != NULL:
        if runtime.pool.pool_state == POOL_READY:
            cu.cuMemPoolTrimTo(runtime.pool.pool, 0)
        runtime = runtime.next
    trim_listed(device.idle_pools)
    trim_listed(device.lent_pools)
    pthread_mutex_unlock(&device.mutex)


cdef void trim_listed(kina_idle_pool *pool) noexcept nogil:
    while pool != NULL:
        cu.cuMemPoolTrimTo(pool.pool, 0)
        pool = pool.next


cdef CUresult climb_ladder(kina_device_pool *pool, CUdeviceptr *out, size_t nbytes, CUstream stream) noexcept nogil:
    """The ways out of a full device, cheapest first; each is tried with a new attempt."""
    cdef kina_runtime *runtime = pool.runtime
    cdef CUresult code
    pool.harvest(runtime, 0)
    trim_all_pools(runtime.device)
    code = try_allocate(pool, out, nbytes, stream)
    if code != CUDA_ERROR_OUT_OF_MEMORY:
        return code
    # Now it waits: frees of any Runtime that have not come to pass yet do so here.
    kina_add(&runtime.counters.host_waits, 1)
    code = wait_for_all(runtime.device)
    if code != CUDA_SUCCESS:
        return code
    pool.harvest(runtime, 0)
    code = wait_for_all(runtime.device)  # for what the harvest has freed in stream order
    if code != CUDA_SUCCESS:
        return code
    trim_all_pools(runtime.device)
    code = try_allocate(pool, out, nbytes, stream)
    if code != CUDA_ERROR_OUT_OF_MEMORY or runtime.device.quarantine == NULL:
        return code
    # Quarantined memory is all that is left: only the whole device's end frees it.
    code = cu.cuCtxSynchronize(runtime.device.context)
    if code != CUDA_SUCCESS:
        # While somebody captures it cannot be waited for: then there is no room, and nothing else is wrong.
        return CUDA_ERROR_OUT_OF_MEMORY if 900 <= <int> code < 910 else code
    pool.harvest(runtime, 1)
    code = wait_for_all(runtime.device)
    if code != CUDA_SUCCESS:
        return code
    trim_all_pools(runtime.device)
    return try_allocate(pool, out, nbytes, stream)


cdef CUresult wait_for_all(kina_device *device) noexcept nogil:
    """Wait for the stream of every Runtime of the device. Not for the device: that would end captures of others, which
    even RELAXED mode does not prevent; and a stream that is being captured is passed over."""
    cdef kina_runtime *runtime = runtime_after(device, NULL)
    cdef CUstreamCaptureStatus capturing
    cdef CUstream own
    cdef CUresult code = CUDA_SUCCESS
    while runtime != NULL:
        capturing = CU_STREAM_CAPTURE_STATUS_NONE
        if runtime.adopted and cu.cuStreamIsCapturing(<CUstream> runtime.stream.native, &capturing) != CUDA_SUCCESS:
            capturing = CU_STREAM_CAPTURE_STATUS_ACTIVE
        if code == CUDA_SUCCESS and capturing == CU_STREAM_CAPTURE_STATUS_NONE:
            code = cu.cuStreamSynchronize(<CUstream> runtime.stream.native)
        runtime = runtime_after(device, runtime)
    own = private_if_made(device)
    if code == CUDA_SUCCESS and own != NULL:
        code = cu.cuStreamSynchronize(own)
    return code


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
    if stream == NULL:
        return private_stream(device, out)
    out[0] = <CUstream> stream.native
    return 0


cdef int allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef kina_device_pool *pool = <kina_device_pool *> self
    cdef kina_runtime *runtime = pool.runtime
    cdef CUdeviceptr address = 0
    cdef CUstreamCaptureMode mode
    cdef CUstream native
    cdef CUresult code
    cdef int status
    cdef int pushed = context_begin(runtime.device, b"allocate")
    if pushed < 0:
        return last_error().detail
    status = stream_or_private(runtime.device, stream, &native)
    if status != 0:
        context_end(pushed)
        return status
    mode = relaxed_begin()
    code = try_allocate(pool, &address, nbytes, native)
    if code == CUDA_ERROR_OUT_OF_MEMORY:
        code = climb_ladder(pool, &address, nbytes, native)
    if code == CUDA_SUCCESS and stream == NULL:  # usable at once, everywhere
        kina_add(&runtime.counters.host_waits, 1)
        code = cu.cuStreamSynchronize(native)
    relaxed_end(mode)
    context_end(pushed)
    if code != CUDA_SUCCESS:
        return out_of_memory(pool, code, nbytes)
    out[0] = <void *> address
    kina_add(&runtime.counters.allocations, 1)
    kina_add(&pool.live_bytes, nbytes)
    return 0


cdef int out_of_memory(kina_device_pool *pool, CUresult code, size_t nbytes) noexcept nogil:
    cdef kina_device *device = pool.runtime.device
    cdef size_t available = 0
    cdef size_t total = 0
    cdef int pushed
    if code != CUDA_ERROR_OUT_OF_MEMORY:
        return device_failed(device, code, KINA_DRIVER, b"allocate", b"device memory could not be allocated")
    pushed = context_begin(device, b"allocate")
    if pushed >= 0:
        cu.cuMemGetInfo(&available, &total)
        context_end(pushed)
    snprintf(last_error().message, sizeof(last_error().message),
             "cuda:%d has no room for %zu bytes: this Runtime has %llu bytes live, the device %zu of %zu bytes free",
             device.ordinal, nbytes, <unsigned long long> pool.live_bytes, available, total)
    return driver_failed(code, KINA_OUT_OF_MEMORY, b"allocate", last_error().message)


cdef void deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    """In the order of the home stream, from any thread. What cannot be freed any more is leaked."""
    cdef kina_device_pool *pool = <kina_device_pool *> self
    cdef kina_runtime *runtime = pool.runtime
    cdef CUstreamCaptureMode mode
    cdef CUstream native
    cdef CUresult code
    cdef int pushed
    if device_is_gone(runtime.device):
        kina_add(&runtime.counters.leaked, 1)
        return
    pushed = context_begin(runtime.device, b"free")
    if pushed < 0:
        kina_add(&runtime.counters.leaked, 1)
        return
    if stream_or_private(runtime.device, stream, &native) != 0:
        context_end(pushed)
        kina_add(&runtime.counters.leaked, 1)
        return
    mode = relaxed_begin()
    if pool.pool_state == POOL_UNSUPPORTED:
        kina_add(&runtime.counters.host_waits, 1)  # cuMemFree waits for the device
        code = cu.cuMemFree(<CUdeviceptr> data)
    else:
        code = cu.cuMemFreeAsync(<CUdeviceptr> data, native)
    relaxed_end(mode)
    context_end(pushed)
    if code != CUDA_SUCCESS:
        kina_add(&runtime.counters.leaked, 1)
        return
    kina_add(&runtime.counters.frees, 1)
    kina_add(&pool.live_bytes, <uint64_t> (-<long long> nbytes))


cdef void lives_with_its_runtime(kina_handle *self) noexcept nogil:
    pass


cdef kina_resource_vtable vtable
vtable.version = KINA_RESOURCE_VERSION
vtable.supports_streams = 1
vtable.name = b"CudaAsyncMemoryResource"
vtable.allocate = allocate
vtable.deallocate = deallocate


cdef void pool_init(kina_runtime *runtime, void (*harvest)(kina_runtime *, int) noexcept nogil) noexcept nogil:
    runtime.pool.harvest = harvest
    kina_handle_init(&runtime.pool.resource.handle, lives_with_its_runtime)
    runtime.pool.resource.vtable = &vtable
    runtime.pool.resource.device_type = KINA_DEVICE_CUDA
    runtime.pool.resource.device_id = runtime.device.ordinal
    runtime.pool.runtime = runtime


cdef void pool_shelve(kina_runtime *runtime) noexcept nogil:
    if runtime.pool.pool_state == POOL_READY:
        pool_checkin(runtime.device, runtime.pool.pool)


cdef void pool_checkin(kina_device *device, CUmemoryPool pool) noexcept nogil:
    """Not destroyed: frees may be pending on its stream, and drivers were seen to crash over that (docs/adr/0006). So a
    device has as many pools as it ever had Runtimes and resources at once."""
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


cdef void pool_usage(kina_runtime *runtime, uint64_t *reserved, uint64_t *used) noexcept nogil:
    reserved[0] = 0
    used[0] = 0
    if runtime.pool.pool_state == POOL_READY:
        pool_figures(runtime.pool.pool, reserved, used)


cdef void pool_figures(CUmemoryPool pool, uint64_t *reserved, uint64_t *used) noexcept nogil:
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cu.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, reserved)
    cu.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, used)
    relaxed_end(mode)
