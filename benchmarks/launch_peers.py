"""Saxpy through each library that can launch a kernel, in the shortest form that its users write.

A builder checks its library's result against float64 before it hands out the batch to time. All launch on the
same stream, with the same grid.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from harness import Borrowed, Contender, Launch, Raw, Report, optional
from saxpy import BLOCK, CUDA_SOURCE, PTX, SCALE, SIGNATURE, N, check_saxpy

__all__ = ["Bench", "build_contenders", "parameter_pointers", "raw_saxpy"]


@dataclass
class Bench:
    """An open kina session with what the contenders need of it."""

    kina: Any
    session: Any
    raw_session: Any
    raw: Raw
    report: Report
    calls: int
    generator: np.random.Generator
    kept: list[object] = field(default_factory=list)

    @property
    def grid(self) -> int:
        return -(-N // BLOCK)

    @property
    def stream(self) -> int:
        return int(self.raw_session.stream.__cuda_stream__()[1])

    @property
    def config(self) -> Any:
        return self.kina.LaunchConfig(grid=(self.grid, 1, 1), block=(BLOCK, 1, 1))

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Fresh y and x."""
        y, x = self.generator.standard_normal((2, N), dtype=np.float32)
        return y, x

    def address(self, tensor: Any) -> int:
        # Released at once: a living ref would forbid the launch that writes the tensor.
        ref = self.raw_session.ref(tensor)
        try:
            return int(self.raw_session.unsafe_address(ref))
        finally:
            ref.release()

    def repeat(self) -> Iterator[None]:
        return itertools.repeat(None, self.calls)


def build_kina(bench: Bench) -> list[Contender]:
    y, x = bench.inputs()
    ty, tx = bench.session.from_host(y), bench.session.from_host(x)
    saxpy = bench.raw_session.module(PTX).function("saxpy", SIGNATURE)
    config, n = bench.config, N
    saxpy.launch(config, ty, tx, SCALE, n)
    check_saxpy("kina", bench.session.to_host(ty), y, x, SCALE)

    def batch() -> None:
        for _ in bench.repeat():
            saxpy.launch(config, ty, tx, SCALE, n)

    prepared = saxpy.prepare(config)
    again = bench.session.from_host(y)
    prepared.launch(again, tx, SCALE, n)
    check_saxpy("kina prepared", bench.session.to_host(again), y, x, SCALE)

    def prepared_batch() -> None:
        for _ in bench.repeat():
            prepared.launch(ty, tx, SCALE, n)

    return [Contender("kina", batch, bench.calls), Contender("kina prepared", prepared_batch, bench.calls)]


class OwnArrays:
    """Tensors of kina by address, for the callers that take addresses."""

    def __init__(self, bench: Bench) -> None:
        self.y, self.x = bench.inputs()
        self.ty, self.tx = bench.session.from_host(self.y), bench.session.from_host(self.x)
        self.addresses = bench.address(self.ty), bench.address(self.tx)
        self.bench = bench
        bench.kept.append(self)  # the callers hold bare addresses

    def check(self, name: str) -> None:
        self.bench.raw.settle()
        check_saxpy(name, self.bench.session.to_host(self.ty), self.y, self.x, SCALE)


class Parameters(ctypes.Structure):
    """Saxpy's parameter buffer."""

    _fields_ = (("y", ctypes.c_uint64), ("x", ctypes.c_uint64), ("a", ctypes.c_float), ("n", ctypes.c_uint32))


def raw_saxpy(bench: Bench) -> tuple[Any, Parameters, OwnArrays]:
    """What raw_loop.c needs to launch saxpy: the launch, its parameters, and the arrays behind them."""
    function = bench.raw.pointer("raw_function", PTX.encode(), b"saxpy")
    launch = Launch(function, bench.stream, bench.grid, BLOCK)
    arrays = OwnArrays(bench)
    values = Parameters(*arrays.addresses, SCALE, N)
    bench.kept.append(values)  # parameter_pointers() are bare addresses into it
    return ctypes.byref(launch), values, arrays


def parameter_pointers(values: Parameters) -> Any:
    begin = ctypes.addressof(values)
    return (ctypes.c_void_p * 4)(*(begin + getattr(Parameters, name).offset for name in "yxan"))


def build_raw(bench: Bench) -> list[Contender]:
    """The driver call in a C loop: with an array of pointers, and with a packed buffer."""
    found = []
    for name, loop in (("raw kernelParams", "raw_launch_parameters"), ("raw extra", "raw_launch_extra")):
        launch, values, arrays = raw_saxpy(bench)
        if name == "raw extra":
            operands = (launch, ctypes.byref(values), ctypes.c_size_t(ctypes.sizeof(values)))
        else:
            operands = (launch, parameter_pointers(values))
        call = functools.partial(bench.raw.call, loop, *operands)
        call(1)
        arrays.check(name)
        found.append(Contender(name, functools.partial(call, bench.calls), bench.calls))
    return found


def build_cuda_core(bench: Bench) -> Contender:
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    arrays = OwnArrays(bench)
    y, x = arrays.addresses
    device = Device(0)
    device.set_current()
    stream = device.create_stream(Borrowed(bench.stream))
    kernel = ObjectCode.from_ptx(PTX.encode()).get_kernel("saxpy")
    config = LaunchConfig(grid=bench.grid, block=BLOCK)
    # Typed once, as its fastest users do: it passes a plain Python float as a double.
    a, n = ctypes.c_float(SCALE), ctypes.c_uint32(N)
    launch(stream, config, kernel, y, x, a, n)
    arrays.check("cuda.core")

    def batch() -> None:
        for _ in bench.repeat():
            launch(stream, config, kernel, y, x, a, n)

    return Contender("cuda.core", batch, bench.calls)


def build_cuda_bindings(bench: Bench) -> Contender:
    from cuda.bindings import driver

    arrays = OwnArrays(bench)
    function = driver.CUfunction(bench.raw.pointer("raw_function", PTX.encode(), b"saxpy"))
    stream = driver.CUstream(bench.stream)
    values = (*arrays.addresses, SCALE, N)
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_uint)
    grid, launch = bench.grid, driver.cuLaunchKernel

    def once() -> Any:
        return launch(function, grid, 1, 1, BLOCK, 1, 1, 0, stream, (values, types), 0)

    if int(once()[0]):
        raise RuntimeError("cuLaunchKernel failed")
    arrays.check("cuda.bindings")

    def batch() -> None:
        for _ in bench.repeat():
            launch(function, grid, 1, 1, BLOCK, 1, 1, 0, stream, (values, types), 0)

    return Contender("cuda.bindings", batch, bench.calls)


def build_cupy(bench: Bench, cupy: Any) -> Contender:
    y, x = bench.inputs()
    stream = cupy.cuda.Stream.from_external(Borrowed(bench.stream))
    kernel = cupy.RawKernel(CUDA_SOURCE.replace("SCALAR", "float"), "saxpy")
    with stream:
        cy, cx = cupy.asarray(y), cupy.asarray(x)
    grid, block, a, n = (bench.grid,), (BLOCK,), np.float32(SCALE), np.uint32(N)
    with stream:
        kernel(grid, block, (cy, cx, a, n))
        check_saxpy("CuPy", cupy.asnumpy(cy), y, x, SCALE)

    def batch() -> None:
        for _ in bench.repeat():
            kernel(grid, block, (cy, cx, a, n))

    return Contender("CuPy RawKernel", batch, bench.calls, scope=lambda: stream)


def build_torch_compiled(bench: Bench, torch: Any) -> Contender:
    stream = torch.cuda.ExternalStream(bench.stream)
    grid, block, n = (bench.grid, 1, 1), (BLOCK, 1, 1), N
    source = CUDA_SOURCE.replace('extern "C" ', "")  # it finds names itself
    failure: Exception | None = None
    # Releases differ in the C type that a Python float becomes; the check tells which one this is.
    for scalar in ("double", "float"):
        kernel = torch.cuda._compile_kernel(source.replace("SCALAR", scalar), "saxpy")
        y, x = bench.inputs()
        ty, tx = torch.from_numpy(y).cuda(), torch.from_numpy(x).cuda()
        torch.cuda.synchronize()
        kernel(grid=grid, block=block, args=[ty, tx, SCALE, n], stream=stream)
        torch.cuda.synchronize()
        try:
            check_saxpy(f"torch._compile_kernel ({scalar})", ty.cpu().numpy(), y, x, SCALE)
        except AssertionError as error:
            failure = error
        else:
            break
    else:
        raise failure if failure else AssertionError("no kernel")

    def batch() -> None:
        for _ in bench.repeat():
            kernel(grid=grid, block=block, args=[ty, tx, SCALE, n], stream=stream)

    return Contender("torch._compile_kernel", batch, bench.calls)


def build_torch_add(bench: Bench, torch: Any) -> Contender:
    """The same arithmetic by torch's own operation, for scale: it also dispatches."""
    stream = torch.cuda.ExternalStream(bench.stream)
    y, x = bench.inputs()
    ty, tx = torch.from_numpy(y).cuda(), torch.from_numpy(x).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.add(ty, tx, alpha=SCALE, out=ty)
    torch.cuda.synchronize()
    check_saxpy("torch.add", ty.cpu().numpy(), y, x, SCALE)

    def batch() -> None:
        for _ in bench.repeat():
            torch.add(ty, tx, alpha=SCALE, out=ty)

    return Contender("torch.add(out=)", batch, bench.calls, scope=lambda: torch.cuda.stream(stream))


def build_triton(bench: Bench, torch: Any) -> Contender:
    from triton_saxpy import saxpy

    stream = torch.cuda.ExternalStream(bench.stream)
    y, x = bench.inputs()
    ty, tx = torch.from_numpy(y).cuda(), torch.from_numpy(x).cuda()
    torch.cuda.synchronize()
    kernel, n = saxpy[(bench.grid,)], N
    with torch.cuda.stream(stream):
        kernel(ty, tx, SCALE, n, BLOCK=BLOCK)
    torch.cuda.synchronize()
    check_saxpy("Triton", ty.cpu().numpy(), y, x, SCALE)

    def batch() -> None:
        for _ in bench.repeat():
            kernel(ty, tx, SCALE, n, BLOCK=BLOCK)

    return Contender("Triton", batch, bench.calls, scope=lambda: torch.cuda.stream(stream))


def build_contenders(bench: Bench) -> list[Contender]:
    """kina's two ways first, then the two raw loops, then the libraries that are there."""
    report = bench.report
    found = [*build_kina(bench), *build_raw(bench)]
    for name, builder in (("cuda.core", build_cuda_core), ("cuda.bindings", build_cuda_bindings)):
        with report.peer(name):
            found.append(builder(bench))
    if cupy := optional(report, "cupy"):
        with report.peer("CuPy RawKernel"):
            found.append(build_cupy(bench, cupy))
    if torch := optional(report, "torch"):
        for name, with_torch in (
            ("torch._compile_kernel", build_torch_compiled),
            ("torch.add(out=)", build_torch_add),
            ("Triton", build_triton),
        ):
            with report.peer(name):
                found.append(with_torch(bench, torch))
    return found
