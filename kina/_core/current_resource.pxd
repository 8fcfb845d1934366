from kina._core.resource cimport MemoryResource

# The resource that host memory of the calling thread comes from: `memory` as a call gave it (None or a
# MemoryResource), else that of the innermost using(), else `of_session` (None if it has none), else the default.
# None stands for the host's own resource. ArgumentError, ForeignDeviceError.
cdef MemoryResource host_memory_of(object memory, MemoryResource of_session, str operation)
# `memory` as a session is given it: None, or a resource of host memory. ArgumentError, ForeignDeviceError.
cdef MemoryResource check_host_memory(object memory, str operation)
