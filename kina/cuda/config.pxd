cimport cython


@cython.final
cdef class LaunchConfig:
    cdef unsigned int _grid[3]
    cdef unsigned int _block[3]
    cdef unsigned int _cluster[3]   # zeros: no clusters
    cdef unsigned int _shared_bytes
    cdef bint _cooperative
    cdef bint _extended             # clusters or cooperative: needs cuLaunchKernelEx
