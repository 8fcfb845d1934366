"""The examples, each run as a user runs it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kina

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300)


@pytest.mark.torch
def test_quickstart_runs_on_what_there_is():
    done = run("quickstart.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16,777,216 float32 angles" in done.stdout
    assert "and back, no copy" in done.stdout
    expected = "on cuda:0: " if kina.devices() else "no usable GPU, so on the CPU: "
    assert done.stdout.startswith(expected)
    assert done.stderr == ""


def test_quickstart_says_that_it_needs_torch():
    path = str(EXAMPLES / "quickstart.py")
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({path!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install torch" in done.stderr


@pytest.mark.no_device
def test_raw_ptx_without_a_gpu_names_the_reason():
    done = run("raw_ptx.py")
    assert done.returncode == 1
    with pytest.raises(kina.UnavailableError) as raised, kina.session("cuda:0"):
        pass
    assert done.stderr == f"raw_ptx: {raised.value}\n"
    assert done.stdout == ""


@pytest.mark.gpu
def test_raw_nvrtc_compiles_and_launches():
    done = run("raw_nvrtc.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("y[:3] = [1. 3. 5.]") == 2


@pytest.mark.no_device
def test_raw_nvrtc_without_a_gpu_names_the_reason():
    done = run("raw_nvrtc.py")
    assert done.returncode == 1
    assert done.stderr.startswith("raw_nvrtc: ")


@pytest.mark.gpu
def test_raw_ptx_launches():
    done = run("raw_ptx.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "y[:4] = [0. 2. 4. 6.]\n"


MEMORY = {"memory_cupy": "CuPy", "memory_numba": "Numba", "memory_torch": "PyTorch", "one_pool": "PyTorch and CuPy"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MEMORY)
def test_memory_for_other_libraries(name):
    done = run(f"{name}.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bytes" in done.stdout


@pytest.mark.parametrize("name", MEMORY)
def test_memory_examples_say_what_they_need(name):
    path = str(EXAMPLES / f"{name}.py")
    missing = "sys.modules.update(dict.fromkeys(['cupy', 'numba', 'torch']))"
    code = f"import runpy, sys; {missing}; runpy.run_path({path!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name}: this example needs {MEMORY[name]}")


def test_no_example_catches_a_failed_launch():
    """The raw path has no fallback: quickstart catches nothing but a missing PyTorch."""
    tree = ast.parse((EXAMPLES / "quickstart.py").read_text())
    caught = [ast.unparse(node.type) for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    assert caught == ["ImportError"]
