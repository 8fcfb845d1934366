"""Arguments that are refused, each by its own error: nothing is enqueued, the session is as before."""

from __future__ import annotations

import fractions

import numpy as np
import pytest
from helpers.kernels import (
    KERNELS,
    module_text,
    nothing_enqueued,
    write_args_entry,
)

import kina

ONE = kina.LaunchConfig(1, 1)
SAXPY = "mut f32[], f32[], f32, u32"


@pytest.fixture
def raw(session):
    with session.raw("launch") as block:
        yield block


@pytest.fixture
def saxpy(raw):
    return raw.module(KERNELS).function("saxpy", SAXPY)


@pytest.fixture
def y(session):
    return session.zeros(8)


@pytest.fixture
def x(session):
    return session.full(8, 3.0)


def check_usable(session, function, y, x) -> None:
    """The same function launches, from a y that nothing has written."""
    assert not session.to_host(y).any()
    function.launch(kina.LaunchConfig.linear(8), y, x, 2.0, 8)
    assert (session.to_host(y) == 6).all()


# Numbers --------------------------------------------------------------------------------------------------

BOUNDS = {
    "u8": (0, 255),
    "u16": (0, 2**16 - 1),
    "u32": (0, 2**32 - 1),
    "u64": (0, 2**64 - 1),
    "i8": (-128, 127),
    "i16": (-(2**15), 2**15 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}
NO_NUMBER = [
    None, "1", b"\1", [1], (1,), {}, object(), 1 + 0j, np.complex64(1), np.array([1]), np.array([1.0, 2.0]),
    np.str_("1"), np.datetime64(1, "s"), kina.LaunchConfig(1, 1), int, kina.float32,
]  # fmt: skip
NO_INT = [
    *NO_NUMBER, True, False, 1.0, 0.0, float("nan"), np.float32(1), np.bool_(True), fractions.Fraction(2, 1),
    kina.f32(1), -(10**30), 10**30,
]  # fmt: skip
NO_FLOAT = [*NO_NUMBER, True, np.bool_(False), 10**400, -(10**400), kina.i32(1)]
NO_BOOL = [*NO_NUMBER, 0, 1, 2, 1.0, np.int8(1), np.float32(0), kina.u8(1)]
OTHER_KIND = {
    "f32": kina.f64, "f64": kina.f32, "f16": kina.bf16, "bf16": kina.f16, "i32": kina.u32, "u32": kina.i32,
    "i8": kina.u8, "i64": kina.i32,
}  # fmt: skip
KINDS = [*BOUNDS, "f16", "bf16", "f32", "f64", "bool"]


def refused_as(kind: str) -> list:
    typed = [OTHER_KIND[kind](1)] if kind in OTHER_KIND else []
    if kind == "bool":
        return NO_BOOL
    if kind not in BOUNDS:
        return NO_FLOAT + typed
    low, high = BOUNDS[kind]
    wide = [np.int64(low - 1), np.int64(high + 1)] if "64" not in kind else []
    return [low - 1, high + 1, *wide, *NO_INT, *typed]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_do_not_fit_the_declared_type(session, raw, kind):
    """Never truncated, never wrapped, never bytes reinterpreted."""
    name = f"write_args_{kind}"
    function = raw.module(module_text(write_args_entry(name, (kind,)))).function(name, f"mut u8[], {kind}")
    to = session.zeros(32, "u8")
    dtype = next(value for value in (getattr(kina, n) for n in (kind, f"{kind}_") if hasattr(kina, n)))
    with nothing_enqueued(session):
        for value in refused_as(kind):
            with pytest.raises(kina.ArgumentError, match=f"argument 1 of {name} is a scalar {dtype.name}") as caught:
                function.launch(ONE, to, value)
            assert isinstance(caught.value, (TypeError, ValueError))
            assert caught.value.operation == "launch"
        for tensor in (to, session.zeros((), "f32"), raw.ref(session.zeros(1)), raw.mut(session.zeros(1))):
            with pytest.raises(kina.ArgumentError, match="is a scalar"):
                function.launch(ONE, to, tensor)
    assert not session.to_host(to).any()
    good = {"bool": True}.get(kind, 1)
    function.launch(ONE, to, good)
    assert session.to_host(to).any()


@pytest.mark.parametrize("given", [0, 1, 2, 3, 5, 400])
def test_the_number_of_arguments(session, saxpy, y, x, given):
    arguments = ([y, x, 2.0, 8] * 100)[:given]
    with (
        nothing_enqueued(session),
        pytest.raises(kina.ArgumentError, match=rf"takes 4 argument\(s\), got {given}"),
    ):
        saxpy.launch(ONE, *arguments)
    check_usable(session, saxpy, y, x)


def test_no_keywords(saxpy, y, x):
    with pytest.raises(TypeError):
        saxpy.launch(ONE, y, x, a=2.0, n=8)
    with pytest.raises(TypeError):
        saxpy.launch()


# Tensors --------------------------------------------------------------------------------------------------

NO_TENSOR = [
    0,
    1,
    2.0,
    True,
    None,
    "y",
    b"12345678",
    np.float32(1),
    np.zeros(8, np.float32),
    [0.0] * 8,
    kina.u64(0),
    object(),
]


@pytest.mark.parametrize("value", NO_TENSOR, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_tensor(session, saxpy, y, x, value, place):
    """An address in an int is no tensor either, nor is host memory."""
    arguments = [y, x, 2.0, 8]
    arguments[place] = value
    with (
        nothing_enqueued(session),
        pytest.raises(kina.ArgumentError, match=f"argument {place} of saxpy is a tensor of float32, got"),
    ):
        saxpy.launch(ONE, *arguments)
    check_usable(session, saxpy, y, x)


@pytest.mark.parametrize("dtype", ["f64", "i32", "u32", "f16", "bool", "c64", "u8"])
@pytest.mark.parametrize("place", [0, 1])
def test_tensors_of_another_dtype(session, saxpy, y, x, dtype, place):
    arguments = [y, x, 2.0, 8]
    arguments[place] = session.zeros(8, dtype)
    with (
        nothing_enqueued(session),
        pytest.raises(kina.DTypeError, match=f"argument {place} .* declared float32, got {arguments[place].dtype}"),
    ):
        saxpy.launch(ONE, *arguments)
    check_usable(session, saxpy, y, x)


VIEWS = {
    "step": lambda t: t.reshape(4, 4)[:, ::2],
    "column": lambda t: t.reshape(4, 4)[:, 1],
    "transposed": lambda t: t.reshape(2, 8).permute(1, 0),
    "reversed": lambda t: t[::-1],
    "broadcast": lambda t: t[:1].broadcast_to(8),
    "broadcast-rows": lambda t: t[:4].broadcast_to(2, 4),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("place", [0, 1])
def test_views_that_are_not_compact(session, saxpy, y, x, view, place):
    """Nothing is materialised behind the caller's back."""
    base = session.zeros(16)
    arguments = [y, x, 2.0, 8]
    arguments[place] = VIEWS[view](base)
    before = session.counters().allocations
    with (
        nothing_enqueued(session),
        pytest.raises(kina.NonContiguousError, match=f"argument {place} .*strides"),
    ):
        saxpy.launch(ONE, *arguments)
    assert session.counters().allocations == before
    check_usable(session, saxpy, y, x)


def test_compact_views_are_taken(session, saxpy):
    """Extents of one have strides that no one uses; slices along the first axis stay compact."""
    base = session.zeros((4, 8))
    x = session.full((1, 8, 1), 3.0)
    for view in (base[1], base[2:3], base[3:, None]):
        saxpy.launch(kina.LaunchConfig.linear(8), view, x.permute(2, 1, 0), 2.0, 8)
    assert (session.to_host(base) == np.array([[0.0], [6], [6], [6]])).all()


def test_read_only_is_not_written(session, saxpy, y, x):
    locked = y.as_readonly()
    for arguments in ((locked, x), (locked[2:], x), (locked.reshape(2, 4), x)):
        with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match="read-only"):
            saxpy.launch(ONE, *arguments, 2.0, 2)
    saxpy.launch(kina.LaunchConfig.linear(8), session.zeros(8), locked, 2.0, 8)
    check_usable(session, saxpy, y, x)


def test_host_tensors_are_foreign(session, host, saxpy, y, x):
    for arguments in ((host.zeros(8), x), (y, host.zeros(8))):
        with nothing_enqueued(session), pytest.raises(kina.ForeignDeviceError, match="lives on cpu"):
            saxpy.launch(ONE, *arguments, 2.0, 8)
    check_usable(session, saxpy, y, x)


def test_tensors_of_another_runtime_are_foreign(session, raw, saxpy, y, x):
    untyped = raw.module(KERNELS).function("saxpy")
    other = kina.Runtime(0)
    with kina.session(other) as theirs, theirs.raw("other") as their_raw:
        foreign = theirs.zeros(8)
        mut, ref = their_raw.mut(foreign), their_raw.ref(theirs.zeros(8))
        for arguments in ((foreign, x), (y, foreign), (mut, x), (y, ref)):
            with nothing_enqueued(session), pytest.raises(kina.ForeignRuntimeError, match="another Runtime"):
                saxpy.launch(ONE, *arguments, 2.0, 8)
        with nothing_enqueued(session), pytest.raises(kina.ForeignRuntimeError):
            untyped.launch(ONE, mut, raw.ref(x), kina.f32(1), kina.u32(8))
    other.close()
    check_usable(session, saxpy, y, x)


@pytest.mark.multi_gpu
def test_tensors_of_another_device_are_foreign(session, saxpy, y, x):
    with kina.session(1) as theirs:
        foreign = theirs.zeros(8)
        for arguments in ((foreign, x), (y, foreign)):
            with nothing_enqueued(session), pytest.raises(kina.ForeignDeviceError, match="lives on cuda:1"):
                saxpy.launch(ONE, *arguments, 2.0, 8)
    check_usable(session, saxpy, y, x)


# Aliasing -------------------------------------------------------------------------------------------------

OVERLAPS = {
    "same": (slice(0, 8), slice(0, 8)),
    "first": (slice(0, 8), slice(0, 1)),
    "last": (slice(0, 8), slice(7, 16)),
    "inside": (slice(2, 4), slice(0, 8)),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_what_is_written_overlaps_nothing(session, raw, saxpy, case):
    base = session.zeros(16)
    one, other = (base[part] for part in OVERLAPS[case])
    two_muts = raw.module(KERNELS).function("saxpy", "mut f32[], mut f32[], f32, u32")
    backwards = raw.module(KERNELS).function("saxpy", "f32[], mut f32[], f32, u32")
    with nothing_enqueued(session):
        for function in (saxpy, two_muts, backwards):
            for arguments in ((one, other), (other, one)):
                with pytest.raises(kina.InvalidLayoutError, match="arguments 0 and 1 of saxpy overlap"):
                    function.launch(ONE, *arguments, 2.0, 1)
    readers = raw.module(KERNELS).function("saxpy", "f32[], f32[], f32, u32")
    readers.launch(ONE, one, other, 0.0, 1)  # to read twice is no conflict
    saxpy.launch(kina.LaunchConfig.linear(8), base[:8], base[8:], 2.0, 8)
    two_muts.launch(kina.LaunchConfig.linear(8), base[8:], base[:8], 2.0, 8)
    assert not session.to_host(base).any()


def test_empty_tensors_overlap_nothing(session, saxpy, x):
    """Nor do they need memory: a kernel told of zero elements touches nothing."""
    base = session.zeros(16)
    for empty in (session.empty(0), base[4:4], base[4:][:0], base[2:].reshape(2, 7)[:, :0]):
        saxpy.launch(ONE, base, empty, 2.0, 0)
        saxpy.launch(ONE, empty, base, 2.0, 0)
    assert not session.to_host(base).any()


def test_aliases_are_found_beyond_sixteen_arguments(session, raw):
    kinds = ("u64",) * 19
    entry = write_args_entry("write_args_many", kinds)
    function = raw.module(module_text(entry)).function("write_args_many", ", ".join(["mut u8[]"] + ["mut u8[]"] * 19))
    parts = [session.zeros(200, "u8") for _ in range(20)]
    for i, j in ((0, 19), (18, 19), (3, 17), (15, 16)):
        for borrow in (lambda part: part, raw.mut):
            arguments = list(parts)
            arguments[i] = arguments[j] = borrow(parts[i])
            overlap = pytest.raises(kina.InvalidLayoutError, match=f"arguments {i} and {j} ")
            with nothing_enqueued(session), overlap:
                function.launch(ONE, *arguments)
            del arguments  # and the mut with it
    function.launch(ONE, *parts)
    assert session.to_host(parts[0])[8:].any()


# Refs -----------------------------------------------------------------------------------------------------


def test_refs_are_taken_as_declared(session, raw, saxpy, y, x):
    mut, ref = raw.mut(y), raw.ref(x)
    saxpy.launch(kina.LaunchConfig.linear(8), mut, ref, 2.0, 8)
    saxpy.launch(kina.LaunchConfig.linear(8), mut, x, 2.0, 8)
    with nothing_enqueued(session):
        with pytest.raises(kina.ArgumentError, match="argument 0 of saxpy is written: pass a mut"):
            saxpy.launch(ONE, ref, session.zeros(8), 2.0, 8)
        with pytest.raises(kina.InvalidLayoutError, match="overlap"):
            saxpy.launch(ONE, mut, mut, 2.0, 8)
        with pytest.raises(kina.InvalidLayoutError, match="overlaps a mut"):  # the tensor is not its mut
            saxpy.launch(ONE, session.zeros(8), y, 2.0, 8)
        with pytest.raises(kina.InvalidLayoutError, match="overlaps a mut"):
            saxpy.launch(ONE, y[4:], x, 2.0, 4)
        with pytest.raises(kina.InvalidLayoutError, match="overlaps a ref"):
            saxpy.launch(ONE, x, session.zeros(8), 2.0, 8)
        ref.release()
        with pytest.raises(kina.SessionClosedError, match="argument 1 of saxpy is a ref that has ended"):
            saxpy.launch(ONE, mut, ref, 2.0, 8)
        mut.release()
        with pytest.raises(kina.SessionClosedError, match="argument 0 of saxpy is a ref that has ended"):
            saxpy.launch(ONE, mut, x, 2.0, 8)
    assert (session.to_host(y) == 12).all()


def test_a_mut_may_be_read(session, raw, saxpy, y, x):
    """A writable borrow gives reading too, as long as nothing else of the launch is written through it."""
    saxpy.launch(kina.LaunchConfig.linear(8), y, raw.mut(x), 2.0, 8)
    assert (session.to_host(y) == 6).all()


def test_a_ref_of_an_outer_block_serves_inside(session, raw, saxpy, y, x):
    mut = raw.mut(y)
    with session.raw("inner"):
        saxpy.launch(kina.LaunchConfig.linear(8), mut, x, 2.0, 8)
        with pytest.raises(kina.InvalidLayoutError, match="overlaps a mut"):
            saxpy.launch(ONE, y, x, 2.0, 8)
    assert (session.to_host(y) == 6).all()
