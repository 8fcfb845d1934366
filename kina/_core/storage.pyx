"""Storage: one allocation, reference-counted, that knows how and in which order it is released."""

from cpython.ref cimport Py_DECREF, PyObject
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kina._core.status cimport KINA_OUT_OF_MEMORY, fail

__all__ = []


cdef extern from *:
    """
    #include <Python.h>
    #include <stdlib.h>

    /* Python objects whose last native reference went away on a thread that may not touch Python: a
     * lock-free stack, pushed by anyone, taken whole by whoever drains it under the GIL. */
    typedef struct kina_release_node {
        struct kina_release_node *next;
        PyObject *object;
    } kina_release_node;

    static kina_release_node *kina_release_stack = NULL;
    static int kina_release_kicked = 0;
    static int kina_exiting = 0;

    static void kina_release_push(kina_release_node *node) {
        node->next = __atomic_load_n(&kina_release_stack, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&kina_release_stack, &node->next, node, 1,
                                            __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
    }
    static kina_release_node *kina_release_take(void) {
        if (__atomic_load_n(&kina_release_stack, __ATOMIC_RELAXED) == NULL) return NULL;
        return __atomic_exchange_n(&kina_release_stack, NULL, __ATOMIC_ACQUIRE);
    }
    static int kina_release_claim_kick(void) {
        return __atomic_exchange_n(&kina_release_kicked, 1, __ATOMIC_ACQ_REL) == 0;
    }
    static void kina_release_clear_kick(void) {
        __atomic_store_n(&kina_release_kicked, 0, __ATOMIC_RELEASE);
    }
    static int kina_exiting_load(void) { return __atomic_load_n(&kina_exiting, __ATOMIC_ACQUIRE); }
    static void kina_exiting_set(void) { __atomic_store_n(&kina_exiting, 1, __ATOMIC_RELEASE); }
    """
    ctypedef struct kina_release_node:
        kina_release_node *next
        PyObject *object

    void kina_release_push(kina_release_node *node) noexcept nogil
    kina_release_node *kina_release_take() noexcept nogil
    bint kina_release_claim_kick() noexcept nogil
    void kina_release_clear_kick() noexcept nogil
    bint kina_exiting_load() noexcept nogil
    void kina_exiting_set() noexcept nogil


cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void *) noexcept, void *argument) noexcept nogil
    bint Py_IsInitialized() noexcept nogil


cdef bint interpreter_is_finalizing() noexcept nogil:
    return kina_exiting_load() or not Py_IsInitialized()


cdef int drain_from_pending_call(void *unused) noexcept:
    kina_release_clear_kick()
    drain_python_releases()
    return 0


cdef void release_python_later(void *object) noexcept nogil:
    cdef kina_release_node *node
    if object == NULL or interpreter_is_finalizing():
        return  # leaked on purpose: the interpreter is going or gone
    node = <kina_release_node *> calloc(1, sizeof(kina_release_node))
    if node == NULL:
        return  # leaked: nothing else is safe here
    node.object = <PyObject *> object
    kina_release_push(node)
    # The interpreter's own queue is short; one kick stands for everything on ours.
    if kina_release_claim_kick() and Py_AddPendingCall(drain_from_pending_call, NULL) != 0:
        kina_release_clear_kick()


cdef void drain_python_releases() noexcept:
    cdef kina_release_node *node = kina_release_take()
    cdef kina_release_node *following
    while node != NULL:
        following = node.next
        Py_DECREF(<object> node.object)
        free(node)
        node = following


cdef void destroy_storage(kina_handle *handle) noexcept nogil:
    cdef kina_storage *storage = <kina_storage *> handle
    if storage.before_release != NULL and storage.before_release(storage) != 0:
        return
    storage_release_now(storage)


cdef void storage_release_now(kina_storage *storage) noexcept nogil:
    if storage.flags & KINA_STORAGE_ADOPTED:
        if storage.release_owner != NULL:
            storage.release_owner(storage.owner)
    elif storage.data != NULL:
        storage.resource.vtable.deallocate(storage.resource, storage.data, storage.nbytes, storage.stream)
    kina_release(storage.resource)
    kina_release(storage.stream)
    free(storage)


cdef kina_storage *new_storage(void *data, size_t nbytes, kina_resource *resource, kina_stream *stream,
                               kina_dl_device device, uint64_t runtime, uint64_t domain) noexcept nogil:
    cdef kina_storage *storage = <kina_storage *> calloc(1, sizeof(kina_storage))
    if storage == NULL:
        return NULL
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


cdef int storage_allocate(kina_storage **out, kina_resource *resource, kina_stream *stream, size_t nbytes,
                          kina_dl_device device, uint64_t runtime, uint64_t domain) noexcept nogil:
    cdef kina_storage *storage
    cdef void *data = NULL
    cdef int status
    out[0] = NULL
    if nbytes != 0:
        status = resource.vtable.allocate(resource, &data, nbytes, stream)
        if status != 0:
            return status
    storage = new_storage(data, nbytes, resource, stream, device, runtime, domain)
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
