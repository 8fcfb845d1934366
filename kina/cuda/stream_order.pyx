"""What kina_memory.h asks of streams, answered for those of Runtimes: fences are seals.

Source: CUDA Driver API, "Event Management" and cuStreamWaitEvent. Any thread, any current context or none.
"""

from kina._core.status cimport KINA_DRIVER, last_error
from kina._core.storage cimport kina_handle, kina_stream, kina_stream_order
from kina.cuda.capture cimport record_seal, refuse_capture
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed, device_is_gone
from kina.cuda.cudatypes cimport CUDA_SUCCESS, CUresult, CUstream, CUstreamCaptureMode
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.event cimport seal_query, seal_wait
from kina.cuda.handles cimport kina_add, kina_device, kina_load, kina_runtime, kina_seal

__all__ = []


cdef int record(kina_stream *stream, kina_handle **fence) noexcept nogil:
    cdef kina_runtime *runtime = <kina_runtime *> stream
    cdef kina_device *device = runtime.device
    cdef kina_seal *recorded = NULL
    cdef int pushed
    cdef int status = device_check(device, b"record")
    if status != 0:
        return status
    pushed = context_begin(device, b"record")
    if pushed < 0:
        return last_error().detail
    status = record_seal(runtime, &recorded, b"record")
    context_end(pushed)
    if status == 0:
        kina_add(&runtime.counters.events_recorded, 1)
        fence[0] = &recorded.handle
    return status


cdef int query(kina_handle *fence) noexcept nogil:
    cdef kina_seal *recorded = <kina_seal *> fence
    if kina_load(&recorded.complete):
        return 1
    if device_is_gone(recorded.device):
        return -1
    return seal_query(recorded)


cdef int order(kina_stream *stream, kina_handle *fence) noexcept nogil:
    cdef kina_runtime *runtime = <kina_runtime *> stream
    cdef kina_device *device = runtime.device
    cdef kina_seal *recorded = <kina_seal *> fence
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int pushed, status
    if kina_load(&recorded.complete):
        return 0
    status = device_check(device, b"order")
    if status != 0:
        return status
    pushed = context_begin(device, b"order")
    if pushed < 0:
        return last_error().detail
    status = refuse_capture(runtime, b"order")  # a graph cannot wait for what is outside of it
    if status != 0:
        context_end(pushed)
        return status
    mode = relaxed_begin()
    code = cu.cuStreamWaitEvent(<CUstream> stream.native, recorded.event, 0)
    relaxed_end(mode)
    context_end(pushed)
    if code != CUDA_SUCCESS:
        return device_failed(device, code, KINA_DRIVER, b"order", b"one stream could not be ordered after another")
    return 0


cdef int wait(kina_handle *fence, kina_stream *waiter) noexcept nogil:
    cdef kina_seal *recorded = <kina_seal *> fence
    cdef int status
    if kina_load(&recorded.complete):
        return 0
    status = device_check(recorded.device, b"wait")
    if status != 0:
        return status
    if waiter != NULL:
        kina_add(&(<kina_runtime *> waiter).counters.host_waits, 1)
    return seal_wait(recorded, b"wait")


cdef kina_stream_order functions
functions.record = record
functions.query = query
functions.order = order
functions.wait = wait
runtime_order = &functions
