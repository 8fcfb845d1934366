# cython: annotation_typing=False
"""Completions: witnesses of what a session had enqueued."""

cimport cython

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport check, raise_last
from kina._core.storage cimport kina_release, kina_retain
from kina.cuda.context cimport device_check
from kina.cuda.event cimport seal_query, seal_wait
from kina.cuda.handles cimport kina_add, kina_load, kina_runtime, kina_seal

__all__ = ["Completion"]


@cython.no_gc  # nothing it refers to can refer back
cdef class Completion:
    """Completion()

    A witness of everything its session had enqueued when :meth:`CudaSession.completion` made it. Usable from any
    thread, after its session and its Runtime are gone too.
    """

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        with nogil:
            kina_release(self._seal)
            kina_release(self._runtime)

    def done(self) -> bool:
        """Has the device finished? Asks the driver (1.3 us) until it once says yes; never waits.

        Raises
        ------
        SynchronizeError
            The work, or work before it, failed.
        """
        cdef int complete
        if kina_load(&self._seal.complete):
            return True
        check(device_check(self._seal.device, b"done"))
        kina_add(&self._runtime.counters.event_queries, 1)
        with nogil:
            complete = seal_query(self._seal)
        if complete < 0:
            raise_last()
        return complete == 1

    def wait(self) -> None:
        """Wait on the host until the device has finished (counted in ``host_waits``).

        Raises
        ------
        SynchronizeError
            The work, or work before it, failed.
        """
        cdef int status
        if kina_load(&self._seal.complete):
            return
        check(device_check(self._seal.device, b"wait"))
        kina_add(&self._runtime.counters.host_waits, 1)
        with nogil:
            status = seal_wait(self._seal, b"wait")
        check(status)

    def __reduce__(self):
        raise TypeError("a Completion cannot be pickled or copied")


cdef Completion make_completion(kina_runtime *runtime, kina_seal *recorded):
    cdef Completion witness
    begin_construction()
    try:
        witness = Completion.__new__(Completion)
    finally:
        end_construction()
    witness._seal = recorded
    witness._runtime = runtime
    kina_retain(runtime)
    return witness
