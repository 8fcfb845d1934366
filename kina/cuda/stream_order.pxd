from kina._core.storage cimport kina_stream_order

# How the streams of Runtimes are put in order: for kina_stream.ordering. Its fences are seals.
cdef const kina_stream_order *runtime_order
