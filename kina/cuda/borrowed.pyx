# cython: annotation_typing=False
"""Tensors of other libraries as arguments of launches: borrowed through the C exchange table of their type.

Nothing of kina's is made of them but a lease, which keeps the object until the device is past the launch.

Source: DLPack 1.3, "C exchange API" (https://dmlc.github.io/dlpack/latest/).
"""

from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kina._core.dtype cimport DType, dtype_from_dlpack
from kina._core.foreign_types cimport foreign_type, producer_stream, refuse_lazy, type_of
from kina._core.status cimport KINA_OUT_OF_MEMORY, fail
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_MAX_NDIM,
    kina_deferred,
    kina_dl_device,
    kina_dl_exchange_api,
    kina_dl_tensor,
    kina_handle,
    kina_handle_init,
    kina_release,
    run_with_gil_later,
)
from kina.cuda.capture cimport is_capturing
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.adoption cimport check_reachable
from kina.cuda.foreign_order cimport order_import
from kina.cuda.handles cimport KINA_OWNER, kina_leases, kina_runtime
from kina.cuda.retire cimport lease

from kina.errors import DLPackError, DTypeError, ForeignDeviceError, NonContiguousError

__all__ = []


# Owners ---------------------------------------------------------------------------------------------------


# An object of Python as a lease. Whoever drops it need not hold the GIL, so that it goes by the queue.
ctypedef struct kept_object:
    kina_handle handle
    kina_deferred deferred
    PyObject *object            # owned reference


cdef void destroy_kept(kina_handle *handle) noexcept nogil:
    run_with_gil_later(&(<kept_object *> handle).deferred)


cdef void drop_kept(kina_deferred *deferred) noexcept:
    cdef kept_object *kept = <kept_object *> (<kina_handle *> deferred - 1)  # which stands before it
    cdef PyObject *dropped = kept.object
    free(kept)
    Py_DECREF(<object> dropped)


cdef int lease_object(kina_runtime *runtime, PyObject *object) noexcept:
    cdef kina_leases *leases = NULL
    cdef kept_object *kept
    cdef int i, status
    if is_capturing(runtime):
        leases = &runtime.capture.leases
    elif runtime.open != NULL:
        leases = &runtime.open.leases
    if leases != NULL:
        # As for handles: a loop of launches uses the same few.
        for i in range(leases.count - 1, max(leases.count - 9, -1), -1):
            kept = <kept_object *> leases.handles[i]
            if kept.handle.destroy == destroy_kept and kept.object == object:
                return 0
    kept = <kept_object *> calloc(1, sizeof(kept_object))
    if kept == NULL:
        return fail(KINA_OUT_OF_MEMORY, b"launch", b"no host memory for a lease")
    kina_handle_init(&kept.handle, destroy_kept)
    kept.deferred.run = drop_kept
    kept.object = object
    Py_INCREF(<object> object)
    status = lease(runtime, kept, KINA_OWNER)
    kina_release(kept)
    return status


# Borrowing ------------------------------------------------------------------------------------------------


cdef const kina_dl_exchange_api *table_of(PyObject *argument) except? NULL:
    return foreign_type(type_of(<object> argument)).api


cdef int look_at_laziness(kina_borrowed *lent, DType dtype, str name) except -1:
    try:
        refuse_lazy(<object> lent.argument, dtype.code)
    except DLPackError as error:
        raise DLPackError(f"{where(lent, name)}: {error}", operation="launch") from None
    return 0


cdef int borrow(kina_borrowed *lent, DType dtype, int ordinal, str name) except -1:
    cdef kina_dl_tensor tensor
    cdef int64_t size = 0
    cdef compactness found
    if lent.api.dltensor_from_py_object_no_sync == NULL:
        raise DLPackError(f"{where(lent, name)}: a {type_name(lent)} lends no tensor (its table has no "
                          "dltensor_from_py_object_no_sync): take it in with session.adopt(tensor)", operation="launch")
    memset(&tensor, 0, sizeof(tensor))
    try:
        lent.api.dltensor_from_py_object_no_sync(<void *> lent.argument, &tensor)
    except Exception as error:
        raise DLPackError(f"{where(lent, name)}: the producer ({type_name(lent)}) refuses: {error}",
                          operation="launch") from error
    # Its fields may say anything, and its shape is there until somebody else's code runs.
    if tensor.device.device_type != KINA_DEVICE_CUDA or tensor.device.device_id != ordinal:
        check_device(&tensor.device, ordinal, where(lent, name))
    if tensor.dtype.code != dtype.code or tensor.dtype.bits != dtype.bits or tensor.dtype.lanes != 1:
        refuse_dtype(&tensor, dtype, where(lent, name))
    found = look_at_layout(&tensor, &size)
    if found != COMPACT:
        refuse_layout(&tensor, found, where(lent, name))
    lent.address = <uint64_t> <uintptr_t> tensor.data + tensor.byte_offset
    lent.nbytes = <uint64_t> size * <uint64_t> dtype.itemsize
    if size != 0 and (tensor.data == NULL or lent.address < tensor.byte_offset
                      or lent.address + lent.nbytes < lent.address or lent.address % <uint64_t> dtype.itemsize != 0):
        refuse_address(&tensor, size, lent.address, dtype, where(lent, name))
    return 0


cdef int ask_streams(kina_borrowed *lent, int count, int ordinal) except -1:
    cdef kina_dl_device device
    cdef int i, j
    # The device's for other memory too: what writes that from a device does so there.
    device.device_type = KINA_DEVICE_CUDA
    device.device_id = ordinal
    for i in range(count):
        lent[i].asked = True
        for j in range(i):
            lent[i].asked = lent[i].asked and lent[j].api != lent[i].api
        if lent[i].asked:
            lent[i].stream = producer_stream(lent[i].api, device)
    return 0


cdef int order_borrowed(kina_runtime *runtime, kina_borrowed *lent, int count) noexcept nogil:
    cdef int i, status
    for i in range(count):
        if lent[i].asked:
            status = order_import(runtime, <CUstream> lent[i].stream, b"launch")
            if status != 0:
                return status
    return 0


cdef enum compactness:
    COMPACT
    SCATTERED
    NO_AXES         # of a number that there can be
    NO_SHAPE
    NO_EXTENT       # a negative one
    TOO_LARGE

cdef int64_t MOST_ELEMENTS = 1LL << 58  # of 16 bytes each


cdef compactness look_at_layout(const kina_dl_tensor *tensor, int64_t *out) noexcept nogil:
    """Whether it is C-ordered without gaps, and how many elements it has."""
    cdef bint scattered = False
    cdef int64_t size = 1
    cdef int64_t extent
    cdef int axis
    if tensor.ndim < 0 or tensor.ndim > <int> KINA_MAX_NDIM:
        return NO_AXES
    if tensor.ndim > 0 and tensor.shape == NULL:
        return NO_SHAPE
    out[0] = 0
    for axis in range(tensor.ndim):
        if tensor.shape[axis] < 0:
            return NO_EXTENT
        if tensor.shape[axis] == 0:
            size = 0
    if size == 0:
        return COMPACT
    for axis in range(tensor.ndim - 1, -1, -1):
        extent = tensor.shape[axis]
        if tensor.strides != NULL and extent != 1 and tensor.strides[axis] != size:
            scattered = True
        if extent > MOST_ELEMENTS // size:
            return TOO_LARGE
        size *= extent
    out[0] = size
    return SCATTERED if scattered else COMPACT


# Refusals -------------------------------------------------------------------------------------------------


cdef str where(kina_borrowed *lent, str name):
    return f"argument {lent.position} of {name}"


cdef str type_name(kina_borrowed *lent):
    return type(<object> lent.argument).__name__


cdef int check_device(const kina_dl_device *device, int ordinal, str place) except -1:
    """Other memory may be within reach all the same."""
    try:
        check_reachable(device[0], ordinal)
    except (DLPackError, ForeignDeviceError) as error:
        raise type(error)(f"{place}: {error}", operation="launch") from None
    return 0


cdef int refuse_dtype(const kina_dl_tensor *tensor, DType dtype, str place) except -1:
    try:
        given = dtype_from_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes).name
    except DTypeError as error:
        raise DTypeError(f"{place} is declared {dtype.name}: {error}", operation="launch") from None
    raise DTypeError(f"{place} is declared {dtype.name}, got {given}", operation="launch")


cdef int refuse_layout(const kina_dl_tensor *tensor, compactness found, str place) except -1:
    cdef int axis
    if found == NO_AXES:
        raise DLPackError(f"{place}: ndim: {tensor.ndim} is not in 0 to {KINA_MAX_NDIM}", operation="launch")
    if found == NO_SHAPE:
        raise DLPackError(f"{place}: shape: NULL with {tensor.ndim} axes", operation="launch")
    shape = tuple([tensor.shape[axis] for axis in range(tensor.ndim)])
    if found == NO_EXTENT:
        raise DLPackError(f"{place}: shape: {shape} has a negative extent", operation="launch")
    if found == TOO_LARGE:
        raise DLPackError(f"{place}: shape: {shape} has more elements than there is memory", operation="launch")
    strides = tuple([tensor.strides[axis] for axis in range(tensor.ndim)])
    raise NonContiguousError(
        f"{place} has shape {shape} with strides {strides}: a kernel that takes strides gets them as arguments and the "
        "tensor, adopted, as raw.ref or raw.mut, without a signature", operation="launch",
    )


cdef int refuse_address(const kina_dl_tensor *tensor, int64_t size, uint64_t address, DType dtype, str place) except -1:
    if tensor.data == NULL:
        raise DLPackError(f"{place}: data: NULL with {size} elements", operation="launch")
    if address % <uint64_t> dtype.itemsize != 0:
        raise DLPackError(f"{place}: data: a {dtype.name} has addresses that are multiples of {dtype.itemsize}, and "
                          "this one is none", operation="launch")
    raise DLPackError(f"{place}: byte_offset: {tensor.byte_offset} leads out of the address space", operation="launch")
