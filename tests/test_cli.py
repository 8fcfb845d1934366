"""``python -m kina``: what programs and people read from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kina
from kina._core.disk_cache import DiskCache
from kina.cli import info, main

LIBRARIES = ["cuda", "nvrtc", "nvJitLink", "cublas", "cublasLt", "cusolver"]


def run(*words: str, code: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "kina", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def report() -> dict:
    done = run("info", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"kina {kina.__version__}\n")


def test_json_keys_are_stable(report):
    assert list(report) == [
        "versions",
        "executable",
        "platform",
        "driver",
        "libraries",
        "devices",
        "links",
        "unavailable_reason",
    ]
    assert list(report["versions"]) == [
        "kina",
        "python",
        "numpy",
        "ml_dtypes",
        "cuda-bindings",
        "cuda-pathfinder",
        "torch",
        "cuda_headers",
    ]
    assert [library["name"] for library in report["libraries"]] == LIBRARIES
    for library in report["libraries"]:
        assert list(library) == ["name", "use", "state", "path", "via", "remedy"]
        assert library["state"] in ("loaded", "found", "missing")
        assert (library["path"] is None) == (library["state"] == "missing")


def test_versions_are_those_of_this_process(report):
    import numpy

    assert report["versions"]["python"] == sys.version.split()[0]
    assert report["versions"]["numpy"] == numpy.__version__


def test_devices_or_a_reason(report):
    """Exactly one of the two: devices with a driver, or the reason why there are none."""
    assert bool(report["devices"]) == (report["unavailable_reason"] is None)
    assert bool(report["devices"]) == (report["driver"] is not None)
    count = len(report["devices"])
    assert len(report["links"]) == count * (count - 1)
    if not report["devices"]:
        assert len(report["unavailable_reason"]) > 20


def test_devices_are_told_in_full(report):
    for ordinal, device in enumerate(report["devices"]):
        assert list(device) == [
            "ordinal",
            "name",
            "uuid",
            "compute_capability",
            "total_memory_bytes",
            "multiprocessor_count",
            "pci_bus_id",
            "attributes",
        ]
        assert device["ordinal"] == ordinal
        assert device["attributes"]["warp_size"] == 32
        assert device["attributes"]["multiprocessor_count"] == device["multiprocessor_count"]


def test_without_cuda_in_the_build_it_says_so(report):
    if "KINA_EXPECT_NO_CUDA" not in os.environ:
        assert sys.platform != "linux" or report["versions"]["cuda_headers"]
    else:
        assert report["versions"]["cuda_headers"] is None
        assert "no CUDA support" in report["unavailable_reason"]


def test_human_output_has_every_part():
    done = run("info")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for heading in ("Versions", "Libraries", "Devices"):
        assert heading in done.stdout.splitlines()
    for name in LIBRARIES:
        assert f"\n  {name} " in done.stdout
    assert ("No GPU can be used" in done.stdout) == ("\nDevices\n  none" in done.stdout)


def test_a_reader_that_stops_early():
    """As head does: no traceback, and none at exit."""
    child = subprocess.Popen([sys.executable, "-m", "kina", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(120) == 1


def test_the_command_is_the_module():
    script = Path(sys.executable).with_name("kina")
    done = subprocess.run([script, "info", "--json"], capture_output=True, text=True, timeout=120)
    assert done.stdout == run("info", "--json").stdout


def test_the_heavy_packages_stay_out():
    """NumPy, PyTorch and cuda-bindings are named with their versions, not imported for it."""
    code = (
        "import sys; from kina.cli import info; info.collect(); "
        "print(sorted(set(sys.modules) & {'numpy', 'torch', 'cuda.bindings', 'ml_dtypes'}))"
    )
    assert run(code=code).stdout == "[]\n"


LOG = """Thread,Time,Action,Pointer,Size,Stream
1,12:00:00.000000,allocate,0x100,1000,0x0
1,12:00:01.000000,allocate,0x200,24,0x0
1,12:00:02.000000,free,0x100,1000,0x0
"""


def test_a_report_of_a_log(tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    done = run("memory", "report", str(tmp_path / "log.csv"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "peak live      1,024 bytes (1 KiB), after 1 s, line 3" in done.stdout
    assert "Never freed: 1 allocations, 24 bytes" in done.stdout
    below = run("memory", "report", str(tmp_path / "log.csv"), "--reserved-from", str(tmp_path / "log.csv"))
    assert "fragmentation  0.0 %" in below.stdout


@pytest.mark.parametrize(("name", "begin"), [("live.png", b"\x89PNG"), ("live.html", b"<!DOCTYPE html>")])
def test_a_picture_of_a_log(name, begin, tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    done = run("memory", "report", str(tmp_path / "log.csv"), "--out", str(tmp_path / name))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / name).read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [
        (None, [], "No such file"),
        ("1,2,3", [], "line 1"),
        (LOG + "1,12:00:03,fly,0x1,1,0x0\n", [], "line 5: Action is none of"),
        (LOG, ["--out", "live.pdf"], "a name in .png or .html is needed"),
        (LOG, ["--out", "missing/live.png"], "No such file"),
    ],
)
def test_a_report_that_fails_says_why_in_one_line(text, words, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "log.csv").write_text(text)
    assert main(["memory", "report", "log.csv", *words]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("kina: ")
    assert reason in told.err
    assert len(told.err.splitlines()) == 1


def test_memory_needs_an_action(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["memory"])
    assert ended.value.code == 2
    assert "required: action" in capsys.readouterr().err


def test_an_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2
    assert "info" in capsys.readouterr().err


def test_rendering_of_a_machine_with_two_gpus():
    identity = "00000000-1111-2222-3333-44444444444"
    device = {"name": "A GPU", "compute_capability": [9, 0], "total_memory_bytes": 140 * 2**30}
    device["multiprocessor_count"] = 132
    link = {"access": True, "performance_rank": 0, "atomics": True}
    report = {
        "versions": {"kina": "0.1.0", "torch": None, "cuda_headers": "13.0"},
        "driver": {"version": "580.65.06", "cuda_version": "13.0", "path": "/lib/libcuda.so.1"},
        "libraries": [
            {"name": "cuda", "state": "loaded", "path": "/lib/libcuda.so.1", "via": None, "remedy": None},
            {"name": "nvrtc", "state": "missing", "path": None, "via": None, "remedy": "pip install it"},
        ],
        "devices": [{"ordinal": n, "uuid": f"{identity}{n}", **device} for n in range(2)],
        "links": [
            {"source": 0, "target": 1, **link},
            {"source": 1, "target": 0, "access": False, "performance_rank": 1, "atomics": False},
        ],
        "unavailable_reason": None,
    }
    assert info.render(report).splitlines() == [
        "Versions",
        "  kina          0.1.0",
        "  torch         not installed",
        "  CUDA headers  13.0",
        "  driver        580.65.06, for CUDA 13.0",
        "",
        "Libraries",
        "  cuda   already loaded  /lib/libcuda.so.1",
        "  nvrtc  not found       pip install it",
        "",
        "Devices",
        "          name   compute capability  memory     SMs  uuid",
        "  cuda:0  A GPU  9.0                 140.0 GiB  132  00000000-1111-2222-3333-444444444440",
        "  cuda:1  A GPU  9.0                 140.0 GiB  132  00000000-1111-2222-3333-444444444441",
        "",
        "Links",
        "  from    to      peer access  performance rank  atomics",
        "  cuda:0  cuda:1  yes          0                 yes",
        "  cuda:1  cuda:0  no           1                 no",
    ]


def test_cache_tells_what_is_there_and_clears_it(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KINA_CACHE_DIR", str(folder))
    DiskCache(folder, 1 << 20).put("key", bytes(1000))
    assert main(["cache", "info"]) == 0
    shown = capsys.readouterr().out
    assert str(folder) in shown
    assert "entries  1" in shown
    assert main(["cache", "info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["folder"], told["entries"], told["refused"]) == (str(folder), 1, None)
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "1 entries deleted\n"
    assert list(folder.iterdir()) == []
    folder.chmod(0o777)
    assert main(["cache", "clear"]) == 1
    assert "can be written by others" in capsys.readouterr().out
    assert main(["cache", "info"]) == 0
    assert "not used" in capsys.readouterr().out
    monkeypatch.setenv("KINA_CACHE_DIR", "")
    assert main(["cache", "info"]) == 0
    assert "KINA_CACHE_DIR is empty" in capsys.readouterr().out
