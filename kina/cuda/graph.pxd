cimport cython

from kina.cuda.handles cimport kina_capture
from kina.cuda.session cimport CudaSession


@cython.final
cdef class Graph:
    cdef CudaSession _session   # that is being captured; None before and after
    cdef kina_capture *c        # owned reference; NULL until the capture begins
    cdef int _state
    cdef Py_ssize_t _node_count
    cdef unsigned long long _runtime_number     # of the Runtime it was captured on

    cdef int begin(self) except -1
    cdef int end(self, bint keep) except -1
    cdef int refuse(self, CudaSession session) except -1
