cimport cython

from kina.cuda.config cimport LaunchConfig
from kina.cuda.cudatypes cimport CUfunction, CUlaunchAttribute, CUlaunchConfig
from kina.cuda.handles cimport kina_module, kina_runtime
from kina.cuda.parameters cimport Parameters

cdef enum:
    LAUNCH_ATTRIBUTES = 3


@cython.final
cdef class Entry:
    # A loaded entry of a module, and what it and the device allow.
    cdef str name
    cdef kina_module *module        # owned reference: the code must stay loaded
    cdef kina_runtime *runtime      # owned reference
    cdef CUfunction handle
    cdef int max_threads
    cdef int static_shared_bytes
    cdef int dynamic_limit_bytes    # opted in so far
    cdef int registers_per_thread
    cdef int local_bytes_per_thread
    cdef int constant_nbytes
    cdef int ptx_version_number
    cdef int binary_version_number
    # Its parameters, added to `parameters`, and its attributes, from the driver. The context must be current.
    cdef int read(self, Parameters parameters) except -1
    # InvalidConfigError or UnsupportedError, or the driver is told what the configuration asks of the entry. Errors
    # name `operation`: what was called.
    cdef int check_config(self, LaunchConfig config, const char *operation) except -1
    cdef int most_dynamic_shared_bytes(self) noexcept
    cdef int max_active(self, LaunchConfig config, bint clusters) except -1
    cdef tuple suggest_block(self, object shared_bytes, object max_threads)
    cdef int read_attribute(self, int attribute, int *value) except -1
    cdef int check_cluster(self, LaunchConfig config, const char *operation) except -1
    cdef int allow_shared(self, size_t nbytes, const char *operation) except -1
    cdef int opt_in(self, int attribute, int value, const char *operation) except -1
    cdef int refuse(self, str why, const char *operation) except -1

# Load it, so that its first launch neither loads nor waits. SymbolLookupError. The context must be current.
cdef Entry make_entry(kina_runtime *runtime, kina_module *module, str name, bytes symbol)
# The configuration as the driver takes it, with the attributes that it points to.
cdef void extend(LaunchConfig config, CUlaunchAttribute *attributes, CUlaunchConfig *launch) noexcept nogil
