"""CuPy and kina over the same memory of a GPU, both ways, and in the order of the same streams."""

import sys

import kina

try:
    import cupy
except ImportError:
    sys.exit("interop_cupy: this example needs CuPy (pip install cupy-cuda13x)")

COUNT = 1 << 20


class Described:
    """An array that has the CUDA Array Interface alone, as those of Numba, PyCUDA and RMM."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array  # whoever takes the memory keeps this object


def main() -> None:
    with kina.session("cuda:0") as s:
        # In, by DLPack: the session's stream waits for CuPy's current one, on the device.
        theirs = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
        x = s.adopt(theirs[:, ::2])
        assert (x.shape, x.strides) == ((3, 2), (4, 2))
        print(f"adopted {x}")

        # In, by the CUDA Array Interface: the same, for libraries without DLPack. It names the stream to wait for.
        with cupy.cuda.Stream(non_blocking=True) as stream:
            made = cupy.full(COUNT, 3, dtype=cupy.float32)
            described = Described(made)
        y = s.adopt(described)
        print(f"the session waited for stream {described.__cuda_array_interface__['stream']}, which is {stream.ptr}")
        assert s.to_host(y)[-1] == 3

        # Out: DLPack, or the interface, which cupy.asarray reads. CuPy's current stream waits for the session's.
        z = s.full(COUNT, 2.0)
        by_dlpack, by_interface = cupy.from_dlpack(z), cupy.asarray(z)
        assert by_dlpack.data.ptr == by_interface.data.ptr
        assert float(by_dlpack.sum(dtype=cupy.float64)) == 2 * COUNT

        # What CuPy has already, and uses again: hand the stream over, and take it back.
        with cupy.cuda.Stream(non_blocking=True) as stream:
            with s.stream_ordered_with(stream):
                by_interface += 1
            assert s.to_host(z)[0] == 3
            by_interface += 1
            s.wait(stream)
            assert s.to_host(z)[0] == 4
        print("handed over to another stream of CuPy's, and taken back")

        # CuPy has no read-only arrays: it takes such memory as its own, so hand out what may be written to.
        assert z.as_readonly().__cuda_array_interface__["data"][1]

        # Dropped here, held there.
        del z, by_interface
        s.synchronize()
        assert float(by_dlpack[0]) == 4
        del by_dlpack

    # A session on CuPy's stream: one order for both, and nothing to wait for.
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with kina.session("cuda:0", stream=stream) as s:
            w = cupy.from_dlpack(s.full(COUNT, 5.0)) + 1
            assert s.to_host(s.adopt(w))[0] == 6
        stream.synchronize()
    print("one stream for both")


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"interop_cupy: {error}")
