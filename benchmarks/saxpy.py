"""The kernel that the benchmarks launch, and the check that a library computes it."""

from __future__ import annotations

import numpy as np

__all__ = [
    "BLOCK",
    "CUDA_SOURCE",
    "PTX",
    "SCALE",
    "SIGNATURE",
    "SIXTEEN",
    "SIXTEEN_PTX",
    "SIXTEEN_SIGNATURE",
    "N",
    "check_saxpy",
]

#: So small that the device finishes each launch before the host can make the next one.
N = 1000
BLOCK = 256
SCALE = 2.0
SIGNATURE = "mut f32[], f32[], f32, u32"

#: y[i] += a * x[i] with 4 parameters, and a kernel without parameters.
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

.visible .entry nothing()
{
    ret;
}
"""

#: 16 parameters: 8 pointers, 4 floats and 4 ints. It writes each of them to where the first one points.
SIXTEEN = "write_args_sixteen"
SIXTEEN_SIGNATURE = ", ".join(["mut u8[]", *["f32[]"] * 7, *["f32"] * 4, *["u32"] * 4])
_KINDS = ("u64",) * 8 + ("f32",) * 4 + ("u32",) * 4
_OFFSETS = [*range(0, 64, 8), *range(64, 96, 4)]
_BODY = "\n".join(
    f"    ld.param.{kind} %of_{kind}, [p{i}];\n    st.global.{kind} [%to+{offset}], %of_{kind};"
    for i, (kind, offset) in enumerate(zip(_KINDS, _OFFSETS, strict=True))
)
SIXTEEN_PTX = f"""
.version 7.0
.target sm_50
.address_size 64

.visible .entry {SIXTEEN}({", ".join(f".param .{kind} p{i}" for i, kind in enumerate(_KINDS))})
{{
    .reg .b64 %to, %of_u64;
    .reg .f32 %of_f32;
    .reg .b32 %of_u32;

    ld.param.u64 %to, [p0];
    cvta.to.global.u64 %to, %to;
{_BODY}
    ret;
}}
"""

#: The same saxpy for libraries that compile. SCALAR is float, or double where every float is passed as one.
CUDA_SOURCE = """
extern "C" __global__ void saxpy(float *y, const float *x, SCALAR a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaf((float)a, x[i], y[i]);
}
"""


def check_saxpy(name: str, out: np.ndarray, y: np.ndarray, x: np.ndarray, a: float) -> None:
    """Compares y + a * x with float64."""
    reference = y.astype(np.float64) + a * x.astype(np.float64)
    error = float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))
    if not error < 1e-6:
        raise AssertionError(f"{name} computes something else: relative error {error:.3g}")
