# Written by tools/stubs.py from signature.pyx; not edited by hand.

"""Kernel signatures: what a function's arguments are, in its author's words."""

from __future__ import annotations

from typing import Any, Final, final

__all__ = ['Signature']

@final
class Signature:
    """Signature(text)

    The parameters of a kernel, comma-separated: ``f32[]`` is a tensor the kernel reads, ``mut f32[]`` one it reads and
    writes, ``out f32[]`` one it only writes; ``u32`` is a scalar passed by value, ``bytes[24]`` a struct of 24 bytes,
    ``ptr`` a workspace. Any dtype of kina, long or short name.

    Raises
    ------
    ArgumentError
        A word cannot be read; the message shows it.
    """
    text: Final[str]
    words: Final[list[Any]]

    def __new__(cls, text: str): ...
    def __repr__(self) -> str: ...
