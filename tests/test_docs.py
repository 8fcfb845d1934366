"""What the documents promise: commands that exist, links that lead somewhere, pages that are current."""

import fnmatch
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tools import load_tool

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Read from the checkout, never from the installed package.
SET_UP = [
    "python3 -m venv .venv && .venv/bin/python -m pip install . torch==2.13.0 "
    "&& .venv/bin/python examples/quickstart.py",
    "python3 tools/check.py",
]


def shell_lines(path: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_readme_has_exactly_the_two_set_up_commands():
    assert shell_lines(ROOT / "README.md") == SET_UP


def test_continuous_integration_is_the_second_command():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == f"exec {SET_UP[1]}"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_examples_lane_runs_the_first_command():
    check = load_tool("check")
    assert "examples" in [lane.name for lane in check.LANES]
    assert f" {check.TORCH} " in SET_UP[0]


def test_contributing_says_what_every_lane_costs():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) s \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [lane.name for lane in load_tool("check").LANES]
    assert sum(int(seconds) for _, seconds in rows) < 30 * 60


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    missing = [link for link in targets if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_documents_compiles(document):
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        compile(block, str(document), "exec")


def test_getting_started_runs_on_the_cpu():
    """Every Python block of the page that asks for the CPU, as written."""
    text = (ROOT / "docs" / "getting_started.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if '"cpu"' in block]
    first = next(block for block in blocks if "matmul" in block or "multiply" in block)
    done = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[ 1.  2.  5.]\n [10. 17. 26.]]\n"


def test_the_errors_table_has_every_class():
    import kina.errors

    path = ROOT / "docs" / "_extensions" / "errors_rows.py"
    spec = importlib.util.spec_from_file_location("kina_errors_rows", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {name for name in kina.errors.__all__ if name.endswith("Error")} - {"KinaError"}
    assert {row[0] for row in module.rows()} == names


# -- the validation page


def test_the_validation_page_is_a_fresh_render():
    assert load_tool("validation").render() == (ROOT / "docs" / "validation.md").read_text()


RECORD = {
    "schema": 1,
    "lane": "hardware",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "date": "2026-01-02T03:04:05Z",
    "kina": "0.1.0",
    "python": "3.12.1",
    "system": "Linux x86_64",
    "driver": {"version": "580.65.06", "cuda_version": "13.0"},
    "gpus": [{"name": "A GPU", "compute_capability": [9, 0], "total_memory_bytes": 1}] * 2,
    "counts": {"passed": 120, "failed": 0, "errors": 0, "skipped": 1},
    "skipped": ["tests.cuda.test_x::test_y: one GPU"],
    "benchmarks": [
        {
            "name": "launch",
            "unit": "ns",
            "kina": 3300.0,
            "peers": {"raw": 3150.0, "cuda.core": 3900.0},
            "ratio": 1.0476,
            "bar": "<= 1.08 raw",
            "verdict": "pass",
        },
        {
            "name": "exit",
            "unit": "ns",
            "kina": 90.5,
            "peers": {},
            "ratio": None,
            "bar": None,
            "verdict": None,
        },
    ],
    "left_out": {"triton": "ModuleNotFoundError: triton"},
}


def test_rendering_a_record(tmp_path):
    (tmp_path / "hardware.json").write_text(json.dumps(RECORD))
    page = load_tool("validation").render(tmp_path)
    assert "| hardware | passed | 2 x A GPU | `0123456789ab` | 2026-01-02 |" in page
    assert "| launch | 3,300 ns | raw 3,150, cuda.core 3,900 | 1.05 | <= 1.08 raw | pass |" in page
    assert "| exit | 90.5 ns |  |  |  |  |" in page
    assert "- triton: `ModuleNotFoundError: triton`" in page
    assert "- `tests.cuda.test_x::test_y: one GPU`" in page


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"counts": {"passed": 1, "failed": 2, "errors": 1, "skipped": 0}}, "3 tests failed"),
        ({"benchmarks": [RECORD["benchmarks"][0] | {"verdict": "fail"}]}, "1 bars missed"),
    ],
)
def test_a_failure_shows_in_the_summary(change, result):
    assert load_tool("validation").verdict(RECORD | change) == result


def test_counts_come_from_junit(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><skipped message="no GPU"/></testcase>'
        '<testcase classname="a" name="d"><failure/></testcase></testsuite></testsuites>'
    )
    counted, skipped = load_tool("validation").counts(report)
    assert counted == {"passed": 1, "failed": 1, "errors": 0, "skipped": 1}
    assert skipped == ["a::c: no GPU"]


# -- coverage


@pytest.fixture
def coverage_report(tmp_path):
    """What `coverage json` writes, of all modules: each .pyx has ten lines of which nine ran, one .pxd adds two."""

    def entry(ran, lines):
        return {"summary": {"covered_lines": ran, "num_statements": lines}}

    modules = load_tool("validation").MEASURED
    files = {f"/away/kina/cuda/{name.removeprefix('kina.cuda.')}.pyx": entry(9, 10) for name in modules}
    files |= {"/away/kina/cuda/driver.pxd": entry(2, 2), "/away/kina/cuda/__init__.py": entry(3, 4)}

    def write(**changes):
        path = tmp_path / "coverage.json"
        kept = {name: entry for name, entry in (files | changes).items() if entry is not None}
        path.write_text(json.dumps({"files": kept}))
        return path

    return write


def test_lines_that_ran_are_counted_by_module(coverage_report):
    validation = load_tool("validation")
    modules = validation.covered(coverage_report())
    assert {"kina.cuda.launch", "kina.cuda.session"} <= set(modules)
    assert modules["kina.cuda.launch"] == [9, 10]
    assert modules["kina.cuda.driver"] == [11, 12]
    assert modules["kina.cuda"] == [3, 4]
    assert 89 < validation.percent(modules) < 91


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"/away/kina/cuda/launch.pyx": None}, "nothing of kina.cuda.launch was measured"),
        ({"/away/kina/_core/status.pxd": {"summary": {}}}, "status.pxd is no module of kina.cuda"),
    ],
)
def test_a_report_that_would_flatter_is_refused(coverage_report, change, words):
    validation = load_tool("validation")
    with pytest.raises(validation.Refused, match=words):
        validation.covered(coverage_report(**change))


@pytest.mark.parametrize(("bar", "status"), [("50", 0), ("99", 1)])
def test_too_little_coverage_fails(coverage_report, bar, status):
    command = [sys.executable, ROOT / "tools" / "validation.py", "coverage", coverage_report(), "--at-least", bar]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert "lines of kina.cuda ran" in done.stdout + done.stderr
    assert re.search(r"^kina.cuda.launch +9 of +10 +90%$", done.stdout, re.MULTILINE)


def test_rendering_coverage(tmp_path):
    modules = {"kina.cuda.launch": [380, 400], "kina.cuda.session": [1000, 1200]}
    (tmp_path / "coverage.json").write_text(json.dumps(RECORD | {"lane": "coverage", "coverage": modules}))
    page = load_tool("validation").render(tmp_path)
    assert "86.2 % of 1,600 lines of kina.cuda ran, 220 did not." in page
    assert "| kina.cuda.session | 1,200 | 200 | 83% |" in page


# -- the stamp


@pytest.fixture
def repository(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a.txt").write_text("one")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    return tmp_path


def test_a_stamp_names_commit_and_files(repository):
    validation = load_tool("validation")
    stamped = validation.stamp(repository)
    assert re.fullmatch("[0-9a-f]{40}", stamped["commit"])
    assert list(stamped["files"]) == ["a.txt"]
    assert validation.verify(stamped, repository) == stamped["commit"]


def test_a_tree_with_changes_is_refused(repository):
    validation = load_tool("validation")
    stamped = validation.stamp(repository)
    (repository / "a.txt").write_text("two")
    with pytest.raises(validation.Refused, match="changes"):
        validation.stamp(repository)
    with pytest.raises(validation.Refused, match="not the files"):
        validation.verify(stamped, repository)
    (repository / "a.txt").write_text("one")
    (repository / "b.txt").write_text("untracked")
    with pytest.raises(validation.Refused, match="changes"):
        validation.stamp(repository)


def test_records_do_not_make_the_tree_dirty(repository):
    (repository / "docs" / "validation").mkdir(parents=True)
    (repository / "docs" / "validation" / "hardware.json").write_text("{}")
    load_tool("validation").stamp(repository)


ROW = {
    "name": "launch",
    "unit": "ns",
    "value": 3300.0,
    "peers": {"raw": 3150.0},
    "ratio": 1.05,
    "bar": "<= 1.08",
}


def test_benchmark_rows_become_verdicts(tmp_path):
    bench = tmp_path / "bench.json"
    rows = [ROW | {"ok": True}, ROW | {"ok": False}, ROW | {"bar": None, "ok": None}]
    bench.write_text(json.dumps({"rows": rows, "left_out": {"cupy": "no"}}))
    found, left_out = load_tool("validation").benchmark(bench)
    assert [row["verdict"] for row in found] == ["pass", "fail", None]
    assert found[0]["kina"] == 3300.0
    assert left_out == {"cupy": "no"}


@pytest.mark.parametrize(("row", "words"), [(ROW, "has no ok"), (ROW | {"ok": None}, "no verdict")])
def test_a_benchmark_row_without_a_verdict_is_refused(tmp_path, row, words):
    validation = load_tool("validation")
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [row]}))
    with pytest.raises(validation.Refused, match=words):
        validation.benchmark(tmp_path / "bench.json")


def test_the_reference_has_every_public_name():
    import kina.cuda

    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    errors = set(kina.errors.__all__) | {"errors", "__version__"}  # automodule has them
    words = set(re.findall(r"\w+", text))
    assert set(kina.__all__) - errors - words == set()
    assert {name for name in kina.cuda.__all__ if f"{name}\n" not in text} == set()


def test_attributes_of_a_device_have_units():
    """Every one that a device answers with something else than 0 or 1 is in one row of the table."""
    from kina.cuda.device_attributes import NUMBERS

    page = (ROOT / "docs" / "api" / "cuda.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row)]
    trace = ROOT / "tests" / "driver_sim" / "oracle" / "traces" / "device_attributes.json"
    steps = [step for step in json.loads(trace.read_text())["steps"] if step["call"] == "cuDeviceGetAttribute"]
    answers = {step["args"][1]: next(iter(step["saw"]["out"].values())) for step in steps}
    assert len(answers) == 145
    for name, number in NUMBERS.items():
        found = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        assert len(found) == 1 or (not found and answers.get(number, 0) in (0, 1)), (name, found)
    for pattern in patterns:
        assert fnmatch.filter(NUMBERS, pattern), pattern
