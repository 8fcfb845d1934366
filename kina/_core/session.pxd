from libc.stdint cimport uint64_t

from kina._core.tensor cimport Tensor


cdef class Session:
    # The base of HostSession and of kina.cuda's session: what cannot be constructed, copied or pickled. Subclasses
    # are made by their factory between begin_construction() and end_construction().
    cdef uint64_t _entry            # issue_number() at the latest entry that is still open, 0 if none: the larger is inner


cdef class HostSession(Session):
    cdef uint64_t _thread           # token of the thread that entered it, 0 before
    cdef int _depth                 # times entered
    cdef bint _closed

    cdef int leave_once(self) except -1
    cdef int check_thread(self) except -1
    cdef int check_usable(self) except -1
    cdef Tensor own(self, object tensor, str operation)
    cdef int give_up(self, bint unwinding) except -1
    cdef Tensor operate(self, Tensor (*operation)(Tensor, Tensor, Tensor), object a, object b, object out, str name)

# Scoped, private authority to make objects of guarded classes (sessions, refs, streams): their __cinit__ calls
# check_construction(self), which raises TypeError unless the flag is up. GIL only.
cdef void begin_construction() noexcept
cdef void end_construction() noexcept
cdef int check_construction(object self) except -1
