"""Traces of hardware, replayed: the simulated driver answers as the real one did, or the difference is listed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from driver_sim.oracle import compare, play, prototypes
from helpers.driver_sim import SOURCES, sim_env

TRACES = sorted((SOURCES / "oracle" / "traces").glob("*.json"))


def name_of(step: dict[str, Any]) -> str:
    return str(step.get("call") or next(iter(step)))


def covers(entry: dict[str, Any], index: int, step: dict[str, Any], field: str, hardware: Any, simulated: Any) -> bool:
    return (
        entry.get("call", name_of(step)) == name_of(step)
        and entry["field"] == field
        and ("steps" not in entry or index in entry["steps"])
        and ("hardware" not in entry or entry["hardware"] == hardware)
        and ("simulated" not in entry or entry["simulated"] == simulated)
    )


Replays = dict[Path, "Future[tuple[list[Any], str]]"]


@pytest.fixture(scope="module")
def replays(request: pytest.FixtureRequest) -> Iterator[Replays]:
    """Each trace that a chosen test asks for, played beside the others: as many processes as there are processors."""
    room = Semaphore(os.cpu_count() or 1)
    env = {devices: {**sim_env(devices), **compare.REPLAY_ENV} for devices in (1, 2)}

    def replay(path: Path) -> tuple[list[Any], str]:
        trace = play.read_trace(path)
        return play.play(compare.replayable(trace), env[trace["devices"]], room=room)

    chosen = [item for item in request.session.items if getattr(item, "originalname", None) == "test_replay"]
    with ThreadPoolExecutor(16) as pool:
        yield {path: pool.submit(replay, path) for path in (item.callspec.params["path"] for item in chosen)}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_replay(path: Path, replays: Replays) -> None:
    trace = play.read_trace(path)
    saw, err = replays[path].result()
    assert "Sanitizer" not in err, err
    known = compare.accepted().get(trace["scenario"], [])
    used = [False] * len(known)
    wrong = []
    for index, field, hardware, simulated in compare.differences(trace, saw):
        step = trace["steps"][index]
        cover = [i for i, entry in enumerate(known) if covers(entry, index, step, field, hardware, simulated)]
        for i in cover:
            used[i] = True
        if not cover:
            what = {key: value for key, value in step.items() if key != "saw"}
            wrong.append(f"step {index} {what}\n    {field}: hardware {hardware!r}, simulated {simulated!r}")
    assert not wrong, "\n".join([*wrong, err])
    idle = [entry for entry, was_used in zip(known, used, strict=True) if not was_used]
    assert not idle, f"listed differences that are none any more: {idle}"


def test_every_difference_has_a_trace_and_a_reason() -> None:
    recorded = {path.stem for path in TRACES}
    for scenario, entries in compare.accepted().items():
        assert scenario in recorded
        assert entries
        assert all(entry["why"] for entry in entries)


def test_a_difference_is_seen() -> None:
    trace = {
        "steps": [
            {"call": "cuInit", "args": [0], "saw": {"result": 0, "context": "none"}},
            {"call": "cuDeviceGetCount", "args": ["&n"], "saw": {"died": "SIGSEGV"}},
            {"call": "cuStreamCreate", "args": ["&s", 0]},  # never came to it
            {"call": "cuStreamQuery", "args": [0], "either": [0, 600], "saw": {"result": 600}},
            {"log": 2, "unordered": True, "saw": {"log": [{"ran": "a"}, {"ran": "b"}]}},
        ]
    }
    assert [step.get("call") for step in compare.replayable(trace)] == [
        "cuInit", "cuDeviceGetCount", "cuStreamQuery", None,
    ]  # fmt: skip
    died = {"died": "SIGSEGV"}
    same = [{"result": 0, "context": "none"}, died, {"result": 0}, {"log": [{"ran": "b"}, {"ran": "a"}]}]
    assert list(compare.differences(trace, same)) == []
    other = [{"result": 3, "context": "error 3"}, {"result": 400}, {"result": 1}, {"log": [{"ran": "a"}]}]
    assert [found for found in compare.differences(trace, other) if found[0] < 4] == [
        (0, "result", 0, 3), (0, "context", "none", "error 3"), (1, "died", "SIGSEGV", 400), (3, "result", 600, 1),
    ]  # fmt: skip
    assert [(index, field) for index, field, _, _ in compare.differences(trace, other)][-1] == (4, "log")
    gone = [{"result": 0, "context": "none"}, {"died": "SIGABRT"}, None, None]
    assert [(index, field) for index, field, _, _ in compare.differences(trace, gone)] == [
        (1, "died"), (3, "result"), (4, "log"),
    ]  # fmt: skip


def test_prototypes_are_those_of_the_headers() -> None:
    from helpers.driver_sim import _builder

    header = (_builder().find_include() / "cudaTypedefs.h").read_text()
    newest: dict[str, tuple[int, int]] = {}
    for name, version, parameters in re.findall(r"\*PFN_(cu\w+?)_v(\d+)\)\((.*?)\);", header):
        count = 0 if parameters.strip() in ("", "void") else parameters.count(",") + 1
        if int(version) <= prototypes.VERSION:
            newest[name] = max(newest.get(name, (0, 0)), (int(version), count))
    for name, words in prototypes.BY_NAME.items():
        assert len(words) + 2 * words.count("jit") == newest[name][1], name
