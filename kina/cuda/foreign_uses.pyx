"""Foreign uses: which streams but the home stream may use a storage, and what they hold up.

The set grows while the memory is lent, from any thread; the last release takes it whole. A stream that is known to live
makes the home stream wait, on the device, for one event; for one that may be no more the memory is kept until the whole
device has been waited for (docs/adr/0003).

Source: CUDA Driver API, "Event Management", "Stream Management" (cuStreamQuery).
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kina._core.pool cimport pool_end_with
from kina._core.status cimport KINA_DLPACK, KINA_DRIVER, KINA_SYNCHRONIZE, KINA_UNSUPPORTED, fail, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_STORAGE_ADOPTED,
    KINA_STORAGE_SHARED,
    kina_release,
    kina_retain,
    kina_storage,
)
from kina.cuda.capture cimport order_behind, order_runtimes, refuse_capture
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed, device_is_gone
from kina.cuda.cudatypes cimport (
    CU_STREAM_LEGACY,
    CUDA_ERROR_NOT_READY,
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.handles cimport (
    kina_add,
    kina_device,
    kina_foreign_use,
    kina_load_u64,
    kina_runtime,
    kina_store,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.retire cimport quarantine, retire_storage
from kina.cuda.stream cimport stream_refuse_capture

__all__ = []


cdef extern from *:
    """
    #include "handles.h"

    enum { KINA_MOST_USES = 32, KINA_USE_BITS = 3 }; /* more streams than that count as unknown */

    /* The bits of who may use it, and above them how many waits for the whole device had begun at the newest use that
     * is unknown. */
    static void kina_note_bits(kina_storage *storage, uint64_t bits, uint64_t waits) {
        uint64_t seen = __atomic_load_n(&storage->foreign_use, __ATOMIC_RELAXED), before, wanted;
        do {
            before = seen >> KINA_USE_BITS;
            wanted = seen | bits;
            if (before < waits) wanted += (waits - before) << KINA_USE_BITS;
        } while (wanted != seen && !__atomic_compare_exchange_n(&storage->foreign_use, &seen, wanted, 1,
                                                                __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    }
    static int kina_same_use(const kina_foreign_use *a, const kina_foreign_use *b) {
        return a->runtime == b->runtime && a->native == b->native && a->leased == b->leased;
    }
    static kina_foreign_use *kina_uses_of(kina_storage *storage) {
        return __atomic_load_n(&storage->foreign_uses, __ATOMIC_ACQUIRE);
    }
    static kina_foreign_use *kina_take_uses(kina_storage *storage) {
        return __atomic_exchange_n(&storage->foreign_uses, NULL, __ATOMIC_ACQ_REL);
    }
    /* 0: it is there already, or (-1) there is no room. Nothing is taken off before the last reference goes, so a list
     * that has grown meanwhile is looked at as far as it is new. */
    static int kina_push_use(kina_storage *storage, kina_foreign_use *added) {
        kina_foreign_use *head = kina_uses_of(storage), *seen = NULL, *each;
        int count = 0;
        do {
            for (each = head; each != seen; each = each->next, count++)
                if (kina_same_use(each, added)) return 0;
            if (count >= KINA_MOST_USES) return -1;
            added->next = seen = head;
        } while (!__atomic_compare_exchange_n(&storage->foreign_uses, &head, added, 0, __ATOMIC_ACQ_REL,
                                              __ATOMIC_ACQUIRE));
        return 1;
    }
    static int kina_has_use(kina_storage *storage, const kina_foreign_use *asked) {
        for (const kina_foreign_use *each = kina_uses_of(storage); each; each = each->next)
            if (kina_same_use(each, asked)) return 1;
        return 0;
    }
    static void kina_ask_before_release(kina_storage *storage, int (*asked)(kina_storage *)) {
        __atomic_store_n(&storage->before_release, asked, __ATOMIC_RELAXED);
    }
    """
    enum: KINA_USE_BITS
    void kina_note_bits(kina_storage *storage, uint64_t bits, uint64_t waits) noexcept nogil
    kina_foreign_use *kina_uses_of(kina_storage *storage) noexcept nogil
    kina_foreign_use *kina_take_uses(kina_storage *storage) noexcept nogil
    int kina_push_use(kina_storage *storage, kina_foreign_use *added) noexcept nogil
    bint kina_has_use(kina_storage *storage, const kina_foreign_use *asked) noexcept nogil
    void kina_ask_before_release(kina_storage *storage, int (*asked)(kina_storage *) noexcept nogil) noexcept nogil


# Notes ----------------------------------------------------------------------------------------------------


cdef void note_export(kina_storage *storage) noexcept nogil:
    kina_ask_before_release(storage, fence_uses)


cdef void note_use(kina_storage *storage, foreign_user who) noexcept nogil:
    cdef kina_device *device = (<kina_runtime *> storage.stream).device
    kina_note_bits(storage, who, kina_load_u64(&device.waits_begun) if who == FOREIGN_USE_UNKNOWN else 0)
    note_export(storage)


cdef void note_stream(kina_storage *storage, kina_runtime *runtime, CUstream native, bint leased) noexcept nogil:
    cdef kina_foreign_use use
    cdef kina_foreign_use *added
    cdef int pushed
    use.runtime = runtime
    use.native = native
    use.leased = leased
    if kina_has_use(storage, &use):
        return
    added = <kina_foreign_use *> calloc(1, sizeof(kina_foreign_use))
    pushed = -1
    if added != NULL:
        added[0] = use
        kina_retain(runtime)
        pushed = kina_push_use(storage, added)
        if pushed != 1:
            free(added)
            kina_release(runtime)
    if pushed < 0:
        note_use(storage, FOREIGN_USE_UNKNOWN)
    else:
        note_export(storage)


cdef void note_runtime(kina_storage *storage, kina_runtime *runtime) noexcept nogil:
    note_stream(storage, runtime, <CUstream> runtime.stream.native, False)


cdef void note_adoption(kina_storage *storage) noexcept nogil:
    cdef kina_storage *owner = <kina_storage *> storage.owner
    cdef kina_runtime *runtime = <kina_runtime *> storage.stream
    storage.flags |= <uint32_t> KINA_STORAGE_SHARED
    # Only the host asks about it, and it cannot read what is the device's alone.
    if owner.stream != NULL and owner.device.device_type != KINA_DEVICE_CUDA:
        note_stream(owner, runtime, <CUstream> runtime.stream.native, True)


cdef void note_immortal(kina_storage *storage, CUstream native) noexcept nogil:
    note_stream(storage, NULL, native, False)


cdef void drop_uses(kina_foreign_use *use) noexcept nogil:
    cdef kina_foreign_use *following
    while use != NULL:
        following = use.next
        kina_release(use.runtime)
        free(use)
        use = following


# The last release -----------------------------------------------------------------------------------------


cdef int fence_uses(kina_storage *storage) noexcept nogil:
    """storage.before_release of memory that others may use."""
    cdef kina_runtime *runtime = <kina_runtime *> storage.stream
    cdef kina_device *device = runtime.device
    cdef kina_foreign_use *uses = kina_take_uses(storage)
    cdef bint fenced
    if device_is_gone(device):
        drop_uses(uses)
        return 0  # its release leaks by itself
    fenced = order_after_uses(runtime, storage.foreign_use, uses)
    drop_uses(uses)
    if not fenced:
        return quarantine(storage)
    if runtime.adopted:  # what its pool was told of the stream's end came before this
        pool_end_with(runtime.memory, &runtime.stream, NULL)
    # The home stream is past the fences then. The owner of adopted memory knows nothing of our consumers, those on the
    # home stream included: their work is not leased.
    if storage.flags & KINA_STORAGE_ADOPTED or not storage.resource.vtable.supports_streams:
        return retire_storage(storage)
    return 0


cdef bint order_after_uses(kina_runtime *home, uint64_t who, kina_foreign_use *uses) noexcept nogil:
    """Whether the home stream waits for all of them now. Each stream may be in, or order, somebody's capture, which a
    wait would end: asking does not."""
    cdef const char *operation = b"release exported memory"
    cdef kina_device *device = home.device
    cdef kina_foreign_use *use = uses
    cdef int pushed
    cdef int status = 0
    if who & (<uint64_t> FOREIGN_USE_UNKNOWN | <uint64_t> FOREIGN_USE_HOST):
        return False
    if uses == NULL and not who & FOREIGN_USE_LEGACY:
        return True
    pushed = context_begin(device, operation)
    if pushed < 0:
        return False
    if who & FOREIGN_USE_LEGACY:
        status = order_behind_native(home, CU_STREAM_LEGACY, operation)
    while use != NULL and status == 0:
        if use.runtime == NULL:
            status = order_behind_native(home, use.native, operation)
        elif not use.leased:
            status = order_runtimes(use.runtime, home, operation)
            if status == 0:
                kina_add(&home.counters.events_recorded, 1)
        use = use.next
    context_end(pushed)
    return status == 0


cdef int order_behind_native(kina_runtime *home, CUstream native, const char *operation) noexcept nogil:
    cdef int status = stream_refuse_capture(home.device, native, operation)
    if status == 0:
        status = order_behind(home, native, operation)
    if status == 0:
        kina_add(&home.counters.events_recorded, 1)
    return status


# The host -------------------------------------------------------------------------------------------------


cdef int uses_are_over(kina_storage *storage, const char *operation) noexcept nogil:
    cdef kina_runtime *home = <kina_runtime *> storage.stream
    cdef int status, pushed
    if home == NULL:
        return 0  # nobody has it in the order of a stream
    status = device_check(home.device, operation)
    if status != 0:
        return status
    pushed = context_begin(home.device, operation)
    if pushed < 0:
        return last_error().detail
    while status == 0:
        status = ask_uses(storage, operation)
        if not storage.flags & KINA_STORAGE_SHARED:
            break
        storage = <kina_storage *> storage.owner
    context_end(pushed)
    return status


cdef int ask_uses(kina_storage *storage, const char *operation) noexcept nogil:
    """The context of the device is current."""
    cdef kina_runtime *home = <kina_runtime *> storage.stream
    cdef kina_device *device = home.device
    cdef kina_foreign_use *use = kina_uses_of(storage)
    cdef uint64_t who = storage.foreign_use
    cdef int status = ask_runtime(home, operation)
    if status == 0 and who & FOREIGN_USE_UNKNOWN and kina_load_u64(&device.waits_passed) <= who >> <int> KINA_USE_BITS:
        kina_store(&device.wait_wanted, 1)
        status = fail(KINA_DLPACK, operation,
                      b"a stream that kina does not know may still use the memory, and the host may not read it: call "
                      b"synchronize() of the session, which waits for the whole device then")
    if status == 0 and who & FOREIGN_USE_LEGACY:
        status = ask_native(device, CU_STREAM_LEGACY, operation)
    while use != NULL and status == 0:
        if use.runtime != NULL:
            status = ask_runtime(use.runtime, operation)
        else:
            status = ask_native(device, use.native, operation)
        use = use.next
    return status


cdef int ask_runtime(kina_runtime *runtime, const char *operation) noexcept nogil:
    cdef int status
    pthread_mutex_lock(&runtime.mutex)  # no capture of kina's begins meanwhile, which the question would end
    status = refuse_capture(runtime, operation)
    if status == 0:
        status = query(runtime.device, <CUstream> runtime.stream.native, operation)
    pthread_mutex_unlock(&runtime.mutex)
    return not_now(status, operation)


cdef int ask_native(kina_device *device, CUstream native, const char *operation) noexcept nogil:
    cdef int status = stream_refuse_capture(device, native, operation)
    if status == 0:
        status = query(device, native, operation)
    return not_now(status, operation)


cdef int not_now(int status, const char *operation) noexcept nogil:
    if status == KINA_UNSUPPORTED:
        return fail(KINA_DLPACK, operation,
                    b"whether the device is past the memory cannot be asked while a stream that uses it is being "
                    b"captured into a graph: end the capture and call synchronize() of the session")
    return status


cdef int query(kina_device *device, CUstream native, const char *operation) noexcept nogil:
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cdef CUresult code = cu.cuStreamQuery(native)
    relaxed_end(mode)
    if code == CUDA_SUCCESS:
        return 0
    if code == CUDA_ERROR_NOT_READY:
        return fail(KINA_DLPACK, operation, b"the device may still use the memory, and the host may not read it: call "
                    b"synchronize() of the session first")
    return device_failed(device, code, KINA_SYNCHRONIZE if <int> code >= 700 else KINA_DRIVER, operation,
                         b"whether the device is past the memory could not be asked")
