"""Workspaces: scratch memory of one raw block, given back in the order of its stream."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers.cuda import in_thread, stalled, view
from helpers.kernels import fill_entry, module_text

import kina
from kina import memory

IMAGE = module_text(fill_entry())
MIB = 1 << 20


@pytest.fixture
def raw(session):
    with session.raw("workspaces") as opened:
        yield opened


@pytest.fixture
def fill(raw):
    return raw.module(IMAGE).function("fill", "ptr, f32, u32")


CONFIG = kina.LaunchConfig.linear(256)


@pytest.mark.parametrize("nbytes", [1, 255, 256, 1000, 30 * MIB])
def test_what_it_is(raw, nbytes):
    workspace = raw.workspace(nbytes)
    assert (workspace.nbytes, len(workspace), workspace.alive) == (nbytes, nbytes, True)
    assert raw.unsafe_address(workspace) % 256 == 0
    assert str(nbytes) in repr(workspace)


def test_none_at_all(raw, fill):
    workspace = raw.workspace(0)
    assert raw.unsafe_address(workspace) == 0
    fill.launch(CONFIG, workspace, 1.0, 0)


def test_kernels_use_it(session, raw, fill):
    workspace = raw.workspace(1024)
    fill.launch(CONFIG, workspace, 2.5, 256)
    loose = raw.module(IMAGE).function("fill")
    loose.launch(kina.LaunchConfig.linear(100), workspace, kina.f32(1.5), kina.u32(100))
    seen = np.zeros(256, np.float32)
    into = session.zeros(256)
    raw.module(module_text(COPY)).function("copy", "mut f32[], ptr, u32").launch(CONFIG, into, workspace, 256)
    seen[:] = session.to_host(into)
    assert seen.tolist() == [1.5] * 100 + [2.5] * 156


COPY = """
.visible .entry copy(.param .u64 copy_to, .param .u64 copy_from, .param .u32 copy_n)
{
  .reg .pred %p1;
  .reg .f32 %f1;
  .reg .b32 %r<6>;
  .reg .b64 %d<5>;
  ld.param.u64 %d1, [copy_to];
  ld.param.u64 %d2, [copy_from];
  ld.param.u32 %r1, [copy_n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra copy_end;
  mul.wide.u32 %d3, %r5, 4;
  add.u64 %d4, %d2, %d3;
  ld.global.f32 %f1, [%d4];
  add.u64 %d4, %d1, %d3;
  st.global.f32 [%d4], %f1;
copy_end:
  ret;
}
"""


def test_it_ends_with_its_block_or_before(session):
    with session.raw("one") as raw:
        fill = raw.module(IMAGE).function("fill", "ptr, f32, u32")
        first, second = raw.workspace(MIB), raw.workspace(MIB)
        live = session.counters().live_bytes
        first.release()
        first.release()
        assert (first.alive, second.alive) == (False, True)
        assert session.counters().live_bytes == live - MIB
        for use in (lambda: fill.launch(CONFIG, first, 1.0, 8), lambda: raw.unsafe_address(first)):
            with pytest.raises(kina.SessionClosedError, match=r"workspace .*ended"):
                use()
        fill.launch(CONFIG, second, 1.0, 8)
    assert session.counters().live_bytes == live - 2 * MIB
    assert not second.alive
    with session.raw("two"), pytest.raises(kina.SessionClosedError, match=r"workspace .*ended"):
        fill.launch(CONFIG, second, 1.0, 8)


def test_one_that_is_dropped_is_given_back(session):
    with session.raw("drop") as raw:
        live = session.counters().live_bytes
        for _ in range(1000):
            raw.workspace(MIB)
        assert session.counters().live_bytes == live
        kept = [raw.workspace(1000) for _ in range(200)]
        assert session.counters().live_bytes == live + 200 * 1000
        assert all(workspace.alive for workspace in kept)
    assert not any(workspace.alive for workspace in kept)
    assert session.counters().live_bytes == live


def test_it_ends_with_its_session_too(runtime):
    session = kina.session(runtime).__enter__()
    raw = session.raw("late").__enter__()
    fill = raw.module(IMAGE).function("fill", "ptr, f32, u32")
    workspace = raw.workspace(1024)
    session.close()
    assert not workspace.alive
    with kina.session(runtime) as other, other.raw("later") as later:
        with pytest.raises(kina.SessionClosedError, match="workspace"):
            fill.launch(CONFIG, workspace, 1.0, 2)
        with pytest.raises(kina.SessionClosedError, match="workspace"):
            later.unsafe_address(workspace)
        raw.__exit__(None, None, None)
        assert other.counters().live_bytes == 0


def test_another_thread_does_not_end_it(raw):
    workspace = raw.workspace(64)
    with pytest.raises(kina.WrongThreadError):
        in_thread(workspace.release)
    assert workspace.alive


def test_work_under_way_keeps_using_it(session):
    """The memory goes back in the order of the stream: nobody else gets it before."""
    with session.raw("one") as raw:
        fill = raw.module(IMAGE).function("fill", "ptr, f32, u32")
        session.synchronize()
        with stalled(session):
            workspace = raw.workspace(1024)
            address = raw.unsafe_address(workspace)
            fill.launch(CONFIG, workspace, 5.0, 256)
            workspace.release()
            again = session.full(256, 7.0)  # the same memory, behind the kernel
            assert view(session, again) == address
            waits = session.counters().host_waits
        assert session.counters().host_waits == waits
    assert (session.to_host(again) == 7.0).all()


def test_it_comes_from_the_resource_that_is_named(session):
    counted = memory.StatisticsMemoryResource(memory.CudaAsyncMemoryResource(0))
    with session.raw("one") as raw:
        workspace = raw.workspace(1000, memory=counted)
        assert counted.counts().current_bytes == 1000
        with memory.using(counted):
            other = raw.workspace(500)
        assert counted.counts().current_bytes == 1500
        workspace.release()
        assert counted.counts().current_bytes == 500
        assert other.alive
    assert counted.counts().current_bytes == 0


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (-1, kina.InvalidShapeError),
        (2**63, kina.InvalidShapeError),
        (1.5, kina.KinaError),
        ((2, 3), kina.KinaError),
        ([4], kina.KinaError),
    ],
)
def test_sizes_that_are_none(raw, nbytes, error):
    with pytest.raises(error):
        raw.workspace(nbytes)


def test_what_is_no_workspace(session, raw, fill):
    tensor = session.zeros(8, "uint8")
    for argument in (tensor, raw.ref(tensor), 5, None, b"12345678"):
        with pytest.raises(kina.ArgumentError, match="argument 0 of fill is a workspace"):
            fill.launch(CONFIG, argument, 1.0, 2)
    typed = raw.module(IMAGE).function("fill", "mut f32[], f32, u32")
    with pytest.raises(kina.ArgumentError, match="is a tensor of float32, got DeviceBytes"):
        typed.launch(CONFIG, raw.workspace(64), 1.0, 2)
    with pytest.raises(TypeError, match="ref or a workspace"):
        raw.unsafe_address(tensor)


def test_one_of_another_runtime(raw, fill, session):
    with kina.session(kina.Runtime(0)) as other, other.raw("other") as theirs:
        workspace = theirs.workspace(64)
        with pytest.raises(kina.ForeignRuntimeError):
            raw.unsafe_address(workspace)
        with pytest.raises((kina.ForeignRuntimeError, kina.SessionClosedError)):
            fill.launch(CONFIG, workspace, 1.0, 2)


def test_it_is_not_passed_twice(raw, session):
    copy_ = raw.module(module_text(COPY)).function("copy", "ptr, ptr, u32")
    workspace = raw.workspace(64)
    with pytest.raises(kina.InvalidLayoutError, match="overlap"):
        copy_.launch(CONFIG, workspace, workspace, 2)


def test_it_belongs_to_its_thread_and_process(raw):
    workspace = raw.workspace(64)
    with pytest.raises(kina.WrongThreadError):
        in_thread(lambda: raw.workspace(64))
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="DeviceBytes"):
            copying(workspace)
    with pytest.raises(TypeError):
        kina.cuda.DeviceBytes()


def test_a_full_device_is_told(raw, session):
    limited = memory.LimitingMemoryResource(memory.CudaAsyncMemoryResource(0), 1000)
    with pytest.raises(kina.OutOfMemoryError, match="limit"):
        raw.workspace(1001, memory=limited)
    assert raw.workspace(1000, memory=limited).alive
