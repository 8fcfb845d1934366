"""Cheap with statements over cdef classes.

Source: CPython before 3.14 binds `__enter__` and `__exit__` anew for every with statement (`_PyObject_LookupSpecial` in
`BEFORE_WITH`), and a bound method of C is an object of the garbage collector: together a third of what entering and
leaving a session costs. Here they are bound in objects that are kept and used again.
"""

from cpython.object cimport PyTypeObject

__all__ = []


cdef extern from *:
    """
    typedef int (*kina_scope_enter)(PyObject *scope);
    typedef int (*kina_scope_leave)(PyObject *scope, int unwinding);

    /* What stands in the class as __enter__ or __exit__; immortal. */
    typedef struct {
        PyObject_HEAD
        PyObject *general; /* the class's own method, which the class still shows; owned */
        kina_scope_enter enter;
        kina_scope_leave leave; /* one of the two is NULL */
    } kina_scope_method;

    /* The same, bound to an object. */
    typedef struct {
        PyObject_HEAD
        vectorcallfunc call;
        PyObject *scope;           /* owned */
        kina_scope_method *method; /* borrowed: immortal */
    } kina_bound_scope;

    #define KINA_KEPT_SCOPES 16
    static kina_bound_scope *kina_kept_scopes[KINA_KEPT_SCOPES]; /* under the GIL */
    static int kina_kept_scope_count = 0;

    static int kina_scope_plain(size_t count, PyObject *names, Py_ssize_t wanted, const char *name) {
        if (PyVectorcall_NARGS(count) == wanted && !(names && PyTuple_GET_SIZE(names))) return 1;
        PyErr_Format(PyExc_TypeError, "%s takes %zd positional arguments and no other", name, wanted);
        return 0;
    }

    static PyObject *kina_call_enter(PyObject *bound, PyObject *const *arguments, size_t count, PyObject *names) {
        PyObject *scope = ((kina_bound_scope *)bound)->scope;
        (void)arguments;
        if (!kina_scope_plain(count, names, 0, "__enter__")) return NULL;
        if (((kina_bound_scope *)bound)->method->enter(scope) < 0) return NULL;
        return Py_NewRef(scope);
    }

    static PyObject *kina_call_leave(PyObject *bound, PyObject *const *arguments, size_t count, PyObject *names) {
        if (!kina_scope_plain(count, names, 3, "__exit__")) return NULL;
        if (((kina_bound_scope *)bound)->method->leave(((kina_bound_scope *)bound)->scope, arguments[0] != Py_None) < 0)
            return NULL;
        Py_RETURN_NONE;
    }

    static void kina_bound_scope_dealloc(PyObject *bound) {
        PyObject *scope = ((kina_bound_scope *)bound)->scope;
        if (kina_kept_scope_count < KINA_KEPT_SCOPES)
            kina_kept_scopes[kina_kept_scope_count++] = (kina_bound_scope *)bound;
        else
            PyObject_Free(bound);
        Py_DECREF(scope); /* last: it may run anybody's code */
    }

    static PyTypeObject kina_bound_scope_type = {
        PyVarObject_HEAD_INIT(NULL, 0)
        .tp_name = "kina._core.scope.bound_method",
        .tp_basicsize = sizeof(kina_bound_scope),
        .tp_dealloc = kina_bound_scope_dealloc,
        .tp_vectorcall_offset = offsetof(kina_bound_scope, call),
        .tp_call = PyVectorcall_Call,
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    };

    static PyObject *kina_scope_bind(PyObject *descriptor, PyObject *scope, PyObject *owner) {
        kina_scope_method *method = (kina_scope_method *)descriptor;
        kina_bound_scope *bound;
        (void)owner;
        if (!scope || scope == Py_None) return Py_NewRef(method->general);
        bound = kina_kept_scope_count ? kina_kept_scopes[--kina_kept_scope_count]
                                      : (kina_bound_scope *)PyObject_Malloc(sizeof(kina_bound_scope));
        if (!bound) return PyErr_NoMemory();
        PyObject_Init((PyObject *)bound, &kina_bound_scope_type);
        bound->call = method->enter ? kina_call_enter : kina_call_leave;
        bound->scope = Py_NewRef(scope);
        bound->method = method;
        return (PyObject *)bound;
    }

    static PyTypeObject kina_scope_method_type = {
        PyVarObject_HEAD_INIT(NULL, 0)
        .tp_name = "kina._core.scope.method",
        .tp_basicsize = sizeof(kina_scope_method),
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .tp_descr_get = kina_scope_bind,
    };

    static int kina_scope_put(PyTypeObject *owner, const char *name, kina_scope_enter enter, kina_scope_leave leave) {
        PyObject *general = PyDict_GetItemString(owner->tp_dict, name);
        kina_scope_method *method;
        if (!general) {
            PyErr_Format(PyExc_AttributeError, "%s has no %s of its own", owner->tp_name, name);
            return -1;
        }
        method = PyObject_New(kina_scope_method, &kina_scope_method_type);
        if (!method) return -1;
        method->general = Py_NewRef(general);
        method->enter = enter;
        method->leave = leave;
        return PyDict_SetItemString(owner->tp_dict, name, (PyObject *)method);
    }

    static int kina_scope_install(PyTypeObject *owner, kina_scope_enter enter, kina_scope_leave leave) {
    #if PY_VERSION_HEX < 0x030E0000 /* from 3.14 on, a with statement binds no plain method of C */
        if (PyType_Ready(&kina_bound_scope_type) < 0 || PyType_Ready(&kina_scope_method_type) < 0) return -1;
        if (kina_scope_put(owner, "__enter__", enter, NULL) < 0) return -1;
        if (kina_scope_put(owner, "__exit__", NULL, leave) < 0) return -1;
        PyType_Modified(owner);
    #endif
        return 0;
    }
    """
    int kina_scope_install(PyTypeObject *owner, scope_enter enter, scope_leave leave) except -1


cdef int install_scope(type owner, scope_enter enter, scope_leave leave) except -1:
    return kina_scope_install(<PyTypeObject *> owner, enter, leave)
