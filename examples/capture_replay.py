"""Capture a step once, replay it many times: an iteration of a solver as one graph.

    python examples/capture_replay.py [STEPS]

A step of Jacobi's method on a ring of points runs from one array to another, and back: two kernels, with
scratch memory that only the graph has. What a step costs the host is shown for both ways: launch by launch, replayed.
"""

import sys
import time

import numpy as np

import kina

PTX = """
.version 7.0
.target sm_50
.address_size 64

// to[i] = (from[i - 1] + from[i + 1]) / 2 on a ring of n points
.visible .entry relax(.param .u64 to, .param .u64 from, .param .u32 n)
{
    .reg .pred %outside, %wraps;
    .reg .b32  %block, %size, %thread, %i, %n, %left, %right, %last;
    .reg .b64  %pto, %pfrom, %offset, %address;
    .reg .f32  %a, %b;

    ld.param.u64 %pto, [to];
    ld.param.u64 %pfrom, [from];
    ld.param.u32 %n, [n];
    mov.u32      %block, %ctaid.x;
    mov.u32      %size, %ntid.x;
    mov.u32      %thread, %tid.x;
    mad.lo.u32   %i, %block, %size, %thread;
    setp.ge.u32  %outside, %i, %n;
    @%outside bra done;
    cvta.to.global.u64 %pto, %pto;
    cvta.to.global.u64 %pfrom, %pfrom;
    sub.u32      %last, %n, 1;
    sub.u32      %left, %i, 1;
    setp.eq.u32  %wraps, %i, 0;
    selp.b32     %left, %last, %left, %wraps;
    add.u32      %right, %i, 1;
    setp.eq.u32  %wraps, %i, %last;
    selp.b32     %right, 0, %right, %wraps;
    mul.wide.u32 %offset, %left, 4;
    add.u64      %address, %pfrom, %offset;
    ld.global.f32 %a, [%address];
    mul.wide.u32 %offset, %right, 4;
    add.u64      %address, %pfrom, %offset;
    ld.global.f32 %b, [%address];
    add.f32      %a, %a, %b;
    mul.f32      %a, %a, 0f3F000000;
    mul.wide.u32 %offset, %i, 4;
    add.u64      %address, %pto, %offset;
    st.global.f32 [%address], %a;
done:
    ret;
}
"""
N = 4096


def reference(values: np.ndarray, steps: int) -> np.ndarray:
    values = values.astype(np.float64)
    for _ in range(2 * steps):
        values = (np.roll(values, 1) + np.roll(values, -1)) / 2
    return values


def main(steps: int) -> None:
    start = np.random.default_rng().standard_normal(N).astype(np.float32)
    with kina.session("cuda:0") as s, s.raw("relax") as raw:
        relax = raw.module(PTX).function("relax", "mut f32[], f32[], u32")
        config = kina.LaunchConfig.linear(N)
        eager, replayed = s.from_host(start), s.from_host(start)

        def step(x: kina.Tensor) -> None:
            between = s.empty(N)
            relax.launch(config, between, x, N)
            relax.launch(config, x, between, N)

        # Nothing of this runs: it is recorded. `between` is the graph's, and gone for everybody else.
        with s.capture() as graph:
            step(replayed)
        step(eager)
        graph.launch(s)
        s.synchronize()

        cost = {}
        for name, once in (("launch by launch", lambda: step(eager)), ("replayed", lambda: graph.launch(s))):
            begin = time.perf_counter_ns()
            for _ in range(steps - 1):
                once()
            cost[name] = (time.perf_counter_ns() - begin) / max(steps - 1, 1)
            s.synchronize()
        counters = s.counters()
        results = {"launch by launch": s.to_host(eager), "replayed": s.to_host(replayed)}
    own = graph.reserved_bytes() >> 10
    print(f"a graph of {graph.nodes} kernels, {own} KiB of its own, {counters.graph_launches} launches")
    print(", ".join(f"{name}: {ns / 1e3:.1f} us a step" for name, ns in cost.items()))
    expected = reference(start, steps)
    for name, result in results.items():
        if not np.allclose(result, expected, atol=1e-4):
            sys.exit(f"capture_replay: wrong result, {name}")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
    except kina.UnavailableError as error:
        sys.exit(f"capture_replay: {error}")
