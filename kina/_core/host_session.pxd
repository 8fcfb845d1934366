from libc.stdint cimport uint64_t

from kina._core.resource cimport MemoryResource
from kina._core.session cimport Session
from kina._core.tensor cimport Tensor


ctypedef Tensor (*host_operation)(Tensor a, Tensor b, Tensor out, MemoryResource memory)


cdef class HostSession(Session):
    cdef uint64_t _thread           # token of the thread that entered it, 0 before
    cdef int _depth                 # times entered
    cdef bint _closed
    cdef MemoryResource _memory     # where its tensors' memory comes from; None: as using() and the default have it

    cdef int leave_once(self) except -1
    cdef int check_thread(self) except -1
    cdef int check_usable(self) except -1
    cdef Tensor own(self, object tensor, str operation)
    cdef int give_up(self, bint unwinding) except -1
    cdef Tensor operate(self, host_operation operation, object a, object b, object out, str name)

# The host session that the calling thread entered last and has not left, or None.
cdef HostSession innermost_host()
