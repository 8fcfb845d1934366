"""kina as PyTorch's allocator."""

from __future__ import annotations

from typing import Any, NamedTuple

from kina.errors import UnsupportedError
from kina.memory.integrations import native

__all__ = ["TorchStatistics", "torch_allocator", "torch_release_stream", "torch_statistics"]


class TorchStatistics(NamedTuple):
    """What PyTorch has from kina; sizes in bytes.

    Attributes
    ----------
    live_allocations, live_bytes : int
        What is out, as it was asked for.
    pending_allocations, pending_bytes : int
        What was dropped and is not given back yet, because a stream of ``record_stream`` may still use it or because
        its own stream is being captured. CuPy's and Numba's memory is counted here too.
    streams : int
        Streams that were served.
    unknown_frees : int
        Releases of addresses that kina never gave, which were left alone.
    """

    live_allocations: int
    live_bytes: int
    pending_allocations: int
    pending_bytes: int
    streams: int
    unknown_frees: int


def torch_statistics() -> TorchStatistics:
    """What PyTorch has from kina now; ``torch.cuda.memory_stats`` knows nothing of it. Zeros before the first use."""
    return TorchStatistics(**native.allocator.torch_counts())


def torch_release_stream(stream: object) -> None:
    """Let go of a stream that PyTorch did not make, before it is destroyed.

    Parameters
    ----------
    stream : object with ``__cuda_stream__``
        ``torch.cuda.ExternalStream`` or what is below it. One that was never served is passed over.

    Notes
    -----
    After the last tensor that was made or recorded on the stream is gone. Nothing waits: what kina's pools keep in its
    order is fenced by an event.
    """
    native.foreign_streams.release_stream(stream)


def torch_allocator() -> Any:
    """An allocator for PyTorch: ``torch.cuda.memory.change_current_allocator(torch_allocator())``.

    PyTorch changes its allocator once, before it has allocated anything on a GPU.

    Returns
    -------
    torch.cuda.memory.CUDAPluggableAllocator
        With ``record_stream`` and ``empty_cache``.

    Raises
    ------
    UnavailableError
        This build of kina has no CUDA.
    UnsupportedError
        PyTorch has no CUDA, or its allocator cannot be told of ``record_stream``.

    Notes
    -----
    **Which resource.** ``using`` is a thread's choice, and backward passes run in threads of PyTorch: a resource that
    shall serve all of a program is chosen by :func:`kina.memory.set_default_resource`.

    **Streams.** Memory is allocated in the order of PyTorch's current stream and goes back in that order. Where
    ``record_stream`` named other streams, it goes back once those are past what they had enqueued when the tensor was
    dropped: each gets one event then, no stream waits for another, and the host for none. Whether they are past it is
    asked at later allocations and releases, while something is pending only. PyTorch's own streams live for ever; one
    that it did not make (``ExternalStream``) must not end before :func:`torch_release_stream`. The per-thread default
    stream is refused.

    **Failure.** PyTorch raises RuntimeError with kina's message, where memory is short with the figures of the
    resource, and after what is pending was waited for. It is not ``torch.OutOfMemoryError``, which only PyTorch's own
    allocators can throw.

    **Graphs.** A stream that is being captured is refused: allocate before the capture begins. What is dropped during
    one is kept until it has ended.

    **Threads.** Any. The GIL is taken by resources that run Python (written in it, with a callback, or keeping call
    stacks), and by the first use of a device unless :func:`default_pool` was called for it before. PyTorch holds a lock
    while it asks for memory of a ``torch.cuda.MemPool``, and a thread with the GIL may be waiting for that lock: there,
    call :func:`default_pool` for the device first, and use no such resource.

    ``torch.cuda.empty_cache()`` lets every pool of kina on the devices that serve other libraries give its free chunks
    back.
    ``torch.cuda.memory_stats()`` and its kind are not supported by PyTorch for allocators other than its own;
    :func:`torch_statistics` and :meth:`kina.memory.PoolMemoryResource.stats` have the figures. At exit, and in a forked
    child, what is freed is left alone.
    """
    import torch

    room = native.allocator
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise UnsupportedError(
            f"torch_allocator: PyTorch {torch.__version__} was built without CUDA", operation="torch_allocator"
        )
    made = torch.cuda.memory.CUDAPluggableAllocator(room.__file__, "kina_torch_allocate", "kina_torch_deallocate")
    setters = [getattr(made.allocator(), f"set_{name}_fn", None) for name in ("record_stream", "reset")]
    if None in setters:
        raise UnsupportedError(
            f"torch_allocator: PyTorch {torch.__version__} takes no record_stream function; use a newer one",
            operation="torch_allocator",
        )
    for put, address in zip(setters, room.torch_functions(), strict=True):
        put(address)
    return made
