"""Streams: the bounded pool of each device, and the rules for adopting somebody else's.

Source: CUDA Driver API, "Stream Management"; the `__cuda_stream__` protocol of cuda.core.
"""

from libc.stdint cimport uintptr_t
from libc.stdio cimport snprintf

from kina._core.status cimport (
    KINA_DRIVER,
    KINA_FOREIGN_DEVICE,
    KINA_UNSUPPORTED,
    fail,
    last_error,
)
from kina.cuda.context cimport context_begin, context_end, device_failed, device_is_gone
from kina.cuda.cudatypes cimport (
    CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    CU_STREAM_CAPTURE_STATUS_NONE,
    CU_STREAM_LEGACY,
    CU_STREAM_NON_BLOCKING,
    CU_STREAM_PER_THREAD,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_INVALID_HANDLE,
    CUDA_SUCCESS,
    CUcontext,
    CUgreenCtx,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
)
from kina.cuda.driver cimport cu, driver_failed, relaxed_begin, relaxed_end
from kina.cuda.handles cimport KINA_IDLE_STREAMS, kina_device, pthread_mutex_lock, pthread_mutex_unlock

from kina.errors import ArgumentError, UnsupportedError

__all__ = []


cdef int stream_checkout(kina_device *device, CUstream *out) noexcept nogil:
    cdef CUstream stream = NULL
    cdef CUresult code
    pthread_mutex_lock(&device.mutex)
    if device.idle_stream_count > 0:
        device.idle_stream_count -= 1
        stream = device.idle_streams[device.idle_stream_count]
    pthread_mutex_unlock(&device.mutex)
    if stream == NULL:
        code = cu.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0)
        if code != CUDA_SUCCESS:
            return device_failed(device, code, KINA_DRIVER, b"Runtime", b"a stream could not be created")
    out[0] = stream
    return 0


cdef void stream_checkin(kina_device *device, CUstream stream) noexcept nogil:
    cdef bint kept = False
    cdef int pushed
    if device_is_gone(device):
        return
    pthread_mutex_lock(&device.mutex)
    if device.idle_stream_count < KINA_IDLE_STREAMS:
        device.idle_streams[device.idle_stream_count] = stream
        device.idle_stream_count += 1
        kept = True
    pthread_mutex_unlock(&device.mutex)
    if not kept:
        pushed = context_begin(device, b"destroy stream")
        if pushed >= 0:
            cu.cuStreamDestroy(stream)  # returns at once; pending work runs to its end
            context_end(pushed)


cdef CUresult streams_wait_idle(kina_device *device) noexcept nogil:
    cdef CUstream idle[KINA_IDLE_STREAMS]
    cdef CUresult code = CUDA_SUCCESS
    cdef int count, i
    # Ours meanwhile: nobody can check them out, and nobody can destroy them.
    pthread_mutex_lock(&device.mutex)
    count = device.idle_stream_count
    for i in range(count):
        idle[i] = device.idle_streams[i]
    device.idle_stream_count = 0
    pthread_mutex_unlock(&device.mutex)
    for i in range(count):
        if code == CUDA_SUCCESS:
            code = cu.cuStreamSynchronize(idle[i])
        stream_checkin(device, idle[i])
    return code


cdef int stream_identify(kina_device *device, CUstream stream, unsigned long long *stream_id) noexcept nogil:
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cdef CUresult code = cu.cuStreamGetId(stream, stream_id)
    relaxed_end(mode)
    if code != CUDA_SUCCESS:
        return device_failed(device, code, KINA_DRIVER, b"Runtime", b"the driver does not tell the id of a stream")
    return 0


cdef int stream_examine(kina_device *device, CUstream stream, unsigned long long *stream_id) noexcept nogil:
    cdef int status = stream_refuse_capture(device, stream, b"adopt stream")
    if status != 0:
        return status
    return stream_examine_captured(device, stream, stream_id)


cdef int stream_examine_captured(kina_device *device, CUstream stream, unsigned long long *stream_id) noexcept nogil:
    cdef CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE
    cdef int status = ask_capturing(device, stream, &capturing, b"adopt stream")
    if status != 0:
        return status
    if capturing == CU_STREAM_CAPTURE_STATUS_INVALIDATED:
        return fail(KINA_UNSUPPORTED, b"adopt stream", b"the capture of the stream has failed already; end it first")
    stream_id[0] = 0
    status = stream_check_device(device, stream, b"adopt stream", b"open the session on the stream's own device")
    if status != 0 or capturing != CU_STREAM_CAPTURE_STATUS_NONE:
        return status  # asked for its id, one in a capture would refuse, and the capture be ruined
    return stream_identify(device, stream, stream_id)


cdef int stream_check_device(kina_device *device, CUstream stream, const char *operation,
                             const char *remedy) noexcept nogil:
    cdef CUcontext context = NULL
    cdef CUgreenCtx green = NULL  # an ordinary stream leaves it unwritten
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cdef CUresult code = cu.cuStreamGetCtx(stream, &context, &green)
    relaxed_end(mode)
    if code != CUDA_SUCCESS:
        return driver_failed(code, KINA_FOREIGN_DEVICE, operation, b"the stream's context could not be asked")
    if green != NULL:
        return fail(KINA_UNSUPPORTED, operation,
                    b"the stream belongs to a green context, which kina does not serve")
    if context != device.context:
        snprintf(last_error().message, sizeof(last_error().message),
                 "the stream does not belong to the primary context of cuda:%d; %s", device.ordinal, remedy)
        return fail(KINA_FOREIGN_DEVICE, operation, last_error().message)
    return 0


cdef int ask_capturing(kina_device *device, CUstream stream, CUstreamCaptureStatus *capturing,
                       const char *operation) noexcept nogil:
    cdef CUresult code = cu.cuStreamIsCapturing(stream, capturing)
    cdef int detail = KINA_DRIVER
    if code != CUDA_SUCCESS:
        # A legacy stream refuses to answer while a stream that it orders is being captured (900 to 909).
        if 900 <= <int> code < 910:
            detail = KINA_UNSUPPORTED
        elif code in (CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_CONTEXT_IS_DESTROYED):
            detail = KINA_FOREIGN_DEVICE
        return device_failed(device, code, detail, operation,
                             b"whether the stream is being captured could not be asked")
    return 0


cdef int stream_refuse_capture(kina_device *device, CUstream stream, const char *operation) noexcept nogil:
    cdef CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE
    cdef int status = ask_capturing(device, stream, &capturing, operation)
    if status != 0:
        return status
    if capturing != CU_STREAM_CAPTURE_STATUS_NONE:
        return fail(KINA_UNSUPPORTED, operation,
                    b"the stream is being captured into a graph; end the capture first")
    return 0


cdef CUstream stream_of(object owner) except? NULL:
    cdef CUstream stream = named_stream(owner, "adopt stream")
    if stream == CU_STREAM_PER_THREAD:
        raise UnsupportedError(
            "the per-thread default stream cannot be adopted: its handle means another stream in every thread",
            operation="adopt stream",
        )
    return stream


cdef CUstream named_stream(object owner, str operation) except? NULL:
    try:
        protocol = type(owner).__cuda_stream__
    except AttributeError:
        raise ArgumentError(
            f"{type(owner).__name__} is no stream: it has no __cuda_stream__ method", operation=operation
        ) from None
    answer = protocol(owner) if callable(protocol) else owner.__cuda_stream__
    try:
        version, handle = answer
        address = int(handle)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"__cuda_stream__ of {type(owner).__name__} answered {answer!r}, not (version, handle)",
            operation=operation,
        ) from None
    if version != 0:
        raise UnsupportedError(
            f"__cuda_stream__ of {type(owner).__name__} speaks version {version}; kina knows version 0",
            operation=operation,
        )
    if not 0 <= address < 1 << 64:
        raise UnsupportedError(f"{address} is not the handle of a stream", operation=operation)
    if address == 0:
        return CU_STREAM_LEGACY
    return <CUstream> <void *> <uintptr_t> address
