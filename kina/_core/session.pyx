# cython: annotation_typing=False
"""What all sessions are: authority that cannot be constructed, copied or pickled."""

__all__ = ["Session"]

cdef int construction_depth = 0


cdef void begin_construction() noexcept:
    global construction_depth
    construction_depth += 1


cdef void end_construction() noexcept:
    global construction_depth
    construction_depth -= 1


cdef int check_construction(object self) except -1:
    if construction_depth == 0:
        raise TypeError(f"{type(self).__name__} cannot be constructed: kina.session(...) and what it gives "
                        f"make one")
    return 0


cdef class Session:
    """Session()

    A thread's scoped authority over one Runtime: the only way to run anything. ``kina.session(...)`` opens
    one; it cannot be constructed, copied or pickled.
    """

    def __cinit__(self):
        check_construction(self)

    def __reduce_ex__(self, protocol: int) -> object:
        raise TypeError(f"{type(self).__name__} is authority over a Runtime in one thread: it cannot be "
                        f"copied or pickled")


def inner_of(Session a not None, Session b not None) -> Session:
    """Of two open sessions of a thread, the one entered later."""
    return a if a._entry > b._entry else b
