# Written by tools/stubs.py from nvrtc.pyx; not edited by hand.

"""NVRTC: the library that compiles CUDA C++, found when it is first needed.

Source: NVRTC documentation, "General Information Query" and "Compilation".
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ['NvrtcLibrary', 'compile_program', 'nvrtc']

class NvrtcLibrary(NamedTuple):
    """The library that is used, once it is loaded.

    Attributes
    ----------
    path : str
        Its file.
    version : tuple of int
        (major, minor) of its CUDA toolkit.
    identity : tuple of int
        Size in bytes and time of change in ns of the file: another build is another compiler.
    architectures : tuple of int
        What it compiles for, ascending: 90 for ``compute_90``.
    """
    path: str
    version: tuple[int, int]
    identity: tuple[int, int]
    architectures: tuple[int, ...]




def nvrtc() -> NvrtcLibrary:
    """Find and load the library: a copy that is already loaded first, then as cuda-pathfinder looks.

    Raises
    ------
    UnavailableError
        There is none, or it is too old; the message says what to install.
    """
def compile_program(source: bytes, name: bytes, options: tuple[Any, ...], names: tuple[Any, ...], ptx: bool) -> tuple[bytes, bytes, str, tuple[str, ...]]:
    """Compile one program, without the GIL.

    Parameters
    ----------
    source, name : bytes
        NUL-free text, and what it is called in messages.
    options, names : tuple of bytes
        Options of NVRTC, one word each; name expressions.
    ptx : bool
        Whether PTX is wanted, or a CUBIN.

    Returns
    -------
    tuple
        The image, its PTX, the compiler's words (warnings), the lowered name of each expression.

    Raises
    ------
    CompileError
        The source, an option or a name was refused; ``log`` has the compiler's words.
    """
