"""Streams of other libraries beside those of Runtimes: which waits for which, on the device.

Source: CUDA Driver API, cuEventRecord and cuStreamWaitEvent.
"""

from kina._core.status cimport last_error
from kina._core.storage cimport kina_release, kina_retain_if_alive
from kina.cuda.capture cimport order_after, order_behind, order_runtimes, refuse_capture
from kina.cuda.context cimport context_begin, context_end
from kina.cuda.cudatypes cimport CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream
from kina.cuda.handles cimport kina_add, kina_device, kina_runtime, pthread_mutex_lock, pthread_mutex_unlock
from kina.cuda.stream cimport stream_check_device, stream_identify, stream_refuse_capture

__all__ = []


cdef int runtime_of_stream(kina_runtime **out, kina_device *device, CUstream native) noexcept nogil:
    cdef kina_runtime *found
    cdef unsigned long long stream_id = 0
    cdef int status = 0
    out[0] = NULL
    if native == CU_STREAM_LEGACY or native == CU_STREAM_PER_THREAD:
        return 0  # everybody's: of no Runtime alone
    pthread_mutex_lock(&device.mutex)
    found = device.runtimes
    while found != NULL:
        # A stream that was adopted without an owner may be no more, and its handle another's.
        if found.stream.native == <void *> native and (not found.adopted or found.stream_owner != NULL) \
                and not found.lost and kina_retain_if_alive(found):
            break
        found = found.next
    pthread_mutex_unlock(&device.mutex)
    # Nor need an owner keep its promise: the driver's id tells.
    if found != NULL and found.adopted:
        status = stream_identify(device, native, &stream_id)
        if status != 0 or stream_id != found.stream_id:
            kina_release(found)
            found = NULL
    out[0] = found
    return status


cdef int order_export(kina_runtime *runtime, CUstream consumer, kina_runtime **known,
                      const char *operation) noexcept nogil:
    # Whichever of the two is being captured, a wait would end that. Asking does not, if this is asked first.
    cdef int status = stream_refuse_capture(runtime.device, consumer, operation)
    known[0] = NULL
    if status == 0:
        status = runtime_of_stream(known, runtime.device, consumer)
    if status != 0:
        return status
    if known[0] != NULL:
        status = order_runtimes(runtime, known[0], operation)
    else:
        status = order_after(runtime, consumer, operation)
    if status == 0:
        kina_add(&runtime.counters.events_recorded, 1)
    elif known[0] != NULL:
        kina_release(known[0])
        known[0] = NULL
    return status


cdef int order_import(kina_runtime *runtime, CUstream producer, const char *operation) noexcept nogil:
    cdef kina_runtime *known = NULL
    cdef int status, pushed
    if producer == NULL:
        producer = CU_STREAM_LEGACY
    if <void *> producer == runtime.stream.native:
        return 0
    pushed = context_begin(runtime.device, operation)
    if pushed < 0:
        return last_error().detail
    # Both are asked before anything is done: an event of a stream that is being captured would draw ours in.
    status = refuse_capture(runtime, operation)
    if status == 0:
        status = stream_refuse_capture(runtime.device, producer, operation)
    if status == 0:
        status = runtime_of_stream(&known, runtime.device, producer)
    if known != NULL:
        status = order_runtimes(known, runtime, operation)
        kina_release(known)
    elif status == 0:
        status = order_behind(runtime, producer, operation)
    if status == 0:
        kina_add(&runtime.counters.events_recorded, 1)
    context_end(pushed)
    return status


cdef int check_named(kina_device *device, CUstream native, const char *operation) noexcept nogil:
    if native == CU_STREAM_LEGACY or native == CU_STREAM_PER_THREAD:
        return 0  # of whichever context is current
    return stream_check_device(device, native, operation, b"an event of it can be waited for")
