"""Which files a CUDA C++ source takes in, so that a change of one of them is noticed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["digest_of_includes"]

#: A source that takes in more than this is not worth looking through at each compilation.
MOST_FILES = 1000
MOST_BYTES = 32 << 20

_DIRECTIVE = re.compile(rb"^[ \t]*#[ \t]*(?:include|include_next|import)\b[ \t]*([^\n]*)", re.MULTILINE)
_ASKED = re.compile(rb"__has_include(?:_next)?[ \t]*\([ \t]*([^)\n]*)\)")
_NAME = re.compile(rb'^(?:"([^"]+)"|<([^>]+)>)')
_COMMENT = re.compile(rb"/\*.*?\*/|//[^\n]*", re.DOTALL)
#: Spellings of # and of the line's end that nobody writes, and a table in C that is read from a file.
_STRANGE = re.compile(rb"%:|\?\?=|\?\?/|^[ \t]*#[ \t]*embed\b", re.MULTILINE)


def digest_of_includes(
    source: bytes, folders: Sequence[str], toolkit: Sequence[str], first: Iterable[str] = ()
) -> tuple[str, bool] | None:
    """A digest of all files that may be included, and whether there are any outside the toolkit.

    Parameters
    ----------
    source : bytes
    folders : sequence of str
        Where the compiler looks for what is included, in its order.
    toolkit : sequence of str
        Folders of `folders` that belong to the compiler: what is found there is known by the time of its change.
    first : iterable of str
        Files that are included before the source's first line.

    Returns
    -------
    tuple of str and bool, or None
        None: that cannot be said, because a name is made by a macro, a file cannot be read, or there are too many.
    """
    digest = hashlib.sha256()
    waiting = [(source, None)]
    seen: set[str] = set()
    own, total = False, 0
    asked: list[tuple[str, bool, str | None]] = [(name, True, None) for name in first]
    while waiting or asked:
        if not asked:
            text, folder = waiting.pop()
            names = _names(text)
            if names is None:
                return None
            asked = [(name, quoted, folder) for name, quoted in names]
            continue
        name, quoted, folder = asked.pop()
        path = _resolve(name, [folder] if quoted and folder else [], folders)
        digest.update(f"{name}\0{path}\0".encode())
        if path is None or path in seen:
            continue
        seen.add(path)
        try:
            if any(_within(path, place) for place in toolkit):
                status = os.stat(path)
                digest.update(f"{status.st_size} {status.st_mtime_ns}\0".encode())
                continue
            content = Path(path).read_bytes()
        except OSError:
            return None
        own, total = True, total + len(content)
        if len(seen) > MOST_FILES or total > MOST_BYTES:
            return None
        digest.update(hashlib.sha256(content).digest())
        waiting.append((content, os.path.dirname(path)))
    return digest.hexdigest(), own


def _names(text: bytes) -> list[tuple[str, bool]] | None:
    """(name, whether it is quoted) of all that may be included, in comments and dead branches too."""
    joined = re.sub(rb"\\[ \t]*\r?\n", b"", text)
    if _STRANGE.search(joined):
        return None
    if b"include" not in joined and b"import" not in joined:
        return []
    found = []
    for reading in (joined, _COMMENT.sub(b" ", joined)):
        for operand in (*_DIRECTIVE.findall(reading), *_ASKED.findall(reading)):
            name = _NAME.match(operand)
            if name is None:
                if reading is joined and b"/*" in operand:
                    continue  # the reading without comments sees it
                return None
            found.append((os.fsdecode(name[1] or name[2]), name[1] is not None))
    return found


def _resolve(name: str, beside: Sequence[str], folders: Sequence[str]) -> str | None:
    for folder in (*beside, *folders):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    return None


def _within(path: str, folder: str) -> bool:
    return os.path.normpath(path).startswith(os.path.join(folder, ""))
