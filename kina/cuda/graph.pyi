# Written by tools/stubs.py from graph.pyx; not edited by hand.

"""Graphs: what a session enqueued once, to be launched as a whole as often as one likes.

Source: CUDA Driver API, "Stream Management" (cuStreamBeginCapture, cuStreamEndCapture) and "Graph Management"
(cuGraphInstantiateWithFlags, cuGraphLaunch).
"""

from __future__ import annotations

from typing import final
from kina.cuda.session import CudaSession

__all__ = ['Graph']

@final
class Graph:
    """Graph()

    What was enqueued in a ``with session.capture() as graph:`` block, to be launched as a whole.

    It keeps everything that its launches use: modules, tensors that were made before the capture, memory of other
    libraries, and all memory that was allocated in the block, also of tensors that are gone. A launch in flight keeps
    it.
    """
    def __new__(cls): ...
    def __enter__(self) -> Graph: ...
    def __exit__(self, kind: object, exception: object, traceback: object) -> None: ...
    @property
    def nodes(self) -> int:
        """How many operations it has: kernels, copies, fills."""
    def reserved_bytes(self) -> int:
        """Memory that it keeps of what was allocated in the capture, in bytes."""
    def launch(self, session: CudaSession) -> None:
        """Enqueue everything it has on the session's stream, in the order it was captured in; nothing waits.

        Parameters
        ----------
        session : CudaSession
            Of the Runtime that it was captured on.

        Raises
        ------
        ForeignRuntimeError
            The session is another Runtime's: the memory in the graph is not.
        UnsupportedError
            Its capture failed or is not over, or the session is being captured itself.
        LaunchError
            The driver refused.
        SessionClosedError, WrongThreadError, RuntimePoisonedError
            As any call of the session.

        Notes
        -----
        Source: cuGraphLaunch. Two launches of one graph run one after the other. The graph is leased until the device
        is past them, so it may be dropped at once.

        **Safety.** It reads and writes the very memory it was captured with, whatever else has that memory's tensors in
        use; kernels get the arguments of the capture, numbers included.
        """
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
