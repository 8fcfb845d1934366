"""DLPack's C exchange table on a device: who waits for whom, and how long memory and owners live."""

import ctypes
import gc
import threading

import numpy as np
import pytest
from helpers.cuda import (
    ForeignStream,
    driver,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    simulation,
    stalled,
    stream_of,
    view,
)
from helpers.exchange import Table, allocate, borrow, delete, export, make_object, work_stream
from helpers.managed import CPU, CUDA, CUDA_HOST, MANAGED, DLTensor, Producer, name_of

import kina

MANY = 1 << 16
LEGACY = 1


@pytest.fixture
def source():
    """A tensor of a Runtime of its own, whose memory stands for that of another library."""
    with kina.session(kina.Runtime(0)) as theirs:
        tensor = theirs.full(MANY, 3.0)
        theirs.synchronize()
        address = view(theirs, tensor)
    yield address
    del tensor


@pytest.fixture
def stream():
    made = ForeignStream()
    yield made
    made.synchronize()
    made.destroy()


def array_on(table, address, **fields):
    return table.Array((MANY,), data=address, **({"device": (CUDA, 0)} | fields))


def write(handle, address, value):
    """Enqueued on a stream that kina knows nothing of."""
    bits = int(np.float32(value).view(np.uint32))
    with on_stack(primary_context()):
        ok(driver.cuMemsetD32Async(address, bits, MANY, driver.CUstream(handle)))


# Imports


@pytest.mark.parametrize("kind", ["foreign", "legacy", "legacy as NULL"])
@pytest.mark.parametrize("way", ["adopt", "from_dlpack"])
def test_the_session_waits_for_the_stream_that_the_producer_works_on(session, source, stream, kind, way):
    handle = stream.handle if kind == "foreign" else LEGACY
    table = Table(stream=None if kind == "legacy as NULL" else handle)
    before = session.counters()
    with stalled(handle):
        write(handle, source, 5.0)
        array = array_on(table, source)
        taken = session.adopt(array) if way == "adopt" else kina.from_dlpack(array)
        after = session.counters()
        copied = session.copy(taken)
        assert session.counters().host_waits == before.host_waits
    assert after.events_recorded == before.events_recorded + 1  # a slow copy would pass without
    assert (session.to_host(copied) == 5).all()
    assert table.asked_for_stream == 1
    assert view(session, taken) == source


def test_nothing_is_ordered_where_both_work_on_one_stream(session, source):
    table = Table(stream=stream_of(session))
    before = session.counters()
    taken = session.adopt(array_on(table, source))
    after = session.counters()
    assert (after.events_recorded, after.host_waits) == (before.events_recorded, before.host_waits)
    assert (session.to_host(taken) == 3).all()


def test_without_an_open_session_a_momentary_one_takes_it(source, stream):
    table = Table(stream=stream.handle)
    with stalled(stream):
        write(stream.handle, source, 7.0)
        taken = kina.from_dlpack(array_on(table, source))
    with kina.session(0) as session:
        assert (session.to_host(taken) == 7).all()


def test_the_owner_is_kept_until_the_device_is_past_it(session, source):
    array = array_on(Table(stream=LEGACY), source)
    taken = session.adopt(array)
    with stalled(session):
        copied = session.copy(taken)
        del taken
        gc.collect()
        session.completion()
        assert array.deleted == 0
    session.synchronize()
    assert array.deleted == 1
    assert (session.to_host(copied) == 3).all()


@pytest.mark.parametrize(
    ("device", "error"),
    [((CPU, 0), kina.ForeignDeviceError), ((CUDA, 9), kina.DLPackError), ((7, 0), kina.DLPackError)],
)
def test_memory_that_is_elsewhere(session, source, device, error):
    table = Table(stream=LEGACY)
    array = array_on(table, source, device=device)
    with pytest.raises(error):
        session.adopt(array)
    assert (array.deleted, table.asked_for_stream) == (1, 0)
    assert (session.to_host(session.zeros(3)) == 0).all()


@pytest.mark.parametrize("fields", [{"data": None}, {"shape": (-1,)}, {"dtype": (2, 32, 2)}, {"version": (3, 0)}])
def test_what_is_refused_is_given_back(session, source, fields):
    shape = fields.pop("shape", (MANY,))
    array = Table(stream=LEGACY).Array(shape, **({"data": source, "device": (CUDA, 0)} | fields))
    before = session.counters().events_recorded
    with pytest.raises((kina.DLPackError, kina.DTypeError)):
        session.adopt(array)
    assert array.deleted == 1
    assert session.counters().events_recorded == before  # nothing was enqueued
    assert (session.to_host(session.zeros(3)) == 0).all()


def test_managed_and_pinned_memory(session):
    with kina.session(kina.Runtime(0)) as theirs:
        managed = theirs.full(MANY, 2.0, memory=kina.memory.ManagedMemoryResource(0))
        theirs.synchronize()
        address = view(theirs, managed)
        taken = session.adopt(array_on(Table(stream=LEGACY), address, device=(MANAGED, 0)))
        assert (session.to_host(taken) == 2).all()
    assert taken.__dlpack_device__() == (MANAGED, 0)
    buffer = kina.memory.PinnedMemoryResource().allocate(MANY * 4)
    octets = np.from_dlpack(buffer)
    octets.view("f4")[:] = 4
    table = Table(stream=LEGACY)
    pinned = session.adopt(array_on(table, octets.__array_interface__["data"][0], device=(CUDA_HOST, 0)))
    assert (session.to_host(session.copy(pinned)) == 4).all()
    assert table.asked_for_stream == 0  # the host wrote it
    session.synchronize()
    del taken, pinned


def test_a_capture_takes_nothing_in_and_goes_on(session, source):
    array = array_on(Table(stream=LEGACY), source)
    with session.capture() as graph:
        made = session.full(4, 1.0)
        with pytest.raises(kina.UnsupportedError, match="adopt"):
            session.adopt(array)
        with pytest.raises(kina.UnsupportedError, match="adopt"):
            kina.from_dlpack(array)
    graph.launch(session)
    assert (session.to_host(made) == 1).all()
    assert array.deleted in (0, 1)  # from_dlpack learns of the device by the tensor itself


def test_a_producer_whose_stream_is_being_captured(session, source, stream):
    handle = driver.CUstream(stream.handle)
    array = array_on(Table(stream=stream.handle), source)
    with on_stack(primary_context()):
        ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    with pytest.raises(kina.UnsupportedError, match="captur"):
        session.adopt(array)
    with on_stack(primary_context()):
        graph = ok(driver.cuStreamEndCapture(handle))
        assert ok(driver.cuGraphGetNodes(graph))[1] == 0
        ok(driver.cuGraphDestroy(graph))
    assert array.deleted == 1
    assert (session.to_host(session.zeros(3)) == 0).all()


def test_a_bare_capsule_waits_for_the_legacy_stream(session, source):
    producer = Producer((MANY,), data=source, device=(CUDA, 0))
    capsule = producer.capsule()
    with stalled(LEGACY):
        write(LEGACY, source, 6.0)
        before = session.counters().events_recorded
        taken = session.adopt(capsule)
        assert session.counters().events_recorded == before + 1
        copied = session.copy(taken)
    assert (session.to_host(copied) == 6).all()
    with pytest.raises(kina.DLPackError, match="consumed"):
        kina.from_dlpack(capsule)
    del taken
    session.synchronize()
    assert producer.deleted == 1


@pytest.mark.parametrize("fields", [{"data": None}, {"shape": (-1,)}, {"dtype": (2, 32, 2)}])
@pytest.mark.parametrize("versioned", [True, False])
def test_a_bare_capsule_that_is_refused_stays_its_owners(session, source, fields, versioned):
    described = {"shape": (MANY,), "data": source, "device": (CUDA, 0)} | fields
    producer = Producer(described.pop("shape"), versioned=versioned, **described)
    capsule = producer.capsule()
    before = session.counters().events_recorded
    with pytest.raises((kina.DLPackError, kina.DTypeError)):
        session.adopt(capsule)
    assert session.counters().events_recorded == before  # nothing was enqueued
    assert (name_of(capsule).startswith("used"), producer.deleted) == (False, 0)


def test_outside_of_sessions_what_is_handed_over_is_behind_the_legacy_stream(source):
    """Which is the work stream there, by the same table."""
    assert work_stream(kina.Tensor, (CUDA, 0)) == LEGACY
    producer = Producer((MANY,), data=source, device=(CUDA, 0))
    with stalled(LEGACY):
        write(LEGACY, source, 6.0)
        made = make_object(kina.Tensor, producer.managed)
        with kina.session(0) as session:
            copied = session.copy(made)
    with kina.session(0) as session:
        assert (session.to_host(copied) == 6).all()
        del made
        session.synchronize()


def test_what_is_handed_over_into_a_capture_is_refused_and_given_back(session, source):
    producer = Producer((MANY,), data=source, device=(CUDA, 0))
    with session.capture(), pytest.raises(kina.UnsupportedError, match="before the capture"):
        make_object(kina.Tensor, producer.managed)
    assert producer.deleted == 1


def test_a_device_that_nobody_has(source):
    array = array_on(Table(stream=LEGACY), source, device=(CUDA, 9))
    with pytest.raises(kina.DLPackError, match=r"device: .*cuda:9"):
        kina.from_dlpack(array)
    assert array.deleted == 1
    producer = Producer((MANY,), data=source, device=(CUDA, 9))
    with pytest.raises(kina.DLPackError, match=r"device: .*cuda:9"):
        kina.from_dlpack(producer)


@pytest.mark.multi_gpu
def test_another_device_of_this_machine(session, source):
    array = array_on(Table(stream=LEGACY), source, device=(CUDA, 1))
    with pytest.raises(kina.ForeignDeviceError, match="cuda:1"):
        session.adopt(array)
    assert array.deleted == 1


# Exports


@pytest.mark.parametrize("form", [export, borrow])
def test_the_work_stream_waits_for_the_tensors_own(session, form):
    """Nobody else's session is open: the work stream is the legacy one."""
    with kina.session(kina.Runtime(0)) as home:
        tensor = home.zeros(MANY)
        home.synchronize()
        address = view(home, tensor)
        with stalled(home):
            write(stream_of(home), address, 8.0)
            with kina.session(kina.Runtime(0)) as inner:
                assert work_stream(kina.Tensor, (CUDA, 0)) == stream_of(inner)
                given = form(tensor)
                target = inner.zeros(MANY)
                with on_stack(primary_context()):
                    ok(driver.cuMemcpyDtoDAsync(
                        view(inner, target), address, MANY * 4, driver.CUstream(stream_of(inner))
                    ))  # fmt: skip
        assert (inner_to_host(inner, target) == 8).all()
        if form is export:
            delete(given)


def inner_to_host(session, tensor):
    with kina.session(session.runtime) as again:
        return again.to_host(tensor)


def test_memory_is_not_used_again_while_a_consumer_of_the_table_works_with_it(session):
    with kina.session(kina.Runtime(0)) as home:
        tensor = home.full(MANY, 1.0)
        address = view(home, tensor)
        home.synchronize()
        with kina.session(kina.Runtime(0)) as inner:
            target = inner.zeros(MANY)
            inner.synchronize()
            with stalled(inner):
                managed = export(tensor)
                with on_stack(primary_context()):
                    ok(driver.cuMemcpyDtoDAsync(
                        view(inner, target), address, MANY * 4, driver.CUstream(stream_of(inner))
                    ))  # fmt: skip
                del tensor
                delete(managed)
                fresh = [home.full(MANY, float(-i)) for i in range(1, 4)]
            assert (inner.to_host(target) == 1).all()
        del fresh


def test_on_the_home_stream_an_export_orders_nothing(session):
    tensor = session.zeros(4)
    before = session.counters().events_recorded
    managed = export(tensor)
    borrow(tensor)
    del tensor
    delete(managed)
    assert session.counters().events_recorded == before


def test_the_work_stream_is_that_of_the_innermost_session_of_the_device_in_this_thread():
    kina.zeros(1)
    assert work_stream(kina.Tensor, (CUDA, 0)) == LEGACY
    with kina.session(0) as outer:
        assert work_stream(kina.Tensor, (CUDA, 0)) == stream_of(outer)
        with kina.session(kina.Runtime(0)) as inner, kina.session("cpu"):
            assert work_stream(kina.Tensor, (CUDA, 0)) == stream_of(inner)
            assert in_thread(lambda: work_stream(kina.Tensor, (CUDA, 0))) == LEGACY
        assert work_stream(kina.Tensor, (CUDA, 0)) == stream_of(outer)
        assert work_stream(kina.Tensor, (CUDA, 1)) == LEGACY
    assert work_stream(kina.Tensor, (CUDA, 0)) == LEGACY


def test_exports_in_a_capture_are_refused(session):
    tensor = session.zeros(4)
    with kina.session(kina.Runtime(0)) as home:
        other = home.zeros(4)
    with session.capture():
        with pytest.raises(kina.UnsupportedError, match="captur"):
            export(other)  # the stream that is being captured would have to wait for what is outside
        managed = export(tensor)  # on its own stream there is nothing to order
    delete(managed)


# Made by kina


def prototype(device):
    tensor = DLTensor()
    tensor.ndim = 1
    tensor.kept = (ctypes.c_int64 * 1)(MANY)
    tensor.shape = tensor.kept
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = 2, 32, 1
    tensor.device.device_type, tensor.device.device_id = device
    return tensor


@pytest.mark.parametrize("where", ["session", "no session", "thread"])
def test_the_allocator_on_a_device(where):
    def make():
        return allocate(kina.Tensor, prototype((CUDA, 0)))

    if where == "session":
        with kina.session(0) as session:
            managed, told = make()
            assert session.counters().allocations >= 1
            stream = work_stream(kina.Tensor, (CUDA, 0))  # the one that may use it at once
    else:
        managed, told = in_thread(make) if where == "thread" else make()
        stream = LEGACY
    assert told == []
    tensor = managed.dl_tensor
    assert (tensor.device.device_type, tensor.device.device_id, tensor.shape[0]) == (CUDA, 0, MANY)
    write(stream, tensor.data, 1.0)
    delete(managed)
    with kina.session(0) as session:
        session.synchronize()


def test_the_allocator_tells_of_a_device_that_is_not_there():
    managed, ((kind, message),) = allocate(kina.Tensor, prototype((CUDA, 99)))
    assert managed is None
    assert kind == b"RuntimeError"
    assert b"99" in message


@pytest.mark.parametrize("in_session", [True, False])
def test_a_managed_tensor_becomes_a_tensor_of_a_session(source, in_session):
    producer = Producer((MANY,), data=source, device=(CUDA, 0))
    if in_session:
        with kina.session(0) as session:
            made = make_object(kina.Tensor, producer.managed)
            assert made.runtime_identity == session.runtime_identity
    else:
        made = make_object(kina.Tensor, producer.managed)
    with kina.session(0) as session:
        assert (session.to_host(made) == 3).all()
        del made
        session.synchronize()
    assert producer.deleted == 1


# Ends


def outliving_everything() -> None:
    from helpers.exchange import delete, export

    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        tensor = session.full(8, 2.0)
        managed = export(tensor)
        session.synchronize()
    del session, runtime, tensor
    gc.collect()
    threading.Thread(target=delete, args=(managed,)).start()
    kept = export(kina.zeros(4, device=0))  # and one that nobody deletes
    kept.kept = kept


@pytest.mark.parametrize("devices", [1])
def test_exports_outlive_sessions_runtimes_and_the_interpreter(devices):
    run_body(outliving_everything)


@pytest.mark.simulated
def test_exchanges_leave_nothing(session, source):
    table = Table(stream=LEGACY)
    array = array_on(table, source)
    tensor = session.zeros(16)
    for _ in range(1000):
        session.adopt(array)
        delete(export(tensor))
    session.synchronize()
    assert array.deleted == 1000
    assert simulation().violations == 0
