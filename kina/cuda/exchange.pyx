"""Memory that goes to other libraries: their streams wait for kina's, and their use is noted.

Source: the DLPack specification for Python, "Synchronization"; the CUDA Array Interface, "Synchronization".
"""

import sys

from libc.stdint cimport int64_t, intptr_t

from kina._core.dlpack cimport (
    KINA_CONSUMER_HOST,
    KINA_CONSUMER_ORDERS,
    KINA_CONSUMER_WORK_STREAM,
    set_export_hook,
    set_host_access_hook,
    set_work_stream_hook,
)
from kina._core.status cimport error_put, error_take, kina_error, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_STORAGE_ADOPTED,
    KINA_STORAGE_SHARED,
    interpreter_is_finalizing,
    kina_release,
    kina_storage,
)
from kina.cuda.capture cimport capture_lease, is_capturing, must_lease
from kina.cuda.context cimport context_begin, context_end, device_check, innermost_node
from kina.cuda.cudatypes cimport CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream
from kina.cuda.foreign_order cimport order_export
from kina.cuda.foreign_uses cimport (
    FOREIGN_USE_HOST,
    FOREIGN_USE_LEGACY,
    FOREIGN_USE_UNKNOWN,
    foreign_user,
    note_export,
    note_immortal,
    note_runtime,
    note_use,
    uses_are_over,
)
from kina.cuda.handles cimport (
    KINA_IMMORTAL_STREAMS,
    kina_device,
    kina_load,
    kina_runtime,
    kina_session_node,
    kina_store,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)

__all__ = []


# Streams that live as long as the process -----------------------------------------------------------------


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


# The hooks of dlpack --------------------------------------------------------------------------------------


cdef int work_stream(int device_id, void **out) noexcept nogil:
    cdef kina_session_node *node = innermost_node(device_id)
    out[0] = <void *> CU_STREAM_LEGACY if node == NULL else node.runtime.stream.native
    return 0


cdef int export_to(kina_storage *storage, int64_t consumer_stream) noexcept nogil:
    cdef kina_runtime *home = <kina_runtime *> storage.stream
    cdef kina_session_node *working
    cdef CUstream consumer
    cdef int status, pushed
    if home == NULL:
        return 0  # no stream of kina's has it in its order
    status = device_check(home.device, b"dlpack")
    if status != 0:
        return status
    # On a stream that is not kina's the consumer may go on after the last session, which is all that its pool knows of.
    if storage.flags & KINA_STORAGE_ADOPTED or home.adopted:
        note_export(storage)
    if consumer_stream == KINA_CONSUMER_HOST or consumer_stream == KINA_CONSUMER_ORDERS:
        note_of_all(storage, FOREIGN_USE_HOST if consumer_stream == KINA_CONSUMER_HOST else FOREIGN_USE_UNKNOWN)
        return 0
    working = innermost_node(home.device.ordinal)
    if consumer_stream == KINA_CONSUMER_WORK_STREAM:
        consumer = CU_STREAM_LEGACY if working == NULL else <CUstream> working.runtime.stream.native
    else:
        consumer = <CUstream> <void *> <intptr_t> consumer_stream
    if <void *> consumer == home.stream.native:
        # What the consumer enqueues in a capture becomes the graph's. Who captures has the Runtime open in this thread.
        if is_capturing(home) and working != NULL and working.runtime == home and must_lease(home, storage):
            return capture_lease(home.capture, storage, False)
        return 0
    pushed = context_begin(home.device, b"dlpack")
    if pushed < 0:
        return last_error().detail
    status = hand_to(storage, home, consumer)
    context_end(pushed)
    return status


cdef kina_storage *shared_owner(kina_storage *storage) noexcept nogil:
    """Of memory that the host may read: the storage that it was adopted of, whose readers have to know of this use."""
    if storage.flags & KINA_STORAGE_SHARED and storage.device.device_type != KINA_DEVICE_CUDA:
        return <kina_storage *> storage.owner
    return NULL


cdef void note_of_all(kina_storage *storage, foreign_user who) noexcept nogil:
    while storage != NULL:
        if storage.stream != NULL:
            note_use(storage, who)
        storage = shared_owner(storage)


cdef int hand_to(kina_storage *storage, kina_runtime *home, CUstream consumer) noexcept nogil:
    """The consumer's stream waits for the home stream, and its use is noted. The context of the device is current."""
    cdef kina_device *device = home.device
    cdef kina_runtime *known = NULL
    cdef kina_storage *owner = shared_owner(storage)
    cdef int status = order_export(home, consumer, &known, b"dlpack")
    if status != 0:
        return status
    if known != NULL:
        note_runtime(storage, known)
        kina_release(known)
    elif consumer == CU_STREAM_LEGACY:
        note_use(storage, FOREIGN_USE_LEGACY)
    elif consumer != CU_STREAM_PER_THREAD and (is_immortal(device, consumer) or torch_has_it(device, consumer)):
        note_immortal(storage, consumer)
    else:
        note_use(storage, FOREIGN_USE_UNKNOWN)
    note_of_all(owner, FOREIGN_USE_UNKNOWN)
    return 0


cdef int host_access(kina_storage *storage) noexcept nogil:
    return uses_are_over(storage, b"__dlpack__")


set_export_hook(export_to)
set_work_stream_hook(work_stream)
set_host_access_hook(host_access)
