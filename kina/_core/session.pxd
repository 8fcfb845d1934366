from libc.stdint cimport uint64_t


cdef class Session:
    # The base of HostSession and of kina.cuda's session: what cannot be constructed, copied or pickled.
    # Subclasses are made by their factory between begin_construction() and end_construction().
    # issue_number() at the latest entry that is still open, 0 if none: the larger one is the inner session.
    cdef uint64_t _entry

# Scoped, private authority to make objects of guarded classes (sessions, refs, streams): their __cinit__
# calls check_construction(self), which raises TypeError unless the flag is up. GIL only.
cdef void begin_construction() noexcept
cdef void end_construction() noexcept
cdef int check_construction(object self) except -1
