"""The deleter of another library is called once, whoever goes last: in every order, on any thread, on exceptions."""

from __future__ import annotations

import ctypes
import gc
import threading
from itertools import permutations

import numpy as np
import pytest
from helpers.exchange import Table, delete, export, make_object
from helpers.managed import DELETER, Producer, managed_of, rename

import kina

KINDS = {
    "legacy": lambda session: taken(session, Producer((4,), versioned=False)),
    "versioned": lambda session: taken(session, Producer((4,))),
    "capsule": lambda session: taken(session, Producer((4,)), lambda made: made.capsule()),
    "table": lambda session: taken(session, Table().Array((4,))),
}
HOLDERS = ("tensor", "view", "capsule", "consumer", "managed", "session")


def taken(session, made, what=lambda made: made):
    return made, session.adopt(what(made))


def drop(holders, name):
    """Whoever has it is gone when this returns."""
    what = holders.pop(name)
    if name == "session":
        what.close()
    elif name == "managed":
        delete(what)


def hold(kind):
    session = kina.session("cpu")
    session.__enter__()
    made, tensor = KINDS[kind](session)
    view = tensor[1:]
    return made, {
        "tensor": tensor,
        "view": view,
        "capsule": view.to_dlpack(),
        "consumer": np.from_dlpack(tensor),
        "managed": export(view[::-1]),
        "session": session,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_of_drops(kind):
    for order in permutations(HOLDERS):
        made, holders = hold(kind)
        for name in order:
            assert made.deleted == 0 or not holders.keys() - {"session"}, order
            drop(holders, name)
        assert made.deleted == 1, order
    gc.collect()
    assert made.deleted == 1


@pytest.mark.parametrize("kind", KINDS)
def test_all_at_once_on_threads(kind):
    for _ in range(50):
        made, holders = hold(kind)
        drop(holders, "session")  # it is this thread's
        together = threading.Barrier(len(holders))

        def let_go(name, holders=holders, together=together):
            together.wait()
            drop(holders, name)

        threads = [threading.Thread(target=let_go, args=(name,)) for name in list(holders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made.deleted == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_cycle_is_let_go_by_the_collector(kind):
    made, holders = hold(kind)
    drop(holders, "session")
    drop(holders, "managed")
    holders["itself"] = [holders]
    del holders
    assert made.deleted == 0
    gc.collect()
    assert made.deleted == 1


# Exceptions in the consumer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("consumed", [True, False])
def test_a_consumer_that_raises(host, kind, consumed):
    """Before it took the tensor out of its capsule, and after; the exception holds what its frames hold."""

    def consume(tensor, capsule):
        array = np.from_dlpack(tensor) if consumed else None
        raise LookupError(len(capsule.__class__.__name__), array is None)

    made, tensor = KINDS[kind](host)
    with pytest.raises(LookupError) as raised:
        consume(tensor, tensor.to_dlpack())
    del tensor
    assert made.deleted == 0
    del raised
    gc.collect()
    assert made.deleted == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_that_refuses(host, kind):
    """NumPy knows nothing of bfloat16: it leaves the capsule, which then frees itself."""
    dtype = (4, 16, 1)
    made = (
        Table().Array((4,), dtype=dtype) if kind == "table" else Producer((4,), dtype=dtype, versioned=kind != "legacy")
    )
    tensor = host.adopt(made.capsule() if kind == "capsule" else made)
    with pytest.raises((BufferError, RuntimeError, TypeError)) as raised:
        np.from_dlpack(tensor)
    del raised, tensor
    gc.collect()
    assert made.deleted == 1


@pytest.mark.parametrize("wish", [{"max_version": "new"}, {"dl_device": (2, 0)}, {"stream": 5}, {"copy": 3}])
def test_an_export_that_is_refused_takes_nothing(host, wish):
    made, tensor = KINDS["versioned"](host)
    with pytest.raises(kina.DLPackError) as raised:
        tensor.__dlpack__(**wish)
    del raised, tensor
    assert made.deleted == 1


def test_a_producer_that_raises_after_it_made_its_capsule(host):
    """Nobody got it."""

    class Failing(Producer):
        def __dlpack__(self, **_):
            capsule = kina.from_dlpack(made).to_dlpack()
            raise BufferError(str(capsule is None))

    made = Producer()
    with pytest.raises(kina.DLPackError, match="False"):
        host.adopt(Failing())
    gc.collect()
    assert made.deleted == 1


@pytest.mark.torch
def test_torch_refuses_what_it_was_handed(host):
    """Its table takes a tensor over also when it cannot use it, as kina's does."""
    import torch

    for dtype in ((4, 16, 1), (1, 64, 1)):
        made = Producer((4,), dtype=dtype)
        tensor = make_object(torch.Tensor, made.managed)
        assert made.deleted == 0
        del tensor
        assert made.deleted == 1
    made, tensor = KINDS["versioned"](host)
    theirs = torch.from_dlpack(tensor)
    with pytest.raises(RuntimeError):
        theirs.view(3)
    del theirs, tensor
    gc.collect()
    assert made.deleted == 1


def test_a_deleter_that_takes_in_and_drops_others(host):
    """It may call kina, and be called while kina drops something."""
    inner, seen = Producer((4,)), []
    outer = Producer((4,))

    def deleter(_):
        seen.append(host.to_host(host.adopt(inner)).tolist())

    callback = DELETER(deleter)
    outer.managed.deleter = ctypes.cast(callback, ctypes.c_void_p).value
    tensor = host.adopt(outer)
    del tensor
    assert seen == [[0, 1, 2, 3]]
    assert inner.deleted == 1


def test_a_foreign_consumer_that_raises_between_the_name_and_the_end(host):
    """As a C library may: it has renamed the capsule, so the deleter is its own debt, and no longer the capsule's."""
    made, tensor = KINDS["versioned"](host)
    capsule = tensor.to_dlpack()
    managed = managed_of(capsule)
    rename(capsule, b"used_dltensor_versioned")
    del tensor, capsule
    gc.collect()
    assert made.deleted == 0
    delete(managed)
    assert made.deleted == 1
