cimport cython
from kina.cuda.handles cimport kina_runtime


@cython.final
cdef class ObjectCache:
    # Objects that a Runtime keeps for raw blocks, by their class: bounded by entries and declared bytes, the least
    # recently used first out. What goes is leased until the device is past all that was enqueued so far.
    cdef object entries             # class -> (object, bytes, pinned), the least recently used first
    cdef set making                 # classes whose `init` runs
    cdef readonly size_t nbytes     # declared, of all
    cdef kina_runtime *runtime      # owned reference

    cdef object get(self, object type_, object init, size_t nbytes, bint pinned)
    cdef int make_room(self, size_t nbytes) except -1
    cdef int drop(self, object type_) except -1
    cdef Py_ssize_t empty(self) except -1
    cdef int retire(self, object kept) except -1

cdef ObjectCache make_object_cache(kina_runtime *runtime)
