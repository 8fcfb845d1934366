from kina._core.storage cimport kina_dl_device, kina_dl_exchange_api, kina_dl_managed_tensor_versioned
from kina._core.tensor cimport Tensor
from kina.cuda.handles cimport kina_runtime

# All below: within a call of a session of the Runtime, whose device's context is current and whose stream no capture is
# known to be in. The stream waits, on the device, for the producer's. Nothing is left of what fails.

# An array of another library, or a capsule, by whichever way it offers.
cdef Tensor adopt_array(kina_runtime *runtime, object source)
# A managed tensor of the table, or (NULL) one whose producer works on the legacy stream (`outside`) or on the
# Runtime's. Taken over, on failure too.
cdef Tensor adopt_from_table(kina_runtime *runtime, kina_dl_managed_tensor_versioned *managed,
                             const kina_dl_exchange_api *api, bint outside)
# A tensor of another Runtime of the device; one of this Runtime comes back as it is.
cdef Tensor adopt_tensor(kina_runtime *runtime, Tensor source)

# The tensor belongs to the Runtime, or ForeignDeviceError, ForeignRuntimeError.
cdef int check_own(kina_runtime *runtime, Tensor tensor, const char *operation) except -1
# Memory that a session of the device can work with, or DLPackError, ForeignDeviceError.
cdef int check_reachable(kina_dl_device device, int ordinal) except -1
