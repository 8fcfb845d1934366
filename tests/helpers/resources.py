"""Memory resources for tests: one in Python that watches over what it hands out, and one in C."""

from __future__ import annotations

import ctypes
import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

from helpers.compiler import compile_c

import kina
import kina.memory

__all__ = ["PythonResource", "c_resource"]

_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class PythonResource(kina.memory.MemoryResource):
    """Memory of the C library; knows what is out, and fails on a wrong address or size."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.asked = 0

    def _allocate(self, nbytes: int, stream: object) -> int:
        assert stream is None
        assert nbytes > 0
        address = _libc.aligned_alloc(256, -(-nbytes // 256) * 256)
        if address is None:
            raise MemoryError(f"{nbytes} bytes")
        self.live[address] = nbytes
        self.asked += 1
        return address

    def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
        assert stream is None
        assert self.live.pop(address) == nbytes
        _libc.free(address)


# A resource as a library in C brings its own: counts, and can be told to fail.
C_RESOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "kina_memory.h"
#include "kina_status.h"
#include "kina_tensor.h"

typedef struct { kina_resource resource; long live; long asked; int failing; } counting;
static long resources = 0;

static int allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    counting *mine = (counting *)self;
    (void)stream;
    __atomic_fetch_add(&mine->asked, 1, __ATOMIC_RELAXED);
    if (mine->failing || posix_memalign(out, 256, nbytes)) return KINA_OUT_OF_MEMORY;
    __atomic_fetch_add(&mine->live, (long)nbytes, __ATOMIC_RELAXED);
    return 0;
}
static void deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) {
    (void)stream;
    __atomic_fetch_sub(&((counting *)self)->live, (long)nbytes, __ATOMIC_RELAXED);
    free(data);
}
static void destroy(kina_handle *self) {
    if (((counting *)self)->live == 0) __atomic_fetch_sub(&resources, 1, __ATOMIC_RELAXED);
    free(self);
}
static kina_resource_vtable functions = {KINA_RESOURCE_VERSION, 0, "counting", allocate, deallocate, NULL, NULL};
static kina_resource_vtable newer = {KINA_RESOURCE_VERSION + 1, 0, "newer", allocate, deallocate, NULL, NULL};
static kina_resource_vtable partial = {KINA_RESOURCE_VERSION, 0, "partial", NULL, deallocate, NULL, NULL};

static void drop(PyObject *capsule) { kina_release(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule))); }

static PyObject *make(PyObject *self, PyObject *arguments) {
    const char *what, *name = KINA_RESOURCE_CAPSULE;
    counting *made = (counting *)calloc(1, sizeof(counting));
    (void)self;
    if (!PyArg_ParseTuple(arguments, "s", &what)) return NULL;
    kina_handle_init(&made->resource.handle, destroy);
    made->resource.vtable = &functions;
    made->resource.device_type = KINA_DEVICE_CPU;
    if (!strcmp(what, "newer")) made->resource.vtable = &newer;
    if (!strcmp(what, "partial")) made->resource.vtable = &partial;
    if (!strcmp(what, "without a table")) made->resource.vtable = NULL;
    if (!strcmp(what, "on the moon")) made->resource.device_type = 99;
    if (!strcmp(what, "on a GPU")) { made->resource.device_type = KINA_DEVICE_CUDA; made->resource.device_id = 1; }
    if (!strcmp(what, "pinned")) made->resource.device_type = KINA_DEVICE_CUDA_HOST;
    if (!strcmp(what, "misnamed")) name = "something_else";
    resources++;
    return PyCapsule_New(made, name, drop);
}
static PyObject *figures(PyObject *self, PyObject *capsule) {
    counting *mine = (counting *)PyCapsule_GetPointer(capsule, KINA_RESOURCE_CAPSULE);
    (void)self;
    return mine ? Py_BuildValue("(lll)", mine->live, mine->asked, (long)mine->resource.handle.references) : NULL;
}
static PyObject *fail(PyObject *self, PyObject *capsule) {
    (void)self;
    ((counting *)PyCapsule_GetPointer(capsule, KINA_RESOURCE_CAPSULE))->failing = 1;
    Py_RETURN_NONE;
}
static PyObject *count(PyObject *self, PyObject *unused) {
    (void)self; (void)unused;
    return PyLong_FromLong(resources);
}
/* Drops what a capsule named dltensor holds, on a thread that Python has never seen. */
static void *delete_managed(void *managed) {
    ((kina_dl_managed_tensor *)managed)->deleter((kina_dl_managed_tensor *)managed);
    return NULL;
}
static PyObject *consume_elsewhere(PyObject *self, PyObject *capsule) {
    void *managed = PyCapsule_GetPointer(capsule, "dltensor");
    pthread_t thread;
    (void)self;
    if (!managed || PyCapsule_SetName(capsule, "used_dltensor")) return NULL;
    if (pthread_create(&thread, NULL, delete_managed, managed)) return PyErr_NoMemory();
    pthread_join(thread, NULL); /* with the GIL held: a release that waits for it would hang */
    Py_RETURN_NONE;
}
/* The resource of the tensor in a capsule named dltensor, asked for a pair on such a thread. Gives the status. */
typedef struct { kina_resource *resource; size_t nbytes; int status; } pair;
static void *run_pair(void *argument) {
    pair *wanted = (pair *)argument;
    void *data = NULL;
    wanted->status = wanted->resource->vtable->allocate(wanted->resource, &data, wanted->nbytes, NULL);
    if (!wanted->status) wanted->resource->vtable->deallocate(wanted->resource, data, wanted->nbytes, NULL);
    return NULL;
}
static PyObject *pair_elsewhere(PyObject *self, PyObject *arguments) {
    PyObject *capsule;
    pair wanted;
    pthread_t thread;
    kina_dl_managed_tensor *managed;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "On", &capsule, (Py_ssize_t *)&wanted.nbytes)) return NULL;
    managed = (kina_dl_managed_tensor *)PyCapsule_GetPointer(capsule, "dltensor");
    if (!managed) return NULL;
    wanted.resource = ((kina_storage *)managed->manager_ctx)->resource;
    if (pthread_create(&thread, NULL, run_pair, &wanted)) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    pthread_join(thread, NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(wanted.status);
}
static PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, ""},
    {"figures", figures, METH_O, ""},
    {"fail", fail, METH_O, ""},
    {"count", count, METH_NOARGS, ""},
    {"pair_elsewhere", pair_elsewhere, METH_VARARGS, ""},
    {"consume_elsewhere", consume_elsewhere, METH_O, ""},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "c_resource", "", -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_c_resource(void) { return PyModule_Create(&module); }
"""


def c_resource(folder: Path) -> ModuleType:
    """The module that makes such resources, compiled in `folder`."""
    source = folder / "c_resource.c"
    source.write_text(C_RESOURCE)
    library = folder / f"c_resource{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    compile_c(source, library, "-std=c11", "-D_DEFAULT_SOURCE", "-shared", "-fPIC", f"-isystem{include}", "-pthread")
    spec = importlib.util.spec_from_file_location("c_resource", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
