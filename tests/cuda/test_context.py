"""The caller's context stack, and so ``cudaGetDevice``, is the same after a session as before it."""

from __future__ import annotations

import logging
import threading

import pytest
from helpers.cuda import (
    ForeignStream,
    current_context,
    in_thread,
    on_stack,
    pop,
    primary_context,
    push,
    run_body,
    set_current,
    stack,
    unchanged,
)

import kina

STACKS = {
    "none": (),
    "foreign": ("F",),
    "own": ("P",),
    "own above foreign": ("F", "P"),
    "foreign above own": ("P", "F"),
    "two foreign": ("F", "G"),
    "other device": ("Q",),
    "other device above foreign": ("F", "Q"),
}
OTHER_DEVICE = ("other device", "other device above foreign")


@pytest.fixture
def contexts(foreign_contexts):
    """F, G: foreign. H, I: a library's. P: the first device's primary context. Q: the second's."""
    made = dict(zip("FGHI", foreign_contexts, strict=True))
    return lambda names: [made.get(name) or primary_context("PQ".index(name)) for name in names]


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.multi_gpu] * (name in OTHER_DEVICE)) for name in STACKS])
def start(request, contexts):
    """Each stack that a caller may have; the test is wrong if it leaves another one."""
    with on_stack(*contexts(STACKS[request.param])), unchanged():
        yield


def use(session):
    """A real call, which must find the session's context."""
    assert session.to_host(session.full(3, 2.0)).tolist() == [2.0] * 3


def test_a_session(start, runtime):
    with kina.session(runtime) as session:
        assert current_context() == primary_context()
        use(session)


def test_an_exception_passes_through(start, runtime):
    failure = KeyError("the block's own")
    with pytest.raises(KeyError) as raised, kina.session(runtime):
        raise failure
    assert raised.value is failure


def test_a_call_outside_any_session(start):
    tensor = kina.zeros(5, device="cuda:0")
    assert tensor.device == "cuda:0"
    del tensor


@pytest.mark.parametrize("second", ["same Runtime", "other Runtime", "adopted stream"])
@pytest.mark.parametrize("fails", [False, True])
def test_nested_sessions(start, runtime, second, fails):
    inner = None
    if second == "adopted stream":
        inner = ForeignStream()
        target = kina.Runtime(0, stream=inner)
    else:
        target = runtime if second == "same Runtime" else kina.Runtime(0)
    try:
        with kina.session(runtime) as outer:
            middle = stack()
            with kina.session(target) as session:
                use(session)
                use(outer)
                if fails:
                    raise KeyError
            assert stack() == middle
            use(outer)
    except KeyError:
        assert fails
    if target is not runtime:
        target.close()
    if inner is not None:
        del session, target
        inner.destroy()


@pytest.mark.multi_gpu
def test_nested_sessions_of_two_devices(start, runtime):
    with kina.session(runtime) as outer:
        with kina.session(1) as session:
            assert current_context() == primary_context(1)
            use(session)
            use(outer)
            assert current_context() == primary_context(1)
        assert current_context() == primary_context()


@pytest.mark.multi_gpu
def test_an_abandoned_session_pays_for_one_on_another_device():
    with unchanged():
        first = kina.session(0).__enter__()
        second = kina.session(1).__enter__()
        first.close()
        del second
        with kina.session(1):
            pass


@pytest.mark.multi_gpu
def test_a_caller_with_the_same_context_twice_keeps_both():
    """What a session pays for others is counted from the top: below it everything is the caller's."""
    with on_stack(primary_context(1), primary_context(1)), unchanged():
        first = kina.session(0).__enter__()
        second = kina.session(0).__enter__()
        first.close()
        third = kina.session(1).__enter__()
        second.close()
        third.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize(
    "targets",
    [
        "AAA",
        "AAB",
        "ABA",
        "ABB",
        pytest.param("AQA", marks=pytest.mark.multi_gpu),
        pytest.param("AQB", marks=pytest.mark.multi_gpu),
        pytest.param("QAQ", marks=pytest.mark.multi_gpu),
    ],
)
def test_sessions_left_in_any_order(start, targets, order):
    runtimes = {"A": kina.Runtime(0), "B": kina.Runtime(0)}
    if "Q" in targets:
        runtimes["Q"] = kina.Runtime(1)
    sessions = [kina.session(runtimes[target]) for target in targets]
    for session in sessions:
        session.__enter__()
    for i, which in enumerate(order):
        sessions[which].__exit__(None, None, None)
        for left in order[i + 1 :]:
            use(sessions[left])
    for runtime in runtimes.values():
        runtime.close()


def interfere(what, contexts):
    first, second = contexts("HI")
    if what == "sets another":
        set_current(first)
    elif what == "sets the caller's":
        set_current(contexts("F")[0])
    elif what == "sets another, then a third":
        set_current(first)
        push(second)
    elif what == "leaves one pushed":
        push(first)
    elif what == "leaves two pushed":
        push(first)
        push(second)
    elif what == "leaves ours pushed":
        push(primary_context())
    elif what == "pops ours":
        pop()
    elif what == "sets none":
        set_current(0)
    elif what == "sets another device":
        set_current(primary_context(1))
    elif what == "leaves another device pushed":
        push(primary_context(1))


LIBRARIES = [
    "sets another",
    "sets the caller's",
    "sets another, then a third",
    "leaves one pushed",
    "leaves two pushed",
    "leaves ours pushed",
    "pops ours",
    "sets none",
    pytest.param("sets another device", marks=pytest.mark.multi_gpu),
    pytest.param("leaves another device pushed", marks=pytest.mark.multi_gpu),
]

# The driver does not tell how deep a stack is. Where our entry is the caller's own, these look like something
# else that is likelier; what a session outside them saved mends them when it ends.
AMBIGUOUS = ("sets another, then a third", "leaves ours pushed", "pops ours", "sets none")


@pytest.mark.parametrize("what", LIBRARIES)
@pytest.mark.parametrize("initial", ["none", "foreign", "two foreign", "foreign above own"])
def test_a_library_changes_contexts_inside(contexts, runtime, caplog, initial, what):
    with on_stack(*contexts(STACKS[initial])), unchanged(), kina.session(runtime) as session:
        interfere(what, contexts)
        before = stack()
        use(session)  # each call makes its own context current, and only for itself
        assert stack() == before
    assert caplog.records == []


@pytest.mark.parametrize("what", LIBRARIES)
def test_a_library_changes_contexts_inside_a_nested_session(contexts, runtime, caplog, what):
    with on_stack(*contexts("F")), unchanged(), kina.session(runtime) as outer:
        with kina.session(runtime) as inner:
            interfere(what, contexts)
            use(inner)
        assert current_context() == primary_context()
        use(outer)
    assert caplog.records == []


@pytest.mark.parametrize("what", [what for what in LIBRARIES if what not in AMBIGUOUS])
def test_a_library_changes_contexts_where_ours_was_current_already(contexts, runtime, caplog, what):
    """Ours is the caller's own entry then."""
    with on_stack(*contexts("FP")), unchanged(), kina.session(runtime) as session:
        interfere(what, contexts)
        use(session)
    assert caplog.records == []


def test_two_threads_have_their_own_stacks(contexts):
    inside = threading.Barrier(2, timeout=30)

    def work(names):
        with on_stack(*contexts(names)), unchanged():
            with kina.session("cuda:0") as session:
                inside.wait()
                use(session)
                inside.wait()
            assert stack() == contexts(names)

    other = threading.Thread(target=work, args=("F",))
    with unchanged():
        other.start()
        work("GH")
        other.join()


def test_a_session_of_another_thread_is_not_seen(runtime):
    with kina.session(runtime):
        assert in_thread(stack) == []


# A restore that fails -------------------------------------------------------------------------------------


def own_records(caplog):
    return [record for record in caplog.records if record.name == "kina"]


@pytest.mark.simulated
@pytest.mark.parametrize("code", [1, 4, 201, 999])
@pytest.mark.parametrize("fails", [False, True])
def test_a_failed_restore_is_logged_once(sim, contexts, runtime, caplog, code, fails):
    failure = KeyError("the block's own")
    names = ("cuCtxPopCurrent", "cuCtxPushCurrent", "cuCtxSetCurrent")
    seen = None
    with on_stack(*contexts("F")):
        try:
            with kina.session(runtime) as session:
                use(session)
                for name in names:
                    sim.fail(name, result=code, from_then_on=True)
                if fails:
                    raise failure
        except KeyError as error:
            seen = error
        finally:
            sim.clear_faults()
        assert seen is (failure if fails else None)
        # DEINITIALIZED is the end of the process, of which nobody need be told.
        records = own_records(caplog)
        assert [record.levelno for record in records] == ([] if code == 4 else [logging.ERROR])
        assert all(f"({code})" in record.getMessage() for record in records)
    with on_stack(*contexts("F")), unchanged(), kina.session(runtime) as session:
        use(session)
    assert len(own_records(caplog)) == len(records)


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["cuCtxPopCurrent", "cuCtxGetCurrent"])
@pytest.mark.parametrize("initial", ["none", "foreign"])
def test_one_failing_call_still_leaves_the_right_context_current(sim, contexts, runtime, caplog, name, initial):
    with on_stack(*contexts(STACKS[initial])):
        before = current_context()
        with kina.session(runtime):
            sim.fail(name)
        assert current_context() == before
    assert len(own_records(caplog)) <= 1


def test_a_failed_restore_seen_through_the_interposer():
    """The same on any driver: a library in front of it fails the call."""
    from helpers import interpose

    def body():
        import logging

        from helpers.interpose import Interposer

        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("kina").addHandler(handler)
        logging.getLogger("kina").propagate = False
        calls = Interposer()
        tensor = kina.full(3, 2.0, device="cuda:0")

        def use():
            with kina.session("cuda:0"):
                calls.fail("cuCtxPopCurrent", times=-1)
                calls.fail("cuCtxSetCurrent", times=-1)
                raise KeyError("the block's own")

        with pytest.raises(KeyError, match="the block's own"):
            use()
        calls.reset()
        assert len(lines) == 1, lines
        assert "(999)" in lines[0]
        with kina.session("cuda:0") as session:
            assert session.to_host(tensor).tolist() == [2.0] * 3
        assert len(lines) == 1, lines

    run_body(body, **{name: interpose.env()[name] for name in ("LD_LIBRARY_PATH", "KINA_INTERPOSE_REAL")})
