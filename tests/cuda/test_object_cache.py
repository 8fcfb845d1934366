"""Objects that raw blocks of a Runtime share: made once, bounded, kept until the device is past their use."""

from __future__ import annotations

import gc
import weakref

import pytest
from helpers.cuda import in_thread, stalled
from helpers.kernels import fill_entry, module_text

import kina

GIB = 1 << 30
CONFIG = kina.LaunchConfig.linear(8)
IMAGE = module_text(fill_entry())


class Handle:
    """A handle of a library, say."""


def kinds(count: int) -> list[type]:
    return [type(f"Kind{number}", (Handle,), {}) for number in range(count)]


@pytest.fixture
def raw(session):
    with session.raw("objects") as opened:
        yield opened


def test_it_is_made_once_for_a_runtime(runtime):
    made = []

    def init() -> Handle:
        made.append(1)
        return Handle()

    with kina.session(runtime) as session:
        with session.raw("one") as raw:
            first = raw.resource(Handle, init)
            assert raw.resource(Handle, init) is first
        with session.raw("two") as raw:
            assert raw.resource(Handle, init) is first
    with kina.session(runtime) as session, session.raw("three") as raw:
        assert raw.resource(Handle, init) is first
    with kina.session(kina.Runtime(0)) as session, session.raw("other") as raw:
        assert raw.resource(Handle, init) is not first
    assert len(made) == 2


def test_classes_are_told_apart(raw):
    class Derived(Handle):
        pass

    derived, base = raw.resource(Derived, Derived), raw.resource(Handle, Handle)
    assert derived is not base
    assert raw.resource(Handle, Derived) is base
    assert raw.resource(Derived, Handle) is derived


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("Handle", Handle), "a class is needed"),
        ((Handle(), Handle), "a class is needed"),
        ((Handle, None), "cannot be"),
        ((Handle, object), "gave a object, not a Handle"),
        ((Handle, lambda: None), "gave a NoneType"),
    ],
)
def test_what_is_refused(raw, arguments, match):
    with pytest.raises(kina.ArgumentError, match=match):
        raw.resource(*arguments)
    assert raw.clear_resources() == 0


@pytest.mark.parametrize("nbytes", [-1, 1.5, "8", True, 2**62])
def test_sizes_that_are_none(raw, nbytes):
    with pytest.raises(kina.ArgumentError, match="nbytes"):
        raw.resource(Handle, Handle, nbytes=nbytes)


def test_what_init_raises_passes_through(raw):
    def fail() -> Handle:
        raise LookupError("as it is")

    for _ in range(2):
        with pytest.raises(LookupError, match="as it is"):
            raw.resource(Handle, fail)
    assert isinstance(raw.resource(Handle, Handle), Handle)


def test_init_may_ask_for_others_but_not_for_itself(raw):
    class Outer(Handle):
        def __init__(self) -> None:
            self.inner = raw.resource(Handle, Handle)

    assert raw.resource(Outer, Outer).inner is raw.resource(Handle, Handle)

    class Loop(Handle):
        def __init__(self) -> None:
            raw.resource(Loop, Loop)

    with pytest.raises(kina.ArgumentError, match="asks for a Loop itself"):
        raw.resource(Loop, Loop)


def test_the_least_recently_used_go_first(raw, session):
    classes = kinds(33)
    first = [weakref.ref(raw.resource(kind, kind)) for kind in classes[:32]]
    raw.resource(classes[0], classes[0])  # used again
    raw.resource(classes[32], classes[32])
    session.synchronize()
    gc.collect()
    assert [number for number, kept in enumerate(first) if kept() is None] == [1]
    assert raw.clear_resources() == 32


def test_declared_bytes_are_bounded(raw, session):
    a, b, c = kinds(3)
    kept = weakref.ref(raw.resource(a, a, nbytes=600 << 20))
    raw.resource(b, b, nbytes=400 << 20)
    assert kept() is not None
    raw.resource(c, c, nbytes=100 << 20)
    session.synchronize()
    assert kept() is None
    assert raw.clear_resources() == 2


def test_pinned_ones_stay_and_what_does_not_fit_is_not_made(raw, session):
    a, b, c = kinds(3)
    made = []
    kept = raw.resource(a, a, nbytes=GIB - 100, pinned=True)
    raw.resource(b, b, nbytes=100)
    with pytest.raises(kina.OutOfMemoryError, match="pinned") as caught:
        raw.resource(c, lambda: made.append(1), nbytes=101)
    assert (caught.value.requested, caught.value.live, caught.value.limit) == (101, GIB - 100, GIB)
    assert made == []
    assert raw.resource(b, None or b, nbytes=100) is raw.resource(b, b)  # nothing went for it
    with pytest.raises(kina.OutOfMemoryError):
        raw.resource(c, c, nbytes=GIB + 1)
    raw.resource(c, c, nbytes=100)
    assert raw.resource(a, a) is kept
    assert raw.clear_resources() == 2


def test_pinned_entries_are_bounded_too(raw):
    classes = kinds(33)
    for kind in classes[:32]:
        raw.resource(kind, kind, pinned=True)
    with pytest.raises(kina.OutOfMemoryError, match="32 of 32 entries"):
        raw.resource(classes[32], classes[32])


@pytest.mark.simulated
@pytest.mark.parametrize("way", ["clear", "evict", "close session", "drop runtime"])
def test_it_lives_until_the_device_is_past_its_use(way):
    runtime = kina.Runtime(0)
    session = kina.session(runtime).__enter__()
    y = session.zeros(8)
    session.synchronize()
    raw = session.raw("use").__enter__()
    fill = raw.module(IMAGE).function("fill")
    handle = weakref.ref(raw.resource(Handle, Handle))
    with stalled(session):
        fill.launch(CONFIG, raw.mut(y), kina.f32(1.0), kina.u32(8))
        if way == "clear":
            assert raw.clear_resources() == 1
        elif way == "evict":
            for kind in kinds(32):
                raw.resource(kind, kind)
        else:
            raw.__exit__(None, None, None)
            session.close()
        if way == "drop runtime":
            del raw, session, fill, y, runtime
        gc.collect()
        assert handle() is not None
        if way in ("clear", "evict"):
            raw.__exit__(None, None, None)
            session.close()
        gc.collect()
        assert handle() is not None
    if way == "close session":
        assert handle() is not None
        runtime.close()
    else:
        with kina.session(kina.Runtime(0)) as other:
            other.synchronize()
            other.empty(8)
        if way != "drop runtime":
            with kina.session(runtime) as again:
                again.synchronize()
    kina.memory.HostMemoryResource().allocate(0)  # what waits for the GIL
    gc.collect()
    assert handle() is None


def test_an_object_that_keeps_its_runtime_is_never_ended_under_the_device():
    """The collector of cycles would end it while it is in use; to close the Runtime breaks the cycle, after a wait."""
    ended = []

    class Keeper(Handle):
        def __init__(self, runtime) -> None:
            self.runtime = runtime

        def __del__(self) -> None:
            ended.append(True)

    runtime = kina.Runtime(0)
    with kina.session(runtime) as session, session.raw("cycle") as raw:
        raw.resource(Keeper, lambda: Keeper(runtime))
    del session, raw
    gc.collect()
    assert not ended
    runtime.close()
    gc.collect()
    assert ended


def test_it_belongs_to_its_block_and_thread(session):
    with session.raw("here") as raw:
        with pytest.raises(kina.WrongThreadError):
            in_thread(lambda: raw.resource(Handle, Handle))
        with pytest.raises(kina.WrongThreadError):
            in_thread(raw.clear_resources)
    for use in (lambda: raw.resource(Handle, Handle), raw.clear_resources):
        with pytest.raises(kina.SessionClosedError):
            use()
