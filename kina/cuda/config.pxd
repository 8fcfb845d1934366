cimport cython


@cython.final
cdef class LaunchConfig:
    cdef unsigned int _grid[3]
    cdef unsigned int _block[3]
    cdef unsigned int _cluster[3]   # zeros: no clusters
    cdef unsigned int _shared_bytes
    cdef bint _cooperative
    cdef bint _programmatic
    cdef bint _extended             # clusters, cooperative or programmatic: needs cuLaunchKernelEx


# The int that it is, asked once; None for what is none, bools included.
cdef object read_index(object value)
# An int from 0 to 2**31-1, or InvalidConfigError.
cdef int read_count(object value, str name, str operation) except -1
