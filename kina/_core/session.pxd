from libc.stdint cimport uint64_t

from kina._core.storage cimport kina_dl_exchange_api, kina_dl_managed_tensor_versioned


cdef class Session:
    # The base of HostSession and of kina.cuda's session: what cannot be constructed, copied or pickled.
    # Subclasses are made by their factory between begin_construction() and end_construction().
    # issue_number() at the latest entry that is still open, 0 if none: the larger one is the inner session.
    cdef uint64_t _entry
    # A Tensor over a managed tensor of somebody else, which is taken over, on failure too. Its memory must be where the
    # session can reach it. `api`: the session's stream waits, on the device, for the one that this library works on
    # now; NULL: whoever hands it over works on the thread's work stream, which is the legacy stream `outside` of
    # sessions, and else this session's.
    cdef object take_managed(self, kina_dl_managed_tensor_versioned *managed, const kina_dl_exchange_api *api,
                             bint outside)
