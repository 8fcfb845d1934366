"""Arrays of every layout, and objects that offer one protocol of exchange and no other."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kina._core.dtype import DType, all_dtypes

__all__ = ["NUMPY_DTYPES", "OTHER_DTYPES", "CudaArray", "HostArray", "address", "buffer_of", "layouts", "same_layout"]

#: Those that NumPy has itself, with their typestrs; and those of ml_dtypes.
NUMPY_DTYPES = {
    "float16": "<f2", "float32": "<f4", "float64": "<f8", "int8": "|i1", "int16": "<i2", "int32": "<i4",
    "int64": "<i8", "uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "bool": "|b1",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
OTHER_DTYPES = [dtype.name for dtype in all_dtypes() if dtype.name not in NUMPY_DTYPES]


def filled(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 120).astype(dtype.numpy).reshape(shape)


@st.composite
def layouts(draw: Any, dtypes: Any = tuple(NUMPY_DTYPES), *, zero_strides: bool = True) -> np.ndarray:
    """An array of up to 9 axes, some of them of no or of one element, with its axes permuted, with gaps, turned round,
    repeated by a stride of zero, from the middle of its memory, and read-only at times."""
    name = draw(st.sampled_from(tuple(dtypes)))
    dtype = next(each for each in all_dtypes() if each.name == name)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=9, min_side=0, max_side=3))
    steps = [draw(st.sampled_from([1, 1, 2, -1, -2])) for _ in shape]
    fronts = [draw(st.sampled_from([0, 0, 1])) for _ in shape]
    grown = tuple(abs(step) * extent + front for extent, step, front in zip(shape, steps, fronts, strict=True))
    axes = draw(st.permutations(range(len(shape))))
    base = filled(tuple(grown[axis] for axis in axes), dtype).transpose(np.argsort(axes))
    for axis, (extent, step, front) in enumerate(zip(shape, steps, fronts, strict=True)):
        cut = base[(slice(None),) * axis + (slice(front, front + abs(step) * extent, abs(step)),)]
        base = cut[(slice(None),) * axis + (slice(None, None, -1),)] if step < 0 else cut
    assert base.shape == shape
    if zero_strides and shape and draw(st.booleans()):
        base = np.broadcast_to(base, (*draw(st.sampled_from([(2,), (1, 3)])), *shape))
    if draw(st.booleans()):
        base = base.view()
        base.flags.writeable = False
    return base


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def repeats(array: np.ndarray) -> bool:
    """Does a stride of zero show an element more than once?"""
    pairs = zip(array.shape, array.strides, strict=True)
    return array.size > 0 and any(extent > 1 and step == 0 for extent, step in pairs)


def same_layout(one: Any, other: Any) -> bool:
    """Strides in bytes, of axes whose strides are used."""
    if one.shape != other.shape:
        return False
    pairs = zip(one.shape, one.strides, other.strides, strict=True)
    return one.size == 0 or all(extent == 1 or left == right for extent, left, right in pairs)


class HostArray:
    """An object that has ``__array_interface__`` and nothing else."""

    def __init__(self, array: Any = None, **fields: Any) -> None:
        self.array = array
        self.__array_interface__ = ({} if array is None else dict(array.__array_interface__)) | fields


class CudaArray:
    """The same with ``__cuda_array_interface__``; fields that are Ellipsis are left out. ``reads`` counts."""

    def __init__(self, owner: Any = None, **fields: Any) -> None:
        self.owner = owner
        self.fields = {key: value for key, value in fields.items() if value is not ...}
        self.reads = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.reads += 1
        return dict(self.fields)


# The C structure of a buffer --------------------------------------------------------------------------------


class Buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


get_buffer = ctypes.pythonapi.PyObject_GetBuffer
get_buffer.restype, get_buffer.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.POINTER(Buffer), ctypes.c_int)
release_buffer = ctypes.pythonapi.PyBuffer_Release
release_buffer.restype, release_buffer.argtypes = None, (ctypes.POINTER(Buffer),)
view_of_buffer = ctypes.pythonapi.PyMemoryView_FromBuffer
view_of_buffer.restype, view_of_buffer.argtypes = ctypes.py_object, (ctypes.POINTER(Buffer),)


def buffer_of(exporter: object, flags: int) -> dict[str, Any]:
    """What an exporter fills in for a request, as plain values; the buffer is released again."""
    buffer = Buffer()
    get_buffer(exporter, ctypes.byref(buffer), flags)
    found = {
        "address": buffer.buf,
        "len": buffer.len,
        "itemsize": buffer.itemsize,
        "readonly": bool(buffer.readonly),
        "ndim": buffer.ndim,
        "format": buffer.format,
        "shape": tuple(buffer.shape[: buffer.ndim]) if buffer.shape else None,
        "strides": tuple(buffer.strides[: buffer.ndim]) if buffer.strides else None,
    }
    release_buffer(ctypes.byref(buffer))
    return found
