cimport cython
from cpython.ref cimport PyObject

from kina.cuda.entry cimport Entry
from kina.cuda.handles cimport kina_module, kina_runtime
from kina.cuda.launch cimport PreparedLaunch
from kina.cuda.parameters cimport Parameters


@cython.final
cdef class Module:
    cdef kina_module *c             # owned reference
    cdef kina_runtime *runtime      # owned reference: a Function outlives the Runtime's face
    cdef readonly str log
    cdef readonly str kind
    cdef dict lowered               # name expressions and their names in the image
    cdef dict declared              # names in the image and the types that PTX declares for their parameters
    cdef dict functions             # while it is in its Runtime's cache, which ends it; else None


@cython.final
cdef class Function:
    cdef readonly Module module     # strong: it keeps what the cache knows it by
    cdef Entry entry
    cdef Parameters _parameters
    cdef PreparedLaunch newest      # of the last launch: one compare skips the checks of its configuration

    cdef int launch_checked(self, PyObject **arguments, Py_ssize_t count) except -1

cdef Module make_module(kina_runtime *runtime, kina_module *loaded)
