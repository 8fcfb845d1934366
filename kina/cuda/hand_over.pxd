cimport cython

from kina.cuda.handles cimport kina_runtime


@cython.final
cdef class HandOver:
    cdef object _session
    cdef object _stream     # held: it must not be destroyed before it is waited for

cdef HandOver make_hand_over(object session, object stream)

# With the device's context current, and the stream of the Runtime not being captured, as far as its session knows. The
# Runtime's stream waits, on the device, for what another has so far: that of a Runtime, or what `other` stands for.
cdef int order_sessions(kina_runtime *producer, kina_runtime *waiter, const char *operation) except -1
cdef int wait_for(kina_runtime *runtime, object other, const char *operation) except -1
# The other way: `stream` waits for the Runtime's.
cdef int hand_over(kina_runtime *runtime, object stream, const char *operation) except -1
