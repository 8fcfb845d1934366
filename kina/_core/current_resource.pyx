# cython: annotation_typing=False
"""Which resource serves: that of a call, of a with statement of the thread, of a session, of the process."""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uint64_t

from kina._core.fork_mutex cimport fork_mutex_init, fork_mutex_lock, fork_mutex_unlock, kina_fork_mutex
from kina._core.resource cimport MemoryResource, device_of_resource
from kina._core.scope cimport install_scope
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA_HOST,
    kina_release,
    kina_resource,
    kina_retain,
    release_python_later,
)
from kina._core.tokens cimport thread_token

from kina._core.resource import HostMemoryResource
from kina.errors import ArgumentError, ForeignDeviceError, WrongThreadError

__all__ = ["ResourceScope", "chosen_resource", "current_host_resource", "set_default_of_ordinal", "using"]


cdef extern from *:
    """
    #include <pthread.h>
    #include "kina_memory.h"

    /* What a scope is without the GIL: a field of its object. */
    typedef struct kina_scope {
        struct kina_scope *outer;       /* the scope around it, an owned reference to its object */
        PyObject *object;               /* that it is a field of */
        struct kina_resource *resource; /* borrowed from the object */
        int ordinal;                    /* whose memory it hands out: of a CUDA device, or -1, the host's */
        int given_up;                   /* atomic: left in another thread, whose list is its own */
    } kina_scope;

    /* The innermost open scope of the thread, owned as `outer` is; the key's destructor drops it with the thread. */
    static _Thread_local kina_scope *kina_innermost_scope KINA_INITIAL_EXEC = NULL;
    static pthread_key_t kina_scope_key;
    static int kina_scope_make_key(void (*destroy)(void *)) { return pthread_key_create(&kina_scope_key, destroy); }
    static void kina_scope_watch_thread(void) { pthread_setspecific(kina_scope_key, &kina_scope_key); }
    static int kina_scope_given_up(kina_scope *scope) { return __atomic_load_n(&scope->given_up, __ATOMIC_RELAXED); }
    static void kina_scope_give_up(kina_scope *scope, int yes) {
        __atomic_store_n(&scope->given_up, yes, __ATOMIC_RELAXED);
    }

    enum { KINA_KNOWN_ORDINALS = 128 };
    static struct kina_resource *kina_default_resources[KINA_KNOWN_ORDINALS]; /* owned, guarded by the mutex */
    static kina_fork_mutex kina_defaults_mutex;
    """
    ctypedef struct kina_scope:
        kina_scope *outer
        PyObject *object
        kina_resource *resource
        int ordinal
        int given_up
    kina_scope *kina_innermost_scope
    bint kina_scope_given_up(kina_scope *scope) noexcept nogil
    void kina_scope_give_up(kina_scope *scope, int yes) noexcept nogil
    enum: KINA_KNOWN_ORDINALS
    kina_resource **kina_default_resources
    kina_fork_mutex kina_defaults_mutex
    int kina_scope_make_key(void (*destroy)(void *) noexcept nogil) noexcept nogil
    void kina_scope_watch_thread() noexcept nogil


cdef void thread_ends(void *unused) noexcept nogil:
    global kina_innermost_scope
    if kina_innermost_scope != NULL:
        release_python_later(kina_innermost_scope.object)
        kina_innermost_scope = NULL


if kina_scope_make_key(thread_ends) != 0:
    raise ImportError("kina: no thread-local key is left in this process (pthread_key_create failed)")

fork_mutex_init(&kina_defaults_mutex)

cdef bint under_construction = False
cdef MemoryResource host_default = None
cdef dict cuda_defaults = {}  # of ordinals
cdef MemoryResource host_face = None


@cython.final
@cython.freelist(16)
cdef class ResourceScope:
    """ResourceScope()

    The block of a ``with kina.memory.using(resource)``; it may be entered again after it was left.
    """

    cdef MemoryResource resource
    cdef kina_scope c
    cdef uint64_t thread            # token of the thread that has entered it; 0 while nobody has

    def __cinit__(self):
        global under_construction
        if not under_construction:
            raise TypeError("a ResourceScope is made by kina.memory.using(resource)")
        under_construction = False

    def __dealloc__(self):
        if self.c.outer != NULL:
            Py_DECREF(<object> self.c.outer.object)

    def __enter__(self) -> ResourceScope:
        enter_scope(<PyObject *> self)
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        leave_scope(<PyObject *> self, kind is not None)

    def __reduce_ex__(self, protocol: int) -> object:
        raise TypeError("a ResourceScope belongs to one thread: it cannot be copied or pickled")


cdef int enter_scope(PyObject *entered) except -1:
    global kina_innermost_scope, memory_was_chosen
    cdef ResourceScope scope = <ResourceScope> entered
    if scope.thread != 0:
        raise ArgumentError("using: this block is entered already; kina.memory.using(resource) makes another",
                            operation="using")
    if kina_innermost_scope == NULL:
        kina_scope_watch_thread()
    memory_was_chosen = True
    scope.thread = thread_token()
    kina_scope_give_up(&scope.c, False)
    scope.c.outer = kina_innermost_scope
    Py_INCREF(scope)
    kina_innermost_scope = &scope.c
    return 0


cdef int leave_scope(PyObject *left, bint unwinding) except -1:
    cdef ResourceScope scope = <ResourceScope> left
    cdef kina_scope **place = &kina_innermost_scope
    if scope.thread != thread_token():
        if scope.thread == 0:
            raise ArgumentError("using: this block has not been entered", operation="using")
        kina_scope_give_up(&scope.c, True)
        if not unwinding:
            raise WrongThreadError("using: a block can only be left in the thread that entered it; it has been given "
                                   "up", operation="using")
        return 0
    while place[0] != NULL and place[0] != &scope.c:  # not always the innermost: exits may come out of order
        place = &place[0].outer
    if place[0] == &scope.c:
        unlink(place)
    return 0


cdef void unlink(kina_scope **place) noexcept:
    cdef kina_scope *removed = place[0]
    place[0] = removed.outer
    removed.outer = NULL
    (<ResourceScope> removed.object).thread = 0
    Py_DECREF(<object> removed.object)


install_scope(ResourceScope, enter_scope, leave_scope)


cdef MemoryResource used_here(int ordinal):
    """That of the thread's innermost scope with memory of `ordinal`, or None."""
    cdef kina_scope **place = &kina_innermost_scope
    while place[0] != NULL:
        if kina_scope_given_up(place[0]):
            unlink(place)
        elif place[0].ordinal == ordinal:
            return (<ResourceScope> place[0].object).resource
        else:
            place = &place[0].outer
    return None


cdef kina_resource *resource_here(int ordinal) noexcept nogil:
    cdef kina_scope *scope = kina_innermost_scope
    cdef kina_resource *found
    while scope != NULL:
        if scope.ordinal == ordinal and not kina_scope_given_up(scope):
            kina_retain(scope.resource)
            return scope.resource
        scope = scope.outer
    if not 0 <= ordinal < KINA_KNOWN_ORDINALS:
        return NULL
    fork_mutex_lock(&kina_defaults_mutex)
    found = kina_default_resources[ordinal]
    kina_retain(found)
    fork_mutex_unlock(&kina_defaults_mutex)
    return found


cdef int ordinal_of(MemoryResource resource) except? -2:
    if resource.ready().device_type == KINA_DEVICE_CPU or resource.c.device_type == KINA_DEVICE_CUDA_HOST:
        return HOST_MEMORY
    return resource.c.device_id


cdef MemoryResource check_memory(object memory, int ordinal, str operation):
    cdef MemoryResource resource
    if memory is None:
        return None
    if not isinstance(memory, MemoryResource):
        raise ArgumentError(f"{operation}: memory= takes a kina.memory.MemoryResource, not {type(memory).__name__}",
                            operation=operation)
    resource = <MemoryResource> memory
    if ordinal_of(resource) != ordinal:
        needed = "cpu" if ordinal == HOST_MEMORY else f"cuda:{ordinal}"
        raise ForeignDeviceError(f"{operation}: {resource.name} hands out memory of {device_of_resource(resource.c)}, "
                                 f"memory of {needed} is needed", operation=operation)
    return resource


cdef MemoryResource memory_of(object memory, MemoryResource of_session, int ordinal, str operation):
    cdef MemoryResource used
    if memory is not None:
        return check_memory(memory, ordinal, operation)
    if kina_innermost_scope != NULL:
        used = used_here(ordinal)
        if used is not None:
            return used
    if of_session is not None:
        return of_session
    if ordinal == HOST_MEMORY:
        return host_default
    return <MemoryResource> cuda_defaults.get(ordinal) if cuda_defaults else None


def using(resource: MemoryResource) -> ResourceScope:
    """``with using(resource):`` memory of its device comes from `resource` in this thread until the block is left.

    Parameters
    ----------
    resource : MemoryResource
        One of host memory, which serves host sessions, or of a CUDA device, which serves sessions there.

    Raises
    ------
    ArgumentError
        Not a MemoryResource.

    Notes
    -----
    Blocks nest; each device has an innermost one of its own. A ``memory=`` of a call goes before them, they go before
    the memory of a session, of its Runtime and the default. What was allocated goes back to where it came from,
    whatever is in use then.
    """
    global under_construction
    cdef ResourceScope scope
    cdef int ordinal
    if not isinstance(resource, MemoryResource):
        raise ArgumentError(f"using: a kina.memory.MemoryResource is needed, not {type(resource).__name__}",
                            operation="using")
    ordinal = ordinal_of(resource)
    under_construction = True
    scope = ResourceScope.__new__(ResourceScope)
    scope.resource = <MemoryResource> resource
    scope.c.object = <PyObject *> scope
    scope.c.resource = scope.resource.c
    scope.c.ordinal = ordinal
    return scope


def set_default_of_ordinal(resource: MemoryResource | None, ordinal: int) -> None:
    """The default for a CUDA device, or for the host where `ordinal` is -1."""
    global host_default, memory_was_chosen
    cdef MemoryResource checked = check_memory(resource, ordinal, "set_default_resource")
    if ordinal == HOST_MEMORY:
        host_default = checked
        return
    memory_was_chosen = True
    if checked is None:
        cuda_defaults.pop(ordinal, None)
    else:
        cuda_defaults[ordinal] = checked
    if 0 <= ordinal < KINA_KNOWN_ORDINALS:
        put_default(ordinal, NULL if checked is None else checked.c)


cdef void put_default(int ordinal, kina_resource *resource) noexcept nogil:
    cdef kina_resource *before
    kina_retain(resource)
    fork_mutex_lock(&kina_defaults_mutex)
    before = kina_default_resources[ordinal]
    kina_default_resources[ordinal] = resource
    fork_mutex_unlock(&kina_defaults_mutex)
    kina_release(before)  # outside the lock: it may be the last reference


def chosen_resource(ordinal: int) -> MemoryResource | None:
    """That of the thread's innermost scope, else the default; None where neither says anything."""
    return memory_of(None, None, ordinal, "current_resource")


def current_host_resource() -> MemoryResource:
    global host_face
    found = chosen_resource(HOST_MEMORY)
    if found is None:
        if host_face is None:
            host_face = HostMemoryResource()
        found = host_face
    return found
