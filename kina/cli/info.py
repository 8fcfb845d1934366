"""What ``kina info`` knows: gathered as plain data, then shown."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["collect", "render"]

# Seen on their own first, because kina uses them and a user's question is often about them.
PACKAGES = ("numpy", "ml_dtypes", "cuda-bindings", "cuda-pathfinder", "torch")

# cuda-pathfinder's name, what kina uses the library for, what installs it.
LIBRARIES = (
    ("nvrtc", "compiling CUDA C++", "pip install 'nvidia-cuda-nvrtc>=13,<14'"),
    ("nvJitLink", "linking", "pip install 'nvidia-nvjitlink>=13,<14'"),
    ("cublas", "matmul", "pip install 'nvidia-cublas>=13,<14'"),
    ("cublasLt", "matmul", "pip install 'nvidia-cublas>=13,<14'"),
    ("cusolver", "decompositions", "pip install 'nvidia-cusolver>=12,<13'"),
)


def collect() -> dict[str, Any]:
    """Everything as JSON-ready data. Loads libraries; creates no CUDA context.

    Returns
    -------
    dict
        ``versions``, ``driver`` (None without one), ``libraries``, ``devices``, ``links`` and
        ``unavailable_reason`` (None where a GPU can be used).
    """
    loaded_before = _mapped_files()
    reason, driver, headers, devices, links = _cuda()
    return {
        "versions": {
            "kina": _version("kina"),
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "cuda_headers": headers,
        },
        "executable": sys.executable,
        "platform": platform.platform(),
        "driver": driver,
        "libraries": [_libcuda(loaded_before), *_libraries(loaded_before)],
        "devices": devices,
        "links": links,
        "unavailable_reason": reason,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> tuple[str | None, dict | None, str | None, list[dict], list[dict]]:
    """The reason why there is no GPU, driver, version of the headers, devices and links."""
    import kina.cuda as cuda
    from kina.errors import UnavailableError

    reason = cuda.unavailable_reason()
    try:
        headers = cuda.compiled_version()
    except UnavailableError:  # built without CUDA
        return reason, None, None, [], []
    if reason is not None:
        return reason, None, headers, [], []
    driver = {
        "version": _kernel_driver_version(),
        "cuda_version": cuda.driver_version(),
        "path": cuda.driver_path(),
    }
    links = [link | {"source": int(link["source"]), "target": int(link["target"])} for link in cuda.peer_matrix()]
    return None, driver, headers, [_device(info) for info in cuda.devices()], links


def _kernel_driver_version() -> str | None:
    """The version by which NVIDIA's packages and release notes name the driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def _device(info: Any) -> dict[str, Any]:
    return {
        "ordinal": int(info.id),
        "name": info.name,
        "uuid": str(info.uuid),
        "compute_capability": list(info.compute_capability),
        "total_memory_bytes": info.total_memory_bytes,
        "multiprocessor_count": info.multiprocessor_count,
        "pci_bus_id": info.pci_bus_id,
        "attributes": dict(info.attributes),
    }


# -- libraries


def _mapped_files() -> frozenset[str]:
    """The files that this process has mapped; empty where the system does not tell."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return frozenset()
    return frozenset(re.findall(r" (/.*)$", text, re.MULTILINE))


def _path_of(name: str, files: Iterable[str]) -> str | None:
    return next((path for path in sorted(files) if os.path.basename(path).startswith(name)), None)


def _entry(name: str, use: str, state: str, path: str | None, via: str | None, remedy: str | None) -> dict:
    return {"name": name, "use": use, "state": state, "path": path, "via": via, "remedy": remedy}


def _libcuda(loaded_before: frozenset[str]) -> dict[str, Any]:
    if path := _path_of("libcuda.so", loaded_before):
        return _entry("cuda", "the driver", "loaded", path, None, None)
    remedy = "install an NVIDIA driver of version 580 or newer"
    if sys.platform != "linux":
        return _entry("cuda", "the driver", "missing", None, None, None)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _entry("cuda", "the driver", "missing", None, None, remedy)
    path = _path_of("libcuda.so", _mapped_files())
    return _entry("cuda", "the driver", "found", path, "the loader's path", None)


def _libraries(loaded_before: frozenset[str]) -> list[dict[str, Any]]:
    """Each library as cuda-pathfinder finds it: a copy that is already loaded first."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return [_entry(name, use, "missing", None, None, None) for name, use, _ in LIBRARIES]
    found = []
    for name, use, remedy in LIBRARIES:
        try:
            library = load_nvidia_dynamic_lib(name)
        except DynamicLibNotFoundError:
            found.append(_entry(name, use, "missing", None, None, remedy))
        else:
            before = library.was_already_loaded_from_elsewhere or library.abs_path in loaded_before
            state = "loaded" if before else "found"
            found.append(_entry(name, use, state, library.abs_path, library.found_via, None))
    return found


# -- for people


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    driver = report["driver"]
    versions = dict(report["versions"])
    headers = versions.pop("cuda_headers")
    rows: list[Sequence[str]] = [(name, value or "not installed") for name, value in versions.items()]
    rows.append(("CUDA headers", headers or "none: built without kina.cuda"))
    if driver:
        text = f"{driver['version']}, " if driver["version"] else ""
        rows.append(("driver", f"{text}for CUDA {driver['cuda_version']}"))
    lines = ["Versions", *_table(rows)]

    words = {"loaded": "already loaded", "found": "found at", "missing": "not found"}
    rows = []
    for library in report["libraries"]:
        where = library["path"] or ""
        if library["via"]:
            where += f"  (by {library['via']})"
        if library["state"] == "missing":
            where = library["remedy"] or ""
        rows.append((library["name"], words[library["state"]], where))
    lines += ["", "Libraries", *_table(rows)]

    lines += ["", "Devices"]
    if report["devices"]:
        rows = [("", "name", "compute capability", "memory", "SMs", "uuid")]
        for device in report["devices"]:
            capability = ".".join(str(number) for number in device["compute_capability"])
            memory = f"{device['total_memory_bytes'] / 2**30:.1f} GiB"
            identity = (f"cuda:{device['ordinal']}", device["name"], capability, memory)
            rows.append((*identity, str(device["multiprocessor_count"]), device["uuid"]))
        lines += _table(rows)
    else:
        lines.append("  none")

    if report["links"]:
        lines += ["", "Links"]
        rows = [("from", "to", "peer access", "performance rank", "atomics")]
        for link in report["links"]:
            answers = ("yes" if link["access"] else "no", str(link["performance_rank"]))
            ends = (f"cuda:{link['source']}", f"cuda:{link['target']}")
            rows.append((*ends, *answers, "yes" if link["atomics"] else "no"))
        lines += _table(rows)

    if report["unavailable_reason"] is not None:
        lines += ["", "No GPU can be used", f"  {report['unavailable_reason']}"]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]
