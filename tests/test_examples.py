"""The examples, each run as a user runs it."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kina

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


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
@pytest.mark.parametrize("name", ["raw_ptx", "raw_cubin", "raw_nvrtc", "struct_args", "warm_chain", "capture_replay"])
def test_raw_examples_without_a_gpu_name_the_reason(name):
    done = run(f"{name}.py")
    assert done.returncode == 1
    with pytest.raises(kina.UnavailableError) as raised, kina.session("cuda:0"):
        pass
    assert done.stderr == f"{name}: {raised.value}\n"
    assert done.stdout == ""


@pytest.mark.gpu
def test_raw_nvrtc_compiles_and_launches():
    done = run("raw_nvrtc.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("y[:3] = [1. 3. 5.]") == 2


@pytest.mark.cuda
def test_raw_ptx_launches():
    done = run("raw_ptx.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "y[:4] = [0. 2. 4. 6.]\n"


@pytest.mark.cuda
def test_raw_cubin_launches_and_refuses_code_for_others(tmp_path):
    done = run("raw_cubin.py")
    assert done.returncode == 0, done.stderr
    exact = "sm_{}{}".format(*kina.devices()[0].compute_capability)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"saxpy.fatbin on {exact}: its code for ")
    assert first.endswith("y[:4] = [0. 2. 4. 6.]")
    if exact in ("sm_80", "sm_86", "sm_87", "sm_89"):
        assert second == f"saxpy_sm80.cubin: runs on {exact} too"
    else:
        assert second.startswith(f"saxpy_sm80.cubin: the CUBIN is code for sm_80, the device is {exact}: ")
    half = tmp_path / "half.cubin"
    half.write_bytes((EXAMPLES / "images" / "saxpy_sm80.cubin").read_bytes()[:1000])
    for path, words in ((half, "half.cubin: the CUBIN is no whole image"), (EXAMPLES / "none.cubin", "cannot be read")):
        done = run("raw_cubin.py", path)
        assert done.returncode == 1
        assert words in done.stderr


@pytest.mark.gpu
def test_struct_args_go_by_value():
    done = run("struct_args.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Step: 40 bytes at byte 16 of the parameters, 40 in NumPy\na Body instead: ")
    assert done.stdout.endswith("x[:3] = [1. 3. 5.], momentum = 8.0\n")


@pytest.mark.cuda
def test_a_warm_chain_leaves_next_to_nothing_behind():
    done = run("warm_chain.py", 5000)
    assert done.returncode == 0, done.stdout + done.stderr
    launches, events = re.match(r"(\d+) launches by kina .*\nevents recorded (\d+), ", done.stdout).groups()
    assert int(launches) == 5000
    assert int(events) * 64 <= 5000


@pytest.mark.gpu
def test_capture_replay_agrees_with_launches_one_by_one():
    done = run("capture_replay.py", 50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("a graph of 2 kernels, ")
    assert ", 50 launches\n" in done.stdout


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


def gpu_part(done: subprocess.CompletedProcess, reached: str) -> None:
    """The part on a GPU ran, or the example says why not."""
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    said = re.search(r"^no part on a GPU: (.+)$", done.stdout, re.MULTILINE)
    assert (reached in done.stdout) != (said is not None)


def test_interop_numpy():
    done = run("interop_numpy.py")
    gpu_part(done, "s.to_host copies: [0. 1. 2. 3.]")
    assert "one memory" in done.stdout
    assert ("s.to_host copies" in done.stdout) == bool(kina.devices())


@pytest.mark.torch
def test_interop_torch():
    done = run("interop_torch.py")
    gpu_part(done, "two streams: handed over and taken back")
    assert "is PyTorch's memory, and back" in done.stdout
    if not kina.devices():
        assert kina.unavailable_reason() in done.stdout


def test_interop_jax():
    """JAX is no part of the checks: where it is not installed, the example says so."""
    done = run("interop_jax.py")
    if importlib.util.find_spec("jax") is None:
        assert (done.returncode, done.stdout) == (1, "")
        assert "pip install jax" in done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "cpu: JAX computed on kina's memory" in done.stdout
        assert ("cuda: JAX computed" in done.stdout) != ("no part on a GPU" in done.stdout)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "last"), [("interop_torch", "by __cuda_array_interface__: "),
                                            ("interop_cupy", "one stream for both\n")])  # fmt: skip
def test_interop_on_a_gpu(name, last):
    done = run(f"{name}.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert last in done.stdout
    assert "no part" not in done.stdout


INTEROP = {"interop_cupy": "CuPy", "interop_jax": "JAX", "interop_torch": "PyTorch"}


@pytest.mark.parametrize("name", INTEROP)
def test_interop_examples_say_what_they_need(name):
    path = str(EXAMPLES / f"{name}.py")
    missing = "sys.modules.update(dict.fromkeys(['cupy', 'jax', 'torch']))"
    code = f"import runpy, sys; {missing}; runpy.run_path({path!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name}: this example needs {INTEROP[name]}")


def test_no_example_catches_a_failed_launch():
    """The raw path has no fallback: quickstart catches nothing but a missing PyTorch."""
    tree = ast.parse((EXAMPLES / "quickstart.py").read_text())
    caught = [ast.unparse(node.type) for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    assert caught == ["ImportError"]
