"""Record what the driver of this machine does in every scenario.

    python tests/driver_sim/oracle/record.py --out DIR [--only NAME ...] [--jobs N] [--list]

Scenarios that need more devices than there are, are left out. Each runs in a process of its own; one that crashes or
hangs is recorded as such. Exit status 1: a scenario could not be played at all, its reason is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from driver_sim.oracle.play import play, write_trace
from driver_sim.oracle.scenarios import SCENARIOS
from driver_sim.oracle.script import Scenario, Script


def environment(devices: int | None = None) -> dict[str, str]:
    # More hardware queues than any scenario has streams: else one blocked stream may hold up another.
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "LAZY"}
    if devices is not None:
        # A scenario sees as many devices as it asks for, so that its trace is the same on larger machines.
        visible = env.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:devices])
    return env


def machine_facts() -> dict[str, Any]:
    """Driver, devices: asked in a process of its own, since cuInit leaves its mark."""
    s = Script()
    s.cuInit(0)
    s.cuDriverGetVersion("&driver")
    s.cuDeviceGetCount("&count")
    s.cuDeviceGetName("&name", 128, 0)
    saw, _ = play(s.steps, environment())
    answers = [found["out"] if found and "out" in found else {} for found in saw]
    simulated = hasattr(ctypes.CDLL("libcuda.so.1"), "kina_sim_trace_position")
    version = Path("/proc/driver/nvidia/version")
    return {
        "driver": answers[1].get("driver", 0),
        "kernel_module": "" if simulated or not version.exists() else version.read_text().splitlines()[0].strip(),
        "device": "simulated" if simulated else answers[3].get("name", ""),
        "devices_present": answers[2].get("count", 0),
    }


def record(scenario: Scenario, facts: dict[str, Any], out: Path, room: Semaphore) -> str:
    try:
        saw, err = play(scenario.steps, environment(scenario.devices), room=room)
    except RuntimeError as error:
        return f"FAILED {scenario.name}: {error}"
    steps = [step if found is None else {**step, "saw": found} for step, found in zip(scenario.steps, saw, strict=True)]
    trace = {"scenario": scenario.name, "about": scenario.about, "devices": scenario.devices, **facts, "steps": steps}
    write_trace(out / f"{scenario.name}.json", trace)
    ends = [found for found in saw if found and ("died" in found or "hung" in found)]
    note = f"  {ends[0]}" if ends else ""
    left_out = sum(1 for found in saw if found and "left_out" in found)
    note += f"  {left_out} steps left out" if left_out else ""
    return f"{scenario.name}{note}" + (f"\n{err}" if err and ends else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record what the driver does in every scenario.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="names, or beginnings of names")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    chosen = [s for s in SCENARIOS if not args.only or any(s.name.startswith(name) for name in args.only)]
    if args.list or args.out is None:
        for scenario in chosen:
            print(f"{scenario.name:40} {len(scenario.steps):5} steps  {scenario.devices} device(s)  {scenario.about}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    print(facts)
    began = time.monotonic()
    possible = [s for s in chosen if s.devices <= facts["devices_present"]]
    room = Semaphore(args.jobs)
    with ThreadPoolExecutor(args.jobs) as pool:
        lines = pool.map(lambda scenario: record(scenario, facts, args.out, room), possible)
        failed = 0
        for line in lines:
            failed += line.startswith("FAILED")
            print(line, flush=True)
    print(f"{len(possible)} of {len(chosen)} scenarios, {failed} failed, {time.monotonic() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
