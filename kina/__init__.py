"""kina: a CUDA runtime for people who write GPU libraries in Python, Cython or C.

``kina.session("cuda:0")`` or ``kina.session("cpu")`` is where everything begins. Names are loaded when they
are first used: importing kina loads neither NumPy nor CUDA.
"""

# Loaded now, so that `kina.session` is this function for good: importing the module of the same name later
# does not put the module in its place.
from kina.session import empty, from_host, full, session, zeros

__version__ = "0.1.0"

_DTYPES = (
    "bfloat16",
    "bool_",
    "complex128",
    "complex64",
    "float16",
    "float32",
    "float64",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "bf16",
    "c128",
    "c64",
    "f16",
    "f32",
    "f64",
    "f8_e3m4",
    "f8_e4m3",
    "f8_e4m3b11fnuz",
    "f8_e4m3fn",
    "f8_e4m3fnuz",
    "f8_e5m2",
    "f8_e5m2fnuz",
    "f8_e8m0fnu",
    "i16",
    "i32",
    "i64",
    "i8",
    "u16",
    "u32",
    "u64",
    "u8",
)

# name -> the module that has it
_HOMES = {
    "AllocationDomainId": "kina._core.identity",
    "Capability": "kina._core.capability",
    "DType": "kina._core.dtype",
    "DeviceId": "kina._core.identity",
    "DeviceInfo": "kina.cuda",
    "DeviceUuid": "kina._core.identity",
    "LaunchConfig": "kina.cuda",
    "Runtime": "kina.cuda",
    "RuntimeIdentity": "kina._core.identity",
    "Tensor": "kina._core.tensor",
    "TypedScalar": "kina._core.dtype",
    "devices": "kina.cuda",
    "from_dlpack": "kina._core.interchange",
    "get_include": "kina._core.include_folder",
    "unavailable_reason": "kina.cuda",
    **dict.fromkeys(
        (
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
        ),
        "kina.errors",
    ),
    **dict.fromkeys(_DTYPES, "kina._core.dtype"),
}

# Submodules that an attribute access may load.
_MODULES = ("cuda", "errors", "memory")

__all__ = [
    "__version__",
    "empty",
    "errors",
    "from_host",
    "full",
    "session",
    "zeros",
    *_HOMES,
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"kina.{name}")
    # `bool` hides the built-in for whoever imports *, so it is an attribute but not in __all__.
    home = "kina._core.dtype" if name == "bool" else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kina' has no attribute {name!r}")
    if name == "Tensor":
        import_module("kina._core.exchange_table")  # the type has its table from the beginning
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, "bool"})
