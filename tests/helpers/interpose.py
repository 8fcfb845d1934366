"""Build and drive the interposer of ``tests/interpose``: a ``libcuda.so.1`` that counts and fails calls.

A subprocess started with ``env=env()`` finds it before the real driver library, which it forwards to. Inside
that process, :class:`Interposer` reads the counts and orders failures::

    subprocess.run([sys.executable, "script.py"], env=interpose.env())

    # script.py
    calls = interpose.Interposer()
    calls.reset()
    ...
    assert calls.count("cuStreamSynchronize") == 0

Needs a C compiler and ``nm`` (binutils). The library is built once per state of its sources and of the real
library.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Interposer", "build", "env", "find_real"]

SOURCES = Path(__file__).resolve().parent.parent / "interpose"
SONAME = "libcuda.so.1"
UNKNOWN = 2**64 - 1
CUDA_ERROR_UNKNOWN = 999

USUAL_FOLDERS = (
    "/usr/local/nvidia/lib64",
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
)


def _names_of(library: Path) -> list[str]:
    """The functions that a shared library exports."""
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    rows = (line.split() for line in listing.splitlines())
    # "name" or "name@@VERSION"; T and W are code, i an indirect function.
    return sorted({row[2].split("@")[0] for row in rows if len(row) == 3 and row[1] in "TWi"})


def find_real(environ: Mapping[str, str] | None = None) -> Path | None:
    """The driver library that calls would go to.

    Looked for in KINA_INTERPOSE_REAL, where the loader searches, and in the usual folders.
    """
    environ = os.environ if environ is None else environ
    if named := environ.get("KINA_INTERPOSE_REAL"):
        return Path(named)
    candidates = [Path(part) / SONAME for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    # Ordinary users often have no /sbin on their PATH.
    if ldconfig := shutil.which("ldconfig", path=os.pathsep.join([os.defpath, "/sbin", "/usr/sbin"])):
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
        candidates.extend(Path(path) for path in re.findall(rf"{re.escape(SONAME)} \(.*\) => (\S+)", listing))
    candidates.extend(Path(folder) / SONAME for folder in USUAL_FOLDERS)
    for candidate in candidates:
        # An interposer that is already on the path must not be taken for the driver.
        if candidate.is_file() and "kina_interpose_reset" not in _names_of(candidate):
            return candidate.resolve()
    return None


def _cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"kina-interpose-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def build(real: Path) -> Path:
    """The folder with the interposer for the driver library ``real``, built now if it is not there yet."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    # The lookup is wrapped in C; every other name gets a stub, so the interposer exports what `real` exports.
    wrapped = {"cuGetProcAddress", "cuGetProcAddress_v2"}
    names = [name for name in _names_of(real) if re.fullmatch(r"cu[A-Z]\w*", name) and name not in wrapped]
    exports = "".join(f"EXPORT({index}, {name})\n" for index, name in enumerate(names))
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h", ".S"))
    digest = hashlib.sha256(repr((compiler, platform.machine(), exports)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = _cache_folder() / digest.hexdigest()[:24]
    if (folder / SONAME).exists():
        return folder
    with tempfile.TemporaryDirectory(dir=_cache_folder()) as scratch:
        work = Path(scratch) / "build"
        work.mkdir()
        (work / "exports.inc").write_text(exports)
        command = [*compiler, "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall"]
        command += [f"-I{work}", f"-I{SOURCES}", str(SOURCES / "interpose.c"), str(SOURCES / "stubs.S")]
        command += ["-o", str(work / SONAME)]
        # nodelete: programs keep the pointers they were given after they close the library.
        command += [f"-Wl,-soname,{SONAME}", "-Wl,-z,nodelete", "-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the interposer does not build:\n{shlex.join(command)}\n{done.stderr}")
        try:
            work.rename(folder)  # all or nothing, also with several processes building
        except OSError:
            if not (folder / SONAME).exists():
                raise
    return folder


def env(
    real: str | os.PathLike[str] | None = None,
    *,
    base: Mapping[str, str] | None = None,
    preload: bool = False,
) -> dict[str, str]:
    """An environment in which a new process finds the interposer as its driver library.

    Parameters
    ----------
    real : path, optional
        The library to forward to; else the one that :func:`find_real` finds.
    base : mapping, optional
        The environment to start from; else this process's own.
    preload : bool
        Load it into the process at start, instead of only putting it first in the search path.

    Raises
    ------
    FileNotFoundError
        No driver library was found.
    """
    environ = dict(os.environ if base is None else base)
    found = Path(real) if real is not None else find_real(environ)
    if found is None or not found.is_file():
        raise FileNotFoundError(f"no {SONAME} to forward to: {found or 'set KINA_INTERPOSE_REAL'}")
    folder = build(found)
    rest = [part for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    environ["LD_LIBRARY_PATH"] = ":".join([str(folder), *rest])
    environ["KINA_INTERPOSE_REAL"] = str(found.resolve())
    if preload:
        earlier = environ.get("LD_PRELOAD", "").split()
        environ["LD_PRELOAD"] = " ".join([str(folder / SONAME), *earlier])
    return environ


class Interposer:
    """Interposer()

    The interposer of this process, which must have been started with :func:`env`.

    Names are base names: ``cuMemAlloc`` stands for all its versions (``_v2``, ``_ptsz``). An unknown name is
    a KeyError, so that a misspelt one cannot pass for "never called".
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(SONAME)
        if not hasattr(library, "kina_interpose_reset"):
            raise RuntimeError(f"this process runs on a plain {SONAME}; start it with helpers.interpose.env()")
        library.kina_interpose_count.restype = ctypes.c_uint64
        library.kina_interpose_count.argtypes = [ctypes.c_char_p]
        library.kina_interpose_reset.restype = None
        order = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64]
        library.kina_interpose_fail.argtypes = order
        library.kina_interpose_dump.restype = ctypes.c_size_t
        library.kina_interpose_dump.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        library.kina_interpose_real.restype = ctypes.c_char_p
        self._library = library

    @property
    def real(self) -> Path | None:
        """The library that calls are forwarded to; None where it could not be loaded."""
        path = self._library.kina_interpose_real()
        return Path(os.fsdecode(path)) if path else None

    def _dump(self) -> dict[str, dict[str, int]]:
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = self._library.kina_interpose_dump(buffer, size)
            if needed < size:
                return json.loads(buffer.value)
            size = needed + 4096  # names may be added between the two calls

    def count(self, *names: str) -> int:
        """Calls of these functions together since the last reset, injected failures included."""
        total = 0
        for name in names:
            calls = self._library.kina_interpose_count(name.encode())
            if calls == UNKNOWN:
                raise KeyError(name)
            total += calls
        return total

    def counts(self) -> dict[str, int]:
        """Calls of every known function since the last reset; zeros included."""
        return self._dump()["counts"]

    def injected(self) -> dict[str, int]:
        """Calls that :meth:`fail` answered since the last reset."""
        return self._dump()["injected"]

    def reset(self) -> None:
        """Zero the counts and forget the failures not injected yet."""
        self._library.kina_interpose_reset()

    def fail(self, name: str, nth: int = 1, code: int = CUDA_ERROR_UNKNOWN, times: int = 1) -> None:
        """Let calls ``nth`` to ``nth + times - 1`` of ``name``, counted from now, return ``code``.

        They do not reach the driver. ``times=-1`` means every call from the nth on, ``times=0`` takes an
        earlier order back.
        """
        if nth < 1:
            raise ValueError(f"nth counts from 1, got {nth}")
        if self._library.kina_interpose_fail(name.encode(), nth, code, times):
            raise KeyError(name)
