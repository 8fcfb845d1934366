"""One suite over every memory resource and over compositions of them; then buffers, faces and who serves."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import operator
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers.processes import run_python
from helpers.resources import PythonResource, c_resource

import kina
from kina import memory

KIB, MIB = 1 << 10, 1 << 20
BAD_SIZES = [
    (-1, kina.InvalidShapeError),
    (2**63, kina.InvalidShapeError),
    (2**64 + 5, kina.InvalidShapeError),
    (-(2**70), kina.InvalidShapeError),
    (True, kina.ArgumentError),
    (1.0, kina.ArgumentError),
    ("8", kina.ArgumentError),
    (None, kina.ArgumentError),
]


@pytest.fixture(scope="session")
def in_c(tmp_path_factory):
    return c_resource(tmp_path_factory.mktemp("c_resource"))


# Bottoms: each gives a resource and a function that says how many bytes of it are out. ---------------------


def host(_in_c):
    return memory.HostMemoryResource(), lambda: 0


def in_python(_in_c):
    made = PythonResource()
    live = made.live
    return made, lambda: sum(live.values())


def of_callbacks(_in_c):
    below = PythonResource()
    made = memory.CallbackMemoryResource(below._allocate, below._deallocate)
    return made, lambda: sum(below.live.values())


def of_c(in_c):
    capsule = in_c.make("")
    return memory.MemoryResource.from_capsule(capsule), lambda: in_c.figures(capsule)[0]


BOTTOMS = [host, in_python, of_callbacks, of_c]


class Passing(memory.MemoryResource):
    """An adaptor in Python."""

    def __init__(self, upstream: memory.MemoryResource) -> None:
        super().__init__(upstream=upstream)

    def _allocate(self, nbytes, stream):
        return self.upstream.unsafe_allocate(nbytes, stream)

    def _deallocate(self, address, nbytes, stream):
        self.upstream.unsafe_deallocate(address, nbytes, stream)


def logging_to(path: object) -> Callable:
    return lambda upstream: memory.LoggingMemoryResource(upstream, path)


ADAPTORS = {
    "statistics": memory.StatisticsMemoryResource,
    "limiting": lambda upstream: memory.LimitingMemoryResource(upstream, 1 << 40),
    "tracking": memory.TrackingMemoryResource,
    "tracking stacks": lambda upstream: memory.TrackingMemoryResource(upstream, stacks=True),
    "callback": lambda upstream: memory.FailureCallbackMemoryResource(upstream, lambda _nbytes: False),
    "logging": None,  # needs a file
    "pool": memory.PoolMemoryResource,
    "python": Passing,
}
COMPOSITIONS = [
    (),
    *((name,) for name in ADAPTORS),
    ("statistics", "limiting"),
    ("limiting", "statistics"),
    ("python", "tracking stacks"),
    ("callback", "limiting"),
    ("tracking", "logging"),
    ("statistics", "tracking", "limiting"),
    ("logging", "callback", "statistics"),
    ("python", "limiting", "python"),
    ("tracking", "python", "callback"),
    ("tracking", "pool", "statistics"),
    ("pool", "limiting"),
    ("pool", "python", "pool"),
    ("logging", "pool"),
]


def compose(names: tuple[str, ...], bottom: memory.MemoryResource, folder: object) -> memory.MemoryResource:
    """The first name is the outermost."""
    resource = bottom
    for level, name in enumerate(reversed(names)):
        resource = (ADAPTORS[name] or logging_to(folder / f"{level}.csv"))(resource)
    return resource


# Single adaptors over every bottom, deeper compositions over one that calls Python and one that does not.
STACKS = [
    (names, bottom) for names in COMPOSITIONS for bottom in BOTTOMS if len(names) < 2 or bottom in (in_python, of_c)
]


def name_of(value: object) -> str:
    return value.__name__ if callable(value) else " over ".join(value) or "alone"


@pytest.fixture(params=STACKS, ids=lambda stack: f"{name_of(stack[0])} over {name_of(stack[1])}")
def made(request, in_c, tmp_path) -> Iterator[tuple[memory.MemoryResource, Callable[[], int]]]:
    """A composition over a bottom, and how many bytes of the bottom are out."""
    names, bottom = request.param
    below, live_below = bottom(in_c)
    resource = compose(names, below, tmp_path)

    def live() -> int:
        trim_pools(resource)
        return live_below()

    yield resource, live
    settle()
    assert live() == 0


def trim_pools(resource: memory.MemoryResource | None) -> None:
    """What pools of the chain keep to themselves goes back, from the outermost on."""
    while resource is not None:
        if isinstance(resource, memory.PoolMemoryResource):
            resource.trim()
        resource = resource.upstream


def settle() -> None:
    """What was released where Python could not run is done after this."""
    memory.HostMemoryResource().allocate(0)


@pytest.fixture
def resource(made) -> memory.MemoryResource:
    return made[0]


@pytest.mark.parametrize("nbytes", [0, 1, KIB, MIB])
def test_sizes(resource, made, nbytes):
    buffer = resource.allocate(nbytes)
    assert (buffer.nbytes, len(buffer), buffer.device, buffer.freed) == (nbytes, nbytes, "cpu", False)
    assert buffer.resource is resource
    address = buffer.unsafe_address()
    assert address % 256 == 0
    assert (address == 0) == (nbytes == 0)
    view = memoryview(buffer)
    assert (view.nbytes, view.format, view.readonly) == (nbytes, "B", False)
    view[:] = bytes(nbytes)
    view[-1:] = b"x" * min(nbytes, 1)
    assert np.frombuffer(buffer, np.uint8).sum() == (ord("x") if nbytes else 0)
    del view
    buffer.free()
    assert buffer.freed
    assert made[1]() == 0


def test_live_memory_is_distinct(resource):
    buffers = [resource.allocate(nbytes) for nbytes in (1, 255, 256, 257, 1000, KIB, 3 * KIB)]
    spans = sorted((buffer.unsafe_address(), buffer.nbytes) for buffer in buffers)
    for (address, nbytes), (following, _) in itertools.pairwise(spans):
        assert address + nbytes <= following
    for number, buffer in enumerate(buffers):
        memoryview(buffer)[:] = bytes([number]) * buffer.nbytes
    for number, buffer in enumerate(buffers):
        assert set(bytes(buffer)) == {number}


def test_dropping_frees(resource, made):
    buffer = resource.allocate(KIB)
    before = made[1]()
    del buffer
    assert made[1]() in (0, before - KIB)


def test_freed_on_another_thread(resource, made):
    buffers = [resource.allocate(KIB) for _ in range(4)]
    thread = threading.Thread(target=lambda: [buffer.free() for buffer in buffers])
    thread.start()
    thread.join()
    assert all(buffer.freed for buffer in buffers)
    assert made[1]() == 0


@pytest.mark.parametrize(("names", "bottom"), STACKS, ids=name_of)
def test_every_face_may_go_first(names, bottom, in_c, tmp_path, host):
    """The memory keeps what it needs, all the way down."""
    resource, live = bottom(in_c)
    resource = compose(names, resource, tmp_path)
    chain = repr(resource)
    gone = weakref.ref(resource)
    buffer = resource.allocate(KIB)
    tensor = buffer.tensor(16)
    from_session = host.full(4, 3.0, memory=resource)
    del resource
    assert repr(buffer.resource) == chain
    memoryview(buffer)[:] = b"y" * KIB
    buffer.resource.allocate(8).free()
    del buffer
    settle()
    assert host.to_host(tensor).tobytes() == b"y" * 64
    assert host.to_host(from_session).tolist() == [3.0] * 4
    del tensor, from_session
    settle()
    assert gone() is None
    assert live() == 0


def test_a_tensor_keeps_what_it_needs(resource, made, host):
    tensor = resource.allocate(40).tensor((2, 5))
    assert (tensor.shape, tensor.device, tensor.runtime_identity) == ((2, 5), "cpu", host.runtime_identity)
    two = host.full((2, 5), 2.0, memory=resource)
    tensor = host.add(two, host.multiply(two, two, out=tensor))
    assert host.to_host(tensor).tolist() == [[6.0] * 5] * 2
    exported = np.from_dlpack(two)
    del two
    assert exported.sum() == 20
    del exported, tensor
    assert made[1]() == 0


@pytest.mark.parametrize(("nbytes", "error"), BAD_SIZES)
def test_bad_sizes(resource, made, nbytes, error):
    for attempt in (resource.allocate, resource.unsafe_allocate):
        with pytest.raises(error, match="allocate: "):
            attempt(nbytes)
    assert made[1]() == 0


def test_more_than_there_is(resource, made):
    with pytest.raises(MemoryError) as caught:  # kina's own is one too
        resource.allocate(1 << 62)
    assert getattr(caught.value, "requested", None) in (None, 1 << 62)
    assert resource.allocate(8).nbytes == 8
    assert made[1]() == 0


def test_sizes_may_be_indices(resource):
    assert resource.allocate(np.int64(24)).nbytes == 24


def test_a_stream_is_refused(resource):
    assert resource.supports_streams is False
    with pytest.raises(kina.ArgumentError, match="not ordered by streams"):
        resource.allocate(8, object())
    buffer = resource.allocate(8)
    with pytest.raises(kina.ArgumentError, match="not ordered by streams"):
        buffer.free(1)
    assert not buffer.freed


def test_freeing_twice(resource):
    buffer = resource.allocate(100)
    buffer.free()
    for use in (buffer.free, buffer.unsafe_address, lambda: buffer.tensor(1), buffer.__dlpack__):
        with pytest.raises(kina.SessionClosedError, match=r"100 bytes of .* was freed .* s ago by thread 'MainThread'"):
            use()
    with pytest.raises(kina.SessionClosedError):
        memoryview(buffer)
    assert "freed" in repr(buffer)
    assert (buffer.nbytes, buffer.device) == (100, "cpu")


def test_unsafe_addresses(resource, made):
    address = resource.unsafe_allocate(KIB)
    assert address % 256 == 0
    resource.unsafe_deallocate(address, KIB)
    assert resource.unsafe_allocate(0) == 0
    resource.unsafe_deallocate(0, 0)
    assert made[1]() == 0


def test_many_threads(resource, made):
    failures = []

    def work(seed: int) -> None:
        try:
            kept = []
            for turn in range(60):
                buffer = resource.allocate((seed * 37 + turn * 13) % 500)
                memoryview(buffer)[:] = bytes([seed]) * buffer.nbytes
                kept.append(buffer)
                if turn % 3 == 0:
                    first = kept.pop(0)
                    assert set(bytes(first)) <= {seed}
                    first.free()
                if turn % 7 == 0:
                    del kept[: len(kept) // 2]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert made[1]() == 0


def test_what_it_says_of_itself(resource):
    assert resource.device == "cpu"
    assert repr(resource).startswith(f"<kina.memory {resource.name}")
    below = resource.upstream
    while below is not None:
        assert below.name in repr(resource)
        below = below.upstream


def test_it_is_not_copied(resource):
    buffer = resource.allocate(8)
    for thing in (resource, buffer):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cop"):
                attempt(thing)


def test_a_thread_that_python_never_saw(resource, made, in_c, host):
    """It allocates and frees in C, without the GIL, which resources in Python take or wait for."""
    tensor = host.zeros(2, memory=resource)
    capsule = tensor.to_dlpack(versioned=False)
    before = made[1]()
    for _ in range(3):
        assert in_c.pair_elsewhere(capsule, 100) == 0
    settle()
    assert made[1]() == before
    assert in_c.pair_elsewhere(capsule, 1 << 62) == kina.OutOfMemoryError.detail
    del capsule, tensor


@pytest.mark.parametrize("names", COMPOSITIONS, ids=name_of)
def test_a_cycle_is_collected(names, tmp_path):
    """A resource in Python that keeps its own buffers: whole when it gets them back."""
    given, lost = [], []

    class Keeping(PythonResource):
        def __init__(self) -> None:
            super().__init__()
            self.kept = []

        def _allocate(self, nbytes, stream):
            given.append(nbytes)
            return super()._allocate(nbytes, stream)

        def _deallocate(self, address, nbytes, stream):
            super()._deallocate(address, nbytes, stream)
            lost.append(nbytes)

    keeping = Keeping()
    outer = compose(names, keeping, tmp_path)
    keeping.kept += [outer.allocate(1), keeping.allocate(2), outer.allocate(3), outer]
    gone = weakref.ref(keeping)
    del keeping, outer
    gc.collect()
    assert gone() is None
    assert sorted(lost) == sorted(given)
    assert "pool" in names or sorted(lost) == [1, 2, 3]


def test_the_host_says_what_was_asked_for():
    with pytest.raises(kina.OutOfMemoryError) as caught:
        memory.HostMemoryResource().allocate(1 << 62)
    assert (caught.value.requested, caught.value.live) == (1 << 62, None)


# Resources in Python --------------------------------------------------------------------------------------


class Failing(memory.MemoryResource):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def _allocate(self, nbytes, stream):
        raise self.error

    def _deallocate(self, address, nbytes, stream):
        raise AssertionError("nothing was allocated")


@pytest.mark.parametrize("names", COMPOSITIONS, ids=name_of)
@pytest.mark.parametrize("error", [LookupError("mine"), MemoryError("none"), KeyboardInterrupt("now"),
                                   kina.OutOfMemoryError("full"), kina.DTypeError("odd")], ids=repr)  # fmt: skip
def test_exceptions_pass_through(names, error, tmp_path, host):
    resource = compose(names, Failing(error), tmp_path)
    for attempt in (
        lambda: resource.allocate(8),
        lambda: resource.unsafe_allocate(8),
        lambda: host.zeros(3, memory=resource),
    ):
        with pytest.raises(type(error)) as caught:
            attempt()
        assert caught.value is error
    # Nothing of it is left for the next failure.
    with pytest.raises(kina.OutOfMemoryError, match="beyond the limit"):
        memory.LimitingMemoryResource(memory.HostMemoryResource(), 1).allocate(2)


@pytest.mark.parametrize("answer", [None, "address", 1.5, True, 0, -256, 2**64, 2**70])
def test_bad_addresses(answer):
    resource = memory.CallbackMemoryResource(lambda _nbytes, _stream: answer, lambda *_: pytest.fail("not mine"))
    with pytest.raises(kina.ArgumentError, match="_allocate gave"):
        resource.allocate(8)


def test_a_misaligned_address_is_given_back():
    returned = []
    resource = memory.CallbackMemoryResource(lambda _nbytes, _stream: 4096 + 8, lambda *what: returned.append(what))
    with pytest.raises(kina.ArgumentError, match="0x1008, which is not aligned"):
        resource.allocate(8)
    assert returned == [(4104, 8, None)]


@contextlib.contextmanager
def unraisable() -> Iterator[list]:
    seen: list = []
    before, sys.unraisablehook = sys.unraisablehook, lambda what: seen.append((what.exc_value, what.object))
    try:
        yield seen
    finally:
        sys.unraisablehook = before


def test_a_failing_deallocate_is_unraisable():
    class Bad(PythonResource):
        def _deallocate(self, address, nbytes, stream):
            super()._deallocate(address, nbytes, stream)
            raise LookupError("lost")

    bad = Bad()
    with unraisable() as seen:
        bad.allocate(8).free()
    assert [(type(error), str(error)) for error, _ in seen] == [(LookupError, "lost")]
    assert seen[0][1] is bad


def test_an_exception_under_way_is_left_alone():
    resource = PythonResource()

    def fail():
        buffer = resource.allocate(8)
        raise LookupError(buffer.nbytes)

    with pytest.raises(LookupError, match="8"):
        fail()
    assert resource.live == {}


def test_a_subclass_needs_both_methods():
    class Half(memory.MemoryResource):
        def _allocate(self, nbytes, stream):
            return 256

    for kind in (memory.MemoryResource, Half):
        with pytest.raises(TypeError, match="implements _allocate and _deallocate"):
            kind()
    with pytest.raises(TypeError):
        memory.LimitingMemoryResource.__new__(memory.LimitingMemoryResource).allocate(8)


def test_a_subclass_need_not_call_init():
    class Bare(PythonResource):
        def __init__(self) -> None:
            self.live, self.asked = {}, 0

    bare = Bare()
    bare.allocate(8).free()
    assert (bare.asked, bare.live, bare.name, bare.device, bare.upstream) == (1, {}, "Bare", "cpu", None)


def test_initialising_twice():
    resource = PythonResource()
    with pytest.raises(kina.ArgumentError, match="initialised already"):
        memory.MemoryResource.__init__(resource)
    resource.allocate(8).free()
    limited = memory.LimitingMemoryResource(resource, 100)
    with pytest.raises(kina.ArgumentError, match="initialised already"):
        limited.__init__(resource, 5)
    assert limited.limit_bytes == 100


def test_devices_of_resources_in_python():
    def refused(*_):
        raise AssertionError

    far = memory.CallbackMemoryResource(lambda *_: 4096, lambda *_: None, device="cuda:3")
    assert far.device == "cuda:3"
    buffer = memory.StatisticsMemoryResource(far).allocate(8)
    assert (buffer.device, buffer.__dlpack_device__()) == ("cuda:3", (2, 3))
    with pytest.raises(BufferError):
        memoryview(buffer)
    for use in (lambda: buffer.tensor(2), buffer.__dlpack__):
        with pytest.raises(kina.UnsupportedError, match="memory without a session"):
            use()
    for name in ("tpu", "cuda:", "cuda:x", "cuda:-1", 7, None, b"cpu"):
        with pytest.raises(kina.InvalidConfigError, match="names no device"):
            memory.CallbackMemoryResource(refused, refused, device=name or "none")


def test_callbacks_are_called():
    for pair in ((None, print), (print, 3)):
        with pytest.raises(kina.ArgumentError, match="callable"):
            memory.CallbackMemoryResource(*pair)


def test_released_where_python_cannot_run(in_c, host):
    """The last reference goes on a thread without the GIL, which somebody else holds."""
    resource = PythonResource()
    gone = weakref.ref(resource)
    tensor = host.empty(4, memory=memory.StatisticsMemoryResource(resource))
    live = resource.live
    capsule = tensor.to_dlpack(versioned=False)
    del tensor, resource
    assert gone() is not None
    in_c.consume_elsewhere(capsule)
    host.empty(1)
    assert live == {}
    gc.collect()
    assert gone() is None


# Resources in C -------------------------------------------------------------------------------------------


def test_a_resource_in_c(in_c):
    capsule = in_c.make("")
    before = in_c.count()
    resource = memory.MemoryResource.from_capsule(capsule)
    again = memory.MemoryResource.from_capsule(capsule)
    assert (resource.name, resource.device, resource.upstream) == ("counting", "cpu", None)
    buffer = memory.StatisticsMemoryResource(resource).allocate(24)
    again.allocate(0)
    assert in_c.figures(capsule)[:2] == (24, 1)
    del resource, again, capsule
    assert in_c.count() == before
    del buffer
    assert in_c.count() == before - 1


def test_a_failure_in_c_has_its_class(in_c):
    capsule = in_c.make("")
    in_c.fail(capsule)
    resource = memory.MemoryResource.from_capsule(capsule)
    for attempt in (resource.allocate, resource.unsafe_allocate):
        with pytest.raises(kina.OutOfMemoryError, match="counting could not allocate 8 bytes"):
            attempt(8)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("newer", kina.UnsupportedError, "version 2 of the interface, this is version 1"),
        ("on the moon", kina.UnsupportedError, "device type 99"),
        ("partial", kina.ArgumentError, "lacks"),
        ("without a table", kina.ArgumentError, "no table"),
        ("misnamed", kina.ArgumentError, "a capsule named 'something_else'"),
    ],
)
def test_capsules_that_are_refused(in_c, what, error, words):
    with pytest.raises(error, match=words):
        memory.MemoryResource.from_capsule(in_c.make(what))
    for nothing in (None, 3, b"kina_resource"):
        with pytest.raises(kina.ArgumentError, match="is needed, not"):
            memory.MemoryResource.from_capsule(nothing)


def test_pinned_memory_is_the_hosts(in_c, host):
    pinned = memory.MemoryResource.from_capsule(in_c.make("pinned"))
    assert pinned.device == "cpu"
    tensor = host.zeros(4, memory=pinned)
    assert (tensor.device, host.to_host(tensor).tolist()) == ("cpu", [0] * 4)
    assert pinned.allocate(8).__dlpack_device__() == (3, 0)


# Buffers --------------------------------------------------------------------------------------------------


def test_a_buffer_is_not_made_by_hand():
    with pytest.raises(TypeError, match="cannot be constructed"):
        memory.Buffer()


def test_tensors_of_a_buffer(host):
    buffer = memory.HostMemoryResource().allocate(48)
    whole, part = buffer.tensor((3, 4)), buffer.tensor(5, "int8")
    assert host.to_host(host.add(whole, whole, out=whole)).shape == (3, 4)
    memoryview(buffer)[:5] = b"hello"
    assert host.to_host(part).tobytes() == b"hello"
    assert buffer.tensor(0).nbytes == 0
    for shape, dtype in ((13, "f32"), ((7, 1), "f64"), (49, "u8"), (-1, "u8"), (2**62, "f64")):
        with pytest.raises(kina.InvalidShapeError):
            buffer.tensor(shape, dtype)
    buffer.free()
    assert host.to_host(part).tobytes() == b"hello"


def test_buffers_speak_dlpack():
    buffer = memory.HostMemoryResource().allocate(16)
    array = np.from_dlpack(buffer)
    array[:] = np.arange(16)
    assert bytes(buffer) == bytes(range(16))
    buffer.free()
    assert array.tolist() == list(range(16))
    with pytest.raises(kina.DLPackError):
        memory.HostMemoryResource().allocate(1).__dlpack__(stream=5)


def test_a_view_keeps_the_memory():
    resource = PythonResource()
    buffer = resource.allocate(4)
    view = memoryview(buffer)
    buffer.free()
    view[:] = b"kept"
    assert bytes(view) == b"kept"
    assert len(resource.live) == 1
    del view
    resource.allocate(0)
    assert resource.live == {}


def test_two_threads_free_one_buffer():
    for _ in range(50):
        buffer = memory.HostMemoryResource().allocate(8)
        outcomes = []
        barrier = threading.Barrier(2)

        def free(buffer=buffer, outcomes=outcomes, barrier=barrier):
            barrier.wait()
            try:
                buffer.free()
                outcomes.append("freed")
            except kina.SessionClosedError:
                outcomes.append("too late")

        threads = [threading.Thread(target=free) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["freed", "too late"]


# Who serves -----------------------------------------------------------------------------------------------


@pytest.fixture
def resources():
    return [memory.StatisticsMemoryResource(memory.HostMemoryResource()) for _ in range(4)]


def totals(resources) -> list[int]:
    return [resource.counts().total_count for resource in resources]


@pytest.mark.parametrize(
    "make",
    [
        lambda s, **m: s.empty(3, **m),
        lambda s, **m: s.zeros(3, **m),
        lambda s, **m: s.full(3, 1.0, **m),
        lambda s, **m: s.from_host(np.arange(3), **m),
        lambda s, **m: s.copy(s.adopt(np.arange(3)), **m),
    ],
    ids=["empty", "zeros", "full", "from_host", "copy"],
)
def test_precedence(resources, make):
    of_call, used, of_session, default = resources
    memory.set_default_resource(default)
    try:
        with kina.session("cpu", memory=of_session) as s, kina.session("cpu") as plain:
            with memory.using(used):
                make(s, memory=of_call)
                assert totals(resources) == [1, 0, 0, 0]
                make(s)
                make(plain)
                assert totals(resources) == [1, 2, 0, 0]
            make(s)
            assert totals(resources) == [1, 2, 1, 0]
            make(plain)
            make(plain, memory=None)
            assert totals(resources) == [1, 2, 1, 2]
    finally:
        memory.set_default_resource(None)
    with kina.session("cpu") as s:
        make(s)
    assert totals(resources) == [1, 2, 1, 2]


@pytest.mark.parametrize("name", ["add", "multiply", "matmul"])
def test_results_of_operations(resources, name):
    _, used, of_session, _ = resources
    with kina.session("cpu", memory=of_session) as s:
        a = s.adopt(np.ones((2, 2), np.float32))
        getattr(s, name)(a, a)
        with memory.using(used):
            getattr(s, name)(a, a)
            getattr(s, name)(a, a, out=s.adopt(np.ones((2, 2), np.float32)))
    assert totals(resources) == [0, 1, 1, 0]


def test_using_without_a_session(resources):
    with memory.using(resources[0]) as scope:
        kina.zeros(3)
        kina.from_host([1.0])
        assert type(scope) is memory.ResourceScope
    kina.zeros(3)
    assert totals(resources) == [2, 0, 0, 0]


def test_current_resource(resources):
    assert memory.current_resource().name == "HostMemoryResource"
    assert memory.current_resource("cpu") is memory.current_resource()
    memory.set_default_resource(resources[0])
    try:
        assert memory.current_resource() is resources[0]
        with memory.using(resources[1]):
            assert memory.current_resource() is resources[1]
            with memory.using(resources[2]):
                assert memory.current_resource() is resources[2]
            assert memory.current_resource() is resources[1]
        assert memory.current_resource() is resources[0]
    finally:
        memory.set_default_resource(None, "cpu")
    assert memory.current_resource().name == "HostMemoryResource"


def test_using_is_of_its_thread(resources):
    seen = []
    with memory.using(resources[0]):
        thread = threading.Thread(target=lambda: seen.append(memory.current_resource().name))
        thread.start()
        thread.join()
    assert seen == ["HostMemoryResource"]


def test_exits_out_of_order(resources):
    first, second = memory.using(resources[0]), memory.using(resources[1])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert memory.current_resource() is resources[1]
    second.__exit__(None, None, None)
    assert memory.current_resource().name == "HostMemoryResource"
    with first:
        assert memory.current_resource() is resources[0]


def test_a_scope_is_entered_once_at_a_time(resources):
    scope = memory.using(resources[0])
    with pytest.raises(kina.ArgumentError, match="not been entered"):
        scope.__exit__(None, None, None)
    with scope, pytest.raises(kina.ArgumentError, match="entered already"):
        scope.__enter__()
    assert memory.current_resource().name == "HostMemoryResource"
    with pytest.raises(TypeError, match="using"):
        memory.ResourceScope()


def test_a_scope_left_in_another_thread(resources):
    scope = memory.using(resources[0])
    scope.__enter__()
    outcomes = []

    def leave():
        with pytest.raises(kina.WrongThreadError, match="given up"):
            scope.__exit__(None, None, None)
        outcomes.append(memory.current_resource().name)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert outcomes == ["HostMemoryResource"]
    assert memory.current_resource().name == "HostMemoryResource"


def test_a_thread_ends_inside_of_using():
    resource = PythonResource()
    gone = weakref.ref(resource)
    thread = threading.Thread(target=operator.methodcaller("__enter__"), args=(memory.using(resource),))
    del resource
    thread.start()
    thread.join()
    del thread
    for _ in range(500):  # the thread is joined before it has quite gone
        settle()
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None


def test_an_exception_leaves_using(resources):
    with pytest.raises(LookupError), memory.using(resources[0]):
        raise LookupError
    assert memory.current_resource().name == "HostMemoryResource"


def test_switching_the_default_while_others_allocate(host):
    stop = threading.Event()
    failures = []

    def allocate():
        try:
            while not stop.is_set():
                kina.zeros(16)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    kept = weakref.WeakSet()
    try:
        for _ in range(200):
            resource = PythonResource()
            kept.add(resource)
            memory.set_default_resource(memory.StatisticsMemoryResource(resource))
            del resource
    finally:
        memory.set_default_resource(None)
        stop.set()
        for thread in threads:
            thread.join()
    host.zeros(1)
    gc.collect()
    assert failures == []
    assert len(kept) == 0


def test_memory_of_another_device(in_c, host):
    far = memory.MemoryResource.from_capsule(in_c.make("on a GPU"))
    for use in (
        lambda: host.empty(3, memory=far),
        lambda: kina.session("cpu", memory=far),
        lambda: memory.set_default_resource(far),
    ):
        with pytest.raises(
            kina.ForeignDeviceError, match="counting hands out memory of cuda:1, memory of cpu is needed"
        ):
            use()


@pytest.mark.parametrize("wrong", [3, "cpu", object(), memory.HostMemoryResource])
def test_what_is_no_resource(host, wrong):
    for use in (
        lambda: host.empty(3, memory=wrong),
        lambda: kina.session("cpu", memory=wrong),
        lambda: memory.using(wrong),
        lambda: memory.set_default_resource(wrong),
        lambda: memory.StatisticsMemoryResource(wrong),
    ):
        with pytest.raises(kina.ArgumentError, match="MemoryResource"):
            use()
    with pytest.raises(kina.ArgumentError):
        memory.using(None)


def test_host_memory_for_a_device():
    here = memory.HostMemoryResource()
    with pytest.raises(kina.ForeignDeviceError, match="HostMemoryResource hands out memory of cpu, memory of cuda:0"):
        memory.set_default_resource(here, "cuda:0")
    for target in ("cuda:0", 0):
        # Before anything is opened; where kina was built without CUDA, that comes first.
        with pytest.raises((kina.ForeignDeviceError, kina.UnavailableError)):
            kina.session(target, memory=here)
    with pytest.raises(kina.InvalidConfigError):
        memory.current_resource("tpu")
    with pytest.raises(kina.InvalidConfigError):
        memory.set_default_resource(None, "tpu")


def test_each_device_has_its_own_innermost_block(in_c, host, resources):
    far = memory.MemoryResource.from_capsule(in_c.make("on a GPU"))
    outer, inner = resources[:2]
    with memory.using(outer):
        with memory.using(far):
            assert memory.current_resource() is outer
            assert memory.current_resource(1) is far
            with memory.using(inner):
                assert memory.current_resource() is inner
                assert memory.current_resource("cuda:1") is far
                host.empty(3)
        assert memory.current_resource() is outer
    assert totals([outer, inner]) == [0, 1]


def test_the_default_of_a_device(in_c):
    far, other = (memory.MemoryResource.from_capsule(in_c.make("on a GPU")) for _ in range(2))
    memory.set_default_resource(far, "cuda:1")
    try:
        assert memory.current_resource(1) is far
        assert memory.current_resource().name == "HostMemoryResource"
        with memory.using(other):
            assert memory.current_resource(1) is other
        memory.set_default_resource(other, 1)
        assert memory.current_resource(1) is other
    finally:
        memory.set_default_resource(None, "cuda:1")


def test_cuda_is_not_loaded_before_it_is_named():
    run_python(
        """
        import sys
        import kina.memory
        from kina.memory import HostMemoryResource, using
        with using(HostMemoryResource()):
            kina.zeros(3)
        assert not [name for name in sys.modules if name.startswith("kina.cuda")]
        assert "CudaMemoryResource" in dir(kina.memory)
        """
    )


# The process ----------------------------------------------------------------------------------------------

ALIVE = """
    import ctypes, gc, os, sys, tempfile, threading
    import kina
    from kina import memory
    libc = ctypes.CDLL(None)
    libc.aligned_alloc.restype = ctypes.c_void_p
    libc.aligned_alloc.argtypes = [ctypes.c_size_t] * 2
    libc.free.argtypes = [ctypes.c_void_p]
    class Mine(memory.MemoryResource):
        def _allocate(self, nbytes, stream):
            return libc.aligned_alloc(256, -(-nbytes // 256) * 256)
        def _deallocate(self, address, nbytes, stream):
            libc.free(address)
    path = tempfile.mkstemp(".csv")[1]
    bottom = Mine()
    log = memory.LoggingMemoryResource(bottom, path)
    top = memory.StatisticsMemoryResource(memory.TrackingMemoryResource(log, stacks=True))
    s = kina.session("cpu", memory=top); s.__enter__()
    kept = [top.allocate(8), s.zeros(3), bottom.allocate(3).tensor(3, "u8"), memoryview(top.allocate(4))]
    bottom.cycle = [bottom, top, kept, s]
"""


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "del kept, s, top, bottom",
        "sys.exit(0)",
        "gc.disable(); del bottom, top, log, kept",
        "import builtins; builtins.keep = kept",
        "memory.using(top).__enter__()",
        "memory.set_default_resource(top); kina.zeros(3)",
        "import atexit; atexit.register(lambda: kept.clear())",
        "threading.Thread(target=lambda: [top.allocate(5) for _ in range(100)]).start()",
        "t = threading.Thread(target=memory.using(top).__enter__); t.start(); t.join()",
        "wait = lambda: memory.using(top).__enter__() and threading.Event().wait(); "
        "threading.Thread(target=wait, daemon=True).start()",
    ],
)
def test_exit_is_silent(ending):
    assert run_python(ALIVE + "    " + ending) == ""


def test_what_was_logged_is_in_the_file_at_exit(tmp_path):
    run_python(ALIVE.replace('tempfile.mkstemp(".csv")[1]', repr(str(tmp_path / "log.csv"))))
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines] == ["Action", "allocate", "allocate", "allocate"]


@pytest.mark.parametrize("threads", [0, 4])
def test_a_forked_child(threads):
    """It goes on with every resource, writes no log, and leaves without a word; while others allocate, too."""
    run_python(
        ALIVE
        + f"    threads = {threads}"
        + """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, from Python 3.12 on
    stop = threading.Event()
    def work():
        while not stop.is_set():
            top.allocate(100)
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            before = log.records
            with memory.using(top):
                kina.zeros(5)
            top.allocate(6).free()
            kept.clear()
            log.flush()
            log.close()
            assert log.records == before
            mine = memory.LoggingMemoryResource(memory.HostMemoryResource(), path + ".child")
            mine.allocate(9)
            mine.close()
            with open(path + ".child") as lines:
                assert len(lines.readlines()) == 3
            os.unlink(path + ".child")
            assert "outstanding" in top.upstream.report()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    for worker in workers:
        worker.join()
    log.close()
    with open(path) as lines:
        assert len(lines.readlines()) == 1 + log.records
    """
    )
