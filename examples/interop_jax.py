"""JAX and kina over the same memory, both ways.

JAX's arrays are immutable, and JAX does not say so to whoever takes their memory: as_readonly() does. What JAX takes
from kina must not be written to while JAX has it.
"""

import sys

import numpy as np

import kina

try:
    import jax
except ImportError:
    sys.exit("interop_jax: this example needs JAX (pip install jax, or on a GPU jax[cuda13])")


def share(s, device) -> None:
    """What is the same on the host and on a GPU."""
    theirs = jax.device_put(np.arange(12, dtype=np.float32).reshape(3, 4), device)
    x = s.adopt(theirs).as_readonly()
    assert s.to_host(x).tolist() == np.asarray(theirs).tolist()
    print(f"{device.platform}: adopted {x}")

    # Out: JAX takes what is compact and aligned without a copy.
    y = s.full((3, 4), 2.0)
    taken = jax.dlpack.from_dlpack(y)
    assert taken.unsafe_buffer_pointer() == y_address(s, y)
    assert float((taken * theirs).sum()) == 132
    print(f"{device.platform}: JAX computed on kina's memory")

    # Whoever holds it keeps it.
    del y
    assert float(taken.sum()) == 24
    back = s.adopt(taken)
    del taken
    assert s.to_host(back).sum() == 24


def y_address(s, y: kina.Tensor) -> int:
    if y.device == "cpu":
        return np.asarray(y).ctypes.data
    with s.raw("address") as raw:
        return raw.unsafe_address(raw.ref(y))


def main() -> None:
    with kina.session("cpu") as s:
        share(s, jax.devices("cpu")[0])
    missing = kina.unavailable_reason() if not kina.devices() else None
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError as error:
        missing = missing or f"JAX {jax.__version__} has none ({error})"
    if missing is None:
        with kina.session("cuda:0") as s:
            share(s, gpu)
    else:
        print(f"no part on a GPU: {missing}")


if __name__ == "__main__":
    main()
