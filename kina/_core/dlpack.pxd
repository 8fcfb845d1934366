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

# What device memory needs of its session layer, which lives above this room and sets these hooks. Each may be called
# with or without the GIL, and returns 0 or a detail code with the thread's record written.
cdef enum:
    KINA_CONSUMER_ORDERS = -1       # the consumer orders for itself
    KINA_CONSUMER_WORK_STREAM = -2  # it works on the stream that export_work_stream tells in the calling thread
    KINA_CONSUMER_HOST = -3         # it is told of host memory, which its check_host_access goes before

# Before an export is handed out: `consumer_stream` (1 legacy, 2 per-thread, a handle, or one of the above) waits, on
# the device, for the home stream of the tensor, and its use is noted. Fails to refuse the export.
ctypedef int (*export_hook)(kina_storage *storage, int64_t consumer_stream) noexcept nogil
cdef void set_export_hook(export_hook hook) noexcept
cdef int order_export(kina_storage *storage, int64_t consumer_stream) noexcept nogil

# The native handle of the stream of the calling thread's innermost open session of a CUDA device, else the legacy
# stream's.
ctypedef int (*work_stream_hook)(int device_id, void **out) noexcept nogil
cdef void set_work_stream_hook(work_stream_hook hook) noexcept
cdef int export_work_stream(int device_id, void **out) noexcept nogil

# Before the host may read pinned or managed memory: KINA_DLPACK while the device may not be past it. Never waits.
ctypedef int (*host_access_hook)(kina_storage *storage) noexcept nogil
cdef void set_host_access_hook(host_access_hook hook) noexcept
cdef int check_host_access(kina_storage *storage) noexcept nogil

# Where a producer says that it has its data: `__dlpack_device__`, or DLPackError.
cdef kina_dl_device declared_device(object producer, str operation) except *

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

# The same of a managed tensor without a capsule, which is taken over on failure too.
cdef Tensor adopt_managed(kina_dl_managed_tensor_versioned *managed, kina_dl_device device, kina_stream *stream,
                          uint64_t runtime, uint64_t domain)
# A tensor of kina in memory that the host can read, taken in as `device` by somebody who has another order: once the
# device is past it, as for any host consumer.
cdef Tensor adopt_host_side(Tensor tensor, kina_dl_device device, kina_stream *stream, uint64_t runtime,
                            uint64_t domain)
# Where it says that it is; DLPackError for another major version, of which nothing else may be looked at.
cdef kina_dl_device managed_device(kina_dl_managed_tensor_versioned *managed) except *
# Call the deleter of a managed tensor that nobody wants.
cdef void drop_managed(kina_dl_managed_tensor_versioned *managed) noexcept nogil

# Whether consume_capsule would take it, for callers that have something to do before; else as it raises.
cdef int check_capsule(object capsule, kina_dl_device device) except -1

# The device that a live capsule claims, for callers that only hold a capsule. DLPackError.
cdef kina_dl_device capsule_device(object capsule) except *

# What an export does before it hands out anything: the consumer's stream is ordered, where the device is involved.
cdef int order_consumer(const kina_tensor *tensor, int64_t consumer) noexcept nogil
# The same of host code that gets the address: check_host_access, and the use is noted.
cdef int open_to_host(kina_storage *storage) noexcept nogil
# Both, and the flags: a managed tensor of DLPack 1.3 for whoever works on `consumer`. From any thread, without the GIL.
cdef int export_tensor(const kina_tensor *tensor, int64_t consumer,
                       kina_dl_managed_tensor_versioned **out) noexcept nogil

# A managed tensor that shares the storage of `tensor`: one heap block, explicit strides, byte_offset 0. Its
# deleter needs neither the GIL nor a current device and may run on any thread, once. 0 on success.
cdef int export_versioned(const kina_tensor *tensor, kina_dl_version version, uint64_t flags,
                          kina_dl_managed_tensor_versioned **out) noexcept nogil
cdef int export_legacy(const kina_tensor *tensor, kina_dl_managed_tensor **out) noexcept nogil
