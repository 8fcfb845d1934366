# cython: annotation_typing=False
"""Objects that raw blocks of one Runtime share: handles of vendor libraries, plans, tables on the device."""

from collections import OrderedDict

cimport cython
from cpython.ref cimport Py_INCREF
from libc.string cimport memset

from kina._core.status cimport check, fail_out_of_memory, kina_memory_figures
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    kina_dl_device,
    kina_release,
    kina_retain,
    kina_storage,
    release_python_later,
    storage_adopt,
)
from kina.cuda.handles cimport kina_runtime
from kina.cuda.retire cimport lease

from kina.errors import ArgumentError

__all__ = []

cdef enum:
    MOST_ENTRIES = 32

cdef size_t MOST_BYTES = 1 << 30  # as they were declared


# What it keeps is leased before it goes. The collector of cycles would end it at once, so it does not get to see it: an
# object that keeps its own Runtime is kept until that is closed.
@cython.no_gc
cdef class ObjectCache:
    """ObjectCache()"""

    def __cinit__(self):
        self.entries = OrderedDict()
        self.making = set()

    def __dealloc__(self):
        if self.runtime != NULL:
            self.empty()
            with nogil:
                kina_release(self.runtime)

    cdef object get(self, object type_, object init, size_t nbytes, bint pinned):
        entry = self.entries.get(type_)
        if entry is not None:
            self.entries.move_to_end(type_)
            return entry[0]
        if type_ in self.making:
            raise ArgumentError(f"resource: the init of {type_.__name__} asks for a {type_.__name__} itself",
                                operation="resource")
        self.make_room(nbytes)
        self.making.add(type_)
        try:
            made = init()
        finally:
            self.making.discard(type_)
        if not isinstance(made, type_):
            raise ArgumentError(f"resource: init gave a {type(made).__name__}, not a {type_.__name__}",
                                operation="resource")
        self.make_room(nbytes)  # init may have asked for others
        self.entries[type_] = (made, nbytes, pinned)
        self.nbytes += nbytes
        return made

    cdef int make_room(self, size_t nbytes) except -1:
        """Refused before anything goes: pinned objects stay."""
        cdef kina_memory_figures figures
        cdef size_t pinned_bytes = sum(entry[1] for entry in self.entries.values() if entry[2])
        cdef Py_ssize_t pinned_count = sum(1 for entry in self.entries.values() if entry[2])
        if nbytes > MOST_BYTES or pinned_bytes > MOST_BYTES - nbytes or pinned_count >= MOST_ENTRIES:
            memset(&figures, 0xff, sizeof(figures))  # -1: not known
            figures.requested = <long long> nbytes
            figures.live = <long long> pinned_bytes
            figures.limit = <long long> MOST_BYTES
            check(fail_out_of_memory(
                b"resource", f"{nbytes} bytes and an entry are asked for: {pinned_count} of {MOST_ENTRIES} entries and "
                f"{pinned_bytes} of {MOST_BYTES} bytes are pinned".encode(), &figures))
        for type_ in list(self.entries):
            if len(self.entries) < MOST_ENTRIES and self.nbytes <= MOST_BYTES - nbytes:
                break
            if not self.entries[type_][2]:
                self.drop(type_)
        return 0

    cdef int drop(self, object type_) except -1:
        kept, nbytes, _pinned = self.entries[type_]
        self.retire(kept)
        del self.entries[type_]
        self.nbytes -= nbytes
        return 0

    def clear(self) -> int:
        """Let all of it go once the device is past what was enqueued; how many there were."""
        return self.empty()

    cdef Py_ssize_t empty(self) except -1:
        cdef Py_ssize_t count = len(self.entries)
        for type_ in list(self.entries):
            self.drop(type_)
        return count

    cdef int retire(self, object kept) except -1:
        cdef kina_storage *holder = NULL
        cdef kina_dl_device device
        cdef int status
        device.device_type = KINA_DEVICE_CPU
        device.device_id = 0
        check(storage_adopt(&holder, NULL, 0, device, NULL, self.runtime.stream.runtime, self.runtime.stream.domain, 0,
                            release_python_later, <void *> kept))
        Py_INCREF(kept)
        status = lease(self.runtime, holder, True)
        kina_release(holder)
        check(status)
        return 0


cdef ObjectCache make_object_cache(kina_runtime *runtime):
    cdef ObjectCache made = ObjectCache.__new__(ObjectCache)
    kina_retain(runtime)
    made.runtime = runtime
    return made
