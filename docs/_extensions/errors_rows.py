"""The tree of kina.errors as rows of text, made from the installed classes."""

from __future__ import annotations

import kina.errors as errors

__all__ = ["rows"]


def rows() -> list[tuple[str, str, str, str, str]]:
    """One row for each class, by detail code."""
    classes = [getattr(errors, name) for name in errors.__all__]
    kinds = [kind for kind in classes if isinstance(kind, type) and issubclass(kind, errors.KinaError)]
    found = []
    for kind in sorted(kinds, key=lambda kind: (kind is not errors.KinaError, kind.detail)):
        if kind is errors.KinaError:
            continue
        bases = [base.__name__ for base in kind.__bases__ if base is not errors.KinaError]
        status = errors.Status(kind.detail // 100)
        summary = kind.__doc__.strip().splitlines()[0]
        found.append((kind.__name__, ", ".join(bases), str(kind.detail), f"{status} {status.name}", summary))
    return found
