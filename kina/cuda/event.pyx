"""Events, pooled per device, and the seals made of them.

Source: CUDA Driver API, "Event Management". Recording costs 0.13 us, a query 1.3 us: queries stay off hot paths.
"""

from libc.stdlib cimport calloc, free

from kina._core.status cimport KINA_DRIVER, KINA_OUT_OF_MEMORY, KINA_SYNCHRONIZE, fail
from kina._core.storage cimport kina_handle, kina_handle_init
from kina.cuda.context cimport context_begin, context_end, device_failed, device_is_gone
from kina.cuda.cudatypes cimport (
    CU_EVENT_DISABLE_TIMING,
    CUDA_ERROR_NOT_READY,
    CUDA_SUCCESS,
    CUevent,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.handles cimport (
    KINA_IDLE_EVENTS,
    kina_device,
    kina_load,
    kina_seal,
    kina_store,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)

__all__ = []


cdef int event_take(kina_device *device, CUevent *out, const char *operation) noexcept nogil:
    cdef CUevent event = NULL
    cdef CUresult code
    pthread_mutex_lock(&device.mutex)
    if device.idle_event_count > 0:
        device.idle_event_count -= 1
        event = device.idle_events[device.idle_event_count]
    pthread_mutex_unlock(&device.mutex)
    if event == NULL:
        code = cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
        if code != CUDA_SUCCESS:
            return device_failed(device, code, KINA_DRIVER, operation, b"an event could not be created")
    out[0] = event
    return 0


cdef void event_give(kina_device *device, CUevent event) noexcept nogil:
    cdef bint kept = False
    cdef int pushed
    if device_is_gone(device):
        return
    pthread_mutex_lock(&device.mutex)
    if device.idle_event_count < KINA_IDLE_EVENTS:
        device.idle_events[device.idle_event_count] = event
        device.idle_event_count += 1
        kept = True
    pthread_mutex_unlock(&device.mutex)
    if not kept:
        pushed = context_begin(device, b"destroy event")
        if pushed >= 0:
            cu.cuEventDestroy(event)
            context_end(pushed)


cdef int order_streams(kina_device *device, CUstream producer, CUstream waiter, const char *operation) noexcept nogil:
    cdef CUevent event
    cdef CUresult code
    cdef int status = event_take(device, &event, operation)
    if status != 0:
        return status
    code = cu.cuEventRecord(event, producer)
    if code == CUDA_SUCCESS:
        code = cu.cuStreamWaitEvent(waiter, event, 0)
    # The wait has captured this recording: the event may be recorded again at once.
    event_give(device, event)
    if code != CUDA_SUCCESS:
        return device_failed(device, code, KINA_DRIVER, operation, b"one stream could not be ordered after another")
    return 0


cdef void destroy_seal(kina_handle *handle) noexcept nogil:
    cdef kina_seal *seal = <kina_seal *> handle
    event_give(seal.device, seal.event)
    free(seal)


cdef int seal_record(kina_device *device, CUstream stream, kina_seal **out, const char *operation) noexcept nogil:
    cdef kina_seal *seal = <kina_seal *> calloc(1, sizeof(kina_seal))
    cdef CUresult code
    cdef int status
    if seal == NULL:
        return fail(KINA_OUT_OF_MEMORY, operation, b"no host memory for a seal")
    status = event_take(device, &seal.event, operation)
    if status != 0:
        free(seal)
        return status
    code = cu.cuEventRecord(seal.event, stream)
    if code != CUDA_SUCCESS:
        status = device_failed(device, code, KINA_DRIVER, operation, b"an event could not be recorded")
        event_give(device, seal.event)
        free(seal)
        return status
    kina_handle_init(&seal.handle, destroy_seal)
    seal.device = device
    out[0] = seal
    return 0


cdef int seal_query(kina_seal *seal) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    if kina_load(&seal.complete):
        return 1
    mode = relaxed_begin()
    code = cu.cuEventQuery(seal.event)
    relaxed_end(mode)
    if code == CUDA_SUCCESS:
        kina_store(&seal.complete, 1)
        return 1
    if code == CUDA_ERROR_NOT_READY:
        return 0
    device_failed(seal.device, code, KINA_SYNCHRONIZE, b"query", b"the state of earlier work could not be asked")
    return -1


cdef int seal_wait(kina_seal *seal, const char *operation) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    if kina_load(&seal.complete):
        return 0
    mode = relaxed_begin()
    code = cu.cuEventSynchronize(seal.event)
    relaxed_end(mode)
    if code != CUDA_SUCCESS:
        return device_failed(seal.device, code, KINA_SYNCHRONIZE, operation, b"waiting for earlier work failed")
    kina_store(&seal.complete, 1)
    return 0
