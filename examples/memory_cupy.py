"""CuPy on memory of kina: of one pool by default, of another for a block, in the order of CuPy's streams."""

import sys

import kina
from kina import memory
from kina.memory import integrations

try:
    import cupy
except ImportError:
    sys.exit("memory_cupy: this example needs CuPy (pip install cupy-cuda13x)")


def main() -> None:
    pool = integrations.default_pool("cuda:0")
    cupy.cuda.set_allocator(integrations.cupy_allocator)

    x = cupy.arange(1 << 20, dtype=cupy.float32)
    print(f"{pool.stats().live_bytes} bytes of {pool} are live")
    assert pool.stats().live_bytes >= x.nbytes

    small = memory.PoolMemoryResource(memory.CudaAsyncMemoryResource("cuda:0"), maximum_bytes=64 << 20)
    with memory.using(small), cupy.cuda.Stream(non_blocking=True) as stream:
        stream.wait_event(cupy.cuda.Stream.null.record())  # x was made on the null stream
        y = x * 2
        assert small.stats().live_bytes >= y.nbytes
        limit = None
        try:
            cupy.empty(1 << 30, dtype=cupy.uint8)
        except cupy.cuda.memory.OutOfMemoryError as error:  # a kina.OutOfMemoryError, with kina's figures
            print(f"as it should be: {error}")
            limit = error.limit
        assert limit == 64 << 20
        total = float(y.sum(dtype=cupy.float64))  # waits for the stream
    print(f"sum {total:.0f}")
    assert total == (1 << 20) * ((1 << 20) - 1)
    del y
    assert small.stats().live_bytes == 0


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"memory_cupy: {error}")
