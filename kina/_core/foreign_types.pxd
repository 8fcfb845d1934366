from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject

from kina._core.storage cimport kina_dl_device, kina_dl_exchange_api, kina_dl_managed_tensor_versioned


cdef extern from "Python.h":
    PyTypeObject *type_of "Py_TYPE"(object instance) noexcept   # borrowed


# What is known of the type of somebody else's arrays.
cdef struct kina_foreign_type:
    PyTypeObject *type                  # with `version` the key: only compared, so that types may go
    unsigned int version                # of the type's attributes; never used again
    const kina_dl_exchange_api *api     # of the supported major version; NULL: it has no exchange table
    PyObject *requires_grad             # owned references, or NULL: how it says that autograd watches a tensor, ...
    PyObject *is_neg                    # ... that the memory holds the negated values, ...
    PyObject *is_conj                   # ... or the conjugated ones

# Looked up once for each type, and again when the type changes; kept for a bounded number of them. Needs the GIL; what
# it gives is good until anybody's code runs. DLPackError where the type offers a table that is none.
cdef const kina_foreign_type *foreign_type(PyTypeObject *type) except NULL

# DLPackError, which says what to do, for a tensor whose memory does not hold its values (lazily conjugated or negated)
# or that autograd watches. May run code of its type, if that has any of the three. `code`: DLPack's of its dtype, -1 if
# not known; what cannot be true of that is not asked.
cdef int refuse_lazy(object producer, int code) except -1

# The tensor of `producer`, whose type has the table: one that the caller owns, and whose memory holds its values.
# DLPackError where the producer refuses.
cdef kina_dl_managed_tensor_versioned *request_managed(object producer, const kina_dl_exchange_api *api) except NULL

# The stream that a library works on now, which an import has to wait for; NULL on the host. DLPackError.
cdef void *producer_stream(const kina_dl_exchange_api *api, kina_dl_device device) except? NULL
