# cython: annotation_typing=False
"""What all sessions are: authority that cannot be constructed, copied or pickled."""

from kina._core.construction cimport check_construction

__all__ = ["Session"]


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
