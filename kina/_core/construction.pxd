# Scoped, private authority to make objects of guarded classes (sessions, refs, buffers, streams): their __cinit__
# calls check_construction(self), which raises TypeError unless the flag is up. GIL only.
cdef void begin_construction() noexcept
cdef void end_construction() noexcept
cdef int check_construction(object self) except -1
