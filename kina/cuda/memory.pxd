from libc.stdint cimport int64_t, uint64_t

from kina._core.storage cimport kina_resource, kina_resource_vtable
from kina.cuda.cudatypes cimport CUmemoryPool
from kina.cuda.handles cimport kina_device, kina_idle_pool

cdef enum driver_memory:
    PLAIN       # cuMemAlloc
    MANAGED
    PINNED
    POOLED

ctypedef struct driver_resource:
    kina_resource base
    kina_device *device         # immortal
    driver_memory kind
    int64_t live_bytes          # atomic
    uint64_t host_waits         # atomic
    kina_idle_pool entry        # POOLED: its pool, in device.lent_pools unless it is adopted
    bint adopted
    void *pool_owner            # Python object, owned: keeps an adopted pool alive

cdef const kina_resource_vtable *plain_functions
cdef const kina_resource_vtable *managed_functions
cdef const kina_resource_vtable *pinned_functions
cdef const kina_resource_vtable *pooled_functions

# A resource with one reference; the device is opened.
cdef driver_resource *driver_resource_make(int ordinal, driver_memory kind, const kina_resource_vtable *functions,
                                           int device_type) except NULL
# One over a pool of the driver of its own; over plain memory where the device has no pools.
cdef driver_resource *pooled_make(int ordinal) except NULL
cdef int64_t driver_resource_live_bytes(driver_resource *self) noexcept nogil
# Where the Runtimes of the device have their chunks from: one resource as long as the process. Borrowed.
cdef kina_resource *memory_of_device(kina_device *device) except NULL
# Free what was dropped while its stream was being captured, if that is over.
cdef void release_held_frees(kina_device *device) noexcept nogil
# Bytes that a pool of the driver holds and uses.
cdef void pool_figures(CUmemoryPool pool, uint64_t *reserved, uint64_t *used) noexcept nogil
