from libc.stdint cimport int64_t, uint64_t

from kina._core.storage cimport (
    kina_dl_device,
    kina_dl_managed_tensor,
    kina_dl_managed_tensor_versioned,
    kina_dl_version,
    kina_storage,
    kina_stream,
    kina_tensor,
)
from kina._core.tensor cimport Tensor

# What device memory needs of its session layer, which lives above this room: called with the GIL, before a
# capsule of a CUDA tensor is made, so that `consumer_stream` (1 legacy, 2 per-thread, a handle; -1: the
# consumer orders for itself) is ordered after the tensor's home stream. Raises to refuse the export.
ctypedef int (*export_hook)(kina_storage *storage, int64_t consumer_stream) except -1
cdef void set_export_hook(export_hook hook) noexcept

# Ask `producer` for a capsule: versioned (max_version 1.3), falling back to the legacy form. `stream` is
# passed on as it is (None for host). DLPackError names what is wrong.
cdef object request_capsule(object producer, object stream, object dl_device, object copy)

# Take over the managed tensor of a capsule ("dltensor" or "dltensor_versioned"): checks every field
# (DLPackError naming it; the capsule stays unconsumed), marks it used, and adopts the memory under the given
# identities. `device` is the device that the tensor must be on (device_type and device_id). The owner's
# deleter runs when the last reference to the storage goes. A capsule of another major version is consumed and
# its deleter called, as the standard has it.
cdef Tensor consume_capsule(object capsule, kina_dl_device device, kina_stream *stream, uint64_t runtime,
                            uint64_t domain)

# The device that a live capsule claims, for callers that only hold a capsule. DLPackError.
cdef kina_dl_device capsule_device(object capsule) except *

# A managed tensor that shares the storage of `tensor`: one heap block, explicit strides, byte_offset 0. Its
# deleter needs neither the GIL nor a current device and may run on any thread, once. 0 on success.
cdef int export_versioned(const kina_tensor *tensor, kina_dl_version version, uint64_t flags,
                          kina_dl_managed_tensor_versioned **out) noexcept nogil
cdef int export_legacy(const kina_tensor *tensor, kina_dl_managed_tensor **out) noexcept nogil
