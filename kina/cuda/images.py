"""What a module can be made from: PTX, CUBIN and fatbin images, and CUDA C++ text, told apart and checked.

The driver is given an address and no length, so an image whose own headers point beyond its end must not reach it.

Source: PTX ISA, "Directives" (.version comes first); ELF-64; CUDA Driver API, "Module Management".
"""

from __future__ import annotations

import os
import re
import struct
from typing import NamedTuple

from kina.errors import ArgumentError, ModuleLoadError

__all__ = ["Image", "declared_parameters", "read_image", "targets_of"]

ELF = b"\x7fELF"
FATBIN = b"\x50\xed\x55\xba"
_EM_CUDA = 190
_NO_BITS = 8
_MEMBERS = {1: "compute", 2: "sm"}  # of a fatbin: PTX and CUBINs
# Possessive, so that no text takes longer than its length.
_BLANK = re.compile(rb"(?:\s++|//[^\n]*+(?:\n|\Z)|/\*.*?\*/)*+", re.DOTALL)


class Image(NamedTuple):
    """An image, or a source.

    Attributes
    ----------
    kind : str
        ``"ptx"``, ``"cubin"``, ``"fatbin"`` or ``"source"``.
    data : bytes
        Text without its trailing NULs.
    path : str or None
        Where it was read from, absolute.
    """

    kind: str
    data: bytes
    path: str | None = None


def read_image(source: object) -> Image:
    """Tell what somebody passed, and check what can be checked without a driver.

    Parameters
    ----------
    source : str, bytes, bytearray, memoryview or os.PathLike
        A str is text itself, never a path.

    Raises
    ------
    ArgumentError
        It is of another type.
    ModuleLoadError
        It is empty, text with a NUL inside, or an image that is cut off; a file cannot be read.
    """
    path = None
    if isinstance(source, str):
        data = source.encode("utf-8", "surrogatepass")
    elif isinstance(source, (bytes, bytearray, memoryview)):
        try:
            data = bytes(source)
        except ValueError as error:
            raise ArgumentError(f"the image cannot be read: {error}", operation="module") from None
    elif isinstance(source, os.PathLike):
        try:
            path = os.path.abspath(os.fsdecode(os.fspath(source)))
            with open(path, "rb") as file:
                data = file.read()
        except (OSError, ValueError) as error:
            raise ModuleLoadError(f"the image cannot be read: {error}", operation="module") from None
    else:
        raise ArgumentError(
            f"a module is made from PTX, CUBIN, fatbin or CUDA C++: str, bytes or a path, not {type(source).__name__}",
            operation="module",
        )
    if data.startswith(ELF):
        _check_cubin(data)
        return Image("cubin", data, path)
    if data.startswith(FATBIN):
        _check_fatbin(data)
        return Image("fatbin", data, path)
    data = data.rstrip(b"\0")
    if not data.strip():
        raise ModuleLoadError("the module image is empty", operation="module")
    begin = _BLANK.match(data).end()
    kind = "ptx" if data.startswith(b".version", begin) else "source"
    if b"\0" in data:
        word = "PTX" if kind == "ptx" else "CUDA C++"
        raise ModuleLoadError(f"{word} is text, but byte {data.index(0)} of it is NUL", operation="module")
    return Image(kind, data, path)


def _broken(kind: str, why: str) -> ModuleLoadError:
    return ModuleLoadError(f"the {kind} is no whole image: {why}", operation="module")


def _check_cubin(data: bytes) -> None:
    if len(data) < 64:
        raise _broken("CUBIN", f"{len(data)} bytes are less than its header's 64")
    if data[4:6] != b"\x02\x01":
        raise _broken("CUBIN", "it is not a little-endian ELF of 64 bits")
    (machine,) = struct.unpack_from("<H", data, 18)
    if machine != _EM_CUDA:
        raise _broken("CUBIN", f"an ELF for machine {machine}, not for CUDA ({_EM_CUDA})")
    segments, sections = struct.unpack_from("<QQ", data, 32)
    segment_size, segment_count, section_size, section_count, names = struct.unpack_from("<5H", data, 54)
    for what, begin, size, count in (
        ("program", segments, segment_size, segment_count),
        ("section", sections, section_size, section_count),
    ):
        if begin and (not count or size < (56 if what == "program" else 64) or begin + size * count > len(data)):
            raise _broken("CUBIN", f"its {what} headers end at byte {begin + size * count} of {len(data)}")
    if names and names >= section_count:
        raise _broken("CUBIN", f"its names are in section {names} of {section_count}")
    for i in range(section_count):
        kind, _flags, _address, begin, size = struct.unpack_from("<IQQQQ", data, sections + i * section_size + 4)
        if kind != _NO_BITS and begin + size > len(data):
            raise _broken("CUBIN", f"section {i} ends at byte {begin + size} of {len(data)}")
    for i in range(segment_count):
        begin, _virtual, _physical, size = struct.unpack_from("<4Q", data, segments + i * segment_size + 8)
        if begin + size > len(data):
            raise _broken("CUBIN", f"segment {i} ends at byte {begin + size} of {len(data)}")


def _check_fatbin(data: bytes) -> None:
    if len(data) < 16:
        raise _broken("fatbin", f"{len(data)} bytes are less than its header's 16")
    header, body = struct.unpack_from("<HQ", data, 6)
    if header < 16 or header + body > len(data):
        raise _broken("fatbin", f"it ends at byte {header + body} of {len(data)}")
    at = header
    while at < header + body:
        if at + 16 > len(data):
            raise _broken("fatbin", f"the header at byte {at} is cut off")
        size, payload = struct.unpack_from("<IQ", data, at + 4)
        if size < 16 or at + size + payload > header + body:
            raise _broken("fatbin", f"the member at byte {at} ends at byte {at + size + payload} of {header + body}")
        if data.startswith(ELF, at + size):
            _check_cubin(data[at + size : at + size + payload])
        at += size + payload


_ENTRY = re.compile(rb"\.entry\s++([\w$%]++)\s*+(?:\(([^(){};]*+)\))?")
_TYPE = re.compile(rb"\.((?:b|u|s|f)(?:8|16|32|64|128)|f16x2|bf16|bf16x2|texref|samplerref|surfref)")
_COMMENT = re.compile(rb"//[^\n]*+|/\*.*?(?:\*/|\Z)", re.DOTALL)


def declared_parameters(ptx: bytes) -> dict[str, tuple[str, ...]]:
    """The types of each entry's parameters as PTX declares them: ``"u64"``, ``"f32"``, ``"b8[24]"``.

    An entry with a declaration that cannot be read is left out.
    """
    found = {}
    for name, inside in _ENTRY.findall(_COMMENT.sub(b" ", ptx)):
        types = []
        for declaration in inside.split(b",") if inside.strip() else []:
            declared = _declared_type(declaration)
            if declared is None:
                break
            types.append(declared)
        else:
            found[name.decode()] = tuple(types)
    return found


def _declared_type(declaration: bytes) -> str | None:
    text, count = declaration.strip(), b""
    if text.endswith(b"]"):
        text, _, count = text[:-1].rpartition(b"[")
        count = b"[" + count.strip() + b"]"
    words = text.split()
    types = [kind[1] for kind in map(_TYPE.fullmatch, words[1:-1]) if kind]
    if not words or words[0] != b".param" or len(types) != 1:
        return None
    return (types[0] + count).decode()


def targets_of(kind: str, image: bytes) -> list[str]:
    """What a whole CUBIN or fatbin holds: ``"sm_90"`` is code, ``"compute_75"`` PTX. What is unknown is left out."""
    if kind == "cubin":
        version, (flags,) = image[8], struct.unpack_from("<I", image, 48)
        found = (flags >> 8 if version >= 8 else flags) & 0xFF
        return [f"sm_{found}"] if found else []
    targets = []
    at, body = struct.unpack_from("<HQ", image, 6)
    end = at + body
    while at + 32 <= end:
        member, _, size, payload = struct.unpack_from("<HHIQ", image, at)
        (architecture,) = struct.unpack_from("<I", image, at + 28)
        if size >= 32 and architecture and member in _MEMBERS:
            targets.append(f"{_MEMBERS[member]}_{architecture}")
        at += size + payload
    return targets
