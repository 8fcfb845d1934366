# The calling thread's stack in Python, innermost first, as "file:line name <- file:line name ..."; the caller frees
# it. NULL where there is none, or no memory for it. Takes the GIL.
cdef char *call_stack() noexcept nogil
