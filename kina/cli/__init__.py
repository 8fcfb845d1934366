"""The command line: ``python -m kina`` or ``kina``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from kina import __version__
from kina.cli import cache, memory

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned.

    Parameters
    ----------
    arguments : sequence of str, optional
        The words after the program's name; those of the process if left out.
    """
    parser = argparse.ArgumentParser(prog="kina", description="Look at kina from outside.")
    parser.add_argument("--version", action="version", version=f"kina {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser(
        "info",
        help="versions, libraries, devices and the links between them",
        description="Versions, libraries found and where, devices and the links between them; where no GPU "
        "can be used, why, and what to do. Creates no CUDA context. Exit code 0 with or without a GPU.",
    )
    info.add_argument("--json", action="store_true", help="for programs: one JSON object, stable keys")
    info.set_defaults(run=_info)
    memory.add_commands(commands)
    cache.add_commands(commands)
    chosen = parser.parse_args(arguments)
    try:
        code = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough, as head does; nothing is left to say at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _info(chosen: argparse.Namespace) -> int:
    from kina.cli import info

    report = info.collect()
    if chosen.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print(info.render(report))
    return 0
