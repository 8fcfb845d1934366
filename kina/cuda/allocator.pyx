# cython: annotation_typing=False
"""What PyTorch calls: memory by its address.

The GIL is taken for the first use of a device, by resources in Python, and to forget what they raised.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.fork_mutex cimport fork_mutex_init, fork_mutex_lock, fork_mutex_unlock, kina_fork_mutex
from kina._core.status cimport KINA_ARGUMENT, error_take, fail, kina_error, last_error
from kina._core.storage cimport holds_gil, interpreter_is_finalizing, kina_release
from kina.cuda.driver cimport driver_is_silent, process_is_forked
from kina.cuda.foreign_streams cimport known_streams, open_stream
from kina.cuda.handles cimport kina_runtime
from kina.cuda.lending cimport (
    allocation,
    count_pending,
    end_use,
    give_back,
    make_allocation,
    make_use,
    note_use,
    settle,
    stream_use,
)
from kina.cuda.shared_pool cimport trim_served_devices

__all__ = ["torch_counts", "torch_functions"]


cdef extern from "native/torch_entry.h":
    ctypedef struct kina_torch_functions:
        int (*allocate)(void **out, Py_ssize_t nbytes, int ordinal, void *stream) noexcept nogil
        void (*deallocate)(void *data) noexcept nogil
        int (*record_stream)(void *data, void *stream) noexcept nogil
        void (*empty_cache)() noexcept nogil
        void (*describe)(char *text, size_t room) noexcept nogil
    void kina_torch_install(const kina_torch_functions *functions) noexcept nogil
    # Throw C++ exceptions: for PyTorch to call, not from here.
    void kina_torch_record_stream(void *data, void *stream) noexcept nogil
    void kina_torch_empty_cache() noexcept nogil


# Addresses ------------------------------------------------------------------------------------------------

cdef kina_fork_mutex mutex              # guards what follows
cdef allocation *few[64]                # the first table
cdef allocation **buckets = few
cdef size_t bucket_count = 64           # a power of two
cdef uint64_t live_count = 0
cdef uint64_t live_bytes = 0
cdef uint64_t unknown_frees = 0

fork_mutex_init(&mutex)


cdef size_t bucket_of(void *address, size_t count) noexcept nogil:
    # Addresses are multiples of 256; Knuth's multiplicative hash spreads what is left.
    return (((<uintptr_t> address >> 8) * <uint64_t> 0x9E3779B97F4A7C15) >> 32) & (count - 1)


cdef allocation **place_of(void *address) noexcept nogil:
    """Under the mutex: where the pointer to the allocation of an address is; it holds NULL if there is none."""
    cdef allocation **place = &buckets[bucket_of(address, bucket_count)]
    while place[0] != NULL and place[0].address != address:
        place = &place[0].next
    return place


cdef void spread() noexcept nogil:
    """Under the mutex: a larger table, if there is memory for it."""
    global buckets, bucket_count
    cdef size_t count = 4 * bucket_count
    cdef allocation **larger = <allocation **> calloc(count, sizeof(allocation *))
    cdef allocation *each
    cdef allocation *following
    cdef size_t i, place
    if larger == NULL:
        return
    for i in range(bucket_count):
        each = buckets[i]
        while each != NULL:
            following = each.next
            place = bucket_of(each.address, count)
            each.next = larger[place]
            larger[place] = each
            each = following
    if buckets != few:
        free(buckets)
    buckets = larger
    bucket_count = count


# PyTorch's functions --------------------------------------------------------------------------------------

cdef int torch_allocate(void **out, Py_ssize_t nbytes, int ordinal, void *stream) noexcept nogil:
    global live_count, live_bytes
    cdef kina_runtime *runtime = NULL
    cdef allocation *made = NULL
    cdef allocation **place
    cdef int status
    out[0] = NULL
    if nbytes < 0:
        return fail(KINA_ARGUMENT, b"allocate", b"a negative number of bytes was asked for")
    if nbytes == 0:
        return 0
    status = open_stream(&runtime, ordinal, stream, b"allocate")
    if status != 0:
        return status
    status = make_allocation(&made, runtime, nbytes)
    kina_release(runtime)
    if status != 0:
        return status
    fork_mutex_lock(&mutex)
    if live_count >= 2 * bucket_count:
        spread()
    place = &buckets[bucket_of(made.address, bucket_count)]
    made.next = place[0]
    place[0] = made
    live_count += 1
    live_bytes += nbytes
    fork_mutex_unlock(&mutex)
    out[0] = made.address
    return 0


cdef void torch_deallocate(void *data) noexcept nogil:
    global live_count, live_bytes, unknown_frees
    cdef allocation **place
    cdef allocation *found
    if data == NULL or driver_is_silent():
        return  # leaked, silently
    fork_mutex_lock(&mutex)
    place = place_of(data)
    found = place[0]
    if found == NULL:
        unknown_frees += 1
    else:
        place[0] = found.next
        live_count -= 1
        live_bytes -= found.storage.nbytes
    fork_mutex_unlock(&mutex)
    if found != NULL:
        give_back(found)


cdef int torch_record_stream(void *data, void *stream) noexcept nogil:
    cdef kina_runtime *runtime = NULL
    cdef allocation *found
    cdef stream_use *use
    cdef int ordinal, status
    if process_is_forked():
        return 0
    fork_mutex_lock(&mutex)
    found = place_of(data)[0]
    ordinal = -1 if found == NULL else found.storage.device.device_id
    fork_mutex_unlock(&mutex)
    if ordinal < 0:
        return 0  # somebody else's memory, a tensor of from_dlpack() say: PyTorch's own allocator passes over it too
    status = open_stream(&runtime, ordinal, stream, b"record_stream")
    if status != 0:
        return status
    use = make_use(runtime)
    if use == NULL:
        return last_error().detail
    fork_mutex_lock(&mutex)
    found = place_of(data)[0]
    if found != NULL and note_use(found, use):
        use = NULL
    fork_mutex_unlock(&mutex)
    if use != NULL:
        end_use(use)
    return 0


cdef void torch_empty_cache() noexcept nogil:
    if driver_is_silent():
        return
    settle(<uint64_t> -1)
    trim_served_devices()


cdef void torch_describe(char *text, size_t room) noexcept nogil:
    cdef kina_error *record = last_error()
    cdef kina_error forgotten
    if record.driver_code != 0:
        snprintf(text, room, "kina: %s: %s (%d): %s", record.message, record.driver_name, record.driver_code,
                 record.driver_string)
    else:
        snprintf(text, room, "kina: %s", record.message)
    if record.has_exception and (holds_gil() or not interpreter_is_finalizing()):
        with gil:
            error_take(&forgotten)
    memset(record, 0, sizeof(kina_error))


cdef kina_torch_functions functions
functions.allocate = torch_allocate
functions.deallocate = torch_deallocate
functions.record_stream = torch_record_stream
functions.empty_cache = torch_empty_cache
functions.describe = torch_describe
kina_torch_install(&functions)


def torch_functions() -> tuple[int, int]:
    """The addresses of ``kina_torch_record_stream`` and ``kina_torch_empty_cache``, for PyTorch alone to call."""
    return <uintptr_t> &kina_torch_record_stream, <uintptr_t> &kina_torch_empty_cache


def torch_counts() -> dict[str, int]:
    """What PyTorch has from kina, by the names of :class:`kina.memory.integrations.TorchStatistics`."""
    cdef uint64_t allocations, nbytes, unknown, pending, pending_bytes
    fork_mutex_lock(&mutex)
    allocations = live_count
    nbytes = live_bytes
    unknown = unknown_frees
    fork_mutex_unlock(&mutex)
    count_pending(&pending, &pending_bytes)
    return {
        "live_allocations": allocations,
        "live_bytes": nbytes,
        "pending_allocations": pending,
        "pending_bytes": pending_bytes,
        "streams": known_streams(),
        "unknown_frees": unknown,
    }
