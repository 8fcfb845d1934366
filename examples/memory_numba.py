"""Numba on memory of kina. Without a change of the program: NUMBA_CUDA_MEMORY_MANAGER=kina.memory.integrations.numba"""

import sys

import numpy as np

import kina
from kina.memory import integrations

try:
    from numba import cuda
except ImportError:
    sys.exit("memory_numba: this example needs Numba with CUDA (pip install numba-cuda)")

COUNT = 1 << 20


def main() -> None:
    pool = integrations.default_pool("cuda:0")
    cuda.set_memory_manager(integrations.NumbaMemoryManager)  # before Numba's first use of the GPU

    @cuda.jit
    def saxpy(y, x, a):
        i = cuda.grid(1)
        if i < y.size:
            y[i] += a * x[i]

    x = cuda.to_device(np.arange(COUNT, dtype=np.float32))
    y = cuda.to_device(np.ones(COUNT, dtype=np.float32))
    print(f"{pool.stats().live_bytes} bytes of the pool are live")
    assert pool.stats().live_bytes == x.nbytes + y.nbytes

    saxpy[COUNT // 256, 256](y, x, np.float32(2))
    result = y.copy_to_host()  # waits
    print(f"y[:4] = {result[:4]}")
    assert np.array_equal(result, 1 + 2 * np.arange(COUNT, dtype=np.float32))
    del x, y
    assert pool.stats().live_bytes == 0


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"memory_numba: {error}")
