"""The rules of the house, held against its sources: who may import whom, and where mutable state may live."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KINA = ROOT / "kina"
SOURCES = sorted(path for suffix in ("*.py", "*.pyx", "*.pxd") for path in KINA.rglob(suffix))
SHARED = sorted([*KINA.rglob("*.h"), *KINA.rglob("*.pxd")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Modules of kina that a file imports or cimports, at the top or inside functions."""
    found = set()
    for line in path.read_text().splitlines():
        text = line.split("#")[0].strip()
        if match := re.match(r"from\s+(kina[\w.]*)\s+c?import\s+(.+)", text):
            module, names = match.groups()
            found.add(module)
            if module in ("kina", "kina._core", "kina.cuda"):
                found.update(f"{module}.{name.split()[0]}" for name in names.strip("() ").split(",") if name.strip())
        elif match := re.match(r"c?import\s+(kina[\w.]*)", text):
            found.add(match.group(1))
    return found


def test_there_is_something_to_look_at():
    names = {relative(path) for path in SOURCES}
    assert {"kina/_core/tensor.pyx", "kina/_core/dlpack.pxd", "kina/session.py"} <= names
    assert "kina/include/kina_tensor.h" in {relative(path) for path in SHARED}
    assert "kina._core.storage" in imports(KINA / "_core" / "tensor.pyx")
    assert "kina._core.layout" in imports(KINA / "_core" / "dlpack.pyx")


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent.name == "_core"], ids=relative)
def test_the_core_never_imports_cuda_nor_the_faces(path):
    beyond = {name for name in imports(path) if not name.startswith(("kina._core", "kina.errors"))}
    assert beyond == set()


# The floors of kina._core: a room imports only rooms that stand before it.
FLOORS = [
    "status",
    "tokens",
    "identity",
    "capability",
    "counters",
    "disk_cache",
    "include_folder",
    "scope",
    "construction",
    "fork_mutex",
    "dtype",
    "storage",
    "python_resource",
    "call_stack",
    "host_memory",
    "layout",
    "shape",
    "tensor",
    "foreign_types",
    "dlpack",
    "exchange_table",
    "resource",
    "current_resource",
    "adaptors",
    "tracking",
    "allocation_log",
    "allocation_trace",
    "replaying",
    "pool",
    "session",
    "host_array",
    "host_tensor",
    "array_interface",
    "buffers",
    "host_operations",
    "host_session",
    "opening",
    "interchange",
]


def test_every_room_of_the_core_has_its_floor():
    rooms = {path.stem for path in (KINA / "_core").glob("*.py*") if path.suffix in (".py", ".pyx")} - {"__init__"}
    assert rooms == set(FLOORS)


@pytest.mark.parametrize("room", FLOORS)
def test_rooms_import_downwards_only(room):
    files = [KINA / "_core" / f"{room}{suffix}" for suffix in (".py", ".pyx", ".pxd")]
    used = set().union(*(imports(path) for path in files if path.exists()))
    rooms = {name.split(".")[2] for name in used if name.startswith("kina._core.")} - {room}
    assert rooms <= set(FLOORS[: FLOORS.index(room)])


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("path", [path for path in SHARED if path.suffix == ".h"], ids=relative)
def test_headers_hold_no_mutable_state(path):
    """A static or thread-local variable in a shared header is one per extension module, silently."""
    text = without_comments(path.read_text())
    assert "_Thread_local" not in text
    assert "thread_local" not in text
    assert "__thread" not in text
    for line in re.findall(r"^\s*static\b[^\n]*", text, re.MULTILINE):
        assert re.match(r"\s*static (inline|const)\b", line) or "static_assert" in line, line


@pytest.mark.parametrize("path", [path for path in SHARED if path.suffix == ".pxd"], ids=relative)
def test_pxds_hold_no_mutable_state(path):
    """What a pxd includes verbatim is compiled into every module that cimports it."""
    for block in re.findall(r'"""(.*?)"""', path.read_text(), re.DOTALL):
        assert "_Thread_local" not in block
        assert not re.search(r"^\s*static\s+(?!inline|const)", block, re.MULTILINE), block


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix != ".py"], ids=relative)
def test_nogil_functions_say_how_they_fail(path):
    """Each is `except <value>` or `noexcept`: otherwise every call would take the GIL to look."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    text = re.sub(r"\([^()]*\)", "()", re.sub(r"\([^()]*\)", "()", text))
    for line in re.findall(r"^\s*cdef (?!extern|class)[^\n]*\)[^\n]*\bnogil\b[^\n]*", text, re.MULTILINE):
        assert "noexcept" in line or re.search(r"\bexcept\b", line), line


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".py"], ids=relative)
def test_public_modules_say_what_is_public(path):
    tree = ast.parse(path.read_text())
    if not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body) or path.name == "__main__.py":
        return
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert "__all__" in names


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_star_imports(path):
    assert not re.search(r"^\s*from\s+\S+\s+c?import\s+\*", path.read_text(), re.MULTILINE)


def test_who_asks_how_many_devices_there_are():
    """What else asks needs its tests in ONE_DEVICE of tools/check.py: they alone run with one device too."""
    asking = {relative(path) for path in SOURCES if re.search(r"device_count\(\)|\.devices\(\)", path.read_text())}
    assert asking == {
        "kina/cli/info.py",
        *("kina/cuda/__init__.py", "kina/cuda/context.pxd", "kina/cuda/context.pyx", "kina/cuda/device.pyx"),
        "kina/cuda/adoption.pyx",
    }
