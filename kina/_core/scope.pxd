from cpython.ref cimport PyObject

# What a with statement calls: `enter` before its block, `leave` after it (`unwinding`: by an exception). The object is
# borrowed.
ctypedef int (*scope_enter)(PyObject *scope) except -1
ctypedef int (*scope_leave)(PyObject *scope, bint unwinding) except -1

# Let with statements over `owner`, a cdef class with the methods __enter__ and __exit__ of the same meaning, call these
# two directly. Once for each class, when its module is made; they live as long as the process.
cdef int install_scope(type owner, scope_enter enter, scope_leave leave) except -1
