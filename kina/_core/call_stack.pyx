"""Where Python is, as text that can be kept without the GIL."""

import sys

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from kina._core.storage cimport holds_gil, interpreter_is_finalizing

__all__ = []


cdef enum:
    DEEPEST = 32


cdef char *call_stack() noexcept nogil:
    if interpreter_is_finalizing() and not holds_gil():
        return NULL
    with gil:
        return describe()


cdef char *describe() noexcept:
    cdef char *copy
    cdef Py_ssize_t length
    try:
        text = frames().encode("utf-8", "replace")
    except Exception:
        return NULL  # a thread without frames, or no memory: then there is no stack to tell
    length = PyBytes_GET_SIZE(text) + 1
    copy = <char *> malloc(length)
    if copy != NULL:
        memcpy(copy, PyBytes_AS_STRING(text), length)
    return copy


cdef str frames():
    lines = []
    frame = sys._getframe()
    while frame is not None and len(lines) < DEEPEST:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " <- ".join(lines)
