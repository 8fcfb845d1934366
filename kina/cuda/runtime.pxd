cimport cython
from kina._core.resource cimport MemoryResource
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.handles cimport kina_device, kina_runtime


@cython.final
cdef class Runtime:
    cdef kina_runtime *c        # owned reference
    cdef object _modules        # the module cache, made by the room above at first use
    cdef int _most_modules      # its bound
    cdef object _objects        # what raw.resource keeps, the same
    cdef MemoryResource _memory  # where its sessions' memory comes from; None: as the default has it

# The calling thread's own Runtime of a device, made at first use.
cdef Runtime default_runtime(int ordinal)
# The calling thread's Runtime of somebody else's stream (anything with __cuda_stream__).
cdef Runtime adopted_runtime(int ordinal, object owner)
# A new Runtime of somebody else's stream, for memory alone: it has no face, no session and no memory of its own, and
# keeps nobody alive, so the stream has to live as long as it. The device's context must be current.
cdef int runtime_adopt(kina_runtime **out, kina_device *device, CUstream stream) noexcept nogil
