"""Captures: what a graph's replays use, held from the capture on.

In a capture nothing runs, so no event can tell when the device is past it. What is leased then is leased to the graph,
what is allocated comes from a pool of the graph's own, and both go when no replay can come any more. Of kina's own
graphs that is known; other libraries' graphs hold a user object, whose destructor says so.

Source: CUDA Driver API, "Graph Management" (cuUserObjectCreate, cuGraphRetainUserObject) and "Stream Management"
(cuStreamGetCaptureInfo).
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc

from kina._core.pool cimport pool_dissolve
from kina._core.status cimport KINA_DRIVER, KINA_OUT_OF_MEMORY, KINA_UNSUPPORTED, fail
from kina._core.storage cimport kina_handle, kina_handle_init, kina_release, kina_resource, kina_retain
from kina.cuda.context cimport context_begin, context_end, device_failed, device_is_gone
from kina.cuda.cudatypes cimport (
    CU_GRAPH_USER_OBJECT_MOVE,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CU_STREAM_CAPTURE_STATUS_ACTIVE,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    CU_STREAM_CAPTURE_STATUS_NONE,
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
    CUDA_SUCCESS,
    CUgraph,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
    CUuserObject,
)
from kina.cuda.driver cimport cu, process_is_forked, relaxed_begin, relaxed_end
from kina.cuda.event cimport order_streams, seal_record
from kina.cuda.handles cimport (
    kina_count_captures,
    kina_device,
    kina_leases_add,
    kina_leases_end,
    kina_runtime,
    kina_seal,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.reaper cimport reaper_wake
from kina.cuda.stream cimport stream_refuse_capture

__all__ = []


cdef extern from *:
    """
    #define kina_take_capture(p, v) __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)
    static int kina_release_unless_last(kina_handle *handle) {
        int64_t seen = __atomic_load_n(&handle->references, __ATOMIC_RELAXED);
        while (seen > 1)
            if (__atomic_compare_exchange_n(&handle->references, &seen, seen - 1, 1, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED))
                return 1;
        return 0;
    }
    /* The driver's own thread pushes, and takes no lock of ours. */
    static void kina_push_capture(kina_capture **list, kina_capture *one) {
        one->next = __atomic_load_n(list, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(list, &one->next, one, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
    }
    """
    kina_capture *kina_take_capture(kina_capture **p, kina_capture *v) noexcept nogil
    bint kina_release_unless_last(kina_handle *handle) noexcept nogil
    void kina_push_capture(kina_capture **list, kina_capture *one) noexcept nogil


cdef void destroy_capture(kina_handle *handle) noexcept nogil:
    """No replay can come any more, and the device is past all that were. Any thread."""
    cdef kina_capture *capture = <kina_capture *> handle
    cdef kina_device *device = capture.device
    cdef CUstreamCaptureMode mode
    cdef int i, pushed
    if process_is_forked():
        return
    if capture.graph != NULL and not device_is_gone(device):
        pushed = context_begin(device, b"graph")
        if pushed >= 0:
            mode = relaxed_begin()
            cu.cuGraphExecDestroy(capture.graph)
            relaxed_end(mode)
            context_end(pushed)
    kina_leases_end(&capture.leases)
    for i in range(capture.pool_count):
        pool_dissolve(capture.pools[i])
    free(capture.pools)
    free(capture)


cdef kina_capture *capture_make(kina_device *device) noexcept nogil:
    cdef kina_capture *capture = <kina_capture *> calloc(1, sizeof(kina_capture))
    if capture != NULL:
        kina_handle_init(&capture.handle, destroy_capture)
        capture.device = device
    return capture


cdef int capture_add_pool(kina_capture *capture, kina_resource *pool) noexcept nogil:
    cdef kina_resource **grown
    grown = <kina_resource **> realloc(capture.pools, (capture.pool_count + 1) * sizeof(kina_resource *))
    if grown == NULL:
        pool_dissolve(pool)
        return fail(KINA_OUT_OF_MEMORY, b"capture", b"no host memory for a graph's memory")
    capture.pools = grown
    capture.pools[capture.pool_count] = pool
    capture.pool_count += 1
    return 0


cdef int capture_lease(kina_capture *capture, void *handle, int urgent) noexcept nogil:
    if kina_leases_add(&capture.leases, handle, urgent) < 0:
        return fail(KINA_OUT_OF_MEMORY, b"lease", b"no host memory for a lease")
    return 0


cdef void drop_later(void *given) noexcept nogil:
    """The driver calls this on a thread of its own, which may not call the driver."""
    cdef kina_capture *capture = <kina_capture *> given
    cdef kina_device *device = capture.device
    cdef bint holding = capture.leases.urgent != 0
    if process_is_forked():
        return
    kina_push_capture(&device.dropped_captures, capture)
    if holding:
        reaper_wake()


cdef void release_dropped_captures(kina_device *device) noexcept nogil:
    cdef kina_capture *capture = kina_take_capture(&device.dropped_captures, NULL)
    cdef kina_capture *following
    while capture != NULL:
        following = capture.next
        kina_release(capture)
        capture = following


cdef int capture_give(kina_capture *capture, CUgraph graph) noexcept nogil:
    cdef CUuserObject given = NULL
    cdef CUresult code = cu.cuUserObjectCreate(&given, capture, drop_later, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    if code == CUDA_SUCCESS:
        kina_retain(capture)  # the object's
        code = cu.cuGraphRetainUserObject(graph, given, 1, CU_GRAPH_USER_OBJECT_MOVE)
        if code != CUDA_SUCCESS:
            cu.cuUserObjectRelease(given, 1)
    if code != CUDA_SUCCESS:
        return device_failed(capture.device, code, KINA_DRIVER, b"capture",
                             b"the graph that the stream is captured into could not be made to hold memory")
    return 0


cdef CUresult capture_begin(kina_runtime *runtime, kina_capture *capture) noexcept nogil:
    cdef CUresult code
    # Under the lock: whoever records an event on the stream from another thread does so before, or is refused.
    pthread_mutex_lock(&runtime.mutex)
    kina_count_captures(&runtime.device.captures, 1)  # before: nobody waits for the whole device from here on
    code = cu.cuStreamBeginCapture(<CUstream> runtime.stream.native, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    if code == CUDA_SUCCESS:
        kina_take_capture(&runtime.capture, capture)  # there is none before
        runtime.segment_number += 1  # what was leased before is leased anew
    else:
        kina_count_captures(&runtime.device.captures, -1)
    pthread_mutex_unlock(&runtime.mutex)
    return code


cdef void capture_set(kina_runtime *runtime, kina_capture *capture) noexcept nogil:
    cdef kina_capture *before
    runtime.segment_number += 1
    if capture != NULL:
        kina_count_captures(&runtime.device.captures, 1)
    before = kina_take_capture(&runtime.capture, capture)
    if before == NULL:
        return
    kina_count_captures(&runtime.device.captures, -1)
    # Its end may run anybody's code, and this may be the middle of a call.
    if not kina_release_unless_last(&before.handle):
        drop_later(before)


cdef int order_after(kina_runtime *producer, CUstream waiter, const char *operation) noexcept nogil:
    cdef int status
    pthread_mutex_lock(&producer.mutex)  # no capture of kina's begins meanwhile: the waiter would come into it
    status = refuse_capture(producer, operation)
    if status == 0:
        status = order_streams(producer.device, <CUstream> producer.stream.native, waiter, operation)
    pthread_mutex_unlock(&producer.mutex)
    return status


cdef int order_behind(kina_runtime *waiter, CUstream producer, const char *operation) noexcept nogil:
    cdef int status
    pthread_mutex_lock(&waiter.mutex)  # nor does the waiter's graph wait for what is outside of it
    status = refuse_capture(waiter, operation)
    if status == 0:
        status = order_streams(waiter.device, producer, <CUstream> waiter.stream.native, operation)
    pthread_mutex_unlock(&waiter.mutex)
    return status


cdef int order_runtimes(kina_runtime *producer, kina_runtime *waiter, const char *operation) noexcept nogil:
    # Two locks of one kind are taken in the order of their addresses.
    cdef kina_runtime *first = producer if <uintptr_t> producer < <uintptr_t> waiter else waiter
    cdef kina_runtime *second = waiter if first == producer else producer
    cdef int status
    if producer.stream.native == waiter.stream.native:
        return 0
    pthread_mutex_lock(&first.mutex)
    pthread_mutex_lock(&second.mutex)
    status = refuse_capture(producer, operation)
    if status == 0:
        status = refuse_capture(waiter, operation)
    if status == 0:
        status = order_streams(waiter.device, <CUstream> producer.stream.native, <CUstream> waiter.stream.native,
                               operation)
    pthread_mutex_unlock(&second.mutex)
    pthread_mutex_unlock(&first.mutex)
    return status


cdef int record_seal(kina_runtime *runtime, kina_seal **out, const char *operation) noexcept nogil:
    cdef int status
    # In a capture the event would belong to the graph, and tell nothing of the stream. None begins under the lock.
    pthread_mutex_lock(&runtime.mutex)
    status = refuse_capture(runtime, operation)
    if status == 0:
        status = seal_record(runtime.device, <CUstream> runtime.stream.native, out, operation)
    pthread_mutex_unlock(&runtime.mutex)
    return status


cdef int refuse_capture(kina_runtime *runtime, const char *operation) noexcept nogil:
    if is_capturing(runtime):
        return fail(KINA_UNSUPPORTED, operation, b"the stream is being captured into a graph; end the capture first")
    if runtime.adopted:
        return stream_refuse_capture(runtime.device, <CUstream> runtime.stream.native, operation)
    return 0


cdef int ask_capture(kina_runtime *runtime, uint64_t *id, CUgraph *graph, const char *operation) noexcept nogil:
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code
    id[0] = 0
    code = cu.cuStreamGetCaptureInfo(<CUstream> runtime.stream.native, &status, id, graph, NULL, NULL, NULL)
    if code != CUDA_SUCCESS:
        # A legacy stream refuses to answer while a stream that it orders is being captured (900 to 909).
        return device_failed(runtime.device, code, KINA_UNSUPPORTED if 900 <= <int> code < 910 else KINA_DRIVER,
                             operation, b"whether the stream is being captured could not be asked")
    if status == CU_STREAM_CAPTURE_STATUS_INVALIDATED:
        return fail(KINA_UNSUPPORTED, operation, b"the capture of the stream has failed already; end it first")
    if status != CU_STREAM_CAPTURE_STATUS_ACTIVE:
        id[0] = 0
    return 0
