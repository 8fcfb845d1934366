from libc.stdint cimport uint64_t

from kina.cuda.handles cimport kina_runtime

# Make runtime.pool ready for use as a resource; the driver's pool comes with the first allocation.
# `harvest` is what retirement offers when memory runs short: release what is complete (everything, if idle).
cdef void pool_init(kina_runtime *runtime, void (*harvest)(kina_runtime *, int) noexcept nogil) noexcept nogil
# Lay the driver's pool aside for the next Runtime of the device, emptied of what it can give back at once.
cdef void pool_shelve(kina_runtime *runtime) noexcept nogil
# Bytes the driver's pool holds and uses; 0 where there is none.
cdef void pool_usage(kina_runtime *runtime, uint64_t *reserved, uint64_t *used) noexcept nogil
