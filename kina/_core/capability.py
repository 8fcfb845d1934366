"""What a session may or may not be able to do."""

from __future__ import annotations

from enum import Enum

__all__ = ["Capability"]


class Capability(Enum):
    """What ``session.supports`` answers for; probed, not derived from a version."""

    KERNEL_DSL = "kernels written in the DSL of a compiler that calls kina"
    NATIVE_MODULE = "loading PTX and CUBIN images"
    RUNTIME_COMPILATION = "compiling CUDA C++ while the program runs"
    RAW_STREAM = "raw authority over the session's stream"
    SAME_DEVICE_ASYNC_COPY = "stream-ordered copies within the device"
    PEER_COPY = "direct copies to or from another device"
