from libc.stdint cimport uint64_t


cdef class Session:
    # The base of HostSession and of kina.cuda's session: what cannot be constructed, copied or pickled.
    # Subclasses are made by their factory between begin_construction() and end_construction().
    # issue_number() at the latest entry that is still open, 0 if none: the larger one is the inner session.
    cdef uint64_t _entry
