from libc.stdint cimport uint64_t

from kina._core.storage cimport KINA_STORAGE_ADOPTED, kina_handle, kina_storage
from kina.cuda.capture cimport must_lease
from kina.cuda.cudatypes cimport CUresult, CUstream
from kina.cuda.handles cimport KINA_OWNER, KINA_SEAL_LEASES, kina_device, kina_module, kina_runtime, kina_seal

# The thread that has the Runtime open leases, seals and synchronizes; harvest may come from any thread. All need
# the device's context current except harvest, which needs none. Each returns 0 or a recorded status.

# The open segment takes a reference to `handle`, dropped once the device is past everything enqueued until the
# next seal. Before the enqueue it protects, so that a failure enqueues nothing. `urgent`: KINA_OWNER (which is True),
# KINA_STAGING, or 0.
cdef int lease(kina_runtime *runtime, void *handle, int urgent) noexcept nogil


cdef inline int lease_storage(kina_runtime *runtime, kina_storage *storage) noexcept nogil:
    """Where stream order does not protect it."""
    if must_lease(runtime, storage):
        return lease(runtime, storage, KINA_OWNER if storage.flags & KINA_STORAGE_ADOPTED else 0)
    return 0


# Close the open segment with one recorded event. `out`, if not NULL, receives a reference to the seal, which is
# recorded even when nothing is leased.
cdef int seal(kina_runtime *runtime, kina_seal **out) noexcept nogil


cdef inline void seal_if_full(kina_runtime *runtime) noexcept nogil:
    """After an enqueue, never among its leases: a seal recorded before the enqueue would not protect them."""
    if runtime.open != NULL and runtime.open.leases.count >= KINA_SEAL_LEASES:
        seal(runtime, NULL)  # what cannot be sealed now stays leased


# Leases that are not released yet, sealed or not.
cdef uint64_t leases_pending(kina_runtime *runtime) noexcept nogil
# At session exit: seal only what must not wait for the next occasion.
cdef int seal_if_urgent(kina_runtime *runtime) noexcept nogil
# Release what completed seals protected.
cdef void harvest(kina_runtime *runtime) noexcept nogil
# The same for every Runtime of the device: what one has not looked at yet may be what another needs.
cdef void harvest_device(kina_device *device) noexcept nogil
# Host-wait for the whole device, and let go of what was in quarantine before the wait: whether anything was. `code` is
# what the driver says of the wait; unless that is success, all stays where it is.
cdef bint wait_for_quarantined(kina_device *device, CUresult *code) noexcept nogil
# Host-wait for the oldest seal and release what it protected; 1 if there was none.
cdef int wait_for_oldest(kina_runtime *runtime) noexcept nogil
# Host-wait for everything enqueued on the Runtime's stream, and release it.
cdef int synchronize(kina_runtime *runtime) noexcept nogil
# kina_handle.destroy of modules: unloading may wait for the device, and the last reference may go in a finaliser, so it
# is only noted; unload_dead_modules does it, where waiting is allowed.
cdef void bury_module(kina_handle *handle) noexcept nogil
cdef void unload_dead_modules(kina_device *device) noexcept nogil
# The Runtime goes: its unfinished segments pass to the device. `current`: its context is, so that the open one can be
# sealed; if not, that one leaks.
cdef void orphan_segments(kina_runtime *runtime, bint current) noexcept nogil

# At its last release: keep it until the whole device has been waited for. 1: it is kept, or leaked.
cdef int quarantine(kina_storage *storage) noexcept nogil
# storage.before_release of a Runtime's memory that its resource does not free in stream order, and of what it adopted:
# a seal of its own holds it until its home stream is past everything enqueued so far.
cdef int retire_storage(kina_storage *storage) noexcept nogil
# Release what has become free of it; `all`: look at every one, not only as far as the oldest that is not.
cdef void harvest_retired(kina_device *device, bint all) noexcept nogil
# Host-wait for the oldest, and release what is free then; 1 if there was none.
cdef int wait_for_retired(kina_device *device) noexcept nogil
