/* Two libraries with tensors that lend memory by DLPack's C exchange table, and say of it whatever a test wants. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kina_tensor.h"

enum { LIBRARIES = 3, AXES = 8 };

typedef struct {
    PyObject_HEAD kina_dl_tensor tensor;
    int64_t shape[AXES], strides[AXES];
} Lent;

/* Of each library: what it works on, what it runs when it is asked, and how often it was. */
static struct {
    void *stream;
    PyObject *on_borrow, *on_stream;
    long borrows, streams;
} libraries[LIBRARIES];
static long alive;

static int run(PyObject *callable, PyObject *argument) {
    PyObject *result;
    if (!callable || callable == Py_None) return 0;
    Py_INCREF(callable);
    result = PyObject_CallOneArg(callable, argument);
    Py_DECREF(callable);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int borrow(int library, void *object, kina_dl_tensor *out) {
    libraries[library].borrows += 1;
    if (run(libraries[library].on_borrow, object) != 0) return -1;
    *out = ((Lent *)object)->tensor;
    return 0;
}

static int current(int library, void **out) {
    libraries[library].streams += 1;
    if (run(libraries[library].on_stream, Py_None) != 0) return -1;
    *out = libraries[library].stream;
    return 0;
}

static int borrow_0(void *object, kina_dl_tensor *out) { return borrow(0, object, out); }
static int borrow_1(void *object, kina_dl_tensor *out) { return borrow(1, object, out); }
static int stream_0(int32_t type, int32_t device, void **out) { return (void)type, (void)device, current(0, out); }
static int stream_1(int32_t type, int32_t device, void **out) { return (void)type, (void)device, current(1, out); }
static int owned(void *object, kina_dl_managed_tensor_versioned **out) {
    (void)object, (void)out;
    PyErr_SetString(PyExc_NotImplementedError, "it lends only");
    return -1;
}

static kina_dl_exchange_api tables[LIBRARIES] = {
    {{{1, 3}, NULL}, NULL, owned, NULL, borrow_0, stream_0},
    {{{1, 3}, NULL}, NULL, owned, NULL, borrow_1, stream_1},
    {{{1, 3}, NULL}, NULL, owned, NULL, NULL, stream_1},
};

static int take_axes(PyObject *given, int64_t *axes, int *count) {
    PyObject *items = PySequence_Fast(given, "axes are a sequence");
    Py_ssize_t i;
    if (!items) return -1;
    if (PySequence_Fast_GET_SIZE(items) > AXES) {
        Py_DECREF(items);
        PyErr_SetString(PyExc_ValueError, "too many axes for a test");
        return -1;
    }
    *count = (int)PySequence_Fast_GET_SIZE(items);
    for (i = 0; i < *count; ++i) axes[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items, i));
    Py_DECREF(items);
    return PyErr_Occurred() ? -1 : 0;
}

static int lent_init(PyObject *object, PyObject *arguments, PyObject *names) {
    static char *words[] = {"address", "shape", "strides", "code",        "bits", "lanes",
                            "device",  "id",    "ndim",    "byte_offset", NULL};
    Lent *self = (Lent *)object;
    kina_dl_tensor *tensor = &self->tensor;
    PyObject *shape = Py_None, *strides = Py_None;
    unsigned long long address = 0, byte_offset = 0;
    int code = 2, bits = 32, lanes = 1, device = KINA_DEVICE_CUDA, id = 0, ndim = -1, count = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "K|OOiiiiiiK", words, &address, &shape, &strides, &code, &bits,
                                     &lanes, &device, &id, &ndim, &byte_offset))
        return -1;
    if (shape != Py_None && take_axes(shape, self->shape, &count) != 0) return -1;
    tensor->data = (void *)(uintptr_t)address;
    tensor->shape = shape == Py_None ? NULL : self->shape;
    tensor->ndim = ndim == -1 ? count : ndim;
    if (strides != Py_None && take_axes(strides, self->strides, &count) != 0) return -1;
    tensor->strides = strides == Py_None ? NULL : self->strides;
    tensor->dtype.code = (uint8_t)code;
    tensor->dtype.bits = (uint8_t)bits;
    tensor->dtype.lanes = (uint16_t)lanes;
    tensor->device.device_type = device;
    tensor->device.device_id = id;
    tensor->byte_offset = byte_offset;
    return 0;
}

static PyObject *lent_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)arguments, (void)names;
    alive += 1;
    return type->tp_alloc(type, 0);
}

static void lent_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    alive -= 1;
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *works_on(PyObject *module, PyObject *arguments) {
    unsigned long long stream;
    int library = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "K|i", &stream, &library)) return NULL;
    libraries[library].stream = (void *)(uintptr_t)stream;
    Py_RETURN_NONE;
}

static PyObject *runs(PyObject *module, PyObject *arguments) {
    PyObject *on_borrow, *on_stream;
    int library = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO|i", &on_borrow, &on_stream, &library)) return NULL;
    Py_INCREF(on_borrow), Py_INCREF(on_stream);
    Py_XSETREF(libraries[library].on_borrow, on_borrow);
    Py_XSETREF(libraries[library].on_stream, on_stream);
    Py_RETURN_NONE;
}

static PyObject *asked(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_BuildValue("((ll)(ll))", libraries[0].borrows, libraries[0].streams, libraries[1].borrows,
                         libraries[1].streams);
}

static PyObject *count(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLong(alive);
}

static PyMethodDef functions[] = {
    {"works_on", works_on, METH_VARARGS, "works_on(stream, library=0): the stream that a library tells"},
    {"runs", runs, METH_VARARGS, "runs(on_borrow, on_stream, library=0): what a library calls when it is asked"},
    {"asked", asked, METH_NOARGS, "(borrows, streams) of the libraries 0 and 1 so far"},
    {"alive", count, METH_NOARGS, "How many tensors there are."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {{Py_tp_new, lent_new}, {Py_tp_init, lent_init}, {Py_tp_dealloc, lent_dealloc}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "lender", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_lender(void) {
    static const char *names[LIBRARIES] = {"lender.Lent", "lender.Other", "lender.Owning"};
    PyObject *module = PyModule_Create(&definition);
    int i;
    for (i = 0; module && i < LIBRARIES; ++i) {
        PyType_Spec spec = {names[i], sizeof(Lent), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
        PyObject *type = PyType_FromSpec(&spec);
        PyObject *capsule = PyCapsule_New(&tables[i], KINA_DLPACK_EXCHANGE_CAPSULE, NULL);
        if (!type || !capsule || PyObject_SetAttrString(type, "__dlpack_c_exchange_api__", capsule) != 0 ||
            PyModule_AddObject(module, names[i] + sizeof("lender.") - 1, type) != 0)
            Py_CLEAR(module);
        Py_XDECREF(capsule);
    }
    return module;
}
