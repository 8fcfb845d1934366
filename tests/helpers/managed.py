"""DLPack's structures as ctypes, from the specification, and producers whose deletions are counted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

CPU, CUDA, CUDA_HOST, MANAGED = 1, 2, 3, 13
FLOAT32 = (2, 32, 1)
READ_ONLY, IS_COPIED = 1, 2


class DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)

_KEPT_NAMES = {
    name: ctypes.c_char_p(name)
    for name in (
        b"dltensor",
        b"dltensor_versioned",
        b"used_dltensor",
        b"used_dltensor_versioned",
        b"something else",
    )
}


def name_of(capsule: object) -> str | None:
    name = _name(capsule)
    return None if name is None else name.decode()


def rename(capsule: object, name: bytes) -> None:
    """The capsule keeps the pointer, so only names that live for ever are taken."""
    assert _set_name(capsule, _KEPT_NAMES[name]) == 0


def managed_of(capsule: object) -> DLManagedTensor | DLManagedTensorVersioned:
    """The structure inside, read in place."""
    name = name_of(capsule)
    kind = DLManagedTensorVersioned if name.endswith("versioned") else DLManagedTensor
    return kind.from_address(_pointer(capsule, name.encode()))


class Producer:
    """A hand-made producer over a ctypes buffer: every field can be wrong on purpose.

    ``deleted`` counts the calls of the deleter.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = (4,),
        strides: Sequence[int] | None = None,
        *,
        versioned: bool = True,
        dtype: tuple[int, int, int] = FLOAT32,
        device: tuple[int, int] = (CPU, 0),
        byte_offset: int = 0,
        data: int | None = -1,
        ndim: int | None = None,
        flags: int = 0,
        version: tuple[int, int] = (1, 0),
        buffer: ctypes.Array | None = None,
        name: bytes | None = None,
        deleter: bool = True,
    ) -> None:
        self.buffer = (ctypes.c_float * 64)(*range(64)) if buffer is None else buffer
        self.deleted = 0
        self.versioned = versioned
        self.device = device
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")
        self.managed = DLManagedTensorVersioned() if versioned else DLManagedTensor()
        if versioned:
            self.managed.major, self.managed.minor = version
            self.managed.flags = flags
        tensor = self.managed.dl_tensor
        tensor.data = ctypes.addressof(self.buffer) if data == -1 else data
        tensor.device.device_type, tensor.device.device_id = device
        tensor.ndim = (0 if shape is None else len(shape)) if ndim is None else ndim
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = dtype
        tensor.byte_offset = byte_offset
        if shape is not None:
            self.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
            tensor.shape = self.shape
        if strides is not None:
            self.strides = (ctypes.c_int64 * max(len(strides), 1))(*strides)
            tensor.strides = self.strides
        self._deleter = DELETER(self._delete)
        if deleter:
            self.managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)

    def _delete(self, address: int) -> None:
        assert address == ctypes.addressof(self.managed)
        self.deleted += 1

    def capsule(self) -> object:
        return _new(ctypes.addressof(self.managed), _KEPT_NAMES[self.name], None)

    @property
    def first(self) -> int:
        """Address of the first element."""
        return (self.managed.dl_tensor.data or 0) + self.managed.dl_tensor.byte_offset

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None) -> object:
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device
