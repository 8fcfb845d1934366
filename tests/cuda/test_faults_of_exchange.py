"""Faults that others shipped with in their exchanges of device memory, each by its own input, on every way in and out.

The same of the host is in tests/core/test_faults_of_exchange.py; what follows the streams further, in
test_exchange_order.py.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers.cuda import (
    KERNELS,
    ForeignStream,
    driver,
    ok,
    on_stack,
    primary_context,
    run_body,
    simulation,
    stalled,
    stream_of,
    view,
)
from helpers.exchange import Table, borrow, delete, export, make_object
from helpers.kernels import nothing_enqueued
from helpers.managed import CPU, CUDA, CUDA_HOST, MANAGED, READ_ONLY, Producer, managed_of
from hypothesis import given, settings
from hypothesis import strategies as st

import kina

MANY = 1 << 16
LEGACY, PER_THREAD = 1, 2
ONE = kina.LaunchConfig.linear(16)
KEPT = []  # what is lent outlives whoever has it


@pytest.fixture
def lent():
    """The address of `MANY` floats of a Runtime that is not the test's: 0, 1, 2, ..."""
    with kina.session(kina.Runtime(0)) as theirs:
        tensor = theirs.from_host(np.arange(MANY, dtype="f4"))
        theirs.synchronize()
        address = view(theirs, tensor)
    yield address
    del tensor  # so long it holds the memory


@pytest.fixture
def raw(session):
    with session.raw("faults") as block:
        yield block


WAYS_IN = {
    "legacy, adopt": (False, lambda session, made: session.adopt(made)),
    "legacy, adopt of the capsule": (False, lambda session, made: session.adopt(made.capsule())),
    "legacy, from_dlpack": (False, lambda session, made: kina.from_dlpack(made)),
    "versioned, adopt": (True, lambda session, made: session.adopt(made)),
    "versioned, adopt of the capsule": (True, lambda session, made: session.adopt(made.capsule())),
    "versioned, from_dlpack of the capsule": (True, lambda session, made: kina.from_dlpack(made.capsule())),
    "table, adopt": (None, lambda session, made: session.adopt(made)),
    "table, from_dlpack": (None, lambda session, made: kina.from_dlpack(made)),
    "the table of Tensor": (True, lambda session, made: make_object(kina.Tensor, made.managed)),
}


def make(versioned, shape, strides=None, **fields):
    fields = {"device": (CUDA, 0), **fields}
    if versioned is None:
        made = Table(stream=LEGACY).Array(shape, strides, **fields)
    else:
        made = Producer(shape, strides, versioned=versioned, **fields)
    KEPT.append(made)
    return made


# Lifetime ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [True, False])
def test_the_second_import_of_a_capsule_raises_and_the_memory_is_freed_once(session, lent, versioned):
    made = make(versioned, (MANY,), data=lent)
    first = session.adopt(made)
    capsule = first.to_dlpack(versioned=versioned)
    second = session.adopt(capsule)
    with kina.session(kina.Runtime(0)) as other:
        for take in (session.adopt, other.adopt, kina.from_dlpack):
            with pytest.raises(kina.DLPackError, match="consumed already"):
                take(capsule)
    del capsule, first
    assert session.to_host(second)[:3].tolist() == [0, 1, 2]
    assert made.deleted == 0
    del second
    session.synchronize()
    assert made.deleted == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_nobody_consumes_frees_itself(session, lent, versioned):
    made = make(versioned, (MANY,), data=lent)
    capsule = session.adopt(made).to_dlpack(versioned=versioned)
    session.synchronize()
    assert made.deleted == 0
    del capsule
    session.synchronize()
    assert made.deleted == 1


# Offset -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("back", ["legacy", "versioned", "table", "tensor"])
def test_the_first_element_is_at_data_and_byte_offset(session, lent, way, back):
    versioned, take = WAYS_IN[way]
    made = make(versioned, (2, 3), data=lent, byte_offset=400)
    with kina.session(kina.Runtime(0)) as inner:
        tensor = take(inner, made)
        assert inner.to_host(tensor).tolist() == [[100, 101, 102], [103, 104, 105]]
        assert borrow(tensor).data == lent + 400
        with kina.session(kina.Runtime(0)) as last:
            other = {
                "legacy": lambda: last.adopt(tensor[1:].to_dlpack(versioned=False)),
                "versioned": lambda: last.adopt(tensor[1:].to_dlpack()),
                "table": lambda: make_object(kina.Tensor, export(tensor[1:])),
                "tensor": lambda: last.adopt(tensor[1:]),
            }[back]()
            assert last.to_host(other).tolist() == [[103, 104, 105]]
            assert (borrow(other).data, borrow(other).byte_offset) == (lent + 412, 0)


# Streams: written on A by work that is not done, exported, read at once on B ---------------------------------


@pytest.mark.parametrize("stream", [None, LEGACY, PER_THREAD, "handle"], ids=str)
@pytest.mark.parametrize("form", ["capsule", "protocol"])
def test_the_stream_is_honoured_by_an_event(session, stream, form):
    tensor, target = session.zeros(MANY), session.zeros(MANY)
    source, read = view(session, tensor), view(session, target)
    session.synchronize()
    side = ForeignStream()
    reader = side.handle if stream == "handle" else PER_THREAD if stream == PER_THREAD else LEGACY
    asked = side.handle if stream == "handle" else stream
    before = session.counters()
    with stalled(session):
        with on_stack(primary_context()):
            ok(driver.cuMemsetD32Async(source, 7, MANY, driver.CUstream(stream_of(session))))
        if form == "capsule":
            kept = tensor.to_dlpack(stream=asked)
        else:
            kept = tensor.__dlpack__(stream=asked, max_version=(1, 0))
        with on_stack(primary_context()):
            ok(driver.cuMemcpyDtoDAsync(read, source, 4 * MANY, driver.CUstream(reader)))
        after = session.counters()
        assert (after.host_waits, after.events_recorded) == (before.host_waits, before.events_recorded + 1)
    with on_stack(primary_context()):
        ok(driver.cuStreamSynchronize(driver.CUstream(reader)))
    assert (session.to_host(target).view("i4") == 7).all()
    del kept
    side.synchronize()
    session.synchronize()
    side.destroy()


def test_minus_one_orders_nothing(session):
    tensor = session.zeros(MANY)
    before = session.counters()
    sim = simulation()
    with stalled(session):
        waits = sim.calls("cuStreamWaitEvent") if sim else 0
        capsule = tensor.to_dlpack(stream=-1)
        assert not sim or sim.calls("cuStreamWaitEvent") == waits
    after = session.counters()
    assert (after.host_waits, after.events_recorded) == (before.host_waits, before.events_recorded)
    assert capsule is not None


@pytest.mark.parametrize("stream", [0, -2, 1 << 64, 1.0, "1", True], ids=repr)
def test_what_names_no_stream_is_refused(session, stream):
    tensor = session.zeros(4)
    before = session.counters().events_recorded
    for ask in (lambda: tensor.__dlpack__(stream=stream), lambda: tensor.to_dlpack(stream=stream)):
        with pytest.raises(kina.DLPackError, match="stream"):
            ask()
    assert session.counters().events_recorded == before


# Deleters ---------------------------------------------------------------------------------------------------


def dropped_on_a_bare_thread_and_after_the_interpreter(owner: str, form: str) -> None:
    import ctypes

    from helpers.exchange import export
    from helpers.managed import managed_of, rename

    library = ctypes.PyDLL(owner)
    library.drop_elsewhere.argtypes = library.keep.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def exported():
        with kina.session(kina.Runtime(0)) as session:
            tensor = session.full(8, 2.0)
            if form == "table":
                managed = export(tensor)
            else:
                capsule = tensor.to_dlpack(stream=1, versioned=form == "versioned")
                managed = managed_of(capsule)
                rename(capsule, b"used_dltensor_versioned" if form == "versioned" else b"used_dltensor")
            return managed.deleter, ctypes.addressof(managed)

    for _ in range(3):
        library.drop_elsewhere(*exported())  # the GIL is held all the while, no context is current there
    library.keep(*exported())


@pytest.mark.parametrize("form", ["legacy", "versioned", "table"])
def test_deleters_on_a_thread_without_anything_and_after_the_interpreter(tmp_path, form):
    from core.test_faults_of_exchange import OWNER
    from helpers.compiler import compile_c

    (tmp_path / "owner.cpp").write_text(OWNER)
    owner = compile_c(tmp_path / "owner.cpp", tmp_path / "owner.so", "-shared", "-fPIC", "-pthread", "-std=c++17")
    told = run_body(dropped_on_a_bare_thread_and_after_the_interpreter, str(owner), form)
    assert told == "dropped at the end, deletions: 0\n"


HOLDERS = ("tensor", "view", "capsule", "other", "managed", "session", "second", "runtime")


@pytest.mark.parametrize("kind", ["legacy", "versioned", "table"])
def test_the_deleter_is_called_once_in_any_order_of_drops(lent, kind):
    """Of tensors, exports, the tensor of another Runtime, both sessions and the Runtime."""

    @settings(max_examples=30)
    @given(order=st.permutations(HOLDERS))
    def check(order):
        made = make({"legacy": False, "versioned": True, "table": None}[kind], (MANY,), data=lent)
        runtime = kina.Runtime(0)
        session, second = kina.session(runtime), kina.session(kina.Runtime(0))
        session.__enter__()
        second.__enter__()
        tensor = session.adopt(made)
        holders = {
            "tensor": tensor,
            "view": tensor[1:],
            "capsule": tensor[::2].to_dlpack(),
            "other": second.adopt(tensor),
            "managed": export(tensor),
            "session": session,
            "second": second,
            "runtime": runtime,
        }
        session.copy(tensor)
        del tensor, session, second, runtime
        for name in sorted(order, key=lambda name: (name == "runtime", order.index(name))):
            what = holders.pop(name)
            if name == "managed":
                delete(what)
            elif name in ("session", "second", "runtime"):
                what.close()
            del what
            assert made.deleted == 0 or not holders.keys() - {"session", "second", "runtime"}, (order, name)
        gc.collect()
        with kina.session(0) as last:
            last.synchronize()
        until_deleted(made)
        assert made.deleted == 1

    check()


def until_deleted(made):
    import time

    end = time.monotonic() + 10
    while not made.deleted:
        assert time.monotonic() < end, "it does not happen"
        kina.zeros(1)
        time.sleep(0.001)


# Stride 0 ---------------------------------------------------------------------------------------------------


def test_an_expanded_scalar_is_never_taken_for_compact_or_written(session, raw, lent):
    copy = raw.module(KERNELS).function("copy", "mut f32[], f32[], u32")
    target = session.zeros(9)
    expanded = [session.full((), 2.0).broadcast_to(3, 3)]
    expanded += [take(session, make(versioned, (3, 3), (0, 0), data=lent)) for versioned, take in WAYS_IN.values()]
    for tensor in expanded:
        assert (tensor.strides, tensor.is_contiguous) == ((0, 0), False)
        for arguments in ((target, tensor), (tensor, target)):
            with nothing_enqueued(session), pytest.raises(kina.NonContiguousError):
                copy.launch(ONE, *arguments, 9)
        with pytest.raises(kina.InvalidLayoutError, match="more than once"):
            raw.mut(tensor)
        with pytest.raises(kina.NonContiguousError):
            session.copy(tensor)
        with pytest.raises(kina.DLPackError, match="read-only"):
            tensor.to_dlpack(versioned=False)
        assert managed_of(kept := tensor.to_dlpack()).flags == READ_ONLY
        managed = export(tensor)
        assert managed.flags == READ_ONLY
        delete(managed)
        assert kept is not None
        raw.ref(tensor).release()  # a kernel that takes strides may read it


# Descriptions that cannot be true ----------------------------------------------------------------------------

IMPOSSIBLE = [
    ({"data": None}, "data: NULL for 4 elements"),
    ({"ndim": -1}, "ndim: -1"),
    ({"shape": None, "ndim": 2}, "shape: NULL for 2 axes"),
    ({"shape": (2, -1)}, "shape: axis 1 has the negative extent -1"),
    ({"shape": (2**40, 2**40)}, "shape: the number of elements overflows"),
    ({"strides": (2**62,)}, "strides: axis 0"),
    ({"byte_offset": 2**64 - 1}, "byte_offset"),
    ({"data": 8, "strides": (-1,)}, "strides: bytes -12 to 4"),
    ({"device": (0, 0)}, "device"),
    ({"device": (99, 0)}, "device"),
    ({"device": (CUDA, -1)}, "device"),
    ({"device": (MANAGED, -1)}, "device"),
    ({"device": (CUDA, 7)}, "device: .*cuda:7"),
    ({"device": (MANAGED, 7)}, "device: .*cuda:7"),
]


@pytest.mark.parametrize(("fields", "words"), IMPOSSIBLE, ids=repr)
@pytest.mark.parametrize("way", WAYS_IN)
def test_the_field_is_named(session, lent, fields, words, way):
    versioned, take = WAYS_IN[way]
    made = make(versioned, **{"shape": (4,), "data": lent, **fields})
    with pytest.raises(kina.DLPackError, match=words):
        take(session, made)
    session.synchronize()
    assert made.deleted == ("table" in way)
    assert session.to_host(session.zeros(1)).tolist() == [0]


@pytest.mark.parametrize("way", [way for way in WAYS_IN if "adopt" in way])
def test_memory_that_is_elsewhere_is_named(session, lent, way):
    versioned, take = WAYS_IN[way]
    made = make(versioned, (4,), data=lent, device=(CPU, 0))
    with pytest.raises(kina.ForeignDeviceError, match=r"device type 1"):
        take(session, made)
    assert made.deleted == (versioned is None)


# Alignment: allowed in views, refused to kernels -------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS_IN)
def test_misaligned_elements_are_for_views_and_copies_not_for_kernels(session, raw, lent, way):
    versioned, take = WAYS_IN[way]
    tensor = take(session, make(versioned, (16,), data=lent, byte_offset=5))
    expected = np.arange(MANY, dtype="f4").view("u1")[5:69].view("f4")
    copy = raw.module(KERNELS).function("copy", "mut f32[], f32[], u32")
    target = session.zeros(16)
    assert session.to_host(tensor).tobytes() == expected.tobytes()
    for misaligned in (tensor, tensor[3:], tensor.reshape(4, 4)[1]):
        for borrowed in (raw.ref, raw.mut):
            with pytest.raises(kina.InvalidLayoutError, match=r"1 bytes past a multiple of 4.*float32"):
                borrowed(misaligned)
        for arguments in ((target, misaligned), (misaligned, target)):
            with (
                nothing_enqueued(session),
                pytest.raises(kina.InvalidLayoutError, match="1 bytes past a multiple of 4"),
            ):
                copy.launch(ONE, *arguments, 1)
        prepared = copy.prepare(ONE)
        with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match="past a multiple of 4"):
            prepared.launch(target, misaligned, 1)
        assert borrow(misaligned).data % 4 == 1  # whoever takes it decides for himself
    aligned = session.copy(tensor)
    copy.launch(ONE, target, aligned, 16)
    assert session.to_host(target).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["int8", "int16", "float32", "float64", "complex64", "complex128", "bfloat16"])
def test_the_alignment_is_the_size_of_an_element(session, raw, lent, dtype):
    dtype = getattr(kina, dtype)
    code = borrow(session.zeros(1, dtype)).dtype
    fields = {"data": lent, "dtype": (code.code, code.bits, code.lanes)}
    for offset in range(17):
        tensor = session.adopt(make(True, (4,), byte_offset=offset, **fields))
        if offset % dtype.itemsize:
            with pytest.raises(kina.InvalidLayoutError, match=f"multiple of {dtype.itemsize}, .*{dtype.name}"):
                raw.mut(tensor)
            raw.mut(tensor[4:]).release()  # no element lies anywhere
        else:
            raw.mut(tensor).release()


def test_unsigned_refs_of_misaligned_memory_do_not_exist(session, raw, lent):
    """Where a function has no signature, what it is passed are refs, and a ref is aligned."""
    copy = raw.module(KERNELS).function("copy")
    tensor = session.adopt(make(True, (16,), byte_offset=2, data=lent))
    with pytest.raises(kina.ArgumentError), nothing_enqueued(session):
        copy.launch(ONE, raw.mut(session.zeros(16)), tensor, kina.u32(16))
    pinned = kina.memory.PinnedMemoryResource().allocate(64)
    address = np.from_dlpack(pinned).__array_interface__["data"][0]
    with pytest.raises(kina.InvalidLayoutError, match="1 bytes past a multiple of 2"):
        raw.ref(session.adopt(make(True, (3,), data=address, byte_offset=1, dtype=(2, 16, 1), device=(CUDA_HOST, 0))))
