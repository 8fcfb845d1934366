cimport cython

from kina.cuda.handles cimport kina_runtime, kina_seal


@cython.final
cdef class Completion:
    cdef kina_seal *_seal           # owned reference
    cdef kina_runtime *_runtime     # owned reference: its counters count the waits

# Takes over the reference to the seal.
cdef Completion make_completion(kina_runtime *runtime, kina_seal *recorded)
