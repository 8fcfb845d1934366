"""Memory that goes to other libraries, and comes from them: which stream waits for which, and whose use is noted.

Source: the DLPack specification for Python, "Synchronization"; the CUDA Array Interface, "Synchronization".
"""

import sys

from libc.stdint cimport int64_t, intptr_t
from libc.stdio cimport snprintf

from kina._core.dlpack cimport (
    KINA_CONSUMER_ORDERS,
    KINA_CONSUMER_WORK_STREAM,
    set_export_hook,
    set_host_access_hook,
    set_work_stream_hook,
)
from kina._core.status cimport (
    KINA_FOREIGN_DEVICE,
    KINA_UNSUPPORTED,
    error_put,
    error_take,
    fail,
    kina_error,
    last_error,
)
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_STORAGE_ADOPTED,
    interpreter_is_finalizing,
    kina_dl_device,
    kina_release,
    kina_retain_if_alive,
    kina_storage,
)
from kina.cuda.capture cimport order_after, order_behind, order_runtimes, refuse_capture
from kina.cuda.context cimport context_begin, context_end, device_check, device_count, this_thread
from kina.cuda.cudatypes cimport (
    CU_STREAM_LEGACY,
    CU_STREAM_PER_THREAD,
    CUDA_SUCCESS,
    CUcontext,
    CUgreenCtx,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, driver_failed, relaxed_begin, relaxed_end
from kina.cuda.foreign_uses cimport (
    FOREIGN_USE_HOST,
    FOREIGN_USE_LEGACY,
    FOREIGN_USE_UNKNOWN,
    note_export,
    note_immortal,
    note_runtime,
    note_use,
    uses_are_over,
)
from kina.cuda.handles cimport (
    KINA_IMMORTAL_STREAMS,
    KINA_NODE_OPEN,
    kina_add,
    kina_device,
    kina_load,
    kina_runtime,
    kina_session_node,
    kina_store,
    kina_thread,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.stream cimport stream_identify, stream_refuse_capture

from kina.errors import DLPackError, ForeignDeviceError

__all__ = []


# Whose stream it is ---------------------------------------------------------------------------------------


cdef kina_runtime *working_runtime(int ordinal) noexcept nogil:
    """Borrowed: that of the calling thread's innermost open session on a device, which holds it; or NULL."""
    cdef kina_thread *thread = this_thread()
    cdef kina_session_node *node = thread.top if thread != NULL else NULL
    while node != NULL:
        if kina_load(&node.state) == KINA_NODE_OPEN and node.runtime.device.ordinal == ordinal:
            return node.runtime
        node = node.below
    return NULL


cdef int work_stream(int device_id, void **out) noexcept nogil:
    cdef kina_runtime *runtime = working_runtime(device_id)
    out[0] = <void *> CU_STREAM_LEGACY if runtime == NULL else runtime.stream.native
    return 0


cdef int runtime_of_stream(kina_runtime **out, kina_device *device, CUstream native) noexcept nogil:
    cdef kina_runtime *found
    cdef unsigned long long stream_id = 0
    cdef int status = 0
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


cdef bint is_immortal(kina_device *device, CUstream native) noexcept nogil:
    cdef int i
    for i in range(kina_load(&device.immortal_stream_count)):
        if device.immortal_streams[i] == native:
            return True
    return False


cdef bint torch_has_it(kina_device *device, CUstream native) noexcept nogil:
    """Whether it is one of PyTorch's pooled streams, which live as long as the process. PyTorch is asked for its
    current stream alone, the one that it names as a consumer. With no lock held."""
    if interpreter_is_finalizing():
        return False
    with gil:
        return ask_torch(device, native)


cdef bint ask_torch(kina_device *device, CUstream native) noexcept:
    cdef kina_error kept
    cdef object exception
    cdef bint pooled = False
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    exception = error_take(&kept)
    try:
        if torch.cuda.is_initialized():
            current = torch.cuda.current_stream(device.ordinal)
            # An odd id is that of a stream of its own; those that it was given have their handles for ids.
            pooled = current.cuda_stream == <intptr_t> native and current.stream_id % 2 == 1
    except Exception:
        pooled = False  # another version, or one that is only half imported: the stream stays unknown
    error_put(&kept, exception)
    if pooled:
        remember_immortal(device, native)
    return pooled


cdef void remember_immortal(kina_device *device, CUstream native) noexcept nogil:
    cdef int count
    pthread_mutex_lock(&device.mutex)
    count = device.immortal_stream_count
    if count < <int> KINA_IMMORTAL_STREAMS and not is_immortal(device, native):
        device.immortal_streams[count] = native
        kina_store(&device.immortal_stream_count, count + 1)
    pthread_mutex_unlock(&device.mutex)


# Out ------------------------------------------------------------------------------------------------------


cdef int export_to(kina_storage *storage, int64_t consumer_stream) noexcept nogil:
    cdef kina_runtime *home = <kina_runtime *> storage.stream
    cdef kina_runtime *working = NULL
    cdef CUstream consumer
    cdef int status, pushed
    if home == NULL:
        return 0  # no stream of kina's has it in its order
    status = device_check(home.device, b"dlpack")
    if status != 0:
        return status
    if storage.flags & KINA_STORAGE_ADOPTED:
        note_export(storage)
    if consumer_stream == KINA_CONSUMER_ORDERS:
        note_use(storage, FOREIGN_USE_HOST if storage.device.device_type == KINA_DEVICE_CUDA_HOST
                 else FOREIGN_USE_UNKNOWN)
        return 0
    if consumer_stream == KINA_CONSUMER_WORK_STREAM:
        working = working_runtime(home.device.ordinal)
        if working == home:
            return 0
        consumer = CU_STREAM_LEGACY if working == NULL else <CUstream> working.stream.native
    else:
        consumer = <CUstream> <void *> <intptr_t> consumer_stream
    if <void *> consumer == home.stream.native:
        return 0
    pushed = context_begin(home.device, b"dlpack")
    if pushed < 0:
        return last_error().detail
    status = hand_to(storage, home, consumer)
    context_end(pushed)
    return status


cdef int hand_to(kina_storage *storage, kina_runtime *home, CUstream consumer) noexcept nogil:
    """The consumer's stream waits for the home stream, and its use is noted. The context of the device is current."""
    cdef kina_device *device = home.device
    cdef kina_runtime *known = NULL
    cdef int status
    # Whichever of the two is being captured, a wait would end that. Asking does not, if this is asked first.
    status = stream_refuse_capture(device, consumer, b"dlpack")
    if status != 0:
        return status
    if consumer != CU_STREAM_LEGACY and consumer != CU_STREAM_PER_THREAD:
        status = runtime_of_stream(&known, device, consumer)
        if status != 0:
            return status
    if known != NULL:
        status = order_runtimes(home, known, b"dlpack")
        if status == 0:
            kina_add(&home.counters.events_recorded, 1)
            note_runtime(storage, known)
        kina_release(known)
        return status
    status = order_after(home, consumer, b"dlpack")
    if status != 0:
        return status
    kina_add(&home.counters.events_recorded, 1)
    if consumer == CU_STREAM_LEGACY:
        note_use(storage, FOREIGN_USE_LEGACY)
    elif consumer != CU_STREAM_PER_THREAD and (is_immortal(device, consumer) or torch_has_it(device, consumer)):
        note_immortal(storage, consumer)
    else:
        note_use(storage, FOREIGN_USE_UNKNOWN)
    return 0


cdef int host_access(kina_storage *storage) noexcept nogil:
    return uses_are_over(storage, b"__dlpack__")


set_export_hook(export_to)
set_work_stream_hook(work_stream)
set_host_access_hook(host_access)


# In -------------------------------------------------------------------------------------------------------


cdef int check_reachable(kina_dl_device device, int ordinal) except -1:
    if device.device_type == KINA_DEVICE_CUDA_HOST:
        return 0
    if device.device_type not in (KINA_DEVICE_CPU, KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_MANAGED) or device.device_id < 0:
        raise DLPackError(f"device: unknown device type {device.device_type}, number {device.device_id}",
                          operation="adopt")
    if device.device_type == KINA_DEVICE_CPU:
        raise ForeignDeviceError(
            f"the producer's data is not CUDA device memory (DLPack device type {device.device_type}); copy it with "
            "from_host", operation="adopt",
        )
    if device.device_id == ordinal:
        return 0
    if device.device_id >= device_count():
        raise DLPackError(f"device: the producer's data is said to live on cuda:{device.device_id}, which does not "
                          "exist", operation="adopt")
    raise ForeignDeviceError(f"the producer's data lives on cuda:{device.device_id}, the session runs on "
                             f"cuda:{ordinal}", operation="adopt")


cdef kina_dl_device producer_device(object source, int ordinal) except *:
    cdef kina_dl_device device
    try:
        kind, where = source.__dlpack_device__()
        device.device_type = kind
        device.device_id = where
    except AttributeError:
        raise DLPackError(f"{type(source).__name__} is no DLPack producer: it has no __dlpack_device__",
                          operation="adopt") from None
    except Exception as error:
        raise DLPackError(f"device: __dlpack_device__ of {type(source).__name__} failed: {error}",
                          operation="adopt") from error
    check_reachable(device, ordinal)
    return device


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
    if status == 0 and producer != CU_STREAM_LEGACY and producer != CU_STREAM_PER_THREAD:
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


cdef int check_stream(kina_device *device, CUstream native, const char *operation) noexcept nogil:
    cdef CUcontext context = NULL
    cdef CUgreenCtx green = NULL  # an ordinary stream leaves it unwritten
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int status = stream_refuse_capture(device, native, operation)
    if status != 0 or native == CU_STREAM_LEGACY or native == CU_STREAM_PER_THREAD:
        return status
    mode = relaxed_begin()
    code = cu.cuStreamGetCtx(native, &context, &green)
    relaxed_end(mode)
    if code != CUDA_SUCCESS:
        return driver_failed(code, KINA_FOREIGN_DEVICE, operation, b"the stream's context could not be asked")
    if green != NULL:
        return fail(KINA_UNSUPPORTED, operation,
                    b"the stream belongs to a green context, which kina does not serve")
    if context != device.context:
        snprintf(last_error().message, sizeof(last_error().message),
                 "the stream does not belong to the primary context of cuda:%d; an event of it can be waited for",
                 device.ordinal)
        return fail(KINA_FOREIGN_DEVICE, operation, last_error().message)
    return 0
