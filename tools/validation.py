#!/usr/bin/env python3
"""Records of lanes, and the page that shows them.

    python tools/validation.py stamp > .wheel/stamp.json      where the repository is
    python tools/validation.py record --lane hardware --junit junit.xml --bench launch.json \\
        --stamp .wheel/stamp.json --out docs/validation/hardware.json            where the hardware is
    python tools/validation.py coverage coverage.json --at-least 90          what `coverage json` wrote, by module
    python tools/validation.py render                         writes docs/validation.md

`stamp` names the commit and the digest of every tracked file, and refuses a tree with changes. `record` needs
kina installed; it takes the commit from git or, where there is no repository, from the stamp, whose
digests the files must still have. `render --check` compares.

A record (schema 1):

    schema       1
    lane         "hardware", "hardware-2", ...
    commit       40 hexadecimal digits; the tree had no changes
    date         UTC, to the second
    kina, python versions
    system       "Linux x86_64"
    driver       {version, cuda_version}, or null
    gpus         [{name, compute_capability, total_memory_bytes, multiprocessor_count}]; no identities
    counts       {passed, failed, errors, skipped}
    skipped      ["test: reason"]
    benchmarks   [{name, unit, kina, peers: {name: value}, ratio, bar, verdict}]; verdict: "pass", "fail",
                 or null where there is no bar
    left_out     {peer: why it took no part}
    coverage     {module: [lines that ran, lines]}; only in the record of a run that measured them

A --bench file is what a benchmark writes with --json: rows [{name, unit, value, peers, ratio, bar, ok}] and
left_out.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "validation"
PAGE = ROOT / "docs" / "validation.md"
ROW_KEYS = ("name", "unit", "value", "peers", "ratio", "bar", "ok")
# All compiled modules of kina.cuda are measured, or the figure would flatter.
MEASURED = {f"kina.cuda.{path.stem}" for path in (ROOT / "kina" / "cuda").glob("*.pyx")}
VERDICTS = {True: "pass", False: "fail", None: None}


class Refused(Exception):
    """The record would not be true."""


# -- which tree


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stamp(root: Path = ROOT) -> dict[str, Any]:
    """The commit and what its files hold. The records themselves and their page are not part of it."""
    apart = ("--", ".", ":!docs/validation", ":!docs/validation.md")
    if changes := git(root, "status", "--porcelain", *apart):
        raise Refused(f"the tree has changes that no commit holds:\n{changes}")
    names = git(root, "ls-files", "-z", *apart).split("\0")
    return {
        "commit": git(root, "rev-parse", "HEAD").strip(),
        "files": {name: digest(root / name) for name in names if name and (root / name).is_file()},
    }


def verify(stamped: dict[str, Any], root: Path = ROOT) -> str:
    """The commit of a stamp, once the files are seen to be the ones it was made from."""
    differing = [
        name
        for name, expected in stamped["files"].items()
        if not (root / name).is_file() or digest(root / name) != expected
    ]
    if differing:
        raise Refused(f"not the files of commit {stamped['commit']}: {', '.join(differing[:8])}")
    return stamped["commit"]


# -- a record


def counts(junit: Path) -> tuple[dict[str, int], list[str]]:
    """What pytest counted, and the reason for each skip."""
    found = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    skipped = []
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name')}".lstrip(":")
        if case.find("failure") is not None:
            found["failed"] += 1
        elif case.find("error") is not None:
            found["errors"] += 1
        elif (skip := case.find("skipped")) is not None:
            found["skipped"] += 1
            skipped.append(f"{name}: {skip.get('message', 'no reason given')}")
        else:
            found["passed"] += 1
    if not sum(found.values()):
        raise Refused(f"{junit} holds no test")
    return found, skipped


def benchmark(bench: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of one benchmark's output, and the peers it left out."""
    data = json.loads(bench.read_text())
    for row in data["rows"]:
        if missing := [key for key in ROW_KEYS if key not in row]:
            raise Refused(f"{bench}: the row {row.get('name')!r} has no {', '.join(missing)}")
        if row["bar"] is not None and row["ok"] is None:
            raise Refused(f"{bench}: the row {row['name']!r} has a bar and no verdict")
    found = [
        {
            "name": row["name"],
            "unit": row["unit"],
            "kina": row["value"],
            "peers": row["peers"],
            "ratio": row["ratio"],
            "bar": row["bar"],
            "verdict": VERDICTS[row["ok"]],
        }
        for row in data["rows"]
    ]
    return found, data.get("left_out", {})


def covered(report: Path) -> dict[str, list[int]]:
    """Of each module of kina.cuda, its .pxd included: the lines that ran, and all."""
    found: dict[str, list[int]] = {}
    for name, entry in json.loads(report.read_text())["files"].items():
        path = Path(name).with_suffix("")
        if path.parts[-3:-1] != ("kina", "cuda"):
            raise Refused(f"{report}: {name} is no module of kina.cuda")
        module = "kina.cuda" if path.name == "__init__" else f"kina.cuda.{path.name}"
        lines = found.setdefault(module, [0, 0])
        lines[0] += entry["summary"]["covered_lines"]
        lines[1] += entry["summary"]["num_statements"]
    if missing := MEASURED - set(found):
        raise Refused(f"{report}: nothing of {', '.join(sorted(missing))} was measured")
    return dict(sorted(found.items()))


def percent(modules: dict[str, list[int]]) -> float:
    return 100 * sum(ran for ran, _ in modules.values()) / sum(lines for _, lines in modules.values())


def summary(modules: dict[str, list[int]]) -> str:
    ran, lines = (sum(counted) for counted in zip(*modules.values(), strict=True))
    return f"{percent(modules):.1f} % of {lines:,} lines of kina.cuda ran, {lines - ran:,} did not"


def record(lane: str, commit: str, junit: Path, benches: list[Path], coverage: Path | None = None) -> dict[str, Any]:
    from kina.cli.info import collect

    report = collect()
    counted, skipped = counts(junit)
    measured = [benchmark(bench) for bench in benches]
    kept = ("name", "compute_capability", "total_memory_bytes", "multiprocessor_count")
    driver = report["driver"]
    now = datetime.datetime.now(datetime.UTC)
    return {
        "schema": 1,
        "lane": lane,
        "commit": commit,
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "kina": importlib.metadata.version("kina"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "driver": driver and {key: driver[key] for key in ("version", "cuda_version")},
        "gpus": [{key: device[key] for key in kept} for device in report["devices"]],
        "counts": counted,
        "skipped": skipped,
        "benchmarks": [row for rows, _ in measured for row in rows],
        "left_out": {name: reason for _, left_out in measured for name, reason in left_out.items()},
        **({} if coverage is None else {"coverage": covered(coverage)}),
    }


# -- the page

INTRODUCTION = """\
<!-- Written by `python tools/validation.py render` from docs/validation/*.json; not edited by hand. -->

# Validation

A lane that is started by hand, as those that need hardware are, leaves a record, made by a program from what pytest,
the benchmarks and coverage wrote, never from a tree with changes that no commit holds. What follows is all of them.
Ratios compare figures of one run on one machine; absolute figures say little about another machine.
"""


def verdict(entry: dict[str, Any]) -> str:
    """Passed only if every test ran through and every bar was met."""
    failed = entry["counts"]["failed"] + entry["counts"]["errors"]
    missed = sum(row["verdict"] == "fail" for row in entry["benchmarks"])
    words = []
    if failed:
        words.append(f"{failed} tests failed")
    if missed:
        words.append(f"{missed} bars missed")
    return ", ".join(words) or "passed"


def gpus(entry: dict[str, Any]) -> str:
    names = [gpu["name"] for gpu in entry["gpus"]]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or "none"


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *map(line, lines)]


def figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def section(entry: dict[str, Any]) -> list[str]:
    driver = entry["driver"]
    facts = [
        ["result", f"**{verdict(entry)}**"],
        ["commit", f"`{entry['commit']}`"],
        ["date", entry["date"]],
        ["GPUs", gpus(entry)],
        ["driver", f"{driver['version']}, CUDA {driver['cuda_version']}" if driver else "none"],
        ["Python, system", f"{entry['python']}, {entry['system']}"],
        ["tests", ", ".join(f"{number:,} {name}" for name, number in entry["counts"].items())],
    ]
    text = ["", f"## {entry['lane']}", "", *table(["", ""], facts)]
    if entry["benchmarks"]:
        lines = []
        for row in entry["benchmarks"]:
            peers = ", ".join(f"{name} {figure(value)}" for name, value in row["peers"].items())
            ratio = "" if row["ratio"] is None else figure(float(row["ratio"]))
            own = f"{figure(row['kina'])} {row['unit']}"
            lines.append([row["name"], own, peers, ratio, row["bar"] or "", row["verdict"] or ""])
        text += ["", *table(["benchmark", "kina", "beside it", "ratio", "bar", "verdict"], lines)]
    if modules := entry.get("coverage"):
        lines = [
            [name, figure(total), figure(total - ran), f"{ran / total:.0%}"] for name, (ran, total) in modules.items()
        ]
        text += ["", f"{summary(modules)}.", "", *table(["module", "lines", "did not run", "ran"], lines)]
    if entry["left_out"]:
        text += ["", "Not beside it:", "", *(f"- {name}: `{why}`" for name, why in entry["left_out"].items())]
    if entry["skipped"]:
        text += ["", "Skipped:", "", *(f"- `{line}`" for line in entry["skipped"])]
    return text


def render(folder: Path = RECORDS) -> str:
    entries = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = [INTRODUCTION]
    if entries:
        rows = [
            [entry["lane"], verdict(entry), gpus(entry), f"`{entry['commit'][:12]}`", entry["date"][:10]]
            for entry in entries
        ]
        lines += table(["lane", "result", "GPUs", "commit", "date"], rows)
    else:
        lines.append("No lane has been recorded yet.")
    for entry in entries:
        lines += section(entry)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("stamp", help="print the stamp of the tree")
    making = commands.add_parser("record", help="make a record")
    making.add_argument("--lane", required=True)
    making.add_argument("--junit", type=Path, required=True)
    making.add_argument("--bench", type=Path, nargs="*", default=[])
    making.add_argument("--coverage", type=Path, help="what `coverage json` wrote")
    making.add_argument("--stamp", type=Path, help="where git does not reach: the stamp of the tree")
    making.add_argument("--out", type=Path, required=True)
    counting = commands.add_parser("coverage", help="the lines that ran, by module")
    counting.add_argument("report", type=Path)
    counting.add_argument("--at-least", type=float, default=0, metavar="PERCENT", help="fail below")
    drawing = commands.add_parser("render", help="write the page")
    drawing.add_argument("--check", action="store_true", help="only compare it with the records")
    chosen = parser.parse_args()
    try:
        if chosen.command == "stamp":
            json.dump(stamp(), sys.stdout, indent=1)
            print()
        elif chosen.command == "record":
            stamped = json.loads(chosen.stamp.read_text()) if chosen.stamp else stamp()
            made = record(chosen.lane, verify(stamped), chosen.junit, chosen.bench, chosen.coverage)
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(json.dumps(made, indent=2) + "\n")
            print(f"{chosen.out}: {chosen.lane}, {verdict(made)}")
        elif chosen.command == "coverage":
            modules = covered(chosen.report)
            for name, (ran, lines) in modules.items():
                print(f"{name:22} {ran:5} of {lines:5}  {ran / lines:4.0%}")
            if percent(modules) < chosen.at_least:
                raise Refused(f"{summary(modules)}; at least {chosen.at_least:g} % must")
            print(summary(modules))
        elif not chosen.check:
            PAGE.write_text(render())
        elif not PAGE.is_file() or PAGE.read_text() != render():
            raise Refused("docs/validation.md is not what the records say: python tools/validation.py render")
    except Refused as refused:
        sys.exit(f"validation: {refused}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
