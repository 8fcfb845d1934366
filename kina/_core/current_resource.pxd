from kina._core.resource cimport MemoryResource
from kina._core.storage cimport kina_resource

# The ordinal of host memory, among those of CUDA devices.
cdef enum:
    HOST_MEMORY = -1

# Whether a block of using() was ever entered, or a default of a CUDA device set: until then, only what a call and its
# session say need be looked at.
cdef bint memory_was_chosen

# The resource that memory of a device comes from in the calling thread: `memory` as a call gave it (None or a
# MemoryResource), else that of the innermost using() of the device, else `of_session` (None if it has none), else the
# default. None stands for kina's own resource. ArgumentError, ForeignDeviceError.
cdef MemoryResource memory_of(object memory, MemoryResource of_session, int ordinal, str operation)
# `memory` as a session is given it: None, or a resource of that device's memory. ArgumentError, ForeignDeviceError.
cdef MemoryResource check_memory(object memory, int ordinal, str operation)
# The same without the GIL, for calls outside of any session: a new reference, or NULL for kina's own resource. Of a
# resource with KINA_RESOURCE_PYTHON, memory_of gives the Python object that must be kept.
cdef kina_resource *resource_here(int ordinal) noexcept nogil
