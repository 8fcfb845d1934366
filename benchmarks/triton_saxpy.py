"""Triton's saxpy: in a module of its own, because Triton reads a kernel's source from its file."""

import triton
import triton.language as tl


@triton.jit
def saxpy(y, x, a, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(y + i, tl.load(y + i, mask=inside) + a * tl.load(x + i, mask=inside), mask=inside)
