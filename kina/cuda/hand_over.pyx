# cython: annotation_typing=False
"""Sessions among the streams of others: what a session can wait for, and handing over to a stream and back.

Source: CUDA Driver API, "Event Management" and cuStreamWaitEvent; the `__cuda_stream__` protocol of cuda.core.
"""

from libc.stdint cimport uintptr_t

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport (
    KINA_ARGUMENT,
    KINA_DRIVER,
    KINA_FOREIGN_DEVICE,
    KINA_UNSUPPORTED,
    check,
    fail,
    raise_last,
)
from kina._core.storage cimport kina_release
from kina.cuda.capture cimport order_runtimes, refuse_capture
from kina.cuda.completion cimport Completion
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed
from kina.cuda.cudatypes cimport (
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_SUCCESS,
    CUevent,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
)
from kina.cuda.driver cimport cu, driver_failed, relaxed_begin, relaxed_end
from kina.cuda.foreign_order cimport check_named, order_export, order_import
from kina.cuda.handles cimport kina_add, kina_device, kina_load, kina_runtime, kina_seal
from kina.cuda.stream cimport named_stream, stream_checkout

from kina.errors import ArgumentError

__all__ = ["HandOver"]


cdef extern from *:
    """
    #define kina_swap_stream(p, v) __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)
    """
    CUstream kina_swap_stream(CUstream *p, CUstream v) noexcept nogil


#: Events that are known: package and name of their class, and what has the handle.
EVENTS = (
    ("torch", "Event", "cuda_event"),
    ("torch", "Event", "event_id"),  # of any accelerator's
    ("cupy", "Event", "ptr"),
    ("cuda", "Event", "handle"),
    ("cuda", "CUevent", "__int__"),
)


cdef object attribute_of_event(object other):
    """The name of the attribute that has its handle; None if it is no event that is known."""
    for kind in type(other).__mro__:
        package = kind.__module__.partition(".")[0]
        for *known, attribute in EVENTS:
            if known == [package, kind.__name__] and hasattr(other, attribute):
                return attribute if attribute != "event_id" or other.device.type == "cuda" else None
    return None


cdef int take_probe(kina_device *device, CUstream *probe) noexcept nogil:
    probe[0] = kina_swap_stream(&device.probe_stream, NULL)
    return 0 if probe[0] != NULL else stream_checkout(device, probe)


cdef void give_probe(kina_device *device, CUstream probe) noexcept nogil:
    """It may wait for an event still, so no Runtime may have it; when there is another by now, it goes."""
    probe = kina_swap_stream(&device.probe_stream, probe)
    if probe != NULL:
        cu.cuStreamDestroy(probe)


cdef CUresult probe_event(CUstream *probe, CUevent event, CUstreamCaptureStatus *drawn) noexcept nogil:
    cdef CUresult code = cu.cuStreamIsCapturing(probe[0], drawn)  # it is, if this could not be asked the last time
    if code == CUDA_SUCCESS and drawn[0] == CU_STREAM_CAPTURE_STATUS_NONE:
        code = cu.cuStreamWaitEvent(probe[0], event, 0)
        if code == CUDA_SUCCESS:
            code = cu.cuStreamIsCapturing(probe[0], drawn)
    if code == CUDA_SUCCESS and drawn[0] != CU_STREAM_CAPTURE_STATUS_NONE:
        cu.cuStreamDestroy(probe[0])
        probe[0] = NULL
    return code


cdef int wait_for_handle(kina_runtime *runtime, CUevent event, const char *operation) noexcept nogil:
    """An event of somebody else's, which may be another device's. An event of a capture draws whoever waits for it into
    the capture, and ruins that if it is asked about, so a stream of nobody's waits for it first. Drawn in and destroyed
    with nothing in it, that does no harm."""
    cdef kina_device *device = runtime.device
    cdef CUstreamCaptureStatus drawn = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUstreamCaptureMode mode
    cdef CUstream probe = NULL
    cdef CUresult code
    cdef int status = refuse_capture(runtime, operation)
    if status == 0:
        status = take_probe(device, &probe)
    if status != 0:
        return status
    mode = relaxed_begin()
    code = probe_event(&probe, event, &drawn)
    if code == CUDA_SUCCESS and drawn == CU_STREAM_CAPTURE_STATUS_NONE:
        code = cu.cuStreamWaitEvent(<CUstream> runtime.stream.native, event, 0)
    if probe != NULL:
        give_probe(device, probe)
    relaxed_end(mode)
    if drawn != CU_STREAM_CAPTURE_STATUS_NONE:
        return fail(KINA_UNSUPPORTED, operation, b"the event was recorded in a stream that is being captured: it "
                    b"stands for nothing that the device does")
    if code in (CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_CONTEXT_IS_DESTROYED):
        return driver_failed(code, KINA_ARGUMENT, operation,
                             b"the driver knows no such event: it was destroyed, or recorded in a capture")
    if code != CUDA_SUCCESS:
        return device_failed(device, code, KINA_DRIVER, operation, b"the stream could not be ordered after an event")
    return 0


cdef int wait_for_completion(kina_runtime *runtime, kina_seal *recorded, const char *operation) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int status
    if kina_load(&recorded.complete):
        return 0
    status = device_check(recorded.device, operation)
    if status == 0:
        status = refuse_capture(runtime, operation)
    if status != 0:
        return status
    mode = relaxed_begin()
    code = cu.cuStreamWaitEvent(<CUstream> runtime.stream.native, recorded.event, 0)
    relaxed_end(mode)
    if code != CUDA_SUCCESS:
        return device_failed(runtime.device, code, KINA_DRIVER, operation,
                             b"the stream could not be ordered after a Completion")
    return 0


cdef int wait_for_stream(kina_runtime *runtime, CUstream producer, const char *operation) noexcept nogil:
    cdef int status
    if <void *> producer == runtime.stream.native:
        return 0
    status = check_named(runtime.device, producer, operation)
    if status == 0:
        status = order_import(runtime, producer, operation)
    return status


cdef int wait_for(kina_runtime *runtime, object other, const char *operation) except -1:
    cdef Completion completion
    cdef CUstream producer
    cdef uintptr_t handle
    cdef int status, pushed
    if isinstance(other, Completion):
        completion = <Completion> other
        with nogil:
            status = wait_for_completion(runtime, completion._seal, operation)
        check(status)
        return 0
    attribute = attribute_of_event(other)
    if attribute is not None:
        handle = event_handle(other, attribute, operation)
        pushed = look_again(runtime, operation)
        with nogil:
            status = wait_for_handle(runtime, <CUevent> <void *> handle, operation)
        context_end(pushed)
        check(status)
        return 0
    if not hasattr(type(other), "__cuda_stream__"):
        raise ArgumentError(
            f"{operation.decode()}: a stream (with __cuda_stream__), an open session, a Completion, or a CUDA event "
            f"of PyTorch, CuPy, cuda.core or cuda.bindings is needed, not {type(other).__name__}",
            operation=operation.decode(),
        )
    producer = named_stream(other, operation.decode())
    pushed = look_again(runtime, operation)
    with nogil:
        status = wait_for_stream(runtime, producer, operation)
    context_end(pushed)
    check(status)
    return 0


cdef int look_again(kina_runtime *runtime, const char *operation) except -1:
    """Anybody's code has run since the call began: the device's context is current again until context_end, which takes
    what this gives."""
    cdef int pushed
    check(device_check(runtime.device, operation))
    pushed = context_begin(runtime.device, operation)
    if pushed < 0:
        raise_last()
    return pushed


cdef uintptr_t event_handle(object other, str attribute, const char *operation) except? 0:
    try:
        handle = getattr(other, attribute) if attribute != "__int__" else int(other)
        handle = int(handle if handle is not None else 0)
    except (TypeError, ValueError):
        handle = -1
    if not 0 < handle < 1 << 64:
        raise ArgumentError(f"{operation.decode()}: the {type(other).__module__}.{type(other).__name__} was never "
                            "recorded, or is closed", operation=operation.decode())
    return handle


cdef int order_sessions(kina_runtime *producer, kina_runtime *waiter, const char *operation) except -1:
    cdef int status
    if producer.device != waiter.device:
        check(fail(KINA_FOREIGN_DEVICE, operation,
                   b"the other session runs on another device: wait for its completion()"))
    if producer.stream.native == waiter.stream.native:
        return 0
    check(device_check(producer.device, operation))
    with nogil:
        status = order_runtimes(producer, waiter, operation)
    check(status)
    kina_add(&waiter.counters.events_recorded, 1)
    return 0


cdef int order_stream(kina_runtime *runtime, CUstream waiter, const char *operation) noexcept nogil:
    cdef kina_runtime *known = NULL
    cdef int status
    if <void *> waiter == runtime.stream.native:
        return 0
    status = check_named(runtime.device, waiter, operation)
    if status == 0:
        status = order_export(runtime, waiter, &known, operation)
    if known != NULL:
        kina_release(known)
    return status


cdef int hand_over(kina_runtime *runtime, object stream, const char *operation) except -1:
    cdef CUstream waiter = named_stream(stream, operation.decode())
    cdef int pushed = look_again(runtime, operation)
    cdef int status
    with nogil:
        status = order_stream(runtime, waiter, operation)
    context_end(pushed)
    check(status)
    return 0


cdef class HandOver:
    """HandOver()

    A session and the stream that it handed over to, by :meth:`CudaSession.stream_ordered_with`: a ``with`` block over
    it ends with the session's stream waiting, on the device, for the other. Thread-bound, like the session.
    """

    def __cinit__(self):
        check_construction(self)

    def __enter__(self) -> object:
        return self._stream

    def __exit__(self, *exception: object) -> None:
        # After an exception too: the stream may have got work before it.
        self._session.wait(self._stream)

    def __reduce__(self):
        raise TypeError("a HandOver cannot be pickled or copied")


cdef HandOver make_hand_over(object session, object stream):
    cdef HandOver made
    begin_construction()
    try:
        made = HandOver.__new__(HandOver)
    finally:
        end_construction()
    made._session = session
    made._stream = stream
    return made
