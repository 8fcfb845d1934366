"""Raw blocks: where they can be opened, what they give, and what is true around them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cuda import (
    ForeignStream,
    current_context,
    driver,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    set_current,
    unchanged,
)
from helpers.kernels import KERNELS

import kina

ADD_ONE = "mut f32[], u32"


def test_a_block_is_entered_once(session):
    block = session.raw("once")
    assert "not entered" in repr(block)
    with pytest.raises(kina.SessionClosedError, match="not been entered"):
        block.unsafe_stream_handle()
    with block as entered:
        assert entered is block
        assert "open" in repr(block)
        with pytest.raises(kina.SessionClosedError, match="entered once"):
            block.__enter__()
    assert "ended" in repr(block)
    with pytest.raises(kina.SessionClosedError, match="entered once"):
        block.__enter__()
    block.__exit__(None, None, None)


def test_a_block_is_named_in_errors(session):
    with session.raw("the mixing step") as raw:
        assert raw.operation == "the mixing step"
    with pytest.raises(kina.SessionClosedError, match="'the mixing step' has ended"):
        raw.unsafe_stream_handle()
    with pytest.raises(TypeError):
        session.raw(3)


def test_a_block_needs_an_open_session(runtime):
    session = kina.session(runtime)
    with pytest.raises(kina.SessionClosedError):
        session.raw("too early")
    with session:
        late = session.raw("late")
    with pytest.raises(kina.SessionClosedError):
        late.__enter__()
    with pytest.raises(kina.SessionClosedError):
        session.raw("too late")


def test_a_block_that_was_never_left_is_harmless(runtime):
    with kina.session(runtime) as session:
        y = session.zeros(8)
        blocks = [session.raw(f"{i}").__enter__() for i in range(5)]
        refs = [block.ref(y) for block in blocks]
        del blocks[1], blocks[2]
        assert [ref.alive for ref in refs] == [True, False, True, False, True]
        with session.raw("on top") as raw, pytest.raises(kina.InvalidLayoutError):
            raw.mut(y)
    assert not any(ref.alive for ref in refs)
    with kina.session(runtime) as session, session.raw("later") as raw:
        raw.mut(y)


def test_the_stream_is_the_sessions_one(session):
    with session.raw("one") as raw:
        handle = raw.unsafe_stream_handle()
        assert handle > 2
        version, same = raw.stream.__cuda_stream__()
        assert (version, same) == (0, handle)
        with session.raw("inner") as inner:
            assert inner.unsafe_stream_handle() == handle
    with session.raw("two") as raw:
        assert raw.unsafe_stream_handle() == handle
    other = kina.Runtime(0)
    with kina.session(other) as theirs, theirs.raw("theirs") as raw:
        assert raw.unsafe_stream_handle() != handle
    other.close()


def test_work_of_others_on_the_stream_is_ordered(session):
    """What another library enqueues on the handle runs between the session's own work."""
    y = session.zeros(64)
    with session.raw("mixed") as raw:
        function = raw.module(KERNELS).function("add_one", ADD_ONE)
        config = kina.LaunchConfig.linear(64)
        function.launch(config, y, 64)
        mut = raw.mut(y)
        bits = int(np.array(7, np.float32).view(np.uint32))
        ok(driver.cuMemsetD32Async(raw.unsafe_address(mut), bits, 32, driver.CUstream(raw.unsafe_stream_handle())))
        mut.release()
        function.launch(config, y, 64)
    assert session.to_host(y).tolist() == [8.0] * 32 + [2.0] * 32


def test_an_address_is_that_of_the_first_element(session):
    x = session.from_host(np.arange(24, dtype=np.float32).reshape(4, 6))
    with session.raw("address") as raw:
        base = raw.unsafe_address(raw.ref(x))
        assert base % 256 == 0
        assert raw.unsafe_address(raw.ref(x[1:, 2:])) == base + 32
        assert raw.unsafe_address(raw.ref(x[::-1])) == base + 72
        assert raw.unsafe_address(raw.ref(session.zeros(0))) >= 0
        ref = raw.ref(x)
        ref.release()
        with pytest.raises(kina.SessionClosedError):
            raw.unsafe_address(ref)
        with pytest.raises(TypeError):
            raw.unsafe_address(x)
        with pytest.raises(TypeError):
            raw.unsafe_address(None)


def test_an_address_of_another_runtime_is_refused(session):
    other = kina.Runtime(0)
    with kina.session(other) as theirs, theirs.raw("theirs") as their_raw, session.raw("ours") as raw:
        ref = their_raw.ref(theirs.zeros(8))
        with pytest.raises(kina.ForeignRuntimeError):
            raw.unsafe_address(ref)
    other.close()


def test_a_block_changes_no_context(session, foreign):
    """Entering and leaving one neither pushes nor pops; work goes to the session's context all the same."""
    y = session.zeros(8)
    with unchanged(), session.raw("plain"):
        assert current_context() == primary_context()
    with on_stack(foreign), unchanged(), session.raw("foreign") as raw:
        raw.module(KERNELS).function("add_one", ADD_ONE).launch(kina.LaunchConfig.linear(8), y, 8)
        raw.mut(y).release()
        assert current_context() == foreign
    before = current_context()
    with session.raw("changed") as raw:
        set_current(foreign)
        raw.module(KERNELS).function("add_one", ADD_ONE).launch(kina.LaunchConfig.linear(8), y, 8)
        set_current(before)
    assert (session.to_host(y) == 2).all()


def test_blocks_of_two_runtimes_side_by_side(session):
    other = kina.Runtime(0)
    with kina.session(other) as theirs, session.raw("a") as a, theirs.raw("b") as b:
        x, y = session.zeros(8), theirs.zeros(8)
        functions = [raw.module(KERNELS).function("add_one", ADD_ONE) for raw in (a, b)]
        for _ in range(3):
            functions[0].launch(kina.LaunchConfig.linear(8), x, 8)
            functions[1].launch(kina.LaunchConfig.linear(8), y, 8)
        assert (session.to_host(x) == 3).all()
        assert (theirs.to_host(y) == 3).all()
    other.close()


def test_blocks_in_threads(runtime):
    """Each thread has its own Runtime; the refs of one do not concern another."""

    def work() -> list[float]:
        with kina.session("cuda:0") as session, session.raw("thread") as raw:
            y = session.zeros(8)
            mut = raw.mut(y)
            raw.module(KERNELS).function("add_one", ADD_ONE).launch(kina.LaunchConfig.linear(8), mut, 8)
            return session.to_host(y).tolist()

    with kina.session(runtime) as session, session.raw("here") as raw:
        held = raw.mut(session.zeros(8))
        assert in_thread(work) == in_thread(work) == [1.0] * 8
        assert held.alive


def test_a_block_on_an_adopted_stream():
    stream = ForeignStream()
    with kina.session(0, stream=stream) as session, session.raw("adopted") as raw:
        assert raw.unsafe_stream_handle() == stream.handle
        assert raw.stream.__cuda_stream__() == (0, stream.handle)


def poisoned() -> None:
    with kina.session(0) as session, session.raw("trap") as raw:
        module = raw.module(KERNELS)
        y = session.zeros(8)
        ref = raw.mut(y)
        module.function("trap", "").launch(kina.LaunchConfig(1, 1))
        with pytest.raises(kina.SynchronizeError, match="700"):
            session.synchronize()
        launches = 0
        add_one = None
        for use in (
            lambda: module.function("add_one"),
            lambda: raw.module(KERNELS + "\n"),
            lambda: raw.ref(y),
            lambda: raw.unsafe_stream_handle(),
            lambda: raw.unsafe_address(ref),
            lambda: session.raw("again"),
            lambda: session.zeros(8),
            lambda: session.synchronize(),
        ):
            with pytest.raises(kina.RuntimePoisonedError, match="earlier asynchronous failure"):
                use()
        assert (launches, add_one) == (0, None)
    with pytest.raises(kina.RuntimePoisonedError):
        kina.session(0).__enter__()


def poisoned_in_flight() -> None:
    with kina.session(0) as session, session.raw("trap") as raw:
        module = raw.module(KERNELS)
        function = module.function("add_one", "mut f32[], u32")
        y = session.zeros(8)
        function.launch(kina.LaunchConfig(1, 1), y, 1)
        module.function("trap", "").launch(kina.LaunchConfig(1, 1))
        with pytest.raises(kina.SynchronizeError):
            session.to_host(y)
        with pytest.raises(kina.RuntimePoisonedError, match="First cause"):
            function.launch(kina.LaunchConfig(1, 1), y, 1)


@pytest.mark.parametrize("body", [poisoned, poisoned_in_flight], ids=["explicit", "in-flight"])
def test_after_a_fault_everything_says_so(body):
    """In a process of its own: its context dies. Leaving it alive at exit is silent."""
    run_body(body)
