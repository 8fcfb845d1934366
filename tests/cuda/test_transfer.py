"""Transfers, fills and copies: the right values, in the right order, through staging."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers.cuda import KERNELS, run_body, stalled, stalled_until_waited, stream_of

import kina

DTYPES = [
    "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
SMALL, LARGE = 64 << 10, 4 << 20  # the two sizes of staging blocks


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def octets(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def random_array(name, shape, seed=1):
    """Every bit pattern may occur: NaNs and infinities travel like anything else."""
    dtype = numpy_dtype(name)
    count = int(np.prod(shape, dtype=np.int64))
    noise = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return (noise & 1).astype(bool).reshape(shape) if name == "bool_" else noise.view(dtype).reshape(shape)


# Values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (0,), (3, 0, 2)])
def test_round_trip(session, name, shape):
    values = random_array(name, shape)
    tensor = session.from_host(values)
    assert (tensor.shape, tensor.dtype, tensor.device) == (shape, getattr(kina, name), "cuda:0")
    back = session.to_host(tensor)
    assert (back.shape, back.dtype) == (shape, values.dtype)
    assert np.array_equal(octets(back), octets(values))
    assert np.array_equal(octets(session.to_host(session.copy(tensor))), octets(values))


@pytest.mark.parametrize("block", [SMALL, LARGE])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_sizes_around_the_staging_blocks(session, block, offset, times):
    values = random_array("uint8", block * times + offset)
    before = session.counters()
    tensor = session.from_host(values)
    assert np.array_equal(session.to_host(tensor), values)
    after = session.counters()
    assert after.bytes_to_device - before.bytes_to_device == values.nbytes
    assert after.bytes_to_host - before.bytes_to_host == values.nbytes


def test_larger_than_the_ring(session):
    values = random_array("uint8", 100 * 2**20 + 13)
    assert np.array_equal(session.to_host(session.from_host(values)), values)


@pytest.mark.parametrize(
    "source",
    [
        lambda a: a[::-1],
        lambda a: a[1:, ::2],
        lambda a: a.T,
        lambda a: np.broadcast_to(a[0], a.shape),
        np.asfortranarray,
        lambda a: a.tolist(),
    ],
    ids=["reversed", "sliced", "transposed", "broadcast", "fortran", "list"],
)
def test_host_arrays_of_any_layout(session, source):
    given = source(np.arange(24, dtype=np.float32).reshape(4, 6))
    tensor = session.from_host(given)
    assert tensor.is_contiguous
    assert np.array_equal(session.to_host(tensor), np.asarray(given))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::-1],
        lambda t: t[1:3, ::2],
        lambda t: t[:, ::-2],
        lambda t: t.permute(1, 0) if hasattr(t, "permute") else t.T,
        lambda t: t[2],
        lambda t: t[1, 1],
        lambda t: t[1:1],
    ],
    ids=["reversed", "sliced", "negative", "permuted", "row", "element", "empty"],
)
def test_views_come_down_in_order(session, view):
    values = np.arange(24, dtype=np.int32).reshape(4, 6)
    assert np.array_equal(session.to_host(view(session.from_host(values))), view(values))


def test_a_broadcast_view_comes_down(session):
    tensor = session.from_host(np.arange(3, dtype=np.int16)).broadcast_to(4, 3)
    assert session.to_host(tensor).tolist() == [[0, 1, 2]] * 4
    huge = session.full((), 7, "uint8").broadcast_to(1000, 1000)
    assert np.array_equal(session.to_host(huge), np.full((1000, 1000), 7, np.uint8))


def test_a_dtype_is_converted_on_the_host(session):
    assert session.from_host([1, 2], "bfloat16").dtype is kina.bfloat16
    assert session.to_host(session.from_host([1.5, 2.5], "float16")).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("name", DTYPES)
def test_fills(session, name):
    zeros = session.to_host(session.zeros((3, 5), name))
    assert not octets(zeros).any()
    assert zeros.dtype == numpy_dtype(name)
    value = {"bool_": True, "complex64": 1.5 - 2j, "complex128": 1.5 - 2j}.get(name, 2)
    for shape in [(), (1,), (257,), (0,), (2, 0)]:
        expected = np.full(shape, value, numpy_dtype(name))
        assert np.array_equal(octets(session.to_host(session.full(shape, value, name))), octets(expected))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int8", -1), ("int16", 0x1234), ("uint32", 0x12345678), ("int64", 0x123456789ABCDEF0),
        ("uint64", 2**64 - 2), ("int64", 0x1234567812345678), ("int64", 0x0101010101010101),
        ("float64", 0.1), ("float64", -0.0), ("complex64", 0.1 + 0.2j), ("complex128", 0.1 + 0.2j),
        ("complex128", 0.1 + 0.1j), ("complex128", 0j),
    ],
)  # fmt: skip
def test_fills_with_a_pattern_of_every_width(session, name, value):
    guard = session.full(64, 1, "uint8")
    made = session.full(1001, value, name)
    assert np.array_equal(octets(session.to_host(made)), octets(np.full(1001, value, name)))
    assert session.to_host(guard).tolist() == [1] * 64


def test_values_that_a_dtype_cannot_hold(session):
    for value, name in [(300, "uint8"), (-1, "uint32"), (1.5, "int32"), ("x", "float32"), (1j, "float64")]:
        with pytest.raises(kina.ArgumentError):
            session.full(3, value, name)
    assert session.counters().allocations == 0


# Order and staging ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 100, SMALL // 4, SMALL // 4 + 1, 3 * LARGE // 4 + 5])
def test_the_source_may_be_overwritten_at_once(session, count):
    """A staging block stays leased until its own copy is done, on a stream that does not move."""
    sources = [np.full(count, float(i), np.float32) for i in range(4)]
    with stalled(session):
        tensors = []
        for source in sources:
            tensors.append(session.from_host(source))
            source[:] = -1
    for i, tensor in enumerate(tensors):
        assert np.array_equal(session.to_host(tensor), np.full(count, float(i), np.float32))


def test_staging_of_another_runtime_is_not_taken(session):
    """While one stream is held up, transfers of another neither wait for it nor use its blocks."""
    other = kina.Runtime(0)
    with stalled(session):
        held = [session.from_host(np.full(100, float(i), np.float32)) for i in range(10)]
        with kina.session(other) as second:
            for i in range(40):
                values = np.full(200, 1000.0 + i, np.float32)
                assert np.array_equal(second.to_host(second.from_host(values)), values)
    for i, tensor in enumerate(held):
        assert session.to_host(tensor).tolist() == [float(i)] * 100


@pytest.mark.simulated
def test_a_full_ring_waits_for_its_own_oldest_block(session):
    """16 blocks of a size exist per device; the 17th upload waits for the oldest seal, and says so."""
    for i in range(16):
        session.from_host(np.full(100, float(i), np.float32))
    session.synchronize()
    before = session.counters().host_waits
    with stalled_until_waited(stream_of(session), "cuEventSynchronize"):
        tensors = [session.from_host(np.full(100, float(i), np.float32)) for i in range(20)]
    assert 1 <= session.counters().host_waits - before <= 4
    assert [session.to_host(tensor)[0] for tensor in tensors] == [float(i) for i in range(20)]


@pytest.mark.simulated
def test_completed_transfers_of_an_idle_runtime_are_no_reason_to_wait(sim, session):
    """Nobody has looked at them since, and this Runtime's own stream stands still."""
    idle = kina.Runtime(0)
    with kina.session(idle) as first:
        for i in range(12):
            first.from_host([float(i)])
    assert first.closed
    sim.wait_idle()
    with stalled(session):
        held = [session.from_host(np.full(100, float(i), np.float32)) for i in range(10)]
    assert [session.to_host(tensor)[0] for tensor in held] == [float(i) for i in range(10)]


@pytest.mark.simulated
@pytest.mark.parametrize("count", [1, 3])
def test_a_ring_held_by_others_is_no_reason_to_wait(count):
    """Nor is what had to be taken beyond the ring: cuMemFreeHost would wait for the whole device."""

    def body(count):
        with kina.session(kina.Runtime(0)) as session:
            with stalled(session):
                held = [session.from_host(np.full(100, float(i), np.float32)) for i in range(16)]
                for _ in range(count):
                    with kina.session(kina.Runtime(0)) as second:
                        assert second.to_host(second.from_host([5.0])).tolist() == [5.0]
            assert [session.to_host(tensor)[0] for tensor in held] == [float(i) for i in range(16)]

    run_body(body, count, KINA_SIM_TIMEOUT_MS="5000")


def test_uploads_follow_earlier_work_and_precede_later(session):
    with session.raw() as raw:  # a load waits for the device
        add_one = raw.module(KERNELS).function("add_one", "mut f32[], u32")
    with stalled(session):
        tensor = session.full(1000, 1.0)
        copied = session.copy(tensor)
        del tensor  # freed behind the copy
        uploaded = session.from_host(np.full(1000, 2.0, np.float32))
        with session.raw():
            add_one.launch(kina.LaunchConfig.linear(1000), uploaded, 1000)
    assert np.array_equal(session.to_host(copied), np.full(1000, 1.0))
    assert np.array_equal(session.to_host(uploaded), np.full(1000, 3.0))


def test_waits_are_counted(session):
    tensor = session.from_host(range(10))
    assert session.counters().host_waits == 0
    session.to_host(tensor)
    counters = session.counters()
    assert counters.host_waits >= 1
    assert counters.synchronizations == 0
    session.to_host(session.empty(0))
    assert session.counters() == counters._replace(
        **{name: getattr(session.counters(), name) for name in ("allocations", "frees", "live_bytes")}
    )


# What is refused ------------------------------------------------------------------------------------------


def test_tensors_from_elsewhere(session):
    with kina.session("cpu") as host, kina.session(kina.Runtime(0)) as other:
        for call in (session.to_host, session.copy):
            with pytest.raises(kina.ForeignDeviceError, match="lives on cpu"):
                call(host.zeros(3))
            with pytest.raises(kina.ForeignRuntimeError):
                call(other.zeros(3))
        for call in (host.to_host, host.copy):
            with pytest.raises((kina.ForeignDeviceError, kina.ForeignRuntimeError)):
                call(session.zeros(3))
    for call in (session.to_host, session.copy):
        with pytest.raises(TypeError):
            call(np.zeros(3))
        with pytest.raises(TypeError):
            call(None)


@pytest.mark.parametrize("view", [lambda t: t[::-1], lambda t: t[:, ::2], lambda t: t.permute(1, 0)])
def test_a_copy_materialises_nothing(session, view):
    tensor = session.zeros((4, 6))
    with pytest.raises(kina.NonContiguousError):
        session.copy(view(tensor))
    assert session.counters().allocations == 1


@pytest.mark.parametrize("shape", [-1, (3, -1), (2**62, 4), (2**40, 2**40), (2**63,), 2**64, (1,) * 65, "x", 1.5])
def test_bad_shapes(session, shape):
    for call in (session.empty, session.zeros, lambda shape: session.full(shape, 1.0)):
        with pytest.raises((kina.InvalidShapeError, TypeError)):
            call(shape)
    assert session.counters().allocations == 0
    assert session.to_host(session.full(2, 1.0)).tolist() == [1.0, 1.0]


def test_bad_dtypes(session):
    for dtype in ("float31", "i4", object, None, "S3"):
        with pytest.raises((kina.DTypeError, TypeError)):
            session.empty(3, dtype)
    for array in (np.array(["x"]), np.array([object()]), np.zeros(2, "datetime64[s]"), np.zeros(2, ">f4")):
        with pytest.raises(kina.DTypeError):
            session.from_host(array)


@pytest.mark.parametrize("shape", [0, (0,), (3, 0), (0, 2**40)])
def test_nothing_is_allocated_or_copied_for_no_elements(session, shape):
    tensors = [
        session.empty(shape),
        session.zeros(shape),
        session.full(shape, 1.0),
        session.copy(session.empty(shape)),
    ]
    for tensor in tensors:
        assert session.to_host(tensor).size == 0
    counters = session.counters()
    assert counters.allocations == counters.bytes_to_host == counters.host_waits == 0
