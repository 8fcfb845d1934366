"""Where the headers of kina are, for those who build on it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_include"]


def get_include() -> str:
    """The folder of ``kina_tensor.h`` and ``kina_memory.h``, for the include path of C, C++ and Cython code.

    Returns
    -------
    str
        An absolute path.
    """
    return str(Path(__file__).resolve().parents[1] / "include")
