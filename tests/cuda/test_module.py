"""Modules: what is loaded, what is refused, what is cached, and when code leaves the device."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers.cuda import (
    driver,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    simulation,
    stalled,
    stream_of,
)
from helpers.kernels import fill_entry, module_text, sized_entry

import kina
from kina.cuda.images import targets_of

PTX = module_text(fill_entry())
FILL = "mut f32[], f32, u32"
IMAGES = Path(__file__).resolve().parents[1] / "data" / "cubin"
CUBIN = (IMAGES / "kernels_sm90.cubin").read_bytes()
FATBIN = (IMAGES / "kernels_sm80_sm90.fatbin").read_bytes()


def named(number: int) -> str:
    """A module of its own, with the entry `fill_<number>`."""
    return module_text(fill_entry(f"fill_{number}"))


def check_fill(session, function, value=3.0) -> None:
    """The function fills, so its code is on the device and the session is usable."""
    y = session.zeros(100)
    with session.raw("check"):
        function.launch(kina.LaunchConfig.linear(100), y, value, 100)
    assert (session.to_host(y) == np.float32(value)).all()


@pytest.fixture
def fill(session):
    with session.raw("load") as raw:
        return raw.module(PTX).function("fill", FILL)


# Images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "image",
    [
        PTX,
        PTX.encode(),
        bytearray(PTX.encode()),
        memoryview(PTX.encode()),
        memoryview(PTX.encode().ljust(-(-len(PTX) // 4) * 4)).cast("I"),
        memoryview(bytes(reversed(PTX.encode())))[::-1],
        PTX + "\0",
        PTX.encode() + b"\0\0\0",
        "// first\n" + PTX,
        PTX.replace("\n", "\r\n"),
    ],
    ids=["str", "bytes", "bytearray", "memoryview", "of-words", "reversed", "nul", "nuls", "comment", "crlf"],
)
def test_every_spelling_of_an_image_loads(session, image):
    with session.raw("load") as raw:
        function = raw.module(image).function("fill", FILL)
    check_fill(session, function)


def test_a_changed_buffer_does_not_change_the_module(session):
    image = bytearray(PTX.encode())
    with session.raw("load") as raw:
        module = raw.module(image)
        image[:] = b" " * len(image)
        with pytest.raises(kina.ModuleLoadError):
            raw.module(image)
        assert raw.module(PTX) is module


@pytest.mark.parametrize(
    ("image", "error", "match"),
    [
        ("", kina.ModuleLoadError, "empty"),
        (b"", kina.ModuleLoadError, "empty"),
        (b"\0\0", kina.ModuleLoadError, "empty"),
        (" \n\t", kina.ModuleLoadError, "empty"),
        (PTX[:30] + "\0" + PTX[30:], kina.ModuleLoadError, "byte 30 .*NUL"),
        (".version of nothing", kina.ModuleLoadError, "refused"),
        (PTX.partition("\n")[2], kina.CompileError, "refused"),  # no .version: CUDA C++
        (PTX[: len(PTX) // 2], kina.ModuleLoadError, "refused"),
        (module_text(sized_entry("f", 4), target="sm_999"), kina.ModuleLoadError, "refused"),
        (CUBIN[:63], kina.ModuleLoadError, "63 bytes"),
        (CUBIN[:-1], kina.ModuleLoadError, f"of {len(CUBIN) - 1}"),
        (CUBIN[: len(CUBIN) // 2], kina.ModuleLoadError, "headers end|ends at"),
        (CUBIN[:4] + b"\1" + CUBIN[5:], kina.ModuleLoadError, "64 bits"),
        (CUBIN[:18] + b"\x3e\0" + CUBIN[20:], kina.ModuleLoadError, "machine 62"),
        (FATBIN[:15], kina.ModuleLoadError, "15 bytes"),
        (FATBIN[:-1], kina.ModuleLoadError, f"of {len(FATBIN) - 1}"),
        (FATBIN[: len(FATBIN) // 2], kina.ModuleLoadError, "ends at"),
        (IMAGES, kina.ModuleLoadError, "cannot be read.*irectory"),
        (IMAGES / "nothing.cubin", kina.ModuleLoadError, "cannot be read.*No such file"),
        (None, kina.ArgumentError, "NoneType"),
        (7, kina.ArgumentError, "int"),
        ([PTX], kina.ArgumentError, "list"),
        (np.frombuffer(PTX.encode(), np.uint8), kina.ArgumentError, "ndarray"),
    ],
    ids=["empty", "empty-bytes", "nuls", "blank", "inner-nul", "garbage", "no-version", "half", "target",
         "cubin-header", "cubin-end", "cubin-half", "cubin-32", "cubin-x86", "fatbin-header", "fatbin-end",
         "fatbin-half", "folder", "no-file", "none", "int", "list", "ndarray"],
)  # fmt: skip
def test_refused_images_leave_nothing_behind(session, fill, image, error, match):
    before = session.counters()
    with session.raw("load") as raw:
        for _ in range(2):  # a second attempt finds no failure in the cache
            with pytest.raises(error, match=match) as caught:
                raw.module(image)
            assert caught.value.operation == "module"
    after = session.counters()
    assert (after.modules_loaded, after.leases, after.events_recorded) == (
        before.modules_loaded, before.leases, before.events_recorded,
    )  # fmt: skip
    check_fill(session, fill)


def test_what_the_loader_said_is_kept(session):
    with session.raw("load") as raw, pytest.raises(kina.ModuleLoadError) as caught:
        raw.module(".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry f( {")
    assert "error" in caught.value.log or "fatal" in caught.value.log
    assert caught.value.log.splitlines()[0][:80] in str(caught.value)
    assert caught.value.driver_error is not None


def test_a_version_that_is_too_new_names_both(session, fill):
    with session.raw("load") as raw, pytest.raises(kina.ModuleLoadError) as caught:
        raw.module(module_text(sized_entry("f", 4), version="99.9"))
    versions = re.findall(r"\d+\.\d+", str(caught.value))
    assert versions[0] == "99.9"
    assert 7 < float(versions[1]) < 99
    check_fill(session, fill)


def fatbin_of_one(path: Path) -> bytes:
    """The first member alone."""
    data = path.read_bytes()
    header, _ = struct.unpack_from("<HQ", data, 6)
    size, payload = struct.unpack_from("<IQ", data, header + 4)
    return data[:8] + struct.pack("<Q", size + payload) + data[16 : header + size + payload]


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ((IMAGES / "kernels_sm80.cubin").read_bytes(), "CUBIN"),
        (IMAGES / "kernels_sm80.cubin", "CUBIN"),
        (fatbin_of_one(IMAGES / "kernels_sm80_ptx.fatbin"), "fatbin"),
    ],
    ids=["cubin", "file", "fatbin"],
)
def test_code_for_another_architecture_names_both(session, fill, image, kind):
    exact = "sm_{}{}".format(*session.device_info.compute_capability)
    loaded = session.counters().modules_loaded
    with session.raw("load") as raw:
        for _ in range(2):
            with pytest.raises(
                kina.ModuleLoadError, match=f"the {kind} is code for sm_80, the device is {exact}: "
            ) as told:
                raw.module(image)
            assert told.value.driver_error.name == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert session.counters().modules_loaded == loaded
    check_fill(session, fill)


@pytest.mark.parametrize("name", ["kernels_sm80_ptx.fatbin", "kernels_sm80_sm90.fatbin", "kernels_sm80.cubin",
                                  "layouts_sm90_cuda12.cubin", "kernels_sm90a.cubin"])  # fmt: skip
def test_images_say_what_they_are_made_for(name):
    kind = name.partition(".")[2]
    expected = {"kernels_sm80_ptx": ["sm_80", "compute_75"], "kernels_sm80_sm90": ["sm_80", "sm_90"]}
    words = re.findall(r"sm\d+", name)
    assert targets_of(kind, (IMAGES / name).read_bytes()) == expected.get(
        name.partition(".")[0], [f"sm_{word[2:]}" for word in words]
    )


@pytest.mark.parametrize("image", [PTX, CUBIN, FATBIN], ids=["ptx", "cubin", "fatbin"])
@pytest.mark.parametrize("extra", [{"options": ("-O0",)}, {"name_expressions": ("f",)}])
def test_images_take_no_options(session, image, extra):
    with session.raw("load") as raw, pytest.raises(kina.ArgumentError, match="options"):
        raw.module(image, **extra)


@pytest.mark.parametrize("name", ["kernels_sm90.cubin", "kernels_sm80_sm90.fatbin", "kernels_sm80_ptx.fatbin"])
@pytest.mark.parametrize("spelling", [Path.read_bytes, lambda path: memoryview(path.read_bytes()), Path], ids=str)
def test_binary_images_load_and_run(session, name, spelling):
    with session.raw("load") as raw:
        module = raw.module(spelling(IMAGES / name))
        assert module.kind == name.partition(".")[2]
        assert raw.module((IMAGES / name).read_bytes()) is module
        fill = module.function("fill", FILL)
    check_fill(session, fill)


def test_a_file_of_ptx_loads(session, tmp_path):
    (tmp_path / "fill.ptx").write_text(PTX)
    with session.raw("load") as raw:
        module = raw.module(tmp_path / "fill.ptx")
        assert module is raw.module(PTX)
        assert (module.kind, module.log) == ("ptx", "")
        (tmp_path / "fill.ptx").write_text(named(1))
        assert raw.module(tmp_path / "fill.ptx") is not module


def released() -> memoryview:
    view = memoryview(PTX.encode())
    view.release()
    return view


@pytest.mark.parametrize(
    ("image", "error"),
    [(released(), kina.ArgumentError), (Path("nul\0inside.ptx"), kina.ModuleLoadError)],
    ids=["released", "nul"],
)
def test_what_cannot_be_read(session, image, error):
    with session.raw("load") as raw, pytest.raises(error, match="cannot be read"):
        raw.module(image)


def test_files_may_have_any_name(session, tmp_path):
    folder = tmp_path / os.fsdecode(b"gr\xf6\xdfe")
    folder.mkdir()
    for name, text in (("fill.ptx", PTX), ("fill.cu", 'extern "C" __global__ void fill(float *, float, unsigned) {}')):
        (folder / name).write_text(text)
        with session.raw("load") as raw:
            assert raw.module(folder / name).function("fill", FILL).name == "fill"


@pytest.mark.simulated
def test_the_collector_may_take_runtimes_in_any_order(sim):
    """Modules keep functions, which keep modules: the cache ends that, whatever of it is cleared first."""
    gc.collect()
    kina.Runtime(0).close()
    before = sim.live()["modules"]

    class Holder:
        pass

    for size in (1, 2, 64):
        for _ in range(10):
            holder = Holder()
            holder.me, holder.runtime = holder, kina.Runtime(0)
            with kina.session(holder.runtime) as session, session.raw("load") as raw:
                holder.kept = [raw.module(named(number)).function(f"fill_{number}", FILL) for number in range(size)][:3]
            del holder, session, raw
            gc.collect()
    with kina.session(kina.Runtime(0)) as session:
        session.synchronize()
    assert sim.live()["modules"] == before


@pytest.mark.simulated
def test_threads_may_open_their_first_raw_blocks_at_once():
    def body():
        import threading

        threading.settrace(None)  # a build for coverage crashes where threads that are traced import it at once
        together, failures = threading.Barrier(8), []

        def work():
            together.wait()
            try:
                with kina.session(kina.Runtime(0)) as session, session.raw("first"):
                    pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    run_body(body)


@pytest.mark.simulated
@pytest.mark.parametrize("at", range(0, 64, 3))
def test_a_garbled_header_ends_in_an_error(session, fill, at):
    """The driver reads as far as the headers say, so they are looked at before."""
    for value in (0x00, 0x7F, 0xFF):
        for image in (CUBIN, FATBIN):
            garbled = bytearray(image)
            garbled[at] = value
            with session.raw("load") as raw, contextlib.suppress(kina.ModuleLoadError, kina.CompileError):
                raw.module(bytes(garbled))
    check_fill(session, fill)


@pytest.mark.simulated
@pytest.mark.parametrize("result", [2, 209, 999])
def test_a_load_that_fails_is_not_cached(session, sim, result):
    with session.raw("load") as raw:
        with sim.failing("cuModuleLoadDataEx", result=result), pytest.raises(kina.KinaError):
            raw.module(PTX)
        function = raw.module(PTX).function("fill", FILL)
    check_fill(session, function)


# Functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "nope", "Fill", "fill ", "fil", "fill\0", "fill\0x", "füll", "x" * 5000, "\ud800"]
)
def test_an_unknown_entry_is_named(session, fill, name):
    with session.raw("load") as raw:
        module = raw.module(PTX)
        with pytest.raises(kina.SymbolLookupError):
            module.function(name)
    check_fill(session, fill)


@pytest.mark.parametrize("name", [None, b"fill", 3])
def test_a_name_is_text(session, name):
    with session.raw("load") as raw:
        module = raw.module(PTX)
        with pytest.raises(TypeError):
            module.function(name)


def test_a_function_tells_what_the_driver_knows(session):
    image = module_text(fill_entry(static_bytes=300, limit=".maxntid 128, 1, 1"), sized_entry("sized", 1, 8, 20, 2))
    with session.raw("load") as raw:
        module = raw.module(image)
        function = module.function("fill")
        sized = module.function("sized")
        nothing = raw.module(module_text(sized_entry("nothing"))).function("nothing", "")
    assert function.parameters == ((0, 8), (8, 4), (12, 4))
    assert function.max_threads_per_block == 128
    assert 300 <= function.shared_bytes < 400
    assert sized.parameters == ((0, 1), (8, 8), (16, 20), (36, 2))
    assert nothing.parameters == ()
    assert function.name == "fill"
    assert function.module is module


def test_functions_live_in_later_blocks_and_sessions(runtime):
    with kina.session(runtime) as session:
        with session.raw("load") as raw:
            function = raw.module(PTX).function("fill", FILL)
        check_fill(session, function, 1.0)
        check_fill(session, function, 2.0)
    with kina.session(runtime) as session:
        check_fill(session, function, 3.0)
        with kina.session(runtime) as inner:
            check_fill(inner, function, 4.0)


def test_no_block_no_use(session, fill):
    y = session.zeros(8)
    with session.raw("over"):
        pass
    with pytest.raises(kina.SessionClosedError):
        fill.launch(kina.LaunchConfig.linear(8), y, 1.0, 8)
    with pytest.raises(kina.SessionClosedError):
        fill.module.function("fill")
    check_fill(session, fill)


def test_another_runtimes_block_does_not_serve(session, fill):
    other = kina.Runtime(0)
    with kina.session(other) as theirs, theirs.raw("other") as raw:
        y = theirs.zeros(8)
        with pytest.raises(kina.SessionClosedError):
            fill.launch(kina.LaunchConfig.linear(8), y, 1.0, 8)
        with pytest.raises(kina.SessionClosedError):
            fill.module.function("fill")
        assert raw.module(PTX) is not fill.module  # each Runtime has its own code
    other.close()
    check_fill(session, fill)


def test_another_thread_is_refused(session, fill):
    y = session.zeros(8)
    with session.raw("here") as raw:
        for use in (
            lambda: fill.launch(kina.LaunchConfig.linear(8), y, 1.0, 8),
            lambda: fill.module.function("fill"),
            lambda: raw.module(PTX),
        ):
            with pytest.raises(kina.WrongThreadError):
                in_thread(use)
    check_fill(session, fill)


def test_a_function_outlives_everything_but_runs_no_more(runtime):
    with kina.session(runtime) as session, session.raw("load") as raw:
        function = raw.module(PTX).function("fill", FILL)
        y = session.zeros(8)
    runtime.close()
    assert function.parameters[0] == (0, 8)
    with pytest.raises(kina.SessionClosedError):
        function.launch(kina.LaunchConfig.linear(8), y, 1.0, 8)


# The cache ------------------------------------------------------------------------------------------------


def test_the_same_content_is_the_same_module(runtime):
    with kina.session(runtime) as session, session.raw("load") as raw:
        module = raw.module(PTX)
        assert raw.module(PTX.encode() + b"\0") is module
        assert raw.module(bytearray(PTX.encode())) is module
        assert raw.module(PTX + "\n") is not module
        loaded = session.counters().modules_loaded
    with kina.session(runtime) as session, session.raw("again") as raw:
        assert raw.module(PTX) is module
        assert session.counters().modules_loaded == loaded


def test_the_cache_is_bounded_by_entries(runtime, sim):
    gc.collect()  # modules of earlier tests
    with kina.session(runtime) as session:
        session.synchronize()  # unloads those that are dead
        before = sim.live()["modules"] if sim is not None else 0
        functions = []
        with session.raw("many") as raw:
            for number in range(70):
                functions.append(raw.module(named(number)).function(f"fill_{number}", FILL))
            counters = session.counters()
            assert (counters.modules_loaded, counters.modules_evicted) == (70, 6)
            oldest, newest = functions[0], functions[-1]
            assert raw.module(named(69)) is newest.module
            # An evicted one is loaded anew, beside the one that its function still holds.
            assert raw.module(named(0)) is not oldest.module
        check_fill(session, oldest, 5.0)
        check_fill(session, newest, 6.0)
        del functions, oldest, newest
        session.synchronize()
        if sim is not None:
            assert sim.live()["modules"] - before == 64


@pytest.mark.parametrize("modules", [1, 3, 200])
def test_a_runtime_says_how_many_modules_it_keeps(modules):
    runtime = kina.Runtime(0, modules=modules)
    with kina.session(runtime) as session, session.raw("many") as raw:
        for number in range(6):
            assert raw.module(named(number)) is raw.module(named(number))
        counters = session.counters()
        assert (counters.modules_loaded, counters.modules_evicted) == (6, max(0, 6 - modules))
        raw.module(named(5))
        assert session.counters().modules_loaded == 6
    runtime.close()


@pytest.mark.parametrize("modules", [0, -1, 65537, 2**31, 2**40, 1.5, "8", None, True])
def test_numbers_of_modules_that_are_none(modules):
    with pytest.raises(kina.ArgumentError, match="modules is an int from 1 to 65536"):
        kina.Runtime(0, modules=modules)


def test_the_most_modules_there_can_be():
    kina.Runtime(0, modules=65536).close()


def test_what_was_used_last_stays(runtime):
    with kina.session(runtime) as session, session.raw("many") as raw:
        first = raw.module(named(0))
        for number in range(1, 100):
            raw.module(named(number))
            assert raw.module(named(0)) is first
        assert session.counters().modules_evicted == 36


def test_unloads_that_wait_are_counted():
    with kina.Runtime(0, modules=1) as runtime, kina.session(runtime) as session, session.raw("few") as raw:

        def deferred() -> int:
            return session.counters().unloads_deferred

        raw.module(named(0))
        raw.module(named(1))
        assert deferred() == 0  # nobody had it
        kept = raw.module(named(2)).function("fill_2")
        raw.module(named(3))
        assert deferred() == 1
        del kept
        with session.capture() as graph:
            raw.module(named(4)).function("fill_4", "mut f32[], f32, u32").launch(
                kina.LaunchConfig(1, 4), session.zeros(4), 1.0, 4
            )
        raw.module(named(5))
        assert deferred() == 2  # leased
        del graph
        raw.module(named(6))
        assert deferred() == 2


@pytest.mark.simulated
def test_the_cache_is_bounded_by_bytes(runtime, sim):
    def large(number: int) -> str:
        return named(number) + "//" + "x" * (33 << 20)

    with kina.session(runtime) as session, session.raw("large") as raw:
        first = raw.module(large(1))
        assert raw.module(large(1)) is first
        raw.module(large(2))
        assert session.counters().modules_evicted == 1
        assert raw.module(large(1)) is not first
        huge = named(3) + "//" + "x" * (64 << 20)
        assert raw.module(huge) is not raw.module(huge)  # larger than the whole cache: never kept
        assert session.counters().modules_evicted == 2


def many_modules(cubin: str | None) -> None:
    """10,000 distinct ones through a cache of 32; each is launched from, and nothing but the cache lets go of it."""
    from pathlib import Path

    from helpers.kernels import fill_entry, module_text

    sim = simulation()
    code = None if cubin is None else Path(cubin).read_bytes()

    def image(number: int) -> bytes | str:
        if code is None:
            return module_text(fill_entry(), f"// {number}")
        return code + number.to_bytes(8, "little")  # past where its headers say that it ends: another one all the same

    def used() -> tuple[int, int]:
        session.synchronize()
        gc.collect()
        if sim is not None:
            sim.clear_trace()
        with on_stack(primary_context()):
            free, total = ok(driver.cuMemGetInfo())
        with open("/proc/self/statm") as file:
            return total - free, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with kina.session(kina.Runtime(0, modules=32)) as session:
        y = session.zeros(64)
        for number in range(10_000):
            if number == 1_000:
                device, host = used()
            with session.raw("many") as raw:
                fill = raw.module(image(number)).function("fill", "mut f32[], f32, u32")
                fill.launch(kina.LaunchConfig(1, 64), y, float(number), 64)
            if sim is not None and number % 77 == 0:
                assert sim.live()["modules"] <= 100  # kept, evicted since the last seal, and behind it
                sim.clear_trace()
        device_now, host_now = used()
        assert (session.to_host(y) == 9_999).all()
        counters = session.counters()
        assert (counters.modules_loaded, counters.modules_evicted) == (10_000, 10_000 - 32)
        assert counters.pending == 0
        if sim is not None:
            assert sim.live()["modules"] <= 33  # and the last one that was evicted
        assert device_now - device <= 16 << 20, device_now - device
        assert host_now - host <= 16 << 20, host_now - host


@pytest.mark.parametrize(
    "cubin", [pytest.param(None, marks=pytest.mark.simulated), str(IMAGES / "kernels_sm90.cubin")], ids=["ptx", "cubin"]
)
def test_ten_thousand_modules_leave_bounded_memory(cubin):
    run_body(many_modules, cubin)


# Leaving --------------------------------------------------------------------------------------------------


def unloads(sim, since) -> list[int]:
    return [record["n"] for record in sim.trace(since, name="cuModuleUnload")]


@pytest.mark.simulated
def test_no_unload_while_a_kernel_of_it_is_in_flight(runtime, sim):
    gc.collect()  # modules of earlier tests
    with kina.session(runtime) as session:
        with session.raw("load") as raw:
            function = raw.module(named(1000)).function("fill_1000", FILL)
            for number in range(64):  # out of the cache; before the launch, as a load waits for the device
                raw.module(named(number))
        y = session.zeros(8)
        since = sim.position
        with stalled(session):
            with session.raw("launch") as raw:
                function.launch(kina.LaunchConfig.linear(8), y, 1.0, 8)
            del function, raw
            with session.raw("next"):
                pass
            session.completion()
            assert session.counters().modules_evicted == 1
            assert not unloads(sim, since)
        session.synchronize()
        done = [record["n"] for record in sim.trace(since, name="kernel")]
        gone = unloads(sim, since)
        assert len(done) == len(gone) == 1
        assert done[0] < gone[0]
        assert (session.to_host(y) == 1).all()


@pytest.mark.simulated
def test_no_unload_when_the_runtime_goes_with_work_in_flight(sim):
    gc.collect()
    runtime = kina.Runtime(0)
    with kina.session(runtime) as session:
        stream = stream_of(session)
        y = session.zeros(8)
        since = sim.position
        with session.raw("launch") as raw:
            function = raw.module(PTX).function("fill", FILL)
            sim.stall(stream)
            function.launch(kina.LaunchConfig.linear(8), y, 1.0, 8)
    del session, raw, function, y, runtime
    assert not unloads(sim, since)
    sim.resume(stream)
    sim.wait_idle()
    with kina.session(0) as session:
        session.synchronize()  # harvests what Runtimes that are gone left behind
    assert len(unloads(sim, since)) == 1


@pytest.mark.simulated
def test_the_last_reference_unloads(runtime, sim):
    gc.collect()
    sim.wait_idle()
    kina.Runtime(0).close()  # unloads what other tests have dropped
    with kina.session(runtime) as session, session.raw("load") as raw:
        since = sim.position
        function = raw.module(PTX).function("fill", FILL)
    runtime.close()
    assert not unloads(sim, since)
    del function
    with kina.session(0) as session:
        session.synchronize()  # at the latest
    assert len(unloads(sim, since)) == 1
