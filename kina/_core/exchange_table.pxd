from kina._core.storage cimport kina_dl_exchange_api, kina_dl_managed_tensor_versioned
from kina._core.tensor cimport Tensor

# Give Tensor its table, once: when this room is loaded, and the rooms of sessions see to that, as every tensor comes
# from one.
cdef int offer_table() except -1

# Who makes tensors of what other libraries hand over: set by the room that knows sessions, which lives above this one.
ctypedef Tensor (*managed_taker)(kina_dl_managed_tensor_versioned *managed, const kina_dl_exchange_api *api)
cdef void set_taker(managed_taker taker) noexcept
