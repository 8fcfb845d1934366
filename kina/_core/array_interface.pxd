from libc.stdint cimport int64_t, intptr_t, uint64_t, uintptr_t

from kina._core.dtype cimport DType
from kina._core.storage cimport KINA_MAX_NDIM, kina_dl_device, kina_storage, kina_stream, kina_tensor
from kina._core.tensor cimport Tensor

# What an array interface says, once every field of it is believed. May not be moved: `layout` points into it.
ctypedef struct array_claim:
    int64_t shape[KINA_MAX_NDIM]
    int64_t strides[KINA_MAX_NDIM]  # in elements
    kina_tensor layout              # described; the span is counted from the first element
    uintptr_t address               # of the first element; not to be believed where there is none
    bint readonly

# `source.<protocol>`, a dict; None where it has none. Runs the producer's code.
cdef dict request_interface(object source, str protocol)
# Check its fields but `data` and `stream`: DLPackError names the one that is wrong, DTypeError elements that kina does
# not store.
cdef DType read_claim(dict interface, str protocol, array_claim *claim)
# Its `data`, a pair of an address and whether it is read-only, of a claim that was read.
cdef int read_address(dict interface, str protocol, array_claim *claim) except -1
# The same error for whoever looks at more of it.
cdef object refuse_field(str protocol, str field, str message)
# An integer of it, no bool, within the bounds.
cdef object integer_of(object value, object low, object high, str protocol, str field)

# A tensor over the memory, which holds `owner` until the last use of it is over.
cdef Tensor tensor_of_claim(array_claim *claim, DType dtype, object owner, kina_dl_device device, kina_stream *stream,
                            uint64_t runtime, uint64_t domain)

# A host tensor over the memory of an object with `__array_interface__`; None where it has none.
cdef Tensor adopt_array_interface(object source)

# What `__cuda_array_interface__` needs of the session layer, which lives above this room: the native handle of the home
# stream, which may not be being captured. 0, or a detail code with the thread's record written.
ctypedef int (*home_stream_hook)(kina_storage *storage, intptr_t *out) noexcept nogil
cdef void set_home_stream_hook(home_stream_hook hook) noexcept

# On which device the memory of a `__cuda_array_interface__` is: the same layer tells.
ctypedef int (*array_locator)(dict interface) except -2
cdef void set_array_locator(array_locator locator) noexcept
cdef int cuda_array_ordinal(dict interface) except -2
