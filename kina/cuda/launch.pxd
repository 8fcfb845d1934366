# What a launch needs once its configuration has been checked, and the way to launch without Python.
cimport cython
from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject

from kina._core.storage cimport kina_storage
from kina.cuda.config cimport LaunchConfig
from kina.cuda.cudatypes cimport CUfunction, CUlaunchAttribute, CUlaunchConfig
from kina.cuda.entry cimport LAUNCH_ATTRIBUTES, Entry
from kina.cuda.handles cimport kina_module, kina_runtime
from kina.cuda.parameters cimport Parameters

# All that a launch of one function with one configuration needs; nothing of it changes. It lives in its PreparedLaunch,
# and no longer than that.
cdef struct kina_prepared:
    kina_runtime *runtime           # borrowed, as all that follows
    kina_module *module
    CUfunction function
    size_t nbytes                   # of the parameter buffer
    const char *name                # of the entry
    bint extended                   # `config` has attributes
    CUlaunchConfig config
    CUlaunchAttribute attributes[LAUNCH_ATTRIBUTES]


@cython.final
cdef class PreparedLaunch:
    cdef readonly LaunchConfig config
    cdef Entry entry
    cdef Parameters parameters
    cdef bytes symbol               # what c.name points into
    cdef kina_prepared c

# The configuration is checked, here, for `operation`; what the driver refuses later it refuses at the launch.
cdef PreparedLaunch make_prepared(Entry entry, Parameters parameters, LaunchConfig config, const char *operation)
# One launch, an argument per parameter, in a raw block of its Runtime. 0, or the driver refused it and the record says
# why.
cdef int launch_arguments(PreparedLaunch prepared, PyObject **arguments, Py_ssize_t count) except -1
# The class has the method of this definition, a PyMethodDef, and this text in place of the one of the same name that
# its body defines. Both must stay.
cdef int install_method(type owner, void *definition, const char *text) except -1
# What such a definition says of itself, as the method in the body does: its signature, where `inspect` finds it, and
# its docstring.
cdef bytes method_text(object method)

# ---------------------------------------------------------------------------------------------- for other modules

# The struct of a PreparedLaunch, valid as long as that object; TypeError. Needs the GIL.
cdef kina_prepared *prepared_of(object prepared) except NULL

# Enqueue one launch on the session's stream, without the GIL. 0, or a detail code of kina_status.h, and the calling
# thread's record says why (check() and raise_last() of kina._core.status raise it). Nothing waits, and nothing is
# enqueued on failure. No call of Python; no allocation, event or query, but what one launch in hundreds does for its
# leases, and where the stream was made elsewhere, or is being captured, the question whether it is.
#
# `buffer` has the parameters, `prepared.nbytes` in all, each at its offset in `function.parameters`, gaps zeroed; NULL
# for a kernel without. It is copied before the call returns. `storages` are those of the tensors among them
# (`tensor.c.storage` of a kina._core.tensor.Tensor), `count` of them: they are leased where stream order does not
# protect them. `storages` may be NULL for count 0.
#
# Checked: the Runtime is open in the calling thread, with a raw block, its device is usable, and the storages are of
# this Runtime (KINA_SESSION_CLOSED, KINA_WRONG_THREAD, KINA_RUNTIME_POISONED, KINA_UNAVAILABLE after a fork,
# KINA_FOREIGN_RUNTIME).
#
# Safety. The caller keeps the PreparedLaunch, the session and the raw block until the call returns: a `with` block
# around it does. What the buffer holds is not looked at: types, ranges, alignment, writability, borrows and overlap are
# the caller's to keep right, as the kernel expects them and Function.launch would demand them. Memory that the
# kernel uses and that is not among `storages` must live until the work is complete, unless it is a tensor that the
# session made, and nobody captures the stream. Otherwise as PreparedLaunch.launch.
cdef int launch_prepared(kina_prepared *prepared, const void *buffer, kina_storage **storages,
                         int count) noexcept nogil
