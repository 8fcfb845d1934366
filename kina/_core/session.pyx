# cython: annotation_typing=False
"""What all sessions are: authority that cannot be constructed, copied or pickled."""

from kina._core.construction cimport check_construction
from kina._core.storage cimport kina_dl_exchange_api, kina_dl_managed_tensor_versioned

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

    cdef object take_managed(self, kina_dl_managed_tensor_versioned *managed, const kina_dl_exchange_api *api,
                             bint outside):
        raise NotImplementedError  # every kind of session has its own


def inner_of(Session a not None, Session b not None) -> Session:
    """Of two open sessions of a thread, the one entered later."""
    return a if a._entry > b._entry else b
