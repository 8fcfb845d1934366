# ruff: noqa: E731, F821, PT018
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations

import pytest

SETUP = """
import mmap
from pathlib import Path

IMAGES = KERNELS_PTX.parents[1] / "data" / "cubin"
attribute = cu.CUfunction_attribute

def image(name):
    return (IMAGES / name).read_bytes()

def load(data):
    return cu.cuModuleLoadData(data + bytes(64))

def parameters(f):
    found = []
    while code(cu.cuFuncGetParamInfo(f, len(found))) == 0:
        found.append(ok(cu.cuFuncGetParamInfo(f, len(found))))
    return found

def ask(f, name):
    return ok(cu.cuFuncGetAttribute(getattr(attribute, f"CU_FUNC_ATTRIBUTE_{name}"), f))
"""


@pytest.mark.parametrize("name", ["kernels_sm90.cubin", "kernels_sm90a.cubin", "kernels_sm80_sm90.fatbin"])
def test_kernels_run(inside, name):
    def body():
        start()
        s = stream()
        module = ok(load(image(os.environ["IMAGE"])))
        assert ok(cu.cuModuleGetFunctionCount(module)) == 7
        get = lambda name: ok(cu.cuModuleGetFunction(module, name))
        x = array([0] * 100)
        ok(fill(get(b"fill"), s, x, 4.0, 100))
        ok(cu.cuStreamSynchronize(s))
        assert (floats(x, 100) == 4).all()
        assert parameters(get(b"saxpy")) == [(0, 8), (8, 8), (16, 4), (20, 4)]
        assert parameters(get(b"write_args")) == [(0, 8), (8, 1), (10, 2), (12, 4), (16, 8), (24, 24)]
        assert parameters(get(b"trap")) == []
        assert ask(get(b"write_args"), "NUM_REGS") == 22
        assert (ask(get(b"fill"), "BINARY_VERSION"), ask(get(b"fill"), "PTX_VERSION")) == (90, 70)
        assert code(cu.cuModuleGetFunction(module, b"absent")) == 500

    inside(body, setup=SETUP, env={"IMAGE": name})


@pytest.mark.parametrize("name", ["layouts_sm90.cubin", "layouts_sm90_cuda12.cubin"])
def test_what_an_image_tells(inside, name):
    def body():
        start()
        module = ok(load(image(os.environ["IMAGE"])))
        get = lambda name: ok(cu.cuModuleGetFunction(module, name))
        f = get(b"limited")
        assert parameters(f) == [(0, 8), (8, 1), (10, 2), (16, 8), (32, 40)]
        assert ask(f, "MAX_THREADS_PER_BLOCK") == 256
        assert ask(f, "SHARED_SIZE_BYTES") == 112  # 100, and as aligned as the dynamic part behind them
        assert ask(f, "MAX_DYNAMIC_SHARED_SIZE_BYTES") == 49152 - 112
        assert ask(f, "LOCAL_SIZE_BYTES") == 64
        f = get(b"clustered")
        assert parameters(f) == [(0, 4400), (4400, 4)]
        assert ask(f, "MAX_THREADS_PER_BLOCK") == 1024  # .reqntid is no limit, but the only shape
        assert [ask(f, f"REQUIRED_CLUSTER_{side}") for side in ("WIDTH", "HEIGHT", "DEPTH")] == [2, 2, 1]
        assert code(cu.cuFuncSetAttribute(f, attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, 1)) == 800
        assert ask(get(b"any_cluster"), "CLUSTER_SIZE_MUST_BE_SET") == 1
        values = {}
        for variable in (b"table", b"nine", b"factors"):
            address, nbytes = ok(cu.cuModuleGetGlobal(module, variable))
            values[variable] = sim.read(int(address), nbytes)
        assert values == {b"table": bytes(400), b"nine": b"\t\0\0\0", b"factors": b"\1\0\0\0\2\0\0\0"}
        assert code(cu.cuModuleGetGlobal(module, b"limited")) == 1
        assert code(cu.cuModuleGetGlobal(module, b"absent")) == 500

    inside(body, setup=SETUP, env={"IMAGE": name})


def test_the_ptx_tells_the_same(inside):
    def body():
        start()
        modules = [ok(load(image(name))) for name in ("layouts.ptx", "layouts_sm90.cubin")]
        for name in (b"limited", b"clustered", b"any_cluster", b"registers"):
            f, g = (ok(cu.cuModuleGetFunction(module, name)) for module in modules)
            assert parameters(f) == parameters(g)
            for question in ("MAX_THREADS_PER_BLOCK", "REQUIRED_CLUSTER_WIDTH", "CLUSTER_SIZE_MUST_BE_SET"):
                assert ask(f, question) == ask(g, question), (name, question)

    inside(body, setup=SETUP)


def test_other_architectures(inside):
    def body():
        start()
        assert code(load(image("kernels_sm80.cubin"))) == 209
        assert code(cu.cuLibraryLoadData(image("kernels_sm80.cubin"), [], [], 0, [], [], 0)) == 209
        parse = ctypes.CDLL("libcuda.so.1").kina_sim_parse_image
        result = lambda name, capability: parse(image(name), len(image(name)), capability)
        assert [result("kernels_sm80.cubin", c) for c in (80, 86, 90, 100)] == [0, 0, 209, 209]
        assert [result("kernels_sm90.cubin", c) for c in (86, 90)] == [209, 0]
        assert [result("kernels_sm90a.cubin", c) for c in (90, 92)] == [0, 209]
        assert [result("kernels_sm80_sm90.fatbin", c) for c in (75, 80, 89, 90, 100)] == [209, 0, 0, 0, 209]
        assert [result("kernels_sm80_ptx.fatbin", c) for c in (60, 75, 90, 120)] == [209, 0, 0, 0]
        module = ok(load(image("kernels_sm80_ptx.fatbin")))
        assert ask(ok(cu.cuModuleGetFunction(module, b"fill")), "PTX_VERSION") == 70

    inside(body, setup=SETUP)


def test_libraries_and_files(inside):
    def body():
        start()
        s = stream()
        path = str(IMAGES / "kernels_sm90.cubin").encode()
        library = ok(cu.cuLibraryLoadFromFile(path, [], [], 0, [], [], 0))
        assert code(cu.cuLibraryLoadFromFile(b"/no/such/file", [], [], 0, [], [], 0)) == 301
        kernel = ok(cu.cuLibraryGetKernel(library, b"fill"))
        assert ok(cu.cuKernelGetParamInfo(kernel, 2)) == (12, 4)
        assert int(kernel) in [int(k) for k in ok(cu.cuLibraryEnumerateKernels(7, library))]
        assert ok(cu.cuKernelGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, 0)) == 10
        ok(cu.cuKernelSetAttribute(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100000, kernel, 0))
        f = ok(cu.cuKernelGetFunction(kernel))
        assert ask(f, "MAX_DYNAMIC_SHARED_SIZE_BYTES") == 100000
        x = array([0] * 100)
        ok(fill(f, s, x, 4.0, 100)), ok(cu.cuStreamSynchronize(s))
        assert (floats(x, 100) == 4).all()
        ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoad(path)), b"fill"))
        layouts = ok(cu.cuLibraryLoadData(image("layouts_sm90.cubin"), [], [], 0, [], [], 0))
        assert ok(cu.cuLibraryGetGlobal(layouts, b"nine"))[1] == 4
        ok(cu.cuLibraryUnload(library))
        assert code(cu.cuKernelGetFunction(kernel)) == 400

    inside(body, setup=SETUP)


def test_images_cut_off_anywhere(inside):
    """With an end that cannot be read behind: nothing of it may be touched."""

    def body():
        start()
        libc = ctypes.CDLL(None)
        page = mmap.PAGESIZE
        room = mmap.mmap(-1, 16 * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(room))
        assert libc.mprotect(ctypes.c_void_p(first + 15 * page), page, 0) == 0
        lib = ctypes.CDLL("libcuda.so.1")
        for name in ("layouts_sm90.cubin", "kernels_sm80_sm90.fatbin"):
            whole = image(name)
            assert lib.kina_sim_parse_image(whole, len(whole), 90) == 0
            for size in range(0, len(whole), 1 if len(whole) < 20000 else 7):
                end = first + 15 * page - size
                ctypes.memmove(end, whole[:size], size)
                assert lib.kina_sim_parse_image(ctypes.c_void_p(end), size, 90) == 200, size
            for size in range(64, len(whole), 97):
                end = first + 15 * page - size
                ctypes.memmove(end, whole[:size], size)
                assert code(cu.cuModuleLoadData(end)) == 200, size
        assert sim.live()["modules"] == 0

    inside(body, setup=SETUP)


@pytest.mark.parametrize("seed", [1, 2])
def test_garbled_images(inside, seed):
    def body():
        import random

        start()
        draw = random.Random(int(os.environ["SEED"]))
        lib = ctypes.CDLL("libcuda.so.1")
        found = set()
        for name in ("layouts_sm90.cubin", "layouts_sm90_cuda12.cubin", "kernels_sm80_ptx.fatbin", "layouts.ptx"):
            whole = image(name)
            for _ in range(5000):
                data = bytearray(whole)
                for _ in range(draw.choice((1, 1, 2, 8))):
                    data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
                found.add(lib.kina_sim_parse_image(bytes(data), len(data), 90))
        assert found <= {0, 200, 209, 218, 222} and {0, 200} <= found, found

    inside(body, setup=SETUP, env={"SEED": str(seed)})
