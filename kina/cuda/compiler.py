"""CUDA C++ into images, once: options and headers, keys, what is kept in memory and on disk, who waits for whom."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kina._core.disk_cache import compiled_code
from kina.cuda.images import declared_parameters
from kina.cuda.includes import Includes, look_through
from kina.cuda.nvrtc import NvrtcLibrary, compile_program, nvrtc
from kina.errors import ArgumentError, CompileError, UnsupportedError

__all__ = ["Compilation", "compile_source"]

FORMAT = "kina nvrtc 3"
MEMORY_ENTRIES = 64
MEMORY_BYTES = 32 << 20
STORED = ("kind", "log", "names", "declared", "settled")
#: NVRTC looks for headers in the folder of a source's name, so one of text alone is given a folder that is none.
TITLE = "<kina>/kina.cu"
FLAGS = ("NVRTC_PREPEND_FLAGS", "NVRTC_APPEND_FLAGS")

_ARCHITECTURE = re.compile(r"(?:--gpu-architecture|-arch)[ =]+(\w+)")
_FOLDER = re.compile(r"(?:--include-path|-I)[ =]*(.*)", re.DOTALL)
_FIRST = re.compile(r"(?:--pre-include|-include)[ =]+(.*)", re.DOTALL)
#: Words whose value may be the next word.
_PAIRED = ("--gpu-architecture", "-arch", "--include-path", "-I", "--pre-include", "-include")
#: What takes in files that are not looked through, or writes some.
_OPAQUE = re.compile(r"^@|options-file|-optf|^--?(?:create-pch|use-pch|pch|time|fdevice-time-trace|ftime)")


class Compilation(NamedTuple):
    """What a source was made into.

    Attributes
    ----------
    kind : str
        ``"cubin"`` or ``"ptx"``.
    image : bytes
        PTX without its trailing NUL.
    log : str
        The compiler's words: warnings.
    names : dict of str to str
        Name expressions and their names in the image.
    declared : dict of str to tuple of str
        The declared types of each entry's parameters, as of :func:`kina.cuda.images.declared_parameters`.
    key : bytes
        Differs whenever another source, option, header, compiler or architecture could make another image.
    settled : bool
        Whether the same words make the same image, whatever happens to files that are not the compiler's.
    """

    kind: str
    image: bytes
    log: str
    names: dict[str, str]
    declared: dict[str, tuple[str, ...]]
    key: bytes
    settled: bool


class _Options(NamedTuple):
    words: tuple[str, ...]  # one of NVRTC's options each
    architecture: str | None
    folders: tuple[str, ...]
    first: tuple[str, ...]
    opaque: bool  # they name files that are not looked through


@functools.lru_cache(maxsize=256)
def _parse(given: tuple[str, ...]) -> _Options:
    words: list[str] = []
    rest = iter(given)
    for word in rest:
        if word in _PAIRED:
            value = next(rest, None)
            if value is None:
                raise ArgumentError(f"the option {word} has no value", operation="module")
            joiner = "" if word == "-I" else "="
            word = f"{word}{joiner}{value}"
        words.append(word)
    architecture, folders, first, opaque = None, [], [], False
    for word in words:
        if found := _ARCHITECTURE.fullmatch(word):
            architecture = found[1]
        elif found := _FIRST.fullmatch(word):
            first.append(found[1])
        elif found := _FOLDER.fullmatch(word):
            folders.append(found[1])
        elif _OPAQUE.search(word):
            opaque = True
        if word in ("-dlto", "--dlto", "--dlink-time-opt") or (architecture or "").startswith("lto_"):
            raise UnsupportedError(
                f"the option {word} asks for code that has to be linked before it is loaded: leave it out",
                operation="module",
            )
    return _Options(tuple(words), architecture, tuple(folders), tuple(first), opaque)


@functools.cache
def _toolkit_folders(library: NvrtcLibrary) -> tuple[str, ...]:
    """Folders with headers of the same version as the compiler."""
    from cuda.pathfinder import find_nvidia_header_directory

    beside = Path(library.path).resolve().parent.parent
    candidates = [find_nvidia_header_directory("cudart"), str(beside / "include"), str(beside.parent / "include")]
    if (cccl := find_nvidia_header_directory("cccl")) is not None:
        candidates.append(str(Path(cccl).parent))  # of a toolkit that is whole, where the first is not
    folders = [
        os.path.realpath(each) for each in candidates if each and _version_of(Path(each, "cuda.h")) == library.version
    ]
    folders += [f"{folder}/cccl" for folder in folders if os.path.isdir(f"{folder}/cccl")]
    return tuple(dict.fromkeys(folders))


def _version_of(header: Path) -> tuple[int, int] | None:
    try:
        found = re.search(rb"^#define CUDA_VERSION (\d+)", header.read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return divmod(int(found[1]) // 10, 100) if found else None


def _architecture(library: NvrtcLibrary, capability: tuple[int, int]) -> str:
    """Code for the device itself, or PTX where the compiler does not know it."""
    exact = 10 * capability[0] + capability[1]
    if exact in library.architectures:
        return f"sm_{exact}"
    older = [known for known in library.architectures if known < exact]
    if not older:
        raise UnsupportedError(
            f"NVRTC {library.version[0]}.{library.version[1]} makes no code for compute capability {capability[0]}."
            f"{capability[1]}, its oldest is {library.architectures[0]}: install an older one", operation="module",
        )  # fmt: skip
    return f"compute_{older[-1]}"


class _Flight:
    """A compilation under way, for those who want the same."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = threading.Event()
        self.result: Compilation | None = None
        self.error: BaseException | None = None


_lock = threading.Lock()
_flights: dict[bytes, _Flight] = {}
_kept: OrderedDict[bytes, Compilation] = OrderedDict()
_kept_bytes = 0


def _after_fork() -> None:
    """Who compiled is not here any more."""
    global _lock
    _lock = threading.Lock()
    _flights.clear()


os.register_at_fork(after_in_child=_after_fork)


def compile_source(
    source: bytes,
    options: tuple[str, ...],
    names: tuple[str, ...],
    capability: tuple[int, int],
    path: str | None = None,
) -> Compilation:
    """Compile CUDA C++ for a device, or find what was compiled before: in this process, or on disk.

    Parameters
    ----------
    source : bytes
        NUL-free text.
    options : tuple of str
        NVRTC's. Without ``--gpu-architecture`` a CUBIN for the device is made; ``compute_90``, say, asks for PTX.
    names : tuple of str
        Name expressions.
    capability : tuple of int
        The device's compute capability.
    path : str or None
        Absolute, where the source is a file: the compiler looks for headers beside it.

    Raises
    ------
    ArgumentError, CompileError, UnavailableError, UnsupportedError

    Notes
    -----
    Thread-safe. The GIL is released while it compiles; of several threads that ask for the same one compiles, and the
    others wait for it.
    """
    library = nvrtc()
    parsed = _parse(options)
    title, folder = (path, os.path.dirname(path)) if path else (TITLE, None)
    words, architecture = list(parsed.words), parsed.architecture
    if architecture is None:
        architecture = _architecture(library, capability)
        words.append(f"--gpu-architecture={architecture}")
    toolkit = _toolkit_folders(library)
    words += [f"--include-path={each}" for each in toolkit]
    flags = [os.environ.get(name, "") for name in FLAGS]

    def look() -> Includes | None:
        if parsed.opaque or any(flags):  # which may name folders, too
            return None
        return look_through(source, [*parsed.folders, *toolkit], toolkit, parsed.first, folder)

    includes = look()
    digest = hashlib.sha256()
    for part in (FORMAT, *map(str, library.version), *map(str, library.identity), architecture, title, *flags,
                 includes.digest if includes else "", str(len(words)), *words, *names):  # fmt: skip
        digest.update(os.fsencode(part) + b"\0")
    digest.update(source)
    key = digest.digest()

    def make() -> Compilation:
        kind = "ptx" if architecture.startswith("compute_") else "cubin"
        image, text, log, lowered = compile_program(
            source, os.fsencode(title), tuple(map(os.fsencode, words)), tuple(map(str.encode, names)), kind == "ptx"
        )
        if kind == "ptx":
            image = image.rstrip(b"\0")
        settled, own_key = includes is not None and includes.settled, key
        if includes is None or (not settled and look() != includes):
            # Nobody knows which headers it was made with: only the image says what it is.
            settled, own_key = False, hashlib.sha256(key + image).digest()
        expressions = dict(zip(names, lowered, strict=True))
        return Compilation(kind, image, log, expressions, declared_parameters(text), own_key, settled)

    return make() if includes is None else _shared(key, make)


def _shared(key: bytes, make: Callable[[], Compilation]) -> Compilation:
    """By one thread for all that ask at the same time, and kept."""
    while True:
        own = _Flight()
        try:
            with _lock:
                if key in _kept:
                    _kept.move_to_end(key)
                    return _kept[key]
                flight = _flights.setdefault(key, own)
            if flight is own:
                own.result = _find_or_make(key, make)
                return own.result
        except BaseException as error:
            own.error = error
            raise
        finally:
            if _flights.get(key) is own:
                with _lock:
                    _flights.pop(key, None)
            own.over.set()
        if flight.thread == own.thread:  # a signal's handler, say: its own thread cannot go on meanwhile
            return make()
        flight.over.wait()
        if flight.result is not None:
            return flight.result
        if isinstance(flight.error, CompileError):
            error = CompileError(str(flight.error), operation="module")
            error.log = flight.error.log
            raise error
        # What ended the other thread's attempt was its own affair: an interrupt, say.


def _find_or_make(key: bytes, make: Callable[[], Compilation]) -> Compilation:
    global _kept_bytes
    disk = compiled_code()
    stored = disk.get(key.hex())
    result = None if stored is None else _unpack(stored, key)
    if result is None:
        result = make()
        if result.key == key:
            disk.put(key.hex(), _pack(result))
    if result.key == key and len(result.image) <= MEMORY_BYTES:
        with _lock:
            _kept[key] = result
            _kept_bytes += len(result.image)
            while len(_kept) > MEMORY_ENTRIES or _kept_bytes > MEMORY_BYTES:
                _kept_bytes -= len(_kept.popitem(last=False)[1].image)
    return result


def _pack(made: Compilation) -> bytes:
    fields = {name: getattr(made, name) for name in STORED}
    return json.dumps(fields).encode() + b"\0" + made.image


def _unpack(stored: bytes, key: bytes) -> Compilation | None:
    head, _, image = stored.partition(b"\0")
    try:
        fields = json.loads(head)
        kind, log, names, declared, settled = (fields[name] for name in STORED)
        declared = {name: tuple(map(str, types)) for name, types in declared.items()}
        names = {str(name): str(lowered) for name, lowered in names.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if kind not in ("cubin", "ptx") or not isinstance(log, str):
        return None
    return Compilation(kind, image, log, names, declared, key, bool(settled))
