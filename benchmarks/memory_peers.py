"""Memory from Python: kina and each library that can allocate on a device, in the shortest form that its users write.

An allocator is a function of a size in bytes; what it returns is freed when it is dropped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from harness import Contender, Report, optional

__all__ = ["Allocator", "build_peers", "mix_contender", "pair_contender", "random_mix"]

Allocator = Callable[[int], object]
MIB, GIB = 1 << 20, 1 << 30


def build_rmm(report: Report) -> dict[str, Allocator]:
    rmm: Any = optional(report, "rmm")
    if rmm is None:
        return {}
    resources = {
        "pool": lambda: rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=64 * MIB),
        "async": lambda: rmm.mr.CudaAsyncMemoryResource(),
        "arena": lambda: rmm.mr.ArenaMemoryResource(rmm.mr.CudaMemoryResource(), arena_size=4 * GIB),
        "binning": lambda: rmm.mr.BinningMemoryResource(rmm.mr.CudaMemoryResource(), 8, 22),
    }
    found: dict[str, Allocator] = {}
    for name, make in resources.items():
        with report.peer(f"rmm {name}"):
            resource = make()
            found[f"rmm {name}"] = lambda nbytes, resource=resource: rmm.DeviceBuffer(size=nbytes, mr=resource)
    return found


def build_peers(report: Report) -> dict[str, Allocator]:
    """Those that are there and work."""
    found: dict[str, Allocator] = {}
    if torch := optional(report, "torch"):
        device, byte = torch.device("cuda:0"), torch.uint8
        found["torch.empty"] = lambda nbytes: torch.empty(nbytes, dtype=byte, device=device)
    if cupy := optional(report, "cupy"):
        found["cupy.cuda.alloc"] = cupy.cuda.alloc
    found |= build_rmm(report)
    works = {}
    for name, allocate in found.items():
        with report.peer(name):
            allocate(MIB)
            works[name] = allocate
    return works


def pair_contender(name: str, allocate: Allocator, nbytes: int, calls: int) -> Contender:
    """Allocate and drop, over and over."""

    def batch() -> None:
        for _ in itertools.repeat(None, calls):
            allocate(nbytes)

    return Contender(name, batch, calls)


def random_mix(allocations: int, largest: int, seed: int) -> list[int]:
    """RMM's random mix as steps: bytes to allocate, or minus an index to free; the last block takes its place."""
    generator = random.Random(seed)
    steps: list[int] = []
    held = made = 0
    while made < allocations:
        if held == 0 or generator.random() < 0.5:
            steps.append(generator.randint(1, largest))
            held += 1
            made += 1
        else:
            steps.append(-generator.randrange(held))
            held -= 1
    return steps


def mix_contender(name: str, allocate: Allocator, steps: list[int]) -> Contender:
    def batch() -> None:
        held: list[object] = []
        for step in steps:
            if step > 0:
                held.append(allocate(step))
            else:
                held[step] = held[-1]
                held.pop()

    return Contender(name, batch, len(steps))
