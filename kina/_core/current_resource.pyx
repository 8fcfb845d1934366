# cython: annotation_typing=False
"""Which resource serves: that of a call, of a with statement of the thread, of a session, of the process."""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uint64_t

from kina._core.resource cimport MemoryResource, device_of_resource
from kina._core.scope cimport install_scope
from kina._core.storage cimport KINA_DEVICE_CPU, KINA_DEVICE_CUDA_HOST, release_python_later
from kina._core.tokens cimport thread_token

from kina._core.resource import HostMemoryResource
from kina.errors import ArgumentError, ForeignDeviceError, WrongThreadError

__all__ = ["ResourceScope", "chosen_resource", "current_host_resource", "set_default_of_ordinal", "using"]


cdef extern from *:
    """
    #include <pthread.h>
    #include "kina_memory.h"

    /* The innermost open scope of the thread, an owned reference; the key's destructor drops it with the thread. */
    static _Thread_local PyObject *kina_innermost_scope KINA_INITIAL_EXEC = NULL;
    static pthread_key_t kina_scope_key;
    static int kina_scope_make_key(void (*destroy)(void *)) { return pthread_key_create(&kina_scope_key, destroy); }
    static void kina_scope_watch_thread(void) { pthread_setspecific(kina_scope_key, &kina_scope_key); }
    """
    PyObject *kina_innermost_scope
    int kina_scope_make_key(void (*destroy)(void *) noexcept nogil) noexcept nogil
    void kina_scope_watch_thread() noexcept nogil


cdef void thread_ends(void *unused) noexcept nogil:
    global kina_innermost_scope
    release_python_later(kina_innermost_scope)
    kina_innermost_scope = NULL


if kina_scope_make_key(thread_ends) != 0:
    raise ImportError("kina: no thread-local key is left in this process (pthread_key_create failed)")

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
    cdef int ordinal                # whose memory it hands out: of a CUDA device, or HOST_MEMORY
    cdef uint64_t thread            # token of the thread that has entered it; 0 while nobody has
    cdef bint given_up              # left in another thread, whose list is its own
    cdef PyObject *outer            # owned; the scope around it

    def __cinit__(self):
        global under_construction
        if not under_construction:
            raise TypeError("a ResourceScope is made by kina.memory.using(resource)")
        under_construction = False

    def __dealloc__(self):
        if self.outer != NULL:
            Py_DECREF(<object> self.outer)

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
    scope.given_up = False
    scope.outer = kina_innermost_scope
    Py_INCREF(scope)
    kina_innermost_scope = entered
    return 0


cdef int leave_scope(PyObject *left, bint unwinding) except -1:
    cdef ResourceScope scope = <ResourceScope> left
    cdef PyObject **place = &kina_innermost_scope
    if scope.thread != thread_token():
        if scope.thread == 0:
            raise ArgumentError("using: this block has not been entered", operation="using")
        scope.given_up = True
        if not unwinding:
            raise WrongThreadError("using: a block can only be left in the thread that entered it; it has been given "
                                   "up", operation="using")
        return 0
    while place[0] != NULL and place[0] != left:  # not always the innermost: exits may come out of order
        place = &(<ResourceScope> place[0]).outer
    if place[0] == left:
        unlink(place)
    return 0


cdef void unlink(PyObject **place) noexcept:
    cdef PyObject *removed = place[0]
    cdef ResourceScope scope = <ResourceScope> removed
    place[0] = scope.outer
    scope.outer = NULL
    scope.thread = 0
    Py_DECREF(<object> removed)


install_scope(ResourceScope, enter_scope, leave_scope)


cdef MemoryResource used_here(int ordinal):
    """That of the thread's innermost scope with memory of `ordinal`, or None."""
    cdef PyObject **place = &kina_innermost_scope
    while place[0] != NULL:
        if (<ResourceScope> place[0]).given_up:
            unlink(place)
        elif (<ResourceScope> place[0]).ordinal == ordinal:
            return (<ResourceScope> place[0]).resource
        else:
            place = &(<ResourceScope> place[0]).outer
    return None


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
    return host_default if ordinal == HOST_MEMORY else <MemoryResource> cuda_defaults.get(ordinal)


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
    scope.ordinal = ordinal
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
