# ruff: noqa: F821
# Bodies run in a process of their own, behind the names of helpers.cuda.PRELUDE.
"""Prepared launches: what is checked once, and what each launch checks all the same."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
from helpers.cuda import in_thread, on_stack, run_body, stalled, until
from helpers.kernels import KERNELS, element, fill_entry, module_text, nothing_enqueued, write_args_entry

import kina

SAXPY = "mut f32[], f32[], f32, u32"
EIGHT = kina.LaunchConfig(1, 8)


@pytest.fixture
def raw(session):
    with session.raw("prepared") as block:
        yield block


@pytest.fixture
def saxpy(raw):
    return raw.module(KERNELS).function("saxpy", SAXPY)


@pytest.fixture
def prepared(saxpy):
    return saxpy.prepare(EIGHT)


@pytest.fixture
def y(session):
    return session.zeros(8)


@pytest.fixture
def x(session):
    return session.full(8, 3.0)


def test_it_launches(session, prepared, y, x):
    before = session.counters()
    for _ in range(3):
        prepared.launch(y, x, 2.0, 8)
    after = session.counters()
    assert (session.to_host(y) == 18).all()
    assert after.launches - before.launches == 3
    assert after.leases - before.leases == 1
    for name in ("events_recorded", "event_queries", "synchronizations", "host_waits", "allocations"):
        assert getattr(after, name) == getattr(before, name)


def test_what_it_is(prepared, saxpy):
    assert prepared.name == saxpy.name == "saxpy"
    assert prepared.config is EIGHT
    assert repr(prepared) == "<kina.PreparedLaunch saxpy with LaunchConfig(grid=(1, 1, 1), block=(8, 1, 1))>"
    for wrong in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            wrong(prepared)
    with pytest.raises(TypeError, match="cannot be constructed"):
        kina.cuda.PreparedLaunch()


def test_several_configurations_of_one_function(session, saxpy, y, x):
    """None of them, nor the function's own launches, disturbs another."""
    four, all_of_them = saxpy.prepare(kina.LaunchConfig(1, 4)), saxpy.prepare(EIGHT)
    for launch in (four.launch, all_of_them.launch, four.launch, lambda *a: saxpy.launch(EIGHT, *a)):
        launch(y, x, 1.0, 8)
    assert session.to_host(y).tolist() == [12.0] * 4 + [6.0] * 4


@pytest.mark.parametrize(
    ("config", "match"),
    [(kina.LaunchConfig((1, 65536), 1), "65536 .* 65535"), (kina.LaunchConfig(1, (1, 1, 65)), "65 .* 64"),
     (kina.LaunchConfig(1, 1, 2**20), "1048576 dynamic"), (kina.LaunchConfig(32, 1, cluster=32), "32 blocks .* 16")],
    ids=["grid", "block", "shared", "cluster"],
)  # fmt: skip
def test_limits_are_checked_when_it_is_prepared(session, saxpy, config, match):
    with nothing_enqueued(session), pytest.raises(kina.InvalidConfigError, match=match):
        saxpy.prepare(config)


def test_it_is_prepared_for_a_configuration(saxpy):
    for wrong in (None, 1, (1, 8)):
        with pytest.raises(TypeError):
            saxpy.prepare(wrong)


def test_shared_memory_is_opted_in(session, raw, y):
    """Once, by the preparation; also outside of the block, and in another thread."""
    function = raw.module(module_text(fill_entry())).function("fill", "mut f32[], f32, u32")
    config = kina.LaunchConfig(1, 8, shared_bytes=100_000)
    prepared = in_thread(lambda: function.prepare(config))
    prepared.launch(y, 4.0, 8)
    assert (session.to_host(y) == 4).all()


@pytest.mark.simulated
def test_a_preparation_that_the_driver_refuses(session, raw, sim):
    function = raw.module(module_text(fill_entry())).function("fill", "mut f32[], f32, u32")
    config = kina.LaunchConfig(1, 8, shared_bytes=100_000)
    with sim.failing("cuFuncSetAttribute", result=1), pytest.raises(kina.LaunchError, match="opted in"):
        function.prepare(config)
    function.prepare(config).launch(session.zeros(8), 4.0, 8)


@pytest.mark.simulated
@pytest.mark.parametrize("more", [{}, {"cluster": 2}, {"cooperative": True}, {"programmatic": True}], ids=repr)
def test_two_driver_calls_to_a_launch(session, raw, sim, more):
    """The context is asked for, and the launch is made."""
    function = raw.module(KERNELS).function("fill", "mut f32[], f32, u32")
    prepared = function.prepare(kina.LaunchConfig(2, 4, **more))
    y = session.zeros(8)
    prepared.launch(y, 1.0, 8)
    with sim.tracing() as records:
        prepared.launch(y, 2.0, 8)
    calls = [record["name"] for record in records if record["event"] == "call"]
    assert calls in (["cuLaunchKernelEx" if more else "cuLaunchKernel"],
                     ["cuCtxGetCurrent", "cuLaunchKernelEx" if more else "cuLaunchKernel"])  # fmt: skip
    assert (session.to_host(y) == 2).all()


# Each launch checks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", range(7))
def test_the_number_of_arguments(session, prepared, y, x, given):
    arguments = [y, x, 2.0, 8, None, 1][:given]
    if given == 4:
        prepared.launch(*arguments)
        return
    with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match=rf"takes 4 argument\(s\), got {given}"):
        prepared.launch(*arguments)


def test_no_keywords(session, prepared, y, x):
    with nothing_enqueued(session), pytest.raises(TypeError):
        prepared.launch(y, x, 2.0, n=8)


def test_its_arguments(session, host, prepared, y, x):
    """As those of any launch; test_arguments.py has the cases."""
    with kina.session(kina.Runtime(0)) as other:
        foreign = other.zeros(8)
        cases = [
            ((y, x, "2", 8), kina.ArgumentError),
            ((y, x, 2.0, -1), kina.ArgumentError),
            ((y, x, 2.0, 2**32), kina.ArgumentError),
            ((y, 3.0, 2.0, 8), kina.ArgumentError),
            ((y, session.zeros(8, "f64"), 2.0, 8), kina.DTypeError),
            ((y, session.zeros(16)[::2], 2.0, 8), kina.NonContiguousError),
            ((y, foreign, 2.0, 8), kina.ForeignRuntimeError),
            ((y, host.zeros(8), 2.0, 8), kina.ForeignDeviceError),
            ((y, y, 2.0, 8), kina.InvalidLayoutError),
            ((session.zeros(1).broadcast_to((8,)), x, 2.0, 8), kina.InvalidLayoutError),
        ]
        for arguments, error in cases:
            with nothing_enqueued(session), pytest.raises(error):
                prepared.launch(*arguments)
    prepared.launch(y, x, 2.0, 8)
    assert (session.to_host(y) == 6).all()


def test_borrows_count(session, raw, prepared, y, x):
    mut = raw.mut(x)
    with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match="release that one first"):
        prepared.launch(y, x, 2.0, 8)
    mut.release()
    ref = raw.ref(y)
    with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match="release that one first"):
        prepared.launch(y, x, 2.0, 8)
    with pytest.raises(kina.ArgumentError, match="pass a mut"):
        prepared.launch(ref, x, 2.0, 8)
    ref.release()
    prepared.launch(raw.mut(y), raw.ref(x), 2.0, 8)
    assert (session.to_host(y) == 6).all()


@pytest.mark.parametrize("kind", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"])
def test_integers_at_their_limits(session, raw, kind):
    """The short way for ints ends where the parameter does."""
    function = raw.module(module_text(write_args_entry("write_args_limits", (kind,)))).function(
        "write_args_limits", f"mut u8[], {kind}"
    )
    prepared = function.prepare(kina.LaunchConfig(1, 1))
    info = np.iinfo({"u": "uint", "i": "int"}[kind[0]] + kind[1:])
    for value in (info.min, info.max, 0, 1, -1, 2**30 - 1, 2**30, -(2**30), 2**15, 2**60):
        to = session.zeros(32, "u8")
        if info.min <= value <= info.max:
            prepared.launch(to, value)
            size = info.bits // 8
            assert session.to_host(to)[8 : 8 + size].tobytes() == element(kind, value)
        else:
            with nothing_enqueued(session), pytest.raises(kina.ArgumentError):
                prepared.launch(to, value)
    for value in (info.min - 1, info.max + 1):
        with nothing_enqueued(session), pytest.raises(kina.ArgumentError):
            prepared.launch(to, value)


def test_without_a_signature(session, raw, y, x):
    prepared = raw.module(KERNELS).function("saxpy").prepare(EIGHT)
    with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match="not float"):
        prepared.launch(raw.mut(y), raw.ref(x), 2.0, kina.u32(8))


def test_another_thread(session, prepared, y, x):
    with nothing_enqueued(session), pytest.raises(kina.WrongThreadError):
        in_thread(lambda: prepared.launch(y, x, 2.0, 8))


def test_it_is_reused_in_later_blocks(session, y, x):
    with session.raw() as raw:
        prepared = raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)
    with nothing_enqueued(session), pytest.raises(kina.SessionClosedError):
        prepared.launch(y, x, 2.0, 8)
    del raw
    gc.collect()
    with session.raw():
        prepared.launch(y, x, 2.0, 8)
    assert (session.to_host(y) == 6).all()


class Ending:
    """A number whose conversion ends something."""

    def __init__(self, end) -> None:
        self.end = end

    def __float__(self) -> float:
        self.end()
        return 2.0


def test_a_conversion_that_ends_the_block(session, y, x):
    with session.raw() as raw:
        prepared = raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)
        with nothing_enqueued(session), pytest.raises((kina.SessionClosedError, kina.ArgumentError)):
            prepared.launch(y, x, Ending(lambda: raw.__exit__(None, None, None)), 8)


def test_a_foreign_context_is_current(session, prepared, foreign, y, x):
    with on_stack(foreign):
        prepared.launch(y, x, 2.0, 8)
    assert (session.to_host(y) == 6).all()


# Lifetimes --------------------------------------------------------------------------------------------------


def test_adopted_memory_is_leased(session):
    with kina.session(kina.Runtime(0)) as lender:
        source = lender.full(8, 3.0)
        lender.synchronize()
        y = session.zeros(8)
        with session.raw() as raw:
            prepared = raw.module(KERNELS).function("saxpy", SAXPY).prepare(EIGHT)
        with stalled(session), session.raw():
            x = session.adopt(source)
            prepared.launch(y, x, 2.0, 8)
            del source, x
            gc.collect()
            assert lender.counters().frees == 0
        assert (session.to_host(y) == 6).all()
        session.synchronize()
        until(lambda: lender.counters().frees == 1)


@pytest.mark.simulated
def test_it_keeps_the_code(sim):
    """Alone, with everything else gone; and a launch in flight keeps it then."""

    def body():
        from helpers.kernels import KERNELS

        with kina.session(0) as other:
            runtime = kina.Runtime(0)
            with kina.session(runtime) as session:
                with session.raw() as raw:
                    prepared = (
                        raw.module(KERNELS).function("fill", "mut f32[], f32, u32").prepare(kina.LaunchConfig(1, 8))
                    )
                tensor = session.zeros(8)
                since = sim.position
                with sim.stalled(stream_of(session)), session.raw() as raw:
                    prepared.launch(tensor, 1.0, 8)
                assert session.to_host(tensor).tolist() == [1.0] * 8
            runtime.close()
            del runtime, session, raw
            gc.collect()
            other.synchronize()
            assert sim.trace(since, name="cuModuleUnload") == []
            del prepared
            gc.collect()
            other.synchronize()
            assert len(sim.trace(since, name="cuModuleUnload")) == 1

    run_body(body, KINA_SIM_TIMEOUT_MS="5000")


@pytest.mark.simulated
def test_a_poisoned_device():
    def body():
        from helpers.kernels import KERNELS

        with kina.session(0) as session, session.raw() as raw:
            module = raw.module(KERNELS)
            function = module.function("saxpy", "mut f32[], f32[], f32, u32")
            prepared = function.prepare(kina.LaunchConfig(1, 8))
            y, x = session.zeros(8), session.full(8, 3.0)
            module.function("trap", "").launch(kina.LaunchConfig(1, 1))
            with pytest.raises(kina.SynchronizeError):
                session.synchronize()
            for act in (lambda: prepared.launch(y, x, 2.0, 8), lambda: function.prepare(kina.LaunchConfig(1, 4))):
                with pytest.raises(kina.RuntimePoisonedError, match="First cause"):
                    act()

    run_body(body)


@pytest.mark.simulated
def test_programmatic_launches_need_their_hardware():
    def body():
        from helpers.kernels import KERNELS

        with kina.session(0) as session, session.raw() as raw:
            fill = raw.module(KERNELS).function("fill", "mut f32[], f32, u32")
            y = session.zeros(8)
            config = kina.LaunchConfig(1, 8, programmatic=True)
            for act in (lambda: fill.prepare(config), lambda: fill.launch(config, y, 1.0, 8)):
                with pytest.raises(kina.UnsupportedError, match=r"compute capability 9\.0, the device has 8\.6"):
                    act()
            with pytest.raises(kina.UnsupportedError, match="clusters"):
                fill.prepare(kina.LaunchConfig(2, 4, cluster=2))
            fill.launch(kina.LaunchConfig(1, 8), y, 1.0, 8)
            assert (session.to_host(y) == 1).all()

    run_body(body, KINA_SIM_CAPABILITY="86")


def test_programmatic_launches_pass_arguments_alike(session, raw):
    fill = raw.module(KERNELS).function("fill", "mut f32[], f32, u32")
    for more in ({}, {"cluster": 2}, {"cooperative": True}, {"cluster": 2, "cooperative": True}):
        y = session.zeros(512)
        session.synchronize()  # the kernel does not wait for what is ahead of it
        fill.prepare(kina.LaunchConfig(16, 32, programmatic=True, **more)).launch(y, 2.0, 512)
        session.synchronize()
        assert (session.to_host(y) == 2).all()
