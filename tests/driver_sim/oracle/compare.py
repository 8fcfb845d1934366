"""Compare what a replay saw with what a trace says, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["REPLAY_ENV", "accepted", "differences", "replayable"]

DIFFERENCES = Path(__file__).with_name("differences.json")

#: What the recorder sets too.
REPLAY_ENV = {"CUDA_MODULE_LOADING": "LAZY"}

FIELDS = ("result", "out", "context", "returned", "log", "values", "died", "hung", "left_out")

#: How a process ends: what else the step saw elsewhere is part of the same difference.
ENDS = ("died", "hung")

#: Where the hardware's call returned before its gate opened, a simulated one has this long to do so too. Where it
#: waited, a moment is enough to see that the simulated one waits.
LONG_MS, SHORT_MS = 15000, 60

#: Where the hardware had done the work, the simulation may need this long.
READY_MS = 300

#: A sleep gives work its time, on a machine that may be busy with much else.
SLEEP_MS = 400


def replayable(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a trace as the machine takes them: without what was seen, with the patience it needs.

    Those that no process of the hardware came to, because it died before, are left out.
    """
    steps = []
    for step in trace["steps"]:
        if "saw" not in step:
            continue
        bare = {key: value for key, value in step.items() if key != "saw"}
        if "gate" in step:
            waited = step["saw"].get("returned") == "after the gate opened"
            bare["patience_ms"] = SHORT_MS if waited else LONG_MS
        if step.get("call", "").endswith("Query") and step["saw"].get("result") == 0 and "until_ready" not in step:
            bare |= {"until_ready": True, "ready_within_ms": READY_MS}
        if "sleep" in step:
            bare["sleep"] = max(SLEEP_MS, step["sleep"])
        if "log" in step:
            # An entry that never came on hardware is waited for shortly.
            complete = len(step["saw"].get("log", [])) >= step["log"]
            bare["within_ms"] = LONG_MS if complete else SHORT_MS
        steps.append(bare)
    return steps


def normal(field: str, value: Any, step: dict[str, Any]) -> Any:
    if field == "log" and value is not None and step.get("unordered"):
        return sorted(value, key=json.dumps)
    return value


def differences(trace: dict[str, Any], replay: list[Any]) -> Iterator[tuple[int, str, Any, Any]]:
    """Step number, field, what the hardware gave, what the replay gave."""
    played = [(index, step) for index, step in enumerate(trace["steps"]) if "saw" in step]
    for (index, step), saw in zip(played, replay, strict=True):
        recorded, again = step["saw"], saw or {}
        ended = [field for field in ENDS if field in recorded]
        if ended and not any(field in again for field in ENDS):
            yield index, ended[0], recorded[ended[0]], again.get("result")
            continue
        for field in FIELDS:
            ours, theirs = normal(field, again.get(field), step), normal(field, recorded.get(field), step)
            if field in step.get("any", ()) or ours == theirs:
                continue
            if field == "result" and {ours, theirs} <= set(step.get("either", ())):
                continue
            yield index, field, theirs, ours


def accepted() -> dict[str, list[dict[str, Any]]]:
    """By scenario: the differences that stay, each with its reason.

    An entry names the field and why. `call` (or other kind of step), `steps` (their numbers), `hardware` and
    `simulated` (what each gave) say closer what it speaks of, where they are there.
    """
    found: dict[str, list[dict[str, Any]]] = json.loads(DIFFERENCES.read_text(encoding="utf-8"))
    return found
