"""CUDA C++: what is compiled, once, for which device, with which headers, and what is kept of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.cuda import in_thread, run_body

import kina
from kina._core.disk_cache import compiled_code
from kina.cuda import compiler
from kina.cuda.includes import look_through

# On the simulated driver an entry whose name begins with `fill` runs; any other only loads.
SOURCE = r"""
extern "C" __global__ void fill(float *y, float value, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = value;
}
"""
TEMPLATE = (
    SOURCE
    + r"""
template <typename T> __global__ void scale(T *y, T factor, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] *= factor;
}
"""
)
FILL = "mut f32[], f32, u32"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Nothing compiled before is found."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KINA_CACHE_DIR", str(folder))
    forget()
    return folder


def forget() -> None:
    """What this process keeps; not what is on disk."""
    compiler._kept.clear()
    compiler._kept_bytes = 0


@pytest.fixture
def compiled(monkeypatch) -> list[bytes]:
    """The sources that NVRTC was given."""
    sources: list[bytes] = []
    compile_program = compiler.compile_program

    def counted(source: bytes, *arguments: object) -> object:
        sources.append(source)
        return compile_program(source, *arguments)

    monkeypatch.setattr(compiler, "compile_program", counted)
    return sources


def module_of(source: object, runtime: kina.Runtime | None = None, **options: object) -> kina.cuda.Module:
    """Loaded on a Runtime of its own, if none is named."""
    with kina.session(runtime or kina.Runtime(0)) as session, session.raw("compile") as raw:
        return raw.module(source, **options)


def unique(number: int) -> str:
    return f"// {number}\n{SOURCE}"


# What is made ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [str, str.encode, lambda text: bytearray(text.encode()), lambda text: text + "\0"])
def test_source_is_compiled_loaded_and_runs(session, spelling):
    with session.raw("fill") as raw:
        module = raw.module(spelling(SOURCE))
        y = session.zeros(1000)
        module.function("fill", FILL).launch(kina.LaunchConfig.linear(1000), y, 2.5, 1000)
    assert (session.to_host(y) == 2.5).all()
    assert (module.kind, module.log) == ("cubin", "")


def test_a_file_is_compiled_with_its_folder(session, tmp_path):
    (tmp_path / "value.h").write_text("#define VALUE 3.5f\n")
    path = tmp_path / "program.cu"
    path.write_text('#include "value.h"\n' + SOURCE + 'extern "C" __global__ void other(float *y) { *y = VALUE; }\n')
    with session.raw("fill") as raw:
        module = raw.module(path)
        assert module.function("other", "mut f32[]").parameters == ((0, 8),)
        path.write_text("nonsense")
        with pytest.raises(kina.CompileError, match=r"program\.cu\(1\)"):
            raw.module(path)


def test_names_are_found_by_their_expressions(session):
    with session.raw("scale") as raw:
        module = raw.module(TEMPLATE, name_expressions=["scale<float>", "scale<double>"])
        assert module.function("scale<float>", "mut f32[], f32, u32").parameters == ((0, 8), (8, 4), (12, 4))
        assert module.function("scale<double>", "mut f64[], f64, u32").parameters == ((0, 8), (8, 8), (16, 4))
        assert module.function("fill", FILL).name == "fill"
        with pytest.raises(kina.SymbolLookupError, match="scale<int>"):
            module.function("scale<int>")


@pytest.mark.gpu
def test_an_expression_runs(session):
    with session.raw("scale") as raw:
        scale = raw.module(TEMPLATE, name_expressions=["scale<double>"]).function(
            "scale<double>", "mut f64[], f64, u32"
        )
        y = session.from_host(np.arange(1000.0))
        scale.launch(kina.LaunchConfig.linear(1000), y, 3.0, 1000)
    assert (session.to_host(y) == 3 * np.arange(1000.0)).all()


def test_ptx_is_made_on_request(session):
    with session.raw("ptx") as raw:
        for options in (["--gpu-architecture=compute_90"], ["-arch=compute_80"], ["-arch", "compute_75"]):
            assert raw.module(SOURCE, options=options).kind == "ptx"


def test_headers_of_the_toolkit_are_found(session):
    with session.raw("half") as raw:
        module = raw.module("#include <cuda_fp16.h>\n__device__ __half x;\n" + SOURCE)
        assert module.function("fill", FILL).parameters == ((0, 8), (8, 4), (12, 4))


@pytest.mark.parametrize("header", ["cuda/std/complex", "cooperative_groups.h", "mma.h", "cub/block/block_reduce.cuh"])
def test_headers_of_its_libraries_are_found_and_kept(compiled, header):
    for _ in range(2):
        assert module_of(f"#include <{header}>\n" + SOURCE).kind == "cubin"
    assert len(compiled) == 1


def test_warnings_are_kept(cache):
    source = SOURCE + "\n__global__ void lazy() { int unused; }\n"
    for _ in range(3):  # compiled, from memory, from disk
        module = module_of(source)
        assert "unused" in module.log
        assert "warning" in module.log
    forget()
    assert "unused" in module_of(source).log


# What is refused ------------------------------------------------------------------------------------------


def test_what_the_compiler_says_is_kept(session):
    with session.raw("broken") as raw, pytest.raises(kina.CompileError, match=r"kina\.cu\(2\): error") as caught:
        raw.module("// first\nint broken(\n")
    assert caught.value.log.count("error") >= 1
    assert caught.value.operation == "module"
    with session.raw("fine") as raw:
        assert raw.module(SOURCE).kind == "cubin"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (["--nonsense"], kina.CompileError, "option"),
        (["--gpu-architecture=sm_1"], kina.CompileError, "sm_1"),
        (["-arch"], kina.ArgumentError, "no value"),
        (["-dlto"], kina.UnsupportedError, "linked"),
        (["--gpu-architecture=lto_90"], kina.UnsupportedError, "linked"),
        ("-O3", kina.ArgumentError, "sequence of str"),
        (7, kina.ArgumentError, "sequence of str"),
        ([b"-O3"], kina.ArgumentError, "no str"),
        (["-D\0X"], kina.ArgumentError, "NUL"),
        ([""], kina.ArgumentError, "empty"),
        ([" -DX"], kina.ArgumentError, "blanks"),
        (["-DX\ud800"], kina.ArgumentError, "no text"),
        (["--dlink-time-opt"], kina.UnsupportedError, "linked"),
    ],
)
def test_options_that_are_refused(session, options, error, match):
    with session.raw("options") as raw:
        for _ in range(2):
            with pytest.raises(error, match=match):
                raw.module(SOURCE, options=options)
        assert raw.module(SOURCE).kind == "cubin"


@pytest.mark.parametrize("names", [["nothing_here"], ["scale<nonsense>"], ["scale<float"]])
def test_expressions_that_are_refused(session, names):
    with session.raw("names") as raw, pytest.raises(kina.CompileError):
        raw.module(TEMPLATE, name_expressions=names)


def test_code_of_another_architecture_is_named(session):
    exact = "sm_{}{}".format(*session.device_info.compute_capability)
    with session.raw("old") as raw, pytest.raises(kina.ModuleLoadError, match=f"sm_80, the device is {exact}"):
        raw.module(SOURCE, options=["--gpu-architecture=sm_80"])


def test_without_the_library_it_says_what_to_install(session):
    def body() -> None:
        import cuda.pathfinder

        def missing(name: str) -> None:
            raise cuda.pathfinder.DynamicLibNotFoundError(f"no {name} anywhere")

        cuda.pathfinder.load_nvidia_dynamic_lib = missing
        with kina.session("cuda:0") as session, session.raw("x") as raw:
            assert not session.supports(kina.Capability.RUNTIME_COMPILATION)
            with pytest.raises(kina.UnavailableError, match=r"kina\[nvrtc\].*no nvrtc anywhere"):
                raw.module("__global__ void f() {}")

    run_body(body)
    assert session.supports(kina.Capability.RUNTIME_COMPILATION)


# What is compiled once ------------------------------------------------------------------------------------


def test_one_compilation_serves_the_process(compiled):
    first = module_of(SOURCE)
    assert module_of(SOURCE) is not first  # another Runtime's
    assert len(compiled) == 1


def test_one_compilation_serves_other_processes(compiled, cache):
    module_of(SOURCE)
    forget()
    module = module_of(SOURCE)
    assert len(compiled) == 1
    assert len(list(cache.iterdir())) == 1
    with kina.session(kina.Runtime(0)) as session, session.raw("fill") as raw:
        y = session.zeros(10)
        raw.module(SOURCE).function("fill", FILL).launch(kina.LaunchConfig.linear(10), y, 1.0, 10)
        assert session.to_host(y).sum() == 10
    assert module.kind == "cubin"


def test_an_empty_folder_name_turns_the_disk_off(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("KINA_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    module_of(SOURCE)
    forget()
    module_of(SOURCE)
    assert len(compiled) == 2
    assert not (tmp_path / "home").exists()


def test_the_same_words_ask_nobody(session, compiled):
    with session.raw("again") as raw:
        module = raw.module(SOURCE, options=("-DX=1",))
        for _ in range(3):
            assert raw.module(SOURCE, options=("-DX=1",)) is module
            assert raw.module(SOURCE.encode(), options=["-DX=1"]) is module
    assert len(compiled) == 1


def test_what_the_environment_adds_counts(session, compiled, monkeypatch):
    with session.raw("flags") as raw:
        plain = raw.module(SOURCE)
        monkeypatch.setenv("NVRTC_APPEND_FLAGS", "-DVALUE=2")
        assert raw.module(SOURCE) is not plain
        monkeypatch.delenv("NVRTC_APPEND_FLAGS")
        assert raw.module(SOURCE) is plain


def test_keys_differ(compiled, monkeypatch):
    variants = [
        (SOURCE, {}),
        (SOURCE + " ", {}),
        (SOURCE, {"options": ["-DX"]}),
        (SOURCE, {"options": ["-DX", "-DY"]}),
        (SOURCE, {"options": ["-DX -DY"]}),
        (SOURCE, {"options": ["--gpu-architecture=compute_80"]}),
        (SOURCE, {"options": ["--gpu-architecture=compute_90"]}),
        (TEMPLATE, {"name_expressions": ["scale<float>"]}),
        (TEMPLATE, {"name_expressions": ["scale<int>"]}),
    ]
    for source, options in variants:
        if options.get("options") != ["-DX -DY"]:
            module_of(source, **options)
    known = len(compiled)
    assert known == len(variants) - 1
    library = compiler.nvrtc()
    for changed in (library._replace(version=(99, 9)), library._replace(identity=(1, 2))):
        monkeypatch.setattr(compiler, "nvrtc", lambda changed=changed: changed)
        compiler._toolkit_folders.cache_clear()
        module_of(SOURCE)
    assert len(compiled) == known + 2


def test_two_threads_compile_once(monkeypatch):
    begun, go, sources = threading.Event(), threading.Event(), []
    compile_program = compiler.compile_program

    def slow(source: bytes, *arguments: object) -> object:
        sources.append(source)
        begun.set()
        assert go.wait(60)
        return compile_program(source, *arguments)

    monkeypatch.setattr(compiler, "compile_program", slow)
    made: list[object] = []
    threads = [threading.Thread(target=lambda: made.append(module_of(SOURCE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    time.sleep(0.1)  # the others come to wait for it
    go.set()
    for thread in threads:
        thread.join()
    assert len(sources) == 1
    assert len(made) == 4


def test_who_waits_is_told_of_the_failure_too(monkeypatch):
    go, failures = threading.Event(), []
    compile_program = compiler.compile_program

    def slow(*arguments: object) -> object:
        assert go.wait(60)
        return compile_program(*arguments)

    monkeypatch.setattr(compiler, "compile_program", slow)

    def attempt() -> None:
        try:
            module_of("nonsense")
        except kina.CompileError as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    go.set()
    for thread in threads:
        thread.join()
    assert len(failures) == 3
    assert len(set(map(id, failures))) == 3
    assert all("error" in error.log for error in failures)


def test_an_interrupt_of_one_thread_is_not_the_others(monkeypatch, compiled):
    begun, go = threading.Event(), threading.Event()
    compile_program = compiler.compile_program
    attempts = []

    def once(*arguments: object) -> object:
        attempts.append(arguments)
        if len(attempts) == 1:
            begun.set()
            assert go.wait(60)
            raise KeyboardInterrupt
        return compile_program(*arguments)

    monkeypatch.setattr(compiler, "compile_program", once)
    interrupted, made = [], []

    def first() -> None:
        try:
            module_of(SOURCE)
        except KeyboardInterrupt:
            interrupted.append(True)

    one, other = threading.Thread(target=first), threading.Thread(target=lambda: made.append(module_of(SOURCE)))
    one.start()
    assert begun.wait(60)
    other.start()
    time.sleep(0.1)
    go.set()
    one.join()
    other.join()
    assert (interrupted, len(made), len(attempts)) == ([True], 1, 2)


def test_a_signal_may_compile_what_its_thread_compiles(monkeypatch):
    compile_program = compiler.compile_program
    inside = []

    def interrupted(*arguments: object) -> object:
        if not inside:
            inside.append(True)
            inside.append(compiler.compile_source(SOURCE.encode(), (), (), (9, 0)))
        return compile_program(*arguments)

    monkeypatch.setattr(compiler, "compile_program", interrupted)
    outside = in_thread(lambda: compiler.compile_source(SOURCE.encode(), (), (), (9, 0)))
    assert inside[1].image == outside.image
    assert compiler._flights == {}


def test_an_interrupt_anywhere_leaves_no_flight(monkeypatch, compiled):
    def interrupt(*arguments: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "_find_or_make", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile_source(SOURCE.encode(), (), (), (9, 0))
    assert compiler._flights == {}


# Headers --------------------------------------------------------------------------------------------------


@pytest.fixture
def headers(tmp_path) -> Path:
    folder = tmp_path / "headers"
    (folder / "deep").mkdir(parents=True)
    (folder / "outer.h").write_text('#include "deep/inner.h"\n')
    (folder / "deep" / "inner.h").write_text('#include "innermost.h"\n')
    (folder / "deep" / "innermost.h").write_text("#define VALUE 1\n")
    return folder


USING = '#include <outer.h>\n#if VALUE == 1\nextern "C" __global__ void one() {}\n#else\n' \
    'extern "C" __global__ void other() {}\n#endif\n'  # fmt: skip


@pytest.mark.parametrize("spelling", ["-I{}", "--include-path={}"])
def test_a_header_that_changes_is_noticed(session, compiled, headers, spelling):
    options = [spelling.format(headers)]
    with session.raw("headers") as raw:
        first = raw.module(USING, options=options)
        first.function("one")
        assert raw.module(USING, options=options) is first
        assert len(compiled) == 1
        (headers / "deep" / "innermost.h").write_text("#define VALUE 2\n")
        second = raw.module(USING, options=options)
        second.function("other")
    forget()
    with kina.session(kina.Runtime(0)) as other, other.raw("headers") as raw:
        raw.module(USING, options=options).function("other")
    assert len(compiled) == 2


def test_a_header_that_comes_first_is_noticed(compiled, headers, tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    options = [f"-I{before}", f"-I{headers}"]
    with kina.session(kina.Runtime(0)) as session, session.raw("headers") as raw:
        raw.module(USING, options=options).function("one")
        (before / "outer.h").write_text("#define VALUE 2\n")
        raw.module(USING, options=options).function("other")
    assert len(compiled) == 2


def test_a_header_included_by_an_option_is_noticed(compiled, headers):
    source = USING.partition("\n")[2]
    options = [f"--include-path={headers}", "--pre-include=outer.h"]
    with kina.session(kina.Runtime(0)) as session, session.raw("headers") as raw:
        raw.module(source, options=options).function("one")
        (headers / "deep" / "innermost.h").write_text("#define VALUE 2\n")
        raw.module(source, options=options).function("other")
    assert len(compiled) == 2


SPELLINGS = {
    "plain": b"#include <outer.h>\n",
    "quoted": b'#include "outer.h"\n',
    "blanks": b" \f\v #\v include\f<outer.h> // why\n",
    "commented": b"#include <outer.h> /* why */\n",
    "macro": b"#define NAME <outer.h>\n#include NAME\n",
    "digraph": b"%:include <outer.h>\n",
    "spliced": b"#include\\\n <outer.h>\n",
    "comment": b"#/* a comment */include <outer.h>\n",
    "before": b"/* a comment */ #include <outer.h>\n",
    "over-lines": b"# /*\n*/ include <outer.h>\n",
    "tight": b"# include/**/<outer.h>\n",
    "string": b'#define S "/*"\n/**/#include <outer.h> /* */\n',
    "next": b"#include_next <outer.h>\n",
    "asked": b"#if __has_include(<outer.h>)\n#define ASKED\n#endif\n#include <outer.h>\n",
    "defined": b"#if defined(__has_include) && __has_include(<outer.h>)\n#include <outer.h>\n#endif\n",
    "asked-by-macro": b"#define HAS __has_include\n#if HAS(<outer.h>)\n#include <outer.h>\n#endif\n",
    "latin-1": b'#if 0\n#include "gr\xf6\xdfe.h"\n#endif\n#include <outer.h>\n',
}


@pytest.mark.parametrize("lines", SPELLINGS.values(), ids=SPELLINGS)
def test_headers_are_never_missed(headers, lines):
    """In the same Runtime, in another one, and from the disk."""
    source = lines + USING.partition("\n")[2].encode()
    options = [f"-I{headers}"]
    with kina.session(kina.Runtime(0)) as session, session.raw("headers") as raw:
        raw.module(source, options=options).function("one")
        (headers / "deep" / "innermost.h").write_text("#define VALUE 2\n")
        raw.module(source, options=options).function("other")
        forget()
        with kina.session(kina.Runtime(0)) as other, other.raw("headers") as theirs:
            theirs.module(source, options=options).function("other")
            (headers / "deep" / "innermost.h").write_text("#define VALUE 1\n")
            theirs.module(source, options=options).function("one")
        raw.module(source, options=options).function("one")


def test_a_header_that_appears_is_noticed(headers):
    source = "#if __has_include(<late.h>)\n#include <late.h>\n#endif\n" + USING.partition("\n")[2]
    with kina.session(kina.Runtime(0)) as session, session.raw("headers") as raw:
        raw.module(source, options=[f"-I{headers}"]).function("other")
        (headers / "late.h").write_text("#define VALUE 1\n")
        raw.module(source, options=[f"-I{headers}"]).function("one")
        (headers / "late.h").unlink()
        raw.module(source, options=[f"-I{headers}"]).function("other")


def test_headers_that_include_each_other(headers, compiled):
    (headers / "a.h").write_text('#pragma once\n#include "deep/../b.h"\n')
    (headers / "b.h").write_text('#pragma once\n#include "deep/../a.h"\n#include "outer.h"\n')
    source = '#include "a.h"\n' + USING.partition("\n")[2]
    for _ in range(2):
        module_of(source, options=[f"-I{headers}"])
    assert len(compiled) == 1


def test_the_working_folder_is_not_searched(session, headers, monkeypatch):
    monkeypatch.chdir(headers)
    with session.raw("here") as raw:
        with pytest.raises(kina.CompileError, match=r"outer\.h"):
            raw.module(USING.replace("<outer.h>", '"outer.h"'))
        raw.module(USING, options=["-I."]).function("one")
        (headers / "deep" / "inner.h").write_text("#define VALUE 2\n")
        raw.module(USING, options=["-I."]).function("other")
        monkeypatch.chdir(headers.parent)
        with pytest.raises(kina.CompileError, match=r"outer\.h"):
            raw.module(USING, options=["-I."])


def test_a_file_finds_what_lies_beside_it_first(session, headers, monkeypatch, tmp_path):
    (headers / "program.cu").write_text(USING.replace("<outer.h>", '"outer.h"'))
    (tmp_path / "outer.h").write_text("#define VALUE 2\n")
    monkeypatch.chdir(tmp_path)
    with session.raw("beside") as raw:
        raw.module(headers / "program.cu").function("one")
        raw.module(Path("headers/program.cu")).function("one")
        (headers / "deep" / "innermost.h").write_text("#define VALUE 2\n")
        raw.module(headers / "program.cu").function("other")


def test_a_header_that_changes_while_it_is_read(session, headers, monkeypatch, cache):
    compile_program = compiler.compile_program

    def meanwhile(*arguments: object) -> object:
        (headers / "deep" / "innermost.h").write_text("#define VALUE 2\n")
        return compile_program(*arguments)

    monkeypatch.setattr(compiler, "compile_program", meanwhile)
    with session.raw("meanwhile") as raw:
        raw.module(USING, options=[f"-I{headers}"]).function("other")
        assert not cache.exists()
        (headers / "deep" / "innermost.h").write_text("#define VALUE 1\n")
        monkeypatch.setattr(compiler, "compile_program", compile_program)
        raw.module(USING, options=[f"-I{headers}"]).function("one")


def test_options_of_files_are_not_kept(compiled, tmp_path):
    options = tmp_path / "options"
    options.write_text("-O1")
    for _ in range(2):
        module_of(SOURCE, options=[f"-Xptxas=--options-file={options}"])
    assert len(compiled) == 2


def test_looking_through_takes_no_longer_than_the_text():
    begin = time.process_time()
    for text in (
        b"/* " * 100_000 + b"include",
        b"#include <" * 100_000,
        b"#if __has_include( " * 100_000,
        b"#if __has_include(<" * 20_000,
        b"# " * 500_000 + b"include",
        b"\\ " * 500_000 + b"include",
        b"*/" * 500_000 + b"include",
    ):
        look_through(text, [], [])
    assert time.process_time() - begin < 10


def test_what_cannot_be_looked_through_is_not_kept(compiled, cache, headers):
    source = '#define NAME <outer.h>\n#include NAME\nextern "C" __global__ void f() {}\n'
    for _ in range(2):
        module_of(source, options=[f"-I{headers}"])
    assert len(compiled) == 2
    assert not cache.exists()


# The disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"kina cache 1\n", b"\0" * 500])
def test_a_damaged_entry_is_compiled_again(compiled, cache, content):
    module_of(SOURCE)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    forget()
    module_of(SOURCE)
    assert len(compiled) == 2
    forget()
    module_of(SOURCE)
    assert len(compiled) == 2


WRONG = {"kind": "cubin", "log": "", "names": {}, "declared": {}, "settled": True}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}\0", b"[]\0", b"\0", b'{"kind": 7}\0image', b"\xff\xfe\0"),
        *(json.dumps(WRONG | {name: 7}).encode() + b"\0image" for name in ("kind", "log", "names", "declared")),
        json.dumps(WRONG | {"kind": "elf"}).encode() + b"\0image",
        json.dumps(WRONG | {"declared": {"f": 5}}).encode() + b"\0image",
    ],
)
def test_an_entry_of_another_make_is_compiled_again(compiled, cache, content):
    module_of(SOURCE)
    (path,) = cache.iterdir()
    compiled_code().put(path.stem, content)
    forget()
    assert module_of(SOURCE).kind == "cubin"
    assert len(compiled) == 2


def test_a_folder_of_others_is_not_used(compiled, cache):
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    for _ in range(2):
        module_of(SOURCE)
        forget()
    assert len(compiled) == 2
    assert list(cache.iterdir()) == []


PROCESS = """
import pathlib, sys, time
from kina.cuda import compiler
from kina.cuda.includes import look_through
asked = []
compile_program = compiler.compile_program
def counted(*arguments):
    asked.append(arguments)
    return compile_program(*arguments)
compiler.compile_program = counted
compiler.nvrtc()
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.001)
for number in range(4):
    compiler.compile_source(f"// {number}\\n__global__ void f() {{}}".encode(), (), (), (9, 0))
print(len(asked))
"""


def test_eight_processes_on_a_cold_cache(cache, tmp_path):
    go, ready = tmp_path / "go", [tmp_path / f"ready{number}" for number in range(8)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, each, go], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for each in ready
    ]
    try:
        until = time.monotonic() + 60
        while not all(each.exists() for each in ready) and time.monotonic() < until:
            time.sleep(0.01)
        go.touch()
        told = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [errors for _, errors in told] == [""] * 8
    assert all(int(count) <= 4 for count, _ in told)
    assert len(list(cache.iterdir())) == 4
