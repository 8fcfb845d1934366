# cython: annotation_typing=False
"""The guard of classes whose objects only kina makes."""

__all__ = []

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
