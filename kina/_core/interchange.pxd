from kina._core.storage cimport kina_dl_exchange_api, kina_dl_managed_tensor_versioned
from kina._core.tensor cimport Tensor

# The tensor over what somebody else hands over, which is taken over on failure too: by the innermost open session of
# its device in this thread, else by a momentary one. `api` as in Session.take_managed.
cdef Tensor take_in(kina_dl_managed_tensor_versioned *managed, const kina_dl_exchange_api *api)
