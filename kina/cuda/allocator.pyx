# cython: annotation_typing=False
"""Memory for other libraries: what PyTorch calls without the GIL, and what CuPy and Numba are given.

Memory comes from the resource that is current in the calling thread, in the order of the stream that it is asked for
on, and goes back in that order; if other streams were named as users of it, once those are past what they had enqueued
when it was dropped.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.current_resource cimport memory_of, resource_here
from kina._core.pool cimport QUIETLY, pools_trim_device
from kina._core.resource cimport MemoryResource, parse_nbytes
from kina._core.status cimport (
    KINA_ARGUMENT,
    KINA_DRIVER,
    KINA_OUT_OF_MEMORY,
    KINA_UNAVAILABLE,
    KINA_UNSUPPORTED,
    check,
    error_take,
    fail,
    fail_with,
    kina_error,
    last_error,
)
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_RESOURCE_PYTHON,
    drain_python_releases,
    holds_gil,
    interpreter_is_finalizing,
    kina_dl_device,
    kina_handle,
    kina_release,
    kina_resource,
    kina_retain,
    kina_storage,
    storage_allocate,
    storage_keep,
)
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed, device_is_gone, open_device
from kina.cuda.cudatypes cimport (
    CU_STREAM_LEGACY,
    CU_STREAM_PER_THREAD,
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, driver_is_silent, process_is_forked, relaxed_begin, relaxed_end
from kina.cuda.handles cimport (
    kina_add,
    kina_device,
    kina_load_u64,
    kina_runtime,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)
from kina.cuda.retire cimport harvest_retired, retire_storage, wait_for_retired
from kina.cuda.runtime cimport Runtime, adopted_runtime
from kina.cuda.stream cimport stream_identify, stream_of, stream_refuse_capture

from kina._core.pool import PoolMemoryResource
from kina.cuda.resources import CudaAsyncMemoryResource

__all__ = ["Allocation", "allocate", "default_pool", "memory_info", "release_stream", "torch_counts", "torch_functions"]


cdef extern from *:
    """
    #include <pthread.h>
    #include "kina_memory.h"
    #include "handles.h"

    enum { KINA_ORDINALS = 128, KINA_STREAM_BUCKETS = 256 };

    /* Written once per device, never cleared. */
    static kina_device *kina_served_devices[KINA_ORDINALS];
    static kina_resource *kina_default_pools[KINA_ORDINALS]; /* owned */

    static pthread_mutex_t kina_streams_mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_mutex_t kina_allocations_mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_mutex_t kina_pending_mutex = PTHREAD_MUTEX_INITIALIZER;

    static kina_device *kina_served_device(int ordinal) {
        return __atomic_load_n(&kina_served_devices[ordinal], __ATOMIC_ACQUIRE);
    }
    static void kina_serve_device(kina_device *device) {
        __atomic_store_n(&kina_served_devices[device->ordinal], device, __ATOMIC_RELEASE);
    }
    static kina_resource *kina_default_pool(int ordinal) {
        return __atomic_load_n(&kina_default_pools[ordinal], __ATOMIC_ACQUIRE);
    }
    static void kina_put_default_pool(int ordinal, kina_resource *pool) {
        __atomic_store_n(&kina_default_pools[ordinal], pool, __ATOMIC_RELEASE);
    }
    """
    enum: KINA_ORDINALS
    enum: KINA_STREAM_BUCKETS
    pthread_mutex_t kina_streams_mutex
    pthread_mutex_t kina_allocations_mutex
    pthread_mutex_t kina_pending_mutex
    kina_device *kina_served_device(int ordinal) noexcept nogil
    void kina_serve_device(kina_device *device) noexcept nogil
    kina_resource *kina_default_pool(int ordinal) noexcept nogil
    void kina_put_default_pool(int ordinal, kina_resource *pool) noexcept nogil


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


# Streams --------------------------------------------------------------------------------------------------

ctypedef struct known_stream:
    known_stream *next
    int ordinal
    CUstream native
    kina_runtime *runtime       # owned

cdef known_stream *streams[KINA_STREAM_BUCKETS]
cdef int64_t stream_count = 0


class StreamHandle:
    """A stream that PyTorch names by its handle: nobody can be held, so it has to live as long as its memory."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


cdef known_stream *known(int ordinal, CUstream native) noexcept nogil:
    """Under the mutex."""
    cdef known_stream *each = streams[(<uintptr_t> native >> 4) % KINA_STREAM_BUCKETS]
    while each != NULL and (each.native != native or each.ordinal != ordinal):
        each = each.next
    return each


cdef int open_stream(int ordinal, void *handle, const char *operation, kina_runtime **out) noexcept nogil:
    """A new reference to the process's one Runtime of a stream. Only the first use of a stream needs the GIL."""
    cdef CUstream native = <CUstream> handle
    cdef kina_device *device
    cdef known_stream *found
    cdef unsigned long long stream_id = 0
    cdef int status, pushed
    if native == NULL:
        native = CU_STREAM_LEGACY
    if not 0 <= ordinal < KINA_ORDINALS:
        return fail(KINA_ARGUMENT, operation, b"there is no CUDA device of that ordinal")
    if native == CU_STREAM_PER_THREAD:
        return fail(KINA_UNSUPPORTED, operation,
                    b"the per-thread default stream orders no memory: its handle means another stream in every thread")
    if process_is_forked():
        return fail(KINA_UNAVAILABLE, operation,
                    b"this process was forked from one that had already initialised CUDA; use the 'spawn' method")
    device = kina_served_device(ordinal)
    if device == NULL:
        return adopt_stream(ordinal, native, operation, out)
    status = device_check(device, operation)
    if status != 0:
        return status
    pushed = context_begin(device, operation)
    if pushed < 0:
        return last_error().detail
    status = refuse_capture(device, native, operation)
    if status == 0 and native != CU_STREAM_LEGACY:
        status = stream_identify(device, native, &stream_id)
    context_end(pushed)
    if status != 0:
        return status
    out[0] = NULL
    pthread_mutex_lock(&kina_streams_mutex)
    found = known(ordinal, native)
    # The handle may be that of a stream that is gone by now, but its id is never used again.
    if found != NULL and (native == CU_STREAM_LEGACY or found.runtime.stream_id == stream_id):
        out[0] = found.runtime
        kina_retain(out[0])
    pthread_mutex_unlock(&kina_streams_mutex)
    return 0 if out[0] != NULL else adopt_stream(ordinal, native, operation, out)


cdef int refuse_capture(kina_device *device, CUstream native, const char *operation) noexcept nogil:
    cdef int status = stream_refuse_capture(device, native, operation)
    if status == KINA_UNSUPPORTED and last_error().driver_code == 0:
        return fail(status, operation, b"the stream is being captured into a graph, which memory of kina cannot be a "
                    b"part of yet: allocate before the capture begins")
    return status


cdef int adopt_stream(int ordinal, CUstream native, const char *operation, kina_runtime **out) noexcept nogil:
    if interpreter_is_finalizing() and not holds_gil():
        return fail(KINA_UNAVAILABLE, operation, b"the interpreter is going: no new stream can be served any more")
    with gil:
        return adopt_with_gil(ordinal, native, out)


cdef int adopt_with_gil(int ordinal, CUstream native, kina_runtime **out) noexcept:
    cdef Runtime runtime
    cdef kina_runtime *made
    cdef kina_runtime *before = NULL
    cdef known_stream *entry
    cdef known_stream *added
    try:
        runtime = Runtime(ordinal, stream=StreamHandle(<uintptr_t> native))
        added = <known_stream *> calloc(1, sizeof(known_stream))
        if added == NULL:
            raise MemoryError("no host memory for the bookkeeping of a stream")
    except BaseException as error:
        return fail_with(error)
    made = runtime.c
    added.ordinal = ordinal
    added.native = native
    added.runtime = made
    kina_retain(made)
    with nogil:
        pthread_mutex_lock(&kina_streams_mutex)
        entry = known(ordinal, native)
        if entry == NULL:
            enlist(added)
            added = NULL
        elif entry.runtime.stream_id != made.stream_id:
            before = entry.runtime
            entry.runtime = made
        else:  # another thread was faster
            before = made
            made = entry.runtime
        out[0] = made
        kina_retain(made)
        pthread_mutex_unlock(&kina_streams_mutex)
        kina_release(before)
        free(added)
        kina_serve_device(made.device)
    return 0


cdef void enlist(known_stream *added) noexcept nogil:
    global stream_count
    cdef known_stream **bucket = &streams[(<uintptr_t> added.native >> 4) % KINA_STREAM_BUCKETS]
    added.next = bucket[0]
    bucket[0] = added
    stream_count += 1


def release_stream(stream: object) -> None:
    """Let go of a stream that was served; see :func:`kina.memory.integrations.torch_release_stream`."""
    cdef CUstream native = stream_of(stream)
    cdef known_stream *removed
    if native == CU_STREAM_LEGACY:
        return  # it never ends
    with nogil:
        removed = delist(native)
        if removed != NULL:
            kina_release(removed.runtime)
            free(removed)


cdef known_stream *delist(CUstream native) noexcept nogil:
    global stream_count
    cdef known_stream **place = &streams[(<uintptr_t> native >> 4) % KINA_STREAM_BUCKETS]
    cdef known_stream *removed
    pthread_mutex_lock(&kina_streams_mutex)
    while place[0] != NULL and place[0].native != native:
        place = &place[0].next
    removed = place[0]
    if removed != NULL:
        place[0] = removed.next
        stream_count -= 1
    pthread_mutex_unlock(&kina_streams_mutex)
    return removed


# Where memory comes from ----------------------------------------------------------------------------------

cdef dict pools = {}  # the default pools, of ordinals


def default_pool(ordinal: int) -> PoolMemoryResource:
    """The pool of a device that serves other libraries where no resource was chosen: one, as long as the process."""
    cdef MemoryResource made
    if ordinal not in pools:
        made = PoolMemoryResource(CudaAsyncMemoryResource(ordinal))
        if pools.setdefault(ordinal, made) is made:
            kina_retain(made.c)
            kina_put_default_pool(ordinal, made.c)
    return pools[ordinal]


cdef kina_resource *default_resource(int ordinal) noexcept nogil:
    """A new reference, or NULL with a recorded error."""
    cdef kina_resource *found = kina_default_pool(ordinal)
    if found == NULL:
        if interpreter_is_finalizing() and not holds_gil():
            fail(KINA_UNAVAILABLE, b"allocate", b"the interpreter is going: no pool can be made any more")
            return NULL
        with gil:
            try:
                default_pool(ordinal)
            except BaseException as error:
                fail_with(error)
        found = kina_default_pool(ordinal)
    kina_retain(found)
    return found


cdef int serve(kina_storage **out, kina_runtime *runtime, size_t nbytes) noexcept nogil:
    cdef int ordinal = runtime.device.ordinal
    cdef kina_resource *resource = resource_here(ordinal)
    cdef int status
    if resource == NULL:
        resource = default_resource(ordinal)
        if resource == NULL:
            return last_error().detail
    if resource.flags & KINA_RESOURCE_PYTHON:
        status = serve_from_python(out, runtime, nbytes)
    else:
        status = allocate_in_order(out, resource, runtime, nbytes)
    kina_release(resource)
    return status


cdef int serve_from_python(kina_storage **out, kina_runtime *runtime, size_t nbytes) noexcept nogil:
    if interpreter_is_finalizing() and not holds_gil():
        return fail(KINA_UNAVAILABLE, b"allocate",
                    b"the interpreter is going: nothing in Python can be asked any more")
    with gil:
        return serve_with_gil(out, runtime, nbytes)


cdef int serve_with_gil(kina_storage **out, kina_runtime *runtime, size_t nbytes) noexcept:
    cdef MemoryResource memory
    cdef int status
    try:
        memory = memory_of(None, None, runtime.device.ordinal, "allocate")
        if memory is None:
            memory = default_pool(runtime.device.ordinal)
        with nogil:
            status = allocate_in_order(out, memory.c, runtime, nbytes)
        if status == 0 and memory.c.flags & KINA_RESOURCE_PYTHON:
            storage_keep(out[0], memory)
        return status
    except BaseException as error:
        return fail_with(error)


cdef int allocate_in_order(kina_storage **out, kina_resource *resource, kina_runtime *runtime,
                           size_t nbytes) noexcept nogil:
    cdef bint unordered = not resource.vtable.supports_streams
    cdef kina_error refusal
    cdef kina_dl_device where
    cdef int status
    where.device_type = KINA_DEVICE_CUDA
    where.device_id = runtime.device.ordinal
    if unordered:
        harvest_retired(runtime.device, False)
    while True:
        status = storage_allocate(out, resource, &runtime.stream, nbytes, where, runtime.stream.runtime,
                                  runtime.stream.domain)
        if status != KINA_OUT_OF_MEMORY:
            break
        # What was dropped and still waits for the device may be what is missing.
        refusal = last_error()[0]
        if not (wait_for_pending(runtime) or (unordered and waited_for_retired(runtime))):
            last_error()[0] = refusal
            break
    if status == 0 and unordered:
        out[0].before_release = retire_storage
    return status


cdef bint waited_for_retired(kina_runtime *runtime) noexcept nogil:
    if wait_for_retired(runtime.device) != 0:
        return False
    kina_add(&runtime.counters.host_waits, 1)
    return True


# Allocations and their other users ------------------------------------------------------------------------

ctypedef struct stream_use:
    stream_use *next
    kina_runtime *runtime       # owned
    kina_handle *fence          # owned; behind what the stream had enqueued when the memory was dropped

ctypedef struct allocation:
    allocation *next            # in its bucket, or among those that wait
    void *address
    kina_storage *storage       # owned
    stream_use *uses

cdef enum:
    PATIENCE = 2  # allocations that are not ready, of those that wait, that a call asks the driver for

cdef allocation *oldest_pending = NULL
cdef allocation **newest_pending = &oldest_pending
cdef uint64_t pending_count = 0
cdef uint64_t pending_bytes = 0


cdef int make_allocation(allocation **out, kina_runtime *runtime, size_t nbytes) noexcept nogil:
    cdef allocation *made
    cdef int status
    if kina_load_u64(&pending_count) != 0:
        settle(PATIENCE)
    made = <allocation *> calloc(1, sizeof(allocation))
    if made == NULL:
        return fail(KINA_OUT_OF_MEMORY, b"allocate", b"no host memory for the bookkeeping of an allocation")
    status = serve(&made.storage, runtime, nbytes)
    if status != 0:
        free(made)
        return status
    made.address = made.storage.data
    out[0] = made
    return 0


cdef void give_back(allocation *self) noexcept nogil:
    if driver_is_silent():
        return  # leaked, silently
    if kina_load_u64(&pending_count) != 0:
        settle(PATIENCE)
    if self.uses != NULL:
        fence_uses(self)  # and no question yet: the answer would be no
    elif return_in_order(self):
        return
    put_pending(self)


cdef bint fence_uses(allocation *self) noexcept nogil:
    cdef stream_use *use = self.uses
    cdef bint fenced = True
    while use != NULL:
        if use.fence == NULL and use.runtime.stream.ordering.record(&use.runtime.stream, &use.fence) != 0:
            use.fence = NULL
            fenced = False  # the stream is being captured: later
        use = use.next
    return fenced


cdef bint return_in_order(allocation *self) noexcept nogil:
    """Give the memory back in the order of its stream, unless that would become a part of a graph."""
    cdef kina_runtime *home = <kina_runtime *> self.storage.stream
    cdef bint captured
    cdef int pushed
    if self.address != NULL and not device_is_gone(home.device):
        pushed = context_begin(home.device, b"free")
        if pushed >= 0:
            captured = stream_refuse_capture(home.device, <CUstream> home.stream.native, b"free") != 0
            context_end(pushed)
            if captured:
                return False
    kina_release(self.storage)
    free(self)
    return True


cdef bint advance(allocation *self) noexcept nogil:
    """Whether the device was past all uses, and the memory was given back."""
    cdef stream_use **place = &self.uses
    cdef stream_use *use
    if not device_is_gone((<kina_runtime *> self.storage.stream).device):
        if not fence_uses(self):
            return False
        while place[0] != NULL:
            use = place[0]
            if use.runtime.stream.ordering.query(use.fence) == 1:
                place[0] = use.next
                end_use(use)
            else:
                place = &use.next
        if self.uses != NULL:
            return False
    while self.uses != NULL:
        use = self.uses
        self.uses = use.next
        end_use(use)
    return return_in_order(self)


cdef void end_use(stream_use *use) noexcept nogil:
    kina_release(use.fence)
    kina_release(use.runtime)
    free(use)


cdef void put_pending(allocation *added) noexcept nogil:
    global newest_pending
    added.next = NULL
    pthread_mutex_lock(&kina_pending_mutex)
    newest_pending[0] = added
    newest_pending = &added.next
    kina_add(&pending_count, 1)
    kina_add(&pending_bytes, added.storage.nbytes)
    pthread_mutex_unlock(&kina_pending_mutex)


cdef allocation *take_pending() noexcept nogil:
    global oldest_pending, newest_pending
    cdef allocation *taken
    pthread_mutex_lock(&kina_pending_mutex)
    taken = oldest_pending
    if taken != NULL:
        oldest_pending = taken.next
        if oldest_pending == NULL:
            newest_pending = &oldest_pending
        kina_add(&pending_count, <uint64_t> -1)
        kina_add(&pending_bytes, <uint64_t> (-<int64_t> taken.storage.nbytes))
    pthread_mutex_unlock(&kina_pending_mutex)
    return taken


cdef void settle(uint64_t patience) noexcept nogil:
    """Give back what the device is past, until so many were found that it is not."""
    cdef uint64_t count = kina_load_u64(&pending_count)
    cdef allocation *each
    while count != 0 and patience != 0:
        each = take_pending()
        if each == NULL:
            break
        count -= 1
        if not advance(each):
            put_pending(each)
            patience -= 1


cdef bint wait_for_pending(kina_runtime *runtime) noexcept nogil:
    """Give one back of the device, which the host waits for if need be; whether there was one."""
    cdef uint64_t count = kina_load_u64(&pending_count)
    cdef allocation *each
    cdef stream_use *use
    cdef int status
    while count != 0:
        each = take_pending()
        if each == NULL:
            break
        count -= 1
        if (<kina_runtime *> each.storage.stream).device == runtime.device and fence_uses(each):
            status = 0
            use = each.uses
            while use != NULL and status == 0:
                status = use.runtime.stream.ordering.wait(use.fence, &runtime.stream)
                use = use.next
            if advance(each):
                return True
        put_pending(each)
    return False


# PyTorch --------------------------------------------------------------------------------------------------

cdef allocation *few[64]                # the first table
cdef allocation **buckets = few
cdef size_t bucket_count = 64           # a power of two
cdef uint64_t live_count = 0
cdef uint64_t live_bytes = 0
cdef uint64_t unknown_frees = 0


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
    status = open_stream(ordinal, stream, b"allocate", &runtime)
    if status != 0:
        return status
    status = make_allocation(&made, runtime, nbytes)
    kina_release(runtime)
    if status != 0:
        return status
    pthread_mutex_lock(&kina_allocations_mutex)
    if live_count >= 2 * bucket_count:
        spread()
    place = &buckets[bucket_of(made.address, bucket_count)]
    made.next = place[0]
    place[0] = made
    live_count += 1
    live_bytes += nbytes
    pthread_mutex_unlock(&kina_allocations_mutex)
    out[0] = made.address
    return 0


cdef void torch_deallocate(void *data) noexcept nogil:
    global live_count, live_bytes, unknown_frees
    cdef allocation **place
    cdef allocation *found
    if data == NULL or driver_is_silent():
        return  # leaked, silently
    pthread_mutex_lock(&kina_allocations_mutex)
    place = place_of(data)
    found = place[0]
    if found == NULL:
        unknown_frees += 1
    else:
        place[0] = found.next
        live_count -= 1
        live_bytes -= found.storage.nbytes
    pthread_mutex_unlock(&kina_allocations_mutex)
    if found != NULL:
        give_back(found)


cdef int torch_record_stream(void *data, void *stream) noexcept nogil:
    cdef kina_runtime *runtime = NULL
    cdef allocation *found
    cdef stream_use *use = NULL
    cdef stream_use *added
    cdef int ordinal, status
    if process_is_forked():
        return 0
    pthread_mutex_lock(&kina_allocations_mutex)
    found = place_of(data)[0]
    ordinal = -1 if found == NULL else found.storage.device.device_id
    pthread_mutex_unlock(&kina_allocations_mutex)
    if ordinal < 0:
        return 0  # somebody else's memory, a tensor of from_dlpack() say: PyTorch's own allocator passes over it too
    status = open_stream(ordinal, stream, b"record_stream", &runtime)
    if status != 0:
        return status
    added = <stream_use *> calloc(1, sizeof(stream_use))
    if added == NULL:
        kina_release(runtime)
        return fail(KINA_OUT_OF_MEMORY, b"record_stream", b"no host memory for the bookkeeping of a stream's use")
    added.runtime = runtime
    pthread_mutex_lock(&kina_allocations_mutex)
    found = place_of(data)[0]
    if found != NULL and &runtime.stream != found.storage.stream:
        use = found.uses
        while use != NULL and use.runtime != runtime:
            use = use.next
        if use == NULL:
            added.next = found.uses
            found.uses = added
            added = NULL
    pthread_mutex_unlock(&kina_allocations_mutex)
    if added != NULL:  # its own stream, or one that is known to use it
        end_use(added)
    return 0


cdef void torch_empty_cache() noexcept nogil:
    cdef int ordinal
    if driver_is_silent():
        return
    settle(<uint64_t> -1)
    for ordinal in range(KINA_ORDINALS):
        if kina_served_device(ordinal) != NULL:
            pools_trim_device(ordinal, QUIETLY)


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
    cdef uint64_t allocations, nbytes, unknown
    cdef int64_t known_streams
    with nogil:
        pthread_mutex_lock(&kina_allocations_mutex)
        allocations = live_count
        nbytes = live_bytes
        unknown = unknown_frees
        pthread_mutex_unlock(&kina_allocations_mutex)
        pthread_mutex_lock(&kina_streams_mutex)
        known_streams = stream_count
        pthread_mutex_unlock(&kina_streams_mutex)
    return {
        "live_allocations": allocations,
        "live_bytes": nbytes,
        "pending_allocations": kina_load_u64(&pending_count),
        "pending_bytes": kina_load_u64(&pending_bytes),
        "streams": known_streams,
        "unknown_frees": unknown,
    }


# CuPy and Numba -------------------------------------------------------------------------------------------


@cython.final
@cython.no_gc  # nothing it refers to can refer back
cdef class Allocation:
    """Allocation()

    Memory for another library, made by :func:`allocate`; it goes back when this object goes.
    """

    cdef allocation *c      # owned
    cdef size_t _nbytes

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        cdef allocation *held = self.c
        if held != NULL:
            self.c = NULL
            with nogil:
                give_back(held)
            drain_python_releases()

    @property
    def address(self) -> int:
        """Where it begins; 0 for 0 bytes."""
        return <uintptr_t> self.c.address

    @property
    def nbytes(self) -> int:
        """What was asked for."""
        return self._nbytes

    def __repr__(self) -> str:
        return f"<kina.cuda.allocator.Allocation, {self._nbytes} bytes>"

    def __reduce__(self):
        raise TypeError("an Allocation owns memory: it is neither copied nor pickled")


def allocate(nbytes: int, ordinal: int, stream: object = None) -> Allocation:
    """Memory of a device from the resource that is current in the calling thread, in the order of a stream.

    Parameters
    ----------
    nbytes : int
    ordinal : int
        Of the device.
    stream : object with ``__cuda_stream__``, optional
        It is kept alive as long as the memory. Default: the legacy stream.

    Raises
    ------
    OutOfMemoryError
        With kina's figures.
    UnsupportedError
        The stream is being captured, or is the per-thread default stream.
    ForeignDeviceError, UnavailableError, ArgumentError, InvalidShapeError

    Notes
    -----
    Waits for nothing, unless the resource does. The memory is given back in the order of `stream` when the object
    goes, from any thread.
    """
    cdef size_t count = parse_nbytes(nbytes, "allocate")
    cdef int number = ordinal
    cdef CUstream native = CU_STREAM_LEGACY if stream is None else stream_of(stream)
    cdef kina_runtime *runtime = NULL
    cdef Runtime adopted
    cdef Allocation made
    cdef int status = 0
    drain_python_releases()
    if native == CU_STREAM_LEGACY:
        with nogil:
            status = open_stream(number, NULL, b"allocate", &runtime)
        check(status)
    else:
        adopted = adopted_runtime(number, stream)
        runtime = adopted.c
        kina_retain(runtime)
    try:
        begin_construction()
        try:
            made = Allocation.__new__(Allocation)
        finally:
            end_construction()
        with nogil:
            status = make_allocation(&made.c, runtime, count)
        check(status)
    finally:
        kina_release(runtime)
    made._nbytes = count
    return made


def memory_info(ordinal: int) -> tuple[int, int]:
    """Free and total bytes of a device, as the driver tells them (cuMemGetInfo). DriverError, UnavailableError."""
    cdef kina_device *device = open_device(ordinal)
    cdef size_t available = 0
    cdef size_t total = 0
    cdef CUstreamCaptureMode mode
    cdef CUresult code = CUDA_SUCCESS
    cdef int pushed, status = -1
    check(device_check(device, b"memory_info"))
    with nogil:
        pushed = context_begin(device, b"memory_info")
        if pushed >= 0:
            mode = relaxed_begin()
            code = cu.cuMemGetInfo(&available, &total)
            relaxed_end(mode)
            context_end(pushed)
            status = 0
        if code != CUDA_SUCCESS:
            status = device_failed(device, code, KINA_DRIVER, b"memory_info",
                                   b"the device does not tell how much it has free")
    check(status)
    return available, total
