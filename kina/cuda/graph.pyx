# cython: annotation_typing=False
"""Graphs: what a session enqueued once, to be launched as a whole as often as one likes.

Source: CUDA Driver API, "Stream Management" (cuStreamBeginCapture, cuStreamEndCapture) and "Graph Management"
(cuGraphInstantiateWithFlags, cuGraphLaunch).
"""

cimport cython
from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.pool cimport pool_count, pool_counts
from kina._core.status cimport KINA_DRIVER, KINA_LAUNCH, KINA_UNSUPPORTED, check
from kina._core.storage cimport kina_release, kina_resource, kina_retain
from kina._core.tokens cimport thread_token
from kina.cuda.capture cimport is_capturing
from kina.cuda.captured cimport drop_capture, start_capture, stop_capture
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed
from kina.cuda.cudatypes cimport CUDA_SUCCESS, CUgraph, CUresult, CUstream, CUstreamCaptureMode
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.handles cimport kina_add, kina_capture, kina_runtime, kina_session_node, kina_store
from kina.cuda.retire cimport lease, seal_if_full
from kina.cuda.session cimport CudaSession, set_graph_factory

from kina.errors import (
    ForeignRuntimeError,
    RuntimeBusyError,
    SessionClosedError,
    UnsupportedError,
    WrongThreadError,
)

__all__ = ["Graph"]

cdef enum:
    NEW
    RECORDING
    READY
    FAILED


cdef CUresult instantiate(kina_capture *capture, CUgraph graph, size_t *nodes) noexcept nogil:
    cdef CUstreamCaptureMode mode = relaxed_begin()
    cdef CUresult code = cu.cuGraphGetNodes(graph, NULL, nodes)
    if code == CUDA_SUCCESS:
        code = cu.cuGraphInstantiateWithFlags(&capture.graph, graph, 0)
    cu.cuGraphDestroy(graph)
    relaxed_end(mode)
    return code


@cython.no_gc  # nothing it refers to can refer back
cdef class Graph:
    """Graph()

    What was enqueued in a ``with session.capture() as graph:`` block, to be launched as a whole.

    It keeps everything that its launches use: modules, tensors that were made before the capture, memory of other
    libraries, and all memory that was allocated in the block, also of tensors that are gone. A launch in flight keeps
    it.
    """

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        cdef kina_capture *c = self.c
        if self._state == RECORDING and c.node != NULL:
            if self._session.thread == thread_token() and c.node.calls == 0:
                self.end(False)  # raises nothing
                return
            # The thread of the session may be using it: it ends the capture itself, at its next call.
            c.node = NULL
            kina_store(&c.unended, 1)
        with nogil:
            kina_release(c)

    def __enter__(self) -> Graph:
        if self._state != NEW:
            raise SessionClosedError("a capture is entered once: ask session.capture() for a new one",
                                     operation="capture")
        self.begin()
        return self

    def __exit__(self, kind: object, exception: object, traceback: object) -> None:
        if self._state != RECORDING:
            return
        if self.c.node != NULL:
            if self._session.thread != thread_token():
                raise WrongThreadError("a capture ends in the thread that began it", operation="capture")
            if self.c.node.calls != 0:
                raise RuntimeBusyError("a call of the session is under way in this thread: its capture can end when "
                                       "that has returned", operation="capture")
        self.end(kind is None)

    cdef int begin(self) except -1:
        cdef CudaSession session = self._session
        cdef kina_runtime *runtime
        cdef int pushed = session.begin(b"capture")
        try:
            runtime = session.node.runtime
            session.refuse_captured(b"capture", "one stream has one capture at a time")
            self.c = start_capture(session.node)
            self._runtime_number = runtime.stream.runtime
            self._state = RECORDING
        finally:
            session.end(pushed)
        return 0

    cdef int end(self, bint keep) except -1:
        """Without `keep`, what was captured is dropped. In the session's thread with no call under way, or once it is
        left."""
        cdef CudaSession session = self._session
        cdef kina_runtime *runtime = session._runtime.c
        cdef kina_session_node *node = self.c.node
        cdef kina_capture *c
        cdef bint left = node == NULL  # which has ended it, or leaves that to who has the Runtime next
        cdef CUgraph graph = NULL
        cdef CUresult code = CUDA_SUCCESS
        cdef size_t nodes = 0
        cdef int pushed
        self._state = FAILED
        self._session = None
        if not left:
            node.calls += 1  # it cannot be left meanwhile
        if keep and not left:
            with nogil:
                pushed = context_begin(runtime.device, b"capture")
                code = stop_capture(runtime, self.c, &graph)
                if graph != NULL:
                    code = instantiate(self.c, graph, &nodes)
                context_end(pushed)
            node.calls -= 1
            if graph != NULL and code == CUDA_SUCCESS:
                self._node_count = nodes
                self._state = READY
                return 0
        elif not left:
            with nogil:
                drop_capture(runtime, self.c)
            node.calls -= 1
        c = self.c
        self.c = NULL  # first: other threads may look
        with nogil:
            kina_release(c)  # nothing of it ever runs
        if not keep:
            return 0
        if left:
            raise SessionClosedError("the session was left in the middle of its capture", operation="capture")
        check(device_check(runtime.device, b"capture"))
        check(device_failed(runtime.device, code, KINA_UNSUPPORTED if 900 <= <int> code < 910 else KINA_DRIVER,
                            b"capture", b"the capture has come to nothing: something in it cannot be captured, a "
                            b"wait or an allocation of another library, perhaps"))
        return 0

    @property
    def nodes(self) -> int:
        """How many operations it has: kernels, copies, fills."""
        return self._node_count

    def reserved_bytes(self) -> int:
        """Memory that it keeps of what was allocated in the capture, in bytes."""
        cdef kina_capture *c = self.c
        cdef kina_resource *pool
        cdef pool_counts counts
        cdef int i = 0
        found = 0
        if c == NULL:
            return 0
        kina_retain(c)  # another thread may be at its end
        while i < c.pool_count:
            pool = c.pools[i]
            kina_retain(pool)
            with nogil:
                pool_count(pool, &counts)
                kina_release(pool)
            found += counts.reserved_bytes
            i += 1
        with nogil:
            kina_release(c)
        return found

    @cython.binding(False)  # the hot call: a plain method costs less
    @cython.embedsignature(True)
    @cython.embedsignature.format("clinic")
    def launch(self, CudaSession session not None) -> None:
        """Enqueue everything it has on the session's stream, in the order it was captured in; nothing waits.

        Parameters
        ----------
        session : CudaSession
            Of the Runtime that it was captured on.

        Raises
        ------
        ForeignRuntimeError
            The session is another Runtime's: the memory in the graph is not.
        UnsupportedError
            Its capture failed or is not over, or the session is being captured itself.
        LaunchError
            The driver refused.
        SessionClosedError, WrongThreadError, RuntimePoisonedError
            As any call of the session.

        Notes
        -----
        Source: cuGraphLaunch. Two launches of one graph run one after the other. The graph is leased until the device
        is past them, so it may be dropped at once.

        **Safety.** It reads and writes the very memory it was captured with, whatever else has that memory's tensors in
        use; kernels get the arguments of the capture, numbers included.
        """
        cdef int pushed = session.begin(b"graph launch")
        cdef kina_runtime *runtime = session.node.runtime
        cdef CUresult code = CUDA_SUCCESS
        cdef int status = 0
        if self._state != READY or runtime.stream.runtime != self._runtime_number or is_capturing(runtime):
            session.end(pushed)
            self.refuse(session)
        with nogil:
            status = lease(runtime, self.c, self.c.leases.urgent)
            if status == 0:
                code = cu.cuGraphLaunch(self.c.graph, <CUstream> runtime.stream.native)
                if code != CUDA_SUCCESS:
                    status = device_failed(runtime.device, code, KINA_LAUNCH, b"graph launch",
                                           b"the graph was refused")
            if status == 0:
                seal_if_full(runtime)
        session.end(pushed)
        check(status)
        kina_add(&runtime.counters.graph_launches, 1)

    cdef int refuse(self, CudaSession session) except -1:
        if self._state != READY:
            raise UnsupportedError("the graph's capture " + ("failed" if self._state == FAILED else "is not over"),
                                   operation="graph launch")
        session.refuse_captured(b"graph launch", "launch it outside of the capture")
        raise ForeignRuntimeError("the graph was captured on another Runtime, whose memory it uses: launch it there",
                                  operation="graph launch")

    def __reduce__(self):
        raise TypeError("a Graph cannot be pickled or copied: it is work of this process")

    def __repr__(self) -> str:
        state = ("not begun", "recording", f"{self._node_count} nodes", "failed")[self._state]
        return f"<kina.Graph, {state}>"


def make_graph(CudaSession session not None) -> Graph:
    """A capture of a session that has not begun; ``session.capture`` is the public way."""
    cdef Graph graph
    begin_construction()
    try:
        graph = Graph.__new__(Graph)
    finally:
        end_construction()
    graph._session = session
    return graph


set_graph_factory(make_graph)
