from kina._core.storage cimport kina_resource

# The host's own resource: immortal, 256-byte aligned, any thread, no stream order.
cdef kina_resource *host_resource() noexcept nogil
