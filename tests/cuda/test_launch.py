"""Launches without a signature, and what holds around every launch: contexts, streams, leases, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cuda import ForeignStream, foreign_context, in_thread, on_stack, run_body, simulation, stalled, until
from helpers.kernels import KERNELS, fill_entry, module_text, nothing_enqueued, write_args_entry

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


# Without a signature --------------------------------------------------------------------------------------

UNTYPED = {
    "None": None,
    "int": 2,
    "float": 2.0,
    "bool": True,
    "complex": 1 + 2j,
    "str": "abcd",
    "list": [1],
    "bytearray": bytearray(8),
    "memoryview": memoryview(b"12345678"),
    "array": np.zeros(1, np.float32),
    "swapped": np.array(2.0, ">f4"),
    "swapped-8": np.array(2.0, ">f8"),
    "object": np.array(None, object),
    "dtype": kina.float32,
    "class": np.float32,
    "datetime": np.datetime64(1, "s"),
}


@pytest.mark.parametrize("value", UNTYPED)
@pytest.mark.parametrize("place", [1, 2])
def test_untyped_launches_take_no_plain_values(session, raw, saxpy, y, x, value, place):
    """Only what says by itself how many bytes it has, and in which order."""
    function = raw.module(module_text(write_args_entry("write_args_plain", ("u64", "f32")))).function(
        "write_args_plain"
    )
    arguments = [raw.mut(session.zeros(32, "u8")), kina.u64(1), kina.f32(2)]
    arguments[place] = UNTYPED[value]
    with (
        nothing_enqueued(session),
        pytest.raises(kina.ArgumentError, match=f"argument {place} of write_args_plain"),
    ):
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
    [
        *((0, value, given) for value, given in
          ((b"1234567", 7), (b"", 0), (b"123456789", 9), (kina.u32(0), 4), (np.float16(0), 2))),
        *((2, value, 8) for value in (b"12345678", kina.f64(2), np.float64(2), np.complex64(2))),
        *((3, value, given) for value, given in
          ((kina.u16(8), 2), (np.int64(8), 8), (kina.bool_(True), 1), (np.void(b"123"), 3))),
    ],
)  # fmt: skip
def test_untyped_sizes_are_exact(session, raw, y, x, place, value, given):
    function = raw.module(KERNELS).function("saxpy")
    arguments = [raw.mut(y), raw.ref(x), kina.f32(2), kina.u32(8)]
    arguments[place] = value
    wanted = (8, 8, 4, 4)[place]
    with nothing_enqueued(session):
        with pytest.raises(
            kina.ArgumentError, match=f"argument {place} of saxpy has {given} bytes, its parameter {wanted}"
        ):
            function.launch(ONE, *arguments)
        with pytest.raises(kina.ArgumentError, match="parameter 2 of saxpy takes 4 bytes, an address has 8"):
            function.launch(ONE, arguments[0] if place else raw.ref(x), raw.ref(x), raw.ref(x), kina.u32(8))


def test_untyped_launches_run(session, raw, y, x):
    function = raw.module(KERNELS).function("saxpy")
    mut, ref = raw.mut(y), raw.ref(x)
    address = raw.unsafe_address(ref).to_bytes(8, "little")
    for number, arguments in enumerate(
        [
            (mut, ref, kina.f32(2), kina.u32(8)),
            (mut, ref, np.float32(2), np.int32(8)),
            (mut, address, b"\0\0\0@", np.uint32(8)),
        ],
        1,
    ):
        function.launch(kina.LaunchConfig.linear(8), *arguments)
        assert (session.to_host(y) == 6 * number).all()
    nothing = raw.module(KERNELS).function("spin")
    nothing.launch(ONE, kina.u64(0))
    ref.release()
    with (
        nothing_enqueued(session),
        pytest.raises(kina.SessionClosedError, match="argument 1 of saxpy is a ref that has ended"),
    ):
        function.launch(ONE, mut, ref, kina.f32(2), kina.u32(8))


# Around a launch ------------------------------------------------------------------------------------------


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

    sim = simulation()
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
            calls = [call["name"] for call in sim.trace(since, event="call") if call["stream"] == stream]
            last = len(calls) - 1 - calls[::-1].index("cuLaunchKernel")
            sim.step(stream, last)  # everything before the last launch
            until(lambda: len(sim.trace(since, name="kernel")) >= 25)
            kept = session.from_host([1.0])  # leases a block of its own
            session.completion()  # makes a seal, and harvests those that are complete
            assert len(sim.trace(since, name="kernel")) == 25
            assert len(sim.trace(since, name="cuMemFreeAsync")) <= 25 * 20
        session.synchronize()
        assert session.to_host(kept) == 1.0
        until(lambda: len(sim.trace(since, name="cuMemFreeAsync")) >= 520)
        assert len(sim.trace(since, name="cuMemFreeAsync")) == 520
        assert sim.violations == 0


@pytest.mark.simulated
def test_what_a_launch_uses_outlives_it_wherever_a_segment_ends():
    """512 leases make a segment. A launch across the border is protected as a whole, by the later seal."""
    run_body(crossing_the_border)


def sealing_under_a_foreign_context() -> None:
    from helpers.kernels import borrowed, many_pointers

    sim = simulation()
    with foreign_context() as foreign, kina.session(0) as session, session.raw("foreign") as raw:
        function = many_pointers(raw)
        parts = borrowed(session, 40)
        with on_stack(foreign):
            for _ in range(60):
                function.launch(kina.LaunchConfig(1, 1), *parts[:20])
                function.launch(kina.LaunchConfig(1, 1), *parts[20:])
        assert session.counters().seals >= 1
        session.synchronize()
        assert sim is None or sim.violations == 0


def test_segments_end_in_the_right_context():
    """A launch may have to record an event: it does so in its own context, whatever is current."""
    run_body(sealing_under_a_foreign_context)


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
