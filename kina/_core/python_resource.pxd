from cpython.ref cimport PyObject

from kina._core.storage cimport kina_dl_device, kina_resource, kina_stream

# A new C resource that calls face._allocate(nbytes, stream) and face._deallocate(address, nbytes, stream), with None
# for the stream where there is none or `supports_streams` is false. `face` is borrowed: before it goes it empties
# *named, and what is given back afterwards leaks. Retains `upstream` (or NULL).
cdef kina_resource *python_resource_new(object face, kina_dl_device device, bint supports_streams,
                                        kina_resource *upstream, PyObject ***named) except NULL

# What Python sees of a stream: set by the room that makes streams, which lies above this one.
ctypedef object (*stream_wrapper)(kina_stream *stream)
cdef void set_stream_wrapper(stream_wrapper wrapper) noexcept
