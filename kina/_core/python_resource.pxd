from cpython.ref cimport PyObject

from kina._core.storage cimport kina_dl_device, kina_resource

# A new C resource that calls face._allocate(nbytes, None) and face._deallocate(address, nbytes, None). `face` is
# borrowed: before it goes it empties *named, and what is given back afterwards leaks. Retains `upstream` (or NULL).
cdef kina_resource *python_resource_new(object face, kina_dl_device device, bint supports_streams,
                                        kina_resource *upstream, PyObject ***named) except NULL
