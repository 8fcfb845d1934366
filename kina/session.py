"""Opening sessions, and the module-level functions that use the session at hand."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kina._core.dtype import DType
    from kina._core.session import Session
    from kina._core.tensor import Tensor
    from kina.cuda import DeviceInfo, Runtime
    from kina._core.identity import DeviceId

__all__ = ["Capability", "empty", "from_dlpack", "from_host", "full", "innermost", "session", "zeros"]

# Targets that were parsed before: name -> device ordinal, or None for the host. Only ordinals below the bound are
# kept, so that the dict is bounded too.
_ordinals: dict[str, int | None] = {"cpu": None}
_KEPT_ORDINALS = 64

# Functions of rooms that are loaded at first use.
_open_host = None
_open_cuda = None


def session(
    target: str | int | DeviceId | DeviceInfo | Runtime, *, stream: Any = None
) -> Session:
    """A new session of the calling thread, to be entered by ``with``.

    Parameters
    ----------
    target
        ``"cpu"``; ``"cuda:N"``, the device ordinal `N` itself, a DeviceId or a DeviceInfo (``"cuda"`` is
        ``"cuda:0"``): the thread's default Runtime of that device, made at first use; or a Runtime.
    stream
        CUDA only: an object with ``__cuda_stream__`` (a stream of PyTorch, CuPy or cuda.core); the session runs on that
        stream, and its owner is held.

    Returns
    -------
    Session
        Not entered yet; nothing happened on the device.

    Raises
    ------
    InvalidConfigError
        `target` names no device, or `stream` does not go with it.
    UnavailableError
        CUDA cannot be used here; the message says what is missing.
    RuntimeBusyError
        The Runtime is open in another thread.

    Notes
    -----
    Sessions nest, of the same and of different Runtimes. A session belongs to the thread that enters it.
    """
    kind = type(target)
    if kind is str:
        try:
            ordinal = _ordinals[target]
        except KeyError:
            ordinal = _parse(target)
        if ordinal is None:
            return _host_session(stream)
    elif kind is int and target >= 0:
        ordinal = target
    else:
        return _other_session(target, stream)
    if _open_cuda is None:
        _load_cuda()
    return _open_cuda(ordinal, stream)


def _parse(name: str) -> int:
    kind, colon, number = name.partition(":")
    if kind != "cuda" or not (number.isascii() and number.isdigit() if colon else True):
        raise _bad_target(name)
    ordinal = int(number) if colon else 0
    if ordinal < _KEPT_ORDINALS and len(number) <= 2:
        _ordinals[name] = ordinal
    return ordinal


def _bad_target(target: object) -> Exception:
    from kina.errors import InvalidConfigError

    return InvalidConfigError(
        f"{target!r} is no target of a session: 'cpu', 'cuda', 'cuda:N', a device ordinal, a DeviceId, a DeviceInfo "
        "or a Runtime is",
        operation="session",
    )


def _load_cuda() -> None:
    global _open_cuda
    from kina.cuda import open_session

    _open_cuda = open_session


def _host_session(stream: object) -> Session:
    global _open_host
    if stream is not None:
        from kina.errors import InvalidConfigError

        raise InvalidConfigError("a host session has no stream; leave stream= out", operation="session")
    if _open_host is None:
        from kina._core.session import open_host_session

        _open_host = open_host_session
    return _open_host()


def _other_session(target: object, stream: object) -> Session:
    """What is neither a plain str nor a plain int: identities, descriptions, Runtimes."""
    import kina.cuda
    from kina.errors import InvalidConfigError

    ordinal = _ordinal_of(target)
    if ordinal is not None:
        return kina.cuda.open_session(ordinal, stream)
    if not isinstance(target, kina.cuda.Runtime):
        raise _bad_target(target)
    if stream is not None:
        raise InvalidConfigError("a Runtime has its stream already; leave stream= out", operation="session")
    return kina.cuda.open_session_of(target)


def _ordinal_of(target: object) -> int | None:
    """The ordinal of a DeviceId or a DeviceInfo; None for anything else."""
    from kina._core.identity import DeviceId

    identity = target if isinstance(target, DeviceId) else getattr(target, "id", None)
    return identity.ordinal if isinstance(identity, DeviceId) else None


def innermost(device: str | int | DeviceId | DeviceInfo | None = None) -> Session | None:
    """The session of a device that the calling thread entered last and has not left.

    Parameters
    ----------
    device
        As the `target` of :func:`session`, Runtimes excepted; None: of any device.

    Raises
    ------
    InvalidConfigError
        `device` names no device.
    """
    ordinal = -1 if device is None else _device(device)
    host = cuda = None
    if ordinal is None or ordinal == -1:
        core = sys.modules.get("kina._core.session")
        host = core.innermost_host_session() if core is not None else None
    # Nobody has a CUDA session open if kina.cuda was never loaded.
    if ordinal is not None and "kina.cuda" in sys.modules:
        cuda = sys.modules["kina.cuda"].innermost_session(None if ordinal == -1 else ordinal)
    if host is None or cuda is None:
        return cuda if host is None else host
    return core.inner_of(host, cuda)


def _device(device: object) -> int | None:
    """An ordinal, or None for the host."""
    if isinstance(device, str):
        name = str(device)
        return _ordinals[name] if name in _ordinals else _parse(name)
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return int(device)
    ordinal = _ordinal_of(device)
    if ordinal is None:
        raise _bad_target(device)
    return ordinal


def empty(shape: int | Sequence[int], dtype: str | DType = "float32", *, device: object = None) -> Tensor:
    """A new tensor in C order with whatever the memory held.

    Made by the calling thread's innermost open session of `device`, or by a momentary session of the thread's
    default Runtime there. Without `device`: by the innermost open session of any device, else on the host.

    Parameters
    ----------
    shape
        Extents, or one int.
    dtype
        Any spelling of a dtype.
    device
        ``"cpu"``, ``"cuda:N"``, an ordinal, a DeviceId or a DeviceInfo.

    Raises
    ------
    InvalidShapeError, DTypeError, InvalidConfigError, OutOfMemoryError, UnavailableError
    """
    here = innermost(device)
    if here is not None:
        return here.empty(shape, dtype)
    with session("cpu" if device is None else device) as momentary:
        return momentary.empty(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: str | DType = "float32", *, device: object = None) -> Tensor:
    """A new tensor in C order, all zeros. Everything else as :func:`empty`."""
    here = innermost(device)
    if here is not None:
        return here.zeros(shape, dtype)
    with session("cpu" if device is None else device) as momentary:
        return momentary.zeros(shape, dtype)


def full(
    shape: int | Sequence[int], value: object, dtype: str | DType = "float32", *, device: object = None
) -> Tensor:
    """A new tensor in C order, every element `value`; ArgumentError where the dtype cannot hold it.

    Everything else as :func:`empty`.
    """
    here = innermost(device)
    if here is not None:
        return here.full(shape, value, dtype)
    with session("cpu" if device is None else device) as momentary:
        return momentary.full(shape, value, dtype)


def from_host(array: object, dtype: str | DType | None = None, *, device: object = None) -> Tensor:
    """A new tensor with the values of anything ``numpy.asarray`` takes, copied.

    The device is chosen as in :func:`empty`. To CUDA the copy is enqueued through pinned memory; `array` has been
    read when the call returns.
    """
    here = innermost(device)
    if here is not None:
        return here.from_host(array, dtype)
    with session("cpu" if device is None else device) as momentary:
        return momentary.from_host(array, dtype)


def from_dlpack(array: object, *, device: object = None) -> Tensor:
    """A tensor over the memory of somebody else's array, without a copy.

    Parameters
    ----------
    array
        Anything with ``__dlpack__``, a NumPy array, or (on the host) anything with the buffer protocol.
    device
        Where it must be; default: where it is.

    Raises
    ------
    DLPackError
        The producer refuses, the memory is elsewhere, or its description is not to be believed.
    DTypeError
        Elements that kina does not store.

    Notes
    -----
    Adopted by the innermost open session of the device, else by a momentary one. On CUDA the session's stream waits,
    on the device, for the producer's work.
    """
    if device is None:
        device = _device_of(array)
    here = innermost(device)
    if here is not None:
        return here.adopt(array)
    with session(device) as momentary:
        return momentary.adopt(array)


def _device_of(array: object) -> str:
    """The name of the device that a producer says it is on; the host for anything that says nothing."""
    if not hasattr(type(array), "__dlpack_device__"):
        return "cpu"
    from kina.errors import DLPackError

    try:
        kind, number = (int(part) for part in array.__dlpack_device__())
    except Exception as error:
        raise DLPackError(
            f"device: __dlpack_device__ of {type(array).__name__} failed: {error}", operation="from_dlpack"
        ) from error
    if kind in (1, 3):
        return "cpu"
    if kind in (2, 13) and number >= 0:
        return f"cuda:{number}"
    raise DLPackError(f"device: unknown device type {kind}, number {number}", operation="from_dlpack")


def __getattr__(name: str) -> object:
    if name == "Capability":
        from kina._core.capability import Capability

        globals()[name] = Capability
        return Capability
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
