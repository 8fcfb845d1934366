# Written by tools/stubs.py from __init__.py; not edited by hand.

from __future__ import annotations

from kina.cuda.completion import (
    Completion as Completion,
)
from kina.cuda.config import (
    LaunchConfig as LaunchConfig,
)
from kina.cuda.device import (
    DeviceInfo as DeviceInfo,
    device_info as device_info,
)
from kina.cuda.driver import (
    compiled_version as compiled_version,
    driver_path as driver_path,
    driver_version as driver_version,
)
from kina.cuda.function import (
    Function as Function,
    Module as Module,
)
from kina.cuda.graph import (
    Graph as Graph,
)
from kina.cuda.launch import (
    PreparedLaunch as PreparedLaunch,
)
from kina.cuda.raw import (
    RawSession as RawSession,
)
from kina.cuda.refs import (
    DeviceBytes as DeviceBytes,
    StreamRef as StreamRef,
    TensorMut as TensorMut,
    TensorRef as TensorRef,
)
from kina.cuda.resource_streams import (
    HomeStream as HomeStream,
)
from kina.cuda.runtime import (
    Runtime as Runtime,
)
from kina.cuda.session import (
    CudaSession as CudaSession,
)
from kina.cuda.signature import (
    Signature as Signature,
)

__all__ = [
    'Completion',
    'CudaSession',
    'DeviceBytes',
    'DeviceInfo',
    'Function',
    'Graph',
    'HomeStream',
    'LaunchConfig',
    'Module',
    'PreparedLaunch',
    'RawSession',
    'Runtime',
    'Signature',
    'StreamRef',
    'TensorMut',
    'TensorRef',
    'compiled_version',
    'device_info',
    'devices',
    'driver_path',
    'driver_version',
    'innermost_session',
    'load_sessions',
    'peer_matrix',
    'unavailable_reason',
]

def load_sessions() -> None:
    """Load what :func:`kina.session` needs for CUDA. UnavailableError on a build without CUDA."""

def unavailable_reason() -> str | None:
    """Why no GPU can be used, with the remedy; None if at least one can. Opens no context."""

def devices() -> list[DeviceInfo]:
    """Every GPU of this process, in the order of their ordinals; empty without a usable driver, GPU or CUDA build."""

def peer_matrix() -> list[dict]:
    """What each GPU can do with the memory of each other one, per direction; empty where there is at most one."""

def innermost_session(ordinal: int | None=None) -> CudaSession | None:
    """The calling thread's innermost open session on a device, or on any; None if there is none. Loads nothing."""
