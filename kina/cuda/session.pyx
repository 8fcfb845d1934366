# cython: annotation_typing=False
"""Sessions: a thread's scoped authority over one Runtime, and the only way to run anything.

Source: the session protocol is kina's own (docs/concepts); the driver calls are named where they are made.
"""

import importlib
import logging

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from kina._core.current_resource cimport check_memory
from kina._core.dlpack cimport drop_managed
from kina._core.dtype cimport DType, as_dtype, pack_scalar
from kina._core.exchange_table cimport offer_table
from kina._core.host_array cimport as_host_array, elements_of_span, empty_host_array, host_address
from kina._core.opening cimport set_cuda_finder, set_cuda_opener
from kina._core.resource cimport MemoryResource
from kina._core.pool cimport pool_count, pool_counts, pool_end_with
from kina._core.scope cimport install_scope
from kina._core.construction cimport begin_construction, end_construction
from kina._core.session cimport Session
from kina._core.status cimport check, raise_last
from kina._core.storage cimport (
    KINA_MAX_NDIM,
    KINA_STORAGE_ADOPTED,
    KINA_TENSOR_C_CONTIGUOUS,
    drain_python_releases,
    kina_dl_exchange_api,
    kina_dl_managed_tensor_versioned,
    kina_release,
    kina_retain,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor, parse_shape
from kina._core.tokens cimport issue_number, thread_token
from kina.cuda.adoption cimport adopt_array, adopt_from_table, adopt_tensor, check_own
from kina.cuda.capture cimport capture_set, is_capturing
from kina.cuda.captured cimport disown_capture, drop_capture, follow_capture, may_be_captured
from kina.cuda.context cimport (
    context_begin,
    context_end,
    device_check,
    device_is_gone,
    innermost_node,
    session_abandon,
    session_enter,
    session_leave,
    this_thread,
)
from kina.cuda.completion cimport Completion, make_completion
from kina.cuda.cudatypes cimport CUdeviceptr
from kina.cuda.device cimport known_device
from kina.cuda.handles cimport (
    kina_load,
    kina_load_u64,
    kina_raw_block,
    kina_ref,
    kina_runtime,
    kina_seal,
    kina_session_node,
    kina_thread,
)
from kina.cuda.memory cimport release_held_frees
from kina.cuda.retire cimport (
    lease,
    lease_storage,
    leases_pending,
    seal,
    seal_if_full,
    seal_if_urgent,
    synchronize,
)
from kina.cuda.hand_over cimport HandOver, hand_over, make_hand_over, order_sessions, wait_for
from kina.cuda.runtime cimport Runtime, adopted_runtime, default_runtime
from kina.cuda.tensor_memory cimport allocate_tensor
from kina.cuda.transfer cimport copy_within, download, fill, upload

from kina._core.capability import Capability
from kina._core.counters import Counters
from kina.errors import (
    ArgumentError,
    NonContiguousError,
    RuntimeBusyError,
    SessionClosedError,
    UnavailableError,
    UnsupportedError,
    WrongThreadError,
)

__all__ = ["CudaSession"]

logger = logging.getLogger("kina")

offer_table()
importlib.import_module("kina.cuda.exchange")  # for its hooks

cdef str CAPTURED_ADOPT = "the graph cannot wait for the producer: adopt it before the capture"

cdef object raw_factory = None


cdef void set_raw_factory(object factory) noexcept:
    global raw_factory
    raw_factory = factory


cdef object graph_factory = None


cdef void set_graph_factory(object factory) noexcept:
    global graph_factory
    graph_factory = factory


cdef void end_raw_blocks(kina_runtime *runtime, kina_session_node *node) noexcept:
    """A session goes, and with it every raw block opened in it (NULL: every one): their refs are dead."""
    cdef kina_raw_block *block = runtime.block
    cdef kina_raw_block **link = &runtime.block
    while block != NULL:
        if node == NULL or block.node == node:
            end_refs(block)
            block.alive = 0
            link[0] = block.outer
        else:
            link = &block.outer
        block = block.outer


cdef void end_refs(kina_raw_block *block) noexcept:
    cdef kina_ref *ref = block.refs
    cdef kina_ref *following
    while ref != NULL:
        following = ref.next
        ref.alive = 0
        ref.previous = NULL
        ref.next = NULL
        ref = following
    block.refs = NULL


cdef bint must_seal(kina_runtime *runtime) noexcept nogil:
    """Is something to be sealed when the session is left? All that somebody else's stream has done: it may go next."""
    if gives_stream_back(runtime):
        return runtime.open != NULL or runtime.stream.watches != NULL or is_capturing(runtime)
    return runtime.open != NULL and runtime.open.leases.urgent


cdef bint gives_stream_back(kina_runtime *runtime) noexcept nogil:
    return runtime.adopted and runtime.open_state & 0xFFFF == 1


cdef void seal_adopted(kina_runtime *runtime) noexcept nogil:
    cdef kina_seal *last = NULL
    if seal(runtime, &last) == 0:  # else it stays leased, and the pool asks the stream itself in the end
        pool_end_with(runtime.memory, &runtime.stream, &last.handle)
        kina_release(last)


@cython.no_gc  # nothing it refers to can refer back
cdef class CudaSession(Session):
    """CudaSession()

    A thread's scoped authority over one Runtime: made by :func:`kina.session`, entered by ``with``.

    Entering makes the device's primary context current and binds the Runtime's one stream; leaving puts the caller's
    context stack back as it was and never waits. Everything below enqueues on that stream and returns, unless its
    text says that it waits.

    Raises
    ------
    SessionClosedError
        Any use before it is entered or after it is left.
    WrongThreadError
        Any use from another thread.
    RuntimePoisonedError
        Any use after the device's context has failed.
    """

    def __dealloc__(self):
        cdef kina_session_node *node = self.node
        if node != NULL:
            # Abandoned: this may be any thread, at any time, so the context stack is its own thread's to mend.
            self.node = NULL
            node.face = NULL
            end_raw_blocks(node.runtime, node)
            disown_capture(node)
            session_abandon(node)

    # ------------------------------------------------------------------------------------ protocol

    # With statements come to enter() and leave() by install_scope, or from CPython 3.14 on by these.
    @cython.binding(False)
    def __enter__(self) -> CudaSession:
        self.enter()
        return self

    @cython.binding(False)
    def __exit__(self, kind: object, exception: object, traceback: object) -> None:
        self.leave(kind is not None)

    def close(self) -> None:
        """Leave the session, as the end of its ``with`` block does. Idempotent."""
        self.leave(False)

    cdef int enter(self) except -1:
        cdef kina_runtime *runtime = self._runtime.c
        cdef kina_session_node *node
        drain_python_releases()  # runs anybody's code, so before anything is looked at
        if self.thread != 0:
            raise SessionClosedError("a session is entered once: ask kina.session() for a new one", operation="session")
        if may_be_captured(runtime):
            check(device_check(runtime.device, b"session"))
            follow_capture(runtime, b"session")
        if runtime.adopted:
            if runtime.stream.watches != NULL:
                pool_end_with(runtime.memory, &runtime.stream, NULL)
        node = session_enter(runtime)
        if node == NULL:
            raise_last()
        if runtime.block != NULL and runtime.open_state & 0xFFFF == 1:
            end_raw_blocks(runtime, NULL)  # of a thread that ended without leaving them
        node.face = <void *> self
        self.node = node
        self.thread = node.thread
        self._entry = issue_number()
        return 0

    cdef int leave(self, bint unwinding) except -1:
        cdef kina_session_node *node = self.node
        cdef kina_runtime *runtime
        cdef kina_thread *thread
        cdef int pushed
        if node == NULL:
            return 0
        thread = this_thread()
        if thread == NULL or self.thread != thread.token:
            # A generator that is collected in another thread comes here too: the session is given up, not stuck,
            # and this thread's contexts are not touched.
            if node.calls != 0:
                if unwinding:
                    return 0
                raise WrongThreadError("a session can only be left in the thread that entered it; a call of it is "
                                       "under way there, so it stays open", operation="leave session")
            self.node = NULL
            node.face = NULL
            end_raw_blocks(node.runtime, node)
            disown_capture(node)
            session_abandon(node)
            if unwinding:
                return 0
            raise WrongThreadError("a session can only be left in the thread that entered it; it has been given up",
                                   operation="leave session")
        if node.calls != 0:
            raise RuntimeBusyError("a call of the session is under way in this thread: it can be left when that has "
                                   "returned", operation="leave session")
        runtime = node.runtime
        end_raw_blocks(runtime, node)
        if is_capturing(runtime) and (runtime.capture.node == node or kina_load(&runtime.capture.unended)):
            with nogil:
                drop_capture(runtime, runtime.capture)
        if must_seal(runtime) and not device_is_gone(runtime.device):
            node.calls += 1  # releases may run anybody's code
            with nogil:
                pushed = context_begin(runtime.device, b"leave session")
                if pushed >= 0:
                    if gives_stream_back(runtime):
                        seal_adopted(runtime)
                        if is_capturing(runtime):
                            capture_set(runtime, NULL)  # the graph has what it holds, and is the last to have it
                    else:
                        seal_if_urgent(runtime)  # what cannot be sealed stays leased
                    context_end(pushed)
            node.calls -= 1
        self.node = NULL
        node.face = NULL
        self._entry = 0
        if session_leave(thread, node) != 0:
            report_failed_restore()
        self._memory = None  # it may refer to the session; anybody's code may run
        return 0

    cdef int begin_call(self, const char *operation) except -1:
        """What needs no context."""
        cdef kina_session_node *node = self.node
        if node == NULL:
            word = "not been entered (use it in a with statement)" if self.thread == 0 else "ended"
            raise SessionClosedError(f"the session has {word}", operation=operation.decode())
        if self.thread != thread_token():
            raise WrongThreadError("the session belongs to the thread that entered it", operation=operation.decode())
        check(device_check(node.runtime.device, operation))
        node.calls += 1
        if may_be_captured(node.runtime):
            try:
                follow_capture(node.runtime, operation)
            except BaseException:
                node.calls -= 1
                raise
        return 0

    cdef int refuse_captured(self, const char *operation, str remedy) except -1:
        if is_capturing(self.node.runtime):
            raise UnsupportedError(f"{operation.decode()} cannot be captured into a graph: {remedy}",
                                   operation=operation.decode())
        return 0

    cdef void end_call(self) noexcept:
        self.node.calls -= 1

    cdef int begin(self, const char *operation) except -1:
        cdef int pushed
        self.begin_call(operation)
        pushed = context_begin(self.node.runtime.device, operation)
        if pushed < 0:
            self.end_call()
            raise_last()
        return pushed

    cdef void end(self, int pushed) noexcept:
        self.end_call()
        context_end(pushed)

    # ------------------------------------------------------------------------------------ what it is

    @property
    def device(self) -> str:
        """The device it runs on: ``"cuda:0"``."""
        return f"cuda:{self._runtime.c.device.ordinal}"

    @property
    def runtime(self) -> Runtime:
        """The Runtime it is open on."""
        return self._runtime

    @property
    def runtime_identity(self) -> RuntimeIdentity:
        """RuntimeIdentity of its Runtime."""
        return self._runtime.identity

    @property
    def allocation_domain(self) -> AllocationDomainId:
        """AllocationDomainId of what it allocates."""
        return self._runtime.allocation_domain

    @property
    def closed(self) -> bool:
        """Has it been left?"""
        return self.node == NULL and self.thread != 0

    @property
    def device_info(self) -> DeviceInfo:
        """The DeviceInfo of its device."""
        return known_device(self._runtime.c.device.ordinal)

    def supports(self, capability: Capability) -> bool:
        """Can this build, on this device and now, do what a :class:`kina.Capability` names?

        ``True`` does not promise that one particular load, compilation or launch succeeds. Nothing is true of a device
        that an earlier failure has made unusable. RUNTIME_COMPILATION takes an NVRTC that is installed and knows the
        device, or one before it; KERNEL_DSL and PEER_COPY are not in this version.

        Raises
        ------
        ArgumentError
            It is not a Capability.
        """
        cdef bint gone
        if not isinstance(capability, Capability):
            raise ArgumentError(f"supports: a kina.Capability is needed, not {type(capability).__name__}",
                                operation="supports")
        with nogil:
            gone = device_is_gone(self._runtime.c.device)
        if gone:
            return False
        if capability is Capability.RUNTIME_COMPILATION:
            from kina.cuda.nvrtc import nvrtc
            try:
                library = nvrtc()
            except UnavailableError:
                return False
            major, minor = self.device_info.compute_capability
            return any(known <= 10 * major + minor for known in library.architectures)
        return capability in (Capability.NATIVE_MODULE, Capability.RAW_STREAM, Capability.SAME_DEVICE_ASYNC_COPY)

    def counters(self) -> Counters:
        """What its Runtime has done so far; see :class:`kina._core.counters.Counters`."""
        cdef kina_runtime *runtime = self._runtime.c
        cdef pool_counts memory
        cdef uint64_t pending
        cdef int pushed = self.begin(b"counters")
        with nogil:
            pool_count(runtime.memory, &memory)
            pending = leases_pending(runtime)
        self.end(pushed)
        return Counters(
            launches=runtime.counters.launches,
            graph_launches=runtime.counters.graph_launches,
            # Other threads count these too.
            events_recorded=kina_load_u64(&runtime.counters.events_recorded),
            event_queries=kina_load_u64(&runtime.counters.event_queries),
            seals=runtime.counters.seals,
            leases=runtime.counters.leases,
            pending=pending,
            retired=kina_load_u64(&runtime.counters.retired),
            reaped=kina_load_u64(&runtime.counters.reaped),
            leaked=kina_load_u64(&runtime.counters.leaked),
            synchronizations=runtime.counters.synchronizations,
            host_waits=kina_load_u64(&runtime.counters.host_waits),
            allocations=memory.total_allocations,
            frees=memory.total_allocations - memory.live_allocations,
            live_bytes=memory.live_bytes,
            reserved_bytes=memory.reserved_bytes,
            bytes_to_device=runtime.counters.bytes_to_device,
            bytes_to_host=runtime.counters.bytes_to_host,
            modules_loaded=runtime.counters.modules_loaded,
            modules_evicted=runtime.counters.modules_evicted,
            unloads_deferred=runtime.counters.unloads_deferred,
        )

    def __repr__(self) -> str:
        state = "open" if self.node != NULL else "ended" if self.thread != 0 else "not entered"
        return f"<kina.CudaSession on cuda:{self._runtime.c.device.ordinal}, {state}>"

    # ------------------------------------------------------------------------------------ waiting

    def synchronize(self) -> None:
        """Wait on the host for everything enqueued on the session's stream, and release what it protected.

        Waits for the whole device instead while exported memory is quarantined: its users' streams are unknown.

        Raises
        ------
        SynchronizeError
            Earlier asynchronous work failed; the device is poisoned from then on.
        """
        cdef kina_runtime *runtime = self._runtime.c
        cdef int pushed = self.begin(b"synchronize")
        cdef int status
        try:
            self.refuse_captured(b"synchronize", "nothing runs before the graph is launched")
            with nogil:
                status = synchronize(runtime)
                release_held_frees(runtime.device)
        finally:
            self.end(pushed)
        check(status)
        drain_python_releases()

    def completion(self) -> Completion:
        """A witness of everything enqueued so far: one event is recorded; nothing waits."""
        cdef kina_runtime *runtime = self._runtime.c
        cdef kina_seal *recorded = NULL
        cdef int status
        cdef int pushed = self.begin(b"completion")
        try:
            self.refuse_captured(b"completion", "ask for it after a launch of the graph")
            with nogil:
                status = seal(runtime, &recorded)
        finally:
            self.end(pushed)
        check(status)
        return make_completion(runtime, recorded)

    # ------------------------------------------------------------------------------------ tensors

    cdef Tensor allocate(self, DType dtype, int ndim, const int64_t *extents, object memory, const char *operation):
        return allocate_tensor(self.node.runtime, self._memory, dtype, ndim, extents, memory, operation)

    def empty(self, shape: int | Sequence[int], dtype: object = "float32", *,
              memory: MemoryResource | None = None) -> Tensor:
        """A tensor with undefined contents, C-ordered, on the session's device.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype, str or NumPy dtype
        memory : kina.memory.MemoryResource, optional
            A resource of the session's device to take the memory from. Default: that of the innermost
            ``kina.memory.using``, else of the session, of its Runtime, the default of the device, else the Runtime's
            own pool.

        Raises
        ------
        InvalidShapeError, DTypeError
        OutOfMemoryError
            With ``requested``, ``live``, ``cached`` and ``limit`` in bytes, as far as the resource knows them.
        ArgumentError
            `memory` is no MemoryResource.
        ForeignDeviceError
            `memory` hands out memory of another device.

        Notes
        -----
        When the last tensor over the memory goes, it is given back in the order of the session's stream. To a resource
        without stream order that means later: at an allocation from such a resource or a wait, once the stream is past
        what was enqueued.
        """
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef DType wanted = as_dtype(dtype)
        cdef int ndim = parse_shape(shape, extents, b"empty")
        self.begin_call(b"empty")
        try:
            return self.allocate(wanted, ndim, extents, memory, b"empty")
        finally:
            self.end_call()

    cdef Tensor filled(self, object shape, DType dtype, const void *element, object memory, const char *operation):
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef int ndim = parse_shape(shape, extents, operation)
        cdef int pushed = self.begin(operation)
        cdef Tensor made
        cdef int status
        try:
            made = self.allocate(dtype, ndim, extents, memory, operation)
            with nogil:
                status = fill(self.node.runtime, <CUdeviceptr> made.c.data, made.c.size, dtype.itemsize, element)
            check(status)
            return made
        finally:
            self.end(pushed)

    def zeros(self, shape: int | Sequence[int], dtype: object = "float32", *,
              memory: MemoryResource | None = None) -> Tensor:
        """A tensor of zeros; parameters and errors as for :meth:`empty`. The fill is enqueued, nothing waits."""
        cdef char element[16]
        cdef int i
        for i in range(16):
            element[i] = 0
        return self.filled(shape, as_dtype(dtype), element, memory, b"zeros")

    def full(self, shape: int | Sequence[int], value: object, dtype: object = "float32", *,
             memory: MemoryResource | None = None) -> Tensor:
        """A tensor whose elements all are ``value``, converted to ``dtype`` with a range check.

        As :meth:`empty` otherwise.

        Raises
        ------
        ArgumentError
            ``value`` does not fit the dtype.
        """
        cdef char element[16]
        cdef DType wanted = as_dtype(dtype)
        pack_scalar(wanted, value, element)
        return self.filled(shape, wanted, element, memory, b"full")

    def from_host(self, array: object, dtype: object = None, *, memory: MemoryResource | None = None) -> Tensor:
        """Copy host data to a new C-ordered tensor.

        Parameters
        ----------
        array : array_like
            Anything ``numpy.asarray`` takes, tensors in host memory too. It has been read to its end on return and may
            be changed.
        dtype : optional
            Convert on the host first; the array's own by default.
        memory : kina.memory.MemoryResource, optional
            As in :meth:`empty`.

        Notes
        -----
        Goes through a bounded ring of pinned blocks and returns while the last copies may still run; later work of the
        session is ordered after them. Waits for the session's own oldest transfer when the ring is full.
        """
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef Tensor made
        cdef int ndim, status, pushed
        cdef const char *source
        cdef DType wanted
        host, wanted = as_host_array(array, dtype, "C")
        ndim = parse_shape(host.shape, extents, b"from_host")
        pushed = self.begin(b"from_host")
        try:
            self.refuse_captured(b"from_host", "host memory is read once: upload it before the capture")
            made = self.allocate(wanted, ndim, extents, memory, b"from_host")
            source = <const char *> host_address(host)
            with nogil:
                status = upload(self.node.runtime, <CUdeviceptr> made.c.data, source, made.c.size_bytes)
            check(status)
            return made
        finally:
            self.end(pushed)

    def to_host(self, Tensor tensor not None) -> numpy.ndarray:
        """Copy a tensor to a new, C-ordered NumPy array. Waits for it, as its name says.

        A view that is not compact is downloaded as the byte span it touches and put in order on the host.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        SynchronizeError
            Earlier asynchronous work failed.
        """
        cdef kina_runtime *runtime
        cdef CUdeviceptr source
        cdef size_t nbytes
        cdef char *target
        cdef int status = 0
        cdef int pushed = self.begin(b"to_host")
        try:
            self.refuse_captured(b"to_host", "download it after a launch of the graph")
            check_own(self.node.runtime, tensor, b"to_host")
            runtime = self.node.runtime
            compact = tensor.c.flags & KINA_TENSOR_C_CONTIGUOUS
            if compact:
                host = empty_host_array(tensor.shape, tensor._dtype)
                source = <CUdeviceptr> kina_tensor_address(&tensor.c)
                nbytes = tensor.c.size_bytes
            else:
                nbytes = <size_t> (tensor.c.span_high - tensor.c.span_low)
                host = empty_host_array((nbytes,), as_dtype("uint8"))
                source = <CUdeviceptr> tensor.c.data + tensor.c.span_low
            if tensor.c.storage.flags & KINA_STORAGE_ADOPTED:
                check(lease(runtime, tensor.c.storage, True))
            target = <char *> host_address(host)
            with nogil:
                status = download(runtime, target, source, nbytes)
            # A broken off transfer leaves copies under way, behind seals that were recorded after the lease above.
            if status != 0 and tensor.c.storage.flags & KINA_STORAGE_ADOPTED \
                    and lease(runtime, tensor.c.storage, True) != 0:
                kina_retain(tensor.c.storage)  # leaked: it cannot be known when they end
            check(status)
        finally:
            self.end(pushed)
        drain_python_releases()
        if compact:
            return host
        return elements_of_span(host, tensor)

    def copy(self, Tensor tensor not None, *, memory: MemoryResource | None = None) -> Tensor:
        """A new C-ordered tensor with the same elements, copied on the device; nothing waits.

        `memory` as in :meth:`empty`.

        Raises
        ------
        NonContiguousError
            The tensor is not C-ordered and compact: nothing is materialised behind the caller's back.
        """
        cdef Tensor made
        cdef CUdeviceptr source
        cdef int status
        cdef int pushed = self.begin(b"copy")
        try:
            check_own(self.node.runtime, tensor, b"copy")
            if not tensor.c.flags & KINA_TENSOR_C_CONTIGUOUS:
                raise NonContiguousError(
                    f"copy needs a C-ordered compact tensor, got shape {tensor.shape} with strides {tensor.strides}; "
                    "from_host(to_host(tensor)) makes one, by way of the host",
                    operation="copy",
                )
            made = self.allocate(tensor._dtype, tensor.c.ndim, tensor.c.shape, memory, b"copy")
            source = <CUdeviceptr> kina_tensor_address(&tensor.c)
            check(lease_storage(self.node.runtime, tensor.c.storage))
            with nogil:
                status = copy_within(self.node.runtime, <CUdeviceptr> made.c.data, source, tensor.c.size_bytes)
                if status == 0:
                    seal_if_full(self.node.runtime)
            check(status)
            return made
        finally:
            self.end(pushed)

    def adopt(self, source: object) -> Tensor:
        """Take in an array that lives on this device, without a copy.

        The session's stream waits, on the device, for the producer's; the host never waits. The owner is released only
        after everything enqueued on the session with it is done.

        Parameters
        ----------
        source : object
            A kina tensor of another Runtime; an array whose type has a DLPack exchange table; any DLPack producer; a
            DLPack capsule, which says nothing of streams: the legacy stream is waited for; anything with
            ``__cuda_array_interface__``, whose ``stream`` is waited for. The first way that is open
            is taken. Memory of the device, managed memory, and pinned host memory, which the device reaches too.

        Raises
        ------
        DLPackError
            The producer refuses, has copied, or describes something impossible; the message names the field. Tensors
            that autograd watches, or whose memory holds conjugated or negated values.
        DTypeError
            Elements that kina does not store: smaller than a byte, opaque, vectors.
        ForeignDeviceError
            It lives elsewhere.
        UnsupportedError
            The session's stream, or the producer's, is being captured into a graph.

        Notes
        -----
        What is read-only stays so.
        """
        cdef int pushed = self.begin(b"adopt")
        try:
            self.refuse_captured(b"adopt", CAPTURED_ADOPT)
            if type(source) is Tensor:
                return adopt_tensor(self.node.runtime, <Tensor> source)
            return adopt_array(self.node.runtime, source)
        finally:
            self.end(pushed)

    cdef object take_managed(self, kina_dl_managed_tensor_versioned *managed, const kina_dl_exchange_api *api,
                             bint outside):
        cdef int pushed = -1
        try:
            pushed = self.begin(b"adopt")
            self.refuse_captured(b"adopt", CAPTURED_ADOPT)
        except BaseException:
            drop_managed(managed)
            if pushed >= 0:
                self.end(pushed)
            raise
        try:
            return adopt_from_table(self.node.runtime, managed, api, outside)
        finally:
            self.end(pushed)

    # ------------------------------------------------------------------------------------ other streams

    def wait(self, other: object) -> None:
        """Make the session's stream wait, on the device, for everything enqueued so far on another one.

        Parameters
        ----------
        other : stream, session, Completion or event
            What has ``__cuda_stream__`` (PyTorch's, CuPy's, cuda.core's streams); another open session of this thread
            and device; a :class:`Completion`; or a CUDA event of PyTorch, CuPy, cuda.core or cuda.bindings. An event
            stands for what was enqueued before it was recorded. Completions and events may be another device's.

        Raises
        ------
        UnsupportedError
            Either stream is being captured into a graph, or the event was recorded in a capture. Neither is harmed.
        ForeignDeviceError
            The stream or the session is another device's: wait for its event or its Completion.
        WrongThreadError, SessionClosedError
            The other session is not this thread's to ask, or not open.
        ArgumentError
            It is none of these (a bare handle is not: it says neither what it is nor how long it lives), or an event
            that is gone, or that its library has not made yet.

        Notes
        -----
        Nothing waits on the host. What is enqueued on `other` afterwards is not waited for. A graph cannot wait for
        what is outside of it, so in a capture the session has nothing to wait for: call it before. Of the per-thread
        default stream, it is the calling thread's.

        Source: cuEventRecord and cuStreamWaitEvent.
        """
        cdef CudaSession session
        cdef int pushed = self.begin(b"wait")
        try:
            self.refuse_captured(b"wait", "wait before the capture")
            if isinstance(other, CudaSession):
                session = <CudaSession> other
                if session.node == NULL:
                    raise SessionClosedError("the session to wait for is not open; a Completion of it can be waited "
                                             "for when it has ended", operation="wait")
                if session.thread != self.thread:
                    raise WrongThreadError("the session to wait for belongs to another thread: have it make a "
                                           "completion() there, and wait for that", operation="wait")
                order_sessions(session.node.runtime, self.node.runtime, b"wait")
            else:
                wait_for(self.node.runtime, other, b"wait")
        finally:
            self.end(pushed)

    def stream_ordered_with(self, other: object) -> HandOver:
        """Hand what the session has made over to another stream, and take it back at the end of a ``with`` block.

        At the call `other` waits, on the device, for everything enqueued so far on the session's stream. At the end of
        a ``with`` block over what this returns, the session's stream waits for everything that `other` has got::

            with session.stream_ordered_with(torch.cuda.current_stream()):
                library_call(tensor)            # on PyTorch's stream
            session.copy(tensor)                # after it

        Parameters
        ----------
        other : object with ``__cuda_stream__``
            A stream of the session's device. It is held until the result goes.

        Raises
        ------
        UnsupportedError
            Either stream is being captured into a graph. Neither is harmed.
        ForeignDeviceError
            The stream is another device's.
        ArgumentError
            It is no stream.

        Notes
        -----
        Nothing waits on the host. Without a ``with`` block nothing is taken back: :meth:`wait` does that. Memory is not
        held for the other stream: tensors have to live until the session's stream has taken it back. Thread-bound, like
        the session, which has to be open at the end of the block.

        Source: cuEventRecord and cuStreamWaitEvent.
        """
        cdef int pushed = self.begin(b"stream_ordered_with")
        try:
            self.refuse_captured(b"stream_ordered_with", "hand over before the capture")
            hand_over(self.node.runtime, other, b"stream_ordered_with")
        finally:
            self.end(pushed)
        return make_hand_over(self, other)

    # ------------------------------------------------------------------------------------ raw, graphs

    def capture(self) -> Graph:
        """Record what a ``with`` block enqueues instead of running it; the Graph that this gives then launches it.

        Launches, copies, fills and memory are recorded: ``empty``, ``zeros``, ``full``, ``copy``, workspaces and raw
        launches. What is allocated in the block is the graph's, from the resource that would serve otherwise, and
        lives as long as the graph or its tensor, whichever is longer; what is dropped in the block may be used again
        in it.

        Raises
        ------
        UnsupportedError
            The stream is being captured already, or is the legacy stream. In the block: what waits, reads the host or
            depends on other streams (``to_host``, ``from_host``, ``synchronize``, ``completion``, ``adopt``), before it
            is enqueued; the block may go on. At its end: something else on the stream could not be captured.

        Notes
        -----
        Source: cuStreamBeginCapture, in thread-local mode. Other threads and other sessions go on as ever. A block
        that is left by an exception drops what it recorded. Thread-bound, like the session.
        """
        self.end(self.begin(b"capture"))
        if graph_factory is None:
            importlib.import_module("kina.cuda.graph")
        return graph_factory(self)

    def raw(self, operation: str = "raw") -> RawSession:
        """Raw CUDA authority for one ``with`` block: refs, modules, the stream.

        Parameters
        ----------
        operation : str
            Names the block in errors.
        """
        self.end(self.begin(b"raw"))
        if raw_factory is None:  # another thread is at it
            importlib.import_module("kina.cuda.raw")
        return raw_factory(self, operation)


cdef int enter_session(PyObject *scope) except -1:
    return (<CudaSession> scope).enter()


cdef int leave_session(PyObject *scope, bint unwinding) except -1:
    return (<CudaSession> scope).leave(unwinding)


install_scope(CudaSession, enter_session, leave_session)


cdef int report_failed_restore() except -1:
    """Logged, and nothing else: it changes neither the result nor the exception of the block."""
    try:
        raise_last()
    except Exception as error:
        logger.error("kina: %s", error)
    return 0


# ---------------------------------------------------------------------------------------------- factories

cdef CudaSession make(Runtime runtime, MemoryResource memory):
    cdef CudaSession session
    begin_construction()
    try:
        session = CudaSession.__new__(CudaSession)
    finally:
        end_construction()
    session._runtime = runtime  # strong: the node borrows its C state
    session._memory = runtime._memory if memory is None else memory
    return session


cdef Session open_session(int ordinal, object stream, object runtime, object memory):
    cdef MemoryResource checked = None
    if runtime is not None:
        if memory is not None:
            checked = check_memory(memory, (<Runtime> runtime).c.device.ordinal, "session")
        return make(<Runtime> runtime, checked)
    if memory is not None:
        checked = check_memory(memory, ordinal, "session")
    if stream is None:
        return make(default_runtime(ordinal), checked)
    return make(adopted_runtime(ordinal, stream), checked)


set_cuda_opener(open_session, Runtime)


def innermost_session(ordinal=None):
    """The calling thread's innermost open session on a device, or on any; None if there is none."""
    return innermost(-1 if ordinal is None else ordinal)


cdef Session innermost(int ordinal):
    """-1: of any device."""
    cdef kina_session_node *node = innermost_node(ordinal)
    if node == NULL or node.face == NULL:
        return None
    return <CudaSession> <PyObject *> node.face


set_cuda_finder(innermost)
