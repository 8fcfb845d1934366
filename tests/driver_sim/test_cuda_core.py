# ruff: noqa: F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE and of SETUP here.
"""cuda.core, which knows nothing of the simulation, finds in it what it expects of a driver."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.simulated

SETUP = """
import cuda.core as core

CUBIN = KERNELS_PTX.parents[1] / "data" / "cubin" / "kernels_sm90.cubin"
N = 1000

def device(number=0):
    d = core.Device(number)
    d.set_current()
    return d

def pinned(values):
    buffer = core.LegacyPinnedMemoryResource().allocate(4 * len(values))
    view = np.from_dlpack(buffer).view(np.float32)
    view[:] = values
    return buffer, view

def kernel(name, kind="ptx"):
    if kind == "ptx":
        return core.ObjectCode.from_ptx(KERNELS_PTX.read_bytes()).get_kernel(name)
    return core.ObjectCode.from_cubin(CUBIN.read_bytes()).get_kernel(name)

def saxpy(where, k, y, x, a):
    config = core.LaunchConfig(grid=(N + 255) // 256, block=256)
    core.launch(where, config, k, y, x, np.float32(a), np.uint32(N))
"""


@pytest.mark.parametrize("kind", ["ptx", "cubin"])
def test_saxpy(inside, kind):
    def body():
        d = device()
        assert d.name == "NVIDIA H200" and tuple(d.compute_capability) == (9, 0)
        s = d.create_stream()
        k = kernel("saxpy", os.environ["KIND"])
        assert [(p.offset, p.size) for p in k.arguments_info] == [(0, 8), (8, 8), (16, 4), (20, 4)]
        host, view = pinned(np.arange(N))
        x, y = (d.allocate(4 * N, stream=s) for _ in range(2))
        x.copy_from(host, stream=s)
        y.copy_from(host, stream=s)
        saxpy(s, k, y, x, 2)
        y.copy_to(host, stream=s)
        done = s.record()
        done.sync()
        assert done.is_done and (view == 3 * np.arange(N)).all()
        x.close(s), y.close(s), s.sync()
        assert [a["kind"] for a in sim.live()["allocations"]] == ["pinned"]
        assert sim.violations == 0

    inside(body, setup=SETUP, env={"KIND": kind})


def test_streams_graphs_and_mappings(inside):
    def body():
        d = device()
        s, t = d.create_stream(), d.create_stream()
        memory = core.VirtualMemoryResource(d)
        x, y = (memory.allocate(4 * N) for _ in range(2))
        host, view = pinned(np.arange(x.size // 4))  # as large as its granularity made it
        x.copy_from(host, stream=s)
        y.copy_from(host, stream=s)
        builder = s.create_graph_builder().begin_building()
        saxpy(builder, kernel("saxpy"), y, x, 1)
        saxpy(builder, kernel("saxpy"), y, x, 1)
        graph = builder.end_building().complete()
        t.wait(s)
        graph.launch(t)
        y.copy_to(host, stream=t)
        t.sync()
        assert (view[:N] == 3 * np.arange(N)).all() and (view[N:] == np.arange(N, len(view))).all()
        x.close(), y.close()
        assert sim.live()["reservations"] == 0

    inside(body, setup=SETUP)


def test_two_devices(inside):
    def body():
        first, second = device(0), device(1)
        assert core.Device(0).can_access_peer(1)
        s = second.create_stream()
        x = second.allocate(64, stream=s)
        x.fill(7, stream=s)
        s.sync()
        assert sim.read(int(x.handle), 64) == b"\7" * 64
        first.set_current()
        assert core.Device().device_id == 0

    inside(body, setup=SETUP, devices=2)


def test_failures_are_cuda_cores_own(inside):
    def body():
        d = device()
        s = d.create_stream()
        k = kernel("trap")
        core.launch(s, core.LaunchConfig(grid=1, block=1), k)
        message = ""
        try:
            s.sync()
        except Exception as error:
            message = str(error)
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in message

    inside(body, setup=SETUP)
