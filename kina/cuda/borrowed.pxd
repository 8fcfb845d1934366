from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t

from kina._core.dtype cimport DType
from kina._core.storage cimport kina_dl_exchange_api
from kina.cuda.handles cimport kina_runtime

# An argument of a launch that is another library's tensor.
cdef struct kina_borrowed:
    PyObject *argument                  # borrowed: the caller of the launch holds it
    int position                        # among the arguments
    const kina_dl_exchange_api *api     # of its type, for as long as the process
    uint64_t address                    # of its first element, from `borrow`
    uint64_t nbytes
    void *stream                        # that its library works on now, from `ask_streams`, ...
    bint asked                          # ... for the first one of a library

# All of these may run anybody's code, but the last two; errors name the argument of the function `name`.

# The C exchange table of the argument's type, or NULL. DLPackError where the type offers one that is none.
cdef const kina_dl_exchange_api *table_of(PyObject *argument) except? NULL
# DLPackError for a tensor whose memory does not hold its values, or that autograd watches. `dtype`: the declared one.
cdef int look_at_laziness(kina_borrowed *lent, DType dtype, str name) except -1
# Its memory, if that is compact, of the dtype and within reach of the device: good while its owner leaves it alone.
cdef int borrow(kina_borrowed *lent, DType dtype, int ordinal, str name) except -1
# Each library among them is asked once.
cdef int ask_streams(kina_borrowed *lent, int count, int ordinal) except -1
# The Runtime's stream waits for those that it is not, on the device. 0 or a recorded status: there is a capture.
cdef int order_borrowed(kina_runtime *runtime, kina_borrowed *lent, int count) noexcept nogil
# Keep the object until the device is past what is enqueued next. 0 or a recorded status. Needs the GIL.
cdef int lease_object(kina_runtime *runtime, PyObject *object) noexcept
