cimport cython
from kina._core.resource cimport MemoryResource
from kina.cuda.handles cimport kina_runtime


@cython.final
cdef class Runtime:
    cdef kina_runtime *c        # owned reference
    cdef object _modules        # the module cache, made by the room above at first use
    cdef MemoryResource _memory  # where its sessions' memory comes from; None: as the default has it

# The calling thread's own Runtime of a device, made at first use.
cdef Runtime default_runtime(int ordinal)
# The calling thread's Runtime of somebody else's stream (anything with __cuda_stream__).
cdef Runtime adopted_runtime(int ordinal, object owner)
