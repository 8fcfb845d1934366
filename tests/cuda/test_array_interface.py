"""`__cuda_array_interface__`, both ways: what it says, who waits for whom, what is refused, how long memory lives."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from helpers.arrays import NUMPY_DTYPES, OTHER_DTYPES, CudaArray, layouts, repeats, same_layout
from helpers.cuda import (
    ForeignStream,
    driver,
    during_a_capture,
    ok,
    on_stack,
    primary_context,
    run_body,
    simulation,
    stalled,
    stream_of,
    view,
)
from hypothesis import HealthCheck, settings
from hypothesis import given as over

import kina
from kina import memory

SIZE = 1000
FIELDS = {"shape", "typestr", "data", "strides", "version", "stream"}


def described(tensor: object, **changes: object) -> CudaArray:
    """Somebody's array over the memory of a tensor, which it keeps; `stream` is not named unless it is in `changes`."""
    return CudaArray(tensor, **tensor.__cuda_array_interface__ | {"stream": None} | changes)


def enqueue_fill(stream: int, address: int, value: float, size: int = SIZE) -> None:
    """A consumer's or producer's work on a stream that kina does not know."""
    bits = int(np.float32(value).view(np.uint32))
    with on_stack(primary_context()):
        ok(driver.cuMemsetD32Async(address, bits, size, driver.CUstream(stream)))


def is_idle_soon(stream: int) -> bool:
    """Is the stream done within half a second? What waits for a stalled one is not."""
    until = time.monotonic() + (0.5 if simulation() is not None else 0.1)
    with on_stack(primary_context()):
        while int(driver.cuStreamQuery(driver.CUstream(stream))[0]) == 600:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
    return True


# Out ------------------------------------------------------------------------------------------------------


def test_what_it_says(session):
    tensor = session.zeros((6, 8))
    interface = tensor.__cuda_array_interface__
    assert interface == {
        "shape": (6, 8), "typestr": "<f4", "data": (view(session, tensor), False), "strides": None,
        "stream": stream_of(session), "version": 3,
    }  # fmt: skip
    part = tensor[1:, ::-2].permute(1, 0)
    interface = part.__cuda_array_interface__
    assert set(interface) == FIELDS
    assert interface["data"] == (view(session, tensor) + 4 * (8 + 7), False)
    assert (interface["shape"], interface["strides"]) == ((4, 5), (-8, 32))
    for locked in (tensor.as_readonly(), tensor[0].broadcast_to(2, 8)):
        assert locked.__cuda_array_interface__["data"] == (view(session, tensor), True)
    assert tensor[0].broadcast_to(2, 8).__cuda_array_interface__["strides"] == (0, 4)
    assert type(interface["stream"]) is int
    assert session.counters().host_waits == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5)])
def test_without_elements_there_is_no_address(session, shape):
    assert session.zeros(shape).__cuda_array_interface__["data"] == (0, False)
    assert session.zeros(shape).as_readonly().__cuda_array_interface__ == {
        "shape": shape, "typestr": "<f4", "data": (0, True), "strides": None, "version": 3,
        "stream": stream_of(session),
    }  # fmt: skip


def test_the_home_stream_is_named_and_the_legacy_one_is_one():
    foreign = ForeignStream()
    for given, named in ((ForeignStream(0), 1), (ForeignStream(1), 1), (foreign, foreign.handle)):
        with kina.session(0, stream=given) as session:
            assert session.zeros(3).__cuda_array_interface__["stream"] == named
            session.synchronize()
    foreign.destroy()


@pytest.mark.parametrize("name", [*NUMPY_DTYPES, *OTHER_DTYPES])
def test_every_dtype_goes_out_and_comes_in(session, name):
    tensor = session.zeros(3, name)
    if name in NUMPY_DTYPES:
        assert tensor.__cuda_array_interface__["typestr"] == NUMPY_DTYPES[name]
        back = session.adopt(described(tensor))
        assert (back.dtype, view(session, back)) == (tensor.dtype, view(session, tensor))
    else:
        assert not hasattr(tensor, "__cuda_array_interface__")
        with pytest.raises(AttributeError, match=rf"{name}.*DLPack"):
            tensor.__cuda_array_interface__  # noqa: B018


def test_each_protocol_where_the_memory_is(session, host):
    tensor = session.zeros(3)
    assert not hasattr(tensor, "__array_interface__")
    with pytest.raises(AttributeError, match=r"cuda:0.*s\.to_host"):
        tensor.__array_interface__  # noqa: B018
    with pytest.raises(BufferError, match=r"cuda:0.*s\.to_host.*from_dlpack"):
        memoryview(tensor)
    for attempt in (np.asarray, lambda t: t.__array__(), lambda t: np.array(t, copy=False)):
        with pytest.raises(TypeError, match=r"s\.to_host"):
            attempt(tensor)
    for tensor in (host.zeros(3), host.zeros(3, memory=memory.PinnedMemoryResource())):
        assert not hasattr(tensor, "__cuda_array_interface__")
        assert np.asarray(tensor).tolist() == memoryview(tensor).tolist() == [0, 0, 0]
        assert tensor.__array_interface__["shape"] == (3,)


def test_a_process_without_a_host_session_says_no_too():
    def body():
        with kina.session(0) as session:
            with pytest.raises(BufferError, match="to_host"):
                memoryview(session.zeros(3))
            assert not hasattr(session.zeros(3), "__array_interface__")

    run_body(body)


def test_a_capture_is_not_told_of(session):
    before = session.zeros(3)
    with session.capture() as graph:
        for tensor in (before, session.zeros(3)):
            with pytest.raises(kina.UnsupportedError, match="captured"):
                tensor.__cuda_array_interface__  # noqa: B018
    graph.launch(session)
    assert before.__cuda_array_interface__["stream"] == stream_of(session)


def test_a_capture_of_others_is_not_told_of_either():
    stream = ForeignStream()
    handle = driver.CUstream(stream.handle)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with kina.session(0, stream=stream) as session:
        tensor = session.zeros(3)
        with on_stack(primary_context()):
            ok(driver.cuStreamBeginCapture(handle, mode))
        with pytest.raises(kina.UnsupportedError, match="captured"):
            tensor.__cuda_array_interface__  # noqa: B018
        with on_stack(primary_context()):
            ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(handle))))
        assert tensor.__cuda_array_interface__["stream"] == stream.handle
        del tensor
        session.synchronize()
    stream.destroy()


def test_captures_of_other_threads_live(session):
    tensor = session.zeros(3)
    during_a_capture(lambda: session.adopt(described(tensor, stream=stream_of(session))))
    during_a_capture(lambda: session.adopt(described(tensor)))


def test_what_was_told_of_waits_for_the_whole_device(session):
    """Whoever read it may use the memory on any stream, and does not say when that is over."""
    stream = ForeignStream()
    tensor = session.zeros(SIZE)
    session.synchronize()
    interface = tensor.__cuda_array_interface__
    address = interface["data"][0]
    with stalled(stream):
        enqueue_fill(stream.handle, address, 7.0)
        del tensor
        gc.collect()
        others = [session.full(SIZE, 9.0) for _ in range(8)]
        assert address not in [view(session, other) for other in others]
    session.synchronize()
    assert view(session, session.zeros(SIZE)) == address
    del others
    stream.destroy()


# In: layouts ------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@over(given=layouts())
def test_layouts_come_in_as_they_are(session, given):
    """Memory of kina, described as NumPy describes memory of the same layout."""
    lowest, highest = np.lib.array_utils.byte_bounds(given) if given.size else (0, 0)
    address = given.__array_interface__["data"][0]
    octets = np.frombuffer((np.ctypeslib.ctypes.c_char * (highest - lowest)).from_address(lowest), np.uint8) \
        if given.size else np.zeros(0, np.uint8)  # fmt: skip
    held = session.from_host(octets)
    data = view(session, held) + address - lowest if given.size else 0
    source = CudaArray(held, version=3, typestr=given.dtype.str, shape=given.shape, strides=given.strides,
                       data=(data, not given.flags.writeable))  # fmt: skip
    tensor = session.adopt(source)
    itemsize = given.itemsize
    assert tensor.readonly == (not given.flags.writeable)
    assert tensor.runtime_identity == session.runtime_identity
    np.testing.assert_array_equal(session.to_host(tensor), given)
    again = tensor.__cuda_array_interface__
    assert again["data"] == (data, tensor.readonly or repeats(given))
    assert (again["shape"], again["typestr"]) == (given.shape, given.dtype.str)
    if given.size:
        strides = np.empty(given.shape, given.dtype).strides if again["strides"] is None else again["strides"]
        shown = np.lib.stride_tricks.as_strided(given, given.shape, strides)
        assert same_layout(shown, given)
        assert all(step % itemsize == 0 for step in strides)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("strides", [None, ..., (32, 4)])
def test_every_version(session, version, strides):
    held = session.full((6, 8), 3)
    tensor = session.adopt(described(held, version=version, strides=strides, stream=...))
    assert (tensor.shape, tensor.is_contiguous) == ((6, 8), True)
    assert (session.to_host(tensor) == 3).all()


def test_fields_that_may_be_there(session):
    held = session.full(3, 2)
    for changes in ({"mask": None}, {"descr": [("", "<f4")]}, {"descr": None}, {"typestr": "=f4"}, {"unknown": 1},
                    {"shape": (np.int64(3),)}, {"data": (np.uint64(view(session, held)), False)}):  # fmt: skip
        assert session.to_host(session.adopt(described(held, **changes))).tolist() == [2, 2, 2]


def test_an_empty_array_is_nowhere(session):
    for data in ((0, False), (12345, True)):
        tensor = session.adopt(CudaArray(None, version=3, shape=(0, 3), typestr="<f8", data=data, strides=(1, 2)))
        assert (tensor.shape, tensor.device, tensor.readonly) == ((0, 3), "cuda:0", data[1])
        assert session.to_host(tensor).shape == (0, 3)
    assert kina.from_dlpack(CudaArray(None, version=3, shape=(0,), typestr="<f8", data=(0, False))).device == "cuda:0"


def test_what_is_read_only_stays_so(session):
    held = session.zeros(3)
    tensor = session.adopt(described(held.as_readonly()))
    assert tensor.readonly
    with session.raw("write") as raw, pytest.raises(kina.InvalidLayoutError, match="read-only"):
        raw.mut(tensor)


# In: streams ------------------------------------------------------------------------------------------------


@pytest.fixture
def producer():
    stream = ForeignStream()
    yield stream
    stream.destroy()


@pytest.mark.parametrize("version", [2, 3])
def test_the_session_waits_for_the_producers_stream(session, producer, version):
    """On the device, and the host does not."""
    held = session.zeros(SIZE)
    session.synchronize()
    waits = session.counters().host_waits
    with stalled(producer):
        enqueue_fill(producer.handle, view(session, held), 7.0)
        tensor = session.adopt(described(held, stream=producer.handle, version=version))
        copied = session.copy(tensor)
        assert session.counters().host_waits == waits
        assert not is_idle_soon(stream_of(session))
    assert session.to_host(copied).tolist() == [7.0] * SIZE
    session.synchronize()


@pytest.mark.parametrize("handle", [1, 2])
def test_the_default_streams_are_waited_for(session, handle):
    held = session.zeros(SIZE)
    session.synchronize()
    with stalled(handle):
        enqueue_fill(handle, view(session, held), 7.0)
        copied = session.copy(session.adopt(described(held, stream=handle)))
        assert not is_idle_soon(stream_of(session))
    assert session.to_host(copied).tolist() == [7.0] * SIZE


@pytest.mark.parametrize("stream", [None, ..., "own"])
def test_what_needs_no_order_gets_none(session, producer, stream):
    held = session.zeros(SIZE)
    named = stream_of(session) if stream == "own" else stream
    events = session.counters().events_recorded
    with stalled(producer):
        session.copy(session.adopt(described(held, stream=named)))
        assert is_idle_soon(stream_of(session))
    assert session.counters().events_recorded == events


def test_another_runtimes_stream_is_waited_for(session):
    """A tensor of kina behind another library's array: the stream that the interface names is the Runtime's own."""
    with kina.session(kina.Runtime(0)) as other:
        held = other.zeros(SIZE)
        with stalled(other):
            enqueue_fill(stream_of(other), view(other, held), 7.0)
            copied = session.copy(session.adopt(CudaArray(held, **held.__cuda_array_interface__)))
            assert not is_idle_soon(stream_of(session))
        assert session.to_host(copied).tolist() == [7.0] * SIZE
        session.synchronize()
        other.synchronize()


def test_a_producer_in_a_capture_is_left_alone(session, producer):
    handle = driver.CUstream(producer.handle)
    held = session.zeros(3)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    with pytest.raises(kina.UnsupportedError, match="captured"):
        session.adopt(described(held, stream=producer.handle))
    with on_stack(primary_context()):
        ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(handle))))
    assert session.to_host(session.adopt(described(held, stream=producer.handle))).tolist() == [0, 0, 0]


def test_nothing_is_adopted_in_a_capture(session):
    source = described(session.zeros(3))
    with session.capture(), pytest.raises(kina.UnsupportedError, match="before the capture"):
        session.adopt(source)
    assert source.reads == 0


# Refusals ---------------------------------------------------------------------------------------------------

WRONG = [
    ("version", 4), ("version", -1), ("version", "3"), ("version", None), ("version", ...), ("version", True),
    ("typestr", None), ("typestr", ...), ("typestr", b"<f4"), ("typestr", "f4"), ("typestr", "<f"), ("typestr", "<x4"),
    ("shape", None), ("shape", ...), ("shape", [3, 4]), ("shape", 12), ("shape", (3, -4)), ("shape", (3, 4.0)),
    ("shape", (3, True)), ("shape", (2**63,)), ("shape", (2**40, 2**40)), ("shape", (2**62,)), ("shape", (1,) * 65),
    ("strides", [16, 4]), ("strides", (16,)), ("strides", (16, 4, 4)), ("strides", (16, 2)), ("strides", (16, 4.0)),
    ("strides", (2**62, 4)), ("strides", (2**64, 4)), ("strides", (-(2**63), 4)), ("strides", 4),
    ("data", None), ("data", ...), ("data", (1,)), ("data", (1, False, 2)), ("data", (0, False)),
    ("data", (-16, False)), ("data", (2**64, False)), ("data", (2**64 - 4, False)), ("data", (None, False)),
    ("data", (True, False)), ("data", (16.0, False)), ("data", [16, False]), ("data", (16, 0)), ("data", 16),
    ("data", (16, False)), ("mask", np.zeros((3, 4), bool)), ("descr", "x"),
    ("stream", 0), ("stream", -1), ("stream", 2**64), ("stream", 1.0), ("stream", True), ("stream", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: repr(value)[:40].replace(" ", ""))
def test_what_is_wrong_is_named(session, field, value):
    source = described(session.zeros((3, 4)), **{field: value})
    events = session.counters().events_recorded
    named = "data|strides" if field == "data" else field
    with pytest.raises(kina.DLPackError, match=rf"__cuda_array_interface__\['({named})'\]"):
        session.adopt(source)
    assert session.counters().events_recorded == events
    assert source.reads == 1


@pytest.mark.parametrize("typestr", [">f4", "|f4", "<f16", "<f1", "|V4", "<V2", "|O8", "<m8", "<i3", "|b2"])
def test_elements_that_kina_does_not_store(session, typestr):
    with pytest.raises(kina.DTypeError, match="typestr"):
        session.adopt(described(session.zeros(3), typestr=typestr))


def test_structures_and_what_is_no_array(session):
    held = session.zeros(3)
    with pytest.raises(kina.DTypeError, match="descr"):
        session.adopt(described(held, descr=[("a", "<f4")]))

    class Refuses:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("not today")

    class Lies:
        __cuda_array_interface__ = (1, 2)

    with pytest.raises(kina.DLPackError, match=r"Refuses.*not today") as raised:
        session.adopt(Refuses())
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(kina.DLPackError, match="dict, not tuple"):
        session.adopt(Lies())
    for nothing in ([1, 2], b"abc", object(), 3):
        with pytest.raises(kina.DLPackError, match=r"neither __dlpack__ nor __cuda_array_interface__.*from_host"):
            session.adopt(nothing)


def test_memory_of_the_host_is_refused(session):
    array = np.zeros(3, "f4")
    with pytest.raises(kina.DLPackError, match=r"\['data'\].*memory of the host"):
        session.adopt(CudaArray(array, version=3, shape=(3,), typestr="<f4", data=(array.ctypes.data, False)))


@pytest.mark.multi_gpu
def test_memory_of_another_device_is_refused(session):
    with kina.session(1) as other:
        source = described(other.zeros(3))
        with pytest.raises(kina.ForeignDeviceError, match=r"cuda:1.*cuda:0"):
            session.adopt(source)
        assert kina.from_dlpack(source).runtime_identity == other.runtime_identity
        other.synchronize()


def test_memory_of_another_context_is_refused(session, foreign):
    with on_stack(foreign):
        address = int(ok(driver.cuMemAlloc(64)))
    source = CudaArray(None, version=3, shape=(3,), typestr="<f4", data=(address, False))
    with pytest.raises(kina.ForeignDeviceError, match="context"):
        session.adopt(source)
    with on_stack(foreign):
        ok(driver.cuMemFree(address))


@pytest.mark.parametrize("allocate", ["cuMemAlloc", "cuMemAllocManaged", "cuMemHostAlloc", "cuMemAllocAsync"])
def test_memory_of_every_kind_comes_in(session, allocate):
    """Managed and pinned memory too: the device reaches it. The host reads those once the device is past them."""
    flags = {"cuMemAllocManaged": (1,), "cuMemHostAlloc": (1,)}.get(allocate, ())
    nbytes = 4 * SIZE
    with on_stack(primary_context()):
        rest = (driver.CUstream(1),) if allocate == "cuMemAllocAsync" else flags
        address = int(ok(getattr(driver, allocate)(nbytes, *rest)))
    tensor = session.adopt(CudaArray(None, version=3, shape=(SIZE,), typestr="<f4", data=(address, False), stream=1))
    assert view(session, tensor) == address
    enqueue_fill(stream_of(session), address, 3.0)
    assert (session.to_host(session.copy(tensor)) == 3).all()
    if allocate in ("cuMemAllocManaged", "cuMemHostAlloc"):
        with stalled(session):
            enqueue_fill(stream_of(session), address, 4.0)
            for attempt in (memoryview, np.asarray, lambda t: t.__array_interface__):
                with pytest.raises(BufferError, match="synchronize"):
                    attempt(tensor)
        session.synchronize()
        array = np.asarray(tensor)
        assert array.ctypes.data == address
        assert (array == 4).all()
        del array
    else:
        with pytest.raises(TypeError):
            np.asarray(tensor)
    del tensor
    session.synchronize()
    with on_stack(primary_context()):
        if allocate == "cuMemHostAlloc":
            ok(driver.cuMemFreeHost(address))
        else:
            ok(driver.cuMemFree(address))


# from_dlpack ------------------------------------------------------------------------------------------------


def test_from_dlpack_finds_the_device(session):
    held = session.full(3, 2)
    source = described(held)
    tensor = kina.from_dlpack(source)
    assert tensor.runtime_identity == session.runtime_identity
    assert view(session, tensor) == view(session, held)
    copied = kina.from_dlpack(source, copy=True)
    assert view(session, copied) != view(session, held)
    assert session.to_host(copied).tolist() == [2, 2, 2]
    with pytest.raises(kina.DLPackError, match="typestr"):
        kina.from_dlpack(described(held, typestr="?"))
    with pytest.raises(kina.DLPackError, match="memory of the host"):
        kina.from_dlpack(described(held, data=(np.zeros(3).ctypes.data, False)))


def test_from_dlpack_opens_what_it_needs():
    def body():
        from helpers.arrays import CudaArray

        with on_stack(primary_context()):
            address = int(ok(driver.cuMemAlloc(64)))
        ok(driver.cuCtxSetCurrent(driver.CUcontext(0)))
        source = CudaArray(None, version=3, shape=(3,), typestr="<f4", data=(address, False))
        print(kina.from_dlpack(source).device)

    assert run_body(body) == "cuda:0\n"


# Lifetimes --------------------------------------------------------------------------------------------------


def test_the_owner_is_kept_until_the_device_is_past_it(session):
    source = described(session.zeros(SIZE))
    alive = weakref.finalize(source, lambda: None)
    tensor = session.adopt(source)[1:]
    with stalled(session):
        copied = session.copy(tensor)
        del source, tensor
        gc.collect()
        assert alive.alive
    session.synchronize()
    gc.collect()
    assert not alive.alive
    assert session.to_host(copied).tolist() == [0.0] * (SIZE - 1)


def test_a_refused_owner_is_let_go(session, producer):
    held = session.zeros(3)
    for changes, kind in (({"typestr": "<V4"}, kina.DTypeError), ({"strides": (3,)}, kina.DLPackError)):
        source = described(held, **changes)
        alive = weakref.finalize(source, lambda: None)
        with pytest.raises(kind):
            session.adopt(source)
        del source
        gc.collect()
        assert not alive.alive


def test_both_ways_outlive_session_runtime_and_process():
    def body():
        from helpers.arrays import CudaArray

        runtime = kina.Runtime(0)
        with kina.session(runtime) as session:
            held = session.full(3, 2)
            source = CudaArray(held, **held.__cuda_array_interface__)
            tensor = session.adopt(source)
        del session, held
        runtime.close()
        del runtime
        gc.collect()
        with kina.session(0) as other:
            print(other.to_host(other.adopt(tensor)).tolist())
        globals()["kept"] = [tensor, source]
        kept.append(kept)  # noqa: F821

    assert run_body(body) == "[2.0, 2.0, 2.0]\n"


def test_a_consumer_outlives_the_session(session):
    stream = ForeignStream()
    with kina.session(kina.Runtime(0)) as opened:
        held = opened.full(SIZE, 3.0)
        interface = held.__cuda_array_interface__
        opened.synchronize()
    with stalled(stream):
        enqueue_fill(stream.handle, interface["data"][0], 7.0)
        del opened
        gc.collect()
    stream.synchronize()
    assert session.to_host(session.adopt(held)).tolist() == [7.0] * SIZE
    stream.destroy()


# Beside other libraries -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cupy_and_torch_take_it_and_give_it(session):
    import cupy
    import torch

    tensor = session.full((6, 8), 3)
    for library, taken in (("cupy", cupy.asarray(tensor)), ("torch", torch.as_tensor(tensor, device="cuda:0"))):
        address = taken.data.ptr if library == "cupy" else taken.data_ptr()
        assert address == view(session, tensor), library
        assert float(taken.sum()) == 3 * 48
        back = session.adopt(CudaArray(taken, **taken.__cuda_array_interface__))
        assert view(session, back) == address
    del taken, back
    session.synchronize()
