"""Sessions whose stream is being captured: their memory, and how they follow captures that others begin and end.

A graph runs long after its capture, and as often as somebody likes, so its memory is its own: pools that give nothing
back while it lives. They take it from the resource that the session would use, but in the order of no stream.

Source: CUDA Driver API, "Stream Management" (cuStreamGetCaptureInfo).
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc

from kina._core.pool cimport pool_make_keeping
from kina._core.resource cimport adaptor_destroy, adaptor_init, kina_adaptor
from kina._core.status cimport KINA_OUT_OF_MEMORY, KINA_UNSUPPORTED, check, fail, last_error
from kina._core.storage cimport (
    KINA_ASK_FOR_ALL,
    KINA_ASK_PATIENTLY,
    KINA_ASK_QUIETLY,
    KINA_RESOURCE_PYTHON,
    kina_ask,
    kina_release,
    kina_resource,
    kina_resource_vtable,
    kina_retain,
    kina_stream,
)
from kina.cuda.capture cimport (
    ask_capture,
    capture_add_pool,
    capture_begin,
    capture_give,
    capture_make,
    capture_set,
)
from kina.cuda.context cimport context_begin, context_end, device_failed, device_is_gone
from kina.cuda.cudatypes cimport (
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_SUCCESS,
    CUgraph,
    CUresult,
    CUstream,
    CUstreamCaptureStatus,
)
from kina.cuda.driver cimport cu
from kina.cuda.handles cimport kina_add, kina_capture, kina_load, kina_runtime, kina_session_node, kina_store
from kina.cuda.memory cimport release_held_frees

__all__ = []


# A resource over another that asks it for memory in the order of no stream ---------------------------------


cdef int allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    kina_add(&(<kina_runtime *> stream).counters.host_waits, 1)  # most resources wait then until it is there
    return kina_ask(self.upstream, out, nbytes, NULL, KINA_ASK_FOR_ALL)


cdef int try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                      bint may_wait) noexcept nogil:
    kina_add(&(<kina_runtime *> stream).counters.host_waits, 1)
    return kina_ask(self.upstream, out, nbytes, NULL, KINA_ASK_PATIENTLY if may_wait else KINA_ASK_QUIETLY)


cdef void deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    self.upstream.vtable.deallocate(self.upstream, data, nbytes, stream)


cdef kina_resource_vtable functions
functions.allocate = allocate
functions.deallocate = deallocate
functions.try_allocate = try_allocate


cdef kina_resource *unordered(kina_resource *upstream) except NULL:
    cdef kina_adaptor *made = <kina_adaptor *> calloc(1, sizeof(kina_adaptor))
    if made == NULL:
        raise MemoryError("no host memory for a graph's memory")
    adaptor_init(made, &functions, upstream, adaptor_destroy)
    made.vtable.name = upstream.vtable.name  # whose the memory is
    return &made.resource


cdef kina_resource *captured_pool(kina_runtime *runtime, kina_resource *chosen) except NULL:
    cdef kina_capture *capture = runtime.capture
    cdef kina_resource *between
    cdef kina_resource *pool
    cdef int i
    for i in range(capture.pool_count):
        if capture.pools[i].upstream.upstream == chosen:
            return capture.pools[i]
    if chosen.flags & KINA_RESOURCE_PYTHON:
        check(fail(KINA_UNSUPPORTED, b"allocate", b"the stream is being captured, and a graph cannot have memory of a "
                   b"resource in Python: choose another, or allocate before the capture"))
    between = unordered(chosen)
    try:
        pool = pool_make_keeping(between)
    finally:
        kina_release(between)
    check(capture_add_pool(capture, pool))
    return pool


# Captures of kina's own -----------------------------------------------------------------------------------


cdef kina_capture *start_capture(kina_session_node *node) except NULL:
    cdef kina_runtime *runtime = node.runtime
    cdef kina_capture *capture = capture_make(runtime.device)
    cdef CUresult code
    cdef int status
    if capture == NULL:
        raise MemoryError("no host memory for a capture")
    kina_retain(capture)
    code = capture_begin(runtime, capture)
    if code != CUDA_SUCCESS:
        kina_release(capture)
        kina_release(capture)
        check(device_failed(runtime.device, code, KINA_UNSUPPORTED, b"capture",
                            b"the session's stream cannot be captured"))
    capture.node = node
    status = ask_capture(runtime, &capture.id, NULL, b"capture")
    if status != 0:
        drop_capture(runtime, capture)
        kina_release(capture)
        check(status)
    return capture


cdef CUresult stop_capture(kina_runtime *runtime, kina_capture *capture, CUgraph *graph) noexcept nogil:
    cdef CUstreamCaptureStatus now = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code = CUDA_SUCCESS
    graph[0] = NULL
    capture.node = NULL
    if not device_is_gone(runtime.device):
        code = cu.cuStreamEndCapture(<CUstream> runtime.stream.native, graph)
        if code != CUDA_SUCCESS and (cu.cuStreamIsCapturing(<CUstream> runtime.stream.native, &now) != CUDA_SUCCESS
                                     or now != CU_STREAM_CAPTURE_STATUS_NONE):
            kina_store(&capture.unended, 1)
            return code
    kina_store(&capture.unended, 0)
    if runtime.capture == capture:
        capture_set(runtime, NULL)
    release_held_frees(runtime.device)
    return code


cdef void disown_capture(kina_session_node *node) noexcept nogil:
    cdef kina_capture *capture = node.runtime.capture
    if capture != NULL and capture.node == node:
        capture.node = NULL
        kina_store(&capture.unended, 1)


cdef bint forget_capture(kina_runtime *runtime) noexcept nogil:
    cdef bint ended = True
    if runtime.capture == NULL:
        return ended
    if kina_load(&runtime.capture.unended):
        drop_capture(runtime, runtime.capture)
        ended = runtime.capture == NULL
    if runtime.capture != NULL:
        capture_set(runtime, NULL)  # somebody else's graph has what it holds
    return ended


cdef void drop_capture(kina_runtime *runtime, kina_capture *capture) noexcept nogil:
    cdef CUgraph graph = NULL
    cdef int pushed = context_begin(runtime.device, b"capture")
    stop_capture(runtime, capture, &graph)
    if graph != NULL:
        cu.cuGraphDestroy(graph)
    context_end(pushed)


# Captures of others ---------------------------------------------------------------------------------------


cdef int follow_capture(kina_runtime *runtime, const char *operation) except -1:
    check(look_at_capture(runtime, operation))
    return 0


cdef int look_at_capture(kina_runtime *runtime, const char *operation) noexcept nogil:
    cdef uint64_t id = 0
    cdef int status
    cdef int pushed = context_begin(runtime.device, operation)
    if pushed < 0:
        return last_error().detail
    if runtime.capture != NULL and kina_load(&runtime.capture.unended):
        drop_capture(runtime, runtime.capture)
    status = ask_capture(runtime, &id, NULL, operation)
    if status == 0 and runtime.capture != NULL and kina_load(&runtime.capture.unended):
        status = fail(KINA_UNSUPPORTED, operation,
                      b"the stream is being captured still, and the driver does not end that: use another Runtime")
    elif status == 0 and id != (runtime.capture.id if runtime.capture != NULL else 0):
        status = change_capture(runtime, operation)
    context_end(pushed)
    return status


cdef int change_capture(kina_runtime *runtime, const char *operation) noexcept nogil:
    cdef kina_capture *capture = NULL
    cdef CUgraph graph = NULL
    cdef uint64_t id = 0
    cdef int status = ask_capture(runtime, &id, &graph, operation)
    if status != 0:
        return status
    if id != 0:
        capture = capture_make(runtime.device)
        if capture == NULL:
            return fail(KINA_OUT_OF_MEMORY, operation, b"no host memory for a capture")
        capture.id = id
        status = capture_give(capture, graph)
        if status != 0:
            kina_release(capture)
            return status
    capture_set(runtime, capture)
    if id == 0:
        release_held_frees(runtime.device)
    return 0
