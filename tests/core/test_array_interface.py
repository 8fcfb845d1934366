"""Host tensors beside DLPack: `numpy.asarray`, the buffer protocol and `__array_interface__`, both ways."""

import array
import ctypes
import gc
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.arrays import (
    NUMPY_DTYPES,
    OTHER_DTYPES,
    Buffer,
    HostArray,
    address,
    buffer_of,
    filled,
    layouts,
    repeats,
    same_layout,
    view_of_buffer,
)
from helpers.processes import run_python
from hypothesis import given as over

import kina
from kina._core.dtype import all_dtypes

ALL_DTYPES = [*NUMPY_DTYPES, *OTHER_DTYPES]

# Requests of the buffer protocol, from Python's object.h.
WRITABLE, FORMAT, SHAPE, STRIDES = 0x1, 0x4, 0x8, 0x18
C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS, INDIRECT = 0x38, 0x58, 0x98, 0x118
FULL_RO = INDIRECT | FORMAT

TESTS = Path(__file__).resolve().parents[1]


def check_same(found: np.ndarray, given: np.ndarray) -> None:
    """The same values at the same place, in the same order, with the same leave to write."""
    assert found.dtype == given.dtype
    assert same_layout(found, given)
    assert found.flags.writeable == (given.flags.writeable and not repeats(given))
    np.testing.assert_array_equal(found, given)
    if given.size:
        assert address(found) == address(given)


# Out ------------------------------------------------------------------------------------------------------


@over(given=layouts(tuple(ALL_DTYPES)))
def test_numpy_sees_the_memory_itself(given):
    with kina.session("cpu") as host:
        tensor = host.adopt(given)
        check_same(np.asarray(tensor), given)
        check_same(tensor.__array__(), given)
        check_same(tensor.__array__(copy=False), given)


@over(given=layouts())
def test_every_protocol_tells_the_same(given):
    with kina.session("cpu") as host:
        tensor = host.adopt(given)
    view = memoryview(tensor)
    assert (view.shape, view.itemsize, view.nbytes) == (given.shape, given.itemsize, given.nbytes)
    check_same(np.asarray(view), given)
    interface = tensor.__array_interface__
    assert (interface["version"], interface["typestr"]) == (3, given.dtype.str)
    if given.size:
        check_same(np.asarray(HostArray(None, **interface)), given)
    else:
        assert interface["data"] == (0, not given.flags.writeable)
        assert np.asarray(HostArray(None, **interface)).shape == given.shape
    assert (interface["strides"] is None) == tensor.is_contiguous
    assert "__cuda_array_interface__" not in dir(given)
    assert not hasattr(tensor, "__cuda_array_interface__")


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_goes_out(host, name):
    dtype = getattr(kina, name)
    given = filled((3, 4), dtype)
    tensor = host.adopt(given)
    check_same(np.asarray(tensor), given)
    if name in NUMPY_DTYPES:
        assert tensor.__array_interface__["typestr"] == NUMPY_DTYPES[name] == given.dtype.str
        assert np.asarray(memoryview(tensor)).dtype == given.dtype
        assert memoryview(tensor).tobytes() == given.tobytes()
    else:
        assert not hasattr(tensor, "__array_interface__")
        with pytest.raises(AttributeError, match=name):
            tensor.__array_interface__  # noqa: B018
        with pytest.raises(BufferError, match=rf"{name}.*from_dlpack.*to_host"):
            memoryview(tensor)
        assert np.asarray(tensor).dtype == getattr(ml_dtypes, name)


def test_writes_go_through(host):
    tensor = host.zeros((2, 3), "i32")
    np.asarray(tensor)[1] = 7
    memoryview(tensor)[0, 2] = 5
    np.asarray(HostArray(None, **tensor.__array_interface__))[0, 0] = 3
    assert host.to_host(tensor).tolist() == [[3, 0, 5], [7, 7, 7]]


@pytest.mark.parametrize(
    "of", [lambda t: t.as_readonly(), lambda t: t.broadcast_to(2, 3), lambda t: t[:0].as_readonly()]
)
def test_what_is_not_to_be_written_to_leaves_read_only(host, of):
    tensor = of(host.zeros(3))
    assert memoryview(tensor).readonly
    assert tensor.__array_interface__["data"][1] is True
    for found in (np.asarray(tensor), tensor.__array__()):
        assert not found.flags.writeable
        if tensor.size:
            with pytest.raises(ValueError, match="WRITEABLE"):
                found.flags.writeable = True
    with pytest.raises(BufferError, match="read-only"):
        buffer_of(tensor, WRITABLE | FULL_RO)


def test_a_stride_of_zero_on_one_element_repeats_nothing(host):
    single = host.zeros((1, 3)).broadcast_to(1, 3)[None]
    assert single.strides[0] == 0
    np.asarray(single)[:] = 2
    assert host.to_host(single).tolist() == [[[2, 2, 2]]]
    assert memoryview(single).c_contiguous


def test_numpys_contract_for_dtype_and_copy(host):
    tensor = host.from_host(np.arange(6, dtype=np.float32).reshape(2, 3)).permute(1, 0)
    plain = np.asarray(tensor)
    for kept in (tensor.__array__("f4"), tensor.__array__(np.float32, False), np.array(tensor, copy=False)):
        assert np.shares_memory(kept, plain)
    for copied in (
        tensor.__array__(copy=True),
        np.array(tensor),
        np.array(tensor, copy=True),
        tensor.__array__("f4", True),
    ):
        assert copied.dtype == np.float32
        assert copied.flags.writeable
        assert copied.strides == plain.strides
        assert not np.shares_memory(copied, plain)
        assert (copied == plain).all()
    for converted in (tensor.__array__(np.float64), tensor.__array__("f8", True), np.asarray(tensor, "f8")):
        assert converted.dtype == np.float64
        assert (converted == plain).all()
    with pytest.raises(ValueError, match=r"float32.*float64.*copy=False"):
        tensor.__array__("f8", False)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(tensor, "f8", copy=False)
    narrow = host.zeros(3, "bfloat16")
    assert np.asarray(narrow, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="copy=False"):
        narrow.__array__(np.float32, copy=False)


def test_requests_of_buffers(host):
    tensor = host.adopt(np.arange(12, dtype="<i4").reshape(3, 4))
    start = tensor.__array_interface__["data"][0]
    everything = {"address": start, "len": 48, "itemsize": 4, "readonly": False, "ndim": 2, "format": b"i",
                  "shape": (3, 4), "strides": (16, 4)}  # fmt: skip
    assert buffer_of(tensor, WRITABLE | FULL_RO) == everything
    for flags in (STRIDES, C_CONTIGUOUS, ANY_CONTIGUOUS):
        assert buffer_of(tensor, flags) == everything | {"format": None}
    assert buffer_of(tensor, SHAPE | FORMAT) == everything | {"strides": None}
    assert buffer_of(tensor, 0) == everything | {"strides": None, "shape": None, "ndim": 1, "format": None}
    with pytest.raises(BufferError, match="without a shape"):
        buffer_of(tensor, FORMAT)
    turned = tensor.permute(1, 0)
    assert buffer_of(turned, F_CONTIGUOUS)["strides"] == (4, 16)
    assert buffer_of(turned, ANY_CONTIGUOUS)["shape"] == (4, 3)
    for flags in (0, SHAPE, C_CONTIGUOUS):
        with pytest.raises(BufferError, match=r"without gaps.*s\.copy"):
            buffer_of(turned, flags)
    with pytest.raises(BufferError, match="without gaps"):
        buffer_of(tensor, F_CONTIGUOUS)
    gaps = tensor[:, ::2]
    with pytest.raises(BufferError, match="without gaps"):
        buffer_of(gaps, ANY_CONTIGUOUS)
    assert buffer_of(gaps, STRIDES)["strides"] == (16, 8)
    assert buffer_of(tensor[::-1], STRIDES)["address"] == start + 32
    assert buffer_of(tensor[1, 2], STRIDES) == everything | {
        "address": start + 24, "ndim": 0, "shape": (), "strides": (), "len": 4, "format": None,
    } | {key: None for key in ("shape", "strides") if buffer_of(tensor[1, 2], STRIDES)[key] is None}  # fmt: skip
    assert bytes(tensor[1]) == np.arange(4, 8, dtype="<i4").tobytes()


def test_what_has_no_elements_has_an_address_for_readers_of_buffers(host):
    empty = host.zeros((3, 0, 2))
    assert buffer_of(empty, FULL_RO)["address"] != 0
    assert buffer_of(empty, FULL_RO)["len"] == 0
    assert bytes(empty) == b""


def test_readers_that_know_only_buffers(host):
    tensor = host.from_host(np.arange(5, dtype="f8"))
    assert (ctypes.c_double * 5).from_buffer(tensor)[3] == 3
    assert array.array("d", memoryview(tensor)).tolist() == [0, 1, 2, 3, 4]
    assert np.frombuffer(tensor, "f8").tolist() == [0, 1, 2, 3, 4]
    assert memoryview(tensor).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.torch
def test_torch_reads_host_tensors(host):
    import torch

    tensor = host.from_host(np.arange(6, dtype="f8").reshape(2, 3))
    for taken in (
        torch.as_tensor(tensor),
        torch.from_numpy(np.asarray(tensor)),
        torch.frombuffer(tensor, dtype=torch.float64),
    ):
        assert taken.data_ptr() == tensor.__array_interface__["data"][0]
        assert taken.flatten().tolist() == [0, 1, 2, 3, 4, 5]


# In: the buffer protocol ------------------------------------------------------------------------------------


@over(given=layouts(zero_strides=True))
def test_buffers_come_in_as_they_are(given):
    with kina.session("cpu") as host:
        tensor = host.adopt(memoryview(given))
        assert tensor.dtype.numpy == given.dtype
        assert tensor.readonly == (not given.flags.writeable)
        check_same(np.asarray(tensor), given)


@pytest.mark.parametrize(
    ("code", "name"),
    [("b", "int8"), ("B", "uint8"), ("h", "int16"), ("H", "uint16"), ("i", "int32"), ("I", "uint32"), ("l", "int64"),
     ("L", "uint64"), ("q", "int64"), ("Q", "uint64"), ("f", "float32"), ("d", "float64")],
)  # fmt: skip
def test_arrays_of_the_standard_library(host, code, name):
    given = array.array(code, [1, 2, 3])
    tensor = host.adopt(given)
    assert tensor.dtype.name == name
    assert host.to_host(tensor).tolist() == [1, 2, 3]
    np.asarray(tensor)[0] = 9
    assert given[0] == 9


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ctypes.c_int8, "int8"), (ctypes.c_uint16, "uint16"), (ctypes.c_int, "int32"), (ctypes.c_long, "int64"),
     (ctypes.c_ulonglong, "uint64"), (ctypes.c_size_t, "uint64"), (ctypes.c_float, "float32"),
     (ctypes.c_double, "float64"), (ctypes.c_bool, "bool")],
)  # fmt: skip
def test_arrays_of_ctypes(host, kind, name):
    given = ((kind * 2) * 3)((kind * 2)(1, 0), (kind * 2)(0, 1), (kind * 2)(1, 1))
    tensor = host.adopt(given)
    assert (tensor.dtype.name, tensor.shape) == (name, (3, 2))
    assert host.to_host(tensor).tolist() == [[1, 0], [0, 1], [1, 1]]


def test_bytes_and_parts_of_views(host):
    assert host.adopt(b"abc").readonly
    assert not host.adopt(bytearray(b"abc")).readonly
    assert host.to_host(host.adopt(memoryview(b"abcdef")[::-2])).tolist() == list(b"fdb")
    assert host.adopt(memoryview(b"abcdefgh").cast("H", (2, 2))).dtype is kina.uint16
    assert host.adopt(memoryview(b"abcd").cast("I", ())).shape == ()


class Exporter:
    """A buffer of any description over eight bytes of zeros and more, held by a memoryview."""

    def __new__(cls, form: bytes, itemsize: int, shape=(2,), strides=None, suboffsets=None) -> memoryview:
        memory = ctypes.create_string_buffer(256)
        count = len(shape)
        numbers = ctypes.c_ssize_t * count
        strides = strides or [itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(count)]
        kept = (memory, numbers(*shape), numbers(*strides), numbers(*(suboffsets or [])), form)
        buffer = Buffer()
        buffer.buf, buffer.len, buffer.itemsize = ctypes.addressof(memory), int(np.prod(shape)) * itemsize, itemsize
        buffer.ndim, buffer.format, buffer.readonly = count, form, 0
        buffer.shape, buffer.strides = kept[1], kept[2]
        if suboffsets is not None:
            buffer.suboffsets = kept[3]
        view = view_of_buffer(ctypes.byref(buffer))
        cls.kept = kept  # the memory of the test under way
        return view


@pytest.mark.parametrize(
    ("form", "itemsize", "name"),
    [(b"@l", 8, "int64"), (b"=l", 4, "int32"), (b"<l", 8, "int64"), (b"<q", 8, "int64"), (b"n", 8, "int64"),
     (b"N", 8, "uint64"), (b"<e", 2, "float16"), (b"=f", 4, "float32"), (b"<d", 8, "float64"), (b"Zf", 8, "complex64"),
     (b"<Zd", 16, "complex128"), (b"F", 8, "complex64"), (b"D", 16, "complex128"), (b"?", 1, "bool"),
     (b"<?", 1, "bool"), (b">B", 1, "uint8"), (b"!b", 1, "int8")],
)  # fmt: skip
def test_formats_that_are_numbers(host, form, itemsize, name):
    assert host.adopt(Exporter(form, itemsize)).dtype.name == name


@pytest.mark.parametrize(
    ("form", "itemsize"),
    [(b">i", 4), (b"!d", 8), (b">Zf", 8), (b"c", 1), (b"s", 1), (b"4s", 4), (b"2i", 8), (b"ii", 8), (b"T{i:a:i:b:}", 8),
     (b"P", 8), (b"g", 16), (b"Zg", 32), (b"u", 4), (b"w", 4), (b"O", 8), (b"x", 1), (b"@@i", 4), (b"<<i", 4), (b"", 4),
     (b"i", 8), (b"d", 4), (b"f", 8), (b"e", 4), (b"Zf", 16), (b"?", 2), (b"b", 2), (b"l", 2)],
)  # fmt: skip
def test_formats_that_are_not(host, form, itemsize):
    with pytest.raises(kina.DTypeError, match="format"):
        host.adopt(Exporter(form, itemsize))


def test_buffers_that_no_layout_describes(host):
    with pytest.raises(kina.InvalidLayoutError, match="suboffsets"):
        host.adopt(Exporter(b"B", 1, (2, 2), (8, 1), (0, -1)))
    with pytest.raises(kina.InvalidLayoutError, match="strides"):
        host.adopt(Exporter(b"i", 4, (2,), (6,)))
    assert host.adopt(Exporter(b"i", 4, (1,), (6,))).shape == (1,)  # a stride that nobody takes
    structured = np.zeros(3, [("a", "i4"), ("b", "f4")])
    for wrong in (structured, memoryview(structured), np.zeros(2, ">i4"), memoryview(np.zeros(2, ">f8"))):
        with pytest.raises(kina.DTypeError):
            host.adopt(wrong)
    with pytest.raises(kina.DLPackError, match="list"):
        host.adopt([1, 2])


# In: __array_interface__ ------------------------------------------------------------------------------------


@over(given=layouts())
def test_array_interfaces_come_in_as_they_are(given):
    with kina.session("cpu") as host:
        tensor = host.adopt(HostArray(given))
        assert tensor.dtype.numpy == given.dtype
        assert tensor.readonly == (not given.flags.writeable)
        check_same(np.asarray(tensor), given)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_every_typestr_comes_in(host, name):
    given = filled((3,), getattr(kina, name))
    assert host.adopt(HostArray(given)).dtype.name == name
    assert host.adopt(HostArray(given, typestr="=" + given.dtype.str[1:], descr=None)).dtype.name == name


def test_memory_as_a_buffer(host):
    """As the images of Pillow have it."""
    memory = bytearray(range(24))
    image = HostArray(None, version=3, shape=(2, 3, 4), typestr="|u1", data=memory)
    tensor = host.adopt(image)
    assert host.to_host(tensor).ravel().tolist() == list(range(24))
    assert not tensor.readonly
    assert host.adopt(HostArray(None, version=3, shape=(24,), typestr="|u1", data=bytes(memory))).readonly
    late = HostArray(None, version=3, shape=(2, 2), typestr="<u2", strides=(-8, 2), offset=16, data=memory)
    expected = np.frombuffer(memory, "<u2")
    assert host.to_host(host.adopt(late)).tolist() == [expected[8:10].tolist(), expected[4:6].tolist()]
    assert np.shares_memory(np.asarray(host.adopt(late)), expected)
    empty = HostArray(None, version=3, shape=(0, 5), typestr="<f8", data=b"")
    assert host.adopt(empty).shape == (0, 5)
    for wrong in ({"shape": (25,)}, {"offset": 1}, {"offset": -1}, {"offset": 25}, {"strides": (-12, 4, 1)},
                  {"data": memoryview(memory)[::2]}, {"offset": True}):  # fmt: skip
        with pytest.raises(kina.DLPackError, match=r"data|offset"):
            host.adopt(HostArray(None, **image.__array_interface__ | wrong))


WRONG = [
    ("version", 2), ("version", 4), ("version", -1), ("version", "3"), ("version", None), ("version", True),
    ("typestr", None), ("typestr", b"<f4"), ("typestr", "f4"), ("typestr", "<f"), ("typestr", "<f4x"), ("typestr", ""),
    ("typestr", "<f²"), ("typestr", "<x4"), ("typestr", "f<4"), ("typestr", "<f99999999999"),
    ("shape", None), ("shape", [3, 4]), ("shape", 12), ("shape", (3, -4)), ("shape", (3, 4.0)), ("shape", (3, True)),
    ("shape", (3, None)), ("shape", (2**63,)), ("shape", (2**40, 2**40)), ("shape", (2**62,)), ("shape", (1,) * 65),
    ("strides", [16, 4]), ("strides", (16,)), ("strides", (16, 4, 4)), ("strides", (16, 2)), ("strides", (16, 4.0)),
    ("strides", (16, False)), ("strides", (2**62, 4)), ("strides", (-(2**63), 4)), ("strides", (2**64, 4)),
    ("strides", 4), ("strides", (-(2**50), 4)),
    ("data", None), ("data", (1,)), ("data", (1, False, 2)), ("data", (0, False)), ("data", (-16, False)),
    ("data", (2**64, False)), ("data", (2**64 - 16, False)), ("data", (None, False)), ("data", (True, False)),
    ("data", (16.0, False)), ("data", [16, False]), ("data", (16, 0)), ("data", (16, None)), ("data", 16),
    ("mask", np.zeros((3, 4), bool)), ("descr", ("", "<f4")), ("descr", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: repr(value)[:40].replace(" ", ""))
def test_what_is_wrong_is_named(host, field, value):
    given = np.zeros((3, 4), "f4")
    named = "data|strides" if field == "data" else field
    with pytest.raises(kina.DLPackError, match=rf"__array_interface__\['({named})'\]"):
        host.adopt(HostArray(given, **{field: value}))


@pytest.mark.parametrize("field", ["version", "typestr", "shape", "data"])
def test_what_is_missing_is_named(host, field):
    source = HostArray(np.zeros(3, "f4"))
    del source.__array_interface__[field]
    with pytest.raises(kina.DLPackError, match=rf"\['{field}'\].*missing|a tuple is needed"):
        host.adopt(source)


@pytest.mark.parametrize(
    "typestr",
    [">f4", ">i8", ">c8", "|f4", "|i4", "<f16", "<c32", "<f1", "<i16", "|b2", "|t4", "<m8", "<M8", "|O8", "|S4", "<U1",
     "|V4", "<V2", "<i3"],
)  # fmt: skip
def test_elements_that_kina_does_not_store(host, typestr):
    with pytest.raises(kina.DTypeError, match="typestr"):
        host.adopt(HostArray(np.zeros(3, "f4"), typestr=typestr, descr=None))


def test_structures_and_odd_sources(host):
    with pytest.raises(kina.DTypeError, match="descr"):
        host.adopt(HostArray(np.zeros(3, "f4"), descr=[("a", "<f4")]))
    with pytest.raises(kina.DTypeError, match="descr"):
        host.adopt(HostArray(np.zeros(3, "f4"), descr=[("", "<i2"), ("", "<i2")]))

    class Refuses:
        @property
        def __array_interface__(self):
            raise RuntimeError("not today")

    class Lies:
        __array_interface__ = 3

    with pytest.raises(kina.DLPackError, match=r"Refuses.*not today") as raised:
        host.adopt(Refuses())
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(kina.DLPackError, match="dict, not int"):
        host.adopt(Lies())


def test_strides_that_are_never_taken_may_be_anything(host):
    single = HostArray(np.zeros((1, 3), "f4"), strides=(2**63 - 1, 4))
    tensor = host.adopt(single)
    assert tensor.is_contiguous
    assert memoryview(tensor).strides == (4, 4)
    nothing = HostArray(np.zeros((0, 3), "f4"), strides=(7, 2**63 - 1), data=(0, False))
    assert host.adopt(nothing).shape == (0, 3)


# dtypes -----------------------------------------------------------------------------------------------------


def test_every_number_of_ml_dtypes_is_stored_or_refused_by_name(host):
    known = {dtype.name for dtype in all_dtypes()}
    seen = set()
    for name in dir(ml_dtypes):
        kind = getattr(ml_dtypes, name)
        if not (isinstance(kind, type) and issubclass(kind, np.generic)):
            continue
        seen.add(name)
        given = np.zeros(3, kind)
        if name in known:
            assert host.adopt(given).dtype.name == name
        else:
            with pytest.raises(kina.DTypeError, match=name):
                host.adopt(given)
    assert {"bfloat16", "int4", "uint2", "float4_e2m1fn", "float6_e2m3fn"} <= seen
    assert {name for name in known if name.startswith(("bfloat", "float8"))} <= seen


# Lifetimes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "take", [np.asarray, memoryview, lambda t: t.__array__(), lambda t: np.asarray(HostArray(t))], ids=range(4)
)
def test_whoever_has_the_memory_keeps_it(take):
    source = np.arange(4, dtype="f4")
    alive = weakref.finalize(source, lambda: None)
    with kina.session("cpu") as host:
        taken = take(host.adopt(source))
    del source, host
    gc.collect()
    assert alive.alive
    assert np.asarray(taken).tolist() == [0, 1, 2, 3]
    del taken
    gc.collect()
    assert not alive.alive


@pytest.mark.parametrize("kind", ["interface", "buffer"])
def test_the_owner_is_kept_and_let_go(host, kind):
    class Owner(bytearray):
        pass

    memory = Owner(16)
    if kind == "interface":
        source = HostArray(None, version=3, shape=(4,), typestr="<f4", data=(np.frombuffer(memory).ctypes.data, False))
        source.array = memory
    else:
        source = memory
    alive = weakref.finalize(memory, lambda: None)
    view = host.adopt(source)[1:]
    del source, memory
    gc.collect()
    assert alive.alive
    assert host.to_host(view).tolist() == [0, 0, 0] if kind == "interface" else view.shape == (15,)
    del view
    gc.collect()
    assert not alive.alive


def test_a_refused_source_is_let_go(host):
    source = HostArray(np.zeros(3, "f4"), strides=(3,))
    alive = weakref.finalize(source, lambda: None)
    with pytest.raises(kina.DLPackError):
        host.adopt(source)
    del source
    gc.collect()
    assert not alive.alive


def test_exchanges_at_the_end_of_a_process_are_silent():
    assert (
        run_python(
            f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        import numpy as np, kina
        from helpers.arrays import HostArray
        with kina.session("cpu") as host:
            kept = [np.asarray(host.zeros(3)), memoryview(host.zeros(3)), host.zeros(3, "bfloat16").__array__(),
                    host.adopt(HostArray(np.zeros(3))), host.adopt(bytearray(3)), host]
            kept.append(kept)
        print(float(kept[0].sum()))
        """
        )
        == "0.0\n"
    )


def test_exchanges_leave_nothing_behind(host):
    source = np.zeros((2, 3), "f4")
    wrapped = HostArray(source)

    def churn(count):
        for _ in range(count):
            tensor = host.adopt(wrapped)
            np.asarray(tensor)
            memoryview(tensor).release()
            with pytest.raises(BufferError):
                buffer_of(tensor.permute(1, 0), C_CONTIGUOUS)

    import tracemalloc

    churn(50)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        churn(1000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("exact", [True, False])
def test_the_description_may_be_of_subclasses(exact):
    """Of dict and tuple: an OrderedDict, a torch.Size, a namedtuple."""
    source = np.arange(6, dtype="f4").reshape(2, 3)
    described = dict(source.__array_interface__)
    shape = described["shape"] if exact else type("Size", (tuple,), {})(described["shape"])
    kind = dict if exact else type("Description", (dict,), {})
    described |= {"shape": shape, "data": (source.ctypes.data, False)}

    class Array:
        __array_interface__ = kind(described)

    with kina.session("cpu") as host:
        assert host.to_host(host.adopt(Array())).tolist() == source.tolist()
