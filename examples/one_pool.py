"""One pool under PyTorch, CuPy and kina: what one gives back, the others have; and they work on each other's memory."""

import gc
import sys

import kina
from kina import memory
from kina.memory import integrations

try:
    import cupy
    import torch
except ImportError:
    sys.exit("one_pool: this example needs PyTorch and CuPy (pip install torch cupy-cuda13x)")

COUNT = 1 << 20
NBYTES = 4 * COUNT


def main() -> None:
    pool = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource("cuda:0"), maximum_bytes=1 << 30)
    memory.set_default_resource(pool, "cuda:0")  # for sessions of kina, and for the two below
    torch.cuda.memory.change_current_allocator(integrations.torch_allocator())
    cupy.cuda.set_allocator(integrations.cupy_allocator)

    start = pool.stats().live_bytes
    with kina.session("cuda:0") as s:
        x = s.full(COUNT, 1.0)
        y = torch.full((COUNT,), 2.0, device="cuda:0")
        z = cupy.full(COUNT, 3.0, dtype=cupy.float32)
        live = pool.stats().live_bytes - start
        print(f"three arrays of {NBYTES} bytes: {live} bytes of the pool are live")
        assert live == 3 * NBYTES

        shared = torch.from_dlpack(x) + y + torch.from_dlpack(z)  # copies nothing
        assert shared.eq(6.0).all()
        print(f"their sum, by PyTorch: {shared[:4].tolist()}")

        del x, y, z, shared
        gc.collect()
        s.synchronize()
    stats = pool.stats()
    print(f"then: {stats.live_bytes - start} bytes live, {stats.reserved_bytes} reserved, in {stats.chunks} chunk(s)")
    assert stats.live_bytes == start


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"one_pool: {error}")
