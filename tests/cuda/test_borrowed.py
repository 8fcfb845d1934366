"""Tensors of other libraries as arguments of launches: borrowed by the C exchange table, ordered, leased, examined.

The library is an extension of the tests, whose tensors lie in memory of a kina Runtime that plays the other side.
"""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from helpers.compiler import compile_c_extension
from helpers.cuda import ForeignStream, run_body, stalled, stream_of
from helpers.kernels import KERNELS, many_pointers, nothing_enqueued

import kina

pytestmark = pytest.mark.cuda

N = 8
LINE = kina.LaunchConfig(1, N)
SAXPY = "mut f32[], f32[], f32, u32"
PINNED, MANAGED, HOST = 3, 13, 1


def load(path):
    spec = importlib.util.spec_from_file_location("lender", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = Path(__file__).parents[1] / "native" / "lender.c"
    return str(compile_c_extension(source, tmp_path_factory.mktemp("lender")))


@pytest.fixture(scope="module")
def module(library):
    return load(library)


@pytest.fixture
def theirs():
    """Whose memory it is: the other library's allocator, and its stream."""
    with kina.session(kina.Runtime(0)) as session:
        yield session


@pytest.fixture
def session(theirs):
    with kina.session(kina.Runtime(0)) as session:
        yield session


@pytest.fixture
def raw(session):
    with session.raw("borrowed") as block:
        yield block


@pytest.fixture
def saxpy(raw):
    return raw.module(KERNELS).function("saxpy", SAXPY)


@pytest.fixture
def lender(module, session):
    """It works on the session's stream, until a test says otherwise."""
    for number in (0, 1):
        module.works_on(stream_of(session), number)
        module.runs(None, None, number)
    before = module.alive()
    yield module
    for number in (0, 1):
        module.runs(None, None, number)
    session.synchronize()
    gc.collect()
    assert module.alive() == before


def address_of(session, tensor):
    with session.raw() as block:
        return block.unsafe_address(block.ref(tensor))


def full(session, value, shape=N, dtype="f32"):
    tensor = session.full(shape, value, dtype)
    session.synchronize()
    return tensor


# Values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [False, True])
def test_it_is_used_where_it_lies(session, theirs, saxpy, lender, prepared):
    x, y = full(theirs, 3.0), full(theirs, 1.0)
    lent = lender.Lent(address_of(theirs, x), (N,)), lender.Lent(address_of(theirs, y), (2, N // 2), (N // 2, 1))
    own = session.zeros(N)
    before = session.counters()
    launch = saxpy.prepare(LINE).launch if prepared else lambda *arguments: saxpy.launch(LINE, *arguments)
    launch(lent[1], lent[0], 2.0, N)
    launch(own, lent[1], 1.0, N)
    launch(lent[1], own, 1.0, N)
    after = session.counters()
    assert (after.launches - before.launches, after.events_recorded, after.host_waits) == (
        3, before.events_recorded, before.host_waits,
    )  # fmt: skip
    assert session.to_host(own).tolist() == [7.0] * N
    assert theirs.to_host(y).tolist() == [14.0] * N
    assert theirs.to_host(x).tolist() == [3.0] * N


def test_an_offset_counts(session, theirs, saxpy, lender):
    x = theirs.from_host(np.arange(2 * N, dtype=np.float32))
    theirs.synchronize()
    own = session.zeros(N)
    saxpy.launch(LINE, own, lender.Lent(address_of(theirs, x), (N,), byte_offset=4 * N), 1.0, N)
    assert session.to_host(own).tolist() == list(range(N, 2 * N))


def test_more_than_a_few(session, theirs, raw, lender):
    """Twenty of them in one launch; each arrives as its own pointer."""
    function = many_pointers(raw)
    parts = [full(theirs, i, 200, "u8") for i in range(20)]
    addresses = [address_of(theirs, part) for part in parts]
    own = session.zeros(200, "u8")
    lent = [lender.Lent(address, (200,), code=1, bits=8) for address in addresses[1:]]
    before = lender.asked()[0]
    function.launch(kina.LaunchConfig(1, 1), own, *lent)
    assert [a - b for a, b in zip(lender.asked()[0], before, strict=True)] == [19, 1]
    words = np.frombuffer(session.to_host(own).tobytes(), np.uint64)
    assert words[1:20].tolist() == addresses[1:]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, N, 1), (2, 1, 4)])
@pytest.mark.parametrize("strides", ["none", "C", "odd ones"])
def test_compact_shapes(session, theirs, saxpy, lender, shape, strides):
    """Strides of axes that have at most one element mean nothing; nor do any where there is no element."""
    x = full(theirs, 3.0)
    given = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    if strides == "odd ones":
        given = [-77 if extent == 1 or 0 in shape else step for extent, step in zip(shape, given, strict=True)]
    size = int(np.prod(shape))
    address = address_of(theirs, x) if size else 0
    lent = lender.Lent(address, shape, None if strides == "none" else given)
    own = session.zeros(N)
    saxpy.launch(LINE, own, lent, 1.0, size)
    assert session.to_host(own).tolist() == [3.0] * size + [0.0] * (N - size)


@pytest.mark.parametrize("device", [PINNED, MANAGED])
def test_memory_within_reach(session, saxpy, lender, device):
    """As `adopt` takes it: pinned memory, and managed memory of the device."""
    kind = kina.memory.PinnedMemoryResource if device == PINNED else kina.memory.ManagedMemoryResource
    buffer = kind().allocate(4 * N)
    view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * N).from_address(buffer.unsafe_address()))
    view[:] = 3.0
    own = session.zeros(N)
    saxpy.launch(LINE, own, lender.Lent(buffer.unsafe_address(), (N,), device=device), 1.0, N)
    assert session.to_host(own).tolist() == [3.0] * N


# Order ----------------------------------------------------------------------------------------------------


def test_the_launch_waits_for_the_librarys_stream(session, theirs, saxpy, lender):
    x, own = full(theirs, 1.0), session.zeros(N)
    session.synchronize()
    lent = lender.Lent(address_of(theirs, x), (N,))
    handle = stream_of(theirs)
    lender.works_on(handle)
    with theirs.raw() as theirs_raw:
        fill = theirs_raw.module(KERNELS).function("fill", "mut f32[], f32, u32")
        with stalled(theirs):
            fill.launch(LINE, x, 5.0, N)
            before = session.counters()
            saxpy.launch(LINE, own, lent, 1.0, N)
            after = session.counters()
    assert session.to_host(own).tolist() == [5.0] * N
    assert after.events_recorded == before.events_recorded + 1
    assert after.host_waits == before.host_waits


def test_each_library_is_asked_once_and_each_stream_waited_for_once(session, theirs, raw, lender):
    function = many_pointers(raw)
    buffer = full(theirs, 0, 200 * 20, "u8")
    start = address_of(theirs, buffer)
    streams = [ForeignStream() for _ in range(2)]
    for number, stream in enumerate(streams):
        lender.works_on(stream.handle, number)
    make = [lender.Lent, lender.Other]
    lent = [make[i % 2](start + 200 * i, (200,), code=1, bits=8) for i in range(20)]
    asked, before = lender.asked(), session.counters()
    function.launch(kina.LaunchConfig(1, 1), *lent)
    assert session.counters().events_recorded == before.events_recorded + 2
    assert [lender.asked()[i][1] - asked[i][1] for i in range(2)] == [1, 1]
    session.synchronize()
    for stream in streams:
        stream.destroy()


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_stream_under_both_of_its_names(session, theirs, saxpy, lender, handle):
    x = full(theirs, 3.0)
    lender.works_on(handle)
    own, before = session.zeros(N), session.counters().events_recorded
    saxpy.launch(LINE, own, lender.Lent(address_of(theirs, x), (N,)), 1.0, N)
    assert session.counters().events_recorded == before + 1
    assert session.to_host(own).tolist() == [3.0] * N


def test_pinned_memory_is_ordered_too(session, saxpy, lender):
    """The device may be writing it, on the library's stream."""
    buffer = kina.memory.PinnedMemoryResource().allocate(4 * N)
    stream = ForeignStream()
    lender.works_on(stream.handle)
    own, before = session.zeros(N), session.counters().events_recorded
    saxpy.launch(LINE, own, lender.Lent(buffer.unsafe_address(), (N,), device=PINNED), 1.0, N)
    assert session.counters().events_recorded == before + 1
    session.synchronize()
    stream.destroy()


# Lifetime -------------------------------------------------------------------------------------------------


def until(condition):
    import time

    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def test_the_owner_lives_until_the_device_is_done(session, theirs, saxpy, lender):
    x, own = full(theirs, 3.0), session.zeros(N)
    session.synchronize()
    before = lender.alive()
    lent = lender.Lent(address_of(theirs, x), (N,))
    with stalled(session):
        saxpy.launch(LINE, own, lent, 1.0, N)
        witness = session.completion()
        del lent
        gc.collect()
        assert lender.alive() == before + 1
    witness.wait()
    session.synchronize()
    until(lambda: lender.alive() == before)
    assert session.counters().pending == 0


def test_a_loop_leases_each_owner_once(session, theirs, saxpy, lender):
    x, y = full(theirs, 1.0), full(theirs, 0.0)
    lent = [lender.Lent(address_of(theirs, each), (N,)) for each in (y, x)]
    saxpy.launch(LINE, *lent, 1.0, N)
    before = session.counters().leases
    for _ in range(100):
        saxpy.launch(LINE, *lent, 1.0, N)
    assert session.counters().leases == before
    session.synchronize()
    assert theirs.to_host(y).tolist() == [101.0] * N


def test_many_owners_are_dropped_once(session, theirs, saxpy, lender):
    """More than a segment holds."""
    x, own = full(theirs, 1.0), session.zeros(N)
    address, before = address_of(theirs, x), lender.alive()
    for _ in range(2000):
        saxpy.launch(LINE, own, lender.Lent(address, (N,)), 1.0, N)
    session.synchronize()
    until(lambda: lender.alive() == before)
    assert session.to_host(own).tolist() == [2000.0] * N


def test_leaving_the_session_gives_it_back(theirs, lender):
    """The reaper drops it, though nobody uses kina any more."""
    x = full(theirs, 1.0)
    before = lender.alive()
    with kina.session(kina.Runtime(0)) as session, session.raw() as raw:
        saxpy = raw.module(KERNELS).function("saxpy", SAXPY)
        lender.works_on(stream_of(session))
        saxpy.launch(LINE, session.zeros(N), lender.Lent(address_of(theirs, x), (N,)), 1.0, N)
    until(lambda: lender.alive() == before)


def test_a_graph_keeps_it(session, theirs, saxpy, lender):
    x, own = full(theirs, 3.0), session.zeros(N)
    before = lender.alive()
    with session.capture() as graph:
        saxpy.launch(LINE, own, lender.Lent(address_of(theirs, x), (N,)), 1.0, N)
    session.synchronize()
    gc.collect()
    assert lender.alive() == before + 1
    for _ in range(2):
        graph.launch(session)
    assert session.to_host(own).tolist() == [6.0] * N
    del graph
    session.synchronize()
    until(lambda: lender.alive() == before)


def test_another_stream_cannot_come_into_a_capture(session, theirs, saxpy, lender):
    x, own = full(theirs, 3.0), session.zeros(N)
    lent = lender.Lent(address_of(theirs, x), (N,))
    stream = ForeignStream()
    lender.works_on(stream.handle)
    with session.capture() as graph:
        with pytest.raises(kina.UnsupportedError, match="being captured") as caught:
            saxpy.launch(LINE, own, lent, 1.0, N)
        assert caught.value.operation == "launch"
        lender.works_on(stream_of(session))
        saxpy.launch(LINE, own, lent, 1.0, N)
    graph.launch(session)
    assert session.to_host(own).tolist() == [3.0] * N
    stream.destroy()


def test_it_stays_at_exit(library):
    """Silent, with one in flight."""

    def body(path):
        import importlib.util

        spec = importlib.util.spec_from_file_location("lender", path)
        lender = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(lender)
        session = kina.session("cuda:0")
        session.__enter__()
        raw = session.raw()
        raw.__enter__()
        function = raw.module(KERNELS).function("saxpy", "mut f32[], f32[], f32, u32")
        tensor = session.zeros(8)
        lender.works_on(raw.unsafe_stream_handle())
        address = raw.unsafe_address(raw.ref(session.full(8, 1.0)))
        function.launch(kina.LaunchConfig(1, 8), tensor, lender.Lent(address, (8,)), 1.0, 8)

    run_body(body, library)


# Refusals -------------------------------------------------------------------------------------------------

REFUSED = {
    "dtype": ({"bits": 64}, kina.DTypeError, "argument 1 of saxpy is declared float32, got float64"),
    "kind": ({"code": 0}, kina.DTypeError, "declared float32, got int32"),
    "lanes": ({"lanes": 2}, kina.DTypeError, "lanes=2"),
    "unknown dtype": ({"code": 99}, kina.DTypeError, "code=99"),
    "host": ({"device": HOST}, kina.ForeignDeviceError, "device type 1"),
    "another device": ({"id": 1}, kina.ForeignDeviceError, "cuda:1"),
    "managed elsewhere": ({"device": MANAGED, "id": 1}, kina.ForeignDeviceError, "cuda:1"),
    "unknown device": ({"device": 77}, kina.DLPackError, "argument 1 of saxpy: device: unknown device type 77"),
    "zero strides": ({"strides": (0,)}, kina.NonContiguousError, r"strides \(0,\)"),
    "gaps": ({"strides": (2,)}, kina.NonContiguousError, r"shape \(8,\) with strides \(2,\)"),
    "backwards": ({"strides": (-1,)}, kina.NonContiguousError, r"strides \(-1,\)"),
    "transposed": ({"shape": (2, 4), "strides": (1, 2)}, kina.NonContiguousError, r"strides \(1, 2\)"),
    "ndim": ({"ndim": -2}, kina.DLPackError, "argument 1 of saxpy: ndim: -2"),
    "many axes": ({"ndim": 10**6}, kina.DLPackError, "ndim: 1000000"),
    "no shape": ({"shape": None, "ndim": 2}, kina.DLPackError, "shape: NULL with 2 axes"),
    "negative extent": ({"shape": (-8,)}, kina.DLPackError, r"shape: \(-8,\) has a negative extent"),
    "empty and negative": ({"shape": (0, -8)}, kina.DLPackError, "negative extent"),
    "too many": ({"shape": (2**32, 2**32)}, kina.DLPackError, "more elements"),
    "far too many": ({"shape": (2**62, 2**62, 2)}, kina.DLPackError, "more elements"),
    "no data": ({"address": 0}, kina.DLPackError, "data: NULL with 8 elements"),
    "no data, but an offset": ({"address": 0, "byte_offset": 64}, kina.DLPackError, "data: NULL"),
    "offset": ({"byte_offset": 2**64 - 4}, kina.DLPackError, "byte_offset: 18446744073709551612 leads out"),
    "end": ({"address": 2**64 - 8}, kina.DLPackError, "leads out of the address space"),
    "misaligned": ({"byte_offset": 2}, kina.DLPackError, "data: a float32 has addresses that are multiples of 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("written", [False, True])
def test_what_is_refused(session, theirs, saxpy, lender, case, written):
    wrong, error, match = REFUSED[case]
    x, own = full(theirs, 3.0), session.zeros(N)
    good = {"address": address_of(theirs, x), "shape": (N,)}
    lent = lender.Lent(**good | wrong)
    stream = ForeignStream()
    lender.works_on(stream.handle)  # not waited for either
    arguments = (lent, own) if written else (own, lent)
    events = session.counters().events_recorded
    with nothing_enqueued(session), pytest.raises(error, match=match.replace("argument 1", f"argument {1 - written}")):
        saxpy.launch(LINE, *arguments, 1.0, N)
    assert session.counters().events_recorded == events
    saxpy.launch(LINE, own, lender.Lent(**good), 1.0, N)
    assert session.to_host(own).tolist() == [3.0] * N
    stream.destroy()


@pytest.mark.parametrize("bit", ["requires_grad", "is_neg", "is_conj"])
def test_lazy_tensors(session, theirs, raw, lender, bit):
    kind, code = ("c64", 5) if bit == "is_conj" else ("f32", 2)
    function = raw.module(KERNELS).function("saxpy", f"mut {kind}[], {kind}[], f32, u32")
    x, own = full(theirs, 0, N, kind), session.zeros(N, kind)
    value = True if bit == "requires_grad" else (lambda self: True)
    lazy = type("Lazy", (lender.Lent,), {bit: value})(address_of(theirs, x), (N,), code=code, bits=x.dtype.itemsize * 8)
    cure = {"requires_grad": "detach", "is_neg": "resolve_neg", "is_conj": "resolve_conj"}[bit]
    with nothing_enqueued(session), pytest.raises(kina.DLPackError, match=rf"argument 1 of saxpy: .*call \.{cure}\(\)"):
        function.launch(LINE, own, lazy, 1.0, N)


def test_overlaps(session, theirs, saxpy, raw, lender):
    x = full(theirs, 3.0, 2 * N)
    start = address_of(theirs, x)
    first, middle, last = (lender.Lent(start + 4 * at, (N,)) for at in (0, 1, N))
    own = session.zeros(N)
    own_too = lender.Lent(address_of(session, own), (N,))
    for arguments in ((first, middle), (middle, first), (first, first), (own, own_too), (own_too, own)):
        with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match=r"arguments 0 and 1 .* overlap"):
            saxpy.launch(LINE, *arguments, 1.0, N)
    saxpy.launch(LINE, first, last, 1.0, N)
    empty = lender.Lent(start, (0,))
    saxpy.launch(LINE, first, empty, 1.0, 0)
    ref = raw.ref(own)
    with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match="overlaps a ref"):
        saxpy.launch(LINE, own_too, last, 1.0, N)
    saxpy.launch(LINE, first, own_too, 1.0, N)
    ref.release()
    mut = raw.mut(own)
    for arguments in ((own_too, last), (first, own_too)):
        with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match="overlaps a mut"):
            saxpy.launch(LINE, *arguments, 1.0, N)
    mut.release()


def test_a_refused_launch_waits_for_nobody(session, theirs, saxpy, lender):
    lent = lender.Lent(address_of(theirs, full(theirs, 3.0)), (N,))
    stream = ForeignStream()
    lender.works_on(stream.handle)
    before = session.counters().events_recorded
    with nothing_enqueued(session), pytest.raises(kina.InvalidLayoutError, match="overlap"):
        saxpy.launch(LINE, lent, lent, 1.0, N)
    assert session.counters().events_recorded == before
    stream.destroy()


def test_other_objects(session, theirs, saxpy, raw, lender):
    x, own = full(theirs, 3.0), session.zeros(N)
    lent = lender.Lent(address_of(theirs, x), (N,))
    owning = lender.Owning(address_of(theirs, x), (N,))
    for wrong, error, match in (
        (np.zeros(N, np.float32), kina.ArgumentError, "got ndarray: session.from_host uploads"),
        (None, kina.ArgumentError, "got NoneType"),
        (3.0, kina.ArgumentError, "got float"),
        (owning, kina.DLPackError, "a Owning lends no tensor"),
    ):
        for arguments in ((own, wrong), (lent, wrong), (wrong, lent)):
            with nothing_enqueued(session), pytest.raises(error, match=match):
                saxpy.launch(LINE, *arguments, 1.0, N)
    with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match="is a scalar float32"):
        saxpy.launch(LINE, own, lent, lent, N)
    untyped = raw.module(KERNELS).function("saxpy")
    with nothing_enqueued(session), pytest.raises(kina.ArgumentError, match="without a signature only"):
        untyped.launch(LINE, raw.mut(own), lent, kina.f32(1), kina.u32(N))


@pytest.mark.parametrize("when", ["borrow", "stream"])
def test_a_library_that_raises(session, theirs, saxpy, lender, when):
    x, own = full(theirs, 3.0), session.zeros(N)
    lent = lender.Lent(address_of(theirs, x), (N,))

    def break_off(_):
        raise ZeroDivisionError("not now")

    lender.runs(*((break_off, None) if when == "borrow" else (None, break_off)))
    with nothing_enqueued(session), pytest.raises(kina.DLPackError, match="not now") as caught:
        saxpy.launch(LINE, own, lent, 1.0, N)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    lender.runs(None, None)
    saxpy.launch(LINE, own, lent, 1.0, N)
    assert session.to_host(own).tolist() == [3.0] * N


# Anybody's code -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["borrow", "stream", "lazy"])
def test_a_launch_of_the_same_function_in_between(session, theirs, saxpy, lender, when):
    """It packs its own arguments, and seals what was leased."""
    x, y, own, other = full(theirs, 3.0), full(theirs, 1.0), session.zeros(N), session.zeros(N)
    addresses = address_of(theirs, x), address_of(theirs, y)
    depth = []

    def nested(_):
        if not depth:
            depth.append(1)
            saxpy.launch(LINE, other, lender.Lent(addresses[1], (N,)), 10.0, N)
            session.completion().wait()
            gc.collect()

    class Watched(lender.Lent):
        @property
        def requires_grad(self):
            if when == "lazy":
                nested(self)
            return False

    if when != "lazy":
        lender.runs(*((nested, None) if when == "borrow" else (None, nested)))
    with stalled(theirs):  # it has nothing to do with it
        saxpy.launch(LINE, own, Watched(addresses[0], (N,)), 2.0, N)
    assert depth
    lender.runs(None, None)
    assert session.to_host(own).tolist() == [6.0] * N
    assert session.to_host(other).tolist() == [10.0] * N
    gc.collect()


@pytest.mark.parametrize("when", ["borrow", "stream"])
@pytest.mark.parametrize("what", ["block", "session", "ref"])
def test_its_code_ends_what_the_launch_needs(theirs, lender, when, what):
    session = kina.session(kina.Runtime(0))
    session.__enter__()
    raw = session.raw()
    raw.__enter__()
    saxpy = raw.module(KERNELS).function("saxpy", SAXPY)
    x, own = full(theirs, 3.0), session.zeros(N)
    lent = lender.Lent(address_of(theirs, x), (N,))
    lender.works_on(stream_of(session))
    mut = raw.mut(own)
    launches = session.counters().launches

    def end(_):
        {"block": lambda: raw.__exit__(None, None, None), "session": session.close, "ref": mut.release}[what]()

    lender.runs(*((end, None) if when == "borrow" else (None, end)))
    with pytest.raises(kina.SessionClosedError):
        saxpy.launch(LINE, mut, lent, 1.0, N)
    lender.runs(None, None)
    if what == "ref":
        raw.__exit__(None, None, None)
    if what != "session":
        assert session.counters().launches == launches
        session.close()


def test_its_code_begins_a_capture(session, theirs, saxpy, lender):
    """What is packed after that belongs to the graph."""
    x, own = full(theirs, 3.0), session.zeros(N)
    lent, before = lender.Lent(address_of(theirs, x), (N,)), lender.alive()
    capture = session.capture()
    graphs = []
    lender.runs(lambda _: graphs or graphs.append(capture.__enter__()), None)
    saxpy.launch(LINE, own, lent, 1.0, N)
    lender.runs(None, None)
    capture.__exit__(None, None, None)
    del lent
    gc.collect()
    assert lender.alive() == before
    graphs[0].launch(session)
    assert session.to_host(own).tolist() == [3.0] * N


@pytest.mark.simulated
def test_without_host_memory_for_the_wait(session, theirs, saxpy, lender, sim):
    """The wait cannot be recorded: no launch, and the session goes on."""
    x, own = full(theirs, 3.0), session.zeros(N)
    lent = lender.Lent(address_of(theirs, x), (N,))
    stream = ForeignStream()
    lender.works_on(stream.handle)
    for call in ("cuEventRecord", "cuStreamWaitEvent"):
        with sim.failing(call, result=1), nothing_enqueued(session), pytest.raises(kina.KinaError):
            saxpy.launch(LINE, own, lent, 1.0, N)
    saxpy.launch(LINE, own, lent, 1.0, N)
    assert session.to_host(own).tolist() == [3.0] * N
    stream.destroy()
