from kina._core.tensor cimport Tensor

# A host tensor over the memory of an object with the buffer protocol.
cdef Tensor adopt_buffer(object exporter)
