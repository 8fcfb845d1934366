cimport cython
from kina.cuda.handles cimport kina_device, kina_module, kina_runtime

# Load an image; the caller owns the reference. ModuleLoadError with the loader's log. The context is current.
cdef kina_module *load_ptx(kina_runtime *runtime, bytes image) except NULL
# The NUL-terminated PTX bytes of what a user passed, or a typed error.
cdef bytes ptx_image(object source)


@cython.final
cdef class ModuleCache:
    # Loaded modules of one Runtime by what they were loaded from: bounded by entries and bytes, least recently
    # used first out. Evicting drops a reference; a module in flight or in use lives on.
    cdef object entries
    cdef readonly size_t nbytes
    cdef kina_runtime *runtime  # borrowed: the Runtime's face holds the cache

    cdef object find(self, object key)
    cdef int keep(self, object key, object module, size_t nbytes) except -1
