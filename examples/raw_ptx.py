"""Launch a hand-written PTX kernel through a raw session: y = a * x + y on 1024 elements."""

import sys

import numpy as np

import kina

PTX = """
.version 7.0
.target sm_50
.address_size 64

.visible .entry saxpy(.param .u64 y, .param .u64 x, .param .f32 a, .param .u32 n)
{
    .reg .pred %outside;
    .reg .b32  %block, %size, %thread, %i, %n;
    .reg .b64  %px, %py, %offset;
    .reg .f32  %a, %vx, %vy;

    ld.param.u64 %py, [y];
    ld.param.u64 %px, [x];
    ld.param.f32 %a, [a];
    ld.param.u32 %n, [n];

    mov.u32      %block, %ctaid.x;
    mov.u32      %size, %ntid.x;
    mov.u32      %thread, %tid.x;
    mad.lo.u32   %i, %block, %size, %thread;
    setp.ge.u32  %outside, %i, %n;
    @%outside bra done;

    cvta.to.global.u64 %px, %px;
    cvta.to.global.u64 %py, %py;
    mul.wide.u32  %offset, %i, 4;
    add.u64       %px, %px, %offset;
    add.u64       %py, %py, %offset;
    ld.global.f32 %vx, [%px];
    ld.global.f32 %vy, [%py];
    fma.rn.f32    %vy, %a, %vx, %vy;
    st.global.f32 [%py], %vy;
done:
    ret;
}
"""


def main() -> None:
    with kina.session("cuda:0") as s:
        x = s.from_host(np.arange(1024, dtype=np.float32))
        y = s.zeros(1024, "float32")
        with s.raw("saxpy") as raw:  # raw CUDA authority, for this block only
            saxpy = raw.module(PTX).function("saxpy", "mut f32[], f32[], f32, u32")
            saxpy.launch(kina.LaunchConfig.linear(1024), y, x, 2.0, 1024)
        result = s.to_host(y)  # waits, and says so by its name
        print(f"y[:4] = {result[:4]}")
        if not np.array_equal(result, 2 * np.arange(1024, dtype=np.float32)):
            sys.exit("raw_ptx: wrong result")


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"raw_ptx: {error}")
