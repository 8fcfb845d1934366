"""Reading logs of allocations: RMM's, and those of :class:`kina.memory.LoggingMemoryResource`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO

from kina._core.allocation_trace import AllocationTrace
from kina.errors import ArgumentError, InvalidConfigError, UnsupportedError

if TYPE_CHECKING:
    from _typeshed import StrPath

__all__ = ["EVENT", "EVENT_KINDS", "read_log"]

# One record of a trace, for numpy.dtype.
EVENT = [
    ("nbytes", "<u8"),
    ("time_us", "<i8"),
    ("slot", "<u4"),
    ("line", "<u4"),
    ("thread", "<u4"),
    ("stream", "<u2"),
    ("action", "u1"),
    ("reserved", "u1"),
]
EVENT_KINDS = ("allocate", "free", "failure", "unknown free", "empty")

_PIECE = 1 << 22


def read_log(log: StrPath) -> AllocationTrace:
    """The events of a log, each free joined to its allocation.

    Parameters
    ----------
    log : str or os.PathLike
        The file: comma-separated with the columns ``Thread``, ``Time``, ``Action``, ``Pointer``, ``Size`` and
        ``Stream``, and any more behind them. Names in ``.gz``, ``.bz2`` and ``.xz`` are decompressed; ``.zst`` from
        Python 3.14 on.

    Raises
    ------
    InvalidConfigError
        A line that is none of such a log; the message names it and says why. An allocation at an address that is live
        already is one: its free is missing. Or compressed data is damaged.
    OSError
        The file cannot be read, or holds no compressed data where its name says so.
    UnsupportedError
        ``.zst`` before Python 3.14.

    Notes
    -----
    Frees of addresses that the log did not see allocated are kept as such and change nothing: a log may begin in the
    middle of a program. So are failed allocations, and those of 0 bytes. A free of another size than its allocation
    is counted (``wrong_size_count``) and taken for one of the right size. A file that ends within a line, as a process
    that died leaves it, is read up to there (``was_cut``). Times that jump back by more than half a day have passed
    midnight. Takes 32 bytes of memory an event.
    """
    if isinstance(log, bytes) or not isinstance(log, str | os.PathLike):
        raise ArgumentError(f"read_log: a path is needed, not {type(log).__name__}", operation="read_log")
    path = os.fspath(log)
    trace = AllocationTrace(path)
    cut = False
    with _open(path) as file:
        while True:
            try:
                piece = file.read1(_PIECE)  # unlike read(), it loses nothing of what came before the end
            except EOFError:  # of compressed data, too early
                cut = True
                break
            except OSError:
                raise
            except Exception as error:  # each library has its own
                reason = f"{path}: its compressed data is damaged: {error}"
                raise InvalidConfigError(reason, operation="read_log") from error
            if not piece:
                break
            trace.feed(piece)
    trace.finish(cut)
    return trace


def _open(path: str) -> BinaryIO:
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".gz":
        import gzip

        return gzip.open(path)
    if suffix == ".bz2":
        import bz2

        return bz2.open(path)
    if suffix == ".xz":
        import lzma

        return lzma.open(path)
    if suffix == ".zst":
        try:
            from compression import zstd
        except ImportError:
            raise UnsupportedError(
                f"read_log: {path}: Python reads .zst from 3.14 on; decompress it first: zstd -d {path}",
                operation="read_log",
            ) from None
        return zstd.open(path)
    return open(path, "rb")
