# cython: language_level=3
"""Launches without the GIL, as another project's Cython code makes them; tests/cuda/test_nogil_launch.py."""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from kina._core.status cimport check
from kina._core.storage cimport kina_storage, kina_tensor_address
from kina._core.tensor cimport Tensor
from kina.cuda.launch cimport kina_prepared, launch_prepared, prepared_of


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t *thread, void *attributes, void *(*run)(void *) noexcept nogil,
                       void *argument) noexcept
    int pthread_join(pthread_t thread, void **result) noexcept


cdef struct saxpy_arguments:
    uint64_t y
    uint64_t x
    float a
    uint32_t n


cdef struct attempt:
    kina_prepared *prepared
    int status


cdef uint64_t address_of(Tensor tensor):
    return <uint64_t> <uintptr_t> kina_tensor_address(&tensor.c)


def saxpy(prepared, Tensor y not None, Tensor x not None, float a, uint32_t n, int launches=1):
    """y += a * x, so many times; what was refused is raised."""
    cdef kina_prepared *c = prepared_of(prepared)
    cdef saxpy_arguments arguments
    cdef kina_storage *storages[2]
    cdef int status = 0
    cdef int _launch
    arguments.y = address_of(y)
    arguments.x = address_of(x)
    arguments.a = a
    arguments.n = n
    assert c.nbytes == sizeof(arguments)
    storages[0] = y.c.storage
    storages[1] = x.c.storage
    with nogil:
        for _launch in range(launches):
            status = launch_prepared(c, &arguments, storages, 2)
            if status != 0:
                break
    check(status)


def nothing(prepared):
    """A kernel without parameters."""
    cdef kina_prepared *c = prepared_of(prepared)
    cdef int status
    with nogil:
        status = launch_prepared(c, NULL, NULL, 0)
    check(status)


cdef void *attempt_launch(void *given) noexcept nogil:
    cdef attempt *one = <attempt *> given
    one.status = launch_prepared(one.prepared, NULL, NULL, 0)
    return NULL


def from_a_bare_thread(prepared):
    """The status of a launch in a thread that Python has never seen."""
    cdef attempt one
    cdef pthread_t thread
    one.prepared = prepared_of(prepared)
    one.status = -1
    with nogil:
        if pthread_create(&thread, NULL, attempt_launch, &one) == 0:
            pthread_join(thread, NULL)
    return one.status
