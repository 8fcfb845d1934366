cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t

from kina._core.tensor cimport Tensor
from kina.cuda.config cimport LaunchConfig
from kina.cuda.cudatypes cimport CUfunction
from kina.cuda.handles cimport kina_module, kina_ref, kina_runtime
from kina.cuda.signature cimport Signature


@cython.final
cdef class Module:
    cdef kina_module *c             # owned reference
    cdef kina_runtime *runtime      # owned reference: a Function outlives the Runtime's face
    cdef readonly str log
    cdef readonly str kind
    cdef dict lowered               # name expressions and their names in the image
    cdef dict declared              # names in the image and the types that PTX declares for their parameters
    cdef dict functions             # while it is in its Runtime's cache, which ends it; else None
    cdef int check_block(self, const char *operation) except -1


@cython.final
cdef class Function:
    cdef readonly Module module     # strong: the code must stay loaded
    cdef readonly str name
    cdef readonly Signature signature
    cdef CUfunction handle
    cdef int count                  # parameters, as the driver reports them
    cdef size_t *offsets
    cdef size_t *sizes
    cdef size_t nbytes              # of the parameter buffer
    cdef bint padded                # it has gaps between parameters, to be zeroed
    cdef int max_threads
    cdef int static_shared_bytes
    cdef int dynamic_limit_bytes    # opted in so far
    cdef int registers_per_thread
    cdef int local_bytes_per_thread
    cdef int constant_nbytes
    cdef int ptx_version_number
    cdef int binary_version_number
    cdef LaunchConfig checked       # the configuration that was checked last: one compare skips the checks

    cdef int launch_checked(self, PyObject **arguments, Py_ssize_t count) except -1
    cdef int check_config(self, LaunchConfig config) except -1
    cdef int allow_shared(self, size_t nbytes) except -1
    cdef int check_cluster(self, LaunchConfig config) except -1
    cdef int opt_in(self, int attribute, int value) except -1
    cdef int occupancy(self, LaunchConfig config, bint clusters) except -1
    cdef int refuse(self, str why) except -1
    cdef int refuse_tensor(self, int i, Tensor tensor) except -1
    cdef int refuse_foreign_ref(self, int i) except -1
    cdef int pack_struct(self, int i, object argument, char *target) except -1
    cdef int pack_number(self, int i, object argument, char *target) except -1
    cdef int pack_typed(self, PyObject **arguments, char *buffer) except -1
    cdef int pack_ref(self, int i, object argument, char *target) except -1
    cdef Tensor tensor_of(self, int i, object workspace)
    cdef int pack_tensor(self, int i, Tensor tensor, kina_ref *own, char *target) except -1
    cdef int refuse_aliases(self, int i, int j) except -1
    cdef int pack_loose(self, PyObject **arguments, char *buffer) except -1
    cdef int pack_untyped(self, int i, object argument, char *target) except -1

cdef Module make_module(kina_runtime *runtime, kina_module *loaded)
