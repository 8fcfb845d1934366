from kina._core.resource cimport MemoryResource

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
