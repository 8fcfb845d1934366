"""Launching from Python: kina beside raw driver calls in a C loop, cuda.core, CuPy, torch and Triton.

    python benchmarks/bench_launch.py [--json FILE] [--rounds N] [--batch N] [--only WORD]

Parts (``--only``): launch, threads, synchronize, lookup, calls, transfers. Exit status: 0 all bars met, 1 a bar
missed, 2 this machine cannot run it (no GPU, no kina, no C compiler).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import struct
import sys
from typing import Any

import numpy as np
from harness import (
    HOST_WAITS,
    Borrowed,
    Contender,
    Launch,
    Raw,
    Report,
    arguments,
    count_driver_calls,
    interleave,
    load_interposer,
    median_difference,
    open_runtime,
    optional,
)
from launch_peers import Bench, build_contenders, parameter_pointers, raw_saxpy
from launch_threads import measure_threads
from saxpy import (
    BLOCK,
    CUDA_SOURCE,
    PTX,
    SCALE,
    SIGNATURE,
    SIXTEEN,
    SIXTEEN_PTX,
    SIXTEEN_SIGNATURE,
    N,
    check_saxpy,
)
from transfers import measure_transfers

COUNTED_LAUNCHES = 4096


def judge(bench: Bench, arguments: str, samples: dict[str, list[float]]) -> None:
    """kina's two ways to launch, each against the faster of the raw ones."""
    report = bench.report
    best = min((name for name in samples if name.startswith("raw")), key=lambda name: statistics.median(samples[name]))
    raw = statistics.median(samples[best])
    others = {name: values for name, values in samples.items() if not name.startswith("kina")}
    for own, words, ratio, most in (
        ("kina", "launch", 1.08, 300),
        ("kina prepared", "prepared launch", 1.05, 150),
    ):
        more = median_difference(samples[own], samples[best])
        report.timed(
            f"{words}, {arguments}",
            {own: samples[own], **others},
            against=best,
            bar=f"<= {ratio}x raw or <= {most} ns more",
            ok=lambda value, ratio=ratio, most=most, more=more: value <= ratio * raw or more <= most,
        )
        report.row(f"{words}, {arguments}: beyond raw, paired", "ns", more)


def measure_launch(bench: Bench, rounds: int) -> None:
    judge(bench, "4 arguments", interleave(build_contenders(bench), rounds, bench.raw.settle))


def measure_launch_without_arguments(bench: Bench, rounds: int) -> None:
    nothing = bench.raw_session.module(PTX).function("nothing", "")
    config = bench.config
    launch = Launch(bench.raw.pointer("raw_function", PTX.encode(), b"nothing"), bench.stream, bench.grid, BLOCK)

    def kina_batch() -> None:
        for _ in bench.repeat():
            nothing.launch(config)

    def raw_batch() -> None:
        bench.raw.call("raw_launch_parameters", ctypes.byref(launch), None, bench.calls)

    prepared = nothing.prepare(config)

    def prepared_batch() -> None:
        for _ in bench.repeat():
            prepared.launch()

    contenders = [
        Contender("kina", kina_batch, bench.calls),
        Contender("kina prepared", prepared_batch, bench.calls),
        Contender("raw", raw_batch, bench.calls),
    ]
    with bench.report.peer("cuda.core, no arguments"):
        from cuda.core import Device, LaunchConfig, ObjectCode
        from cuda.core import launch as core_launch

        stream = Device(0).create_stream(Borrowed(bench.stream))
        kernel = ObjectCode.from_ptx(PTX.encode()).get_kernel("nothing")
        core_config = LaunchConfig(grid=bench.grid, block=BLOCK)
        core_launch(stream, core_config, kernel)

        def core_batch() -> None:
            for _ in bench.repeat():
                core_launch(stream, core_config, kernel)

        contenders.append(Contender("cuda.core", core_batch, bench.calls))
    judge(bench, "no arguments", interleave(contenders, rounds, bench.raw.settle))


def measure_launch_of_sixteen_arguments(bench: Bench, rounds: int) -> None:
    session, config = bench.session, bench.kina.LaunchConfig(1, 1)
    function = bench.raw_session.module(SIXTEEN_PTX).function(SIXTEEN, SIXTEEN_SIGNATURE)
    prepared = function.prepare(config)
    to = session.zeros(96, "u8")
    tensors = [session.zeros(N) for _ in range(7)]
    floats, ints = (1.5, 2.5, 3.5, 4.5), (1, 2, 3, N)
    values = struct.pack("<8Q4f4I", *(bench.address(tensor) for tensor in (to, *tensors)), *floats, *ints)
    buffer = ctypes.create_string_buffer(values, len(values))
    begin = ctypes.addressof(buffer)
    pointers = (ctypes.c_void_p * 16)(*(begin + offset for offset, _ in function.parameters))
    launch = Launch(bench.raw.pointer("raw_function", SIXTEEN_PTX.encode(), SIXTEEN.encode()), bench.stream, 1, 1)
    a, b, c, d, e, f, g = tensors
    p, q, r, s = floats
    i, j, k, n = ints

    def kina_batch() -> None:
        for _ in bench.repeat():
            function.launch(config, to, a, b, c, d, e, f, g, p, q, r, s, i, j, k, n)

    def prepared_batch() -> None:
        for _ in bench.repeat():
            prepared.launch(to, a, b, c, d, e, f, g, p, q, r, s, i, j, k, n)

    def raw_batch() -> None:
        bench.raw.call("raw_launch_parameters", ctypes.byref(launch), pointers, bench.calls)

    def extra_batch() -> None:
        size = ctypes.c_size_t(len(values))
        bench.raw.call("raw_launch_extra", ctypes.byref(launch), buffer, size, bench.calls)

    contenders = []
    for name, batch in (
        ("kina", kina_batch),
        ("kina prepared", prepared_batch),
        ("raw kernelParams", raw_batch),
        ("raw extra", extra_batch),
    ):
        function.launch(config, to, *tensors, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
        batch()
        if session.to_host(to).tobytes() != values:
            raise AssertionError(f"{name} passes other arguments")
        contenders.append(Contender(name, batch, bench.calls))
    judge(bench, "16 arguments", interleave(contenders, rounds, bench.raw.settle))


def measure_launch_of_torch_tensors(bench: Bench, rounds: int) -> None:
    """PyTorch's tensors as arguments, on the session's stream and on another one, against kina's own."""
    torch = optional(bench.report, "torch")
    if torch is None:
        return
    session, config, n = bench.session, bench.config, N
    saxpy = bench.raw_session.module(PTX).function("saxpy", SIGNATURE)
    y, x = bench.inputs()
    own_y, own_x = session.from_host(y), session.from_host(x)
    torch_y, torch_x = torch.from_numpy(y).cuda(), torch.from_numpy(x).cuda()
    torch.cuda.synchronize()
    ours, other = torch.cuda.ExternalStream(bench.stream), torch.cuda.Stream()

    def batch_of(to: Any, source: Any) -> Any:
        def batch() -> None:
            for _ in bench.repeat():
                saxpy.launch(config, to, source, SCALE, n)

        return batch

    with torch.cuda.stream(ours):
        saxpy.launch(config, torch_y, torch_x, SCALE, n)
    session.synchronize()
    check_saxpy("torch tensors", torch_y.cpu().numpy(), y, x, SCALE)
    one, two = "one torch tensor", "two torch tensors"
    samples = interleave(
        [
            Contender("kina tensors", batch_of(own_y, own_x), bench.calls),
            Contender(one, batch_of(own_y, torch_x), bench.calls, scope=lambda: torch.cuda.stream(ours)),
            Contender(two, batch_of(torch_y, torch_x), bench.calls, scope=lambda: torch.cuda.stream(ours)),
            Contender(
                f"{one}, another stream", batch_of(own_y, torch_x), bench.calls, scope=lambda: torch.cuda.stream(other)
            ),
        ],
        rounds,
        bench.raw.settle,
    )
    report = bench.report
    report.timed("launch of torch tensors", samples, against="kina tensors")
    for name, count in ((one, 1), (two, 2)):
        more = median_difference(samples[name], samples["kina tensors"]) / count
        report.row(f"{name}: beyond kina's own, each, paired", "ns", more, bar="<= 150 ns", ok=more <= 150)
    report.row(
        f"{one}, another stream: beyond kina's own, paired",
        "ns",
        median_difference(samples[f"{one}, another stream"], samples["kina tensors"]),
    )


def measure_synchronize(bench: Bench, rounds: int) -> None:
    """What waiting costs, by itself on an idle stream and after each launch."""
    session, raw, calls = bench.session, bench.raw, min(bench.calls, 64)
    bench.calls = calls
    y, x = (session.from_host(array) for array in bench.inputs())
    saxpy = bench.raw_session.module(PTX).function("saxpy", SIGNATURE)
    config, stream = bench.config, bench.stream
    launch, values, _ = raw_saxpy(bench)
    pointers, wait = parameter_pointers(values), ctypes.c_void_p(stream)

    def kina_both() -> None:
        for _ in bench.repeat():
            saxpy.launch(config, y, x, SCALE, N)
            session.synchronize()

    def kina_idle() -> None:
        for _ in bench.repeat():
            session.synchronize()

    both = [
        Contender("kina", kina_both, calls),
        Contender("raw", lambda: raw.call("raw_launch_and_synchronize", launch, pointers, calls), calls),
    ]
    idle = [
        Contender("kina", kina_idle, calls),
        Contender("raw", lambda: raw.call("raw_synchronize", wait, calls), calls),
    ]
    waits: list[tuple[str, Any]] = []
    if torch := optional(bench.report, "torch"):
        waits.append(("torch", torch.cuda.ExternalStream(stream).synchronize))
    if cupy := optional(bench.report, "cupy"):
        waits.append(("CuPy", cupy.cuda.Stream.from_external(Borrowed(stream)).synchronize))
    for name, function in waits:

        def peer_idle(function: Any = function) -> None:
            for _ in bench.repeat():
                function()

        with bench.report.peer(f"{name} synchronize"):
            peer_idle()
            idle.append(Contender(name, peer_idle, calls))
    report = bench.report
    report.timed("launch + synchronize", interleave(both, rounds, raw.settle), against="raw")
    report.timed("synchronize, idle stream", interleave(idle, rounds, raw.settle), against="raw")


def measure_lookup(bench: Bench, rounds: int) -> None:
    """Module and function that were used before: from source text to something that launches."""
    raw_session = bench.raw_session

    def kina_batch() -> None:
        for _ in bench.repeat():
            raw_session.module(PTX).function("saxpy", SIGNATURE)

    kina_batch()
    contenders = [Contender("kina", kina_batch, bench.calls)]
    if cupy := optional(bench.report, "cupy"):
        with bench.report.peer("CuPy RawModule"):
            source = CUDA_SOURCE.replace("SCALAR", "float")
            cupy.RawModule(code=source).get_function("saxpy")

            def cupy_batch() -> None:
                for _ in bench.repeat():
                    cupy.RawModule(code=source).get_function("saxpy")

            contenders.append(Contender("CuPy RawModule", cupy_batch, bench.calls))
    samples = interleave(contenders, min(rounds, 40), bench.raw.settle)
    bench.report.timed("cached module + function", samples)


def measure_calls(report: Report) -> None:
    """What reaches the driver, counted by a library between kina and the driver."""
    counted = count_driver_calls(__file__)
    launches = counted["launches"]
    for scope, words in (("loop", "in the launch loop"), ("session", "from session enter to exit")):
        calls = counted[scope]

        def total(*names: str, calls: dict[str, int] = calls) -> int:
            return sum(calls[name] for name in names)  # a name the driver lacks must not count as zero

        launched = total("cuLaunchKernel", "cuLaunchKernelEx")
        report.row(
            f"launches seen by the driver, {words}",
            "calls",
            launched,
            bar=f"= {launches}",
            ok=launched == launches,
        )
        events = 64 * total("cuEventRecord", "cuEventRecordWithFlags") / launches
        report.row(f"events per 64 launches, {words}", "events", events, bar="<= 1", ok=events <= 1)
        waits = total(*HOST_WAITS)
        report.row(f"host waits and event queries, {words}", "calls", waits, bar="= 0", ok=waits == 0)
        others = {name: n / launches for name, n in calls.items() if n and not name.startswith("cuLaunchKernel")}
        report.row(f"other driver calls per launch, {words}", "calls", sum(others.values()), others)


def count_child() -> None:
    """Runs over the interposer and prints what it saw."""
    kina, runtime = open_runtime()
    calls = load_interposer().Interposer()
    generator = np.random.default_rng()
    config = kina.LaunchConfig(grid=(-(-N // BLOCK), 1, 1), block=(BLOCK, 1, 1))
    with kina.session(runtime) as s:
        y, x = (s.from_host(array) for array in generator.standard_normal((2, N), dtype=np.float32))
        with s.raw("warm-up") as raw:
            raw.module(PTX).function("saxpy", SIGNATURE).launch(config, y, x, SCALE, N)
        s.synchronize()
    calls.reset()
    with kina.session(runtime) as s, s.raw("count") as raw:
        saxpy = raw.module(PTX).function("saxpy", SIGNATURE)
        before = calls.counts()
        for _ in range(COUNTED_LAUNCHES):
            saxpy.launch(config, y, x, SCALE, N)
        after = calls.counts()
    session = calls.counts()
    loop = {name: count - before.get(name, 0) for name, count in after.items()}
    print(json.dumps({"launches": COUNTED_LAUNCHES, "loop": loop, "session": session}))


def run(options: argparse.Namespace) -> int:
    kina, runtime = open_runtime()
    raw = Raw()
    with kina.session(runtime) as session:
        report = Report("bench_launch", options, raw)
        with session.raw("bench_launch") as raw_session:

            def bench() -> Bench:
                return Bench(kina, session, raw_session, raw, report, options.batch, np.random.default_rng())

            for part, measure in (
                ("launch", measure_launch),
                ("launch without arguments", measure_launch_without_arguments),
                ("launch of 16 arguments", measure_launch_of_sixteen_arguments),
                ("launch of torch tensors", measure_launch_of_torch_tensors),
                ("threads", measure_threads),
                ("synchronize", measure_synchronize),
                ("lookup", measure_lookup),
            ):
                if report.wants(part):
                    with report.part(part):
                        measure(bench(), options.rounds)
        if report.wants("transfers"):
            with report.part("transfers"):
                measure_transfers(session, raw, report)
    if report.wants("calls"):
        with report.part("calls"):
            measure_calls(report)
    return report.finish()


if __name__ == "__main__":
    chosen = arguments(__doc__.splitlines()[0])
    if chosen.count_child:
        count_child()
    else:
        sys.exit(run(chosen))
