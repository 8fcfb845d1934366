"""HostSession: scope, thread, and the whole surface it shares with a CUDA session."""

import array
import copy
import ctypes
import gc
import mmap
import pickle
import threading

import ml_dtypes
import numpy as np
import pytest

import kina
from kina._core.session import Session


def in_thread(call):
    """Run in another thread; its exception is ours."""
    outcome = []

    def run():
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


# Scope


def uses(session):
    """One call of each kind; all must check the session first."""
    with kina.session("cpu") as other:
        tensor = other.zeros(2)
    return [
        lambda: session.empty(3),
        lambda: session.zeros(3),
        lambda: session.full(3, 1),
        lambda: session.from_host([1]),
        lambda: session.to_host(tensor),
        lambda: session.copy(tensor),
        lambda: session.adopt(b"abc"),
        lambda: session.add(tensor, tensor),
        lambda: session.multiply(tensor, tensor),
        lambda: session.matmul(tensor, tensor),
        lambda: session.synchronize(),
        lambda: session.completion(),
        lambda: session.counters(),
        lambda: session.raw("saxpy"),
    ]


def test_a_closed_session():
    with kina.session("cpu") as session:
        pass
    for use in uses(session):
        with pytest.raises(kina.SessionClosedError, match="has ended"):
            use()
    with pytest.raises(kina.SessionClosedError), session:
        pass
    session.close()


def test_a_session_that_was_not_entered():
    session = kina.session("cpu")
    for use in uses(session):
        with pytest.raises(kina.SessionClosedError, match="has not been entered"):
            use()
    session.close()
    with pytest.raises(kina.SessionClosedError), session:
        pass


def test_another_thread(host):
    for use in uses(host):
        with pytest.raises(kina.WrongThreadError):
            in_thread(use)
    assert host.to_host(host.full(1, 5)).tolist() == [5]


def test_close_ends_it_inside_its_block():
    with kina.session("cpu") as session:
        session.close()
        session.close()
        with pytest.raises(kina.SessionClosedError):
            session.zeros(1)
    with pytest.raises(kina.SessionClosedError):
        session.zeros(1)


def test_exceptions_pass_through():
    with pytest.raises(LookupError, match="mine"), kina.session("cpu") as session:
        raise LookupError("mine")
    with pytest.raises(kina.SessionClosedError):
        session.zeros(1)


def test_nesting():
    with kina.session("cpu") as outer:
        with kina.session("cpu") as inner:
            tensor = inner.zeros(3)
            assert outer.to_host(tensor).tolist() == [0, 0, 0]
        with outer:
            outer.zeros(1)
        assert outer.to_host(outer.add(tensor, tensor)).tolist() == [0, 0, 0]
    with pytest.raises(kina.SessionClosedError):
        outer.zeros(1)


def test_leaving_in_another_thread_gives_it_up():
    session = kina.session("cpu").__enter__()
    with pytest.raises(kina.WrongThreadError, match="given up"):
        in_thread(session.close)
    with pytest.raises(kina.SessionClosedError):
        session.zeros(1)


def test_a_block_abandoned_in_a_generator_and_collected_elsewhere():
    def block():
        with kina.session("cpu") as session:
            yield session

    suspended = [block()]
    session = next(suspended[0])
    in_thread(lambda: suspended.pop().close())
    with pytest.raises(kina.SessionClosedError):
        session.zeros(1)


def test_sessions_abandoned_to_the_collector():
    for _ in range(100):
        session = kina.session("cpu")
        cycle = [session]
        cycle.append(cycle)
        del session, cycle
    gc.collect()


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_neither_copied_nor_pickled(host, attempt):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        attempt(host)


def test_it_cannot_be_made(host):
    kinds = [type(host), Session, type(host.completion()), type(host.device_info)]
    for kind in kinds:
        with pytest.raises(TypeError, match="cannot be constructed"):
            kind()
        with pytest.raises(TypeError):
            kind.__new__(kind)
    sub = type("Sub", (Session,), {})
    with pytest.raises(TypeError, match="cannot be constructed"):
        sub()


# What it is


def test_description(host):
    assert host.device_info.type == "cpu"
    assert host.device_info.name
    assert host.device_info is host.device_info
    assert repr(host) == "<kina.HostSession, open>"
    assert repr(kina.session("cpu")) == "<kina.HostSession, not entered>"


def test_the_host_is_one_runtime_and_one_domain(host):
    def identities():
        with kina.session("cpu") as session:
            return session.runtime_identity, session.allocation_domain, session.zeros(1)

    runtime, domain, tensor = in_thread(identities)
    assert runtime == host.runtime_identity == tensor.runtime_identity
    assert domain == host.allocation_domain == tensor.allocation_domain
    assert host.to_host(tensor).tolist() == [0]


@pytest.mark.parametrize("capability", list(kina.Capability), ids=lambda capability: capability.name)
def test_the_host_has_no_cuda_capability(host, capability):
    assert host.supports(capability) is False


def test_capabilities_are_asked_by_their_enum(host):
    from kina.session import Capability

    assert Capability is kina.Capability
    assert {each.name for each in Capability} == {
        *(
            "KERNEL_DSL",
            "NATIVE_MODULE",
            "RUNTIME_COMPILATION",
            "RAW_STREAM",
            "SAME_DEVICE_ASYNC_COPY",
            "PEER_COPY",
        ),
    }
    with pytest.raises(kina.ArgumentError):
        host.supports("RAW_STREAM")


def test_nothing_is_ever_pending(host):
    witness = host.completion()
    assert witness.done() is True
    assert witness.wait() is None
    assert host.synchronize() is None
    assert host.counters().host_waits == 0


def test_counters(host):
    before = host.counters()
    host.to_host(host.from_host(np.zeros(10, "f8"))[::2])
    host.zeros(3)
    after = host.counters()
    assert after.allocations - before.allocations == 2
    assert after.bytes_to_device - before.bytes_to_device == 80
    assert after.bytes_to_host - before.bytes_to_host == 40


def test_raw_needs_a_device(host):
    with pytest.raises(kina.UnsupportedError, match="host session") as raised:
        host.raw("saxpy")
    assert raised.value.operation == "saxpy"
    assert isinstance(raised.value, NotImplementedError)


# Making tensors


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (70_001,), (3, 5, 7)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("f32", 1.5),
        ("i8", -3),
        ("u64", 2**64 - 1),
        ("bool", True),
        ("c128", 1 - 2j),
        ("bf16", 3),
        ("f8_e5m2", 0.5),
    ],
)
def test_full(host, shape, dtype, value):
    tensor = host.full(shape, value, dtype)
    got = host.to_host(tensor)
    expected = np.full(shape, value, tensor.dtype.numpy)
    assert got.tobytes() == expected.tobytes()
    assert (got.shape, got.dtype, tensor.readonly) == (expected.shape, expected.dtype, False)
    assert host.to_host(host.zeros(shape, dtype)).tobytes() == bytes(expected.nbytes)


def test_float32_is_the_default(host):
    assert host.zeros(1).dtype is host.empty(1).dtype is host.full(1, 2).dtype is kina.float32


def test_memory_is_aligned_as_on_a_device(host):
    for size in (1, 3, 100):
        assert np.from_dlpack(host.empty(size, "u8")).__array_interface__["data"][0] % 256 == 0


@pytest.mark.parametrize("value", [256, -1, 1.0, True, "1", None])
def test_full_refuses_before_anything_happens(host, value):
    before = host.counters().allocations
    with pytest.raises(kina.ArgumentError):
        host.full(3, value, "u8")
    assert host.counters().allocations == before


def test_too_large(host):
    with pytest.raises(kina.OutOfMemoryError) as raised:
        host.empty(2**60, "u8")
    assert isinstance(raised.value, MemoryError)
    assert str(2**60) in str(raised.value)
    assert host.to_host(host.full(1, 1)).tolist() == [1]


@pytest.mark.parametrize(
    "source",
    [
        3,
        2.5,
        [1, 2],
        [[1.0], [2.0]],
        (True, False),
        np.float32(3),
        np.arange(6).reshape(2, 3).T,
        range(3),
        b"abc",
        array.array("i", [1, 2]),
        np.zeros((0, 3)),
        np.arange(4).astype(ml_dtypes.bfloat16),
        1j,
        np.ma.array([1, 2]),
    ],
    ids=lambda source: type(source).__name__,
)
def test_from_host_takes_what_numpy_takes(host, source):
    if isinstance(source, bytes):
        source = bytearray(source)
        source = np.frombuffer(source, "u1")
    expected = np.asarray(source)
    tensor = host.from_host(source)
    got = host.to_host(tensor)
    assert (got.dtype, got.shape, tensor.is_contiguous) == (expected.dtype, expected.shape, True)
    assert got.tobytes() == expected.tobytes()


def test_from_host_copies(host):
    source = np.arange(3.0)
    tensor = host.from_host(source)
    source[0] = 99
    assert host.to_host(tensor).tolist() == [0, 1, 2]
    got = host.to_host(tensor)
    got[1] = 99
    assert host.to_host(tensor).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["f16", kina.bfloat16, np.int8, np.dtype("c8"), "f8_e4m3fn"], ids=str)
def test_from_host_converts(host, dtype):
    tensor = host.from_host([1, 2, 3], dtype)
    assert host.to_host(tensor).astype("c8").tolist() == [1, 2, 3]
    assert host.from_host(np.arange(3), dtype=dtype).dtype is tensor.dtype


@pytest.mark.parametrize(
    ("source", "dtype", "kind"),
    [
        ([[1], [1, 2]], None, kina.ArgumentError),
        (["a"], "f32", kina.ArgumentError),
        (300, "u8", kina.ArgumentError),
        (object(), None, kina.DTypeError),
        ("text", None, kina.DTypeError),
        (np.array(["2020"], "M8[Y]"), None, kina.DTypeError),
        (np.arange(3, dtype=">i4"), None, kina.DTypeError),
        (np.zeros(2, [("a", "i4")]), None, kina.DTypeError),
        ([1], "nonsense", kina.DTypeError),
    ],
    ids=repr,
)
def test_from_host_refusals(host, source, dtype, kind):
    with pytest.raises(kind):
        host.from_host(source, dtype)


def test_from_host_takes_tensors_of_the_host(host):
    source = host.from_host(np.arange(6, dtype="f4").reshape(2, 3))
    made = host.from_host(source.permute(1, 0))
    assert made.is_contiguous
    host.add(source, source, out=source)
    assert host.to_host(made).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert host.from_host(host.full(2, 1, "bf16")).dtype is kina.bfloat16
    assert host.from_host(source, "f64").dtype is kina.float64


def test_what_it_is(host):
    assert (host.device, host.closed) == ("cpu", False)
    host.close()
    assert host.closed


def test_copy(host):
    source = host.from_host(np.arange(6.0).reshape(2, 3))
    made = host.copy(source.as_readonly())
    host.add(source, source, out=source)
    assert not made.readonly
    assert host.to_host(made).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert host.copy(source[1]).shape == (3,)
    assert host.copy(host.zeros((0, 3))[:, ::2]).shape == (0, 2)
    for view in (source[:, ::2], source.permute(1, 0), source[::-1], host.zeros(1).broadcast_to(3)):
        with pytest.raises(kina.NonContiguousError, match="compact"):
            host.copy(view)


@pytest.mark.parametrize("name", ["to_host", "copy"])
def test_only_tensors_are_tensors(host, name):
    with pytest.raises(kina.ArgumentError, match=r"ndarray; s\.from_host copies and s\.adopt shares"):
        getattr(host, name)(np.zeros(3))
    with pytest.raises(kina.ArgumentError):
        host.add(host.zeros(3), 1)
    with pytest.raises(kina.ArgumentError):
        host.add(host.zeros(3), host.zeros(3), out=np.zeros(3))


# Adoption of what is no DLPack producer


def test_arrays_are_shared(host):
    source = np.arange(12, dtype="i2").reshape(3, 4)[::-1, 1::2]
    tensor = host.adopt(source)
    source[0, 0] = -5
    assert host.to_host(tensor)[0, 0] == -5
    host.add(tensor, tensor, out=tensor)
    assert source[0, 0] == -10


def test_a_tensor_is_its_own(host):
    tensor = host.zeros(3)
    assert host.adopt(tensor) is tensor
    assert kina.from_dlpack(tensor) is tensor


def test_read_only_arrays_stay_so(host):
    source = np.arange(3.0)
    source.flags.writeable = False
    with pytest.raises(kina.InvalidLayoutError, match="read-only"):
        host.add(host.adopt(source), host.adopt(source), out=host.adopt(source))
    assert host.adopt(np.broadcast_to(1.0, 3)).readonly


def test_arrays_that_cannot_be_described(host):
    records = np.zeros(4, [("a", "i1"), ("b", "i4")])
    with pytest.raises(kina.InvalidLayoutError, match="axis 0 steps 5 bytes"):
        host.adopt(records["b"])
    assert host.adopt(records["b"][:1]).shape == (1,)
    for array_ in (
        np.zeros(3, ">f4"),
        np.array(["a"]),
        np.array([None]),
        np.zeros(2, ml_dtypes.int4),
        records,
    ):
        with pytest.raises(kina.DTypeError):
            host.adopt(array_)


@pytest.mark.parametrize(
    ("source", "dtype", "values", "readonly"),
    [
        (b"\x01\x02", "u8", [1, 2], True),
        (bytearray(b"\x01\x02"), "u8", [1, 2], False),
        (array.array("h", [-1, 2]), "i16", [-1, 2], False),
        (array.array("d", [0.5]), "f64", [0.5], False),
        (array.array("L", [2**63]), "u64", [2**63], False),
        ((ctypes.c_int32 * 2)(3, 4), "i32", [3, 4], False),
        ((ctypes.c_bool * 2)(True, False), "bool", [True, False], False),
        (((ctypes.c_float * 2) * 2)((1, 2), (3, 4)), "f32", [[1, 2], [3, 4]], False),
        (memoryview(b"abcdef")[::2], "u8", [97, 99, 101], True),
        (memoryview(np.arange(4)[::-1]), "i64", [3, 2, 1, 0], False),
        (memoryview(np.ones(2, "c8")), "c64", [1, 1], False),
        (np.float32(2.5), "f32", 2.5, True),
        (b"", "u8", [], True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_buffers(host, source, dtype, values, readonly):
    tensor = host.adopt(source)
    assert tensor.dtype is kina.empty(0, dtype).dtype
    assert tensor.readonly is readonly
    assert host.to_host(tensor).tolist() == values


@pytest.mark.parametrize(
    "source",
    [
        (ctypes.c_char * 2)(),
        memoryview(np.zeros(2, ">i4")),
        memoryview(b"ab").cast("c"),
        (ctypes.c_void_p * 2)(),
    ],
    ids=lambda source: type(source).__name__,
)
def test_buffers_of_other_things(host, source):
    with pytest.raises(kina.DTypeError, match="buffer format"):
        host.adopt(source)


def test_a_buffer_is_locked_while_it_is_adopted(host):
    source = bytearray(8)
    tensor = host.adopt(source)
    with pytest.raises(BufferError):
        source.append(1)
    del tensor
    source.append(1)
    with mmap.mmap(-1, 4096) as mapped:
        tensor = host.adopt(mapped)
        mapped[5] = 7
        assert host.to_host(tensor)[5] == 7
        del tensor
