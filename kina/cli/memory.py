"""``kina memory``: what logs of allocations say."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add ``memory`` to the subparsers of the command line."""
    memory = commands.add_parser("memory", help="what a log of allocations says", description="Logs of allocations.")
    actions = memory.add_subparsers(dest="action", required=True, metavar="action")
    report = actions.add_parser(
        "report",
        help="figures of a log, or live bytes over time as a picture",
        description="Figures of a log of allocations, RMM's or that of a LoggingMemoryResource: peak, sizes, what was "
        "never freed. With --out, live bytes over time as a picture. Logs may be compressed: .gz, .bz2, .xz.",
    )
    report.add_argument("log", metavar="LOG", help="the file; columns Thread,Time,Action,Pointer,Size,Stream")
    report.add_argument("--out", metavar="FILE", help="a picture in FILE.png, or picture and figures in FILE.html")
    report.add_argument(
        "--reserved-from",
        metavar="LOG",
        help="the log of the resource below a pool, of the same run: what is live there is reserved",
    )
    report.set_defaults(run=_report)


def _report(chosen: argparse.Namespace) -> int:
    from kina.errors import KinaError
    from kina.memory import report
    from kina.memory.log_reader import read_log

    try:
        trace = read_log(chosen.log)
        below = None if chosen.reserved_from is None else read_log(chosen.reserved_from)
        if chosen.out is None:
            print(report.summarize(trace, reserved_from=below))
        else:
            report.draw(trace, chosen.out, reserved_from=below)
    except (KinaError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"kina: {error}", file=sys.stderr)
        return 1
    return 0
