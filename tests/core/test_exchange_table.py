"""DLPack's C exchange table: what kina offers, and what it makes of the tables of others."""

import ctypes
import gc
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.exchange import (
    CAPSULE,
    FROM_OBJECT,
    ExchangeAPI,
    Table,
    allocate,
    borrow,
    capsule_of,
    delete,
    export,
    make_object,
    table_of,
    work_stream,
)
from helpers.managed import (
    CPU,
    CUDA,
    CUDA_HOST,
    IS_COPIED,
    MANAGED,
    READ_ONLY,
    DLManagedTensorVersioned,
    DLTensor,
    Producer,
)
from helpers.processes import run_python

import kina

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def host():
    with kina.session("cpu") as session:
        yield session


def address(array):
    return array.__array_interface__["data"][0]


def values(managed):
    """Of a managed tensor of float32, compact."""
    tensor = managed.dl_tensor
    shape = tensor.shape[: tensor.ndim]
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(tensor.data)).reshape(shape)


# What kina offers


def test_the_table_says_what_it_is():
    kina.zeros(1)
    table = table_of(kina.Tensor)
    assert (table.major, table.minor, table.prev_api) == (1, 3, None)
    for name, _ in ExchangeAPI._fields_[3:]:
        assert getattr(table, name), name


def test_an_export_shares_the_memory_and_outlives_the_tensor(host):
    array = np.arange(6, dtype="f4").reshape(2, 3)
    tensor = host.from_host(array)
    managed = export(tensor[:, ::2])
    assert managed.flags == 0
    assert (managed.major, managed.minor) == (1, 3)
    assert managed.dl_tensor.shape[:2] == [2, 2]
    assert managed.dl_tensor.strides[:2] == [3, 2]
    assert managed.dl_tensor.data == borrow(tensor).data
    del tensor
    gc.collect()
    assert (ctypes.c_float * 6).from_address(managed.dl_tensor.data)[:] == array.ravel().tolist()
    delete(managed)


@pytest.mark.parametrize("make", [lambda t: t.as_readonly(), lambda t: t.broadcast_to(2, 3)])
def test_what_may_not_be_written_is_marked_or_not_lent(host, make):
    tensor = make(host.zeros(3))
    managed = export(tensor)
    assert managed.flags == READ_ONLY
    delete(managed)
    with pytest.raises(kina.DLPackError, match="read-only"):
        borrow(tensor)


def test_a_borrowed_tensor_is_the_tensor_itself(host):
    tensor = host.from_host(np.arange(24, dtype="i2").reshape(2, 3, 4))[1, ::-1, 1:]
    lent = borrow(tensor)
    assert lent.shape[: lent.ndim] == list(tensor.shape)
    assert lent.strides[: lent.ndim] == list(tensor.strides)
    assert (lent.device.device_type, lent.byte_offset) == (CPU, 0)
    assert (lent.dtype.code, lent.dtype.bits, lent.dtype.lanes) == (0, 16, 1)
    assert ctypes.c_int16.from_address(lent.data).value == host.to_host(tensor)[0, 0]


def test_empty_tensors_have_no_data(host):
    managed = export(host.zeros((3, 0)))
    assert managed.dl_tensor.data is None
    assert managed.dl_tensor.shape[:2] == [3, 0]
    delete(managed)


def test_the_table_takes_tensors_only():
    with pytest.raises(TypeError, match="not int"):
        table_of(kina.Tensor).managed_tensor_from_py_object_no_sync(3, ctypes.c_void_p())
    with pytest.raises(TypeError, match="not str"):
        table_of(kina.Tensor).dltensor_from_py_object_no_sync("x", DLTensor())


def test_a_managed_tensor_becomes_a_tensor():
    producer = Producer((2, 3), byte_offset=8, flags=READ_ONLY)
    made = make_object(kina.Tensor, producer.managed)
    assert type(made) is kina.Tensor
    assert (made.shape, made.readonly, made.device) == ((2, 3), True, "cpu")
    assert borrow_address(made) == producer.first
    assert producer.deleted == 0
    del made
    assert producer.deleted == 1


def borrow_address(tensor):
    managed = export(tensor)
    data = managed.dl_tensor.data
    delete(managed)
    return data


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": (2, 0)}, "version: 2.0"),
        ({"data": None}, "data: NULL"),
        ({"shape": (-1,)}, "shape"),
        ({"dtype": (2, 32, 4)}, "lanes=4"),
        ({"dtype": (0, 4, 1)}, "int4"),
        ({"device": (7, 0)}, "device type 7"),
        ({"flags": IS_COPIED}, "flags"),
    ],
)
def test_what_is_handed_over_is_taken_over_when_it_is_refused_too(fields, words):
    producer = Producer(**fields)
    with pytest.raises((kina.DLPackError, kina.DTypeError), match=words):
        make_object(kina.Tensor, producer.managed)
    assert producer.deleted == 1


def test_a_managed_tensor_of_nothing():
    with pytest.raises(kina.DLPackError, match="NULL"):
        make_object(kina.Tensor, None)


def prototype(shape, dtype=(2, 32, 1), device=(CPU, 0)):
    tensor = DLTensor()
    tensor.ndim = len(shape)
    tensor.kept = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    tensor.shape = tensor.kept
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = dtype
    tensor.device.device_type, tensor.device.device_id = device
    return tensor


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
@pytest.mark.parametrize("in_session", [True, False])
def test_the_allocator_makes_what_the_prototype_says(shape, in_session):
    if in_session:
        with kina.session("cpu"):
            made, told = allocate(kina.Tensor, prototype(shape))
    else:
        made, told = allocate(kina.Tensor, prototype(shape))
    assert told == []
    assert made.dl_tensor.shape[: len(shape)] == list(shape)
    if 0 not in shape:
        values(made)[...] = 7
        assert values(made).sum() == 7 * np.prod(shape)
    delete(made)


def test_the_allocator_needs_no_gil(host):
    # A CFUNCTYPE gives it up around the call; another thread has no state of Python's at all until then.
    made = []
    thread = threading.Thread(target=lambda: made.append(allocate(kina.Tensor, prototype((4,)))))
    thread.start()
    thread.join()
    ((managed, told),) = made
    assert told == []
    delete(managed)


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [
        (prototype((2,), dtype=(0, 4, 1)), b"TypeError", b"int4"),
        (prototype((2,), device=(7, 0)), b"BufferError", b"device type 7"),
        (prototype((-2,)), b"ValueError", b"shape"),
        (prototype((1 << 62, 1 << 62)), b"ValueError", b"shape"),
        (prototype((1 << 60,)), b"MemoryError", b""),
        (None, b"BufferError", b"prototype"),
    ],
)
def test_the_allocator_tells_what_is_wrong_and_raises_nothing(host, wanted, kind, words):
    made, told = allocate(kina.Tensor, wanted)
    assert made is None
    ((name, message),) = told
    assert name == kind
    assert words in message


def test_streams_of_the_host_and_of_devices_that_are_not_ours():
    assert work_stream(kina.Tensor, (CPU, 0)) is None
    assert work_stream(kina.Tensor, (CUDA_HOST, 0)) is None
    with pytest.raises(kina.DLPackError, match="device type 7"):
        work_stream(kina.Tensor, (7, 0))


def test_without_a_session_the_stream_is_the_legacy_one():
    found = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        import kina
        from helpers.exchange import work_stream
        kina.zeros(1)
        print(work_stream(kina.Tensor, (2, 0)), work_stream(kina.Tensor, (13, 3)))
        """
    )
    assert found.split() == ["1", "1"]


# What others offer


@pytest.mark.parametrize("spelling", ["__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"])
@pytest.mark.parametrize("as_int", [True, False])
@pytest.mark.parametrize("way", ["adopt", "from_dlpack", "momentary"])
def test_both_spellings_as_a_capsule_and_as_an_int(spelling, as_int, way):
    table = Table(spelling=spelling, as_int=as_int)
    producer = table.Array((2, 3), flags=READ_ONLY)
    if way == "momentary":
        tensor = kina.from_dlpack(producer)
    else:
        with kina.session("cpu") as session:
            tensor = session.adopt(producer) if way == "adopt" else kina.from_dlpack(producer)
    assert (tensor.shape, tensor.readonly) == ((2, 3), True)
    assert borrow_address(tensor) == producer.first
    assert table.asked_for_stream == 0  # the host has none
    assert producer.deleted == 0
    del tensor
    assert producer.deleted == 1


def test_an_older_table_in_the_chain_serves(host):
    table = Table(stream=None)
    newer = ExchangeAPI(major=2, minor=0, prev_api=ctypes.addressof(table.api))
    kind = type("Array", (Producer,), {"__dlpack__": None, "__dlpack_c_exchange_api__": capsule_of(newer)})
    assert host.adopt(kind()).shape == (4,)


def test_a_table_of_another_major_version_leaves_the_capsule(host):
    newer = ExchangeAPI(major=2, minor=0)
    kind = type("Array", (Producer,), {"__dlpack_c_exchange_api__": capsule_of(newer)})
    producer = kind()
    tensor = host.adopt(producer)
    assert producer.deleted == 0
    del tensor
    assert producer.deleted == 1


@pytest.mark.parametrize(
    "offered",
    ["a string", 0, -1, 1 << 64, 2.0, True, capsule_of(ExchangeAPI(major=1, minor=3), ctypes.c_char_p(b"other"))],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_table_is_refused_by_name(host, offered):
    kind = type("Array", (Producer,), {"__dlpack_c_exchange_api__": offered})
    with pytest.raises(kina.DLPackError, match="__dlpack_c_exchange_api__ of Array"):
        host.adopt(kind())


@pytest.mark.parametrize("missing", ["managed_tensor_from_py_object_no_sync", "current_work_stream"])
def test_a_table_with_a_hole_is_refused(host, missing):
    with pytest.raises(kina.DLPackError, match="lacks a function"):
        host.adopt(Table(without=missing).Array())


def test_a_table_that_does_not_lend_serves(host):
    assert host.adopt(Table(without="dltensor_from_py_object_no_sync").Array()).shape == (4,)


def test_the_refusal_of_a_producer_is_passed_on(host):
    producer = Table(refuses=True).Array()
    with pytest.raises(kina.DLPackError, match=r"refuses: .*no len\(\)") as raised:
        host.adopt(producer)
    assert type(raised.value.__cause__) is TypeError
    assert producer.deleted == 0
    assert host.zeros(1).shape == (1,)


@pytest.mark.parametrize(
    ("attributes", "cure"),
    [
        ({"requires_grad": True}, "detach"),
        ({"requires_grad": property(lambda self: True)}, "detach"),
        ({"is_neg": lambda self: True}, "resolve_neg"),
    ],
)
def test_tensors_that_are_not_what_their_memory_holds(host, attributes, cure):
    producer = Table(**attributes).Array()
    with pytest.raises(kina.DLPackError, match=rf"\.{cure}\(\)"):
        host.adopt(producer)
    assert producer.deleted == 1  # the table had given it already


def test_only_what_can_be_true_of_a_dtype_is_asked(host):
    never = Table(requires_grad=True, is_conj=lambda self: True).Array
    assert host.adopt(never(dtype=(0, 32, 1))).dtype is kina.int32  # no integer has a gradient or a conjugate
    with pytest.raises(kina.DLPackError, match="resolve_conj"):
        host.adopt(Table(is_conj=lambda self: True).Array(dtype=(5, 64, 1)))


def test_what_a_type_gains_and_loses_is_seen(host):
    table = Table()
    kind = type("Late", (Producer,), {})
    capsules, tables = [kind() for _ in range(3)], [kind() for _ in range(3)]
    for producer in capsules:
        assert host.adopt(producer).shape == (4,)
    kind.__dlpack_c_exchange_api__ = capsule_of(table.api)
    kind.__dlpack__ = None
    for producer in tables:
        assert host.adopt(producer).shape == (4,)
    kind.requires_grad = True
    with pytest.raises(kina.DLPackError, match="detach"):
        host.adopt(kind())
    del kind.requires_grad, kind.__dlpack_c_exchange_api__, kind.__dlpack__
    assert host.adopt(kind()).shape == (4,)


def test_many_types_come_and_go(host):
    for i in range(500):
        table = Table()
        producer = table.Array((i % 5 + 1,))
        assert host.adopt(producer).shape == (i % 5 + 1,)
        assert producer.deleted == 1


@pytest.mark.parametrize("device", [(CUDA, 0), (MANAGED, 0), (7, 0)])
def test_a_host_session_takes_memory_of_the_host(host, device):
    producer = Table().Array(device=device)
    with pytest.raises(kina.DLPackError, match="device"):
        host.adopt(producer)
    assert producer.deleted == 1


def test_pinned_memory_is_host_memory(host):
    assert host.adopt(Table().Array(device=(CUDA_HOST, 0))).device == "cpu"


def test_an_array_without_a_tensor(host):
    table = Table()
    table._export = None
    kind = table.Array
    empty = type(table.api.managed_tensor_from_py_object_no_sync)(lambda producer, out: 0)
    table.api.managed_tensor_from_py_object_no_sync = empty
    with pytest.raises(kina.DLPackError, match="gave no tensor"):
        host.adopt(kind())


# from_dlpack


def test_from_dlpack_copies_when_told(host):
    array = np.arange(6.0)
    shared, copied = kina.from_dlpack(array), kina.from_dlpack(array, copy=True)
    array[0] = 9
    assert host.to_host(shared)[0] == 9
    assert host.to_host(copied)[0] == 0
    assert kina.from_dlpack(array, copy=False).shape == (6,)
    with pytest.raises(kina.NonContiguousError):
        kina.from_dlpack(array[::2], copy=True)
    with pytest.raises(kina.ArgumentError, match="copy"):
        kina.from_dlpack(array, copy="yes")


def test_from_dlpack_by_a_session_and_by_a_device(host):
    array = np.arange(3)
    assert kina.from_dlpack(array, session=host, device="cpu").shape == (3,)
    with pytest.raises(TypeError, match="session"):
        kina.from_dlpack(array, session=3)
    with pytest.raises(kina.InvalidConfigError):
        kina.from_dlpack(array, device="nowhere")
    with kina.session("cpu") as ended:
        pass
    with pytest.raises(kina.SessionClosedError):
        kina.from_dlpack(array, session=ended)


def test_from_dlpack_of_a_tensor_of_kina(host):
    tensor = host.zeros(3)
    assert kina.from_dlpack(tensor) is tensor
    copied = kina.from_dlpack(tensor, copy=True)
    assert copied is not tensor
    assert copied.shape == (3,)


def test_from_dlpack_of_a_capsule():
    producer = Producer((2, 2))
    capsule = producer.capsule()
    assert kina.from_dlpack(capsule).shape == (2, 2)
    with pytest.raises(kina.DLPackError, match="consumed"):
        kina.from_dlpack(capsule)


def test_from_dlpack_of_nothing():
    with pytest.raises(kina.DLPackError, match="object"):
        kina.from_dlpack(object())


# PyTorch


@pytest.mark.torch
def test_torch_offers_a_table_that_is_used(host, monkeypatch):
    import torch

    monkeypatch.setattr(torch.Tensor, "__dlpack__", None)
    theirs = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    tensor = kina.from_dlpack(theirs)
    assert (tensor.shape, tensor.strides, tensor.dtype) == ((3, 2), (1, 3), kina.bfloat16)
    assert borrow_address(tensor) == theirs.data_ptr()


@pytest.mark.torch
def test_an_exchange_leaves_nothing_behind(host):
    import torch

    theirs = torch.zeros(4)
    before = sys.getrefcount(theirs)
    for _ in range(1000):
        kina.from_dlpack(theirs)
        delete(export(host.adopt(theirs)))
    assert sys.getrefcount(theirs) == before


def test_managed_structure_is_the_specification():
    assert ctypes.sizeof(ExchangeAPI) == 56
    assert ctypes.sizeof(DLManagedTensorVersioned) == 80
    assert CAPSULE.value == b"dlpack_exchange_api"


def test_a_chain_of_versions_that_leads_round_in_a_circle():
    table = Table(version=(2, 0))
    table.api.prev_api = ctypes.addressof(table.api)
    with pytest.raises(kina.DLPackError, match="no __dlpack__"):
        kina.from_dlpack(table.Array((4,), device=(CPU, 0)))


def test_the_cache_of_types_may_be_used_while_it_lets_something_go():
    """What it kept of a type runs anybody's code when it goes, which may look up another type in the same place."""

    def place(table):
        address = id(table.Array)
        return (address >> 5 ^ address >> 12) & 63

    class Flag:
        def __bool__(self):
            return False

        def __del__(self):
            kina.from_dlpack(other)

    def telling(table):
        given = []

        @FROM_OBJECT
        def wrapped(producer, out):
            given.append(type(producer))
            return table._export(producer, out)

        table.kept = wrapped
        table.api.managed_tensor_from_py_object_no_sync = wrapped
        return given

    tables = [Table()]
    while len(tables) == 1 or place(tables[-1]) != place(tables[0]):
        tables.append(Table())
    first, second = tables[0], tables[-1]
    other = second.Array((4,), device=(CPU, 0))
    calls = telling(first), telling(second)
    first.Array.requires_grad = Flag()
    kina.from_dlpack(first.Array((4,), device=(CPU, 0)))
    first.Array.requires_grad = False  # the cache alone has the flag now
    kina.from_dlpack(first.Array((4,), device=(CPU, 0)))
    assert {*calls[0]} == {first.Array}
    assert {*calls[1]} == {second.Array}
