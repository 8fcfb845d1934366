"""Explicit, ordered transfers between host and device through a bounded ring of pinned blocks.

Source: CUDA Driver API, "Memory Management" (cuMemcpyHtoDAsync, cuMemcpyDtoHAsync, cuMemsetD*Async).
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from kina._core.status cimport KINA_DRIVER, KINA_OUT_OF_MEMORY, fail
from kina._core.storage cimport kina_handle, kina_handle_init, kina_release
from kina.cuda.context cimport device_failed
from kina.cuda.cudatypes cimport (
    CU_MEMHOSTALLOC_PORTABLE,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, process_is_forked, relaxed_begin, relaxed_end
from kina.cuda.event cimport seal_wait
from kina.cuda.handles cimport (
    KINA_STAGING,
    KINA_STAGING_BLOCKS,
    kina_add,
    kina_device,
    kina_runtime,
    kina_seal,
    kina_staging,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.retire cimport harvest, harvest_device, lease, seal, seal_if_full, wait_for_oldest

__all__ = []

cdef enum:
    SMALL_BYTES = 64 << 10
    LARGE_BYTES = 4 << 20
    DOWNLOAD_DEPTH = 3  # chunks on their way while the host copies an earlier one out


cdef inline size_t class_bytes(int size_class) noexcept nogil:
    return SMALL_BYTES if size_class == 0 else LARGE_BYTES


cdef void shelve_staging(kina_handle *handle) noexcept nogil:
    """Back to the device's idle list. Never freed: that would wait for the device, behind somebody's release."""
    cdef kina_staging *block = <kina_staging *> handle
    cdef kina_device *device = block.device
    if process_is_forked():
        return  # whoever held the lock at the fork is not here to give it back
    kina_handle_init(&block.handle, shelve_staging)
    pthread_mutex_lock(&device.mutex)
    block.next = device.idle_staging[block.size_class]
    device.idle_staging[block.size_class] = block
    pthread_mutex_unlock(&device.mutex)


cdef kina_staging *take_idle(kina_device *device, int which, bint *may_grow) noexcept nogil:
    cdef kina_staging *block
    pthread_mutex_lock(&device.mutex)
    block = device.idle_staging[which]
    if block != NULL:
        device.idle_staging[which] = block.next
    elif may_grow[0] or device.staging_count[which] < KINA_STAGING_BLOCKS:
        device.staging_count[which] += 1
        may_grow[0] = True
    pthread_mutex_unlock(&device.mutex)
    return block


cdef int new_block(kina_device *device, int which, kina_staging **out) noexcept nogil:
    cdef kina_staging *block = <kina_staging *> calloc(1, sizeof(kina_staging))
    cdef CUstreamCaptureMode mode
    cdef CUresult code = CUDA_SUCCESS
    if block != NULL:
        mode = relaxed_begin()
        code = cu.cuMemHostAlloc(&block.data, class_bytes(which), CU_MEMHOSTALLOC_PORTABLE)
        relaxed_end(mode)
    if block == NULL or code != CUDA_SUCCESS:
        free(block)
        pthread_mutex_lock(&device.mutex)
        device.staging_count[which] -= 1
        pthread_mutex_unlock(&device.mutex)
        if code != CUDA_SUCCESS:
            return device_failed(device, code, KINA_DRIVER, b"transfer", b"pinned memory could not be allocated")
        return fail(KINA_OUT_OF_MEMORY, b"transfer", b"no host memory for a staging block")
    kina_handle_init(&block.handle, shelve_staging)
    block.device = device
    block.size_class = which
    out[0] = block
    return 0


cdef int take_block(kina_runtime *runtime, int which, kina_staging **out) noexcept nogil:
    """A pinned block. With the ring full it waits for this Runtime's own oldest seal, and for nothing else."""
    cdef kina_device *device = runtime.device
    cdef kina_staging *block
    cdef bint may_grow = False
    cdef bint harvested = False
    cdef int status
    while True:
        block = take_idle(device, which, &may_grow)
        if block != NULL:
            out[0] = block
            return 0
        if may_grow:
            kina_add(&runtime.counters.host_waits, 1)  # pinning memory may wait for the device
            return new_block(device, which, out)
        if not harvested:
            harvest_device(device)  # blocks whose copies are done, of whatever Runtime
            harvested = True
            continue
        status = seal(runtime, NULL)
        if status == 0:
            status = wait_for_oldest(runtime)
        if status == 1:
            # Other Runtimes hold the whole ring, and waiting for them would tie us to their work: it grows by one. So
            # it has at most as many blocks more as Runtimes were in this place at once.
            may_grow = True
        elif status != 0:
            return status


cdef int upload(kina_runtime *runtime, CUdeviceptr target, const char *source, size_t nbytes) noexcept nogil:
    cdef int which = 0 if nbytes <= SMALL_BYTES else 1
    cdef kina_staging *block = NULL
    cdef size_t chunk
    cdef CUresult code
    cdef int status
    while nbytes > 0:
        chunk = min(nbytes, class_bytes(which))
        status = take_block(runtime, which, &block)
        if status != 0:
            return status
        memcpy(block.data, source, chunk)
        status = lease(runtime, block, KINA_STAGING)
        if status == 0:
            code = cu.cuMemcpyHtoDAsync(target, block.data, chunk, <CUstream> runtime.stream.native)
            if code != CUDA_SUCCESS:
                status = device_failed(runtime.device, code, KINA_DRIVER, b"from_host",
                                       b"the copy to the device was refused")
        kina_release(block)
        if status != 0:
            return status
        runtime.counters.bytes_to_device += chunk
        target += chunk
        source += chunk
        nbytes -= chunk
        if nbytes > 0:
            status = seal(runtime, NULL)  # so that the ring turns while the transfer runs
            if status != 0:
                return status
    seal_if_full(runtime)
    return 0


cdef int start_download(kina_runtime *runtime, CUdeviceptr source, size_t nbytes, int which,
                        kina_staging **block, kina_seal **done) noexcept nogil:
    cdef CUresult code
    cdef int status = take_block(runtime, which, block)
    if status != 0:
        return status
    # Leased as well as held: should the transfer break off, the device may still be writing to it.
    status = lease(runtime, block[0], KINA_STAGING)
    if status == 0:
        code = cu.cuMemcpyDtoHAsync(block[0].data, source, nbytes, <CUstream> runtime.stream.native)
        if code != CUDA_SUCCESS:
            status = device_failed(runtime.device, code, KINA_DRIVER, b"to_host",
                                   b"the copy from the device was refused")
    if status == 0:
        status = seal(runtime, done)
    if status != 0:
        kina_release(block[0])
    return status


cdef int download(kina_runtime *runtime, char *target, CUdeviceptr source, size_t nbytes) noexcept nogil:
    cdef int which = 0 if nbytes <= SMALL_BYTES else 1
    cdef kina_staging *blocks[DOWNLOAD_DEPTH]
    cdef kina_seal *seals[DOWNLOAD_DEPTH]
    cdef size_t step = class_bytes(which)
    cdef size_t started = 0
    cdef size_t finished = 0
    cdef size_t chunk
    cdef int slot, status = 0
    cdef int first = 0
    cdef int flying = 0
    if nbytes > 0:
        kina_add(&runtime.counters.host_waits, 1)
    while finished < nbytes:
        while status == 0 and flying < DOWNLOAD_DEPTH and started < nbytes:
            slot = (first + flying) % DOWNLOAD_DEPTH
            chunk = min(step, nbytes - started)
            status = start_download(runtime, source + started, chunk, which, &blocks[slot], &seals[slot])
            if status == 0:
                started += chunk
                flying += 1
        if flying == 0:
            return status
        if status == 0:
            status = seal_wait(seals[first], b"to_host")
        if status == 0:
            chunk = min(step, nbytes - finished)
            memcpy(target + finished, blocks[first].data, chunk)
            finished += chunk
        kina_release(seals[first])
        kina_release(blocks[first])
        first = (first + 1) % DOWNLOAD_DEPTH
        flying -= 1
    if status == 0:
        runtime.counters.bytes_to_host += nbytes
        harvest(runtime)
    return status


cdef int fill(
    kina_runtime *runtime, CUdeviceptr target, int64_t count, int itemsize, const void *element
) noexcept nogil:
    cdef CUstream stream = <CUstream> runtime.stream.native
    cdef const uint8_t *octets = <const uint8_t *> element
    cdef uint16_t half
    cdef uint32_t words[4]
    cdef int i, parts
    cdef bint alike = True
    cdef CUresult code = CUDA_SUCCESS
    if count == 0:
        return 0
    for i in range(1, itemsize):
        alike = alike and octets[i] == octets[0]
    if alike:
        code = cu.cuMemsetD8Async(target, octets[0], <size_t> count * itemsize, stream)
    elif itemsize == 2:
        memcpy(&half, element, 2)
        code = cu.cuMemsetD16Async(target, half, <size_t> count, stream)
    else:
        parts = itemsize // 4
        memcpy(words, element, itemsize)
        if parts == 1 or (parts == 2 and words[0] == words[1]):
            code = cu.cuMemsetD32Async(target, words[0], <size_t> count * parts, stream)
        else:
            # The driver has no 8 or 16 byte memset: each word is a column, one element high per row.
            for i in range(parts):
                if code == CUDA_SUCCESS:
                    code = cu.cuMemsetD2D32Async(target + 4 * i, itemsize, words[i], 1, <size_t> count, stream)
    if code != CUDA_SUCCESS:
        return device_failed(runtime.device, code, KINA_DRIVER, b"fill", b"the fill was refused")
    return 0


cdef int copy_within(kina_runtime *runtime, CUdeviceptr target, CUdeviceptr source, size_t nbytes) noexcept nogil:
    cdef CUresult code
    if nbytes == 0:
        return 0
    code = cu.cuMemcpyDtoDAsync(target, source, nbytes, <CUstream> runtime.stream.native)
    if code != CUDA_SUCCESS:
        return device_failed(runtime.device, code, KINA_DRIVER, b"copy", b"the copy was refused")
    return 0
