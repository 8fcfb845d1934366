# Written by tools/stubs.py from interchange.pyx; not edited by hand.

"""kina.from_dlpack: which session takes in an array of somebody else."""

from __future__ import annotations

from kina._core.session import Session
from kina._core.tensor import Tensor

__all__ = ['from_dlpack']

def from_dlpack(array: object, *, session: Session | None=None, copy: bool | None=None, device: object | None=None) -> Tensor:
    """A tensor over the memory of somebody else's array, without a copy.

    Parameters
    ----------
    array
        An array of PyTorch, CuPy, JAX, NumPy, Numba, cuda.core or another library that has DLPack's exchange table,
        ``__dlpack__``, ``__cuda_array_interface__``, ``__array_interface__`` or (on the host) the buffer protocol: the
        first of these that it has is used. A DLPack capsule. A Tensor of kina.
    session
        Who takes it in: an open session of the calling thread. Default: its innermost one on the array's device, else a
        momentary session of the thread's default Runtime there.
    copy
        True: a copy of it, in C order, that shares nothing. None, False: never a copy.
    device
        Where it must be (``"cpu"``, ``"cuda:N"``, an ordinal); nothing crosses from one device to another on its own.

    Raises
    ------
    DLPackError
        The producer refuses, has copied, or describes something impossible; the message names the field. Tensors that
        autograd watches, or whose memory holds conjugated or negated values: the message says what makes an ordinary
        one of them.
    DTypeError
        Elements that kina does not store: smaller than a byte, opaque, vectors.
    ForeignDeviceError
        It is not where `device` or `session` want it.
    NonContiguousError
        ``copy=True`` of an array that is not compact in C order.
    SessionClosedError, WrongThreadError
        `session` is not open in this thread.

    Notes
    -----
    On CUDA the session's stream waits, on the device, for the producer's; the host never waits. The owner is kept until
    the last tensor over its memory is gone and everything that sessions enqueued with it is done. What is read-only
    stays so. Pinned memory counts as host memory here; ``session.adopt`` of a CUDA session takes it too.
    """
