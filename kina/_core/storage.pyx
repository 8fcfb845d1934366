"""Storage: one allocation, reference-counted, that knows how and in which order it is released."""

from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from kina._core.status cimport KINA_OUT_OF_MEMORY, fail, last_error

__all__ = []


cdef extern from *:
    """
    #include <Python.h>
    #include <stdlib.h>

    /* Work for the GIL that came up on a thread that may not touch Python: a lock-free stack, pushed by anyone,
     * taken whole by whoever drains it under the GIL. */
    static kina_deferred *kina_deferred_stack = NULL;
    static int kina_drain_kicked = 0;
    static int kina_exiting = 0;

    static void kina_deferred_push(kina_deferred *node) {
        node->next = __atomic_load_n(&kina_deferred_stack, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&kina_deferred_stack, &node->next, node, 1,
                                            __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
    }
    /* In the order in which they came. */
    static kina_deferred *kina_deferred_take(void) {
        kina_deferred *node, *following, *first = NULL;
        if (__atomic_load_n(&kina_deferred_stack, __ATOMIC_RELAXED) == NULL) return NULL;
        node = __atomic_exchange_n(&kina_deferred_stack, NULL, __ATOMIC_ACQUIRE);
        for (; node; node = following) {
            following = node->next;
            node->next = first;
            first = node;
        }
        return first;
    }
    static int kina_deferred_waits(void) {
        return __atomic_load_n(&kina_deferred_stack, __ATOMIC_RELAXED) != NULL;
    }
    static int kina_drain_claim_kick(void) {
        return __atomic_exchange_n(&kina_drain_kicked, 1, __ATOMIC_ACQ_REL) == 0;
    }
    static void kina_drain_clear_kick(void) {
        __atomic_store_n(&kina_drain_kicked, 0, __ATOMIC_RELEASE);
    }
    static int kina_exiting_load(void) { return __atomic_load_n(&kina_exiting, __ATOMIC_ACQUIRE); }
    static void kina_exiting_set(void) { __atomic_store_n(&kina_exiting, 1, __ATOMIC_RELEASE); }

    static int kina_holds_gil(void) {
    #if PY_VERSION_HEX >= 0x030D0000
        PyThreadState *current = PyThreadState_GetUnchecked();
    #else
        PyThreadState *current = _PyThreadState_UncheckedGet();
    #endif
        return current != NULL && current == PyGILState_GetThisThreadState();
    }
    """
    void kina_deferred_push(kina_deferred *node) noexcept nogil
    kina_deferred *kina_deferred_take() noexcept nogil
    bint kina_deferred_waits() noexcept nogil
    bint kina_drain_claim_kick() noexcept nogil
    void kina_drain_clear_kick() noexcept nogil
    bint kina_exiting_load() noexcept nogil
    void kina_exiting_set() noexcept nogil
    bint kina_holds_gil() noexcept nogil


cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void *) noexcept, void *argument) noexcept nogil
    bint Py_IsInitialized() noexcept nogil


cdef bint interpreter_is_finalizing() noexcept nogil:
    return kina_exiting_load() or not Py_IsInitialized()


cdef bint holds_gil() noexcept nogil:
    return Py_IsInitialized() and kina_holds_gil()


cdef int drain_from_pending_call(void *unused) noexcept:
    kina_drain_clear_kick()
    drain_python_releases()
    return 0


cdef void run_with_gil_later(kina_deferred *node) noexcept nogil:
    if interpreter_is_finalizing():
        return  # leaked on purpose: the interpreter is going or gone
    kina_deferred_push(node)
    # The interpreter's own queue is short; one kick stands for everything on ours.
    if kina_drain_claim_kick() and Py_AddPendingCall(drain_from_pending_call, NULL) != 0:
        kina_drain_clear_kick()


cdef void drain_python_releases() noexcept:
    cdef kina_deferred *node = kina_deferred_take()
    cdef kina_deferred *following
    while node != NULL:
        following = node.next
        node.run(node)
        node = following


cdef bint python_releases_wait() noexcept nogil:
    return kina_deferred_waits()


ctypedef struct deferred_release:
    kina_deferred deferred
    void *released  # a Python object, or a storage


cdef void run_later(void (*run)(kina_deferred *) noexcept, void *released) noexcept nogil:
    cdef deferred_release *node = <deferred_release *> calloc(1, sizeof(deferred_release))
    if node == NULL:
        return  # leaked: nothing else is safe here
    node.deferred.run = run
    node.released = released
    run_with_gil_later(&node.deferred)


cdef void drop_object(kina_deferred *self) noexcept:
    cdef PyObject *released = <PyObject *> (<deferred_release *> self).released
    free(self)
    Py_DECREF(<object> released)


cdef void release_python_later(void *object) noexcept nogil:
    if object != NULL:
        run_later(drop_object, object)


cdef void drop_storage(kina_deferred *self) noexcept:
    cdef kina_storage *storage = <kina_storage *> (<deferred_release *> self).released
    free(self)
    storage_release_now(storage)


cdef void destroy_storage(kina_handle *handle) noexcept nogil:
    cdef kina_storage *storage = <kina_storage *> handle
    if storage.before_release != NULL and storage.before_release(storage) != 0:
        return
    storage_release_now(storage)


cdef void storage_release_now(kina_storage *storage) noexcept nogil:
    if storage.flags & KINA_STORAGE_ADOPTED:
        if storage.release_owner != NULL:
            storage.release_owner(storage.owner)
    else:
        if storage.owner != NULL and not holds_gil():
            run_later(drop_storage, storage)
            return
        if storage.data != NULL:
            storage.resource.vtable.deallocate(storage.resource, storage.data, storage.nbytes, storage.stream)
    kina_release(storage.resource)
    kina_release(storage.stream)
    if not storage.flags & KINA_STORAGE_ADOPTED:
        release_python_later(storage.owner)
    free(storage)


cdef void storage_keep(kina_storage *storage, object face) noexcept:
    if storage.owner == NULL:
        Py_INCREF(face)
        storage.owner = <void *> face


cdef kina_storage *new_storage(void *data, size_t nbytes, kina_resource *resource, kina_stream *stream,
                               kina_dl_device device, uint64_t runtime, uint64_t domain) noexcept nogil:
    cdef kina_storage *storage = <kina_storage *> malloc(sizeof(kina_storage))  # calloc takes the slow way in glibc
    if storage == NULL:
        return NULL
    memset(storage, 0, sizeof(kina_storage))
    kina_handle_init(&storage.handle, destroy_storage)
    kina_retain(resource)
    kina_retain(stream)
    storage.data = data
    storage.nbytes = nbytes
    storage.resource = resource
    storage.stream = stream
    storage.device = device
    storage.runtime = runtime
    storage.domain = domain
    return storage


cdef int allocation_failed(const kina_resource *resource, int status, size_t nbytes) noexcept nogil:
    if last_error().detail != status:
        snprintf(last_error().message, sizeof(last_error().message), "%s could not allocate %zu bytes",
                 resource.vtable.name, nbytes)
        return fail(status, b"allocate", last_error().message)
    return status


cdef int storage_allocate(kina_storage **out, kina_resource *resource, kina_stream *stream, size_t nbytes,
                          kina_dl_device device, uint64_t runtime, uint64_t domain) noexcept nogil:
    cdef void *data = NULL
    cdef int status
    out[0] = NULL
    if nbytes != 0:
        status = resource.vtable.allocate(resource, &data, nbytes, stream)
        if status != 0:
            return allocation_failed(resource, status, nbytes)
    return storage_over(out, data, resource, stream, nbytes, device, runtime, domain)


cdef int storage_over(kina_storage **out, void *data, kina_resource *resource, kina_stream *stream, size_t nbytes,
                      kina_dl_device device, uint64_t runtime, uint64_t domain) noexcept nogil:
    cdef kina_storage *storage = new_storage(data, nbytes, resource, stream, device, runtime, domain)
    out[0] = NULL
    if storage == NULL:
        if data != NULL:
            resource.vtable.deallocate(resource, data, nbytes, stream)
        return fail(KINA_OUT_OF_MEMORY, b"allocate", b"no host memory for the bookkeeping of an allocation")
    out[0] = storage
    return 0


cdef int storage_adopt(kina_storage **out, void *data, size_t nbytes, kina_dl_device device, kina_stream *stream,
                       uint64_t runtime, uint64_t domain, uint32_t flags,
                       void (*release_owner)(void *) noexcept nogil, void *owner) noexcept nogil:
    cdef kina_storage *storage = new_storage(data, nbytes, NULL, stream, device, runtime, domain)
    out[0] = storage
    if storage == NULL:
        return fail(KINA_OUT_OF_MEMORY, b"adopt", b"no host memory for the bookkeeping of an adopted allocation")
    storage.flags = flags | KINA_STORAGE_ADOPTED
    storage.release_owner = release_owner
    storage.owner = owner
    return 0


def _begin_exit() -> None:
    """Registered with atexit: from here on nothing is released into an interpreter that is going."""
    kina_exiting_set()


import atexit  # noqa: E402

atexit.register(_begin_exit)
