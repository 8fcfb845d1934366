# cython: annotation_typing=False
"""Streams that other libraries name by their handle, each with the one Runtime that the process has of it.

Nobody can be held for such a stream: it has to live as long as the memory in its order.
"""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free

from kina._core.fork_mutex cimport fork_mutex_init, fork_mutex_lock, fork_mutex_unlock, kina_fork_mutex
from kina._core.status cimport KINA_OUT_OF_MEMORY, KINA_UNAVAILABLE, KINA_UNSUPPORTED, fail, last_error
from kina._core.storage cimport kina_release, kina_retain
from kina.cuda.context cimport context_begin, context_end, device_check
from kina.cuda.cudatypes cimport CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream
from kina.cuda.driver cimport process_is_forked
from kina.cuda.handles cimport kina_device, kina_runtime
from kina.cuda.runtime cimport runtime_adopt
from kina.cuda.shared_pool cimport serve_device
from kina.cuda.stream cimport stream_identify, stream_of, stream_refuse_capture

__all__ = ["release_stream"]


cdef enum:
    BUCKETS = 256

ctypedef struct known_stream:
    known_stream *next
    int ordinal
    CUstream native
    kina_runtime *runtime       # owned

cdef kina_fork_mutex mutex      # guards what follows
cdef known_stream *streams[BUCKETS]
cdef int64_t stream_count = 0

fork_mutex_init(&mutex)


cdef known_stream **place_of(int ordinal, CUstream native) noexcept nogil:
    """Under the mutex: where the pointer to the entry of a stream is; it holds NULL if there is none."""
    cdef known_stream **place = &streams[(<uintptr_t> native >> 4) % BUCKETS]
    while place[0] != NULL and (place[0].native != native or place[0].ordinal != ordinal):
        place = &place[0].next
    return place


cdef int open_stream(kina_runtime **out, int ordinal, void *handle, const char *operation) noexcept nogil:
    cdef CUstream native = <CUstream> handle
    cdef kina_device *device = NULL
    cdef int status, pushed
    if native == NULL:
        native = CU_STREAM_LEGACY
    if native == CU_STREAM_PER_THREAD:
        return fail(KINA_UNSUPPORTED, operation,
                    b"the per-thread default stream orders no memory: its handle means another stream in every thread")
    if process_is_forked():
        return fail(KINA_UNAVAILABLE, operation,
                    b"this process was forked from one that had already initialised CUDA; use the 'spawn' method")
    status = serve_device(&device, ordinal, operation)
    if status == 0:
        status = device_check(device, operation)
    if status != 0:
        return status
    pushed = context_begin(device, operation)
    if pushed < 0:
        return last_error().detail
    status = find_stream(out, device, native, operation)
    context_end(pushed)
    return status


cdef int find_stream(kina_runtime **out, kina_device *device, CUstream native, const char *operation) noexcept nogil:
    """The context of the device is current."""
    cdef known_stream *found
    cdef kina_runtime *known = NULL
    cdef unsigned long long stream_id = 0
    cdef int status = refuse_capture(device, native, operation)
    if status == 0 and native != CU_STREAM_LEGACY:
        status = stream_identify(device, native, &stream_id)
    if status != 0:
        return status
    fork_mutex_lock(&mutex)
    found = place_of(device.ordinal, native)[0]
    # The handle may be that of a stream that is gone by now, but its id is never used again.
    if found != NULL and (native == CU_STREAM_LEGACY or found.runtime.stream_id == stream_id):
        known = found.runtime
        kina_retain(known)
    fork_mutex_unlock(&mutex)
    if known == NULL:
        return adopt_stream(out, device, native, operation)
    out[0] = known
    return 0


cdef int refuse_capture(kina_device *device, CUstream native, const char *operation) noexcept nogil:
    cdef int status = stream_refuse_capture(device, native, operation)
    if status == KINA_UNSUPPORTED and last_error().driver_code == 0:
        return fail(status, operation, b"the stream is being captured into a graph, which memory of kina cannot be a "
                    b"part of yet: allocate before the capture begins")
    return status


cdef int adopt_stream(kina_runtime **out, kina_device *device, CUstream native, const char *operation) noexcept nogil:
    """A new entry, or a new Runtime in the entry of a stream that is gone. The context of the device is current."""
    global stream_count
    cdef known_stream *added
    cdef known_stream **place
    cdef kina_runtime *made = NULL
    cdef kina_runtime *superfluous = NULL
    cdef int status = runtime_adopt(&made, device, native)
    if status != 0:
        return status
    added = <known_stream *> calloc(1, sizeof(known_stream))
    if added == NULL:
        kina_release(made)
        return fail(KINA_OUT_OF_MEMORY, operation, b"no host memory for the bookkeeping of a stream")
    added.ordinal = device.ordinal
    added.native = native
    added.runtime = made
    fork_mutex_lock(&mutex)
    place = place_of(device.ordinal, native)
    if place[0] == NULL:
        place[0] = added
        added = NULL
        stream_count += 1
    elif place[0].runtime.stream_id != made.stream_id:
        superfluous = place[0].runtime
        place[0].runtime = made
    else:  # another thread was faster
        superfluous = made
        made = place[0].runtime
    kina_retain(made)
    fork_mutex_unlock(&mutex)
    out[0] = made
    kina_release(superfluous)
    free(added)
    return 0


cdef int64_t known_streams() noexcept nogil:
    cdef int64_t count
    fork_mutex_lock(&mutex)
    count = stream_count
    fork_mutex_unlock(&mutex)
    return count


def release_stream(stream: object) -> None:
    """Let go of a stream that was served; see :func:`kina.memory.integrations.torch_release_stream`."""
    cdef CUstream native = stream_of(stream)
    cdef known_stream *removed
    if native == CU_STREAM_LEGACY:
        return  # it never ends
    with nogil:
        removed = take_entry(native)
        if removed != NULL:
            kina_release(removed.runtime)
            free(removed)


cdef known_stream *take_entry(CUstream native) noexcept nogil:
    """Of whichever device: only the legacy stream has the same handle on several."""
    global stream_count
    cdef known_stream **place = &streams[(<uintptr_t> native >> 4) % BUCKETS]
    cdef known_stream *removed
    fork_mutex_lock(&mutex)
    while place[0] != NULL and place[0].native != native:
        place = &place[0].next
    removed = place[0]
    if removed != NULL:
        place[0] = removed.next
        stream_count -= 1
    fork_mutex_unlock(&mutex)
    return removed
