"""Refs: who may borrow what at the same time, and when a borrow ends. What cannot be made, copied or kept."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
from helpers.cuda import in_thread
from helpers.kernels import KERNELS, fill_entry, module_text

import kina
import kina.cuda


@pytest.fixture
def raw(session):
    with session.raw("refs") as block:
        yield block


# Borrowing ------------------------------------------------------------------------------------------------

# Two parts of a (8, 8) tensor, and whether their byte spans meet.
PARTS = {
    "same": (lambda t: t, lambda t: t, True),
    "halves": (lambda t: t[:4], lambda t: t[4:], False),
    "one-row-shared": (lambda t: t[:5], lambda t: t[4:], True),
    "one-element": (lambda t: t[7, 7], lambda t: t, True),
    "neighbours": (lambda t: t[3, 3:4], lambda t: t[3, 4:5], False),
    "interleaved-rows": (lambda t: t[::2], lambda t: t[1::2], True),
    "interleaved-columns": (lambda t: t[:, ::2], lambda t: t[:, 1::2], True),
    "column-halves": (lambda t: t[:, :4], lambda t: t[:, 4:], True),
    "last-row-first-half": (lambda t: t[6:, :4], lambda t: t[7, 4:], False),
    "reversed": (lambda t: t[::-1], lambda t: t[3], True),
    "reversed-halves": (lambda t: t[3::-1], lambda t: t[:3:-1], False),
    "transposed": (lambda t: t.permute(1, 0), lambda t: t[2:3], True),
    "empty": (lambda t: t[4:4], lambda t: t, False),
    "empty-inside": (lambda t: t[4:][:0], lambda t: t, False),
    "empty-twice": (lambda t: t[4:][:0], lambda t: t[4:][:0], False),
    "reshaped": (lambda t: t.reshape(64)[10:20], lambda t: t.reshape(4, 16)[1:], True),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_mut_is_alone_on_its_span(session, raw, case):
    """Judged by byte spans: interleaved strides count as overlapping, disjoint slices do not."""
    base = session.zeros((8, 8))
    one, other, meets = (*(part(base) for part in PARTS[case][:2]), PARTS[case][2])
    for first, second, exclusive in (
        (raw.mut, raw.mut, True),
        (raw.mut, raw.ref, True),
        (raw.ref, raw.mut, True),
        (raw.ref, raw.ref, False),
    ):
        for a, b in ((one, other), (other, one)):
            held = first(a)
            if meets and exclusive:
                with pytest.raises(kina.InvalidLayoutError, match="release that one first") as caught:
                    second(b)
                assert caught.value.operation == second.__name__
            else:
                second(b).release()
            held.release()
            second(b).release()


def test_a_mut_is_of_one_storage_only(session, raw):
    """Other tensors may be borrowed while it lives."""
    one, other = session.zeros(8), session.zeros(8)
    held = [raw.mut(one), raw.mut(other), raw.mut(session.zeros(0)), raw.mut(session.zeros(()))]
    assert all(ref.alive and ref.writable for ref in held)


@pytest.mark.parametrize("view", ["broadcast", "read-only"])
def test_what_cannot_be_written_is_no_mut(session, raw, view):
    base = session.zeros((1, 8))
    tensor = base.broadcast_to(4, 8) if view == "broadcast" else base.as_readonly()
    with pytest.raises(kina.InvalidLayoutError, match="more than once" if view == "broadcast" else "read-only"):
        raw.mut(tensor)
    assert not raw.ref(tensor).writable
    held = raw.ref(tensor)
    with pytest.raises(kina.InvalidLayoutError):
        raw.mut(base)
    held.release()
    raw.mut(base)


def test_a_ref_tells_its_layout(session, raw):
    tensor = session.from_host(np.zeros((3, 4, 5), np.int16))[::2, :, 1:3]
    ref = raw.ref(tensor)
    mut = raw.mut(session.zeros(2, "f64"))
    assert (ref.shape, ref.strides, ref.dtype, ref.nbytes) == ((2, 4, 2), (40, 5, 1), kina.int16, 32)
    assert (mut.shape, mut.strides, mut.dtype, mut.nbytes) == ((2,), (1,), kina.float64, 16)
    assert type(ref) is kina.cuda.TensorRef
    assert type(mut) is kina.cuda.TensorMut
    assert isinstance(mut, kina.cuda.TensorRef)
    assert "TensorRef" in repr(ref)
    assert "dead" not in repr(ref)
    ref.release()
    assert "dead" in repr(ref)
    assert ref.shape == (2, 4, 2)  # the layout stays readable; nothing can be done with it


@pytest.mark.parametrize("value", [None, 1, np.zeros(3, np.float32), "t", b"", object])
def test_only_tensors_are_borrowed(raw, value):
    for borrow in (raw.ref, raw.mut):
        with pytest.raises(TypeError):
            borrow(value)


def test_only_tensors_of_this_runtime_are_borrowed(session, raw, host):
    other = kina.Runtime(0)
    with kina.session(other) as theirs:
        foreign = theirs.zeros(8)
    for borrow in (raw.ref, raw.mut):
        with pytest.raises(kina.ForeignRuntimeError, match="adopt"):
            borrow(foreign)
        with pytest.raises(kina.ForeignDeviceError, match="cpu"):
            borrow(host.zeros(8))
    adopted = session.adopt(foreign)
    assert raw.mut(adopted).alive
    other.close()


# Ending ---------------------------------------------------------------------------------------------------


def test_release_ends_one_early(session, raw):
    y = session.zeros(8)
    refs = [raw.ref(y) for _ in range(5)]
    for index in (2, 0, 4, 1):
        refs[index].release()
        refs[index].release()  # again is nothing
        assert not refs[index].alive
        with pytest.raises(kina.InvalidLayoutError):
            raw.mut(y)
    refs[3].release()
    mut = raw.mut(y)
    mut.release()
    raw.mut(y)


def test_a_dropped_ref_is_released(session, raw):
    y = session.zeros(8)
    mut = raw.mut(y)
    del mut
    mut = raw.mut(y)
    cycle = [mut]
    cycle.append(cycle)
    del mut, cycle
    gc.collect()
    raw.ref(y)


def test_a_ref_keeps_its_tensor(session, raw):
    """The memory is not handed out again while it is borrowed."""
    tensor = session.full(8, 5.0)
    ref = raw.ref(tensor)
    del tensor
    others = [session.zeros(8) for _ in range(10)]
    z = session.zeros(8)
    copy_function = raw.module(KERNELS).function("copy", "mut f32[], f32[], u32")
    copy_function.launch(kina.LaunchConfig.linear(8), z, ref, 8)
    assert (session.to_host(z) == 5).all()
    assert len(others) == 10


def test_refs_die_with_their_block(session):
    y = session.zeros(8)
    with session.raw("one") as raw:
        ref, mut, stream = raw.ref(session.zeros(8)), raw.mut(y), raw.stream
        assert stream.__cuda_stream__() == (0, raw.unsafe_stream_handle())
    with session.raw("two") as second:
        for dead in (ref, mut):
            assert not dead.alive
            dead.release()
            with pytest.raises(kina.SessionClosedError, match="the ref has ended"):
                second.unsafe_address(dead)
        with pytest.raises(kina.SessionClosedError, match="raw block has ended"):
            stream.__cuda_stream__()
        assert "dead" in repr(stream)
        second.mut(y)
    for use in (
        lambda: raw.ref(y),
        lambda: raw.mut(y),
        lambda: raw.unsafe_address(ref),
        raw.unsafe_stream_handle,
        lambda: raw.module(KERNELS),
        raw.__enter__,
    ):
        with pytest.raises(kina.SessionClosedError):
            use()


def test_refs_die_with_their_session(runtime):
    session = kina.session(runtime).__enter__()
    raw = session.raw("left open").__enter__()
    y = session.zeros(8)
    ref, stream = raw.mut(y), raw.stream
    session.close()
    assert not ref.alive
    ref.release()
    with pytest.raises(kina.SessionClosedError):
        raw.unsafe_address(ref)
    with pytest.raises(kina.SessionClosedError):
        raw.ref(y)
    with pytest.raises(kina.SessionClosedError):
        stream.__cuda_stream__()
    raw.__exit__(None, None, None)
    with kina.session(runtime) as again, again.raw("next") as block:
        block.mut(y)


def test_refs_die_on_an_exception(session):
    y = session.zeros(8)
    refs = []

    def fail() -> None:
        with session.raw("fails") as raw:
            refs.append(raw.mut(y))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not refs[0].alive
    with session.raw("next") as raw:
        raw.mut(y)


def test_refs_outlive_all_faces(runtime):
    with kina.session(runtime) as session, session.raw("short") as raw:
        ref = raw.mut(session.zeros(8))
    del session, raw
    gc.collect()
    ref.release()
    assert not ref.alive
    assert "dead" in repr(ref)


# Nesting --------------------------------------------------------------------------------------------------


def test_inner_blocks_see_outer_borrows(session, raw):
    y, x = session.zeros(8), session.zeros(8)
    mut = raw.mut(y)
    ref = raw.ref(x)
    with session.raw("inner") as inner:
        for borrow in (inner.ref, inner.mut):
            with pytest.raises(kina.InvalidLayoutError):
                borrow(y)
        inner.ref(x)
        with pytest.raises(kina.InvalidLayoutError):
            inner.mut(x)
        assert inner.unsafe_address(mut) == raw.unsafe_address(mut)
        mut.release()
        kept = inner.mut(y)
        with (
            kina.session(session.runtime) as same,
            same.raw("third") as third,
            pytest.raises(kina.InvalidLayoutError),
        ):
            third.ref(y)
        ref.release()
        inner.mut(x)
    assert not kept.alive
    raw.mut(y)


def test_an_outer_block_may_end_first(session):
    y, x = session.zeros(8), session.zeros(8)
    outer = session.raw("outer").__enter__()
    inner = session.raw("inner").__enter__()
    first, second = outer.mut(y), inner.mut(x)
    outer.__exit__(None, None, None)
    assert not first.alive
    assert second.alive
    inner.mut(y)
    with pytest.raises(kina.InvalidLayoutError):
        inner.ref(x)
    inner.__exit__(None, None, None)
    assert not second.alive


# Threads --------------------------------------------------------------------------------------------------


def test_another_thread_borrows_nothing(session, raw):
    y = session.zeros(8)
    ref = raw.ref(y)
    for use in (
        lambda: raw.ref(y),
        lambda: raw.mut(y),
        lambda: raw.unsafe_address(ref),
        raw.unsafe_stream_handle,
        lambda: session.raw("elsewhere"),
    ):
        with pytest.raises(kina.WrongThreadError):
            in_thread(use)
    assert ref.alive
    entered = session.raw("made here")
    with pytest.raises(kina.WrongThreadError):
        in_thread(entered.__enter__)
    with entered:
        pass
    in_thread(ref.release)
    assert not ref.alive
    raw.mut(y)


def test_a_ref_may_be_dropped_by_another_thread(session, raw):
    y = session.zeros(8)
    box = [raw.mut(y)]
    in_thread(box.clear)
    raw.mut(y)


# What cannot be had ---------------------------------------------------------------------------------------


def everything(session, raw) -> dict:
    module = raw.module(module_text(fill_entry()))
    return {
        "CudaSession": session,
        "RawSession": raw,
        "StreamRef": raw.stream,
        "TensorRef": raw.ref(session.zeros(4)),
        "TensorMut": raw.mut(session.zeros(4)),
        "Module": module,
        "Function": module.function("fill"),
        "Completion": session.completion(),
    }


NAMES = [
    "CudaSession",
    "RawSession",
    "StreamRef",
    "TensorRef",
    "TensorMut",
    "Module",
    "Function",
    "Completion",
]


@pytest.mark.parametrize("name", NAMES)
def test_authority_is_not_constructed_copied_or_pickled(session, raw, name):
    kind = getattr(kina.cuda, name)
    thing = everything(session, raw)[name]
    assert type(thing) is kind
    for attempt in (kind, lambda: kind(thing), lambda: kind.__new__(kind), lambda: object.__new__(kind)):
        with pytest.raises(TypeError):
            attempt()
    for attempt in (
        copy.copy,
        copy.deepcopy,
        *(lambda t, p=p: pickle.dumps(t, p) for p in range(pickle.HIGHEST_PROTOCOL + 1)),
    ):
        with pytest.raises(TypeError):
            attempt(thing)
    with pytest.raises(TypeError):
        copy.deepcopy([thing])
    with pytest.raises(TypeError):
        type("Sub", (kind,), {})()


def test_a_runtime_is_made_but_not_copied(runtime):
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(runtime)


@pytest.mark.parametrize("name", NAMES)
def test_authority_takes_no_attributes(session, raw, name):
    thing = everything(session, raw)[name]
    with pytest.raises(AttributeError):
        thing.attribute = 1
