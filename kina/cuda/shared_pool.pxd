from kina._core.storage cimport kina_resource
from kina.cuda.handles cimport kina_device

# The device of an ordinal, opened, its shared pool made: 0 or a detail code. Takes the GIL only if neither this nor
# default_pool() was called for the device before.
cdef int serve_device(kina_device **out, int ordinal, const char *operation) noexcept nogil
# A new reference to the pool of a device; the same.
cdef int shared_pool(kina_resource **out, int ordinal, const char *operation) noexcept nogil
# Every pool of kina on the devices that serve gives its free chunks back. Never waits; with no lock held.
cdef void trim_served_devices() noexcept nogil
