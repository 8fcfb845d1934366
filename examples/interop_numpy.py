"""NumPy and kina over the same memory, both ways: no GPU is needed."""

import numpy as np

import kina


def main() -> None:
    with kina.session("cpu") as s:
        # In: the array's own memory, in whatever layout it has.
        source = np.arange(12, dtype=np.float32).reshape(3, 4)
        x = s.adopt(source[:, ::2])
        assert np.shares_memory(np.asarray(x), source)
        source[0, 0] = 100
        assert s.to_host(x)[0, 0] == 100
        print(f"adopted {x}")

        # Out: by DLPack, as an array, as a buffer. All of them are the memory itself.
        y = s.add(x, x)
        by_dlpack, as_array, as_buffer = np.from_dlpack(y), np.asarray(y), memoryview(y)
        as_array[0, 0] = -1
        assert by_dlpack[0, 0] == as_buffer[0, 0] == -1
        print(f"three views of {as_buffer.nbytes} bytes, one memory")

        # dtypes that NumPy lacks come from ml_dtypes.
        print(f"bfloat16 goes out as {np.asarray(s.zeros(3, 'bfloat16')).dtype!r}")

        # What is read-only, or repeats elements, stays unwritable on the other side.
        frozen = np.frombuffer(b"read only", np.uint8)
        assert s.adopt(frozen).readonly
        assert not np.asarray(y.as_readonly()).flags.writeable
        assert not np.asarray(y[0].broadcast_to(5, 2)).flags.writeable
        print("read-only memory stays read-only, both ways")

    # Whoever holds a view keeps the memory: the session is over, the tensor is gone.
    del y, x, source
    print(f"still there: {as_array[0].tolist()}")
    assert as_array[0].tolist() == [-1, 4]

    # Nothing crosses from a device to the host on its own.
    if kina.devices():
        with kina.session("cuda:0") as s:
            far = s.from_host(np.arange(4, dtype=np.float32))
            try:
                np.asarray(far)
            except TypeError as error:
                print(f"on cuda:0: {error}")
            print(f"s.to_host copies: {s.to_host(far)}")
    else:
        print(f"no part on a GPU: {kina.unavailable_reason()}")


if __name__ == "__main__":
    main()
