"""Opening sessions, and the module-level functions that use the session at hand."""

from __future__ import annotations

import sys

from kina._core.opening import device_ordinal, session, set_cuda_loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from kina._core.dtype import DType
    from kina._core.identity import DeviceId
    from kina._core.session import Session
    from kina._core.tensor import Tensor
    from kina.cuda import DeviceInfo

__all__ = ["empty", "from_host", "full", "innermost", "session", "zeros"]


def _load_cuda() -> None:
    from kina.cuda import load_sessions

    load_sessions()


set_cuda_loader(_load_cuda)


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
    ordinal = None if device is None else device_ordinal(device)
    host = cuda = None
    if ordinal is None or ordinal == -1:
        # While another thread still loads that module, nobody has a host session open.
        find = getattr(sys.modules.get("kina._core.host_session"), "innermost_host_session", None)
        host = find() if find is not None else None
    # Nobody has a CUDA session open if kina.cuda was never loaded.
    if ordinal != -1 and "kina.cuda" in sys.modules:
        from kina.cuda import innermost_session

        cuda = innermost_session(ordinal)
    if host is None or cuda is None:
        return cuda if host is None else host
    from kina._core.session import inner_of

    return inner_of(host, cuda)


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


def full(shape: int | Sequence[int], value: object, dtype: str | DType = "float32", *, device: object = None) -> Tensor:
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

    The device is chosen as in :func:`empty`. To CUDA the copy is enqueued through pinned memory; `array` has
    been read when the call returns.
    """
    here = innermost(device)
    if here is not None:
        return here.from_host(array, dtype)
    with session("cpu" if device is None else device) as momentary:
        return momentary.from_host(array, dtype)


def __getattr__(name: str) -> object:
    if name == "Capability":
        from kina._core.capability import Capability

        globals()[name] = Capability
        return Capability
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
