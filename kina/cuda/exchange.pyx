"""Device memory that goes to other libraries, and comes from them, by DLPack: which stream waits for which.

Source: the DLPack specification for Python, "Synchronization".
"""

from libc.stdint cimport int64_t, intptr_t

from kina._core.dlpack cimport set_export_hook
from kina._core.status cimport check
from kina._core.storage cimport KINA_DEVICE_CUDA, KINA_STORAGE_ADOPTED, kina_storage
from kina.cuda.capture cimport order_after
from kina.cuda.context cimport context_begin, context_end, device_check
from kina.cuda.cudatypes cimport CU_STREAM_LEGACY, CUstream
from kina.cuda.handles cimport kina_add, kina_device, kina_runtime
from kina.cuda.retire cimport FOREIGN_USE_LEGACY, FOREIGN_USE_UNKNOWN, fence_exports
from kina.cuda.stream cimport stream_refuse_capture

from kina.errors import DLPackError, ForeignDeviceError

__all__ = []


cdef int check_producer_device(object source, int ordinal) except -1:
    try:
        kind, where = source.__dlpack_device__()
    except AttributeError:
        raise DLPackError(f"{type(source).__name__} is no DLPack producer: it has no __dlpack_device__",
                          operation="adopt") from None
    if int(kind) != KINA_DEVICE_CUDA:
        raise ForeignDeviceError(
            f"the producer's data is not CUDA device memory (DLPack device type {int(kind)}); copy it with from_host",
            operation="adopt",
        )
    if int(where) != ordinal:
        raise ForeignDeviceError(f"the producer's data lives on cuda:{int(where)}, the session runs on cuda:{ordinal}",
                                 operation="adopt")
    return 0


cdef int order_export(kina_storage *storage, int64_t consumer_stream) except -1:
    """DLPack export of device memory: the consumer's stream waits for the home stream, and its use is noted."""
    cdef kina_runtime *runtime = <kina_runtime *> storage.stream
    cdef kina_device *device = runtime.device
    cdef CUstream consumer
    cdef int status = 0
    cdef int pushed
    check(device_check(device, b"dlpack"))
    if consumer_stream == -1:
        storage.foreign_use |= FOREIGN_USE_UNKNOWN
    else:
        consumer = <CUstream> <void *> <intptr_t> consumer_stream
        if <void *> consumer != runtime.stream.native:
            with nogil:
                pushed = context_begin(device, b"dlpack")
                if pushed >= 0:
                    # The legacy stream would end the capture of a stream that it orders: it is asked, which does not.
                    if consumer == CU_STREAM_LEGACY:
                        status = stream_refuse_capture(device, consumer, b"dlpack")
                    if status == 0:
                        status = order_after(runtime, consumer, b"dlpack")
                    context_end(pushed)
            check(-1 if pushed < 0 else status)
            kina_add(&runtime.counters.events_recorded, 1)
            # At the last release the legacy stream can be fenced; whether another still lives, nobody knows.
            storage.foreign_use |= FOREIGN_USE_LEGACY if consumer == CU_STREAM_LEGACY else FOREIGN_USE_UNKNOWN
    # Adopted memory goes back to an owner who does not know of our consumers, those on the home stream included: their
    # work is not leased. It always waits.
    if storage.flags & KINA_STORAGE_ADOPTED:
        storage.foreign_use |= FOREIGN_USE_UNKNOWN
    if storage.foreign_use != 0:
        storage.before_release = fence_exports
    return 0


set_export_hook(order_export)
