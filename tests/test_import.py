"""Importing kina: what it loads, what it gives, what it costs."""

import tomllib
from pathlib import Path

import pytest
from helpers.processes import run_python

import kina

ROOT = Path(__file__).parent.parent


def test_import_loads_next_to_nothing():
    loaded = run_python(
        """
        import sys
        before = set(sys.modules)
        import kina
        print(*sorted(set(sys.modules) - before))
        """
    ).split()
    ours = [name for name in loaded if name.split(".")[0] == "kina"]
    assert ours == [
        "kina",
        "kina._core",
        "kina._core.construction",
        "kina._core.opening",
        "kina._core.session",
        "kina.session",
    ]
    heavy = {"numpy", "ml_dtypes", "cuda", "torch", "ctypes", "typing", "enum", "re", "uuid", "functools"}
    assert not heavy.intersection(name.split(".")[0] for name in loaded)


def test_no_driver_is_mapped_by_import_or_by_the_host():
    maps = run_python(
        """
        import kina
        with kina.session("cpu") as s:
            s.zeros(3)
        import sys
        assert "kina.cuda" not in sys.modules
        assert "numpy" not in sys.modules
        print(open("/proc/self/maps").read() if sys.platform == "linux" else "")
        """
    )
    assert "libcuda" not in maps


def test_import_costs_at_most_60_ms_beyond_python():
    cost = min(
        float(run_python("import time; start = time.process_time(); import kina; print(time.process_time() - start)"))
        for _ in range(3)
    )
    assert cost <= 0.060


@pytest.mark.parametrize("name", [name for name in kina._HOMES if kina._HOMES[name] != "kina.cuda"])
def test_every_name_is_there(name):
    assert getattr(kina, name) is not None
    assert name in dir(kina)
    assert name in kina.__all__


def test_names_of_kina_cuda_are_declared():
    cuda = {name for name, home in kina._HOMES.items() if home == "kina.cuda"}
    assert cuda == {"DeviceInfo", "LaunchConfig", "Runtime", "devices", "unavailable_reason"}


def test_all_errors_are_at_the_top():
    from kina import errors

    assert {name: getattr(kina, name) for name in errors.__all__} == {
        name: getattr(errors, name) for name in errors.__all__
    }
    assert kina.errors is errors


def test_nothing_is_listed_twice():
    assert len(kina.__all__) == len(set(kina.__all__))
    assert {"session", "zeros", "empty", "full", "from_host", "from_dlpack"} <= set(kina.__all__)


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kina.nonsense  # noqa: B018
    assert "nonsense" not in dir(kina)


def test_a_star_import_does_not_hide_builtins():
    import builtins

    assert not set(kina.__all__) & set(dir(builtins)) - {"__version__"}
    assert kina.bool is kina.bool_


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kina.__version__ == project["version"]


@pytest.mark.parametrize(
    "module",
    ["kina.session", "kina.errors", "kina._core.tensor", "kina._core.host_session", "kina._core.dlpack"],
)
def test_every_module_can_be_imported_first(module):
    run_python(f"import {module}; import kina; kina.session('cpu').__enter__().zeros(3).to_dlpack()")
