"""Modules, functions, launches: what is accepted, and what each refusal is called."""

from __future__ import annotations

from typing import Any

from driver_sim.oracle.scenarios.calls import prepare
from driver_sim.oracle.script import KERNELS, Script, scenario


def ptx(body: str = "", *, version: str = "7.8", target: str = "sm_70") -> dict[str, str]:
    return {"text": f".version {version}\n.target {target}\n.address_size 64\n{body}"}


def entry(name: str, *lines: str, directive: str = "") -> str:
    """An entry without parameters, of these lines."""
    body = "\n".join(f"    {line}" for line in (*lines, "ret;"))
    return f".visible .entry {name}()\n{directive}\n{{\n{body}\n}}\n"


def shared_user(name: str, nbytes: int, directive: str = "") -> str:
    """An entry with a static shared array, used so that the compiler keeps it."""
    return entry(
        name,
        f".shared .align 4 .b8 block[{nbytes}];",
        ".reg .b32 %r<2>;",
        "ld.shared.b32 %r1, [block];",
        "st.shared.b32 [block+4], %r1;",
        directive=directive,
    )


EMPTY_ENTRY = ".visible .entry nothing()\n{\n    ret;\n}\n"

IMAGES: list[tuple[str, dict[str, str]]] = [
    ("an empty text", {"text": ""}),
    ("blanks", {"text": " \n\n"}),
    ("words", {"text": "this is no module"}),
    ("a comment, then PTX", {"text": "// comment\n/* another */\n" + ptx(EMPTY_ENTRY)["text"]}),
    ("a comment alone", {"text": "// comment\n"}),
    ("another directive first", {"text": ".target sm_70\n.version 7.8\n"}),
    ("a word with a dot", {"text": ".nonsense\n"}),
    ("a dot alone", {"text": ".\n"}),
    ("only a version", {"text": ".version 7.8\n"}),
    ("a version without a number", {"text": ".version\n.target sm_70\n"}),
    ("no target", {"text": ".version 7.8\n.address_size 64\n"}),
    ("no address size", {"text": ".version 7.8\n.target sm_70\n" + EMPTY_ENTRY}),
    ("no entries", ptx()),
    ("one entry", ptx(EMPTY_ENTRY)),
    ("an old version", ptx(EMPTY_ENTRY, version="6.0")),
    ("version 1.0", ptx(EMPTY_ENTRY, version="1.0")),
    ("the driver's version", ptx(EMPTY_ENTRY, version="9.0")),
    ("the next version", ptx(EMPTY_ENTRY, version="9.1")),
    ("version 99.9", ptx(EMPTY_ENTRY, version="99.9")),
    ("target sm_90", ptx(EMPTY_ENTRY, target="sm_90")),
    ("target sm_90a", ptx(EMPTY_ENTRY, version="8.0", target="sm_90a")),
    ("target sm_80", ptx(EMPTY_ENTRY, target="sm_80")),
    ("target sm_100, too new", ptx(EMPTY_ENTRY, version="8.6", target="sm_100")),
    ("target sm_100a", ptx(EMPTY_ENTRY, version="8.6", target="sm_100a")),
    ("target sm_120", ptx(EMPTY_ENTRY, version="8.7", target="sm_120")),
    ("target sm_90 in a version that does not know it", ptx(EMPTY_ENTRY, version="7.0", target="sm_90")),
    ("target sm_50", ptx(EMPTY_ENTRY, target="sm_50")),
    ("target sm_10", ptx(EMPTY_ENTRY, target="sm_10")),
    ("target sm_999", ptx(EMPTY_ENTRY, target="sm_999")),
    ("target without sm", ptx(EMPTY_ENTRY, target="compute_70")),
    ("a syntax error in a body", ptx(".visible .entry bad()\n{\n    this is wrong;\n}\n")),
    ("an unknown instruction", ptx(".visible .entry bad()\n{\n    frobnicate.u32 %r1, %r2;\n}\n")),
    ("an undeclared register", ptx(".visible .entry bad()\n{\n    mov.u32 %r1, 0;\n    ret;\n}\n")),
    ("a body that does not end", ptx(".visible .entry bad()\n{\n    ret;\n")),
    ("a closing brace too many", ptx(EMPTY_ENTRY + "}\n")),
    ("the same entry twice", ptx(EMPTY_ENTRY + EMPTY_ENTRY)),
    (
        "an external function that is nowhere",
        ptx(".extern .func outside();\n.visible .entry bad()\n{\n    call outside, ();\n    ret;\n}\n"),
    ),
    (
        "too much static shared memory",
        ptx(shared_user("bad", 65536)),
    ),
]


@scenario("images: each with the result and the log of the JIT")
def module_images(s: Script) -> None:
    s.start()
    for about, image in IMAGES:
        s.cuModuleLoadDataEx("&m", image, {"log": 4096}, about=about)
    s.cuModuleLoadData("&m", None)
    s.cuModuleLoadData(None, KERNELS)
    s.cuModuleLoadDataEx("&m", {"text": "garbage"}, {"log": 16})
    s.cuModuleLoadData("&m", {"text": "garbage"})
    s.cuModuleLoadDataEx("&m", KERNELS, {"log": 4096})


@scenario("symbols of a module")
def module_symbols(s: Script) -> None:
    s.start()
    variables = (
        ".visible .global .align 4 .u32 counter = 5;\n"
        ".visible .global .align 8 .b8 table[24];\n"
        ".visible .const .align 4 .u32 constant = 6;\n"
    )
    s.cuModuleLoadData("&m", ptx(variables + EMPTY_ENTRY))
    s.buffer("b")
    s.cuModuleGetFunction("&f", "$m", "nothing")
    s.cuModuleGetFunction("&g", "$m", "nothing")
    for name in ("missing", "", "counter", "no", "NOTHING", "nothing "):
        s.cuModuleGetFunction("&none", "$m", name)
    s.cuModuleGetFunction("&none", "$m", None)
    s.cuModuleGetFunction(None, "$m", "nothing")
    s.cuModuleGetFunction("&none", None, "nothing")
    s.cuModuleGetFunctionCount("&count", "$m")
    for name in ("counter", "table", "constant", "missing", "nothing", ""):
        s.cuModuleGetGlobal("&address", "&size", "$m", name)
    s.cuModuleGetGlobal(None, None, "$m", "counter")
    s.cuModuleGetGlobal(None, "&size", "$m", "table")
    s.cuModuleGetGlobal("&counter", "&size", "$m", "counter")
    s.cuMemcpyDtoH("$b", "$counter", 4)
    s.read("$b")
    s.cuFuncGetModule("&of", "$f")
    s.cuModuleUnload("$m")
    s.cuModuleUnload(None)


@scenario("a module that was unloaded, and its functions; each in a process of its own")
def dead_module_uses(s: Script) -> None:
    for call in (
        ("cuModuleUnload", "$module"),
        ("cuModuleGetFunction", "&f", "$module", "copy"),
        ("cuFuncGetAttribute", "&value", 0, "$fill"),
        ("cuFuncGetParamInfo", "$fill", 0, "&offset", "&size"),
        ("cuFuncLoad", "$fill"),
        ("cuLaunchKernel", "$fill", 1, 1, 1, 32, 1, 1, 0, "$s1", [["ptr", "$a"], ["f32", 1.0], ["u32", 16]], None),
        ("cuLaunchKernel", None, 1, 1, 1, 32, 1, 1, 0, "$s1", [], None),
        ("cuFuncGetAttribute", "&value", 0, None),
        ("cuFuncLoad", None),
    ):
        s.restart(" ".join(map(str, call[:3])))
        s.start()
        s.cuStreamCreate("&s1", 1)
        s.cuMemAlloc("&a", 64)
        s.module("fill")
        s.cuModuleUnload("$module")
        s.call(*call)


@scenario("attributes of functions: values, limits, numbers that are none")
def function_attributes(s: Script) -> None:
    s.start()
    s.module("fill")
    s.cuModuleLoadData("&m", ptx(shared_user("shared_user", 4096, ".maxntid 64, 2, 1")))
    s.cuModuleGetFunction("&shared_user", "$m", "shared_user")
    for function in ("$fill", "$shared_user"):
        for attribute in (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 99, -1):
            s.cuFuncGetAttribute("&value", attribute, function)
        for value in (0, 1024, 49152, 49153, 232448 - 4096, 232448 - 4095, 232448, 232449, -1):
            s.cuFuncSetAttribute(function, 8, value)
            s.cuFuncGetAttribute("&value", 8, function)
        for value in (-2, -1, 0, 50, 100, 101):
            s.cuFuncSetAttribute(function, 9, value)
            s.cuFuncGetAttribute("&value", 9, function)
        for attribute in (0, 1, 4, 10, 11, 14, 15, 99):
            s.cuFuncSetAttribute(function, attribute, 1)
            s.cuFuncGetAttribute("&value", attribute, function, **({"any": ["out"]} if attribute == 4 else {}))
    s.cuFuncGetAttribute(None, 0, "$fill")


@scenario("parameters of functions: offsets, sizes, past the last")
def function_parameters(s: Script) -> None:
    s.start()
    s.module("fill", "write_args", "trap")
    for index in range(8):
        s.cuFuncGetParamInfo("$write_args", index, "&offset", "&size")
    for index in (2, 3, 4, 1 << 40):
        s.cuFuncGetParamInfo("$fill", index, "&offset", "&size")
    s.cuFuncGetParamInfo("$trap", 0, "&offset", "&size")
    s.cuFuncGetParamInfo("$fill", 0, None, "&size")
    s.cuFuncGetParamInfo("$fill", 0, "&offset", None)
    s.cuFuncGetParamInfo("$fill", 0, None, None)


FILL: list[Any] = [["ptr", "$a"], ["f32", 3.0], ["u32", 16]]


@scenario("shapes of a launch: zero, the limits, beyond")
def launch_shapes(s: Script) -> None:
    prepare(s)
    for grid, block in (
        ((0, 1, 1), (32, 1, 1)),
        ((1, 0, 1), (32, 1, 1)),
        ((1, 1, 0), (32, 1, 1)),
        ((1, 1, 1), (0, 1, 1)),
        ((1, 1, 1), (1, 0, 1)),
        ((1, 1, 1), (1, 1, 0)),
        ((1, 1, 1), (1024, 1, 1)),
        ((1, 1, 1), (1025, 1, 1)),
        ((1, 1, 1), (512, 2, 1)),
        ((1, 1, 1), (512, 3, 1)),
        ((1, 1, 1), (1, 1024, 1)),
        ((1, 1, 1), (1, 1, 64)),
        ((1, 1, 1), (1, 1, 65)),
        ((1, 1, 1), (1 << 31, 1, 1)),
        ((1, 65535, 1), (1, 1, 1)),
        ((1, 65536, 1), (1, 1, 1)),
        ((1, 1, 65535), (1, 1, 1)),
        ((1, 1, 65536), (1, 1, 1)),
        ((1 << 31, 1, 1), (1, 1, 1)),
        ((0xFFFFFFFF, 1, 1), (1, 1, 1)),
        ((0, 0, 0), (0, 0, 0)),
    ):
        s.cuLaunchKernel("$fill", *grid, *block, 0, "$s1", FILL, None)
    for shared in (0, 1024, 49152, 49153, 232448, 232449, 0xFFFFFFFF):
        s.cuLaunchKernel("$fill", 1, 1, 1, 32, 1, 1, shared, "$s1", FILL, None)
    s.cuFuncSetAttribute("$fill", 8, 65536)
    for shared in (65536, 65537):
        s.cuLaunchKernel("$fill", 1, 1, 1, 32, 1, 1, shared, "$s1", FILL, None)
    s.cuFuncSetAttribute("$fill", 8, 1024)
    for shared in (1024, 1025, 49152, 49153):
        s.cuLaunchKernel("$fill", 1, 1, 1, 32, 1, 1, shared, "$s1", FILL, None)
    s.cuStreamSynchronize("$s1")


@scenario("a function with a largest block of its own")
def launch_max_threads(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuMemAlloc("&a", 64)
    body = ".param .u64 y, .param .f32 v, .param .u32 n"
    for name, directive in (("fill_max", ".maxntid 64, 2, 1"), ("fill_req", ".reqntid 64, 1, 1")):
        s.cuModuleLoadData("&m", ptx(f".visible .entry {name}({body})\n{directive}\n{{\n    ret;\n}}\n"))
        s.cuModuleGetFunction("&f", "$m", name)
        s.cuFuncGetAttribute("&value", 0, "$f")
        for block in ((64, 1, 1), (64, 2, 1), (128, 1, 1), (1, 128, 1), (129, 1, 1), (32, 1, 1)):
            s.cuLaunchKernel("$f", 1, 1, 1, *block, 0, "$s1", [["ptr", "$a"], ["f32", 0.0], ["u32", 0]], None)
    s.cuStreamSynchronize("$s1")


@scenario("parameters as a buffer: exact, too small, too large, with kernelParams too, none at all")
def launch_extra(s: Script) -> None:
    prepare(s)
    for size in (16, 15, 12, 0, 17, 20, 24, 4096, 5000):
        s.cuLaunchKernel("$fill", 1, 1, 1, 32, 1, 1, 0, "$s1", None, {"values": FILL, "size": size})
    s.cuLaunchKernel("$fill", 1, 1, 1, 32, 1, 1, 0, "$s1", FILL, {"values": FILL})
    s.cuLaunchKernel("$trap", 0, 1, 1, 32, 1, 1, 0, "$s1", None, None)
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyDtoH("$buffer", "$a", 64)
    s.read("$buffer", count=2, kind="f32")


@scenario("kernelParams of NULL for a kernel with parameters")
def launch_without_params(s: Script) -> None:
    prepare(s)
    s.cuLaunchKernel("$fill", 1, 1, 1, 32, 1, 1, 0, "$s1", None, None)
    s.cuStreamSynchronize("$s1")


def config(
    grid: tuple[int, int, int], block: tuple[int, int, int] = (32, 1, 1), *attributes: Any, **more: Any
) -> dict[str, Any]:
    return {
        "CUlaunchConfig": {
            "grid": list(grid), "block": list(block), "stream": "$s1", "attributes": list(attributes), **more,
        }
    }  # fmt: skip


@scenario("cuLaunchKernelEx: clusters, cooperation, refusals")
def launch_extended(s: Script) -> None:
    prepare(s)
    launches = [
        config((1, 1, 1)),
        config((0, 1, 1)),
        config((1, 1, 1), (1025, 1, 1)),
        config((2, 1, 1), (32, 1, 1), ["cluster", [2, 1, 1]]),
        config((3, 1, 1), (32, 1, 1), ["cluster", [2, 1, 1]]),
        config((8, 1, 1), (32, 1, 1), ["cluster", [8, 1, 1]]),
        config((16, 1, 1), (32, 1, 1), ["cluster", [16, 1, 1]]),
        config((32, 1, 1), (32, 1, 1), ["cluster", [32, 1, 1]]),
        config((4, 4, 1), (32, 1, 1), ["cluster", [2, 2, 1]]),
        config((4, 4, 1), (32, 1, 1), ["cluster", [2, 3, 1]]),
        config((2, 1, 1), (32, 1, 1), ["cluster", [0, 1, 1]]),
        config((2, 1, 1), (32, 1, 1), ["cluster", [0, 0, 0]]),
        config((132, 1, 1), (32, 1, 1), ["cooperative", [1]]),
        config((100000, 1, 1), (1024, 1, 1), ["cooperative", [1]]),
        config((2, 1, 1), (32, 1, 1), ["cooperative", [1]], ["cluster", [2, 1, 1]]),
        config((1, 1, 1), (32, 1, 1), ["priority", [0]]),
    ]
    for launch in launches:
        s.cuLaunchKernelEx(launch, "$fill", FILL, None)
    s.cuFuncSetAttribute("$fill", 14, 1)
    s.cuLaunchKernelEx(config((16, 1, 1), (32, 1, 1), ["cluster", [16, 1, 1]]), "$fill", FILL, None)
    s.cuLaunchCooperativeKernel("$fill", 1, 1, 1, 32, 1, 1, 0, "$s1", FILL)
    s.cuLaunchCooperativeKernel("$fill", 100000, 1, 1, 1024, 1, 1, 0, "$s1", FILL)
    s.cuStreamSynchronize("$s1")
    s.cuLaunchKernelEx(None, "$fill", FILL, None)


@scenario("functions and streams of two contexts of one device")
def launch_across_contexts(s: Script) -> None:
    prepare(s)
    s.cuCtxCreate("&c", None, 0, 0)
    s.cuStreamCreate("&sc", 1)
    s.cuModuleLoadData("&mc", KERNELS)
    s.cuModuleGetFunction("&fc", "$mc", "fill")
    s.launch("fill", "$s1", FILL)
    s.launch("fill", "$sc", FILL)
    s.launch("fc", "$s1", FILL)
    s.launch("fc", "$sc", FILL)
    s.launch("fill", 0, FILL)
    s.cuMemsetD8Async("$a", 0, 16, "$s1")
    s.cuMemAllocAsync("&p", 64, "$s1")
    s.cuModuleGetFunction("&other", "$module", "copy")
    s.cuFuncGetAttribute("&value", 0, "$fill")
    s.cuFuncLoad("$other")
    s.cuModuleUnload("$module")
    s.cuStreamDestroy("$s1")
    s.cuEventDestroy("$e1")
    s.cuStreamSynchronize("$sc")


@scenario("libraries: kernels without a context, functions in two")
def libraries(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuMemAlloc("&a", 64)
    s.cuLibraryLoadData("&lib", KERNELS, None, None, 0, None, None, 0, on="bare")
    s.cuLibraryGetKernel("&k", "$lib", "fill", on="bare")
    s.cuLibraryGetKernel("&again", "$lib", "fill")
    s.cuLibraryGetKernel("&none", "$lib", "missing")
    s.cuLibraryGetModule("&m", "$lib", on="bare")
    s.cuLibraryGetModule("&m", "$lib")
    s.cuKernelGetFunction("&f", "$k", on="bare")
    s.cuKernelGetFunction("&f", "$k")
    s.launch("f", "$s1", FILL)
    s.launch("k", "$s1", FILL)
    s.cuModuleUnload("$m")
    s.cuStreamSynchronize("$s1")
    word = s.gate("$s1")
    s.launch("k", "$s1", FILL)
    s.cuLibraryUnload("$lib", gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s1")


@scenario("what the bytes of arguments are: mixed sizes arrive where the parameters lie")
def launch_arguments(s: Script) -> None:
    prepare(s)
    s.cuModuleGetFunction("&write_args", "$module", "write_args")
    s.cuMemsetD8("$a", 0, 64)
    s.cuCtxSynchronize(None)
    values = [["ptr", "$a"], ["u8", 17], ["u16", 1234], ["f32", 1.5], ["f64", -2.25], ["u64", 99]]
    s.launch(
        "write_args", "$s1", values, threads=1, **{"about": "the last parameter has 24 bytes, of which 8 are given"}
    )
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyDtoH("$buffer", "$a", 64)
    s.read("$buffer+8", kind="u8")
    s.read("$buffer+10", kind="u16")
    s.read("$buffer+12", kind="f32")
    s.read("$buffer+16", kind="f64")
    s.read("$buffer+24", kind="u64")
