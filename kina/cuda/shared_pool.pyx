# cython: annotation_typing=False
"""The devices that serve other libraries, each with the pool that they share where no resource was chosen."""

from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF

from kina._core.pool cimport QUIETLY, pools_trim_device
from kina._core.resource cimport MemoryResource
from kina._core.status cimport KINA_ARGUMENT, KINA_UNAVAILABLE, fail, fail_with
from kina._core.storage cimport holds_gil, interpreter_is_finalizing, kina_resource, kina_retain
from kina.cuda.context cimport open_device
from kina.cuda.handles cimport kina_device

from kina._core.pool import PoolMemoryResource
from kina.cuda.resources import CudaAsyncMemoryResource

__all__ = ["default_pool"]


cdef extern from *:
    """
    #include "kina_memory.h"
    #include "handles.h"

    enum { KINA_ORDINALS = 128 };

    /* Written once per device, under the GIL, and never cleared. Whoever finds the device finds its pool too. */
    static PyObject *kina_pool_faces[KINA_ORDINALS];           /* owned */
    static kina_resource *kina_shared_pools[KINA_ORDINALS];    /* owned */
    static kina_device *kina_served_devices[KINA_ORDINALS];

    static kina_device *kina_served_device(int ordinal) {
        return __atomic_load_n(&kina_served_devices[ordinal], __ATOMIC_ACQUIRE);
    }
    static void kina_serve_device(kina_device *device) {
        __atomic_store_n(&kina_served_devices[device->ordinal], device, __ATOMIC_RELEASE);
    }
    """
    enum: KINA_ORDINALS
    PyObject **kina_pool_faces
    kina_resource **kina_shared_pools
    kina_device *kina_served_device(int ordinal) noexcept nogil
    void kina_serve_device(kina_device *device) noexcept nogil


def default_pool(ordinal: int) -> PoolMemoryResource:
    """The pool of a device that serves other libraries where no resource was chosen: one, as long as the process."""
    cdef int number = ordinal
    cdef kina_device *device
    cdef MemoryResource made
    if not 0 <= number < KINA_ORDINALS or kina_pool_faces[number] == NULL:
        device = open_device(number)
        made = PoolMemoryResource(CudaAsyncMemoryResource(number))
        if kina_pool_faces[number] == NULL:  # the GIL was not held all the time
            Py_INCREF(made)
            kina_pool_faces[number] = <PyObject *> made
            kina_retain(made.c)
            kina_shared_pools[number] = made.c
            kina_serve_device(device)
    return <object> kina_pool_faces[number]


cdef int serve_device(kina_device **out, int ordinal, const char *operation) noexcept nogil:
    cdef int status
    if not 0 <= ordinal < KINA_ORDINALS:
        return fail(KINA_ARGUMENT, operation, b"there is no CUDA device of that ordinal")
    out[0] = kina_served_device(ordinal)
    if out[0] != NULL:
        return 0
    if interpreter_is_finalizing() and not holds_gil():
        return fail(KINA_UNAVAILABLE, operation, b"the interpreter is going: no device can be opened any more")
    status = open_for_service(ordinal)
    out[0] = kina_served_device(ordinal)
    return status


cdef int open_for_service(int ordinal) noexcept with gil:
    # A function of its own: where Python objects are, Cython takes the GIL at every return.
    try:
        default_pool(ordinal)
    except BaseException as error:
        return fail_with(error)
    return 0


cdef int shared_pool(kina_resource **out, int ordinal, const char *operation) noexcept nogil:
    cdef kina_device *device = NULL
    cdef int status = serve_device(&device, ordinal, operation)
    if status == 0:
        out[0] = kina_shared_pools[ordinal]
        kina_retain(out[0])
    return status


cdef void trim_served_devices() noexcept nogil:
    cdef int ordinal
    for ordinal in range(KINA_ORDINALS):
        if kina_served_device(ordinal) != NULL:
            pools_trim_device(ordinal, QUIETLY)
