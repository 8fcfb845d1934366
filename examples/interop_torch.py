"""PyTorch and kina over the same memory, both ways, and in the order of the same streams."""

import sys

import numpy as np

import kina

try:
    import torch
except ImportError:
    sys.exit("interop_torch: this example needs PyTorch (pip install torch)")


def share(s, device: str) -> None:
    """What is the same on the host and on a GPU."""
    theirs = torch.arange(6, dtype=torch.float32, device=device).reshape(2, 3)
    x = kina.from_dlpack(theirs.t())  # by PyTorch's C exchange table: no capsule, no copy
    back = torch.from_dlpack(x)
    assert back.data_ptr() == theirs.data_ptr()
    assert back.stride() == (1, 3)
    print(f"{device}: {x} is PyTorch's memory, and back")

    # PyTorch cannot mark memory as read-only, so it takes it as it is; kina keeps it.
    locked = s.adopt(theirs).as_readonly()
    assert locked.readonly

    # Gradients would not see what is done to the memory: detach says that it is meant.
    leaf = torch.ones(3, device=device, requires_grad=True)
    try:
        s.adopt(leaf)
    except kina.DLPackError as error:
        print(f"{device}: {error}")
    assert s.adopt(leaf.detach()).shape == (3,)

    # Whoever holds it keeps it.
    kept = torch.from_dlpack(s.full(4, 2.0))
    assert kept.sum().item() == 8


def on_gpu() -> None:
    stream = torch.cuda.current_stream()

    # A session on PyTorch's own stream: one order, so there is nothing to wait for.
    with kina.session("cuda:0", stream=stream) as s:
        share(s, "cuda")
        y = torch.from_dlpack(s.full(1 << 20, 3.0)) * 2
        assert s.to_host(s.adopt(y))[-1] == 6
        print("one stream: kina's fill, PyTorch's product, kina's download, in order")

    # A session on a stream of its own: exports and imports wait on the device, the host never does.
    with kina.session("cuda:0") as s:
        x = s.full(1 << 20, 3.0)
        y = torch.from_dlpack(x).square()  # PyTorch's stream waits for the fill
        z = s.copy(s.adopt(y))  # the session's stream waits for the square
        assert s.to_host(z)[0] == 9

        # A tensor that PyTorch has already, and uses again: hand the stream over, and take it back.
        shared = torch.from_dlpack(x)
        with s.stream_ordered_with(stream):
            shared.add_(1)
        assert s.to_host(x)[0] == 4
        shared.add_(1)
        s.wait(stream)  # the same without a block
        assert s.to_host(x)[0] == 5
        print("two streams: handed over and taken back")

        # What is dropped while PyTorch still works on it is not used again before that is done.
        total = shared.sum()
        del x, shared
        others = [s.full(1 << 20, 9.0) for _ in range(4)]
        assert total.item() == 5 * (1 << 20)
        del others
        s.synchronize()

        # Without DLPack there is the CUDA Array Interface; its `stream` says what to wait for.
        described = s.full(8, 7.0)
        taken = torch.as_tensor(described, device="cuda")
        s.synchronize()
        assert taken.sum().item() == 56
        print(f"by __cuda_array_interface__: {sorted(described.__cuda_array_interface__)}")


def main() -> None:
    with kina.session("cpu") as s:
        share(s, "cpu")
        # Not torch.asarray: it reads any buffer as float32, whatever its format.
        assert torch.as_tensor(s.from_host(np.arange(3.0))).sum().item() == 3
    missing = kina.unavailable_reason() if not kina.devices() else None
    if missing is None and not torch.cuda.is_available():
        missing = f"PyTorch {torch.__version__} sees no GPU (a build for the CPU?)"
    if missing is None:
        on_gpu()
    else:
        print(f"no part on a GPU: {missing}")


if __name__ == "__main__":
    main()
