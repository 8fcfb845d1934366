from cpython.ref cimport PyObject

from kina._core.storage cimport kina_handle, kina_resource, kina_resource_vtable, kina_storage, kina_stream


cdef class MemoryResource:
    # The face of a C resource, which may outlive it.
    cdef kina_resource *c           # owned; NULL before __init__, for a subclass in Python before its first use
    cdef PyObject **named           # where `c` names this face, borrowed; emptied when the face goes. NULL if nowhere
    cdef MemoryResource _upstream   # keeps a Python resource below alive: the C chain alone does not
    cdef object __weakref__

    cdef kina_resource *ready(self) except NULL
    cdef int serve(self, kina_resource *c, MemoryResource upstream, PyObject **named) except -1


# A face of a C resource; it retains it.
cdef MemoryResource wrap(kina_resource *resource)
# A new storage of `memory`, which lives on with it.
cdef kina_storage *allocate_from(MemoryResource memory, size_t nbytes) except NULL
# "cpu" or "cuda:N". Pinned memory is the host's.
cdef str device_of_resource(const kina_resource *resource)
# A new reference to the C resource below a new adaptor; ArgumentError unless it is a MemoryResource.
cdef MemoryResource checked_upstream(object upstream)
# What finds the stream that a `stream=` names, on the device of an ordinal (None: of the thread's default Runtime).
# `*out` is borrowed from the object that it returns. Set by the room that makes streams, which lies above this one.
ctypedef object (*stream_finder)(int ordinal, object stream, str operation, kina_stream **out)
cdef void set_stream_finder(stream_finder finder) noexcept

# The bytes of a request or limit: an int in 0 to 2**63 - 1. ArgumentError, InvalidShapeError.
cdef size_t parse_nbytes(object nbytes, str operation) except? <size_t> -1


# An adaptor's C resource begins with this.
ctypedef struct kina_adaptor:
    kina_resource resource          # resource.upstream is set
    kina_resource_vtable vtable     # its own, because stream order is its upstream's

# Set up what an adaptor shares with all: one reference, memory of its upstream's kind. `adaptor` was allocated by
# calloc; adaptor_destroy releases the upstream and frees it.
cdef void adaptor_init(kina_adaptor *adaptor, const kina_resource_vtable *functions, kina_resource *below,
                       void (*destroy)(kina_handle *) noexcept nogil) noexcept
cdef void adaptor_destroy(kina_handle *self) noexcept nogil
