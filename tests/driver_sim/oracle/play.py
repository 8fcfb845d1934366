"""One scenario, one process: what it saw, a crash or a hang included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

__all__ = ["play", "read_trace", "write_trace"]

MACHINE = Path(__file__).with_name("machine.py")
LIMIT_S = 90.0


def play(
    steps: list[dict[str, Any]], env: Mapping[str, str], patience_ms: float = 800, room: Semaphore | None = None
) -> tuple[list[Any], str]:
    """What each step saw, and what the processes wrote to their standard error.

    The processes of a scenario run beside each other, as many as there is `room` for.

    A step that ended its process saw ``{"died": "SIGSEGV"}``, one that held it ``{"hung": true}``; those behind it,
    up to the next restart, saw None.
    """
    room = room or Semaphore(1)

    def one(part: list[dict[str, Any]]) -> tuple[list[Any], str]:
        with room:
            return play_process(part, env, patience_ms)

    with ThreadPoolExecutor(16) as pool:
        parts = list(pool.map(one, split(steps)))
    return [found for saw, _ in parts for found in saw], "".join(err for _, err in parts)


def split(steps: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps of each process: a restart is the first of its own."""
    parts: list[list[dict[str, Any]]] = [[]]
    for step in steps:
        if "restart" in step:
            parts.append([])
        parts[-1].append(step)
    return [part for part in parts if part]


def play_process(steps: list[dict[str, Any]], env: Mapping[str, str], patience_ms: float) -> tuple[list[Any], str]:
    request = json.dumps({"steps": steps, "patience_ms": patience_ms})
    command = [sys.executable, "-S", str(MACHINE)]
    process = subprocess.Popen(
        command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    killed = False
    try:
        out, err = process.communicate(request, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        killed = True
        process.kill()
        out, err = process.communicate()
    saw: list[Any] = [None] * len(steps)
    begun = -1
    for line in out.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by the end of the process
        if "begin" in record:
            begun = record["begin"]
        else:
            saw[record["step"]] = record["saw"]
    if begun >= 0 and saw[begun] is None:
        if killed:
            saw[begun] = {"hung": True}
        elif process.returncode < 0:
            saw[begun] = {"died": signal.Signals(-process.returncode).name}
    if process.returncode > 0:
        raise RuntimeError(f"the machine failed at step {begun} {steps[begun] if begun >= 0 else ''}:\n{err}")
    return saw, err


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """JSON with one step a line, so that a difference is a line of a diff."""
    head = {key: value for key, value in trace.items() if key != "steps"}
    lines = [json.dumps(head, ensure_ascii=False)[:-1] + ', "steps": [']
    lines.append(",\n".join(json.dumps(step, ensure_ascii=False) for step in trace["steps"]))
    path.write_text("\n".join([*lines, "]}", ""]), encoding="utf-8")


def read_trace(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return trace
