"""Running Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run_python(code: str, *, timeout: float = 60, flags: tuple[str, ...] = ()) -> str:
    """Run `code`; it must exit with 0 and write nothing to stderr. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"exit code {done.returncode}, stderr:\n{done.stderr}"
    return done.stdout
