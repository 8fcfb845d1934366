# Written by tools/stubs.py from hand_over.pyx; not edited by hand.

"""Sessions among the streams of others: what a session can wait for, and handing over to a stream and back.

Source: CUDA Driver API, "Event Management" and cuStreamWaitEvent; the `__cuda_stream__` protocol of cuda.core.
"""

from __future__ import annotations

from typing import final

__all__ = ['HandOver']

@final
class HandOver:
    """HandOver()

    A session and the stream that it handed over to, by :meth:`CudaSession.stream_ordered_with`: a ``with`` block over
    it ends with the session's stream waiting, on the device, for the other. Thread-bound, like the session.
    """
    def __new__(cls): ...
    def __enter__(self) -> object: ...
    def __exit__(self, *exception: object) -> None: ...
    def __reduce__(self): ...
