"""CUDA: devices, Runtimes, sessions and raw kernels.

Importing this package loads no driver library; the first use of a device does. On a build without CUDA it imports too,
and :func:`unavailable_reason` says why nothing can be used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kina.errors import UnavailableError

if TYPE_CHECKING:
    from kina.cuda.device import DeviceInfo
    from kina.cuda.session import CudaSession

__all__ = [
    "Completion",
    "CudaSession",
    "DeviceBytes",
    "DeviceInfo",
    "Function",
    "Graph",
    "HomeStream",
    "LaunchConfig",
    "Module",
    "PreparedLaunch",
    "RawSession",
    "Runtime",
    "Signature",
    "StreamRef",
    "TensorMut",
    "TensorRef",
    "compiled_version",
    "device_info",
    "devices",
    "driver_path",
    "driver_version",
    "innermost_session",
    "load_sessions",
    "peer_matrix",
    "unavailable_reason",
]

_HOMES = {
    "Completion": "completion",
    "CudaSession": "session",
    "DeviceBytes": "refs",
    "DeviceInfo": "device",
    "Function": "function",
    "Graph": "graph",
    "HomeStream": "resource_streams",
    "LaunchConfig": "config",
    "Module": "function",
    "PreparedLaunch": "launch",
    "RawSession": "raw",
    "Runtime": "runtime",
    "Signature": "signature",
    "StreamRef": "refs",
    "TensorMut": "refs",
    "TensorRef": "refs",
    "compiled_version": "driver",
    "device_info": "device",
    "driver_path": "driver",
    "driver_version": "driver",
}


def _room(name: str) -> Any:
    """A compiled module of this package. UnavailableError where the build left them out."""
    try:
        return importlib.import_module(f"kina.cuda.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"kina.cuda.{name}":
            raise
        raise UnavailableError(
            "this build of kina has no CUDA support: it was made without CUDA headers. Install kina on Linux, or "
            "rebuild it with nvidia-cuda-runtime installed",
            operation="import kina.cuda",
        ) from None


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kina.cuda' has no attribute {name!r}")
    if home == "session":
        load_sessions()
    value = getattr(_room(home), name)
    globals()[name] = value
    return value


def load_sessions() -> None:
    """Load what :func:`kina.session` needs for CUDA. UnavailableError on a build without CUDA."""
    _room("resource_streams")  # lower floors ask it for streams
    _room("raw")  # sessions hand out raw blocks: the topmost room registers itself and loads the others


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


def unavailable_reason() -> str | None:
    """Why no GPU can be used, with the remedy; None if at least one can. Opens no context."""
    try:
        found = _room("device").devices()
    except UnavailableError as error:
        return str(error)
    return None if found else "the driver shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def devices() -> list[DeviceInfo]:
    """Every GPU of this process, in the order of their ordinals; empty without a usable driver, GPU or CUDA build."""
    try:
        return _room("device").devices()
    except UnavailableError:
        return []


def peer_matrix() -> list[dict]:
    """What each GPU can do with the memory of each other one, per direction; empty where there is at most one."""
    try:
        return _room("device").peer_matrix()
    except UnavailableError:
        return []


def innermost_session(ordinal: int | None = None) -> CudaSession | None:
    """The calling thread's innermost open session on a device, or on any; None if there is none. Loads nothing."""
    import sys

    room = sys.modules.get("kina.cuda.session")
    return room.innermost_session(ordinal) if room else None
