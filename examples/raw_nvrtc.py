"""Compile CUDA C++ while the program runs, and launch what comes out: one template, two dtypes, a struct by value.

Needs NVRTC: pip install 'kina[nvrtc]'.
"""

import sys

import numpy as np

import kina

SOURCE = r"""
struct Line { double slope, offset; };

template <typename T> __global__ void along(T *y, const T *x, Line line, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = T(line.slope * x[i] + line.offset);
}
"""


def main() -> None:
    line = np.array((2.0, 1.0), dtype=[("slope", "f8"), ("offset", "f8")])[()]
    with kina.session("cuda:0") as s, s.raw("lines") as raw:
        # A CUBIN for this very device; kept in memory, and on disk for the next process.
        module = raw.module(SOURCE, name_expressions=["along<float>", "along<double>"])
        for name, short, dtype in (("float", "f32", np.float32), ("double", "f64", np.float64)):
            along = module.function(f"along<{name}>", f"out {short}[], {short}[], bytes[16], u32")
            threads, _ = along.suggest_block()
            x = s.from_host(np.arange(100_000, dtype=dtype))
            y = s.zeros(x.shape, x.dtype)
            along.launch(kina.LaunchConfig.linear(100_000, threads), y, x, line, 100_000)
            result = s.to_host(y)
            print(f"{along.name}: {along.registers} registers, blocks of {threads}, y[:3] = {result[:3]}")
            if not np.array_equal(result, 2 * s.to_host(x) + 1):
                sys.exit("raw_nvrtc: wrong result")


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"raw_nvrtc: {error}")
