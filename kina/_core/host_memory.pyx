"""Host memory: the resource under every host tensor."""

from libc.stdio cimport snprintf
from libc.stdlib cimport free

from kina._core.status cimport KINA_OUT_OF_MEMORY, fail, last_error
from kina._core.storage cimport (
    KINA_RESOURCE_VERSION,
    kina_handle,
    kina_handle_init,
    kina_resource,
    kina_resource_vtable,
    kina_stream,
)

__all__ = []


cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **out, size_t alignment, size_t nbytes) noexcept


# As for device memory, so that a layout that is aligned on one side is aligned on the other.
cdef enum:
    ALIGNMENT = 256


cdef int allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    if posix_memalign(out, ALIGNMENT, nbytes) != 0:
        snprintf(last_error().message, sizeof(last_error().message),
                 "host memory: %zu bytes could not be allocated", nbytes)
        return fail(KINA_OUT_OF_MEMORY, b"allocate", last_error().message)
    return 0


cdef void deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    free(data)


cdef void never_destroyed(kina_handle *self) noexcept nogil:
    pass


cdef kina_resource_vtable vtable
vtable.version = KINA_RESOURCE_VERSION
vtable.supports_streams = 0
vtable.name = b"HostMemoryResource"
vtable.allocate = allocate
vtable.deallocate = deallocate

cdef kina_resource the_resource
kina_handle_init(&the_resource.handle, never_destroyed)
the_resource.vtable = &vtable


cdef kina_resource *host_resource() noexcept nogil:
    return &the_resource
