# cython: annotation_typing=False
"""The C exchange table of Tensor: tensors for other libraries without a capsule or a call of Python.

Source: DLPack 1.3, "C exchange API" (https://dmlc.github.io/dlpack/latest/). The layout is in kina_tensor.h.
"""

import importlib

from cpython.object cimport PyTypeObject
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport int32_t

from kina._core.dlpack cimport (
    KINA_CONSUMER_WORK_STREAM,
    drop_managed,
    export_tensor,
    export_work_stream,
    order_consumer,
)
from kina._core.dtype cimport DType, dtype_from_dlpack
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_DLPACK_EXCHANGE_CAPSULE,
    KINA_DLPACK_MAJOR,
    KINA_DLPACK_MINOR,
    KINA_MAX_NDIM,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    holds_gil,
    interpreter_is_finalizing,
    kina_dl_exchange_api,
    kina_dl_managed_tensor_versioned,
    kina_dl_tensor,
    kina_exception,
    kina_exception_restore,
    kina_exception_save,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor

from kina.errors import DLPackError

__all__ = []

cdef managed_taker take = NULL  # of the room above that knows the sessions


cdef void set_taker(managed_taker taker) noexcept:
    global take
    take = taker


cdef extern from "Python.h":
    void PyType_Modified(PyTypeObject *type)
    PyObject *PyErr_Occurred()


cdef extern from *:
    ctypedef struct type_with_dict "PyTypeObject":
        PyObject *tp_dict


cdef Tensor own_tensor(void *given):
    if type(<object> given) is not Tensor:
        raise TypeError(f"the exchange table of kina.Tensor takes Tensors, not {type(<object> given).__name__}")
    return <Tensor> given


cdef int managed_from_object(void *given, kina_dl_managed_tensor_versioned **out) except -1:
    cdef Tensor tensor = own_tensor(given)
    out[0] = NULL
    check(export_tensor(&tensor.c, KINA_CONSUMER_WORK_STREAM, out))
    return 0


cdef int borrowed_from_object(void *given, kina_dl_tensor *out) except -1:
    cdef Tensor tensor = own_tensor(given)
    if tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP):
        raise DLPackError("a borrowed tensor cannot say that it is read-only: take an owned one",
                          operation="__dlpack_c_exchange_api__")
    check(order_consumer(&tensor.c, KINA_CONSUMER_WORK_STREAM))
    out.data = kina_tensor_address(&tensor.c) if tensor.c.size > 0 else NULL
    out.device = tensor.c.device
    out.ndim = tensor.c.ndim
    out.dtype = tensor.c.dtype
    out.shape = tensor.c.shape
    out.strides = tensor.c.strides
    out.byte_offset = 0
    return 0


cdef int object_from_managed(kina_dl_managed_tensor_versioned *managed, void **out) except -1:
    cdef object made
    out[0] = NULL
    if managed == NULL:
        raise DLPackError("managed tensor: NULL", operation="__dlpack_c_exchange_api__")
    try:
        load_taker()
    except BaseException:
        drop_managed(managed)
        raise
    made = take(managed, NULL)
    Py_INCREF(made)
    out[0] = <void *> made
    return 0


cdef int load_taker() except -1:
    if take == NULL:
        importlib.import_module("kina._core.interchange")
    return 0


cdef int current_work_stream(int32_t device_type, int32_t device_id, void **out) except -1:
    out[0] = NULL
    if device_type == KINA_DEVICE_CUDA or device_type == KINA_DEVICE_CUDA_MANAGED:
        check(export_work_stream(device_id, out))
    elif device_type != KINA_DEVICE_CPU and device_type != KINA_DEVICE_CUDA_HOST:
        raise DLPackError(f"device: kina has no stream on device type {device_type}",
                          operation="__dlpack_c_exchange_api__")
    return 0


# The allocator may be called without the GIL, and tells of a failure by a function that need not be Python's.
cdef int allocate(kina_dl_tensor *prototype, kina_dl_managed_tensor_versioned **out, void *error_ctx,
                  void (*set_error)(void *, const char *, const char *) noexcept nogil) noexcept nogil:
    out[0] = NULL
    if interpreter_is_finalizing() and not holds_gil():
        if set_error != NULL:
            set_error(error_ctx, b"RuntimeError", b"kina allocates nothing while the interpreter goes")
        return -1
    with gil:
        return allocate_with_gil(prototype, out, error_ctx, set_error)


cdef int allocate_with_gil(kina_dl_tensor *prototype, kina_dl_managed_tensor_versioned **out, void *error_ctx,
                           void (*set_error)(void *, const char *, const char *) noexcept nogil) noexcept:
    cdef kina_exception kept
    cdef bint busy = PyErr_Occurred() != NULL  # whoever holds the GIL may be in the middle of one
    cdef int status = 0
    if busy:
        kina_exception_save(&kept)
    try:
        allocate_like(prototype, out)
    except BaseException as error:
        status = -1
        if set_error != NULL:
            report(error, error_ctx, set_error)
    if busy:
        kina_exception_restore(&kept)
    return status


cdef int report(object error, void *error_ctx,
                void (*set_error)(void *, const char *, const char *) noexcept nogil) noexcept:
    cdef bytes kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins").encode()
    cdef bytes message = str(error).encode("utf-8", "replace")
    set_error(error_ctx, kind, message)
    return 0


cdef int allocate_like(kina_dl_tensor *prototype, kina_dl_managed_tensor_versioned **out) except -1:
    cdef Tensor made
    cdef DType dtype
    cdef int axis
    if prototype == NULL:
        raise DLPackError("prototype: NULL", operation="allocate")
    if not 0 <= prototype.ndim <= KINA_MAX_NDIM or prototype.ndim > 0 and prototype.shape == NULL:
        raise DLPackError(f"prototype: {prototype.ndim} axes" if prototype.shape != NULL else "prototype: no shape",
                          operation="allocate")
    dtype = dtype_from_dlpack(prototype.dtype.code, prototype.dtype.bits, prototype.dtype.lanes)
    shape = tuple([prototype.shape[axis] for axis in range(prototype.ndim)])
    if prototype.device.device_type == KINA_DEVICE_CPU:
        device = "cpu"
    elif prototype.device.device_type == KINA_DEVICE_CUDA:
        device = prototype.device.device_id
    else:
        raise DLPackError(f"device: kina allocates on the host and on CUDA devices, not on device type "
                          f"{prototype.device.device_type}", operation="allocate")
    made = kina_empty()(shape, dtype, device=device)
    check(export_tensor(&made.c, KINA_CONSUMER_WORK_STREAM, out))
    return 0


cdef object kina_empty():
    # The session at hand, or a momentary one: rooms above this one know.
    return importlib.import_module("kina").empty


# The table itself -------------------------------------------------------------------------------------------

cdef kina_dl_exchange_api table
table.header.version.major = KINA_DLPACK_MAJOR
table.header.version.minor = KINA_DLPACK_MINOR
table.header.prev_api = NULL
table.managed_tensor_allocator = allocate
table.managed_tensor_from_py_object_no_sync = managed_from_object
table.managed_tensor_to_py_object_no_sync = object_from_managed
table.dltensor_from_py_object_no_sync = borrowed_from_object
table.current_work_stream = current_work_stream


cdef int offer_table() except -1:
    """A type of Cython's takes no attributes but through its dictionary."""
    names = <dict> (<type_with_dict *> Tensor).tp_dict
    if "__dlpack_c_exchange_api__" not in names:
        names["__dlpack_c_exchange_api__"] = PyCapsule_New(&table, KINA_DLPACK_EXCHANGE_CAPSULE, NULL)
        PyType_Modified(<PyTypeObject *> Tensor)
    return 0


offer_table()
