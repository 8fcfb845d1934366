"""kina beside PyTorch, CuPy and cuda.core on one GPU: the same memory, in order, for as long as it is needed.

These libraries are promised wherever these tests run: a missing one is a failure.
"""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from helpers.cuda import in_thread, until, view
from helpers.kernels import KERNELS, fill_entry, module_text

import kina

pytestmark = pytest.mark.gpu

MEGABYTE = 1 << 20
SLOW_NS = 200_000_000  # long enough that a missing order is seen, short enough for a test


@pytest.fixture(scope="module")
def torch():
    import torch

    torch.cuda.init()
    # Its context and its kernels exist from here on: loading one later would wait for what runs.
    torch.zeros(MEGABYTE, device="cuda:0").fill_(7.0).sum().item()
    torch.cuda._sleep(1)
    return torch


@pytest.fixture(scope="module")
def cupy():
    import cupy

    float(cupy.zeros(MEGABYTE, "float32").sum())  # compiled and loaded from here on
    return cupy


@pytest.fixture
def launch(session):
    """`launch(name, signature, size, *arguments)` of an entry of the common kernels."""

    def go(name: str, signature: str, size: int, *arguments: object) -> None:
        with session.raw(name) as raw:
            function = raw.module(KERNELS).function(name, signature)
            function.launch(kina.LaunchConfig.linear(size), *arguments)

    return go


@pytest.fixture
def slow(launch):
    """Keeps the session's stream busy for a while."""
    return lambda: launch("spin", "u64", 1, SLOW_NS)


def fill(launch, y, value, size) -> None:
    launch("fill", "mut f32[], f32, u32", size, y, value, size)


def pointer(array) -> int:
    """The device address that another library's array names."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.data_ptr()


# Zero copy ------------------------------------------------------------------------------------------------

SHARED = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "complex64",
]


@pytest.mark.parametrize("dtype", SHARED)
def test_torch_takes_the_memory_of_kina(session, torch, dtype):
    x = session.zeros((6, 8), dtype)
    taken = torch.from_dlpack(x[1:, ::2])
    assert pointer(taken) == view(session, x) + 8 * x.dtype.itemsize
    assert tuple(taken.shape) == (5, 4)
    assert taken.stride() == (8, 2)
    assert str(taken.dtype) == f"torch.{dtype}"
    assert str(taken.device) == "cuda:0"


@pytest.mark.parametrize("dtype", SHARED)
def test_kina_takes_the_memory_of_torch(session, torch, dtype):
    made = torch.zeros((6, 8), dtype=getattr(torch, dtype), device="cuda:0")
    x = session.adopt(made[1:, ::2])
    assert view(session, x) == made.data_ptr() + 8 * made.element_size()
    assert (x.shape, x.strides, x.dtype.name, x.device) == ((5, 4), (8, 2), dtype, "cuda:0")
    assert x.runtime_identity == session.runtime_identity


@pytest.mark.parametrize("dtype", [name for name in SHARED if name != "bfloat16"])
def test_cupy_both_ways(session, cupy, dtype):
    x = session.zeros((6, 8), dtype)
    taken = cupy.from_dlpack(x[1:, ::2])
    assert pointer(taken) == view(session, x) + 8 * x.dtype.itemsize
    assert taken.shape == (5, 4)
    made = cupy.zeros((6, 8), dtype)
    back = session.adopt(made[1:, ::2])
    assert view(session, back) == made.data.ptr + 8 * made.itemsize
    assert (back.shape, back.strides, back.dtype.name) == ((5, 4), (8, 2), dtype)


def test_values_pass_through_all_three(session, launch, torch, cupy):
    x = session.from_host(np.arange(1000, dtype=np.float32))
    launch("add_one", "mut f32[], u32", 1000, x, 1000)
    theirs = torch.from_dlpack(x)
    theirs.mul_(2)
    torch.cuda.synchronize()
    cupy_view = cupy.from_dlpack(theirs)
    cupy_view += 1
    cupy.cuda.Device(0).synchronize()
    back = session.adopt(cupy_view)
    assert view(session, back) == view(session, x)
    launch("add_one", "mut f32[], u32", 1000, back, 1000)
    assert (session.to_host(x) == (np.arange(1000) + 1) * 2 + 2).all()


def test_what_is_read_only_stays_so(session, cupy):
    """A consumer that cannot say "read-only" is refused; one that can gets the flag."""
    locked = session.zeros(8).as_readonly()
    with pytest.raises(kina.DLPackError):
        locked.to_dlpack(stream=-1, versioned=False)
    back = session.adopt(locked)
    assert back.readonly
    with session.raw("write") as raw, pytest.raises(kina.InvalidLayoutError):
        raw.mut(back)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), (), (1, 1)])
def test_empty_and_scalar_tensors(session, torch, cupy, shape):
    for library in (torch, cupy):
        taken = library.from_dlpack(session.zeros(shape))
        assert tuple(taken.shape) == shape
        assert session.adopt(taken).shape == shape


def test_a_session_on_another_gpu_takes_nothing_by_itself(session, torch):
    """Host memory of another library is not staged behind the caller's back."""
    with pytest.raises(kina.ForeignDeviceError, match="from_host"):
        session.adopt(torch.zeros(8))


# Order ----------------------------------------------------------------------------------------------------


def test_an_export_is_ordered_before_its_consumer(session, launch, slow, torch):
    """A slow write, then at once a read on another stream, without a host wait."""
    x = session.zeros(MEGABYTE)
    session.synchronize()
    side = torch.cuda.Stream()
    slow()
    fill(launch, x, 7.0, MEGABYTE)
    waits = session.counters().host_waits
    with torch.cuda.stream(side):
        total = torch.from_dlpack(x).sum()
    assert session.counters().host_waits == waits
    assert not session.completion().done()  # nothing waited: the write still runs
    side.synchronize()
    assert total.item() == 7 * MEGABYTE


def test_an_export_to_cupy_is_ordered(session, launch, slow, cupy):
    x = session.zeros(MEGABYTE)
    session.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    slow()
    fill(launch, x, 7.0, MEGABYTE)
    with stream:
        total = cupy.from_dlpack(x).sum()
    assert not session.completion().done()
    stream.synchronize()
    assert float(total) == 7 * MEGABYTE


@pytest.mark.parametrize("stream", [None, 1, 2, "handle"])
def test_every_way_to_name_a_stream(session, launch, slow, torch, stream):
    side = torch.cuda.Stream()
    x = session.zeros(MEGABYTE)
    session.synchronize()
    slow()
    fill(launch, x, 7.0, MEGABYTE)
    capsule = x.__dlpack__(stream=side.cuda_stream if stream == "handle" else stream, max_version=(1, 0))
    reader = (
        side if stream == "handle" else torch.cuda.ExternalStream(2) if stream == 2 else torch.cuda.default_stream()
    )
    with torch.cuda.stream(reader):
        total = torch.from_dlpack(capsule).sum()
    reader.synchronize()
    assert total.item() == 7 * MEGABYTE


def test_stream_zero_is_ambiguous(session):
    with pytest.raises(kina.KinaError):
        session.zeros(4).__dlpack__(stream=0)


def test_an_import_is_ordered_after_its_producer(session, launch, torch):
    """A torch tensor that is being written on a side stream is read by kina when that is done."""
    side = torch.cuda.Stream()
    made = torch.zeros(MEGABYTE, device="cuda:0")
    y = session.zeros(MEGABYTE)
    launch("copy", "mut f32[], f32[], u32", 1, y, session.zeros(1), 1)  # loaded: a first load waits for the device
    session.synchronize()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        made.fill_(7.0)
        x = session.adopt(made)  # asks torch to order the session's stream after its current one
    launch("copy", "mut f32[], f32[], u32", MEGABYTE, y, x, MEGABYTE)
    assert not side.query()
    assert (session.to_host(y) == 7).all()


def test_an_import_from_cupy_is_ordered(session, launch, cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    slow = cupy.RawKernel(
        'extern "C" __global__ void late(float *y, int n) { '
        "long long t = clock64(); while (clock64() - t < 300000000) {} "
        "for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = 7; }",
        "late",
    )
    with stream:
        made = cupy.zeros(10000, "float32")
        slow((1,), (256,), (made, np.int32(10000)))
        x = session.adopt(made)
    y = session.zeros(10000)
    launch("copy", "mut f32[], f32[], u32", 10000, y, x, 10000)
    assert (session.to_host(y) == 7).all()


# Lifetime -------------------------------------------------------------------------------------------------


def test_torch_keeps_the_memory_that_kina_dropped(session, launch, torch):
    x = session.zeros(MEGABYTE)
    fill(launch, x, 7.0, MEGABYTE)
    taken = torch.from_dlpack(x)
    address = taken.data_ptr()
    del x
    gc.collect()
    others = [session.full(MEGABYTE, 9.0) for _ in range(8)]
    assert address not in [view(session, other) for other in others]
    session.synchronize()
    assert (taken == 7).all().item()
    del taken
    gc.collect()
    torch.cuda.synchronize()
    session.synchronize()


def test_torch_gets_its_memory_back_only_after_kinas_last_use(session, launch, slow, torch):
    """Its allocator hands a block out again once it is dropped: kina holds it until the device is past."""
    side = torch.cuda.Stream()
    size = 8 * MEGABYTE
    with torch.cuda.stream(side):
        made = torch.full((size,), 7.0, device="cuda:0")
        side.synchronize()
        address = made.data_ptr()
        x = session.adopt(made)
        y = session.zeros(size)
        slow()
        launch("copy", "mut f32[], f32[], u32", size, y, x, size)
        del made, x
        gc.collect()
        thief = torch.full((size,), 9.0, device="cuda:0")  # the same block, were it free
        assert thief.data_ptr() != address
        side.synchronize()
    assert (session.to_host(y) == 7).all()
    session.synchronize()


def test_an_adopted_owner_is_let_go(session, launch, torch):
    """And no later than the next synchronize, or the reaper that was faster."""
    made = torch.zeros(1000, device="cuda:0")
    watch = weakref.ref(made)
    x = session.adopt(made)
    launch("add_one", "mut f32[], u32", 1000, x, 1000)
    del made, x
    session.synchronize()
    before = torch.cuda.memory_allocated()
    gc.collect()
    until(lambda: watch() is None)
    assert torch.cuda.memory_allocated() <= before


def test_dropping_in_another_thread(session, launch, torch):
    """The consumer's last reference may go anywhere, with any context current."""
    x = session.zeros(MEGABYTE)
    fill(launch, x, 7.0, MEGABYTE)
    box = [torch.from_dlpack(x)]
    del x
    in_thread(box.clear)
    made = [torch.full((1000,), 3.0, device="cuda:0")]
    y = session.adopt(made[0])
    in_thread(made.clear)
    assert (session.to_host(y) == 3).all()


def test_a_tensor_outlives_session_and_runtime(torch):
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        taken = torch.from_dlpack(session.full(1000, 5.0))
    del session
    runtime.close()
    del runtime
    gc.collect()
    assert (taken == 5).all().item()


# Streams --------------------------------------------------------------------------------------------------


def torch_stream(torch, cupy):
    class Torch:
        def __init__(self):
            self.stream = torch.cuda.Stream()
            self.handle = self.stream.cuda_stream
            self.synchronize = self.stream.synchronize

    return Torch()


def cupy_stream(torch, cupy):
    class Cupy:
        def __init__(self):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.handle = self.stream.ptr
            self.synchronize = self.stream.synchronize

    return Cupy()


def core_stream(torch, cupy):
    class Core:
        def __init__(self):
            try:
                from cuda.core import Device
            except ImportError:
                from cuda.core.experimental import Device
            device = Device(0)
            device.set_current()
            self.stream = device.create_stream()
            self.handle = int(self.stream.handle)
            self.synchronize = self.stream.sync

    return Core()


@pytest.mark.parametrize("make", [torch_stream, cupy_stream, core_stream])
def test_sessions_on_streams_of_others(torch, cupy, make):
    theirs = make(torch, cupy)
    with kina.session(0, stream=theirs.stream) as session, session.raw("adopted") as raw:
        assert raw.unsafe_stream_handle() == theirs.handle
        y = session.zeros(MEGABYTE)
        function = raw.module(module_text(fill_entry())).function("fill", "mut f32[], f32, u32")
        function.launch(kina.LaunchConfig.linear(MEGABYTE), y, 7.0, MEGABYTE)
        theirs.synchronize()
        assert session.completion().done()
        assert (session.to_host(y) == 7).all()
        first = session.runtime_identity
    with kina.session(0, stream=theirs.stream) as session:
        assert session.runtime_identity == first  # one Runtime per adopted stream and thread


def test_work_of_torch_and_kina_on_one_stream(torch):
    """Nobody needs an event: one stream is one order."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), kina.session(0, stream=side) as session, session.raw("mixed") as raw:
        made = torch.zeros(MEGABYTE, device="cuda:0")
        torch.cuda._sleep(100_000_000)
        made.add_(1)
        x = session.adopt(made)
        function = raw.module(KERNELS).function("add_one", "mut f32[], u32")
        function.launch(kina.LaunchConfig.linear(MEGABYTE), x, MEGABYTE)
        made.mul_(10)
        assert made.sum().item() == 20 * MEGABYTE


def test_the_default_stream_of_torch_is_legacy(torch):
    with kina.session(0, stream=torch.cuda.default_stream()) as session, session.raw("legacy") as raw:
        assert raw.unsafe_stream_handle() in (0, 1)
        y = session.full(1000, 3.0)
        assert torch.from_dlpack(y).sum().item() == 3000


def test_torch_and_cupy_take_the_stream_of_a_block(session, slow, torch, cupy):
    with session.raw("lend") as raw:
        version, handle = raw.stream.__cuda_stream__()
        assert version == 0
        x = session.zeros(1000)
        slow()
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            torch.from_dlpack(x).add_(1)
        with cupy.cuda.Stream.from_external(raw.stream):
            cupy.from_dlpack(x)[...] += 1
        if hasattr(cupy.cuda.Stream, "from_external"):
            assert cupy.cuda.Stream.from_external(raw.stream).ptr == handle
        assert (session.to_host(x) == 2).all()
    session.synchronize()


def test_torch_streams_in_threads(torch):
    """A torch stream per thread, a Runtime per stream: nobody waits for, or frees under, anybody."""
    sums: dict[int, float] = {}

    def work(number: int) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), kina.session(0, stream=side) as session:
            for _ in range(20):
                x = session.full(10000, float(number))
                taken = torch.from_dlpack(x)
                del x
                sums[number] = taken.sum().item()
                del taken

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {number: number * 10000.0 for number in range(8)}


def test_an_untyped_launch_takes_no_array_of_cupy(session, cupy):
    """A 0-d device array is no scalar: to read it would be a hidden copy and a hidden wait."""
    with session.raw("scalar") as raw:
        function = raw.module(KERNELS).function("spin")
        with pytest.raises(kina.ArgumentError):
            function.launch(kina.LaunchConfig(1, 1), cupy.array(0, "uint64"))
