"""Any driver call fails: every operation of kina, every call it makes, and what is left of it then (helpers/faults.py).

After each failure: a typed error that names the operation and carries the driver's answer, or success where the
operation can do without the call; no leak, no double free, the caller's context stack as it was unless the restore
itself failed, and everything usable, or poisoned with the first cause. A failure that poisons its device ends its
process; the next one goes on in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import operations
from helpers.faults import CODES, FIRST_USES
from helpers.forks import Forks
from helpers.operations import CASES, WITHOUT_CALLS

import kina

pytestmark = [pytest.mark.simulated, pytest.mark.multi_gpu]  # each makes its own processes, with two devices

DEVICES = {"KINA_SIM_DEVICES": "2", "KINA_SIM_TIMEOUT_MS": "10000", "KINA_CACHE_DIR": ""}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("helpers.faults") as ready:
        yield ready


def sweep(forks: Forks, name: str, code: int, from_then_on: bool) -> int:
    memory = 1 << 20 if name == "allocate: the device is full" else 1 << 30
    first, count = 1, 0
    while first is not None:
        outcome = forks.run(
            "sweep", name, code, from_then_on, first, env={**DEVICES, "KINA_SIM_MEMORY": str(memory)}
        )  # fmt: skip
        assert (outcome.status, outcome.error, outcome.stderr) == (0, "", "")
        first, made, problems = outcome.result
        assert not problems, "\n".join(problems)
        count += made
    return count


def test_every_call_of_a_raw_block_has_a_case():
    text = Path(operations.__file__).read_text()
    classes = [
        getattr(kina.cuda, name)
        for name in ("RawSession", "Module", "Function", "PreparedLaunch", "TensorRef", "TensorMut", "DeviceBytes")
    ]
    names = {name for each in classes for name, value in vars(each).items() if callable(value) and name[0] != "_"}
    assert {"module", "function", "launch", "workspace", "resource", "ref", "release"} <= names
    assert {name for name in names if f".{name}" not in text} == set()


@pytest.mark.parametrize("name", CASES)
def test_one_call_fails(forks, name):
    counts = {code: sweep(forks, name, code, False) for code in CODES}
    assert (min(counts.values()) > 0) != (name in WITHOUT_CALLS)


@pytest.mark.parametrize("name", CASES)
def test_all_calls_fail_from_one_on(forks, name):
    assert (sweep(forks, name, 999, True) > 0) != (name in WITHOUT_CALLS)


@pytest.mark.parametrize("from_then_on", [False, True])
@pytest.mark.parametrize("name", FIRST_USES)
def test_the_first_use_fails(forks, name, from_then_on):
    opens = name in ("session", "Runtime")
    for code in [2, 700, 999] if opens and not from_then_on else [999]:
        nth, delivered = 0, True
        while delivered:
            nth += 1
            outcome = forks.run("first_use", name, nth, code, from_then_on, env=DEVICES)
            assert (outcome.status, outcome.error, outcome.stderr) == (0, "", "")
            delivered, problem = outcome.result
            assert not problem, problem
        assert nth > 1


@pytest.mark.parametrize("code", CODES)
def test_every_call_fails_at_exit(forks, code):
    outcome = forks.run("at_exit", code, leave=True, env=DEVICES)
    assert (outcome.status, outcome.error, outcome.stderr) == (0, "", "")
