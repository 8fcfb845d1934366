"""What kina never does: one test, or a few, for each line of "Never" in the design.

Those that read source or ask the public surface need no device; those marked `cuda` run on any driver.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kina
import kina.cuda

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kina"
TESTS = ROOT / "tests"

# The protocols through which handles and addresses leave: each is a published interchange.
PROTOCOLS = {
    "__dlpack__",
    "__dlpack_device__",
    "to_dlpack",
    "__cuda_stream__",
    "__cuda_array_interface__",
    "__array_interface__",
    "__dlpack_c_exchange_api__",
}


def sources(*suffixes: str) -> list[Path]:
    found = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in suffixes]
    assert found
    return found


def public_classes() -> dict[str, type]:
    names = {*kina.__all__, *(f"cuda.{name}" for name in kina.cuda.__all__)}
    found = {}
    for name in sorted(names):
        holder = kina.cuda if name.startswith("cuda.") else kina
        try:
            value = getattr(holder, name.removeprefix("cuda."))
        except kina.UnavailableError:  # a build without CUDA has nothing there to look at
            continue
        if isinstance(value, type):
            found[name] = value
    assert len(found) > 20
    return found


def public_names() -> Iterator[tuple[str, Any]]:
    """Every public function, class and member: (dotted name, object)."""
    for holder in (kina, kina.cuda):
        for name in holder.__all__:
            try:
                yield f"{holder.__name__}.{name}", getattr(holder, name)
            except kina.UnavailableError:
                continue
    for owner, kind in public_classes().items():
        for name in dir(kind):
            if not name.startswith("_") or name in PROTOCOLS:
                yield f"{owner}.{name}", getattr(kind, name)


# No bare stream or address --------------------------------------------------------------------------------


def test_no_public_name_speaks_of_handles():
    """What gives one is called unsafe_*, or is a protocol."""
    word = re.compile(
        r"address|pointer|(^|_)ptr|handle|native|(^|_)raw_|data_ptr|device_ptr|cu_?stream|context",
        re.IGNORECASE,
    )
    exempt = {
        "cuda.RawSession.stream",
        "Capability.NATIVE_MODULE",
        "Capability.RAW_STREAM",
    }  # the first dies with its block
    for name, _ in public_names():
        last = name.rsplit(".", 1)[-1]
        if last.startswith("unsafe_") or last in PROTOCOLS or name in exempt:
            continue
        assert not word.search(last), name


@pytest.mark.cuda
def test_no_public_value_is_a_handle_or_an_address():
    """Every int that a public attribute gives, in a running session, is compared with the real ones."""
    with kina.session(0) as session, session.raw("look") as raw:
        tensor = session.zeros((3, 5))
        ref, mut = raw.ref(tensor), raw.mut(session.zeros(3))
        module = raw.module(".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry f(.param .u32 n) { ret; }")
        secrets = {raw.unsafe_stream_handle(), raw.unsafe_address(ref), raw.unsafe_address(mut)}
        things = [session, raw, raw.stream, tensor, tensor[1:], ref, mut, module, module.function("f")]
        things += [session.runtime, session.completion(), session.device_info, session.counters()]
        things += [session.runtime_identity, session.allocation_domain, kina.LaunchConfig(1, 1)]
        for thing in things:
            for name in dir(type(thing)):
                if name.startswith("unsafe_") or name.startswith("__"):
                    continue
                value = getattr(thing, name)
                if callable(value):
                    continue
                words = re.findall(r"\b(?:0x[0-9a-f]+|0|[1-9]\d*)\b", repr(value))
                found = {int(word, 0) for word in words}
                assert not found & secrets, (type(thing).__name__, name)
            assert not secrets & {int(word, 0) for word in re.findall(r"0x[0-9a-f]+", repr(thing))}, type(
                thing
            ).__name__


@pytest.mark.cuda_build
def test_unsafe_things_say_what_safety_takes():
    """Every unsafe_* and every launch has a Safety section."""
    seen = []
    for name, value in public_names():
        last = name.rsplit(".", 1)[-1]
        if last.startswith("unsafe_") or last == "launch":
            seen.append(name)
            assert "**Safety.**" in (value.__doc__ or ""), name
            assert len(value.__doc__.split("**Safety.**")[1].split()) > 20, name
    assert {
        "cuda.Function.launch",
        "cuda.PreparedLaunch.launch",
        "cuda.RawSession.unsafe_address",
        "cuda.RawSession.unsafe_stream_handle",
    } <= set(seen)


@pytest.mark.cuda_build
def test_unsafe_things_belong_to_raw_blocks():
    owners = {name.rsplit(".", 2)[-2] for name, _ in public_names() if name.rsplit(".", 1)[-1].startswith("unsafe_")}
    assert owners == {"RawSession"}


# No public context setter ---------------------------------------------------------------------------------


def test_no_public_context_setter():
    word = re.compile(
        r"(set|use|make|push|pop|switch|select|current)_?(current|device|context|ctx)|^set_", re.IGNORECASE
    )
    for name, _ in public_names():
        assert not word.search(name.rsplit(".", 1)[-1]), name


@pytest.mark.cuda
def test_nothing_outside_a_session_changes_the_context():
    """Asked of the driver: only what is inside `with` makes a context current."""
    from helpers.cuda import unchanged

    with unchanged():
        runtime = kina.Runtime(0)
        session = kina.session(runtime)
        kina.devices()
        kina.zeros(8, device=0)
        with session:
            tensor = session.zeros(8)
        tensor.__dlpack__(stream=-1)
        runtime.close()


# No way around Session ------------------------------------------------------------------------------------


def test_nothing_runs_but_through_a_session():
    """Nothing else that is public launches, copies, fills or synchronizes."""
    verbs = re.compile(r"launch|synchronize|copy|to_host|from_host|upload|download|adopt|fill|(^|_)(zeros|empty|full)$")
    # A graph's launch takes the session.
    allowed = {"cuda.Function.launch", "cuda.PreparedLaunch.launch", "cuda.Graph.launch", "cuda.Completion.wait"}
    # The module's own functions open a momentary session; DLPack of a Tensor goes by its protocol.
    momentary = {"kina.zeros", "kina.empty", "kina.full", "kina.from_host", "kina.from_dlpack"}
    for name, value in public_names():
        last = name.rsplit(".", 1)[-1]
        owner = name.rsplit(".", 2)[-2] if name.count(".") else ""
        if callable(value) and verbs.search(last) and not owner.endswith("Session"):
            assert name in allowed | momentary, name


@pytest.mark.cuda
def test_a_launch_needs_an_open_block():
    from helpers.kernels import KERNELS

    with kina.session(0) as session:
        with session.raw("load") as raw:
            function = raw.module(KERNELS).function("spin", "u64")
        prepared = function.prepare(kina.LaunchConfig(1, 1))
        with pytest.raises(kina.SessionClosedError):
            function.launch(kina.LaunchConfig(1, 1), 0)
        with pytest.raises(kina.SessionClosedError):
            prepared.launch(0)
    with pytest.raises(kina.SessionClosedError):
        function.launch(kina.LaunchConfig(1, 1), 0)
    with pytest.raises(kina.SessionClosedError):
        prepared.launch(0)
    with pytest.raises(kina.SessionClosedError):
        session.zeros(8)


@pytest.mark.cuda_build
@pytest.mark.parametrize(
    "name", ["CudaSession", "RawSession", "StreamRef", "TensorRef", "TensorMut", "Module", "Function"]
)
def test_authority_is_not_made_by_hand(name):
    with pytest.raises(TypeError):
        getattr(kina.cuda, name)()


# No mutable address from a shared tensor, no silent materialisation ---------------------------------------


@pytest.mark.cuda
def test_no_mutable_address_from_a_shared_tensor():
    with kina.session(0) as session, session.raw("shared") as raw:
        base = session.zeros((4, 4))
        for shared in (base.as_readonly(), base[:1].broadcast_to(4, 4), session.adopt(base.as_readonly())):
            with pytest.raises(kina.InvalidLayoutError):
                raw.mut(shared)
        reader = raw.ref(base)
        with pytest.raises(kina.InvalidLayoutError):
            raw.mut(base[2:])
        reader.release()
        with pytest.raises(TypeError):
            raw.unsafe_address(base)  # only of a ref, and only a mut is to be written through


@pytest.mark.cuda
def test_nothing_is_materialised_silently():
    from helpers.kernels import KERNELS, nothing_enqueued

    with kina.session(0) as session, session.raw("strides") as raw:
        function = raw.module(KERNELS).function("copy", "mut f32[], f32[], u32")
        base, y = session.zeros((4, 4)), session.zeros(16)
        before = session.counters()
        for view in (base[:, ::2], base.permute(1, 0), base[:1].broadcast_to(4, 4), base[::-1]):
            with nothing_enqueued(session):
                with pytest.raises(kina.NonContiguousError):
                    function.launch(kina.LaunchConfig(1, 1), y, view, 1)
                with pytest.raises(kina.NonContiguousError):
                    session.copy(view)
        with pytest.raises(kina.NonContiguousError):
            base.permute(1, 0).reshape(16)
        after = session.counters()
        assert (after.allocations, after.bytes_to_device, after.bytes_to_host) == (
            before.allocations, before.bytes_to_device, before.bytes_to_host,
        )  # fmt: skip


# Domains are not merged by UUID ---------------------------------------------------------------------------


@pytest.mark.cuda
def test_two_runtimes_on_one_gpu_stay_two():
    one, other = kina.Runtime(0), kina.Runtime(0)
    with kina.session(one) as a, kina.session(other) as b:
        assert a.device_info.uuid == b.device_info.uuid
        assert a.allocation_domain != b.allocation_domain
        assert a.runtime_identity != b.runtime_identity
        x = a.zeros(8)
        assert x.allocation_domain == a.allocation_domain
        for use in (b.to_host, b.copy):
            with pytest.raises(kina.ForeignRuntimeError):
                use(x)
        adopted = b.adopt(x)
        assert adopted.runtime_identity == b.runtime_identity
    del adopted, x
    one.close()
    other.close()


# No synchronization per launch ----------------------------------------------------------------------------

WAITS = {"cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuEventQuery", "cuStreamQuery"}


@pytest.mark.cuda
def test_launches_do_not_synchronize():
    """By kina's counters everywhere; on the simulated driver, by its trace: two driver calls to a launch."""
    from helpers.cuda import simulation
    from helpers.kernels import KERNELS

    sim = simulation()
    with kina.session(0) as session, session.raw("loop") as raw:
        function = raw.module(KERNELS).function("saxpy", "mut f32[], f32[], f32, u32")
        y, x = session.zeros(8), session.zeros(8)
        config = kina.LaunchConfig(1, 8)
        function.launch(config, y, x, 1.0, 8)
        before = session.counters()
        since = sim.position if sim is not None else 0
        for _ in range(640):
            function.launch(config, y, x, 1.0, 8)
        calls = [record["name"] for record in sim.trace(since, event="call")] if sim is not None else []
        after = session.counters()
        assert after.launches - before.launches == 640
        for name in ("synchronizations", "host_waits", "event_queries"):
            assert getattr(after, name) == getattr(before, name)
        assert after.events_recorded - before.events_recorded <= 10
        assert not WAITS & set(calls)
        if sim is not None:
            assert calls.count("cuLaunchKernel") == 640
            assert len(calls) <= 2 * 640 + 20


# No hidden staging, no routing ----------------------------------------------------------------------------


@pytest.mark.cuda
def test_nothing_reaches_the_host_on_its_own():
    with kina.session(0) as session:
        x = session.full((), 3.0)
        y = session.zeros(4, "i64")
        before = session.counters()
        for attempt in (
            float,
            int,
            bool,
            complex,
            np.asarray,
            np.array,
            lambda t: np.add(t, 1),
            list,
            lambda t: [0][t],
        ):
            for tensor in (x, y):
                with pytest.raises((TypeError, kina.KinaError)):
                    attempt(tensor)
        assert "3" not in repr(x).split("float32")[1].replace("cuda:0", "")
        after = session.counters()
        assert (after.bytes_to_host, after.host_waits) == (before.bytes_to_host, before.host_waits)


@pytest.mark.cuda
def test_host_data_is_not_staged_for_a_launch(host):
    from helpers.kernels import KERNELS, nothing_enqueued

    with kina.session(0) as session, session.raw("staging") as raw:
        function = raw.module(KERNELS).function("add_one", "mut f32[], u32")
        before = session.counters().bytes_to_device
        for value in (np.zeros(8, np.float32), host.zeros(8), [0.0] * 8, memoryview(bytes(32))):
            with nothing_enqueued(session), pytest.raises(kina.KinaError):
                function.launch(kina.LaunchConfig(1, 8), value, 8)
            with pytest.raises((TypeError, kina.KinaError)):
                session.adopt(value)
            with pytest.raises((TypeError, kina.KinaError)):
                raw.ref(value)
        with pytest.raises(kina.KinaError):
            host.to_host(session.zeros(8))
        with pytest.raises(kina.KinaError):
            session.copy(host.zeros(8))
        assert session.counters().bytes_to_device == before


# Bounded caches -------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_caches_are_bounded():
    """Modules, and the Runtimes of adopted streams."""
    from helpers.cuda import ForeignStream

    runtime = kina.Runtime(0)
    with kina.session(runtime) as session, session.raw("many") as raw:
        for number in range(80):
            raw.module(f".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry f{number}() {{ ret; }}")
        counters = session.counters()
        assert counters.modules_loaded - counters.modules_evicted == 64
    runtime.close()
    streams = [ForeignStream() for _ in range(40)]
    identities = []
    for stream in streams:
        with kina.session(0, stream=stream) as session:
            identities.append(session.runtime_identity)
    with kina.session(0, stream=streams[-1]) as session:
        assert session.runtime_identity == identities[-1]
    with kina.session(0, stream=streams[0]) as session:
        assert session.runtime_identity not in identities  # its first Runtime had been let go


def test_every_container_at_module_level_is_known():
    """A dict or a list that outlives calls either does not grow or has a bound beside it."""
    known = {
        "_core/dtype.pyx": {"table", "by_name", "refused_names", "numpy_aliases"},  # filled at import
        "_core/current_resource.pyx": {"cuda_defaults"},  # one default per device that the program names
        "_core/opening.pyx": {"known_names"},  # names of devices below KEPT_ORDINALS
        "cuda/compiler.py": {"_flights", "_kept"},  # compilations under way; MEMORY_ENTRIES of those that are over
        "cuda/device.pyx": {"described"},  # one description per device of the process
    }
    pattern = re.compile(
        r"^(?:cdef (?:dict|list|set|object) )?(\w+)(?:: [^=]+)? = (?:\{|\[|dict\(|list\(|set\(|OrderedDict\()"
    )
    for path in sources(".py", ".pyx"):
        inside = str(path.relative_to(PACKAGE))
        for line in path.read_text().splitlines():
            found = pattern.match(line)
            if found and not found[1].isupper() and found[1] not in ("__all__", *known.get(inside, ())):
                assert found[1].lstrip("_").isupper(), f"{inside}: is {found[1]!r} bounded? name it here"


# No driver calls outside the table ------------------------------------------------------------------------


def code_of(path: Path) -> str:
    """Source without comments and docstrings."""
    text = re.sub(r'"""(?:.|\n)*?"""', '""', path.read_text())
    if path.suffix in (".h", ".c"):
        return re.sub(r"//[^\n]*", "", re.sub(r"/\*(?:.|\n)*?\*/", "", text))
    return re.sub(r"#[^\n]*", "", text)


def test_no_driver_call_outside_the_table():
    """Every cuXxx( in the package is a member of the table; only driver.pyx and nvrtc.pyx look into libraries."""
    table = {name.split()[0] for name in (PACKAGE / "cuda/driver_names.txt").read_text().splitlines()
             if name and not name.startswith("#")}  # fmt: skip
    for path in sources(".pyx", ".pxd", ".h", ".py"):
        inside = str(path.relative_to(PACKAGE))
        text = code_of(path)
        if not inside.startswith("cuda/driver"):
            for found in re.finditer(r"(\bcu\.)?\b(cu[A-Z]\w*)\s*\(", text):
                assert found[1], f"{inside}: {found[2]} is called past the table"
                assert found[2] in table, f"{inside}: {found[2]} is not in driver_names.txt"
            assert not re.search(r"\bcu(da)?[A-Z]\w*\s*\(", re.sub(r"\bcu\.\w+", "", text)), inside
        if inside not in ("cuda/driver.pyx", "cuda/driver_table.h", "cuda/nvrtc.pyx"):
            assert not re.search(r"\b(dlopen|dlsym|cuGetProcAddress\w*)\b", text), inside
        assert not re.search(r"ctypes\.|CDLL|cimport\s+cydriver|from cuda\.bindings", text) or inside.startswith(
            "cli/"
        ), inside


def test_the_package_links_no_driver():
    """Nothing is bound at load time: the table is filled when CUDA is first used."""
    setup = (ROOT / "setup.py").read_text()
    assert not re.search(r"libraries\s*=\s*\[[^\]]*cuda|-lcuda", setup)


def test_no_collectives():
    """Communication between processes is not part of launches or copies."""
    for path in sources(".pyx", ".pxd", ".h", ".py"):
        assert not re.search(r"nccl|all_?reduce|all_?gather|broadcast_object", code_of(path), re.IGNORECASE), path.name


# No test that passes without its device -------------------------------------------------------------------


def test_no_test_passes_by_returning_early():
    """No skip outside the lanes, no importorskip, no return that depends on a device."""
    for path in sorted(TESTS.rglob("*.py")):
        inside = str(path.relative_to(TESTS))
        if path == Path(__file__).resolve() or inside.startswith("mutation/"):
            continue
        text = path.read_text()
        skips = re.findall(r"importorskip|pytest\.skip\(|mark\.skip|mark\.xfail|SkipTest", text)
        assert skips == [], inside  # lanes deselect (helpers/lanes.py)
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.If) and any(isinstance(step, ast.Return) for step in node.body):
                    condition = ast.unparse(node.test)
                    assert not re.search(r"device|cuda|gpu|unavailable|simulat|sim\b", condition, re.IGNORECASE), (
                        f"{inside}: {function.name} returns early if {condition}"
                    )


def test_signatures_of_public_functions_have_no_defaulted_stream():
    """A stream is asked for where somebody else's is adopted, and nowhere by default-constructed magic."""
    for name, value in public_names():
        try:
            parameters = inspect.signature(value).parameters if callable(value) else {}
        except ValueError:  # classes, and what errors inherit
            continue
        if "stream" in parameters:
            assert parameters["stream"].kind is inspect.Parameter.KEYWORD_ONLY, name
            assert parameters["stream"].default is None, name


@pytest.mark.cuda_build
def test_every_public_callable_tells_its_signature():
    """Functions and methods to `inspect`; classes there, or in the first line of their text."""
    memory = [(f"memory.{name}", getattr(kina.memory, name)) for name in kina.memory.__all__]
    members = [
        (f"{owner}.{name}", getattr(kind, name))
        for owner, kind in memory
        if isinstance(kind, type)
        for name in dir(kind)
        if not name.startswith("_")
    ]
    seen = 0
    for name, value in (*public_names(), *memory, *members):
        if not callable(value) or isinstance(value, kina.DType):  # DType.__call__ tells theirs
            continue
        if getattr(getattr(value, "__objclass__", None), "__module__", "") == "builtins":  # inherited
            continue
        seen += 1
        try:
            inspect.signature(value)
        except ValueError:
            assert isinstance(value, type), name
            first = value.__doc__.splitlines()[0]
            assert first.startswith(f"{value.__name__}("), name
            ast.parse(f"def {first}: pass")
    assert seen > 200
