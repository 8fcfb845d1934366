"""Launches: arguments that are refused, each by its own error, with nothing enqueued and the session as good as before."""

from __future__ import annotations

import fractions

import numpy as np
import pytest
from helpers.cuda import ForeignStream, in_thread, on_stack, run_body, simulation, stalled
from helpers.kernels import (
    KERNELS,
    borrowed,
    fill_entry,
    many_pointers,
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


# Numbers ------------------------------------------------------------------------------------------------------

BOUNDS = {"u8": (0, 255), "u16": (0, 2**16 - 1), "u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "i8": (-128, 127),
          "i16": (-(2**15), 2**15 - 1), "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}  # fmt: skip
NO_NUMBER = [None, "1", b"\1", [1], (1,), {}, object(), 1 + 0j, np.complex64(1), np.array([1]), np.array([1.0, 2.0]),
             np.str_("1"), np.datetime64(1, "s"), kina.LaunchConfig(1, 1), int, kina.float32]  # fmt: skip
NO_INT = [*NO_NUMBER, True, False, 1.0, 0.0, float("nan"), np.float32(1), np.bool_(True), fractions.Fraction(2, 1), kina.f32(1)]
NO_FLOAT = [*NO_NUMBER, True, np.bool_(False), 10**400, -(10**400), kina.i32(1)]
NO_BOOL = [*NO_NUMBER, 0, 1, 2, 1.0, np.int8(1), np.float32(0), kina.u8(1)]
REFUSED = [
    *((kind, value) for kind, (low, high) in BOUNDS.items() for value in
      (low - 1, high + 1, -(10**30), 10**30, *((np.int64(low - 1), np.int64(high + 1)) if "64" not in kind else ()))),
    *((kind, value) for kind in BOUNDS for value in NO_INT),
    *((kind, value) for kind in ("f16", "bf16", "f32", "f64") for value in NO_FLOAT),
    ("f32", kina.f64(1)), ("f64", kina.f32(1)), ("f16", kina.bf16(1)), ("bf16", kina.f16(1)),
    ("i32", kina.u32(1)), ("u32", kina.i32(1)), ("i8", kina.u8(1)), ("i64", kina.i32(1)), ("u8", kina.bool_(True)),
    *(("bool", value) for value in NO_BOOL),
]  # fmt: skip
KINDS = [*BOUNDS, "f16", "bf16", "f32", "f64", "bool"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_do_not_fit_the_declared_type(session, raw, kind):
    """Never truncated, never wrapped, never bytes reinterpreted."""
    name = f"write_args_{kind}"
    function = raw.module(module_text(write_args_entry(name, (kind,)))).function(name, f"mut u8[], {kind}")
    to = session.zeros(32, "u8")
    dtype = next(value for value in (getattr(kina, n) for n in (kind, f"{kind}_") if hasattr(kina, n)))
    with nothing_enqueued(session):
        for value in [v for k, v in REFUSED if k == kind]:
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
    with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match=rf"takes 4 argument\(s\), got {given}"):
        saxpy.launch(ONE, *arguments)
    check_usable(session, saxpy, y, x)


def test_no_keywords(saxpy, y, x):
    with pytest.raises(TypeError):
        saxpy.launch(ONE, y, x, a=2.0, n=8)
    with pytest.raises(TypeError):
        saxpy.launch()


# Tensors ------------------------------------------------------------------------------------------------------

NO_TENSOR = [0, 1, 2.0, True, None, "y", b"12345678", np.float32(1), np.zeros(8, np.float32), [0.0] * 8, kina.u64(0), object()]


@pytest.mark.parametrize("value", NO_TENSOR, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_tensor(session, saxpy, y, x, value, place):
    """An address in an int is no tensor either, nor is host memory."""
    arguments = [y, x, 2.0, 8]
    arguments[place] = value
    with nothing_enqueued(session):
        with pytest.raises(kina.ArgumentError, match=f"argument {place} of saxpy is a tensor of float32, got"):
            saxpy.launch(ONE, *arguments)
    check_usable(session, saxpy, y, x)


@pytest.mark.parametrize("dtype", ["f64", "i32", "u32", "f16", "bool", "c64", "u8"])
@pytest.mark.parametrize("place", [0, 1])
def test_tensors_of_another_dtype(session, saxpy, y, x, dtype, place):
    arguments = [y, x, 2.0, 8]
    arguments[place] = session.zeros(8, dtype)
    with nothing_enqueued(session):
        with pytest.raises(kina.DTypeError, match=f"argument {place} .* declared float32, got {arguments[place].dtype}"):
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
    with nothing_enqueued(session), pytest.raises(kina.NonContiguousError, match=f"argument {place} .*strides"):
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


# Aliasing -----------------------------------------------------------------------------------------------------

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
            with nothing_enqueued(session):
                with pytest.raises(kina.InvalidLayoutError, match=f"arguments {i} and {j} "):
                    function.launch(ONE, *arguments)
            del arguments  # and the mut with it
    function.launch(ONE, *parts)
    assert session.to_host(parts[0])[8:].any()


# Refs ---------------------------------------------------------------------------------------------------------


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


# Without a signature ------------------------------------------------------------------------------------------

UNTYPED = {
    "None": None, "int": 2, "float": 2.0, "bool": True, "complex": 1 + 2j, "str": "abcd", "list": [1], "bytearray": bytearray(8),
    "memoryview": memoryview(b"12345678"), "array": np.zeros(1, np.float32), "swapped": np.array(2.0, ">f4"),
    "swapped-8": np.array(2.0, ">f8"), "object": np.array(None, object), "dtype": kina.float32, "class": np.float32,
    "datetime": np.datetime64(1, "s"),
}  # fmt: skip


@pytest.mark.parametrize("value", UNTYPED)
@pytest.mark.parametrize("place", [1, 2])
def test_untyped_launches_take_no_plain_values(session, raw, saxpy, y, x, value, place):
    """Only what says by itself how many bytes it has, and in which order."""
    function = raw.module(module_text(write_args_entry("write_args_plain", ("u64", "f32")))).function("write_args_plain")
    arguments = [raw.mut(session.zeros(32, "u8")), kina.u64(1), kina.f32(2)]
    arguments[place] = UNTYPED[value]
    with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match=f"argument {place} of write_args_plain"):
        function.launch(ONE, *arguments)
    check_usable(session, saxpy, y, x)


def test_untyped_launches_take_no_tensor(session, raw, y, x):
    """Whether it is read or written is not known; a ref or a mut says it."""
    function = raw.module(KERNELS).function("saxpy")
    for arguments in ((y, raw.ref(x)), (raw.ref(y), x)):
        with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match="not Tensor"):
            function.launch(ONE, *arguments, kina.f32(2), kina.u32(8))


@pytest.mark.parametrize(
    ("place", "value", "given"),
    [(0, b"1234567", 7), (0, b"", 0), (0, b"123456789", 9), (0, kina.u32(0), 4), (0, np.float16(0), 2), (2, b"12345678", 8),
     (2, kina.f64(2), 8), (2, np.float64(2), 8), (2, np.complex64(2), 8), (3, kina.u16(8), 2), (3, np.int64(8), 8),
     (3, kina.bool_(True), 1), (3, np.void(b"123"), 3)],
)  # fmt: skip
def test_untyped_sizes_are_exact(session, raw, y, x, place, value, given):
    function = raw.module(KERNELS).function("saxpy")
    arguments = [raw.mut(y), raw.ref(x), kina.f32(2), kina.u32(8)]
    arguments[place] = value
    wanted = (8, 8, 4, 4)[place]
    with nothing_enqueued(session):
        with pytest.raises(kina.ArgumentError, match=f"argument {place} of saxpy has {given} bytes, its parameter {wanted}"):
            function.launch(ONE, *arguments)
        with pytest.raises(kina.ArgumentError, match="parameter 2 of saxpy takes 4 bytes, an address has 8"):
            function.launch(ONE, arguments[0] if place else raw.ref(x), raw.ref(x), raw.ref(x), kina.u32(8))


def test_untyped_launches_run(session, raw, y, x):
    function = raw.module(KERNELS).function("saxpy")
    mut, ref = raw.mut(y), raw.ref(x)
    address = raw.unsafe_address(ref).to_bytes(8, "little")
    for number, arguments in enumerate(
        [(mut, ref, kina.f32(2), kina.u32(8)), (mut, ref, np.float32(2), np.int32(8)), (mut, address, b"\0\0\0@", np.uint32(8))], 1
    ):
        function.launch(kina.LaunchConfig.linear(8), *arguments)
        assert (session.to_host(y) == 6 * number).all()
    nothing = raw.module(KERNELS).function("spin")
    nothing.launch(ONE, kina.u64(0))
    ref.release()
    with nothing_enqueued(session), pytest.raises(kina.SessionClosedError, match="argument 1 of saxpy is a ref that has ended"):
        function.launch(ONE, mut, ref, kina.f32(2), kina.u32(8))


# Around a launch ----------------------------------------------------------------------------------------------


def test_a_launch_runs_in_its_own_context(session, raw, saxpy, y, x, foreign):
    """Whatever another library made current inside the block; and it stays current."""
    with on_stack(foreign):
        saxpy.launch(kina.LaunchConfig.linear(8), y, x, 2.0, 8)
    with on_stack():
        saxpy.launch(kina.LaunchConfig.linear(8), y, x, 2.0, 8)
    assert (session.to_host(y) == 12).all()


@pytest.mark.simulated
@pytest.mark.parametrize("result", [1, 2, 701, 999])
def test_a_launch_that_the_driver_refuses(session, raw, saxpy, sim, y, x, result):
    before = session.counters().launches
    with sim.failing("cuLaunchKernel", result=result), pytest.raises(kina.KinaError, match="saxpy") as caught:
        saxpy.launch(ONE, y, x, 2.0, 8)
    assert isinstance(caught.value, kina.OutOfMemoryError if result == 2 else kina.LaunchError)
    assert caught.value.driver_error is not None
    assert session.counters().launches == before
    check_usable(session, saxpy, y, x)


def test_a_kernel_without_parameters(session, raw, sim):
    """No parameter buffer at all is passed."""
    function = raw.module(module_text(".visible .entry spin_none() { ret; }")).function("spin_none", "")
    assert function.parameters == ()
    if simulation() is None:
        function.launch(ONE)
        session.synchronize()
    with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match=r"takes 0 argument\(s\), got 1"):
        function.launch(ONE, 1)


def crossing_the_border() -> None:
    """Run in its own process: where memory goes too early, the device dies of it."""
    from helpers.kernels import borrowed, many_pointers

    with kina.session(0) as session, session.raw("border") as raw:
        function = many_pointers(raw)
        parts = borrowed(session, 520)
        session.synchronize()
        stream = raw.unsafe_stream_handle()
        since = sim.position
        with stalled(session):
            for i in range(26):
                function.launch(kina.LaunchConfig(1, 1), *parts[20 * i : 20 * i + 20])
            del parts
            enqueued = [record["name"] for record in sim.trace(since, event="call") if record["stream"] == stream]
            sim.step(stream, len(enqueued) - 1 - enqueued[::-1].index("cuLaunchKernel"))  # all before the last launch
            while len(sim.trace(since, name="kernel")) < 25:
                pass
            session.completion()  # makes a seal, and harvests those that are complete
            assert len(sim.trace(since, name="kernel")) == 25
            assert len(sim.trace(since, name="cuMemFreeAsync")) <= 25 * 20
        session.synchronize()
        assert len(sim.trace(since, name="cuMemFreeAsync")) == 520
        assert sim.violations == 0


@pytest.mark.simulated
def test_what_a_launch_uses_outlives_it_wherever_a_segment_ends():
    """512 leases make a segment. A launch that crosses the border is protected as a whole by the later seal."""
    run_body(crossing_the_border)


def test_segments_end_in_the_right_context(session, raw, foreign):
    """A launch may have to record an event: it does so in its own context."""
    function = many_pointers(raw)
    parts = borrowed(session, 40)
    with on_stack(foreign):
        for _ in range(60):
            function.launch(ONE, *parts[:20])
            function.launch(ONE, *parts[20:])
    assert session.counters().seals >= 1
    session.synchronize()


def test_a_launch_on_an_adopted_stream(session, y):
    """The Runtime of somebody else's stream launches there."""
    stream = ForeignStream()
    with kina.session(0, stream=stream) as adopted, adopted.raw("adopted") as raw:
        assert raw.unsafe_stream_handle() == stream.handle
        z = adopted.zeros(8)
        raw.module(module_text(fill_entry())).function("fill", "mut f32[], f32, u32").launch(
            kina.LaunchConfig.linear(8), z, 2.0, 8
        )
        stream.synchronize()
        assert (adopted.to_host(z) == 2).all()


def test_a_launch_from_another_thread(session, saxpy, y, x):
    with nothing_enqueued(session), pytest.raises(kina.WrongThreadError):
        in_thread(lambda: saxpy.launch(ONE, y, x, 2.0, 8))
    check_usable(session, saxpy, y, x)
