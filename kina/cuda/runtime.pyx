# cython: annotation_typing=False
"""Runtimes: one stream, one allocation domain, one retirement queue; and which of them a thread has."""

from collections import OrderedDict

from cpython.number cimport PyNumber_Index
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from kina._core.current_resource cimport check_memory
from kina._core.resource cimport MemoryResource
from kina._core.pool cimport pool_make, pool_return, stream_closing
from kina._core.status cimport KINA_OUT_OF_MEMORY, check, fail
from kina._core.storage cimport (
    drain_python_releases,
    kina_handle,
    kina_handle_init,
    kina_release,
    kina_resource,
    release_python_later,
)
from kina._core.tokens cimport issue_number
from kina.cuda.captured cimport forget_capture
from kina.cuda.context cimport context_begin, context_end, device_check, device_is_gone, open_device, this_thread
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.driver cimport process_is_forked
from kina.cuda.handles cimport (
    kina_device,
    kina_load,
    kina_load_u64,
    kina_runtime,
    kina_store,
    kina_thread,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from kina.cuda.memory cimport memory_of_device
from kina.cuda.retire cimport orphan_segments, synchronize
from kina.cuda.stream cimport (
    stream_checkin,
    stream_checkout,
    stream_examine,
    stream_examine_captured,
    stream_identify,
    stream_of,
)
from kina.cuda.stream_order cimport runtime_order

from kina._core.identity import AllocationDomainId, DeviceId, RuntimeIdentity
from kina._core.opening import cuda_ordinal
from kina.errors import ArgumentError, RuntimeBusyError

__all__ = ["Runtime"]

cdef enum:
    ADOPTED_PER_THREAD = 32  # Runtimes of adopted streams that a thread keeps
    MOST_MODULES = 65536     # a cache of more would be one without a bound


cdef void destroy_runtime(kina_handle *handle) noexcept nogil:
    """The last face, session and storage are gone. Any thread, no GIL, no wait."""
    cdef kina_runtime *runtime = <kina_runtime *> handle
    cdef kina_device *device = runtime.device
    cdef int pushed
    if process_is_forked():
        return  # whoever held the lock at the fork is not here to give it back
    if device_is_gone(device):
        # Nothing of it may be touched any more, so the bookkeeping leaks with it; it stays listed nowhere else.
        unlist(runtime)
        release_python_later(runtime.stream_owner)
        return
    hand_over_segments(runtime)
    if not runtime.adopted:  # whose stream may be no more
        pool_return(runtime.memory, &runtime.stream)
    pushed = context_begin(device, b"close Runtime")
    stream_closing(&runtime.stream)
    kina_release(runtime.memory)
    unlist(runtime)
    if pushed >= 0:
        context_end(pushed)
    if runtime.adopted:
        release_python_later(runtime.stream_owner)
    elif not runtime.lost:
        stream_checkin(device, <CUstream> runtime.stream.native)
    pthread_mutex_destroy(&runtime.mutex)
    free(runtime)


cdef void hand_over_segments(kina_runtime *runtime) noexcept nogil:
    cdef int pushed
    cdef bint nothing
    pthread_mutex_lock(&runtime.mutex)  # other threads may harvest it
    nothing = runtime.open == NULL and runtime.oldest == NULL
    pthread_mutex_unlock(&runtime.mutex)
    if nothing or device_is_gone(runtime.device):
        return
    pushed = context_begin(runtime.device, b"close Runtime")
    orphan_segments(runtime, pushed >= 0)
    context_end(pushed)


cdef void enlist(kina_runtime *runtime) noexcept nogil:
    cdef kina_device *device = runtime.device
    pthread_mutex_lock(&device.mutex)
    runtime.next = device.runtimes
    if device.runtimes != NULL:
        device.runtimes.previous = runtime
    device.runtimes = runtime
    pthread_mutex_unlock(&device.mutex)


cdef void unlist(kina_runtime *runtime) noexcept nogil:
    cdef kina_device *device = runtime.device
    pthread_mutex_lock(&device.mutex)
    if runtime.previous != NULL:
        runtime.previous.next = runtime.next
    else:
        device.runtimes = runtime.next
    if runtime.next != NULL:
        runtime.next.previous = runtime.previous
    pthread_mutex_unlock(&device.mutex)


cdef kina_runtime *create(kina_device *device, object owner) except NULL:
    cdef kina_runtime *runtime
    cdef kina_resource *memory
    cdef CUstream stream = NULL
    cdef unsigned long long stream_id = 0
    cdef bint owner_is_none = owner is None
    cdef int pushed, status
    if owner is not None:
        stream = stream_of(owner)
    check(device_check(device, b"Runtime"))
    with nogil:
        pushed = context_begin(device, b"Runtime")
        status = 0
        if pushed >= 0:
            if not owner_is_none:
                status = stream_examine_captured(device, stream, &stream_id)
            else:
                status = stream_checkout(device, &stream)
                if status == 0:
                    status = stream_identify(device, stream, &stream_id)
                    if status != 0:
                        stream_checkin(device, stream)
            context_end(pushed)
    check(-1 if pushed < 0 else status)
    try:
        memory = pool_make(memory_of_device(device))
        runtime = assemble(device, stream, stream_id, memory)
        if runtime == NULL:
            kina_release(memory)
            raise MemoryError("no host memory for a Runtime")
    except BaseException:
        if owner_is_none:
            stream_checkin(device, stream)
        raise
    if owner is not None:
        # Strong: an adopted stream must not be destroyed while anything of the Runtime can still enqueue on it.
        Py_INCREF(owner)
        runtime.stream_owner = <void *> owner
        runtime.adopted = 1
    enlist(runtime)
    return runtime


cdef kina_runtime *assemble(kina_device *device, CUstream stream, unsigned long long stream_id,
                            kina_resource *memory) noexcept nogil:
    """One that is listed nowhere yet and owns `memory` from here on; NULL without host memory."""
    cdef kina_runtime *runtime = <kina_runtime *> calloc(1, sizeof(kina_runtime))
    if runtime == NULL:
        return NULL
    runtime.memory = memory
    kina_handle_init(&runtime.stream.handle, destroy_runtime)
    runtime.stream.native = <void *> stream
    runtime.stream.number = issue_number()
    runtime.stream.runtime = issue_number()
    runtime.stream.domain = issue_number()
    runtime.stream.device_id = device.ordinal
    runtime.stream.ordering = runtime_order
    runtime.stream_id = stream_id
    runtime.device = device
    pthread_mutex_init(&runtime.mutex, NULL)
    return runtime


cdef int runtime_adopt(kina_runtime **out, kina_device *device, CUstream stream) noexcept nogil:
    cdef unsigned long long stream_id = 0
    cdef int status = stream_examine(device, stream, &stream_id)
    if status != 0:
        return status
    out[0] = assemble(device, stream, stream_id, NULL)
    if out[0] == NULL:
        return fail(KINA_OUT_OF_MEMORY, b"adopt stream", b"no host memory for a Runtime")
    out[0].adopted = 1
    enlist(out[0])
    return 0


cdef int read_modules(object modules) except -1:
    try:
        most = None if isinstance(modules, bool) else PyNumber_Index(modules)
    except TypeError:
        most = None
    if most is None or not 1 <= most <= MOST_MODULES:
        raise ArgumentError(f"Runtime: modules is an int from 1 to {MOST_MODULES}, got {modules!r}",
                            operation="Runtime")
    return most


cdef class Runtime:
    """Runtime(device, *, stream=None, memory=None, modules=64)

    One real stream, one allocation domain, one retirement queue and one module cache on one GPU.

    Parameters
    ----------
    device : int, str, DeviceId or DeviceInfo
        ``0``, ``"cuda:0"`` or ``"cuda"`` (the first).
    stream : object with ``__cuda_stream__``, optional
        A stream made elsewhere (PyTorch's, CuPy's, cuda.core's) to adopt; it is kept alive, so it must not itself keep
        the Runtime: such a cycle is never collected. Without one the Runtime
        checks a non-blocking stream out of the device's pool and returns it when its last tensor is gone.
    memory : kina.memory.MemoryResource, optional
        Where the memory of its sessions' tensors comes from, unless they or a call say otherwise; one of the device.
        Default: that of ``kina.memory.set_default_resource``, else a pool of its own. A resource in Python must not
        itself keep a session of the Runtime: that cycle is never collected.
    modules : int
        How many modules it keeps loaded, from 1 to 65,536: what is asked for again is found, the least recently used go
        first. A module that somebody holds, or whose code is in flight, lives on.

    Raises
    ------
    UnavailableError
        No driver, no such device.
    UnsupportedError, ForeignDeviceError
        The stream is per-thread, of a green context, or of another device; the memory is another device's.
    ArgumentError
        `memory` is no MemoryResource, `modules` no int from 1 to 65,536.

    Notes
    -----
    Making one waits for nothing but the first use of its device in the process (0.1 s). A Runtime may be entered from
    any thread, by one thread at a time. Two Runtimes on one GPU share nothing but the GPU and its primary context.
    """

    def __cinit__(self, device: int | str | DeviceId | DeviceInfo, *, stream: object = None,
                  memory: MemoryResource | None = None, modules: int = 64):
        cdef int ordinal = cuda_ordinal(device)
        self._most_modules = read_modules(modules)
        self._memory = check_memory(memory, ordinal, "Runtime")
        drain_python_releases()
        self.c = create(open_device(ordinal), stream)

    def __dealloc__(self):
        cdef kina_runtime *runtime = self.c
        if runtime != NULL:
            self.c = NULL
            self._objects = None
            with nogil:
                # No session can open it any more, so its unfinished segments pass to the device now: what they lease
                # may have this very Runtime as its home, and would keep it for ever.
                hand_over_segments(runtime)
                if not forget_capture(runtime):
                    runtime.lost = 1
                kina_release(runtime)

    @property
    def device(self) -> DeviceId:
        """The device it runs on."""
        return DeviceId(self.c.device.ordinal)

    @property
    def identity(self) -> RuntimeIdentity:
        """This exact instance; never reused."""
        return RuntimeIdentity._issue(self.c.stream.runtime)

    @property
    def allocation_domain(self) -> AllocationDomainId:
        """The domain that owns and retires what it allocates."""
        return AllocationDomainId._issue(self.c.stream.domain)

    @property
    def closed(self) -> bool:
        """Has :meth:`close` been called?"""
        return kina_load(&self.c.closed) != 0

    def close(self) -> None:
        """Wait for everything on its stream, release what that protected, and refuse new sessions. Idempotent.

        Tensors that are still alive stay valid to drop; the stream goes back to the pool with the last of them.

        Raises
        ------
        RuntimeBusyError
            A session has it open.
        SynchronizeError
            Earlier asynchronous work failed.
        """
        cdef kina_runtime *runtime = self.c
        cdef int pushed, status = 0
        if kina_load_u64(&runtime.open_state) != 0:
            raise RuntimeBusyError("the Runtime is open: leave its sessions first", operation="close Runtime")
        if kina_load(&runtime.closed):
            return
        kina_store(&runtime.closed, 1)
        self._modules = None
        if self._objects is not None:
            self._objects.clear()
        if device_is_gone(runtime.device):
            return
        with nogil:
            pushed = context_begin(runtime.device, b"close Runtime")
            if pushed >= 0:
                status = synchronize(runtime)
                context_end(pushed)
        check(-1 if pushed < 0 else status)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self):
        raise TypeError("a Runtime cannot be pickled or copied: it is one stream of this process")

    def __repr__(self) -> str:
        kind = "adopted" if self.c.adopted else "own"
        state = ", closed" if self.closed else ""
        return f"<kina.Runtime {self.c.stream.runtime} on cuda:{self.c.device.ordinal}, {kind} stream{state}>"


cdef class ThreadRuntimes:
    """What a thread keeps: its default Runtime of each device, and those of the streams it adopted lately."""

    cdef dict defaults
    cdef object adopted

    def __cinit__(self):
        self.defaults = {}
        self.adopted = OrderedDict()

    cdef object key_of_captured(self, int ordinal, CUstream stream):
        """A stream that is being captured cannot be asked who it is. A Runtime holds the owner of its stream, so that
        no other can have its handle."""
        for key, runtime in reversed(self.adopted.items()):  # of those at one handle, the newest
            if key[0] == ordinal and (<Runtime> runtime).c.stream.native == <void *> stream \
                    and not kina_load(&(<Runtime> runtime).c.closed):
                return key
        return (ordinal, 0, <uintptr_t> stream)


cdef ThreadRuntimes thread_runtimes():
    cdef kina_thread *thread = this_thread()
    if thread == NULL:
        raise MemoryError("no host memory for the bookkeeping of a thread")
    if thread.runtimes == NULL:
        made = ThreadRuntimes()
        Py_INCREF(made)  # the thread's reference, given up by its end
        thread.runtimes = <void *> made
    return <ThreadRuntimes> <PyObject *> thread.runtimes


cdef Runtime default_runtime(int ordinal):
    cdef kina_thread *thread = this_thread()
    cdef ThreadRuntimes known
    cdef object found
    if thread != NULL and thread.recent != NULL and thread.recent_ordinal == ordinal:
        found = <object> <PyObject *> thread.recent
        if not kina_load(&(<Runtime> found).c.closed):
            return <Runtime> found
    known = thread_runtimes()
    found = known.defaults.get(ordinal)
    if found is None or kina_load(&(<Runtime> found).c.closed):
        found = Runtime(ordinal)
        this_thread().recent = NULL  # what it points to may go with the next line
        known.defaults[ordinal] = found
    thread = this_thread()
    thread.recent = <void *> found
    thread.recent_ordinal = ordinal
    return <Runtime> found


cdef Runtime adopted_runtime(int ordinal, object owner):
    cdef ThreadRuntimes known = thread_runtimes()
    cdef kina_device *device = open_device(ordinal)
    cdef CUstream stream = stream_of(owner)
    cdef unsigned long long stream_id = 0
    cdef int pushed, status = 0
    check(device_check(device, b"adopt stream"))
    pushed = context_begin(device, b"adopt stream")
    if pushed >= 0:
        status = stream_examine_captured(device, stream, &stream_id)
        context_end(pushed)
    check(-1 if pushed < 0 else status)
    if stream_id == 0:
        key = known.key_of_captured(ordinal, stream)
        found = known.adopted.get(key)
    else:
        # Keyed by the driver's id, which is never reused: a handle's address is.
        key = (ordinal, stream_id)
        found = known.adopted.get(key)
        if found is None:
            # Known from a capture, perhaps, and held since, so that no other stream can have its handle.
            found = known.adopted.pop((ordinal, 0, <uintptr_t> stream), None)
            if found is not None:
                (<Runtime> found).c.stream_id = stream_id
                known.adopted[key] = found
    if found is None or kina_load(&(<Runtime> found).c.closed):
        found = Runtime(ordinal, stream=owner)
        known.adopted[key] = found
        if len(known.adopted) > ADOPTED_PER_THREAD:
            # An evicted one lives on while sessions or tensors hold it.
            known.adopted.popitem(last=False)
    else:
        known.adopted.move_to_end(key)
    return <Runtime> found
