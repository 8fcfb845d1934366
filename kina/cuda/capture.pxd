from libc.stdint cimport uint64_t

from kina._core.storage cimport KINA_STORAGE_ADOPTED, kina_resource, kina_storage
from kina.cuda.cudatypes cimport CUgraph, CUresult, CUstream
from kina.cuda.handles cimport kina_capture, kina_device, kina_load_capture, kina_runtime, kina_seal

# One with one reference; NULL without host memory.
cdef kina_capture *capture_make(kina_device *device) noexcept nogil
# What it allocates comes from `pool` too; takes over the reference. 0 or a recorded status.
cdef int capture_add_pool(kina_capture *capture, kina_resource *pool) noexcept nogil
# What is captured from now on uses `handle`: the capture has a reference of its own. 0 or a recorded status.
cdef int capture_lease(kina_capture *capture, void *handle, int urgent) noexcept nogil
# Hand a reference to somebody else's graph, which gives it back when no replay can use it any more. 0 or a recorded
# status.
cdef int capture_give(kina_capture *capture, CUgraph graph) noexcept nogil
# Begin to capture the Runtime's stream, which takes over the reference if that succeeds. The context must be current.
cdef CUresult capture_begin(kina_runtime *runtime, kina_capture *capture) noexcept nogil
# Somebody else is capturing the Runtime's stream, into `capture`, or (NULL) nobody any more; takes over the reference.
cdef void capture_set(kina_runtime *runtime, kina_capture *capture) noexcept nogil
# What `waiter` does from now on comes after all that the producer's stream has so far. From any thread, with the
# device's context current; 0 or a recorded status, as of a producer that is being captured.
cdef int order_after(kina_runtime *producer, CUstream waiter, const char *operation) noexcept nogil
# What the Runtime's stream does from now on comes after all that `producer` has so far: a stream of the same context,
# of no Runtime, which is not asked whether it is being captured. The same otherwise.
cdef int order_behind(kina_runtime *waiter, CUstream producer, const char *operation) noexcept nogil
# The same of two Runtimes of one device.
cdef int order_runtimes(kina_runtime *producer, kina_runtime *waiter, const char *operation) noexcept nogil
# seal_record on the Runtime's stream, from any thread, unless that is being captured.
cdef int record_seal(kina_runtime *runtime, kina_seal **out, const char *operation) noexcept nogil
# What graphs gave back. Any thread, with no lock held.
cdef void release_dropped_captures(kina_device *device) noexcept nogil


cdef inline bint is_capturing(kina_runtime *runtime) noexcept nogil:
    """Is its stream being captured, as far as is known? Of its own stream that is always known. Any thread."""
    return kina_load_capture(&runtime.capture) != NULL


cdef inline bint must_lease(kina_runtime *runtime, kina_storage *storage) noexcept nogil:
    """Must what is enqueued with this storage lease it? Stream order protects the Runtime's own memory, but not for
    a graph."""
    cdef kina_capture *capture = runtime.capture
    cdef int i
    if capture == NULL:
        return storage.flags & KINA_STORAGE_ADOPTED != 0
    for i in range(capture.pool_count):
        if storage.resource == capture.pools[i]:
            return False  # which lives as long as the graph
    return True


# 0, or the record says that its stream is being captured. Any thread; asks the driver about a stream made elsewhere.
cdef int refuse_capture(kina_runtime *runtime, const char *operation) noexcept nogil
# Which capture the stream of the Runtime is in: its id, 0 for none. `graph` may be NULL. The context must be current.
cdef int ask_capture(kina_runtime *runtime, uint64_t *id, CUgraph *graph, const char *operation) noexcept nogil
