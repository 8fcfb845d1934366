"""Many allocations and frees on many threads at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kina import memory

__all__ = ["cycle"]


def cycle(
    resource: memory.MemoryResource,
    threads: int,
    cycles: int,
    stream_of_thread: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """So many pairs of an allocation and its free, of 1 to 60,000 bytes, four allocations at a time in each thread."""
    failures: list[BaseException] = []
    together = threading.Barrier(threads)

    def work(seed: int) -> None:
        try:
            allocate, deallocate = resource.unsafe_allocate, resource.unsafe_deallocate
            with stream_of_thread() as stream:
                together.wait()
                for turn in range(cycles // threads // 4):
                    nbytes = 1 + (seed * 7919 + turn * 104729) % 60000
                    held = [(allocate(size, stream), size) for size in (nbytes, 64, 4096, nbytes // 2 + 1)]
                    assert len({address for address, _ in held}) == 4
                    for address, size in held:
                        deallocate(address, size, stream)
                together.wait()  # all have their caches at once
        except BaseException as error:
            together.abort()
            failures.append(error)

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert failures == []
