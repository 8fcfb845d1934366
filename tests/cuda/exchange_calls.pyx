# cython: language_level=3
"""What kina._core.dlpack offers to whoever hands tensors out without the GIL, called in that way."""

from libc.stdint cimport int64_t, uintptr_t

from kina._core.dlpack cimport (
    KINA_CONSUMER_WORK_STREAM,
    check_host_access,
    export_work_stream,
    order_export,
)
from kina._core.status cimport check
from kina._core.storage cimport kina_release, kina_retain, kina_storage
from kina._core.tensor cimport Tensor
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.foreign_order cimport order_import
from kina.cuda.handles cimport kina_runtime
from kina.cuda.runtime cimport Runtime

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t *thread, void *attributes, void *(*start)(void *) noexcept nogil, void *argument)
    int pthread_join(pthread_t thread, void **result)

cdef enum:
    THREADS = 4
    MOST_STREAMS = 64


ctypedef struct exporter:
    kina_storage *storage
    int64_t streams[MOST_STREAMS]
    int stream_count
    int rounds
    int status


cdef void *export_often(void *argument) noexcept nogil:
    """A thread that Python has never seen; the last one to end has the last reference."""
    cdef exporter *mine = <exporter *> argument
    cdef int i, status
    for i in range(mine.rounds):
        status = order_export(mine.storage, mine.streams[i % mine.stream_count])
        if status != 0:
            mine.status = status
    kina_release(mine.storage)
    return NULL


def export_from_threads(Tensor tensor not None, list streams, int rounds):
    """Several threads export the same memory to the same streams; statuses."""
    cdef exporter each[THREADS]
    cdef pthread_t threads[THREADS]
    cdef int i, k
    assert 0 < len(streams) <= MOST_STREAMS
    for i in range(THREADS):
        each[i].storage = tensor.c.storage
        kina_retain(each[i].storage)
        each[i].stream_count = len(streams)
        each[i].rounds = rounds
        each[i].status = 0
        for k in range(each[i].stream_count):
            each[i].streams[k] = streams[(i + k) % len(streams)]
    with nogil:
        for i in range(THREADS):
            pthread_create(&threads[i], NULL, export_often, &each[i])
        for i in range(THREADS):
            pthread_join(threads[i], NULL)
    return [each[i].status for i in range(THREADS)]


def export_to(Tensor tensor not None, int64_t stream):
    cdef kina_storage *storage = tensor.c.storage
    cdef int status
    with nogil:
        status = order_export(storage, stream)
    check(status)


def export_to_the_work_stream(Tensor tensor not None):
    export_to(tensor, KINA_CONSUMER_WORK_STREAM)


def work_stream(int ordinal):
    cdef void *found = NULL
    cdef int status
    with nogil:
        status = export_work_stream(ordinal, &found)
    check(status)
    return <uintptr_t> found


def host_access(Tensor tensor not None):
    cdef kina_storage *storage = tensor.c.storage
    cdef int status
    with nogil:
        status = check_host_access(storage)
    check(status)


def import_from(Runtime runtime not None, uintptr_t stream):
    cdef kina_runtime *c = runtime.c
    cdef int status
    with nogil:
        status = order_import(c, <CUstream> <void *> stream, b"import")
    check(status)
