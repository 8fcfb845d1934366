# ruff: noqa: E731, F821, PT018, RUF059
# Bodies run in a process of their own, behind the names of conftest.PRELUDE.
from __future__ import annotations


def test_parameter_layout(inside):
    def body():
        start()
        text = b""".version 8.0
        .target sm_90
        .address_size 64
        // .entry not_this_one
        .visible .entry layout(.param .u8 a, .param .u64 .ptr .global .align 16 b, .param .align 16 .b8 c[20],
                               .param .f32 d, .param .u16 e) .maxntid 128, 2, 1
        { .shared .align 4 .b8 buffer[100]; ret; }
        """
        module = ok(cu.cuModuleLoadData(text + b"\0"))
        assert ok(cu.cuModuleGetFunctionCount(module)) == 1
        f = ok(cu.cuModuleGetFunction(module, b"layout"))
        found = []
        while code(cu.cuFuncGetParamInfo(f, len(found))) == 0:
            found.append(ok(cu.cuFuncGetParamInfo(f, len(found))))
        assert found == [(0, 1), (8, 8), (16, 20), (36, 4), (40, 2)]
        attribute = cu.CUfunction_attribute
        get = lambda a: ok(cu.cuFuncGetAttribute(a, f))
        assert get(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) == 256
        assert get(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) == 100
        assert get(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) == 49152 - 100
        assert code(cu.cuModuleGetFunction(module, b"absent")) == 500
        assert code(cu.cuModuleGetFunction(module, b"")) == 1

    inside(body)


def test_refused_images(inside):
    def body():
        start()
        option = cu.CUjit_option

        def load(text):
            log = bytearray(512)
            options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
            result = code(cu.cuModuleLoadDataEx(text + b"\0", 2, options, [log, len(log)]))
            return result, log.split(b"\0")[0].decode()

        text = "ptxas application ptx input, line 1; fatal   : Unsupported .version 99.9; current version is '9.0'"
        assert load(b".version 99.9\n.target sm_90\n") == (222, text)
        text = "error   : Binary format for key='0', ident='' is not recognized"
        assert load(b"this is no PTX") == load(b"") == (200, text)
        assert load(b"// a comment first\n.version 8.0\n.target sm_90\n")[0] == 0
        assert load(b".target sm_90\n") == (200, text)
        assert load(b".version 8.0\n.target sm_90\n.entry f(.param .u32 a { ret; }")[0] == 218
        assert load(b".version 8.0\n.target sm_90\n.entry f() { ret;")[0] == 218
        text = "ptxas fatal   : SM version specified by .target is higher than default SM version assumed"
        assert load(b".version 8.7\n.target sm_120\n") == (218, text)
        code_of, text = load(b".version 7.0\n.target sm_90\n")
        assert code_of == 218 and "PTX .version 7.0 does not support .target sm_90" in text
        assert load(b".version 8.0\n.target sm_90a\n")[0] == 0
        ok(cu.cuMemAlloc(16))

    inside(body)


def test_launch_arguments_both_ways(inside):
    def body():
        start()
        s = stream()
        module, function = kernels()
        out = ok(cu.cuMemAlloc(48))
        f = function("write_args")
        import struct

        packed = struct.pack("<QBxHfd", int(out), 1, 2, 3.0, 4.0) + bytes(range(24))
        lib = ctypes.CDLL("libcuda.so.1")
        size, buffer = ctypes.c_size_t(len(packed)), ctypes.create_string_buffer(packed, len(packed))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
        launch = lambda params, extra: lib.cuLaunchKernel(
            ctypes.c_void_p(int(f)), 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(int(s)), params, extra
        )
        assert launch(None, extra) == 0
        ok(cu.cuStreamSynchronize(s))
        assert sim.read(int(out), 48) == packed
        size.value = 49
        assert launch(None, extra) == 701
        size.value = 40
        broken = sim.violations
        assert launch(None, extra) == 0
        assert sim.violations == broken + 1
        assert launch(None, None) == 1
        ok(cu.cuMemsetD8Async(out, 0, 48, s))
        pieces = [packed[0:8], packed[8:9], packed[10:12], packed[12:16], packed[16:24], packed[24:]]
        buffers = [ctypes.create_string_buffer(p, len(p)) for p in pieces]
        params = (ctypes.c_void_p * 6)(*[ctypes.addressof(b) for b in buffers])
        assert launch(params, None) == 0
        assert launch(params, extra) == 1
        ok(cu.cuStreamSynchronize(s))
        assert sim.read(int(out), 48) == packed

    inside(body)


def test_launch_limits(inside):
    def body():
        start()
        s = stream()
        module, function = kernels()
        f = function("spin")
        args = ((0,), (ctypes.c_ulonglong,))
        launch = lambda grid, block, shared: code(cu.cuLaunchKernel(f, *grid, *block, shared, s, args, 0))
        one = (1, 1, 1)
        assert launch(one, one, 0) == 0
        assert launch((0, 1, 1), one, 0) == 1
        assert launch((1, 65536, 1), one, 0) == 1
        assert launch(one, (1025, 1, 1), 0) == 1
        assert launch(one, (32, 33, 1), 0) == 1
        assert launch(one, (1, 1, 65), 0) == 1
        assert launch(one, one, 49152) == 0
        assert launch(one, one, 49153) == 1
        most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(cu.cuFuncSetAttribute(f, most, 232448))
        assert launch(one, one, 232448) == 0
        assert code(cu.cuFuncSetAttribute(f, most, 232449)) == 1

    inside(body)


def test_sticky_fault(inside):
    def body():
        start()
        s, e = stream(), event()
        module, function = kernels()
        ok(cu.cuLaunchKernel(function("trap"), 1, 1, 1, 1, 1, 1, 0, s, 0, 0))
        assert code(cu.cuStreamSynchronize(s)) == 700
        for call in (lambda: cu.cuMemAlloc(4), lambda: cu.cuEventQuery(e), lambda: cu.cuStreamCreate(1)):
            assert code(call()) == 700
        ok(cu.cuCtxGetCurrent())

    inside(body)


def test_stale_function(inside):
    def body():
        start()
        module, function = kernels()
        f = function("spin")
        ok(cu.cuModuleUnload(module))
        assert code(cu.cuFuncGetParamInfo(f, 0)) == 400
        assert code(cu.cuModuleUnload(module)) == 400
        assert sim.violations == 2

    inside(body)


def test_unknown_entry_is_loud(inside):
    def body():
        start()
        module = ok(cu.cuModuleLoadData(b".version 8.0\n.target sm_90\n.entry mystery() { ret; }\0"))
        cu.cuLaunchKernel(ok(cu.cuModuleGetFunction(module, b"mystery")), 1, 1, 1, 1, 1, 1, 0, stream(), 0, 0)

    done = inside(body, check=False)
    assert done.returncode == -6 and "'mystery'" in done.stderr


def test_kernel_of_a_test(inside):
    def body():
        start()
        s = stream()
        text = b".version 8.0\n.target sm_90\n.entry double_it(.param .u64 a, .param .u32 n) { ret; }\0"
        f = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(text)), b"double_it"))
        x = array([1, 2, 3])

        @sim.kernel("double_it")
        def double_it(launch):
            n = launch.address(1)
            view = np.frombuffer(launch.memory(launch.address(0), 4 * n, write=True), np.float32)
            view *= 2

        ok(cu.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, ((x, 3), (None, ctypes.c_uint)), 0))
        ok(cu.cuStreamSynchronize(s))
        assert floats(x, 3).tolist() == [2, 4, 6]

    inside(body)
