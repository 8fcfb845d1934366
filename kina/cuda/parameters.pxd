from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t

from kina._core.tensor cimport Tensor
from kina.cuda.borrowed cimport kina_borrowed
from kina.cuda.handles cimport kina_raw_block, kina_ref, kina_runtime
from kina.cuda.signature cimport Signature

cdef enum:
    MAX_PARAMETER_BYTES = 32764     # of any kernel, by the driver's documentation


# One parameter of a signature, and where it goes.
cdef struct kina_slot:
    void *dtype         # of a tensor's elements: its DType, which lives as long as the process
    uint64_t looked_at  # flags of a tensor: of these KINA_TENSOR_C_CONTIGUOUS is set, and no other
    uint64_t low        # span of the tensor of the launch being packed: scratch, under the GIL
    uint64_t high
    size_t offset       # in the parameter buffer
    int position        # of its argument
    int nbytes
    char kind           # ParameterKind
    char letter         # of scalars with a short way: f 32-bit float, d double, i signed, u unsigned, 0 none
    bint writable


# Not final: what a launch seldom calls stays out of line that way.
cdef class Parameters:
    # What an entry takes, as the driver reports it and its author declares it.
    cdef kina_slot *slots           # with a signature: the scalars, then what is written, then what is read
    cdef int numbers                # of them are scalars
    cdef int written                # are scalars, or written
    cdef str name                   # of the entry, for messages
    cdef Signature signature        # None: only sizes are known
    cdef kina_runtime *runtime      # owned reference
    cdef int count
    cdef size_t *offsets
    cdef size_t *sizes
    cdef size_t nbytes              # of the parameter buffer
    cdef bint padded                # it has gaps between parameters, to be zeroed
    cdef int capacity
    # One more, as the driver reports it.
    cdef int add(self, size_t offset, size_t size) except -1
    # The signature fits what was added, and what PTX declares (None: not known).
    cdef int match(self, object declared) except -1
    cdef int plan(self) except -1
    cdef PyObject *borrowed_tensor(self, kina_slot *slot, PyObject *argument, kina_ref **own) except NULL
    cdef int pack_number(self, kina_slot *slot, PyObject *argument, char *target) except -1
    cdef int pack_struct(self, kina_slot *slot, object argument, char *target) except -1
    cdef int pack_foreign(self, PyObject **arguments, char *buffer) except -1
    cdef int pack_borrowed(self, kina_slot *slot, kina_borrowed *lent, kina_raw_block *block, char *target) except -1
    cdef int pack_loose(self, PyObject **arguments, char *buffer) except -1
    cdef int pack_untyped(self, int i, object argument, char *target) except -1
    cdef Tensor tensor_of(self, int i, object workspace)
    cdef int refuse_count(self, Py_ssize_t count) except -1
    cdef int refuse_aliases(self, kina_slot *one, kina_slot *other) except -1
    cdef int refuse_tensor(self, kina_slot *slot, PyObject *argument) except -1

cdef Parameters make_parameters(kina_runtime *runtime, str name, Signature signature)
# Every argument, checked and converted, at its place in the buffer; what must be is leased. The raw block of the
# Runtime was looked at before. No code but kina's runs after the last look at it, which may be one that this takes.
cdef int pack_arguments(Parameters parameters, PyObject **arguments, Py_ssize_t count, char *buffer) except -1
