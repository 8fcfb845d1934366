"""What a launch uses outlives it, whoever lets go of it first, and without a wait of anybody.

The stream of the launch stands still (on hardware: behind a long kernel) while everything is dropped and the memory, if
it were given back, would be handed to others.
"""

from __future__ import annotations

import gc

import pytest
from helpers.cuda import KERNELS, simulation, stalled, until
from helpers.kernels import module_text, sized_entry
from helpers.managed import CUDA, Producer

import kina

N = 100_000
CONFIG = kina.LaunchConfig.linear(N)
WAYS = ("dropped", "block left", "session closed", "Runtime dropped")


@pytest.fixture
def other():
    """A session of another Runtime, which lends, and later asks for memory."""
    with kina.session(kina.Runtime(0)) as opened:
        yield opened


class Scene:
    """A launch `result = copy(source)` that is held up; then whatever can be let go of is."""

    def __init__(self) -> None:
        self.runtime = kina.Runtime(0, modules=1)
        self.session = kina.session(self.runtime).__enter__()
        self.result = self.session.zeros(N)
        self.raw = self.session.raw("scene").__enter__()
        module = self.raw.module(KERNELS)
        self.copy = module.function("copy", "mut f32[], f32[], u32")
        self.copy_of_workspace = module.function("copy", "mut f32[], ptr, u32")
        self.fill_workspace = module.function("fill", "ptr, f32, u32")
        self.session.synchronize()

    def evict(self) -> None:
        """Before the launch, for a load waits for the device."""
        self.raw.module(module_text(sized_entry("nothing")))
        assert self.session.counters().modules_evicted == 1

    def leave(self, way: str) -> None:
        """Up to there; nothing of it waits for the stream that stands still."""
        waits = self.session.counters().host_waits
        self.copy = self.copy_of_workspace = self.fill_workspace = None
        if way != "dropped":
            self.raw.__exit__(None, None, None)
        assert self.session.counters().host_waits == waits
        if way in ("session closed", "Runtime dropped"):
            self.session.close()
        if way == "Runtime dropped":
            self.raw = self.session = self.runtime = None
        gc.collect()

    def end(self) -> None:
        if self.raw is not None:
            self.raw.__exit__(None, None, None)
        if self.session is not None:
            self.session.close()


def others_take_memory(other: kina.cuda.CudaSession) -> list[kina.Tensor]:
    """As much as was let go of, and filled at once; and what may be unloaded or given back is."""
    made = [other.full(N, -float(i)) for i in range(1, 6)]
    other.synchronize()
    return made


def check(scene: Scene, other: kina.cuda.CudaSession, value: float) -> None:
    assert (other.to_host(other.adopt(scene.result)) == value).all()
    scene.end()
    other.synchronize()


@pytest.mark.parametrize("way", WAYS)
def test_a_workspace(other, way):
    scene = Scene()
    with stalled(scene.session):
        workspace = scene.raw.workspace(4 * N)
        scene.fill_workspace.launch(CONFIG, workspace, 5.0, N)
        scene.copy_of_workspace.launch(CONFIG, scene.result, workspace, N)
        del workspace
        scene.leave(way)
        taken = others_take_memory(other)
    check(scene, other, 5.0)
    del taken


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_another_runtime(other, way):
    scene = Scene()
    source = other.full(N, 3.0)
    other.synchronize()
    with stalled(scene.session):
        adopted = scene.session.adopt(source)
        scene.copy.launch(CONFIG, scene.result, adopted, N)
        del adopted, source
        frees = other.counters().frees
        scene.leave(way)
        taken = others_take_memory(other)
        assert other.counters().frees == frees
    check(scene, other, 3.0)
    del taken


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_another_library(other, way):
    scene = Scene()
    source = other.full(N, 3.0)
    other.synchronize()
    with other.raw() as raw:
        address = raw.unsafe_address(raw.ref(source))
    lender = Producer((N,), device=(CUDA, 0), data=address)
    with stalled(scene.session):
        adopted = scene.session.adopt(lender)
        scene.copy.launch(CONFIG, scene.result, adopted, N)
        del adopted
        scene.leave(way)
        taken = others_take_memory(other)
        assert lender.deleted == 0
    check(scene, other, 3.0)
    kina.memory.HostMemoryResource().allocate(0)  # what waits for the GIL
    if way == "Runtime dropped":  # the device's next occasion
        other.completion().wait()
        other.synchronize()
    else:
        with kina.session(scene.runtime) as again:
            again.synchronize()
    gc.collect()
    until(lambda: lender.deleted > 0)
    assert lender.deleted == 1
    del taken


@pytest.mark.parametrize("way", WAYS)
def test_a_module(other, way):
    """Which nobody holds any more, not even the cache."""
    scene = Scene()
    source = scene.session.full(N, 2.0)
    scene.evict()
    scene.session.synchronize()
    sim = simulation()
    since = sim.position if sim is not None else 0
    with stalled(scene.session):
        scene.copy.launch(CONFIG, scene.result, source, N)
        del source
        scene.leave(way)
        taken = others_take_memory(other)
        if sim is not None:
            assert sim.trace(since, name="cuModuleUnload") == []
    check(scene, other, 2.0)
    if way != "Runtime dropped":
        with kina.session(scene.runtime) as again:
            again.synchronize()
    other.synchronize()
    if sim is not None:
        order = [
            record["name"]
            for record in sim.trace(since)
            if record["name"] == "cuModuleUnload" or (record["event"] == "exec" and record["name"] == "kernel")
        ]
        assert order[0] == "kernel"
        assert "cuModuleUnload" in order
    del taken
