"""Host memory: the host as a Runtime, the resource under its tensors, their bytes as buffers."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memset

from kina._core.status cimport fail_out_of_memory, kina_memory_figures, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_RESOURCE_VERSION,
    kina_dl_device,
    kina_handle,
    kina_handle_init,
    kina_release,
    kina_resource,
    kina_resource_vtable,
    kina_retain,
    kina_storage,
    kina_stream,
)
from kina._core.tokens cimport issue_number

__all__ = []


cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **out, size_t alignment, size_t nbytes) noexcept


cdef uint64_t the_runtime = issue_number()
cdef uint64_t the_domain = issue_number()


cdef uint64_t host_runtime() noexcept nogil:
    return the_runtime


cdef uint64_t host_domain() noexcept nogil:
    return the_domain


cdef kina_dl_device host_device() noexcept nogil:
    cdef kina_dl_device device
    device.device_type = KINA_DEVICE_CPU
    device.device_id = 0
    return device


# As for device memory, so that a layout that is aligned on one side is aligned on the other.
cdef enum:
    ALIGNMENT = 256


cdef int allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef kina_memory_figures figures
    if posix_memalign(out, ALIGNMENT, nbytes) != 0:
        snprintf(last_error().message, sizeof(last_error().message),
                 "host memory: %zu bytes could not be allocated", nbytes)
        memset(&figures, 0xff, sizeof(figures))  # -1: not known
        figures.requested = <int64_t> nbytes
        return fail_out_of_memory(b"allocate", last_error().message, &figures)
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
the_resource.device_type = KINA_DEVICE_CPU


cdef kina_resource *host_resource() noexcept nogil:
    return &the_resource


@cython.final
@cython.no_gc
cdef class StorageBytes:
    """All bytes of a host storage, as a buffer."""

    cdef kina_storage *storage
    cdef bint writable

    def __dealloc__(self):
        kina_release(self.storage)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        # An empty storage has no address, and some readers of buffers insist on one.
        cdef void *data = <void *> self.storage if self.storage.data == NULL else self.storage.data
        PyBuffer_FillInfo(buffer, self, data, <Py_ssize_t> self.storage.nbytes, not self.writable, flags)


cdef object storage_bytes(kina_storage *storage, bint writable):
    cdef StorageBytes octets = StorageBytes.__new__(StorageBytes)
    kina_retain(storage)
    octets.storage = storage
    octets.writable = writable
    return octets
