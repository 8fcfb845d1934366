"""DLPack's C exchange table as ctypes, from the specification: calls of anybody's, and tables that tests make."""

from __future__ import annotations

import ctypes
from typing import Any

from helpers.managed import DELETER, DLManagedTensorVersioned, DLTensor, Producer

CAPSULE = ctypes.c_char_p(b"dlpack_exchange_api")
SET_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_managed = ctypes.POINTER(ctypes.c_void_p)
# With the GIL and Python's exceptions, but for the allocator, which promises to need neither.
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(DLTensor), _managed, ctypes.c_void_p, SET_ERROR)
FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, _managed)
TO_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _managed)
BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
WORK_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, _managed)


class ExchangeAPI(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("prev_api", ctypes.c_void_p),
        ("managed_tensor_allocator", ALLOCATE),
        ("managed_tensor_from_py_object_no_sync", FROM_OBJECT),
        ("managed_tensor_to_py_object_no_sync", TO_OBJECT),
        ("dltensor_from_py_object_no_sync", BORROW),
        ("current_work_stream", WORK_STREAM),
    )


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_decref = ctypes.pythonapi.Py_DecRef
_decref.argtypes = (ctypes.py_object,)


def table_of(kind: type) -> ExchangeAPI:
    """The table that a type offers."""
    return ExchangeAPI.from_address(_pointer(kind.__dlpack_c_exchange_api__, CAPSULE))


def capsule_of(api: ExchangeAPI, name: ctypes.c_char_p = CAPSULE) -> Any:
    return _new(ctypes.addressof(api), name, None)


# Calls ------------------------------------------------------------------------------------------------------


def export(value: Any) -> DLManagedTensorVersioned:
    """The owned tensor of an object; :func:`delete` it."""
    out = ctypes.c_void_p()
    assert table_of(type(value)).managed_tensor_from_py_object_no_sync(value, out) == 0
    return DLManagedTensorVersioned.from_address(out.value)


def delete(managed: DLManagedTensorVersioned) -> None:
    """What its consumer does in the end, without the GIL."""
    DELETER(managed.deleter)(ctypes.addressof(managed))


def borrow(value: Any) -> DLTensor:
    tensor = DLTensor()
    assert table_of(type(value)).dltensor_from_py_object_no_sync(value, tensor) == 0
    return tensor


def make_object(kind: type, managed: Any) -> Any:
    """The object of a type's library over a managed tensor, which it takes over."""
    out = ctypes.c_void_p()
    address = managed if managed is None else ctypes.addressof(managed)
    assert table_of(kind).managed_tensor_to_py_object_no_sync(address, out) == 0
    value = ctypes.cast(out, ctypes.py_object).value
    _decref(value)  # the reference that the function gave; `value` is another
    return value


def allocate(kind: type, prototype: DLTensor) -> tuple[DLManagedTensorVersioned | None, list[tuple[bytes, bytes]]]:
    """What the allocator of a type gives, and what it tells its error function."""
    out, told = ctypes.c_void_p(), []
    status = table_of(kind).managed_tensor_allocator(
        prototype, out, None, SET_ERROR(lambda _, kind, message: told.append((kind, message)))
    )
    assert (status == 0) == (not told) == (out.value is not None)
    return (DLManagedTensorVersioned.from_address(out.value) if out.value else None), told


def work_stream(kind: type, device: tuple[int, int]) -> int | None:
    out = ctypes.c_void_p()
    assert table_of(kind).current_work_stream(*device, out) == 0
    return out.value


# Tables of tests ----------------------------------------------------------------------------------------------


_exported: dict[int, Producer] = {}  # whose structures somebody has: a library counts them, a test has no need to


class Table:
    """A library whose arrays are :class:`~helpers.managed.Producer` objects, and whose table a test may spoil.

    ``Array`` is the type of its arrays; it has no ``__dlpack__``, so that nothing but the table can serve.
    """

    def __init__(
        self,
        *,
        spelling: str = "__dlpack_c_exchange_api__",
        as_int: bool = False,
        version: tuple[int, int] = (1, 3),
        stream: int | None = None,
        refuses: bool = False,
        without: str | None = None,
        name: ctypes.c_char_p = CAPSULE,
        **attributes: Any,
    ) -> None:
        self.stream = stream
        self.asked_for_stream = 0
        self.api = ExchangeAPI(major=version[0], minor=version[1])
        self._functions = {
            "managed_tensor_from_py_object_no_sync": FROM_OBJECT(self._export),
            "dltensor_from_py_object_no_sync": BORROW(self._borrow),
            "current_work_stream": WORK_STREAM(self._tell_stream),
        }
        if refuses:
            # A function of the same shape that fails as C does: -1, and an exception. ctypes lets no callback do so.
            refusal = ctypes.cast(ctypes.pythonapi.PyObject_Size, FROM_OBJECT)
            self._functions["managed_tensor_from_py_object_no_sync"] = refusal
        for field, function in self._functions.items():
            if field != without:
                setattr(self.api, field, function)
        offered = ctypes.addressof(self.api) if as_int else capsule_of(self.api, name)
        # A table lives as long as its type here; that of a library, as long as the process.
        self.Array = type("Array", (Producer,), {"__dlpack__": None, spelling: offered, "table": self, **attributes})

    def _export(self, producer: Producer, out: Any) -> int:
        _exported[id(producer)] = producer
        out[0] = ctypes.addressof(producer.managed)
        return 0

    def _borrow(self, producer: Producer, out: Any) -> int:
        ctypes.memmove(out, ctypes.addressof(producer.managed.dl_tensor), ctypes.sizeof(DLTensor))
        return 0

    def _tell_stream(self, device_type: int, device_id: int, out: Any) -> int:
        self.asked_for_stream += 1
        out[0] = self.stream
        return 0
