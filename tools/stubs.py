#!/usr/bin/env python3
"""Write the type stubs (.pyi) of the Cython modules, or compare them with what would be written.

    python tools/stubs.py            write
    python tools/stubs.py --check    list what differs, exit code 1 if anything does

Needs stubgen-pyx (dependency group `test`); builds nothing. A module without public Python names (its
``__all__`` is empty) has no stub.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kina"
# Packages whose names are loaded by __getattr__ from the modules in their _HOMES.
LAZY = ("kina", "kina.cuda", "kina.memory", "kina.memory.integrations")
HEADER = "# Written by tools/stubs.py from {name}; not edited by hand.\n\n"


def public_names(source: Path) -> list[str] | None:
    """``__all__`` of a .pyx, which Python's own parser cannot read whole; None if it has none."""
    match = re.search(r"^__all__ = (\[.*?\])", source.read_text(), re.MULTILINE | re.DOTALL)
    return ast.literal_eval(match[1]) if match else None


def modules() -> list[Path]:
    """The .pyx files that need a stub."""
    found = []
    for source in sorted(PACKAGE.rglob("*.pyx")):
        names = public_names(source)
        if names is None:
            raise SystemExit(f"{source.relative_to(ROOT)} has no __all__")
        if names:
            found.append(source)
    return found


# Classes of other projects that signatures mention.
ELSEWHERE = {"Mapping": "collections.abc", "Sequence": "collections.abc", "numpy": ""}


def homes() -> dict[str, str]:
    """Where each public class of kina is defined, and those of ELSEWHERE."""
    found = dict(ELSEWHERE)
    for source in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx")]):
        if source.name != "__init__.py":
            module = ".".join(source.relative_to(ROOT).with_suffix("").parts)
            text = source.read_text()
            for name in public_names(source) or []:
                if re.search(rf"^(cdef )?class {name}\b", text, re.MULTILINE):
                    found[name] = module
    return found


def with_imports(text: str, known: dict[str, str]) -> str:
    """The source with imports of the classes that it names without importing them, so that the generator knows them.

    Annotations are not evaluated: a module may name in them what lies above it, or what it loads only when needed.
    """
    lines = []
    for name, module in known.items():
        there = rf"^(cdef )?class {name}\b|^(from \S+ c?import|c?import) [^\n]*\b{name}\b|^    {name},$"
        if re.search(rf"\b{name}\b", text) and not re.search(there, text, re.MULTILINE):
            lines.append(f"from {module} import {name}" if module else f"import {name}")
    return re.sub(r"^__all__ = ", "\n".join([*lines, "__all__ = "]), text, count=1, flags=re.MULTILINE)


def generate() -> dict[Path, str]:
    """Every stub that should exist, with its text."""
    stubs = {}
    known = homes()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(PACKAGE, tree / "kina", ignore=shutil.ignore_patterns("*.so", "*.c", "*.pyi", "__pycache__"))
        for source in modules():
            inside = source.relative_to(ROOT)
            (tree / inside).write_text(with_imports(source.read_text(), known))
            out = Path(scratch) / inside.with_suffix(".pyi")
            out.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "stubgen_pyx", str(tree), "--file", str(inside)]
            command += ["--output-file", str(out), "--no-pxd-to-stubs", "--exclude-attribution"]
            done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
            if done.returncode != 0 or not out.is_file():
                raise SystemExit(f"stubgen-pyx failed on {source}:\n{done.stdout}{done.stderr}")
            stubs[source.with_suffix(".pyi")] = finish(source, out.read_text())
    for package in LAZY:
        source = ROOT / package.replace(".", "/") / "__init__.py"
        stubs[source.with_suffix(".pyi")] = lazy_package(package, source)
    return stubs


# Methods that Python calls through slots, which know no names of parameters.
SLOTS = {
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"),
    *("__getitem__", "__setitem__", "__delitem__", "__getattr__", "__setattr__", "__delattr__"),
    *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__matmul__"),
    *("__and__", "__or__", "__xor__", "__lshift__", "__rshift__"),
}


def finish(source: Path, text: str) -> str:
    """A header, deferred annotations (Sphinx executes stubs), and what is public, spelled as at run time."""
    text = text.replace("from _typeshed import Incomplete", "from typing import Any").replace("Incomplete", "Any")
    lines = text.splitlines()
    tree = ast.parse(text)
    public = kept_names(tree, public_names(source))
    declared = source.with_suffix(".pxd")
    final, made_by_cinit = facts_of_classes(source.read_text())
    if declared.exists():
        final |= facts_of_classes(declared.read_text())[0]
    edits: list[tuple[int, int, list[str]]] = []  # first line, line after the last, what stands there instead
    for node in tree.body:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if name != "__all__" and name not in public:
                edits.append((first_line(node), node.end_lineno, []))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and name not in public:
            edits.append((first_line(node), node.end_lineno, []))
        elif isinstance(node, ast.ClassDef):
            if name in final:
                edits.append((first_line(node), first_line(node), ["@final"]))
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    edits += edit_of_method(method, lines, name in made_by_cinit)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    edits += [(first_line(node), node.end_lineno, []) for node in imports]
    for first, end, instead in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        lines[first:end] = instead
    body = "\n".join(lines)
    docstring = ast.get_docstring(tree, clean=False) is not None and tree.body[0].end_lineno
    head, body = lines[: docstring or 0], "\n".join(lines[docstring or 0 :]).strip()
    used = needed_imports(imports, body, bool(final & set(public)))
    parts = [HEADER.format(name=source.name).strip(), "\n".join(head), "from __future__ import annotations"]
    return "\n\n".join(filter(None, [*parts, "\n".join(used), body])) + "\n"


def first_line(node: ast.stmt) -> int:
    """The index of the first line of a statement, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def kept_names(tree: ast.Module, public: list[str]) -> set[str]:
    """The public names, and those of the module that their signatures mention."""
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    kept: set[str] = set()
    waiting = list(public)
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept.add(name)
            found = ast.walk(defined[name]) if name in defined else ()
            waiting += [node.id for node in found if isinstance(node, ast.Name) and node.id in defined]
    return kept


def facts_of_classes(text: str) -> tuple[set[str], set[str]]:
    """Which cdef classes are final, and which take their arguments in __cinit__."""
    final, made_by_cinit = set(), set()
    pattern = r"^((?:@[^\n]*\n)*)cdef class (\w+)[^\n]*:\n((?:[ \t]+[^\n]*\n|\n)*)"
    for decorators, name, body in re.findall(pattern, text, re.MULTILINE):
        if "@cython.final" in decorators or "@final" in decorators:
            final.add(name)
        if "def __cinit__(" in body and "def __init__(" not in body:
            made_by_cinit.add(name)
    return final, made_by_cinit


def edit_of_method(method: ast.FunctionDef, lines: list[str], made_by_cinit: bool) -> list[tuple[int, int, list[str]]]:
    number = method.lineno - 1
    line = lines[number]
    if method.name == "__dealloc__":
        return [(first_line(method), method.end_lineno, [])]
    if method.name == "__init__" and made_by_cinit:
        return [(number, number + 1, [line.replace("def __init__(self", "def __new__(cls", 1)])]
    if method.name in SLOTS and len(method.args.args) > 1 and not method.args.posonlyargs:
        end = line.rindex(")")
        return [(number, number + 1, [f"{line[:end]}, /{line[end:]}"])]
    return []


def needed_imports(imports: list[ast.stmt], body: str, final: bool) -> list[str]:
    """The imports whose names the body uses, one a line, standard library first."""
    words = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    typing, others = {"final"} if final else set(), []
    for node in imports:
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names if (alias.asname or alias.name) in words}
            if node.module == "typing":
                typing |= names
            elif names and node.module != "__future__":
                others.append(f"from {node.module} import {', '.join(sorted(names))}")
        else:
            names = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in words]
            others += [ast.unparse(ast.Import([alias])) for alias in names]
    first = [f"from typing import {', '.join(sorted(typing))}"] if typing else []
    return first + sorted(others)


def lazy_package(package: str, source: Path) -> str:
    """The stub of a package that loads its names when they are first used."""
    tree = ast.parse(source.read_text())
    # The package cannot be imported where it is not built, so only its tables are evaluated.
    tables: dict[str, object] = {"_DTYPES": ()}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_DTYPES", "_HOMES", "__all__"):
            exec(compile(ast.Module([node], []), str(source), "exec"), tables)
    homes, public, dtypes = tables["_HOMES"], tables["__all__"], tables["_DTYPES"]
    imports: dict[str, list[str]] = {}
    for name, home in homes.items():
        if name not in dtypes:
            home = home if home.startswith("kina.") else f"{package}.{home}"
            imports.setdefault(home, []).append(f"{name} as {name}")
    functions, plain = [], []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kina."):
            imports.setdefault(node.module, []).extend(
                f"{alias.name} as {alias.name}" for alias in node.names if alias.name in public
            )
        elif isinstance(node, ast.FunctionDef) and node.name in public:
            documented = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[:1] if documented else [ast.Expr(ast.Constant(...))]
            functions.append(ast.unparse(node))
    for name in ("errors", "cuda", "memory"):
        if name in public or package == "kina":
            plain.append(f"from {package} import {name} as {name}")
    for home, names in sorted((home, names) for home, names in imports.items() if names):
        plain.append(f"from {home} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")")
    if dtypes:
        plain.append("from kina._core.dtype import DType as DType")
    values = ["__version__: str"] if "__version__" in public else []
    values += [f"{name}: DType" for name in [*dtypes, *(["bool"] if dtypes else [])]]
    listed = "__all__ = [\n" + "".join(f"    {name!r},\n" for name in public) + "]"
    parts = [HEADER.format(name=source.name).strip(), "from __future__ import annotations"]
    return "\n\n".join(filter(None, [*parts, "\n".join(plain), listed, "\n".join(values), *functions])) + "\n"


def differences() -> list[str]:
    """Unified diffs of what is there against what should be; empty when the stubs are current."""
    expected = generate()
    there = set(PACKAGE.rglob("*.pyi"))
    found = []
    for path in sorted(there | set(expected)):
        old = path.read_text() if path in there else ""
        new = expected.get(path, "")
        name = str(path.relative_to(ROOT))
        lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name} (from source)")
        if diff := "".join(lines):
            found.append(diff)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        found = differences()
        print("".join(found), end="")
        if found:
            print("The stubs are not current: run `python tools/stubs.py`.")
        return bool(found)
    expected = generate()
    for path in set(PACKAGE.rglob("*.pyi")) - set(expected):
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    for path, text in expected.items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
