"""Functions: what the driver says of them, how many fit, and what a signature may say."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest
from helpers.cuda import in_thread
from helpers.kernels import fill_entry, module_text, sized_entry

import kina
from kina.cuda.images import declared_parameters, read_image

FILL = "mut f32[], f32, u32"
STRUCT = r"""
struct Box { double low; float high; unsigned char tag; unsigned long long big; };
extern "C" __global__ void write_args(unsigned char *to, unsigned count, Box box) {
    *(unsigned *)(to + 8) = count;
    *(Box *)(to + 16) = box;
}
"""
BOX = np.dtype([("low", "f8"), ("high", "f4"), ("tag", "u1"), ("big", "u8")], align=True)


def function_of(session: kina.Session, image: str, name: str, signature: str | None = None) -> kina.cuda.Function:
    with session.raw("load") as raw:
        return raw.module(image).function(name, signature)


# What it is -----------------------------------------------------------------------------------------------


def test_what_the_driver_tells(session):
    fill = function_of(session, module_text(fill_entry(static_bytes=300, limit=".maxntid 128, 1, 1")), "fill")
    assert fill.max_threads_per_block == 128
    assert 300 <= fill.shared_bytes < 400
    most = session.device_info.max_shared_bytes_per_block_optin
    assert fill.max_dynamic_shared_bytes == most - fill.shared_bytes
    assert 1 <= fill.registers <= 255
    assert fill.local_bytes == 0
    assert fill.constant_bytes >= 0
    assert fill.ptx_version == (7, 0)
    assert fill.binary_version[0] == session.device_info.compute_capability[0]
    session.close()
    assert fill.registers >= 1  # known for good


# How many fit ---------------------------------------------------------------------------------------------


def test_blocks_of_a_multiprocessor(session):
    fill = function_of(session, module_text(fill_entry()), "fill")
    most = session.device_info.max_threads_per_multiprocessor
    launches = session.counters().launches
    assert fill.max_active_blocks(kina.LaunchConfig(1, 1024)) == most // 1024
    assert fill.max_active_blocks(kina.LaunchConfig(1, (8, 8, 4))) == most // 256
    half = fill.max_dynamic_shared_bytes // 2 - 1024  # each block takes 1 KiB more
    assert fill.max_active_blocks(kina.LaunchConfig(1, 32, shared_bytes=half)) == 2
    assert fill.max_active_blocks(kina.LaunchConfig(1, 32, shared_bytes=half + 2048)) == 1
    assert in_thread(lambda: fill.max_active_blocks(kina.LaunchConfig(1, 1024))) == most // 1024
    assert session.counters().launches == launches
    for config in (kina.LaunchConfig(1, 1025), kina.LaunchConfig(1, 1, shared_bytes=1 << 20)):
        with pytest.raises(kina.InvalidConfigError, match="limit"):
            fill.max_active_blocks(config)


def test_clusters_of_a_device(session):
    fill = function_of(session, module_text(fill_entry(), version="7.8", target="sm_90"), "fill")
    pairs = fill.max_active_clusters(kina.LaunchConfig(1024, 1024, cluster=2))
    assert 1 <= pairs <= session.device_info.multiprocessor_count
    with pytest.raises(kina.InvalidConfigError, match="no cluster"):
        fill.max_active_clusters(kina.LaunchConfig(1, 32))


def test_a_block_that_fills_the_device(session):
    fill = function_of(session, module_text(fill_entry(limit=".maxntid 512, 1, 1")), "fill")
    threads, blocks = fill.suggest_block()
    assert threads <= 512
    assert threads % 32 == 0
    held = fill.max_active_blocks(kina.LaunchConfig(1, threads))
    assert blocks == held * session.device_info.multiprocessor_count
    assert fill.suggest_block(max_threads=64)[0] <= 64
    assert fill.suggest_block(shared_bytes=fill.max_dynamic_shared_bytes)[1] == session.device_info.multiprocessor_count
    for arguments in ({"shared_bytes": -1}, {"max_threads": 1.5}, {"shared_bytes": 1 << 20}, {"max_threads": True}):
        with pytest.raises(kina.InvalidConfigError):
            fill.suggest_block(**arguments)


def test_a_runtime_that_is_closed_is_asked_nothing_wrong(runtime):
    with kina.session(runtime) as session:
        fill = function_of(session, module_text(fill_entry()), "fill")
    runtime.close()
    assert fill.max_active_blocks(kina.LaunchConfig(1, 1024)) >= 1
    assert fill.suggest_block()[0] >= 32


# The same words, the same function ------------------------------------------------------------------------


def test_a_module_keeps_its_functions_while_it_is_cached(runtime):
    image = module_text(fill_entry())
    with kina.session(runtime) as session, session.raw("load") as raw:
        module = raw.module(image)
        fill = module.function("fill", FILL)
        assert module.function("fill", FILL) is fill
        assert module.function("fill") is not fill
        assert raw.module(image).function("fill", FILL) is fill
        for number in range(64):  # the cache's bound
            raw.module(module_text(fill_entry(f"fill_{number}")))
        other = module.function("fill", FILL)
        assert other is not fill
        assert module.function("fill", FILL) is not other
        for function in (fill, other):
            y = session.zeros(8)
            function.launch(kina.LaunchConfig.linear(8), y, 2.0, 8)
            assert session.to_host(y).sum() == 16


# Signatures -----------------------------------------------------------------------------------------------


def test_what_is_only_written(session):
    fill = function_of(session, module_text(fill_entry()), "fill", "out f32[], f32, u32")
    y = session.zeros(8)
    with session.raw("fill") as raw:
        fill.launch(kina.LaunchConfig.linear(8), y, 3.0, 8)
        fill.launch(kina.LaunchConfig.linear(8), raw.mut(y), 4.0, 8)
    with session.raw("fill") as raw, pytest.raises(kina.ArgumentError, match="pass a mut"):
        fill.launch(kina.LaunchConfig.linear(8), raw.ref(y), 4.0, 8)
    assert session.to_host(y).tolist() == [4.0] * 8


@pytest.mark.parametrize("typed", [True, False])
def test_structs_go_by_value(session, typed):
    box = np.array((1.5, -2.5, 7, 2**63 + 5), BOX)[()]
    assert BOX.itemsize == 24
    with session.raw("struct") as raw:
        module = raw.module(STRUCT)
        write = module.function("write_args", "mut u8[], u32, bytes[24]" if typed else None)
        assert write.parameters == ((0, 8), (8, 4), (16, 24))
        for argument in (box, box.tobytes()):
            to = session.zeros(40, "uint8")
            if typed:
                write.launch(kina.LaunchConfig(1, 1), to, 9, argument)
            else:
                write.launch(kina.LaunchConfig(1, 1), raw.mut(to), kina.u32(9), argument)
            found = session.to_host(to).tobytes()
            assert struct.unpack_from("<I", found, 8) == (9,)
            seen = np.frombuffer(found, BOX, 1, 16)[0]
            assert seen == box


@pytest.mark.parametrize("argument", [b"", bytes(23), bytes(25), np.zeros(1, BOX), 5, "x" * 24, None, bytearray(24)])
def test_structs_of_another_size_or_kind(session, argument):
    with session.raw("struct") as raw:
        write = raw.module(STRUCT).function("write_args", "mut u8[], u32, bytes[24]")
        to = session.zeros(40, "uint8")
        with pytest.raises(kina.ArgumentError, match=r"argument 2 of write_args is a struct"):
            write.launch(kina.LaunchConfig(1, 1), to, 9, argument)
    assert session.to_host(to).sum() == 0


@pytest.mark.parametrize(
    "word", ["bytes", "bytes[]", "bytes[0]", "bytes[-1]", "mut bytes[4]", "bytes[123456]", "out f32"]
)
def test_words_that_are_none(session, word):
    with session.raw("load") as raw:
        module = raw.module(module_text(sized_entry("sized", 8)))
        with pytest.raises(kina.ArgumentError, match="signature"):
            module.function("sized", word)


DECLARED = module_text(
    ".visible .entry typed(.param .u64 .ptr .global .align 16 typed_0, .param .f32 typed_1, .param .u32 typed_2,\n"
    "  .param .align 8 .b8 typed_3[16], .param .b16 typed_4, .param .f64 typed_5, .param .s8 typed_6,\n"
    "  .param .b32 typed_7) { ret; }\n",
    version="9.0",
)  # fmt: skip
RIGHT = ["f32[]", "f32", "u32", "bytes[16]", "f16", "f64", "i8", "f32"]


@pytest.mark.parametrize(
    ("at", "word"),
    [
        (0, "mut u8[]"),
        (2, "i32"),
        (4, "bf16"),
        (4, "u16"),
        (6, "bool"),
        (6, "u8"),
        (7, "i32"),
        (7, "bytes[4]"),
        (3, "c128"),
    ],
)
def test_a_signature_may_say_what_fits(session, at, word):
    words = RIGHT.copy()
    for signature in (words, [*words[:at], word, *words[at + 1 :]]):
        function_of(session, DECLARED, "typed", ", ".join(signature))


@pytest.mark.parametrize(
    ("at", "word", "declared"),
    [(1, "u32", "f32"), (1, "bytes[4]", "f32"), (2, "f32", "u32"), (2, "bytes[4]", "u32"), (5, "u64", "f64"),
     (5, "f32[]", "f64"), (0, "f64", "u64"), (3, "bytes[8]", "16 bytes")],
)  # fmt: skip
def test_a_signature_that_contradicts_the_kernel(session, at, word, declared):
    words = [*RIGHT[:at], word, *RIGHT[at + 1 :]]
    with session.raw("load") as raw:
        module = raw.module(DECLARED)
        with pytest.raises(kina.ArgumentError, match=rf"parameter {at} of typed .*{declared}"):
            module.function("typed", ", ".join(words))
        module.function("typed", ", ".join(RIGHT))


@pytest.mark.parametrize("options", [[], ["--gpu-architecture=compute_80"]])
def test_compiled_kernels_declare_their_types_too(session, options):
    source = "template <typename T> __global__ void f(T *x, T value, int n, unsigned char flag) {}\n"
    with session.raw("load") as raw:
        module = raw.module(source, options=options, name_expressions=["f<float>", "f<double>"])
        module.function("f<float>", "mut f32[], f32, i32, bool")
        with pytest.raises(kina.ArgumentError, match=r"parameter 2 of f<float> is declared \.[us]32"):
            module.function("f<float>", "mut f32[], f32, f32, bool")
        with pytest.raises(kina.ArgumentError, match=r"parameter 1 of f<double> is declared \.f64"):
            module.function("f<double>", "mut f64[], u64, i32, bool")


@pytest.mark.parametrize(
    ("declared", "word"),
    [
        (".align 8 .b8 x[8]", "mut f32[]"),  # a pointer that is a __grid_constant__, or alone in a struct
        (".align 8 .b8 x[8]", "ptr"),
        (".f32 x[2]", "bytes[8]"),
        (".f32 x[2]", "c64"),
        (".u32 x[1]", "f32"),
        (".align 4 .b8 x[4]", "f32"),
    ],
)
def test_what_is_declared_as_bits_may_be_anything(session, declared, word):
    function_of(session, module_text(f".visible .entry f(.param {declared}) {{ ret; }}\n"), "f", word)


def test_kernels_as_the_compiler_writes_them(session):
    source = """
    #include <cuda_fp16.h>
    #include <cuda_bf16.h>
    enum Kind : short { A, B };
    struct One { float *data; };
    extern "C" __global__ void all(float *const __grid_constant__ a, const float *__restrict__ b, One c, float *d,
        bool e, char f, unsigned char g, short h, Kind i, long j, size_t k, __half l, __nv_bfloat16 m, float2 n,
        const int (&o)[4], float (*p)[3]) {}
    """
    words = "mut f32[], f32[], f32[], ptr, bool, i8, u8, i16, i16, i64, u64, f16, bf16, bytes[8], i32[], f32[]"
    with session.raw("all") as raw:
        module = raw.module(source)
        assert len(module.function("all", words).parameters) == 16


def test_reading_takes_no_longer_than_the_text():
    begin = time.process_time()
    for text in (b"/* " * 200_000, b".entry a(" * 100_000, b".entry a(.param " + b" " * 500_000 + b"!)", b"\n" * 10**6):
        declared_parameters(text)
        assert read_image(b"// \n" * 10**5 + text + b"x").kind == "source"
    assert time.process_time() - begin < 10


def test_declarations_are_read_from_any_ptx():
    text = b"""
    // .entry comment(.param .u32 x)
    .visible .entry none() { ret; }
    .entry bare
    { ret; }
    .visible .entry a( .param .u64 a_0 , .param .align 4 .b8 a_1 [ 12 ] /* , .param .f32 */ ) { ret; }
    .weak .entry $odd%name(.param .f32 p) { }
    .entry strange(.param .nothing x) {}
    """
    assert declared_parameters(text) == {
        "none": (), "bare": (), "a": ("u64", "b8[12]"), "$odd%name": ("f32",),
    }  # fmt: skip
