"""A million allocations and frees of device memory, on threads with streams of their own."""

from __future__ import annotations

import contextlib
import gc
import resource as system
from collections.abc import Iterator

import pytest
from helpers.cuda import driver, ok, on_stack, primary_context
from helpers.cycles import cycle

import kina
from kina import memory

KIB, MIB = 1 << 10, 1 << 20


@contextlib.contextmanager
def own_stream() -> Iterator[kina.Session]:
    with kina.session(kina.Runtime(0)) as session:
        yield session


@pytest.mark.parametrize("threads", [1, 8, 32])
def test_a_million_cycles(threads):
    upstream = memory.CudaAsyncMemoryResource(0)
    counted = memory.StatisticsMemoryResource(upstream)
    pool = memory.PoolMemoryResource(counted)
    cycle(pool, threads, 300_000, own_stream)
    warm = system.getrusage(system.RUSAGE_SELF).ru_maxrss
    cycle(pool, threads, 1_000_000, own_stream)
    stats = pool.stats()
    assert (stats.live_bytes, stats.live_allocations, stats.unknown_frees) == (0, 0, 0)
    assert stats.reserved_bytes <= 128 * MIB  # a chunk or two for each stream
    assert system.getrusage(system.RUSAGE_SELF).ru_maxrss - warm < 64 * KIB  # KiB: 64 MiB, of 3 GiB that went through
    gc.collect()
    with on_stack(primary_context()):
        ok(driver.cuCtxSynchronize())  # streams of Runtimes that are gone
    pool.trim()
    assert (counted.counts().current_bytes, upstream.live_bytes, pool.stats().reserved_bytes) == (0, 0, 0)
