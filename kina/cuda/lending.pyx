# cython: annotation_typing=False
"""Memory lent to other libraries: which resource serves, and when what was dropped goes back.

Memory comes from the resource that is current in the calling thread, in the order of the stream that it is asked for
on, and goes back in that order; if other streams were named as users of it, once those are past what they had enqueued
when it was dropped.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from kina._core.current_resource cimport memory_of, resource_here
from kina._core.fork_mutex cimport fork_mutex_init, fork_mutex_lock, fork_mutex_unlock, kina_fork_mutex
from kina._core.resource cimport MemoryResource
from kina._core.status cimport KINA_OUT_OF_MEMORY, KINA_UNAVAILABLE, fail, fail_with, kina_error, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_RESOURCE_PYTHON,
    holds_gil,
    interpreter_is_finalizing,
    kina_dl_device,
    kina_release,
    kina_resource,
    kina_storage,
    storage_allocate,
    storage_keep,
)
from kina.cuda.context cimport context_begin, context_end, device_is_gone
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.driver cimport driver_is_silent
from kina.cuda.handles cimport kina_add, kina_load_u64, kina_runtime
from kina.cuda.retire cimport harvest_retired, retire_storage, wait_for_retired
from kina.cuda.shared_pool cimport shared_pool
from kina.cuda.stream cimport stream_refuse_capture

from kina.cuda.shared_pool import default_pool

__all__ = []


# Where memory comes from ----------------------------------------------------------------------------------

cdef int serve(kina_storage **out, kina_runtime *runtime, size_t nbytes) noexcept nogil:
    cdef int ordinal = runtime.device.ordinal
    cdef kina_resource *resource = resource_here(ordinal)
    cdef int status
    if resource == NULL:
        status = shared_pool(&resource, ordinal, b"allocate")
        if status != 0:
            return status
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


# What is lent ---------------------------------------------------------------------------------------------

cdef enum:
    PATIENCE = 2  # allocations that are not ready, of those that wait, that a call asks the driver for

cdef kina_fork_mutex mutex      # guards what follows
cdef allocation *oldest_pending = NULL
cdef allocation **newest_pending = &oldest_pending
cdef uint64_t pending_count = 0  # read without the mutex too
cdef uint64_t pending_bytes = 0

fork_mutex_init(&mutex)


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


# Other users ----------------------------------------------------------------------------------------------

cdef stream_use *make_use(kina_runtime *runtime) noexcept nogil:
    cdef stream_use *made = <stream_use *> calloc(1, sizeof(stream_use))
    if made == NULL:
        kina_release(runtime)
        fail(KINA_OUT_OF_MEMORY, b"record_stream", b"no host memory for the bookkeeping of a stream's use")
        return NULL
    made.runtime = runtime
    return made


cdef bint note_use(allocation *self, stream_use *use) noexcept nogil:
    cdef stream_use *each = self.uses
    if &use.runtime.stream == self.storage.stream:
        return False  # its own stream
    while each != NULL:
        if each.runtime == use.runtime:
            return False
        each = each.next
    use.next = self.uses
    self.uses = use
    return True


cdef void end_use(stream_use *use) noexcept nogil:
    kina_release(use.fence)
    kina_release(use.runtime)
    free(use)


cdef bint fence_uses(allocation *self) noexcept nogil:
    cdef stream_use *use = self.uses
    cdef bint fenced = True
    while use != NULL:
        if use.fence == NULL and use.runtime.stream.ordering.record(&use.runtime.stream, &use.fence) != 0:
            use.fence = NULL
            fenced = False  # the stream is being captured: later
        use = use.next
    return fenced


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


# What waits -----------------------------------------------------------------------------------------------

cdef void count_pending(uint64_t *allocations, uint64_t *nbytes) noexcept nogil:
    fork_mutex_lock(&mutex)
    allocations[0] = pending_count
    nbytes[0] = pending_bytes
    fork_mutex_unlock(&mutex)


cdef void put_pending(allocation *added) noexcept nogil:
    global newest_pending
    added.next = NULL
    fork_mutex_lock(&mutex)
    newest_pending[0] = added
    newest_pending = &added.next
    kina_add(&pending_count, 1)
    kina_add(&pending_bytes, added.storage.nbytes)
    fork_mutex_unlock(&mutex)


cdef allocation *take_pending() noexcept nogil:
    global oldest_pending, newest_pending
    cdef allocation *taken
    fork_mutex_lock(&mutex)
    taken = oldest_pending
    if taken != NULL:
        oldest_pending = taken.next
        if oldest_pending == NULL:
            newest_pending = &oldest_pending
        kina_add(&pending_count, <uint64_t> -1)
        kina_add(&pending_bytes, <uint64_t> (-<int64_t> taken.storage.nbytes))
    fork_mutex_unlock(&mutex)
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
