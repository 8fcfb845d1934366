"""Faults that others shipped with in their exchanges, each by its own input, on every way in and out of the host.

Twice imported, never imported, an offset beside the data, deleters on strange threads and after the interpreter,
strides of zero; and descriptions that cannot be true. tests/cuda/test_faults_of_exchange.py has the same of devices.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers.compiler import compile_c
from helpers.exchange import Table, borrow, delete, export, make_object
from helpers.managed import (
    CPU,
    CUDA,
    CUDA_HOST,
    MANAGED,
    READ_ONLY,
    Producer,
    managed_of,
    name_of,
    rename,
)
from helpers.processes import run_python

import kina

TESTS = Path(__file__).resolve().parents[1]


def watched():
    """An array, and whether it is still held."""
    array = np.arange(6, dtype="f4")
    return array, weakref.finalize(array, lambda: None)


# Lifetime: export once, import the same capsule twice -------------------------------------------------------


def capsules_of(array):
    """A capsule of each kind of each library."""
    tensor = kina.from_dlpack(array)
    yield tensor.to_dlpack()
    yield tensor.to_dlpack(versioned=False)
    yield array.__dlpack__()
    yield array.__dlpack__(max_version=(1, 3))


def by_another_session(host, capsule):
    with kina.session("cpu") as other:
        other.adopt(capsule)


SECOND = {
    "adopt": lambda host, capsule: host.adopt(capsule),
    "from_dlpack": lambda host, capsule: kina.from_dlpack(capsule),
    "another session": by_another_session,
}


@pytest.mark.parametrize("second", SECOND)
def test_the_second_import_of_a_capsule_raises_and_the_memory_is_freed_once(host, second):
    array, held = watched()
    for capsule in capsules_of(array):
        first = host.adopt(capsule)
        with pytest.raises(kina.DLPackError, match="consumed already"):
            SECOND[second](host, capsule)
        del capsule
        gc.collect()
        assert host.to_host(first).tolist() == [0, 1, 2, 3, 4, 5]
        del first
    assert held.alive
    del array
    assert not held.alive


class Holding:
    """A capsule, for consumers that want a producer."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **wishes):
        return self.capsule

    def __dlpack_device__(self):
        return (CPU, 0)


def test_a_capsule_of_kina_that_others_consumed_is_consumed(host):
    tensor = host.zeros(3)
    for versioned in (True, False):
        capsule = tensor.to_dlpack(versioned=versioned)
        theirs = np.from_dlpack(Holding(capsule))
        assert name_of(capsule).startswith("used_")
        with pytest.raises(kina.DLPackError, match="consumed already"):
            kina.from_dlpack(capsule)
        assert theirs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("which", range(4))
def test_a_capsule_nobody_consumes_frees_itself(which):
    array, held = watched()
    capsule = list(capsules_of(array))[which]
    del array
    gc.collect()
    assert held.alive
    del capsule
    gc.collect()
    assert not held.alive


# Offset: the allocation's base in `data`, a slice by byte_offset ---------------------------------------------

WAYS_IN = {
    "legacy, adopt": (False, lambda host, made: host.adopt(made)),
    "legacy, adopt of the capsule": (False, lambda host, made: host.adopt(made.capsule())),
    "legacy, from_dlpack": (False, lambda host, made: kina.from_dlpack(made)),
    "legacy, from_dlpack of the capsule": (False, lambda host, made: kina.from_dlpack(made.capsule())),
    "versioned, adopt": (True, lambda host, made: host.adopt(made)),
    "versioned, adopt of the capsule": (True, lambda host, made: host.adopt(made.capsule())),
    "versioned, from_dlpack": (True, lambda host, made: kina.from_dlpack(made)),
    "versioned, from_dlpack of the capsule": (True, lambda host, made: kina.from_dlpack(made.capsule())),
    "table, adopt": (None, lambda host, made: host.adopt(made)),
    "table, from_dlpack": (None, lambda host, made: kina.from_dlpack(made)),
    "the table of Tensor": (True, lambda host, made: make_object(kina.Tensor, made.managed)),
}
WAYS_BACK = {
    "legacy": lambda tensor: kina.from_dlpack(tensor.to_dlpack(versioned=False)),
    "versioned": lambda tensor: kina.from_dlpack(tensor.to_dlpack()),
    "table": lambda tensor: make_object(kina.Tensor, export(tensor)),
    "NumPy": lambda tensor: kina.from_dlpack(np.from_dlpack(tensor)),
}


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("back", WAYS_BACK)
def test_the_first_element_is_at_data_and_byte_offset(host, way, back):
    versioned, take = WAYS_IN[way]
    make = Table().Array if versioned is None else Producer
    more = {} if versioned is None else {"versioned": versioned}
    made = make((2, 3), (10, 2), byte_offset=4 * 21, **more)  # [2:4, 1::2] of (6, 10) float32
    expected = np.arange(60.0).reshape(6, 10)[2:4, 1:7:2]
    tensor = take(host, made)
    for seen in (tensor, WAYS_BACK[back](tensor), WAYS_BACK[back](tensor[:, 1:])):
        assert np.array_equal(host.to_host(seen), expected[:, -seen.shape[1] :])
        assert borrow(seen).data == made.first + 8 * (3 - seen.shape[1])
        assert borrow(seen).byte_offset == 0


# Deleters: dropped by a C++ thread without the GIL, and after finalisation began ----------------------------

OWNER = r"""
#include <cstdio>
#include <memory>
#include <thread>
#include "kina_tensor.h"

/* Who owns an export of another library, in C++: of either kind, for the deleter knows which it is. */
struct delete_it {
    void (*call)(void *);
    void operator()(void *managed) const { call(managed); }
};
using owned = std::unique_ptr<void, delete_it>;

static owned kept{nullptr, delete_it{nullptr}};

static void drop(owned mine) { std::thread([&mine] { mine.reset(); }).join(); }

/* What this library exports, and how often it was asked to let go. */
static int deleted;
static void count(kina_dl_managed_tensor_versioned *) { __atomic_add_fetch(&deleted, 1, __ATOMIC_RELAXED); }
static float numbers[4] = {1, 2, 3, 4};
static int64_t shape[1] = {4};

extern "C" {
void drop_elsewhere(void (*call)(void *), void *managed) { drop(owned(managed, delete_it{call})); }
void keep(void (*call)(void *), void *managed) { kept = owned(managed, delete_it{call}); }
int deletions() { return deleted; }
kina_dl_managed_tensor_versioned *lend() {
    return new kina_dl_managed_tensor_versioned{
        {1, 3}, nullptr, count, 0, {numbers, {1, 0}, 1, {2, 32, 1}, shape, nullptr, 0}};
}
}

/* After the interpreter: the process ends. Destroyed before what is declared above it. */
static struct at_the_end {
    ~at_the_end() {
        bool had = kept != nullptr;
        drop(std::move(kept));
        std::printf("%s, deletions: %d\n", had ? "dropped at the end" : "nothing kept", deleted);
    }
} last;
"""


@pytest.fixture(scope="module")
def owner(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("owner")
    (folder / "owner.cpp").write_text(OWNER)
    return str(compile_c(folder / "owner.cpp", folder / "owner.so", "-shared", "-fPIC", "-pthread", "-std=c++17"))


FORMS = ["legacy", "versioned", "table"]
PROGRAM = """
import ctypes, gc, sys, weakref
sys.path.insert(0, {tests!r})
import numpy as np, kina
from helpers.exchange import export, make_object
from helpers.managed import DLManagedTensorVersioned, managed_of, rename

library = ctypes.PyDLL({owner!r})  # the GIL is held during its calls
library.drop_elsewhere.argtypes = library.keep.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
library.lend.restype = ctypes.c_void_p

def exported(form, adopted):
    array = np.arange(4.0)
    held = weakref.finalize(array, print, "let go") if adopted else None
    if held:
        held.atexit = False
    with kina.session("cpu") as s:
        tensor = s.adopt(array) if adopted else s.from_host(array)
    if form == "table":
        managed = export(tensor)
    else:
        capsule = tensor.to_dlpack(versioned=form == "versioned")
        managed = managed_of(capsule)
        rename(capsule, b"used_dltensor_versioned" if form == "versioned" else b"used_dltensor")
    return managed.deleter, ctypes.addressof(managed)
"""


def run(owner, code):
    return run_python(PROGRAM.format(tests=str(TESTS), owner=owner) + code, timeout=60)


@pytest.mark.parametrize("adopted", [True, False])
def test_an_owner_drops_its_tensor_on_a_thread_of_its_own(owner, adopted):
    """Needing the GIL, which the waiting thread holds, would be a deadlock; the Python owner goes where it is held."""
    code = f"""
for form in {FORMS}:
    library.drop_elsewhere(*exported(form, {adopted}))
    for _ in range(1000):
        pass
    kina.zeros(1)
    print(form)
"""
    gone = "let go\n" if adopted else ""
    assert run(owner, code) == "".join(f"{gone}{form}\n" for form in FORMS) + "nothing kept, deletions: 0\n"


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_an_owner_drops_its_tensor_after_the_interpreter(owner, form, adopted):
    """Memory of kina goes; an owner in Python is left to the end of the process. Nothing is said."""
    assert run(owner, f"library.keep(*exported({form!r}, {adopted}))") == "dropped at the end, deletions: 0\n"


ADOPTED = """
managed = DLManagedTensorVersioned.from_address(library.lend())
tensor = make_object(kina.Tensor, managed)
"""


@pytest.mark.parametrize(
    ("end", "deletions"),
    [
        ("del tensor", 1),
        ("view = tensor[1:]; capsule = view.to_dlpack(); del tensor, view, capsule", 1),
        (
            "other = kina.from_dlpack(tensor.to_dlpack()); del tensor; array = np.from_dlpack(other); del other, array",
            1,
        ),
        ("library.drop_elsewhere(*(lambda m: (m.deleter, ctypes.addressof(m)))(export(tensor))); del tensor", 1),
        ("import atexit; atexit.register(lambda: globals().pop('tensor'))", 1),
        # Alive when the interpreter ends: left to the end of the process.
        ("", 0),
        ("kept = [tensor, tensor[1:], tensor.to_dlpack(), np.from_dlpack(tensor)]; kept.append(kept)", 0),
        ("sys.kept = tensor", 0),
        ("library.keep(*(lambda m: (m.deleter, ctypes.addressof(m)))(export(tensor))); del tensor", 0),
    ],
)
def test_the_deleter_of_another_library_at_exit(owner, end, deletions):
    kept = "dropped at the end" if "keep(" in end else "nothing kept"
    assert run(owner, ADOPTED + end) == f"{kept}, deletions: {deletions}\n"


# Stride 0: a scalar expanded to (3, 3) ------------------------------------------------------------------------


KEPT = []  # what is lent outlives whoever has it


def expanded(host):
    scalar = np.array(2.0, "f4")
    view = np.lib.stride_tricks.as_strided(scalar, (3, 3), (0, 0))
    yield host.full((), 2.0).broadcast_to(3, 3)
    yield host.adopt(view)
    for versioned, take in WAYS_IN.values():
        make = Table().Array if versioned is None else Producer
        more = {} if versioned is None else {"versioned": versioned}
        KEPT.append(make((3, 3), (0, 0), buffer=(ctypes.c_float * 1)(2.0), **more))
        yield take(host, KEPT[-1])


def test_an_expanded_scalar_is_never_taken_for_compact_or_written(host):
    for tensor in expanded(host):
        assert not tensor.is_contiguous
        assert tensor.strides == (0, 0)
        assert host.to_host(tensor).tolist() == [[2.0] * 3] * 3
        with pytest.raises(kina.InvalidLayoutError):
            host.add(tensor.reshape(3, 3), tensor, out=tensor)
        with pytest.raises(kina.NonContiguousError):
            kina.from_dlpack(tensor, copy=True)
        with pytest.raises(kina.DLPackError, match="read-only"):
            tensor.to_dlpack(versioned=False)
        with pytest.raises(kina.DLPackError, match="read-only"):
            borrow(tensor)
        capsule = tensor.to_dlpack()
        assert managed_of(capsule).flags == READ_ONLY
        managed = export(tensor)
        assert (managed.flags, managed.dl_tensor.strides[:2]) == (READ_ONLY, [0, 0])
        delete(managed)
        for back in (kina.from_dlpack(capsule), make_object(kina.Tensor, export(tensor))):
            assert (back.readonly, back.strides, back.is_contiguous) == (True, (0, 0), False)
        assert not np.from_dlpack(tensor).flags.writeable


@pytest.mark.torch
def test_an_expanded_tensor_of_torch(host):
    import torch

    theirs = torch.full((), 2.0).expand(3, 3)
    for tensor in (host.adopt(theirs), host.adopt(theirs.__dlpack__()), make_object(kina.Tensor, export(theirs))):
        assert (tensor.strides, tensor.is_contiguous) == ((0, 0), False)
        with pytest.raises(kina.InvalidLayoutError):
            host.add(tensor, tensor, out=tensor)


# Descriptions that cannot be true ----------------------------------------------------------------------------

IMPOSSIBLE = [
    ({"data": None}, "data: NULL for 4 elements"),
    ({"ndim": -1}, "ndim: -1"),
    ({"ndim": 65}, "ndim: 65"),
    ({"shape": None, "ndim": 2}, "shape: NULL for 2 axes"),
    ({"shape": (2, -1)}, "shape: axis 1 has the negative extent -1"),
    ({"shape": (2**40, 2**40)}, "shape: the number of elements overflows"),
    ({"shape": (2**62,)}, "shape: the number of bytes overflows"),
    ({"strides": (2**62,)}, "strides: axis 0"),
    ({"shape": (4, 4), "strides": (2**60, 2**60)}, "strides"),
    ({"byte_offset": 2**64 - 1}, "byte_offset"),
    ({"data": 2**64 - 8}, "strides: bytes 0 to 16"),
    ({"data": 8, "strides": (-1,)}, "strides: bytes -12 to 4"),
    ({"device": (CUDA, 0)}, "device"),
    ({"device": (MANAGED, 0)}, "device"),
    ({"device": (CPU, 3)}, "device"),
    ({"device": (CUDA_HOST, 7), "data": None}, "d(evice|ata)"),
    ({"device": (0, 0)}, "device"),
    ({"device": (99, 0)}, "device"),
    ({"device": (-1, -1)}, "device"),
]


# By the table of Tensor a thing goes where it is.
ELSEWHERE = [{"device": (CUDA, 0)}, {"device": (MANAGED, 0)}]


@pytest.mark.parametrize(
    ("way", "fields", "words"),
    [
        (way, fields, words)
        for way in ("capsule", "legacy capsule", "table", "the table of Tensor")
        for fields, words in IMPOSSIBLE
        if way != "the table of Tensor" or fields not in ELSEWHERE
    ],
    ids=repr,
)
def test_the_field_is_named(host, fields, words, way):
    fields = {"shape": (4,), **fields}
    made = Table().Array(**fields) if way == "table" else Producer(**fields, versioned=way != "legacy capsule")
    take = {
        "table": lambda: host.adopt(made),
        "the table of Tensor": lambda: make_object(kina.Tensor, made.managed),
    }.get(way, lambda: host.adopt(made.capsule()))
    with pytest.raises(kina.DLPackError, match=words):
        take()
    # What a table gives is handed over; what a capsule holds stays its own, and here that has no destructor.
    assert made.deleted == ("table" in way)
    assert host.to_host(host.zeros(1)).tolist() == [0]


@pytest.mark.parametrize("fields", [fields for fields, _ in IMPOSSIBLE if "device" not in fields], ids=repr)
@pytest.mark.parametrize("table", [True, False])
def test_from_dlpack_names_the_field(fields, table):
    """With no session open, a momentary one."""
    fields = {"shape": (4,), **fields}
    made = Table().Array(**fields) if table else Producer(**fields)
    with pytest.raises(kina.DLPackError):
        kina.from_dlpack(made)
    assert made.deleted == table
    assert kina.from_dlpack(np.zeros(4)).shape == (4,)


@pytest.mark.parametrize("device", [(0, 0), (99, 0), (-1, -1), (CUDA, -1)])
@pytest.mark.parametrize("way", ["capsule", "producer", "table", "the table of Tensor"])
def test_from_dlpack_of_a_device_that_nobody_knows(device, way):
    made = Table().Array(device=device) if way == "table" else Producer(device=device)
    take = {
        "the table of Tensor": lambda: make_object(kina.Tensor, made.managed),
        "capsule": lambda: kina.from_dlpack(made.capsule()),
    }.get(way, lambda: kina.from_dlpack(made))
    with pytest.raises(kina.DLPackError, match="device"):
        take()
    assert made.deleted == ("table" in way)


@pytest.mark.parametrize("name", [b"something else", b"used_dltensor", b"used_dltensor_versioned"])
@pytest.mark.parametrize("take", [lambda capsule: kina.from_dlpack(capsule), None], ids=["from_dlpack", "adopt"])
def test_names_that_are_no_capsule_of_ours(host, name, take):
    made = Producer()
    capsule = made.capsule()
    rename(capsule, name)
    with pytest.raises(kina.DLPackError, match=r"capsule: .*(consumed already|'something else')"):
        (take or host.adopt)(capsule)
    assert (made.deleted, name_of(capsule)) == (0, name.decode())


@pytest.mark.parametrize("way", WAYS_IN)
def test_misaligned_elements_are_taken_viewed_and_worked_with(host, way):
    """Host code reads them anywhere; kernels do not: tests/cuda/test_faults_of_exchange.py."""
    versioned, take = WAYS_IN[way]
    octets = np.frombuffer(b"\0" + np.arange(6, dtype="f4").tobytes(), "u1")[1:]
    make = Table().Array if versioned is None else Producer
    more = {} if versioned is None else {"versioned": versioned}
    address = octets.ctypes.data
    assert address % 4
    tensor = take(host, make((2, 3), byte_offset=3, data=address - 3, **more))
    assert borrow(tensor).data == address
    for view in (tensor, tensor[1:], tensor[:, ::-1]):
        values = host.to_host(view)
        assert np.array_equal(host.to_host(host.add(view, view)), 2 * values)
        assert np.array_equal(host.to_host(kina.from_dlpack(view.to_dlpack())), values)
        assert np.array_equal(np.from_dlpack(view), values)
