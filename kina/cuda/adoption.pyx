# cython: annotation_typing=False
"""Taking in what others have made: arrays of other libraries, tensors of other Runtimes of the device.

Source: DLPack 1.3 and its specification for Python, "Synchronization".
"""

from cpython.pycapsule cimport PyCapsule_CheckExact
from libc.stdint cimport intptr_t

from kina._core.dlpack cimport (
    adopt_host_side,
    adopt_managed,
    capsule_device,
    check_capsule,
    consume_capsule,
    declared_device,
    drop_managed,
    managed_device,
    request_capsule,
)
from kina._core.foreign_types cimport foreign_type, producer_stream, request_managed, type_of
from kina._core.status cimport check, raise_last
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_STORAGE_ADOPTED,
    KINA_STORAGE_SHARED,
    KINA_TENSOR_READ_ONLY,
    kina_dl_device,
    kina_dl_exchange_api,
    kina_dl_managed_tensor_versioned,
    kina_release,
    kina_retain,
    kina_storage,
    storage_adopt,
)
from kina._core.tensor cimport Tensor, tensor_from_storage
from kina.cuda.array_interface cimport adopt_cuda_array
from kina.cuda.capture cimport is_capturing, order_after
from kina.cuda.context cimport device_check, device_count
from kina.cuda.cudatypes cimport CU_STREAM_LEGACY, CUstream
from kina.cuda.foreign_order cimport order_import
from kina.cuda.foreign_uses cimport note_adoption
from kina.cuda.handles cimport kina_add, kina_runtime

from kina.errors import DLPackError, ForeignDeviceError, ForeignRuntimeError, UnsupportedError

__all__ = []


# Whose it is ----------------------------------------------------------------------------------------------


cdef inline bint is_on(Tensor tensor, int ordinal) noexcept:
    """In memory of a device: its own, or managed."""
    return (tensor.c.device.device_type in (KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_MANAGED)
            and tensor.c.device.device_id == ordinal)


cdef int check_own(kina_runtime *runtime, Tensor tensor, const char *operation) except -1:
    if tensor.c.storage.runtime == runtime.stream.runtime:
        return 0
    if not is_on(tensor, runtime.device.ordinal):
        raise ForeignDeviceError(
            f"the tensor lives on {tensor.device}, the session runs on cuda:{runtime.device.ordinal}; move it "
            "explicitly (to_host and from_host)", operation=operation.decode(),
        )
    raise ForeignRuntimeError(
        "the tensor belongs to another Runtime of this device; take it in with session.adopt(tensor)",
        operation=operation.decode(),
    )


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


cdef int check_still_free(kina_runtime *runtime) except -1:
    """The producer's code has run, and may have begun a capture of the session's stream, or forked."""
    check(device_check(runtime.device, b"adopt"))
    if is_capturing(runtime):
        raise UnsupportedError("adopt: the producer has begun a capture of the session's stream, and the graph could "
                               "not wait for it", operation="adopt")
    return 0


# Arrays ---------------------------------------------------------------------------------------------------


cdef Tensor adopt_array(kina_runtime *runtime, object source):
    cdef const kina_dl_exchange_api *api = foreign_type(type_of(source)).api
    cdef kina_dl_device where
    if api != NULL:
        return adopt_from_table(runtime, request_managed(source, api), api, False)
    if PyCapsule_CheckExact(source):
        where = capsule_device(source)
        check_reachable(where, runtime.device.ordinal)
        check_capsule(source, where)
        check(order_import(runtime, CU_STREAM_LEGACY, b"adopt"))  # it says nothing of streams
        return consume_capsule(source, where, &runtime.stream, runtime.stream.runtime, runtime.stream.domain)
    if not hasattr(source, "__dlpack__"):
        return adopt_cuda_array(runtime, source)
    where = declared_device(source, "adopt")
    check_reachable(where, runtime.device.ordinal)
    handle = None if where.device_type == KINA_DEVICE_CUDA_HOST else <intptr_t> runtime.stream.native
    capsule = request_capsule(source, handle, None, None)
    check_still_free(runtime)
    return consume_capsule(capsule, where, &runtime.stream, runtime.stream.runtime, runtime.stream.domain)


cdef Tensor adopt_from_table(kina_runtime *runtime, kina_dl_managed_tensor_versioned *managed,
                             const kina_dl_exchange_api *api, bint outside):
    cdef kina_dl_device where
    cdef CUstream producer
    cdef Tensor adopted
    cdef int status
    try:
        where = managed_device(managed)
        check_reachable(where, runtime.device.ordinal)
        producer = CU_STREAM_LEGACY if outside else <CUstream> runtime.stream.native
        if api != NULL and where.device_type != KINA_DEVICE_CUDA_HOST:
            producer = <CUstream> producer_stream(api, where)
        check_still_free(runtime)
    except BaseException:
        drop_managed(managed)
        raise
    adopted = adopt_managed(managed, where, &runtime.stream, runtime.stream.runtime, runtime.stream.domain)
    if <void *> producer != runtime.stream.native:
        with nogil:
            status = order_import(runtime, producer, b"adopt")
        check(status)
    return adopted


# Tensors of other Runtimes --------------------------------------------------------------------------------


cdef Tensor adopt_tensor(kina_runtime *runtime, Tensor source):
    cdef kina_storage *theirs = source.c.storage
    cdef kina_storage *ours = NULL
    cdef unsigned int read_only = source.c.flags & KINA_TENSOR_READ_ONLY
    if theirs.runtime == runtime.stream.runtime:
        return source
    if source.c.device.device_type == KINA_DEVICE_CUDA_HOST:
        if theirs.stream == NULL:  # a host session's: all that was done with it is done
            return adopt_host_side(source, source.c.device, &runtime.stream, runtime.stream.runtime,
                                   runtime.stream.domain)
        if (<kina_runtime *> theirs.stream).device != runtime.device:
            raise ForeignDeviceError("the tensor is in pinned memory that a session of another device works with",
                                     operation="adopt")
    elif not is_on(source, runtime.device.ordinal):
        check_own(runtime, source, b"adopt")
    check(order_after(<kina_runtime *> theirs.stream, <CUstream> runtime.stream.native, b"adopt"))
    kina_add(&runtime.counters.events_recorded, 1)
    # What they adopted from a Runtime is taken from that: a tensor handed back and forth would grow a chain of
    # storages, whose release recurses. Their own work on it is covered by their leases.
    while theirs.flags & KINA_STORAGE_SHARED:
        theirs = <kina_storage *> theirs.owner
    kina_retain(theirs)
    if theirs.runtime == runtime.stream.runtime:
        return tensor_from_storage(theirs, source._dtype, source.c.ndim, source.c.shape, source.c.strides,
                                   source.c.byte_offset, read_only, b"adopt")
    if storage_adopt(&ours, theirs.data, theirs.nbytes, theirs.device, &runtime.stream, runtime.stream.runtime,
                     runtime.stream.domain, theirs.flags & ~KINA_STORAGE_ADOPTED, kina_release, theirs) != 0:
        kina_release(theirs)
        raise_last()
    note_adoption(ours)
    return tensor_from_storage(ours, source._dtype, source.c.ndim, source.c.shape, source.c.strides,
                               source.c.byte_offset, read_only, b"adopt")
