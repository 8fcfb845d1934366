"""The C side of a memory resource written in Python: it asks its face, where Python can be asked."""

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_WriteUnraisable
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport strncpy

from kina._core.status cimport KINA_UNAVAILABLE, fail, fail_with
from kina._core.storage cimport (
    KINA_RESOURCE_PYTHON,
    KINA_RESOURCE_VERSION,
    holds_gil,
    interpreter_is_finalizing,
    kina_deferred,
    kina_dl_device,
    kina_exception,
    kina_exception_restore,
    kina_exception_save,
    kina_handle,
    kina_handle_init,
    kina_release,
    kina_resource,
    kina_resource_vtable,
    kina_retain,
    kina_stream,
    run_with_gil_later,
)

from kina.errors import ArgumentError

__all__ = []

cdef stream_wrapper wrap_stream = NULL


cdef void set_stream_wrapper(stream_wrapper wrapper) noexcept:
    global wrap_stream
    wrap_stream = wrapper


cdef extern from "Python.h":
    # Without Cython's reading of NULL as an exception to raise.
    PyObject *call_method "PyObject_CallMethodObjArgs"(object self, object name, ...) noexcept
    void Py_XDECREF(PyObject *object) noexcept


cdef enum:
    ALIGNMENT = 256


ctypedef struct python_resource:
    kina_resource base
    PyObject *face                  # borrowed; NULL once it is gone, touched under the GIL only
    kina_resource_vtable vtable
    char name[64]


ctypedef struct deferred_deallocation:
    kina_deferred deferred
    python_resource *resource       # owned
    void *data
    size_t nbytes
    kina_stream *stream             # owned


cdef object stream_for_python(python_resource *self, kina_stream *stream):
    """What a resource in Python is told of a stream: nothing if it has no stream order."""
    if stream == NULL or not self.vtable.supports_streams or wrap_stream == NULL:
        return None
    return wrap_stream(stream)


cdef int allocate_in_python(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil:
    if interpreter_is_finalizing() and not holds_gil():
        return fail(KINA_UNAVAILABLE, b"allocate", b"the interpreter is going: nothing in Python can be asked any more")
    with gil:
        return ask_python(<python_resource *> self, out, nbytes, stream)


cdef int ask_python(python_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept:
    if self.face == NULL:
        return fail(KINA_UNAVAILABLE, b"allocate", b"the memory resource in Python that should serve this is gone")
    face = <object> self.face
    try:
        ordering = stream_for_python(self, stream)
        address = face._allocate(nbytes, ordering)
        if type(address) is not int or not 0 < address < 2**64:
            raise ArgumentError(f"{type(face).__name__}._allocate gave {address!r}: the address is an int beyond 0",
                                operation="allocate")
        if address % ALIGNMENT != 0:
            face._deallocate(address, nbytes, ordering)
            raise ArgumentError(f"{type(face).__name__}._allocate gave {address:#x}, which is not aligned to "
                                f"{ALIGNMENT} bytes", operation="allocate")
        out[0] = <void *> <uintptr_t> address
    except BaseException as error:
        return fail_with(error)
    return 0


cdef void deallocate_in_python(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil:
    cdef deferred_deallocation *node
    if interpreter_is_finalizing():
        return  # leaked on purpose: the interpreter is going or gone
    if holds_gil():
        with gil:
            tell_python(<python_resource *> self, data, nbytes, stream)
        return
    node = <deferred_deallocation *> calloc(1, sizeof(deferred_deallocation))
    if node == NULL:
        return  # leaked: nothing else is safe here
    node.deferred.run = tell_python_now
    node.resource = <python_resource *> self
    node.data = data
    node.nbytes = nbytes
    node.stream = stream
    kina_retain(self)
    kina_retain(stream)
    run_with_gil_later(&node.deferred)


cdef void tell_python_now(kina_deferred *deferred) noexcept:
    cdef deferred_deallocation *node = <deferred_deallocation *> deferred
    tell_python(node.resource, node.data, node.nbytes, node.stream)
    kina_release(node.resource)
    kina_release(node.stream)
    free(node)


cdef void tell_python(python_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept:
    cdef kina_exception under_way
    cdef PyObject *result = NULL
    cdef object address, size, ordering
    if self.face == NULL:
        return  # leaked: its resource is gone, which only those can bring about who keep its memory without it
    face = <object> self.face
    kina_exception_save(&under_way)
    try:
        address, size, ordering = <uintptr_t> data, nbytes, stream_for_python(self, stream)
        result = call_method(face, "_deallocate", <PyObject *> address, <PyObject *> size, <PyObject *> ordering, NULL)
    except MemoryError:
        pass
    if result == NULL:
        PyErr_WriteUnraisable(face)
    Py_XDECREF(result)
    kina_exception_restore(&under_way)


cdef void destroy_python_resource(kina_handle *self) noexcept nogil:
    kina_release((<kina_resource *> self).upstream)
    free(self)


cdef kina_resource *python_resource_new(object face, kina_dl_device device, bint supports_streams,
                                        kina_resource *upstream, PyObject ***named) except NULL:
    cdef bytes name = type(face).__name__.encode("utf-8", "replace")
    cdef python_resource *made = <python_resource *> calloc(1, sizeof(python_resource))
    if made == NULL:
        raise MemoryError
    strncpy(made.name, PyBytes_AS_STRING(name), sizeof(made.name) - 1)
    made.vtable.version = KINA_RESOURCE_VERSION
    made.vtable.supports_streams = supports_streams
    made.vtable.name = made.name
    made.vtable.allocate = allocate_in_python
    made.vtable.deallocate = deallocate_in_python
    kina_handle_init(&made.base.handle, destroy_python_resource)
    kina_retain(upstream)
    made.base.vtable = &made.vtable
    made.base.upstream = upstream
    made.base.device_type = device.device_type
    made.base.device_id = device.device_id
    made.base.flags = KINA_RESOURCE_PYTHON
    made.face = <PyObject *> face
    named[0] = &made.face
    return &made.base
