# cython: language_level=3
"""Tensors as another project's Cython code has them; tests/cuda/test_exchange_downstream.py."""

from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t

from kina._core.dlpack cimport (
    KINA_CONSUMER_ORDERS,
    KINA_CONSUMER_WORK_STREAM,
    adopt_managed,
    export_legacy,
    export_tensor,
)
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_DLPACK_EXCHANGE_CAPSULE,
    KINA_DLPACK_MAJOR,
    KINA_DLPACK_MINOR,
    kina_dl_exchange_api,
    kina_dl_managed_tensor,
    kina_dl_managed_tensor_versioned,
    kina_tensor,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor

orders, works = KINA_CONSUMER_ORDERS, KINA_CONSUMER_WORK_STREAM


# Reading ----------------------------------------------------------------------------------------------------

cdef struct facts:
    uint64_t address
    uint64_t nbytes
    uint64_t flags
    uint64_t runtime
    uint64_t domain
    int64_t size
    int64_t elements    # by the shape
    int64_t low
    int64_t high
    int32_t device_type
    int32_t device_id
    int32_t ndim
    int bits


cdef void read(const kina_tensor *tensor, facts *out) noexcept nogil:
    cdef int axis
    out.address = <uint64_t> <uintptr_t> kina_tensor_address(tensor)
    out.nbytes = tensor.size_bytes
    out.flags = tensor.flags
    out.runtime = tensor.storage.runtime
    out.domain = tensor.storage.domain
    out.size = tensor.size
    out.elements = 1
    out.low = tensor.span_low
    out.high = tensor.span_high
    out.device_type = tensor.device.device_type
    out.device_id = tensor.device.device_id
    out.ndim = tensor.ndim
    out.bits = tensor.dtype.bits
    for axis in range(tensor.ndim):
        out.elements *= tensor.shape[axis]


def look(Tensor tensor not None):
    """What its kina_tensor says, read without the GIL."""
    cdef facts found
    cdef const kina_tensor *c = &tensor.c
    with nogil:
        read(c, &found)
    return found


# A library of its own ---------------------------------------------------------------------------------------

cdef int64_t deletions = 0


cdef void count_deletion(kina_dl_managed_tensor_versioned *self) noexcept nogil:
    global deletions
    deletions += 1


def deleted():
    """How often the deleter of what :func:`adopt` made was called."""
    return deletions


cdef kina_dl_managed_tensor_versioned theirs
cdef int64_t extents[1]


def adopt(uint64_t address, int64_t size, Tensor like not None):
    """A tensor of float32 over memory of this library, in the Runtime of another tensor."""
    theirs.version.major = KINA_DLPACK_MAJOR
    theirs.version.minor = KINA_DLPACK_MINOR
    theirs.deleter = count_deletion
    theirs.dl_tensor.data = <void *> <uintptr_t> address
    theirs.dl_tensor.device = like.c.device
    theirs.dl_tensor.ndim = 1
    theirs.dl_tensor.dtype.code = 2
    theirs.dl_tensor.dtype.bits = 32
    theirs.dl_tensor.dtype.lanes = 1
    theirs.dl_tensor.shape = extents
    extents[0] = size
    return adopt_managed(&theirs, like.c.device, like.c.stream, like.c.storage.runtime, like.c.storage.domain)


# Exchanges, many times --------------------------------------------------------------------------------------


def lend(Tensor tensor not None, int64_t consumer, int64_t times):
    """Exported and deleted, without the GIL."""
    cdef kina_dl_managed_tensor_versioned *managed
    cdef const kina_tensor *c = &tensor.c
    cdef int64_t _
    cdef int status = 0
    with nogil:
        for _ in range(times):
            status = export_tensor(c, consumer, &managed)
            if status != 0:
                break
            managed.deleter(managed)
    check(status)


def lend_legacy(Tensor tensor not None, int64_t times):
    cdef kina_dl_managed_tensor *managed
    cdef int64_t _
    with nogil:
        for _ in range(times):
            if export_legacy(&tensor.c, &managed) == 0:
                managed.deleter(managed)


def there_and_back(Tensor tensor not None, int64_t times):
    """Exported, adopted, dropped."""
    cdef kina_dl_managed_tensor_versioned *managed
    cdef Tensor back = tensor
    cdef int64_t _
    for _ in range(times):
        check(export_tensor(&tensor.c, KINA_CONSUMER_ORDERS, &managed))
        back = adopt_managed(managed, tensor.c.device, tensor.c.stream, tensor.c.storage.runtime,
                             tensor.c.storage.domain)
    return back


def through_tables(Tensor tensor not None, object into, int64_t times):
    """By kina's table to a tensor of `into`, a type with a table of its own; dropped."""
    cdef const kina_dl_exchange_api *ours = <const kina_dl_exchange_api *> PyCapsule_GetPointer(
        Tensor.__dlpack_c_exchange_api__, KINA_DLPACK_EXCHANGE_CAPSULE)
    cdef const kina_dl_exchange_api *other = <const kina_dl_exchange_api *> PyCapsule_GetPointer(
        into.__dlpack_c_exchange_api__, KINA_DLPACK_EXCHANGE_CAPSULE)
    cdef kina_dl_managed_tensor_versioned *managed
    cdef void *made
    cdef int64_t _
    for _ in range(times):
        ours.managed_tensor_from_py_object_no_sync(<void *> tensor, &managed)
        other.managed_tensor_to_py_object_no_sync(managed, &made)
        Py_DECREF(<object> made)


def through_capsules(Tensor tensor not None, object adopt, int64_t times):
    """By a capsule of each kind into `adopt`, by turns; each third is consumed by nobody."""
    cdef int64_t i
    cdef object capsule
    for i in range(times):
        capsule = tensor.to_dlpack(versioned=i % 2 == 0)
        if i % 3:
            adopt(capsule)


def references(Tensor tensor not None):
    """Of its storage."""
    return tensor.c.storage.handle.references
