"""The life of capsules: each memory released exactly once, by whoever drops it last, on any thread."""

import ctypes
import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers.compiler import compile_c
from helpers.managed import DELETER, Producer, managed_of, name_of, rename
from helpers.processes import run_python

import kina


def watched():
    """A host array adopted by kina, and whether its memory is still held."""
    array = np.arange(6, dtype="f4")
    return array, weakref.finalize(array, lambda: None)


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_is_consumed_once(host, versioned):
    producer = Producer(versioned=versioned)
    capsule = producer.capsule()
    first = host.adopt(capsule)
    assert name_of(capsule) == ("used_dltensor_versioned" if versioned else "used_dltensor")
    with pytest.raises(kina.DLPackError, match="consumed already"):
        host.adopt(capsule)
    assert producer.deleted == 0
    del first
    assert producer.deleted == 1
    del capsule
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_kinas_own_capsule_is_consumed_once(host, versioned):
    array, held = watched()
    capsule = host.adopt(array).to_dlpack(versioned=versioned)
    again = host.adopt(capsule)
    with pytest.raises(kina.DLPackError, match="consumed already"):
        host.adopt(capsule)
    del array
    assert held.alive
    del capsule
    assert held.alive
    assert host.to_host(again).tolist() == [0, 1, 2, 3, 4, 5]
    del again
    assert not held.alive


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_that_nobody_consumes_frees_itself(host, versioned):
    array, held = watched()
    capsule = host.adopt(array).to_dlpack(versioned=versioned)
    del array
    assert held.alive
    del capsule
    assert not held.alive


def test_a_capsule_dropped_while_an_exception_is_under_way(host):
    array, held = watched()

    def fail(capsule):
        assert capsule is not None
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fail(host.adopt(array).to_dlpack())
    del array
    assert not held.alive


@pytest.mark.parametrize("versioned", [True, False])
def test_the_memory_outlives_tensor_and_session(versioned):
    array, held = watched()
    with kina.session("cpu") as host:
        capsule = host.adopt(array)[1:].to_dlpack(versioned=versioned)
    del array, host
    with kina.session("cpu") as other:
        tensor = other.adopt(capsule)
        del capsule
        assert other.to_host(tensor).tolist() == [1, 2, 3, 4, 5]
    assert held.alive
    del tensor
    assert not held.alive


def test_both_owners_may_go_first(host):
    for order in (0, 1):
        tensor = host.from_host(np.arange(3.0))
        array = np.from_dlpack(tensor)
        if order:
            del tensor
            assert array.tolist() == [0, 1, 2]
        else:
            del array
            assert host.to_host(tensor).tolist() == [0, 1, 2]


@pytest.mark.parametrize("version", [(0, 9), (2, 0), (2**32 - 1, 5)])
def test_another_major_version_is_deleted_untouched(host, version):
    producer = Producer(version=version, ndim=-7, data=None, shape=None, device=(99, 99), dtype=(99, 3, 0))
    capsule = producer.capsule()
    with pytest.raises(kina.DLPackError, match=rf"version: {version[0]}\.{version[1]}"):
        host.adopt(capsule)
    assert producer.deleted == 1
    assert name_of(capsule) == "used_dltensor_versioned"
    with pytest.raises(kina.DLPackError, match="consumed"):
        host.adopt(capsule)
    assert producer.deleted == 1


def test_newer_minor_versions_are_taken(host):
    producer = Producer(version=(1, 2**32 - 1), flags=2**63)
    assert host.to_host(host.adopt(producer)).tolist() == [0, 1, 2, 3]
    assert producer.deleted == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_producers_without_a_deleter(host, versioned):
    producer = Producer(versioned=versioned, deleter=False)
    tensor = host.adopt(producer)
    assert host.to_host(tensor).tolist() == [0, 1, 2, 3]
    del tensor


def test_a_capsule_of_another_name(host):
    producer = Producer()
    capsule = producer.capsule()
    rename(capsule, b"something else")
    with pytest.raises(kina.DLPackError, match="'something else'"):
        host.adopt(capsule)
    assert producer.deleted == 0


@pytest.mark.parametrize("versioned", [True, False])
def test_a_foreign_consumer_calls_the_deleter(host, versioned):
    """As a C++ library does: takes the structure out of the capsule and deletes it in its own time."""
    array, held = watched()
    capsule = host.adopt(array).to_dlpack(versioned=versioned)
    managed = managed_of(capsule)
    address = ctypes.addressof(managed)
    rename(capsule, b"used_dltensor_versioned" if versioned else b"used_dltensor")
    del capsule, array
    assert held.alive
    delete = DELETER(managed.deleter)  # ctypes lets go of the GIL around the call
    thread = threading.Thread(target=delete, args=(address,))
    thread.start()
    thread.join()
    with kina.session("cpu") as other:
        other.adopt(b"x")  # the queue of Python owners is drained where the GIL is held
    assert not held.alive


DELETES_ON_ITS_OWN_THREAD = r"""
#include <pthread.h>
#include <stddef.h>

typedef void (*deleter)(void *);
typedef struct { deleter call; void *managed; } job;

static void *work(void *argument) {
    job *mine = (job *)argument;
    mine->call(mine->managed);
    return NULL;
}

/* Waits for the thread without letting go of anything: a deleter that wanted the GIL would never end. */
int delete_elsewhere(void *call, void *managed) {
    pthread_t thread;
    job mine;
    mine.call = (deleter)call;
    mine.managed = managed;
    if (pthread_create(&thread, NULL, work, &mine)) return 1;
    return pthread_join(thread, NULL);
}
"""


@pytest.fixture(scope="module")
def deleting_library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deleting")
    (folder / "deleting.c").write_text(DELETES_ON_ITS_OWN_THREAD)
    return compile_c(folder / "deleting.c", folder / "deleting.so", "-shared", "-fPIC", "-pthread")


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("adopted", [True, False])
def test_deleters_do_not_need_the_gil(deleting_library, versioned, adopted):
    """A thread that Python never saw deletes while this one holds the GIL: needing it would be a deadlock."""
    code = f"""
        import ctypes, gc, sys, weakref
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import numpy as np, kina
        from helpers.managed import managed_of, rename

        library = ctypes.PyDLL({str(deleting_library)!r})  # the GIL is held during the call
        library.delete_elsewhere.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        with kina.session("cpu") as s:
            array = np.arange(4.0)
            held = weakref.finalize(array, lambda: None)
            tensor = s.adopt(array) if {adopted} else s.from_host(array)
            capsule = tensor.to_dlpack(versioned={versioned})
            managed = managed_of(capsule)
            rename(capsule, b"used_dltensor_versioned" if {versioned} else b"used_dltensor")
            del tensor, capsule, array
            assert held.alive == {adopted}
            assert library.delete_elsewhere(managed.deleter, ctypes.addressof(managed)) == 0
            for _ in range(1000):
                pass  # the interpreter gets to its pending calls
            s.adopt(b"x")
            assert not held.alive
        print("done")
    """
    assert run_python(code, timeout=30) == "done\n"


def test_many_threads_take_and_drop(host):
    """Exports and imports of one storage from eight threads; the owner goes once, at the end."""
    array, held = watched()
    shared = [host.adopt(array)]
    del array
    failures = []

    def churn():
        tensor = shared[0]
        try:
            with kina.session("cpu") as mine:
                for turn in range(300):
                    theirs = mine.adopt(tensor.to_dlpack(versioned=turn % 2 == 0))
                    assert mine.to_host(theirs[1:])[0] == 1
                    np.from_dlpack(theirs).sum()
                    theirs.to_dlpack()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert held.alive
    shared.clear()
    host.adopt(b"x")
    assert not held.alive


def test_a_long_chain_of_round_trips_holds_one_owner(host):
    array, held = watched()
    tensor = host.adopt(array)
    del array
    for turn in range(200):
        tensor = host.adopt(tensor.to_dlpack(versioned=turn % 3 != 0))
    assert host.to_host(tensor).tolist() == [0, 1, 2, 3, 4, 5]
    assert held.alive
    del tensor
    assert not held.alive


def test_exchanges_leave_nothing_behind(host):
    import resource

    tensor = host.zeros((64, 64))

    def exchange(count):
        for _ in range(count):
            host.adopt(tensor.to_dlpack())
            tensor.to_dlpack(versioned=False)
            np.from_dlpack(tensor)

    exchange(2000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exchange(50_000)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 4096, f"{grown_kb} kB more after 150,000 exchanges"
