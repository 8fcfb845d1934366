"""Retirement: nothing is released before the device is done with it.

Stream order protects memory that is freed back to its home stream. Everything else that an enqueue uses is leased
in the stream's open segment; a seal records one event for the segment; harvest releases what completed seals
protected. Lists change under the lock, releases happen outside it: they may run anybody's code.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from kina._core.pool cimport pools_settle, stream_awaited, stream_passed
from kina._core.status cimport KINA_OUT_OF_MEMORY, KINA_SYNCHRONIZE, fail
from kina._core.storage cimport (
    KINA_STORAGE_ADOPTED,
    kina_handle,
    kina_release,
    kina_retain,
    kina_storage,
    storage_release_now,
)
from kina.cuda.capture cimport (
    capture_lease,
    is_capturing,
    record_seal,
    refuse_capture,
    release_dropped_captures,
)
from kina.cuda.context cimport (
    context_begin,
    context_end,
    device_after,
    device_check,
    device_failed,
    device_is_gone,
    runtime_after,
)
from kina.cuda.cudatypes cimport (
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, driver_is_silent, process_is_forked, relaxed_begin, relaxed_end
from kina.cuda.event cimport seal_query, seal_record, seal_wait
from kina.cuda.handles cimport (
    KINA_OWNER,
    kina_add,
    kina_count_holding,
    kina_device,
    kina_leases_add,
    kina_leases_end,
    kina_load,
    kina_load_u64,
    kina_module,
    kina_orphan_storage,
    kina_runtime,
    kina_seal,
    kina_segment,
    kina_store,
    kina_swap_if,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.reaper cimport reaper_wake, set_reap

__all__ = []


cdef int lease(kina_runtime *runtime, void *handle, int urgent) noexcept nogil:
    cdef kina_segment *segment = runtime.open
    cdef int added
    if is_capturing(runtime):
        return capture_lease(runtime.capture, handle, urgent)
    if segment == NULL:
        segment = <kina_segment *> calloc(1, sizeof(kina_segment))
        if segment == NULL:
            return fail(KINA_OUT_OF_MEMORY, b"lease", b"no host memory for a lease")
        runtime.open = segment
        runtime.segment_number += 1
    added = kina_leases_add(&segment.leases, handle, urgent)
    if added < 0:
        return fail(KINA_OUT_OF_MEMORY, b"lease", b"no host memory for a lease")
    if added:
        kina_add(&runtime.counters.leases, 1)
    return 0


cdef int seal(kina_runtime *runtime, kina_seal **out) noexcept nogil:
    cdef kina_segment *segment = runtime.open
    cdef kina_seal *recorded = NULL
    cdef bint older, holding
    cdef int status
    if (segment == NULL or segment.leases.count == 0) and out == NULL:
        return 0
    status = refuse_capture(runtime, b"seal")  # the event would be the graph's, and tell nothing
    if status != 0:
        return status
    status = seal_record(runtime.device, <CUstream> runtime.stream.native, &recorded, b"seal")
    if status != 0:
        return status
    recorded.number = runtime.segment_number
    kina_add(&runtime.counters.events_recorded, 1)
    kina_add(&runtime.counters.seals, 1)
    if out != NULL:
        kina_retain(recorded)
        out[0] = recorded
    if segment == NULL or segment.leases.count == 0:
        kina_release(recorded)
        return 0
    segment.seal = recorded
    segment.next = NULL
    runtime.open = NULL
    holding = segment.leases.urgent & KINA_OWNER != 0
    if holding:
        kina_count_holding(&runtime.device.holding, 1)
    pthread_mutex_lock(&runtime.mutex)
    older = runtime.oldest != NULL
    if older:
        runtime.newest.next = segment
    else:
        runtime.oldest = segment
    runtime.newest = segment
    runtime.pending_leases += segment.leases.count
    pthread_mutex_unlock(&runtime.mutex)
    if holding:
        reaper_wake()  # nobody of this process may ever come by again
    if older:
        harvest(runtime)
    return 0


cdef int seal_if_urgent(kina_runtime *runtime) noexcept nogil:
    if runtime.open == NULL or runtime.open.leases.urgent == 0:
        return 0
    return seal(runtime, NULL)


cdef void release_segment(kina_segment *segment) noexcept nogil:
    cdef int urgent = segment.leases.urgent
    kina_leases_end(&segment.leases)
    if urgent & KINA_OWNER and segment.seal != NULL:
        kina_count_holding(&segment.seal.device.holding, -1)
    kina_release(segment.seal)
    free(segment)


cdef kina_segment *detach_all(kina_runtime *runtime, kina_segment **newest) noexcept nogil:
    cdef kina_segment *segment
    pthread_mutex_lock(&runtime.mutex)
    segment = runtime.oldest
    newest[0] = runtime.newest
    runtime.oldest = NULL
    runtime.newest = NULL
    runtime.pending_leases = 0
    pthread_mutex_unlock(&runtime.mutex)
    return segment


cdef kina_segment *detach_oldest(kina_runtime *runtime, kina_seal *expected) noexcept nogil:
    """Take the oldest segment off the list, unless another thread was faster. It is told by its seal, which the caller
    holds: at the address of a segment that is gone there may be a newer one."""
    cdef kina_segment *segment
    pthread_mutex_lock(&runtime.mutex)
    segment = runtime.oldest
    if segment != NULL and segment.seal != expected:
        segment = NULL
    if segment != NULL:
        runtime.oldest = segment.next
        if runtime.oldest == NULL:
            runtime.newest = NULL
        runtime.pending_leases -= segment.leases.count
    pthread_mutex_unlock(&runtime.mutex)
    return segment


cdef uint64_t leases_pending(kina_runtime *runtime) noexcept nogil:
    cdef uint64_t sealed
    pthread_mutex_lock(&runtime.mutex)
    sealed = runtime.pending_leases
    pthread_mutex_unlock(&runtime.mutex)
    return sealed + <uint64_t> (runtime.open.leases.count if runtime.open != NULL else 0)


cdef kina_seal *oldest_seal(kina_runtime *runtime) noexcept nogil:
    """A reference to the seal of the oldest segment, which may be gone at any time; NULL without one."""
    cdef kina_seal *oldest = NULL
    pthread_mutex_lock(&runtime.mutex)
    if runtime.oldest != NULL:
        oldest = runtime.oldest.seal
        kina_retain(oldest)
    pthread_mutex_unlock(&runtime.mutex)
    return oldest


cdef void harvest(kina_runtime *runtime) noexcept nogil:
    harvest_completed(runtime)
    harvest_orphans(runtime.device)
    release_dropped_captures(runtime.device)


cdef void harvest_device(kina_device *device) noexcept nogil:
    cdef kina_runtime *runtime = runtime_after(device, NULL)
    while runtime != NULL:
        harvest_completed(runtime)
        runtime = runtime_after(device, runtime)
    harvest_orphans(device)
    release_dropped_captures(device)


cdef int reap() noexcept nogil:
    """On the reaper's thread: what was sealed with foreign owners is released soon after the device is past it, though
    nobody uses kina any more. How many such segments are left."""
    cdef kina_device *device = device_after(NULL)
    cdef kina_runtime *runtime
    cdef int left = 0
    while device != NULL:
        if kina_load(&device.holding) > 0 and device_check(device, b"reap") == 0:  # else it is leaked
            runtime = runtime_after(device, NULL)
            while runtime != NULL:
                kina_add(&runtime.counters.reaped, harvest_completed(runtime))
                runtime = runtime_after(device, runtime)
            harvest_orphans(device)
            left += kina_load(&device.holding)
        release_dropped_captures(device)
        device = device_after(device)
    return left


set_reap(reap)


cdef int harvest_completed(kina_runtime *runtime) noexcept nogil:
    """How many leases it released."""
    cdef kina_segment *segment
    cdef kina_seal *oldest
    cdef int complete
    cdef int released = 0
    while True:
        oldest = oldest_seal(runtime)
        if oldest == NULL:
            break
        if not kina_load(&oldest.complete):
            kina_add(&runtime.counters.event_queries, 1)
        complete = seal_query(oldest)
        if complete == 1:
            segment = detach_oldest(runtime, oldest)
            if segment != NULL:
                released += segment.leases.count
                kina_add(&runtime.counters.retired, segment.leases.count)
                release_segment(segment)
        kina_release(oldest)
        if complete != 1:
            break  # later seals of one stream cannot be complete before it; a failure has poisoned the device
    return released


cdef void harvest_orphans(kina_device *device) noexcept nogil:
    """Segments of Runtimes that are gone: taken whole, and what is not complete goes back before anything is released.
    Who comes meanwhile waits for that: a list that looks empty would say that there is no memory to be had."""
    cdef kina_segment *segment
    cdef kina_segment *following
    cdef kina_segment *complete = NULL
    cdef kina_segment *kept = NULL
    cdef kina_segment *last = NULL
    pthread_mutex_lock(&device.looking)
    pthread_mutex_lock(&device.mutex)
    segment = device.orphans
    device.orphans = NULL
    pthread_mutex_unlock(&device.mutex)
    while segment != NULL:
        following = segment.next
        if seal_query(segment.seal) == 1:
            segment.next = complete
            complete = segment
        else:
            segment.next = kept
            kept = segment
            if last == NULL:
                last = segment
        segment = following
    if kept != NULL:
        pthread_mutex_lock(&device.mutex)
        last.next = device.orphans
        device.orphans = kept
        pthread_mutex_unlock(&device.mutex)
    pthread_mutex_unlock(&device.looking)
    release_segments(complete)


cdef void release_segments(kina_segment *segment) noexcept nogil:
    cdef kina_segment *following
    while segment != NULL:
        following = segment.next
        release_segment(segment)
        segment = following


cdef void harvest_retired(kina_device *device, bint all) noexcept nogil:
    """As harvest_orphans. A release may wait for the device (cuMemFree does), so this is no part of the harvest of
    every seal."""
    cdef kina_segment *segment
    cdef kina_segment *tail
    cdef kina_segment *last = NULL
    cdef kina_segment *following
    cdef kina_segment *complete = NULL
    cdef kina_segment *kept = NULL
    cdef kina_segment **place = &kept
    pthread_mutex_lock(&device.looking)
    pthread_mutex_lock(&device.mutex)
    segment = device.retired
    tail = device.retired_last
    device.retired = NULL
    device.retired_last = NULL
    pthread_mutex_unlock(&device.mutex)
    while segment != NULL and (kept == NULL or all):
        following = segment.next
        if seal_query(segment.seal) == 1:
            segment.next = complete
            complete = segment
        else:
            segment.next = NULL
            place[0] = segment
            place = &segment.next
            last = segment
        segment = following
    if kept != NULL:
        if segment != NULL:  # the rest was not looked at
            place[0] = segment
            last = tail
        pthread_mutex_lock(&device.mutex)
        last.next = device.retired
        device.retired = kept
        if device.retired_last == NULL:
            device.retired_last = last
        pthread_mutex_unlock(&device.mutex)
    pthread_mutex_unlock(&device.looking)
    release_segments(complete)


cdef int wait_for_retired(kina_device *device) noexcept nogil:
    cdef kina_seal *oldest = NULL
    cdef int status
    pthread_mutex_lock(&device.looking)
    pthread_mutex_lock(&device.mutex)
    if device.retired != NULL:
        oldest = device.retired.seal
        kina_retain(oldest)
    pthread_mutex_unlock(&device.mutex)
    pthread_mutex_unlock(&device.looking)
    if oldest == NULL:
        return 1
    status = seal_wait(oldest, b"wait for dropped memory")
    kina_release(oldest)
    if status == 0:
        harvest_retired(device, True)
    return status


cdef int retire_storage(kina_storage *storage) noexcept nogil:
    cdef kina_runtime *runtime = <kina_runtime *> storage.stream
    cdef kina_device *device = runtime.device
    cdef kina_segment *segment
    cdef int pushed, status
    if driver_is_silent():
        return 1  # leaked: its uses may not be over
    if storage.data == NULL or device_is_gone(device):
        return 0
    segment = segment_of(storage)
    pushed = -1
    if segment != NULL:
        pushed = context_begin(device, b"release memory")
    status = -1
    if pushed >= 0:
        status = record_seal(runtime, &segment.seal, b"release memory")
        context_end(pushed)
    if status != 0:
        if segment != NULL:
            free(segment.leases.handles)
            free(segment)
        return quarantine(storage)
    kina_add(&runtime.counters.events_recorded, 1)
    # The last reference went, and comes back for the segment: when that drops it, the memory is given back.
    storage.before_release = NULL
    storage.handle.references = 1
    if storage.flags & KINA_STORAGE_ADOPTED:
        put_orphan(device, segment)  # the driver frees nothing there, so every harvest may do it
        return 1
    pthread_mutex_lock(&device.mutex)
    if device.retired_last != NULL:
        device.retired_last.next = segment
    else:
        device.retired = segment
    device.retired_last = segment
    pthread_mutex_unlock(&device.mutex)
    return 1


cdef void put_orphan(kina_device *device, kina_segment *segment) noexcept nogil:
    segment.leases.urgent = KINA_OWNER
    kina_count_holding(&device.holding, 1)
    pthread_mutex_lock(&device.mutex)
    segment.next = device.orphans
    device.orphans = segment
    pthread_mutex_unlock(&device.mutex)
    reaper_wake()


cdef kina_segment *segment_of(kina_storage *storage) noexcept nogil:
    cdef kina_segment *segment = <kina_segment *> calloc(1, sizeof(kina_segment))
    if segment == NULL:
        return NULL
    segment.leases.handles = <kina_handle **> calloc(1, sizeof(kina_handle *))
    if segment.leases.handles == NULL:
        free(segment)
        return NULL
    segment.leases.handles[0] = &storage.handle
    segment.leases.count = 1
    segment.leases.capacity = 1
    return segment


cdef bint wait_for_quarantined(kina_device *device, CUresult *code) noexcept nogil:
    cdef kina_orphan_storage *kept = take_quarantine(device)
    code[0] = CUDA_SUCCESS
    if kept == NULL:
        return False
    if kina_load(&device.captures) != 0:  # which the wait would end
        restore_quarantine(device, kept)
        return False
    code[0] = wait_for_device(device)
    if code[0] != CUDA_SUCCESS:
        restore_quarantine(device, kept)
        return False
    release_quarantine(kept)
    return True


cdef CUresult wait_for_device(kina_device *device) noexcept nogil:
    cdef uint64_t number = kina_add(&device.waits_begun, 1)
    cdef uint64_t passed = kina_load_u64(&device.waits_passed)
    cdef CUresult code = cu.cuCtxSynchronize(device.context)
    if code == CUDA_SUCCESS:
        while passed < number and not kina_swap_if(&device.waits_passed, &passed, number):
            pass
    return code


cdef kina_orphan_storage *take_quarantine(kina_device *device) noexcept nogil:
    cdef kina_orphan_storage *kept
    pthread_mutex_lock(&device.mutex)
    kept = device.quarantine
    device.quarantine = NULL
    pthread_mutex_unlock(&device.mutex)
    return kept


cdef void release_quarantine(kina_orphan_storage *kept) noexcept nogil:
    """Only after the whole device has been waited for."""
    cdef kina_orphan_storage *following
    while kept != NULL:
        following = kept.next
        storage_release_now(kept.storage)
        free(kept)
        kept = following


cdef void restore_quarantine(kina_device *device, kina_orphan_storage *kept) noexcept nogil:
    cdef kina_orphan_storage *following
    pthread_mutex_lock(&device.mutex)
    while kept != NULL:
        following = kept.next
        kept.next = device.quarantine
        device.quarantine = kept
        kept = following
    pthread_mutex_unlock(&device.mutex)


cdef int wait_for_oldest(kina_runtime *runtime) noexcept nogil:
    cdef kina_seal *oldest = oldest_seal(runtime)
    cdef int status
    if oldest == NULL:
        return 1
    kina_add(&runtime.counters.host_waits, 1)
    status = seal_wait(oldest, b"wait for a staging block")
    kina_release(oldest)
    if status == 0:
        harvest(runtime)
    return status


cdef int synchronize(kina_runtime *runtime) noexcept nogil:
    cdef kina_device *device = runtime.device
    cdef kina_orphan_storage *kept
    cdef kina_segment *segment
    cdef kina_segment *newest
    cdef kina_segment *following
    cdef kina_segment *open
    cdef bint whole
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    kina_add(&runtime.counters.synchronizations, 1)
    kina_add(&runtime.counters.host_waits, 1)
    kept = take_quarantine(device)
    stream_awaited(&runtime.stream)
    mode = relaxed_begin()
    # Quarantined memory was handed to streams that nobody knows: only the end of all the device's work frees it, and
    # lets the host read what such streams have.
    whole = kept != NULL or kina_load(&device.wait_wanted) != 0
    if whole and kina_load(&device.captures) == 0:
        code = wait_for_device(device)
        if code == CUDA_SUCCESS:
            kina_store(&device.wait_wanted, 0)
        if 900 <= <int> code < 910:
            # Somebody captures: the whole device cannot be waited for now, and the stream can.
            restore_quarantine(device, kept)
            kept = NULL
            code = cu.cuStreamSynchronize(<CUstream> runtime.stream.native)
    else:
        restore_quarantine(device, kept)
        kept = NULL
        code = cu.cuStreamSynchronize(<CUstream> runtime.stream.native)
    relaxed_end(mode)
    if code != CUDA_SUCCESS:
        restore_quarantine(device, kept)
        return device_failed(device, code, KINA_SYNCHRONIZE, b"synchronize", b"waiting for the stream failed")
    stream_passed(&runtime.stream)
    # Everything enqueued is done, sealed or not: no event need be asked. All of it is detached before anything is
    # released, for a release may run anybody's code, and what that enqueues and leases is not done.
    segment = detach_all(runtime, &newest)
    open = runtime.open
    runtime.open = NULL
    release_quarantine(kept)
    while segment != NULL:
        following = segment.next
        kina_add(&runtime.counters.retired, segment.leases.count)
        release_segment(segment)
        segment = following
    if open != NULL:
        kina_add(&runtime.counters.retired, open.leases.count)
        release_segment(open)
    harvest_retired(device, True)
    harvest_orphans(device)
    release_dropped_captures(device)
    pools_settle()
    unload_dead_modules(device)
    return 0


cdef void bury_module(kina_handle *handle) noexcept nogil:
    cdef kina_module *module = <kina_module *> handle
    cdef kina_device *device = module.device
    if process_is_forked():
        return  # whoever held the lock at the fork is not here to give it back
    pthread_mutex_lock(&device.mutex)
    module.next = device.dead_modules
    device.dead_modules = module
    pthread_mutex_unlock(&device.mutex)


cdef void unload_dead_modules(kina_device *device) noexcept nogil:
    """Whoever dropped the last reference, the device is past the last launch: every segment holds its own."""
    cdef kina_module *module
    cdef kina_module *following
    cdef CUstreamCaptureMode mode
    cdef int pushed
    cdef bint none
    if device_is_gone(device):
        return
    pthread_mutex_lock(&device.mutex)
    none = device.dead_modules == NULL
    pthread_mutex_unlock(&device.mutex)
    if none:
        return
    pushed = context_begin(device, b"unload module")
    if pushed < 0:
        return  # they wait for the next occasion
    pthread_mutex_lock(&device.mutex)
    module = device.dead_modules
    device.dead_modules = NULL
    pthread_mutex_unlock(&device.mutex)
    mode = relaxed_begin()
    while module != NULL:
        following = module.next
        cu.cuModuleUnload(module.module)
        free(module)
        module = following
    relaxed_end(mode)
    context_end(pushed)


cdef void orphan_segments(kina_runtime *runtime, bint current) noexcept nogil:
    cdef kina_device *device = runtime.device
    cdef kina_segment *oldest
    cdef kina_segment *newest
    if current:
        seal(runtime, NULL)
    if runtime.open != NULL:
        # It could not be sealed: when its work is done is not to be known, so it is never released.
        kina_add(&runtime.counters.leaked, runtime.open.leases.count)
        free(runtime.open.leases.handles)
        free(runtime.open)
        runtime.open = NULL
    oldest = detach_all(runtime, &newest)
    if oldest == NULL:
        return
    pthread_mutex_lock(&device.mutex)
    newest.next = device.orphans
    device.orphans = oldest
    pthread_mutex_unlock(&device.mutex)


cdef int quarantine(kina_storage *storage) noexcept nogil:
    """Kept until the whole device has been waited for."""
    cdef kina_runtime *runtime = <kina_runtime *> storage.stream
    cdef kina_device *device = runtime.device
    cdef kina_orphan_storage *kept
    kept = <kina_orphan_storage *> calloc(1, sizeof(kina_orphan_storage))
    if kept == NULL:
        kina_add(&runtime.counters.leaked, 1)
        return 1
    kept.storage = storage
    pthread_mutex_lock(&device.mutex)
    kept.next = device.quarantine
    device.quarantine = kept
    pthread_mutex_unlock(&device.mutex)
    return 1
