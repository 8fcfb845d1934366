"""``kina cache``: what earlier processes have compiled."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add ``cache`` to the subparsers of the command line."""
    cache = commands.add_parser(
        "cache",
        help="what was compiled and is kept on disk",
        description="Code that raw.module compiled from CUDA C++ is kept in the folder that KINA_CACHE_DIR names "
        "(empty: nowhere), else in ~/.cache/kina.",
    )
    actions = cache.add_subparsers(dest="action", required=True, metavar="action")
    info = actions.add_parser(
        "info", help="where it is and how much", description="Folder, entries, bytes, and why it is not used, if so."
    )
    info.add_argument("--json", action="store_true", help="for programs: one JSON object, stable keys")
    info.set_defaults(run=_info)
    clear = actions.add_parser("clear", help="delete every entry", description="Delete every entry of the folder.")
    clear.set_defaults(run=_clear)


def _info(chosen: argparse.Namespace) -> int:
    from kina._core.disk_cache import compiled_code

    usage = compiled_code().usage()
    if chosen.json:
        print(json.dumps(usage._asdict(), default=str))
        return 0
    print(f"folder   {usage.folder or 'none: KINA_CACHE_DIR is empty'}")
    print(f"entries  {usage.entries}")
    print(f"size     {usage.nbytes / 2**20:.1f} MiB of at most {usage.maximum_bytes / 2**20:.0f} MiB")
    if usage.refused:
        print(f"not used {usage.refused}")
    return 0


def _clear(chosen: argparse.Namespace) -> int:
    from kina._core.disk_cache import compiled_code

    cache = compiled_code()
    refused = cache.refusal()
    if refused is not None:
        print(f"kina: the folder is not used, and left alone: {refused}")
        return 1
    print(f"{cache.clear()} entries deleted")
    return 0
