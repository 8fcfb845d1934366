from libc.stdint cimport uint64_t

from kina._core.storage cimport kina_dl_device, kina_resource, kina_storage

# The host is one Runtime with one allocation domain for the process.
cdef uint64_t host_runtime() noexcept nogil
cdef uint64_t host_domain() noexcept nogil
cdef kina_dl_device host_device() noexcept nogil

# The host's own resource: immortal, 256-byte aligned, any thread, no stream order.
cdef kina_resource *host_resource() noexcept nogil

# All bytes of a host storage, as an exporter of the buffer protocol that keeps the storage alive.
cdef object storage_bytes(kina_storage *storage, bint writable)
