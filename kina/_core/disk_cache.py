"""Files that outlive the process: bounded, checksummed, shared by processes of one user, never trusted as code paths.

An entry is ``<folder>/<key>.kina``: a magic line, the SHA-256 of what follows, and that. It is written to a file of its
own and renamed, so whoever reads sees a whole entry or none; one that does not fit its checksum is deleted and counts
as absent. Nothing in it is unpickled or executed here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["DiskCache", "DiskCacheUsage", "compiled_code", "default_folder"]

MAGIC = b"kina cache 1\n"
#: Names that nobody else gives: what does not end so is somebody's, and left alone.
SUFFIX, UNFINISHED = ".kina", ".kina-new"
DIGEST_BYTES = 32
#: An entry's time of use is renewed no more often than this.
RENEWED_S = 3600
#: What a process that died while it wrote left behind.
STALE_S = 3600

_log = logging.getLogger("kina.cache")


class DiskCacheUsage(NamedTuple):
    """What a folder holds.

    Attributes
    ----------
    folder : Path or None
        Where the entries are; None: the cache is off.
    entries, nbytes, maximum_bytes : int
        Files, their bytes, and the most that is kept.
    refused : str or None
        Why the folder is not used.
    """

    folder: Path | None
    entries: int
    nbytes: int
    maximum_bytes: int
    refused: str | None


def default_folder() -> Path | None:
    """``KINA_CACHE_DIR``; where that is unset, ``kina`` in the user's folder for caches. None: it is set, but empty."""
    named = os.environ.get("KINA_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if named is not None:
            return Path(named).expanduser().absolute() if named else None
        home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except (OSError, RuntimeError):  # nobody's home, no such user, a working folder that is gone
        return None
    return home / "kina"


class DiskCache:
    """One kind of entries of a folder, at most `maximum_bytes` of them: the least recently used go first.

    Parameters
    ----------
    folder : Path or None
        Made when something is stored, readable by its owner alone. None: nothing is found and nothing kept.
    maximum_bytes : int

    Notes
    -----
    No method raises for what the disk does: a folder that cannot be used, a full disk, an entry that is damaged are
    a cache that has nothing; the first reason is logged (``"kina.cache"``). A folder that belongs to somebody else, or
    that others can write to, is not used: what is in it could be anybody's. Thread-safe, and safe between processes.
    """

    def __init__(self, folder: Path | None, maximum_bytes: int) -> None:
        self.folder = folder
        self.maximum_bytes = maximum_bytes
        self.said = False

    def refusal(self) -> str | None:
        """Why the folder cannot be used, or None; it need not exist."""
        if self.folder is None:
            return None
        try:
            found = self.folder.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        if not stat.S_ISDIR(found.st_mode):
            return f"{self.folder} is no folder"
        if found.st_uid != os.geteuid():
            return f"{self.folder} belongs to user {found.st_uid}, not to {os.geteuid()}"
        if found.st_mode & 0o022:
            mode = stat.S_IMODE(found.st_mode)
            return f"{self.folder} can be written by others (mode {mode:03o}): chmod 700 makes it usable"
        return None

    def usable(self) -> bool:
        if self.folder is None:
            return False
        refused = self.refusal()
        if refused is not None:
            self.say(refused)
        return refused is None

    def say(self, why: str) -> None:
        if not self.said:
            self.said = True
            _log.warning("the disk cache is not used: %s", why)

    def get(self, key: str) -> bytes | None:
        """What was stored, or None."""
        if not self.usable():
            return None
        path = self.path(key)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(handle)
            return None
        with open(handle, "rb") as file:
            try:
                whole = file.read(self.maximum_bytes + 1)
            except OSError:
                return None
            begin = len(MAGIC) + DIGEST_BYTES
            content = whole[begin:]
            if not whole.startswith(MAGIC) or hashlib.sha256(content).digest() != whole[len(MAGIC) : begin]:
                with contextlib.suppress(OSError):
                    path.unlink()
                return None
            if time.time() - found.st_mtime > RENEWED_S:
                with contextlib.suppress(OSError):
                    os.utime(handle)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keep it, if it may be kept at all."""
        whole = MAGIC + hashlib.sha256(content).digest() + content
        if len(whole) > self.maximum_bytes or self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.usable():
                return
            handle, name = tempfile.mkstemp(prefix="new-", suffix=UNFINISHED, dir=self.folder)
            try:
                with open(handle, "wb") as file:
                    file.write(whole)
                os.replace(name, self.path(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
            self.shrink(self.maximum_bytes)
        except OSError as error:
            self.say(str(error))

    def path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}{SUFFIX}"

    def files(self) -> list[tuple[float, int, str]]:
        """(time of use, bytes, path) of what is ours there, the least recently used first."""
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if not entry.name.endswith((SUFFIX, UNFINISHED)):
                        continue
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime, status.st_size, entry.path))
        except OSError:
            return []
        return sorted(found)

    def shrink(self, keep_bytes: int) -> int:
        """Delete until no more than that is there; what was left unfinished long ago goes too. The entries deleted."""
        files = self.files()
        total = sum(nbytes for _, nbytes, path in files if path.endswith(SUFFIX))
        stale = time.time() - STALE_S
        gone = 0
        for used, nbytes, path in files:
            unfinished = path.endswith(UNFINISHED)
            if used >= stale if unfinished else total <= keep_bytes:
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)
                gone += not unfinished
            total -= 0 if unfinished else nbytes
        return gone

    def clear(self) -> int:
        """Delete every entry; how many there were. A folder that is not ours is left alone."""
        if self.folder is None or self.refusal() is not None:
            return 0
        return self.shrink(-1)

    def usage(self) -> DiskCacheUsage:
        """What is there now."""
        refused = self.refusal()
        files = [] if self.folder is None or refused else self.files()
        kept = [nbytes for _, nbytes, path in files if path.endswith(SUFFIX)]
        return DiskCacheUsage(self.folder, len(kept), sum(kept), self.maximum_bytes, refused)


#: The most that compiled code takes up on disk.
COMPILED_BYTES = 256 << 20


@functools.lru_cache(maxsize=8)
def _compiled_code(folder: Path | None) -> DiskCache:
    return DiskCache(folder, COMPILED_BYTES)


def compiled_code() -> DiskCache:
    """Where compiled images outlive the process, as the environment says now."""
    return _compiled_code(default_folder())
