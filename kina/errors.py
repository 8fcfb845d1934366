"""The errors of kina: one tree under :class:`KinaError`.

Each class is also the built-in that a caller would expect, and knows its fine ``detail`` code and its
coarse ``status``. The codes are those of ``kina_status.h``; ``tests/core/test_status.py`` compares them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar, NamedTuple

__all__ = [
    "ArgumentError",
    "CompileError",
    "DLPackError",
    "DTypeError",
    "DriverError",
    "ForeignDeviceError",
    "ForeignDomainError",
    "ForeignRuntimeError",
    "InternalError",
    "InvalidConfigError",
    "InvalidLayoutError",
    "InvalidShapeError",
    "KinaError",
    "LaunchError",
    "ModuleLoadError",
    "NonContiguousError",
    "OutOfMemoryError",
    "PeerAccessError",
    "RuntimeBusyError",
    "RuntimePoisonedError",
    "SessionClosedError",
    "Status",
    "SymbolLookupError",
    "SynchronizeError",
    "UnavailableError",
    "UnsupportedError",
    "WrongThreadError",
]


class Status(IntEnum):
    """The coarse outcome of a call, the same numbers in Python and in the C ABI."""

    SUCCESS = 0
    VALIDATION = 1
    RESOURCE = 2
    GPU = 3
    UNIMPLEMENTED = 4
    INTERNAL = 5
    TYPE = 6


class DriverFailure(NamedTuple):
    """What the CUDA driver answered: its number, its name and its own sentence."""

    code: int
    name: str
    string: str


class KinaError(Exception):
    """Base of every error that kina raises on purpose.

    Attributes
    ----------
    status : Status
        Coarse outcome (0-6).
    detail : int
        Fine code; ``detail // 100`` is the status.
    operation : str or None
        The call that failed, as its user spells it.
    driver_error : DriverFailure or None
        The driver's own answer where the driver refused.
    """

    detail: ClassVar[int] = 501

    def __init__(
        self,
        message: str = "",
        *,
        operation: str | None = None,
        driver_error: DriverFailure | None = None,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.driver_error = driver_error

    @property
    def status(self) -> Status:
        return Status(self.detail // 100)


class InvalidShapeError(KinaError, ValueError):
    """A shape is negative, too large, or does not fit the operation."""

    detail = 101


class InvalidLayoutError(KinaError, ValueError):
    """Strides, offset, overlap or writability do not allow what was asked."""

    detail = 102


class NonContiguousError(InvalidLayoutError):
    """A compact tensor is required; nothing is materialised behind the caller's back."""

    detail = 103


class InvalidConfigError(KinaError, ValueError):
    """A launch configuration, device name, option or limit is out of range."""

    detail = 104


class ForeignRuntimeError(KinaError, ValueError):
    """An object of another Runtime was passed where this session's own is required."""

    detail = 105


class ForeignDeviceError(KinaError, ValueError):
    """An object lives on another device."""

    detail = 106


class ForeignDomainError(KinaError, ValueError):
    """An allocation belongs to another allocation domain."""

    detail = 107


class SessionClosedError(KinaError, RuntimeError):
    """The session, raw block, ref or stream has ended."""

    detail = 108


class WrongThreadError(KinaError, RuntimeError):
    """A thread-bound object was used from another thread."""

    detail = 109


class RuntimeBusyError(KinaError, RuntimeError):
    """The Runtime is open in another thread."""

    detail = 110


class DLPackError(KinaError, BufferError):
    """A DLPack exchange cannot be honoured; the message names the field."""

    detail = 111


class UnavailableError(KinaError, RuntimeError):
    """The device, driver or library that was asked for is not here; the message says why."""

    detail = 201


class OutOfMemoryError(KinaError, MemoryError):
    """An allocation could not be served.

    Attributes
    ----------
    requested, live, cached, pending, largest_free, limit : int or None
        Bytes, where the resource knows them.
    """

    detail = 202

    requested: int | None = None
    live: int | None = None
    cached: int | None = None
    pending: int | None = None
    largest_free: int | None = None
    limit: int | None = None


class CompileError(KinaError, RuntimeError):
    """Source text was refused by the compiler; ``log`` holds its words."""

    detail = 301
    log: str = ""


class ModuleLoadError(KinaError, RuntimeError):
    """The driver refused a module image; ``log`` holds the loader's words."""

    detail = 302
    log: str = ""


class SymbolLookupError(KinaError, RuntimeError):
    """A module has no entry of that name."""

    detail = 303


class LaunchError(KinaError, RuntimeError):
    """The driver refused a launch."""

    detail = 304


class SynchronizeError(KinaError, RuntimeError):
    """Waiting failed, or showed that earlier asynchronous work did."""

    detail = 305


class PeerAccessError(KinaError, RuntimeError):
    """One device cannot reach the memory of the other in the direction asked for."""

    detail = 306


class RuntimePoisonedError(KinaError, RuntimeError):
    """An earlier asynchronous failure made the device's context unusable; carries the first cause."""

    detail = 307


class DriverError(KinaError, RuntimeError):
    """The CUDA driver refused a call that has no class of its own."""

    detail = 308


class UnsupportedError(KinaError, NotImplementedError):
    """The device, driver or build cannot do this."""

    detail = 401


class InternalError(KinaError, RuntimeError):
    """kina broke one of its own invariants: a bug, please report it."""

    detail = 501


class DTypeError(KinaError, TypeError):
    """A dtype is unknown, unsupported, or not the one required."""

    detail = 601


class ArgumentError(KinaError, TypeError):
    """The arguments of a launch contradict the kernel's parameters, or an argument has no valid conversion."""

    detail = 602


def class_of_detail(detail: int) -> type[KinaError]:
    """The class that carries a detail code; InternalError for a code nobody has."""
    return _BY_DETAIL.get(detail, InternalError)


def _tree(root: type[KinaError]) -> dict[int, type[KinaError]]:
    found = {}
    for child in root.__subclasses__():
        found[child.detail] = child
        found.update(_tree(child))
    return found


_BY_DETAIL: dict[int, type[KinaError]] = _tree(KinaError)
