cimport cython
from kina.cuda.handles cimport kina_module, kina_runtime
from kina.cuda.function cimport Module

# Load an image of images.py; the caller owns the reference. ModuleLoadError with the loader's log. The context is
# current.
cdef kina_module *load_image(kina_runtime *runtime, str kind, bytes image) except NULL


@cython.final
cdef class CacheEntry:
    cdef Module module
    cdef object key
    cdef size_t nbytes
    cdef list spellings
    cdef object flags               # of a compilation: what the environment added; None for images


@cython.final
cdef class ModuleCache:
    # Loaded modules of one Runtime by what they were loaded from: bounded by entries and bytes, least recently
    # used first out. Evicting drops a reference; a module in flight or in use lives on. What a module keeps of its
    # functions refers to it again, so that the cache ends that too.
    cdef object entries             # key -> CacheEntry, the least recently used first
    cdef CacheEntry newest
    cdef dict spellings             # what was passed -> CacheEntry: spares reading it again
    cdef readonly size_t nbytes
    cdef int most                   # entries
    cdef int evicted                # since they were sealed last, and their bytes
    cdef size_t evicted_bytes
    cdef kina_runtime *runtime      # borrowed: the Runtime's face holds the cache

    cdef Module find(self, object key)
    # Before a load, the context current: what was evicted ends with the work that uses it, and not only with a segment
    # that takes hundreds of leases to fill. So the device holds the cache about twice, and what is in flight.
    cdef void make_way(self) noexcept
    cdef int keep(self, object key, Module module, size_t nbytes) except -1
    # `spelling`, immutable, asks for the same as `key`; where it is compiled, as long as the environment adds `flags`.
    cdef int also(self, object spelling, object key, object flags) except -1
    cdef Module spelled(self, object spelling)
    cdef int use(self, CacheEntry entry) except -1


# What the environment adds to each compilation.
cdef object compiler_flags()
