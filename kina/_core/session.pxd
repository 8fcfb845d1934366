from libc.stdint cimport uint64_t


cdef class Session:
    # The base of HostSession and of kina.cuda's session: what cannot be constructed, copied or pickled. Subclasses
    # are made by their factory between begin_construction() and end_construction().
    pass


cdef class HostSession(Session):
    cdef uint64_t _thread           # token of the thread it belongs to
    cdef int _depth                 # times entered
    cdef bint _closed

# Scoped, private authority to make objects of guarded classes (sessions, refs, streams): their __cinit__ calls
# check_construction(self), which raises TypeError unless the flag is up. GIL only.
cdef void begin_construction() noexcept
cdef void end_construction() noexcept
cdef int check_construction(object self) except -1
