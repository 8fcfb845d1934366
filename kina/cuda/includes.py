"""Which files a CUDA C++ source takes in, so that a change of one of them is noticed."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Includes", "look_through"]

#: A source that takes in more than this is not worth looking through at each compilation.
MOST_FILES = 1000
MOST_BYTES = 32 << 20

_BLANKS = b" \t\f\v"
_WORDS = (b"include", b"import", b"embed")
#: No name is longer, and a line without an end does not take for ever.
_DIRECTIVE = re.compile(rb'#[ \t\f\v]*include(?:_next)?[ \t\f\v]*("[^"\n]{1,1000}"|<[^>\n]{1,1000}>)')
_ASKED = re.compile(rb'__has_include(?:_next)?[ \t\f\v]*\([ \t\f\v]*("[^"\n]{1,1000}"|<[^>\n]{1,1000}>)')
_DEFINED = re.compile(rb"\bdefined[ \t\f\v]*\(?[ \t\f\v]*__has_include\b")
_HASH = re.compile(rb"#[ \t\f\v]*(\w+)")


class Includes(NamedTuple):
    """What is known of the files.

    Attributes
    ----------
    digest : str
        Differs whenever one of them differs, or another would be found.
    settled : bool
        All of them are the compiler's own, whatever the user does with files.
    """

    digest: str
    settled: bool


def look_through(
    source: bytes, folders: Sequence[str], toolkit: Sequence[str], first: Iterable[str] = (), folder: str | None = None
) -> Includes | None:
    """Find all files that may be included, also in comments and in branches that are not taken.

    Parameters
    ----------
    source : bytes
    folders : sequence of str
        Where the compiler looks. In which order does not matter here: of the same name, every file counts.
    toolkit : sequence of str
        Folders among them of the compiler itself: what is found there is known by its size and the time of its change.
    first : iterable of str
        Files that are included before the source's first line.
    folder : str or None
        Where the source is, if it is a file: the compiler looks there too.

    Returns
    -------
    Includes or None
        None: that cannot be said. A name is made by a macro, a line is one that only a compiler can read, a file
        cannot be read, or there are too many.
    """
    own_folders = folder is not None or any(each not in toolkit for each in folders)
    names = _names(source)
    if names is None:
        return None
    digest = hashlib.sha256()
    waiting = [(name, folder) for name in (*(name for name, _ in names), *first)]
    seen: set[str] = set()
    settled, total = not own_folders or not waiting, 0
    while waiting:
        name, beside = waiting.pop()
        places = [each for each in (beside, folder, *folders) if each is not None]
        paths = [
            path for path in (os.path.join(place, name) for place in dict.fromkeys(places)) if os.path.isfile(path)
        ]
        digest.update(os.fsencode("\0".join((name, *paths, ""))))
        settled = settled and len(paths) == 1
        for path in paths:
            real = os.path.realpath(path)
            if real in seen:
                continue
            seen.add(real)
            try:
                status = os.stat(path)
                total += status.st_size
                if len(seen) > MOST_FILES or total > MOST_BYTES:
                    return None
                if any(_within(path, place) for place in toolkit):
                    digest.update(f"{status.st_size} {status.st_mtime_ns}\0".encode())
                    if not own_folders:
                        continue  # what it includes is the toolkit's, too
                    names = _names_of_file(path, status.st_size, status.st_mtime_ns)
                else:
                    settled = False
                    content = Path(path).read_bytes()
                    digest.update(hashlib.sha256(content).digest())
                    names = _names(content)
            except OSError:
                return None
            if names is None:
                return None
            waiting.extend((name, os.path.dirname(path) if quoted else None) for name, quoted in names)
    return Includes(digest.hexdigest(), settled)


@functools.lru_cache(maxsize=2048)
def _names_of_file(path: str, nbytes: int, changed_ns: int) -> list[tuple[str, bool]] | None:
    return _names(Path(path).read_bytes())


def _names(text: bytes) -> list[tuple[str, bool]] | None:
    """(name, whether it is quoted); None where a line may include something that is not seen here."""
    if not any(word in text for word in (*_WORDS, b"\\", b"??/")):
        return []
    joined = re.sub(rb"(?:\\|\?\?/)[ \t\f\v]{0,100}\r?\n", b"", text)
    found: list[tuple[str, bool]] = []
    for line in re.split(rb"[\r\n]", joined):
        if not any(word in line for word in _WORDS):
            continue
        # A directive is first on its line, but for comments, of which any may have begun on a line before.
        if line.count(b"*/") > 10:
            return None
        begins = [line, *(line[at.end() :] for at in re.finditer(rb"\*/", line))]
        directive = False
        for number, rest in enumerate(begins):
            begin = rest.lstrip(_BLANKS)
            if begin.startswith((b"%:", b"??=")) or (number and begin.startswith((*_WORDS, b"__has"))):
                return None
            if begin.startswith(b"#"):
                directive = True
                names = _names_of_directive(begin)
                if names is None:
                    return None
                found.extend(names)
        if b"__has_" in line and not directive and (b"/*" in line or b"*/" in line):
            return None
    return found


def _names_of_directive(line: bytes) -> list[tuple[str, bool]] | None:
    word = _HASH.match(line)
    if word is None or word[1] in (b"import", b"embed"):
        return None
    if word[1] in (b"include", b"include_next"):
        named = _DIRECTIVE.match(line)
        names = [named[1]] if named else None
    elif word[1] in (b"if", b"elif"):
        rest = _DEFINED.sub(b"", line)
        names = _ASKED.findall(rest)
        if len(names) != rest.count(b"__has_"):
            return None
    else:
        return None if word[1] == b"define" and b"__has_" in line else []
    return None if names is None else [(os.fsdecode(name[1:-1]), name.startswith(b'"')) for name in names]


def _within(path: str, folder: str) -> bool:
    return os.path.normpath(path).startswith(os.path.join(folder, ""))
