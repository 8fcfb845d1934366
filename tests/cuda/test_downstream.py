"""A library that ships its own kernels, on public names alone; the same on the simulated driver and on hardware."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import kina

DATA = Path(__file__).resolve().parents[1] / "data" / "cubin"

PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry saxpy(.param .u64 y, .param .u64 x, .param .f32 a, .param .u32 n)
{
  .reg .pred %p;
  .reg .f32 %f<5>;
  .reg .b32 %r<6>;
  .reg .b64 %d<6>;
  ld.param.u64 %d1, [y];
  ld.param.u64 %d2, [x];
  ld.param.f32 %f1, [a];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p, %r5, %r1;
  @%p bra done;
  mul.wide.u32 %d3, %r5, 4;
  add.u64 %d4, %d1, %d3;
  add.u64 %d5, %d2, %d3;
  ld.global.f32 %f2, [%d4];
  ld.global.f32 %f3, [%d5];
  fma.rn.f32 %f4, %f1, %f3, %f2;
  st.global.f32 [%d4], %f4;
done:
  ret;
}
"""

SOURCE = r"""
extern "C" __global__ void saxpy(float *y, const float *x, float a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


class Saxpy:
    """y += a * x for whoever has a session: the helper takes flat tensors, and says so of others."""

    def __init__(self, image: object) -> None:
        self.image = image

    def __call__(self, session: kina.cuda.CudaSession, y: kina.Tensor, x: kina.Tensor, a: float) -> None:
        with session.raw("saxpy of a library") as raw:
            saxpy = raw.module(self.image).function("saxpy", "mut f32[], f32[], f32, u32")
            saxpy.launch(kina.LaunchConfig.linear(y.size), y, x, a, y.size)


SHIPPED = {
    "PTX": PTX,
    "CUBIN": DATA / "kernels_sm90.cubin",
    "fatbin": (DATA / "kernels_sm80_sm90.fatbin").read_bytes(),
    "NVRTC": SOURCE,
}


@pytest.fixture(params=SHIPPED)
def saxpy(request) -> Saxpy:
    return Saxpy(SHIPPED[request.param])


def test_only_public_names_are_used():
    tree = ast.parse(Path(__file__).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "ast", "pathlib", "numpy", "pytest", "kina"}
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "kina"
    }
    assert used <= {*kina.__all__, "__all__", "cuda"}


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_numbers(session, saxpy, size):
    """Up, through the kernel, and down; what waits says so by its name."""
    x, y = np.arange(size, dtype=np.float32), np.full(size, 2.0, np.float32)
    on_device = session.from_host(y)
    saxpy(session, on_device, session.from_host(x), 0.5)
    waits = session.counters().synchronizations
    session.synchronize()
    assert session.counters().synchronizations == waits + 1
    np.testing.assert_array_equal(session.to_host(on_device), y + np.float32(0.5) * x)


def test_it_serves_every_session_of_a_process(runtime, saxpy):
    for target in (runtime, kina.Runtime(0), 0, runtime):
        with kina.session(target) as session:
            y = session.zeros(100)
            for _ in range(3):
                saxpy(session, y, session.full(100, 2.0), 4.0)
            assert (session.to_host(y) == 24).all()
    with kina.session(runtime) as session:
        assert session.counters().modules_loaded == 1
        assert session.counters().launches == 6


def test_nothing_is_made_compact_for_the_helper(session, saxpy):
    y, x = session.zeros(100), session.zeros(200)
    launches = session.counters().launches
    for wrong in (x[::2], session.zeros((10, 10)).permute(1, 0), x[:1].broadcast_to((100,))):
        with pytest.raises(kina.NonContiguousError, match="argument 1 of saxpy"):
            saxpy(session, y, wrong, 1.0)
    assert session.counters().launches == launches


def test_tensors_of_another_runtime_are_foreign_until_they_are_adopted(session, saxpy):
    y = session.zeros(100)
    with kina.session(kina.Runtime(0)) as other:
        x = other.full(100, 3.0)
        with pytest.raises(kina.ForeignRuntimeError, match="argument 1 of saxpy"):
            saxpy(session, y, x, 1.0)
        saxpy(session, y, session.adopt(x), 1.0)
        assert (session.to_host(y) == 3).all()


def test_the_helper_says_what_its_image_lacks(session, saxpy):
    with session.raw("lacks") as raw:
        module = raw.module(saxpy.image)
        with pytest.raises(kina.SymbolLookupError, match="no entry named 'saxpy_f16'"):
            module.function("saxpy_f16")
        with pytest.raises(kina.ArgumentError, match=r"3 parameter\(s\), the kernel 4"):
            module.function("saxpy", "mut f32[], f32[], f32")


def test_a_launch_beyond_the_device_names_the_limit(session, saxpy):
    info = session.device_info
    y, x = session.zeros(4), session.zeros(4)
    with session.raw("beyond") as raw:
        function = raw.module(saxpy.image).function("saxpy", "mut f32[], f32[], f32, u32")
        beyond = {
            f"{function.max_threads_per_block + 1} .*{function.max_threads_per_block}": kina.LaunchConfig(
                1, function.max_threads_per_block + 1
            ),
            f"{info.max_shared_bytes_per_block_optin + 1} .*{info.max_shared_bytes_per_block_optin}": kina.LaunchConfig(
                1, 1, info.max_shared_bytes_per_block_optin + 1
            ),
        }
        for axis in range(3):
            grid, block = [1, 1, 1], [1, 1, 1]
            grid[axis], block[axis] = info.max_grid[axis] + 1, info.max_block[axis] + 1
            beyond[rf"grid\[{axis}\] = {grid[axis]} .*{info.max_grid[axis]}"] = kina.LaunchConfig(tuple(grid), 1)
            beyond[rf"block\[{axis}\] = {block[axis]} .*{info.max_block[axis]}"] = kina.LaunchConfig(1, tuple(block))
        for words, config in beyond.items():
            with pytest.raises(kina.InvalidConfigError, match=words):
                function.launch(config, y, x, 1.0, 4)
    assert session.counters().launches == 0
    saxpy(session, y, x, 1.0)
