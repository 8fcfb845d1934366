from kina._core.storage cimport kina_resource
from kina.cuda.cudatypes cimport CUgraph, CUresult
from kina.cuda.handles cimport kina_capture, kina_runtime, kina_session_node

# Begin to capture a session's stream; one of the two references is the caller's. The context must be current.
cdef kina_capture *start_capture(kina_session_node *node) except NULL
# The stream runs again, whatever comes of the capture: a graph, owned by the caller, or NULL. In another thread than
# its own it comes to nothing. The context must be current.
cdef CUresult stop_capture(kina_runtime *runtime, kina_capture *capture, CUgraph *graph) noexcept nogil

# The same, and nothing is kept. Any context.
cdef void drop_capture(kina_runtime *runtime, kina_capture *capture) noexcept nogil
# The session goes without having ended its capture: whoever has the Runtime next does so first. In any thread, while no
# call of the session is under way.
cdef void disown_capture(kina_session_node *node) noexcept nogil
# The Runtime goes: whether its stream can be used by others, which one that is being captured still cannot.
cdef bint forget_capture(kina_runtime *runtime) noexcept nogil
# The graph's pool that has its memory from `chosen`, made at first use. Borrowed. Only while the stream is being
# captured, in the thread that has the Runtime open.
cdef kina_resource *captured_pool(kina_runtime *runtime, kina_resource *chosen) except NULL
# A stream made elsewhere may have come into, or out of, somebody's capture since the last call: the Runtime follows.
# A capture may have failed: that is told before anything more is enqueued.
cdef int follow_capture(kina_runtime *runtime, const char *operation) except -1
# The same without the GIL: 0 or a recorded status.
cdef int look_at_capture(kina_runtime *runtime, const char *operation) noexcept nogil


cdef inline bint may_be_captured(kina_runtime *runtime) noexcept nogil:
    """Is that to be asked before anything is enqueued?"""
    return runtime.adopted or runtime.capture != NULL
