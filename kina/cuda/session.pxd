cimport cython
from libc.stdint cimport int64_t, uint64_t

from kina._core.dtype cimport DType
from kina._core.resource cimport MemoryResource
from kina._core.session cimport Session
from kina._core.tensor cimport Tensor
from kina.cuda.handles cimport kina_raw_block, kina_session_node
from kina.cuda.runtime cimport Runtime


@cython.final
cdef class CudaSession(Session):
    cdef Runtime _runtime
    cdef MemoryResource _memory     # where its tensors' memory comes from, or None; let go of when it is left
    cdef kina_session_node *node    # owned reference; NULL before it is entered and after it is left
    cdef uint64_t thread            # of the thread that entered it; 0 before

    # Every call: open, on its own thread, device usable, context current. Until the end() that goes with it, which
    # takes what it returns, the session cannot be left: not by a callback, a finaliser or another thread.
    cdef int begin(self, const char *operation) except -1
    cdef void end(self, int pushed) noexcept
    # The same of a call that needs no current context.
    cdef int begin_call(self, const char *operation) except -1
    cdef void end_call(self) noexcept
    # Within a call: its stream is not being captured, or the right typed error.
    cdef int refuse_captured(self, const char *operation, str remedy) except -1
    cdef int enter(self) except -1
    cdef int leave(self, bint unwinding) except -1
    # A C-ordered tensor with undefined contents, of `memory` as a call gave it. Needs no context.
    cdef Tensor allocate(self, DType dtype, int ndim, const int64_t *extents, object memory, const char *operation)
    cdef Tensor filled(self, object shape, DType dtype, const void *element, object memory, const char *operation)

# The refs of a raw block are dead from here on.
cdef void end_refs(kina_raw_block *block) noexcept
# Set by the room that knows raw blocks: called with the session and the operation's name.
cdef void set_raw_factory(object factory) noexcept
# The same of graphs: called with the session.
cdef void set_graph_factory(object factory) noexcept
