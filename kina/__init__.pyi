# Written by tools/stubs.py from __init__.py; not edited by hand.

from __future__ import annotations

from kina import errors as errors
from kina import cuda as cuda
from kina import memory as memory
from kina._core.capability import (
    Capability as Capability,
)
from kina._core.dtype import (
    DType as DType,
    TypedScalar as TypedScalar,
)
from kina._core.identity import (
    AllocationDomainId as AllocationDomainId,
    DeviceId as DeviceId,
    DeviceUuid as DeviceUuid,
    RuntimeIdentity as RuntimeIdentity,
)
from kina._core.include_folder import (
    get_include as get_include,
)
from kina._core.interchange import (
    from_dlpack as from_dlpack,
)
from kina._core.tensor import (
    Tensor as Tensor,
)
from kina.cuda import (
    DeviceInfo as DeviceInfo,
    LaunchConfig as LaunchConfig,
    Runtime as Runtime,
    devices as devices,
    unavailable_reason as unavailable_reason,
)
from kina.errors import (
    ArgumentError as ArgumentError,
    CompileError as CompileError,
    DLPackError as DLPackError,
    DTypeError as DTypeError,
    DriverError as DriverError,
    ForeignDeviceError as ForeignDeviceError,
    ForeignDomainError as ForeignDomainError,
    ForeignRuntimeError as ForeignRuntimeError,
    InternalError as InternalError,
    InvalidConfigError as InvalidConfigError,
    InvalidLayoutError as InvalidLayoutError,
    InvalidShapeError as InvalidShapeError,
    KinaError as KinaError,
    LaunchError as LaunchError,
    ModuleLoadError as ModuleLoadError,
    NonContiguousError as NonContiguousError,
    OutOfMemoryError as OutOfMemoryError,
    PeerAccessError as PeerAccessError,
    RuntimeBusyError as RuntimeBusyError,
    RuntimePoisonedError as RuntimePoisonedError,
    SessionClosedError as SessionClosedError,
    Status as Status,
    SymbolLookupError as SymbolLookupError,
    SynchronizeError as SynchronizeError,
    UnavailableError as UnavailableError,
    UnsupportedError as UnsupportedError,
    WrongThreadError as WrongThreadError,
)
from kina.session import (
    empty as empty,
    from_host as from_host,
    full as full,
    session as session,
    zeros as zeros,
)
from kina._core.dtype import DType as DType

__all__ = [
    '__version__',
    'empty',
    'errors',
    'from_host',
    'full',
    'session',
    'zeros',
    'AllocationDomainId',
    'Capability',
    'DType',
    'DeviceId',
    'DeviceInfo',
    'DeviceUuid',
    'LaunchConfig',
    'Runtime',
    'RuntimeIdentity',
    'Tensor',
    'TypedScalar',
    'devices',
    'from_dlpack',
    'get_include',
    'unavailable_reason',
    'ArgumentError',
    'CompileError',
    'DLPackError',
    'DTypeError',
    'DriverError',
    'ForeignDeviceError',
    'ForeignDomainError',
    'ForeignRuntimeError',
    'InternalError',
    'InvalidConfigError',
    'InvalidLayoutError',
    'InvalidShapeError',
    'KinaError',
    'LaunchError',
    'ModuleLoadError',
    'NonContiguousError',
    'OutOfMemoryError',
    'PeerAccessError',
    'RuntimeBusyError',
    'RuntimePoisonedError',
    'SessionClosedError',
    'Status',
    'SymbolLookupError',
    'SynchronizeError',
    'UnavailableError',
    'UnsupportedError',
    'WrongThreadError',
    'bfloat16',
    'bool_',
    'complex128',
    'complex64',
    'float16',
    'float32',
    'float64',
    'float8_e3m4',
    'float8_e4m3',
    'float8_e4m3b11fnuz',
    'float8_e4m3fn',
    'float8_e4m3fnuz',
    'float8_e5m2',
    'float8_e5m2fnuz',
    'float8_e8m0fnu',
    'int16',
    'int32',
    'int64',
    'int8',
    'uint16',
    'uint32',
    'uint64',
    'uint8',
    'bf16',
    'c128',
    'c64',
    'f16',
    'f32',
    'f64',
    'f8_e3m4',
    'f8_e4m3',
    'f8_e4m3b11fnuz',
    'f8_e4m3fn',
    'f8_e4m3fnuz',
    'f8_e5m2',
    'f8_e5m2fnuz',
    'f8_e8m0fnu',
    'i16',
    'i32',
    'i64',
    'i8',
    'u16',
    'u32',
    'u64',
    'u8',
]

__version__: str
bfloat16: DType
bool_: DType
complex128: DType
complex64: DType
float16: DType
float32: DType
float64: DType
float8_e3m4: DType
float8_e4m3: DType
float8_e4m3b11fnuz: DType
float8_e4m3fn: DType
float8_e4m3fnuz: DType
float8_e5m2: DType
float8_e5m2fnuz: DType
float8_e8m0fnu: DType
int16: DType
int32: DType
int64: DType
int8: DType
uint16: DType
uint32: DType
uint64: DType
uint8: DType
bf16: DType
c128: DType
c64: DType
f16: DType
f32: DType
f64: DType
f8_e3m4: DType
f8_e4m3: DType
f8_e4m3b11fnuz: DType
f8_e4m3fn: DType
f8_e4m3fnuz: DType
f8_e5m2: DType
f8_e5m2fnuz: DType
f8_e8m0fnu: DType
i16: DType
i32: DType
i64: DType
i8: DType
u16: DType
u32: DType
u64: DType
u8: DType
bool: DType
