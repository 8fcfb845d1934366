# cython: annotation_typing=False
"""Memory of the tensors that sessions make: which resource serves, and in the order of which stream."""

from libc.stdint cimport int64_t

from kina._core.current_resource cimport memory_of, memory_was_chosen
from kina._core.dtype cimport DType
from kina._core.layout cimport layout_nbytes, layout_size
from kina._core.pool cimport pool_take
from kina._core.resource cimport MemoryResource
from kina._core.status cimport KINA_OUT_OF_MEMORY, check, error_put, error_take, kina_error
from kina._core.storage cimport (
    KINA_RESOURCE_PYTHON,
    drain_python_releases,
    kina_dl_device,
    kina_resource,
    kina_storage,
    storage_allocate,
    storage_keep,
    storage_over,
)
from kina._core.tensor cimport Tensor, tensor_from_storage
from kina.cuda.capture cimport is_capturing
from kina.cuda.captured cimport captured_pool
from kina.cuda.handles cimport kina_add, kina_runtime
from kina.cuda.retire cimport harvest_retired, retire_storage, wait_for_retired

__all__ = []


cdef Tensor allocate_tensor(kina_runtime *runtime, MemoryResource preset, DType dtype, int ndim, const int64_t *extents,
                            object memory, const char *operation):
    cdef kina_resource *resource = runtime.memory
    cdef kina_storage *storage = NULL
    cdef MemoryResource chosen = None
    cdef kina_dl_device where
    cdef int64_t size = 0
    cdef size_t nbytes = 0
    cdef void *data = NULL
    cdef int status
    check(layout_size(operation, ndim, extents, &size))
    check(layout_nbytes(operation, size, dtype.itemsize, &nbytes))
    if memory is not None or preset is not None or memory_was_chosen:
        chosen = memory_of(memory, preset, runtime.device.ordinal, "" if memory is None else operation.decode())
        if chosen is not None:
            resource = chosen.ready()
    where.device_type = resource.device_type  # the device's, or managed
    where.device_id = runtime.device.ordinal
    if is_capturing(runtime):
        resource = captured_pool(runtime, runtime.memory.upstream if chosen is None else resource)
        chosen = None
    if nbytes != 0 and pool_take(resource, &data, nbytes, &runtime.stream):
        check(storage_over(&storage, data, resource, &runtime.stream, nbytes, where, runtime.stream.runtime,
                           runtime.stream.domain))
        if resource.flags & KINA_RESOURCE_PYTHON:
            storage_keep(storage, chosen)
    elif chosen is not None:
        storage = storage_from(runtime, chosen, nbytes, where)
    else:
        with nogil:
            status = storage_allocate(&storage, resource, &runtime.stream, nbytes, where,
                                      runtime.stream.runtime, runtime.stream.domain)
        check(status)
    return tensor_from_storage(storage, dtype, ndim, extents, NULL, 0, 0, operation)


cdef kina_storage *storage_from(kina_runtime *runtime, MemoryResource memory, size_t nbytes,
                                kina_dl_device where) except NULL:
    """Of any other resource than a Runtime's own pool."""
    cdef kina_resource *resource = memory.ready()
    cdef bint unordered = not resource.vtable.supports_streams
    cdef kina_storage *storage = NULL
    cdef kina_error refusal
    cdef int status, waited
    if unordered:
        with nogil:
            harvest_retired(runtime.device, False)
        drain_python_releases()
    with nogil:
        status = storage_allocate(&storage, resource, &runtime.stream, nbytes, where, runtime.stream.runtime,
                                  runtime.stream.domain)
    while status == KINA_OUT_OF_MEMORY and unordered:
        # What was dropped and still waits for the device may be what is missing.
        kept = error_take(&refusal)
        with nogil:
            waited = wait_for_retired(runtime.device)
        if waited != 0:
            error_put(&refusal, kept)
            break
        kina_add(&runtime.counters.host_waits, 1)
        drain_python_releases()
        with nogil:
            status = storage_allocate(&storage, resource, &runtime.stream, nbytes, where, runtime.stream.runtime,
                                      runtime.stream.domain)
    check(status)
    if resource.flags & KINA_RESOURCE_PYTHON:
        storage_keep(storage, memory)
    if unordered:
        storage.before_release = retire_storage
    return storage
