from libc.stdint cimport uint64_t

from kina._core.storage cimport kina_storage
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.handles cimport kina_runtime

# Who may use memory outside its home stream. All from any thread, several at once, by whoever has a reference to the
# storage; notes never fail: what cannot be noted counts as nobody known.
cdef enum foreign_user:
    FOREIGN_USE_LEGACY = 1      # the legacy stream
    FOREIGN_USE_UNKNOWN = 2     # a stream that nobody can be asked about later
    FOREIGN_USE_HOST = 4        # host code, which may hand the memory to the device in its turn

cdef void note_use(kina_storage *storage, foreign_user who) noexcept nogil
# The stream of a Runtime of the device, which is held until the memory is given back.
cdef void note_runtime(kina_storage *storage, kina_runtime *runtime) noexcept nogil
# A storage that was adopted of another, which is its owner: its Runtime leases what it uses, so that only the host has
# to ask about it.
cdef void note_adoption(kina_storage *storage) noexcept nogil
# A stream that lives as long as the process.
cdef void note_immortal(kina_storage *storage, CUstream native) noexcept nogil
# Nobody new: but of adopted memory, whose owner has it back only after the home stream is past all that it has then.
cdef void note_export(kina_storage *storage) noexcept nogil

# Is the device past what its home stream, and whoever was noted, had so far? 0, or DLPackError or what else failed.
cdef int uses_are_over(kina_storage *storage, const char *operation) noexcept nogil
