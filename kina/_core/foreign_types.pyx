# cython: annotation_typing=False
"""What the types of other libraries' arrays offer: the C exchange table, and signs that memory does not tell all.

Source: the DLPack specification for Python, "C exchange API" (https://dmlc.github.io/dlpack/latest/).
"""

from cpython.object cimport PyTypeObject
from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_XDECREF, Py_XINCREF, PyObject
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DLPACK_EXCHANGE_CAPSULE,
    KINA_DLPACK_MAJOR,
    KINA_DTYPE_BOOL,
    KINA_DTYPE_COMPLEX,
    KINA_DTYPE_INT,
    KINA_DTYPE_UINT,
    kina_dl_device,
    kina_dl_exchange_api,
    kina_dl_managed_tensor_versioned,
)

from kina.errors import DLPackError

__all__ = []


cdef extern from *:
    """
    /* Changes with every change of the type or of one that it inherits from; 0: not known now. */
    static inline unsigned int kina_type_version(PyTypeObject *type) {
        return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
    }
    """
    unsigned int kina_type_version(PyTypeObject *type) noexcept
    ctypedef object (*descriptor_get "descrgetfunc")(object descriptor, object instance, object owner)
    ctypedef struct descriptor_type "PyTypeObject":
        descriptor_get tp_descr_get
    descriptor_type *descriptor_type_of "Py_TYPE"(object descriptor) noexcept


cdef enum:
    KEPT_TYPES = 64     # a power of two

cdef kina_foreign_type kept[KEPT_TYPES]
cdef kina_foreign_type passing  # of a type without a version


cdef const kina_foreign_type *foreign_type(PyTypeObject *type) except NULL:
    cdef kina_foreign_type *entry = &kept[(<uintptr_t> type >> 5 ^ <uintptr_t> type >> 12) & (KEPT_TYPES - 1)]
    if entry.type == type and entry.version == kina_type_version(type) and entry.version != 0:
        return entry
    return look_up(type, entry)


cdef const kina_foreign_type *look_up(PyTypeObject *type, kina_foreign_type *entry) except NULL:
    cdef object kind = <object> <PyObject *> type
    cdef kina_foreign_type found
    cdef kina_foreign_type previous
    memset(&found, 0, sizeof(found))
    found.api = exchange_table(kind)
    requires_grad = getattr(kind, "requires_grad", None)
    is_neg = getattr(kind, "is_neg", None)
    is_conj = getattr(kind, "is_conj", None)
    found.requires_grad = NULL if requires_grad is None else <PyObject *> requires_grad
    found.is_neg = NULL if is_neg is None else <PyObject *> is_neg
    found.is_conj = NULL if is_conj is None else <PyObject *> is_conj
    # A type gets its version when an attribute of it is looked up.
    found.type = type
    found.version = kina_type_version(type)
    if found.version == 0:
        entry = &passing
    Py_XINCREF(found.requires_grad)
    Py_XINCREF(found.is_neg)
    Py_XINCREF(found.is_conj)
    previous = entry[0]
    entry[0] = found
    Py_XDECREF(previous.requires_grad)
    Py_XDECREF(previous.is_neg)
    Py_XDECREF(previous.is_conj)
    if entry.type != type or entry.version != found.version:  # what was dropped ran code that looked up another type
        return look_up(type, entry)
    return entry


cdef enum:
    MOST_TABLES = 64  # of a chain of versions, which may lead round in a circle


cdef const kina_dl_exchange_api *exchange_table(object kind) except? NULL:
    """The table that a type offers; what it says of itself is looked at before a function of it is called."""
    cdef const kina_dl_exchange_api *api
    cdef int seen = 0
    offered = getattr(kind, "__dlpack_c_exchange_api__", None)
    if offered is None:
        offered = getattr(kind, "__c_dlpack_exchange_api__", None)  # its name before DLPack 1.3
    if offered is None:
        return NULL
    if PyCapsule_CheckExact(offered) and PyCapsule_IsValid(offered, KINA_DLPACK_EXCHANGE_CAPSULE):
        api = <const kina_dl_exchange_api *> PyCapsule_GetPointer(offered, KINA_DLPACK_EXCHANGE_CAPSULE)
    elif type(offered) is int and 0 < offered < 1 << 64:
        api = <const kina_dl_exchange_api *> <uintptr_t> offered
    else:
        raise DLPackError(f"__dlpack_c_exchange_api__ of {kind.__name__}: a capsule named 'dlpack_exchange_api' is "
                          f"needed, not {offered!r}", operation="from_dlpack")
    while api != NULL and api.header.version.major != KINA_DLPACK_MAJOR and seen < MOST_TABLES:
        api = <const kina_dl_exchange_api *> api.header.prev_api
        seen += 1
    if api == NULL or seen == MOST_TABLES:
        return NULL  # it speaks other major versions only: there is __dlpack__
    if api.managed_tensor_from_py_object_no_sync == NULL or api.current_work_stream == NULL:
        raise DLPackError(f"__dlpack_c_exchange_api__ of {kind.__name__}: the table lacks a function that every table "
                          "has", operation="from_dlpack")
    return api


cdef int refuse_lazy(object producer, int code) except -1:
    cdef const kina_foreign_type *facts = foreign_type(type_of(producer))
    cdef bint floating = code not in (KINA_DTYPE_INT, KINA_DTYPE_UINT, KINA_DTYPE_BOOL)  # an unknown one may be
    cdef object requires_grad = held(facts.requires_grad) if floating else None
    cdef object is_conj = held(facts.is_conj) if code == KINA_DTYPE_COMPLEX or code < 0 else None
    cdef object is_neg = held(facts.is_neg)
    if requires_grad is not None and says_so(requires_grad, producer):
        raise lazy(producer, "is watched by autograd, which would not see what is done to its memory", "detach")
    if is_neg is not None and says_so(is_neg, producer):
        raise lazy(producer, "has its negative bit set, so its memory does not hold its values", "resolve_neg")
    if is_conj is not None and says_so(is_conj, producer):
        raise lazy(producer, "has its conjugate bit set, so its memory does not hold its values", "resolve_conj")
    return 0


cdef inline object held(PyObject *found):
    """The first question may run anybody's code, which may take the others away."""
    return None if found == NULL else <object> found


cdef bint says_so(object asked, object producer) except -1:
    """`asked` is what the type has under the name: a method, a property, or a mere value."""
    cdef descriptor_get get
    if callable(asked):
        return bool(asked(producer))
    get = descriptor_type_of(asked).tp_descr_get
    return bool(asked) if get == NULL else bool(get(asked, producer, type(producer)))


cdef object lazy(object producer, str what, str cure):
    return DLPackError(f"the producer ({type(producer).__name__}) {what}: call .{cure}() first",
                       operation="from_dlpack")


# Asking -----------------------------------------------------------------------------------------------------


cdef kina_dl_managed_tensor_versioned *request_managed(object producer, const kina_dl_exchange_api *api) except NULL:
    cdef kina_dl_managed_tensor_versioned *managed = NULL
    try:
        api.managed_tensor_from_py_object_no_sync(<void *> producer, &managed)
    except Exception as error:
        raise DLPackError(f"the producer ({type(producer).__name__}) refuses: {error}",
                          operation="from_dlpack") from error
    if managed == NULL:
        raise DLPackError(f"the producer ({type(producer).__name__}) gave no tensor", operation="from_dlpack")
    try:
        refuse_lazy(producer, managed.dl_tensor.dtype.code if managed.version.major == KINA_DLPACK_MAJOR else -1)
    except BaseException:
        if managed.deleter != NULL:
            managed.deleter(managed)
        raise
    return managed


cdef void *producer_stream(const kina_dl_exchange_api *api, kina_dl_device device) except? NULL:
    cdef void *stream = NULL
    if device.device_type == KINA_DEVICE_CPU or device.device_type == KINA_DEVICE_CUDA_HOST:
        return NULL
    try:
        api.current_work_stream(KINA_DEVICE_CUDA, device.device_id, &stream)
    except Exception as error:
        raise DLPackError(f"stream: the producer does not tell the one that it works on: {error}",
                          operation="from_dlpack") from error
    return stream
