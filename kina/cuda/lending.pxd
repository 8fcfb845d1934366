from libc.stdint cimport uint64_t

from kina._core.storage cimport kina_handle, kina_storage
from kina.cuda.handles cimport kina_runtime

ctypedef struct stream_use:
    stream_use *next
    kina_runtime *runtime       # owned
    kina_handle *fence          # owned; behind what the stream had enqueued when the memory was dropped

ctypedef struct allocation:
    allocation *next            # of its holder, or among those that wait
    void *address
    kina_storage *storage       # owned
    stream_use *uses

# Memory from the resource that is current in the calling thread, in the order of the Runtime's stream: 0 or a detail
# code. Waits for what was dropped where memory is short. The GIL is taken by a resource in Python only, and by the
# device's first use, as shared_pool does.
cdef int make_allocation(allocation **out, kina_runtime *runtime, size_t nbytes) noexcept nogil
# Drop it: it goes back at once, or waits until the streams that use it are past what they have enqueued, and no capture
# is in the way. Never waits for anything.
cdef void give_back(allocation *self) noexcept nogil
# Give back of those that wait what the device is past, until so many were found that it is not.
cdef void settle(uint64_t patience) noexcept nogil
cdef void count_pending(uint64_t *allocations, uint64_t *nbytes) noexcept nogil

# A use by the stream of `runtime`, whose reference it takes over. NULL with a recorded error, the reference given up.
cdef stream_use *make_use(kina_runtime *runtime) noexcept nogil
# Whether the allocation took it over: not if its own stream is meant, or one that is known to use it. Nobody may drop
# the allocation meanwhile, or note another use.
cdef bint note_use(allocation *self, stream_use *use) noexcept nogil
cdef void end_use(stream_use *use) noexcept nogil
