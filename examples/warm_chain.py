"""A long chain of launches, and what it leaves behind: counters, beside a loop over the driver's own function.

    python examples/warm_chain.py [LAUNCHES]

Every launch depends on the one before. Nothing is recorded, asked or waited for on the way; what is leased is sealed by
one event now and then. The driver's own loop, through cuda.bindings, alternates with kina's on the same stream.
"""

import ctypes
import sys
import time

import numpy as np

import kina

PTX = """
.version 7.0
.target sm_50
.address_size 64

.visible .entry add_one(.param .u64 y, .param .u32 n)
{
    .reg .pred %outside;
    .reg .b32  %block, %size, %thread, %i, %n;
    .reg .b64  %py, %offset;
    .reg .f32  %v;

    ld.param.u64 %py, [y];
    ld.param.u32 %n, [n];
    mov.u32      %block, %ctaid.x;
    mov.u32      %size, %ntid.x;
    mov.u32      %thread, %tid.x;
    mad.lo.u32   %i, %block, %size, %thread;
    setp.ge.u32  %outside, %i, %n;
    @%outside bra done;
    cvta.to.global.u64 %py, %py;
    mul.wide.u32  %offset, %i, 4;
    add.u64       %py, %py, %offset;
    ld.global.f32 %v, [%py];
    add.f32       %v, %v, 0f3F800000;
    st.global.f32 [%py], %v;
done:
    ret;
}
"""
N = 256
TURN = 500  # launches before the other loop has its turn, and a wait: the driver's queue is never full


def main(launches: int) -> None:
    def ok(result: tuple) -> object:
        if int(result[0]):
            sys.exit(f"warm_chain: the driver answered {result[0]!r}")
        return result[1] if len(result) > 1 else None

    turns = max(1, launches // TURN)
    ours, theirs = [], []
    with kina.session("cuda:0") as s, s.raw("chain") as raw:
        from cuda.bindings import driver

        y, z = s.zeros(N), s.zeros(N)
        add_one = raw.module(PTX).function("add_one", "mut f32[], u32")
        config = kina.LaunchConfig.linear(N)

        # The same with nothing between: one function, one set of arguments that is packed already.
        module = ok(driver.cuModuleLoadData(PTX.encode() + b"\0"))
        function = ok(driver.cuModuleGetFunction(module, b"add_one"))
        stream = driver.CUstream(raw.unsafe_stream_handle())
        values = ctypes.c_uint64(raw.unsafe_address(raw.mut(z))), ctypes.c_uint32(N)
        pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
        packed = ctypes.addressof(pointers)
        grid, block = config.grid[0], config.block[0]

        def launch_ours() -> None:
            for _ in range(TURN):
                add_one.launch(config, y, N)

        def launch_theirs() -> None:
            for _ in range(TURN):
                driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, packed, 0)

        launch_ours(), launch_theirs()  # warm
        s.synchronize()
        before, pending = s.counters(), []
        for _ in range(turns):
            for loop, times in ((launch_ours, ours), (launch_theirs, theirs)):
                begin = time.perf_counter_ns()
                loop()
                times.append((time.perf_counter_ns() - begin) / TURN)
                pending.append(s.counters().pending)
                s.synchronize()
        after = s.counters()
        results = s.to_host(y), s.to_host(z)
        ok(driver.cuModuleUnload(module))
    made = after.launches - before.launches
    events = after.events_recorded - before.events_recorded
    print(f"{made} launches by kina {np.median(ours):.0f} ns each, by the driver's own loop {np.median(theirs):.0f} ns")
    print(
        f"events recorded {events}, asked {after.event_queries - before.event_queries}, seals "
        f"{after.seals - before.seals}, leases {after.leases - before.leases}, pending at most {max(pending)}"
    )
    for result in results:
        if not (result == TURN * (turns + 1)).all():
            sys.exit("warm_chain: wrong result")
    if events * 64 > made:
        sys.exit(f"warm_chain: {events} events for {made} launches, more than one for 64")
    if max(pending) > 64:
        sys.exit(f"warm_chain: {max(pending)} records are pending, more than 64")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
    except kina.UnavailableError as error:
        sys.exit(f"warm_chain: {error}")
