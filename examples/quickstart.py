"""The sine of 2^24 angles on the GPU if there is one, else on the CPU; checked, and shared with PyTorch.

On a GPU the work is one launch of the PTX below through a raw session. If that fails the program fails:
it never computes on the CPU instead.
"""

import math
import sys
import time

import numpy as np

import kina

try:
    import torch
except ImportError:
    sys.exit("quickstart: this example shares memory with PyTorch; install it (pip install torch)")

COUNT = 1 << 24
# sin(x) = x * (c0 + c1 u + ... + c5 u^5) with u = x^2: the Taylor series, good to one float32 rounding
# for |x| <= pi / 2.
COEFFICIENTS = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(6)]

PTX = """
.version 7.0
.target sm_50
.address_size 64

.visible .entry sine(.param .u64 y, .param .u64 x, .param .u64 n)
{
    .reg .pred %outside;
    .reg .b32  %block, %size, %thread;
    .reg .b64  %px, %py, %i, %n, %offset;
    .reg .f32  %x, %u, %p;

    ld.param.u64 %py, [y];
    ld.param.u64 %px, [x];
    ld.param.u64 %n, [n];

    mov.u32      %block, %ctaid.x;
    mov.u32      %size, %ntid.x;
    mov.u32      %thread, %tid.x;
    cvt.u64.u32  %i, %thread;
    mad.wide.u32 %i, %block, %size, %i;
    setp.ge.u64  %outside, %i, %n;
    @%outside bra done;

    cvta.to.global.u64 %px, %px;
    cvta.to.global.u64 %py, %py;
    shl.b64       %offset, %i, 2;
    add.u64       %px, %px, %offset;
    add.u64       %py, %py, %offset;
    ld.global.f32 %x, [%px];
    mul.rn.f32    %u, %x, %x;
    mov.f32       %p, 0fB2D7322B;            // -1 / 11!
    fma.rn.f32    %p, %p, %u, 0f3638EF1D;    //  1 / 9!
    fma.rn.f32    %p, %p, %u, 0fB9500D01;    // -1 / 7!
    fma.rn.f32    %p, %p, %u, 0f3C088889;    //  1 / 5!
    fma.rn.f32    %p, %p, %u, 0fBE2AAAAB;    // -1 / 3!
    fma.rn.f32    %p, %p, %u, 0f3F800000;    //  1
    mul.rn.f32    %p, %p, %x;
    st.global.f32 [%py], %p;
done:
    ret;
}
"""


def sine_on_gpu(s, x):
    """One fused launch."""
    y = s.empty(x.shape, x.dtype)
    with s.raw("sine") as raw:
        sine = raw.module(PTX).function("sine", "mut f32[], f32[], u64")
        sine.launch(kina.LaunchConfig.linear(x.size), y, x, x.size)
    return y


def sine_on_cpu(s, x):
    """The same polynomial, operation by operation."""
    u = s.multiply(x, x)
    p = s.full((1,), COEFFICIENTS[-1], x.dtype)
    for coefficient in reversed(COEFFICIENTS[:-1]):
        p = s.add(s.multiply(p, u), s.full((1,), coefficient, x.dtype))
    return s.multiply(p, x)


def address(s, t) -> int:
    """Where a tensor's first element lies: a check of this example's claims, not a way to work."""
    if t.device == "cpu":
        return np.from_dlpack(t).ctypes.data
    with s.raw("address") as raw:
        return raw.unsafe_address(raw.ref(t))


def main() -> None:
    devices = kina.devices()
    where = "cuda:0" if devices else "cpu"
    angles = np.linspace(-math.pi / 2, math.pi / 2, COUNT, dtype=np.float32)
    expected = np.sin(angles.astype(np.float64))

    with kina.session(where) as s:
        if devices:
            print(f"on {where}: {devices[0].name}")
        else:
            print(f"no usable GPU, so on the CPU: {kina.unavailable_reason()}")
        x = s.from_host(angles)
        compute = sine_on_gpu if devices else sine_on_cpu
        compute(s, x)  # the first call also loads: not timed
        s.synchronize()
        start = time.perf_counter()
        y = compute(s, x)
        s.synchronize()
        elapsed = time.perf_counter() - start
        error = np.abs(s.to_host(y) - expected).max()
        print(f"sine of {COUNT:,} float32 angles in {elapsed * 1e3:.2f} ms, largest error {error:.1e}")
        if not error < 5e-7:
            sys.exit("quickstart: the result is wrong")

        shared = torch.from_dlpack(y)
        if shared.data_ptr() != address(s, y):
            sys.exit("quickstart: PyTorch received a copy")
        squared = shared * shared  # PyTorch's kernel on kina's memory
        back = s.adopt(squared)
        if address(s, back) != squared.data_ptr():
            sys.exit("quickstart: kina received a copy")
        error = np.abs(s.to_host(back) - expected**2).max()
        print(f"squared by PyTorch {torch.__version__} and back, no copy, largest error {error:.1e}")
        if not error < 1e-6:
            sys.exit("quickstart: the result that came back is wrong")


if __name__ == "__main__":
    main()
