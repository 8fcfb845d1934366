# Written by tools/stubs.py from config.pyx; not edited by hand.

"""Launch configurations."""

from __future__ import annotations

from typing import final
from collections.abc import Sequence

__all__ = ['LaunchConfig']

@final
class LaunchConfig:
    """LaunchConfig(grid, block, shared_bytes=0, cluster=None, cooperative=False, programmatic=False)

    How many threads a launch runs and how they are grouped. Immutable, hashable, good for any number of launches of
    any function; limits of the device and the function are checked at launch, before anything is enqueued.

    Parameters
    ----------
    grid, block : int or sequence of 1 to 3 int
        Blocks in the grid, threads in a block, per axis (x, y, z).
    shared_bytes : int
        Dynamic shared memory per block. Beyond 48 KiB together with the function's static share, the function is
        opted in by itself.
    cluster : int or sequence of 1 to 3 int, optional
        Blocks in a cluster; divides the grid on each axis.
    cooperative : bool
        All blocks are resident at once and may synchronize across the grid.
    programmatic : bool
        Programmatic dependent launch (programmatic stream serialization): the kernel may start before the one ahead of
        it on the stream has ended, as soon as all blocks of that one have called
        ``cudaTriggerProgrammaticLaunchCompletion`` or ended. Compute capability 9.0 and newer.

    Raises
    ------
    InvalidConfigError
        An extent is not a positive int; also a zero grid: a raw launch of nothing is a mistake.

    Notes
    -----
    **Safety.** A programmatic launch gives up the order of the stream between the kernel and the one ahead of it, so
    the kernel must call ``cudaGridDependencySynchronize`` (``griddepcontrol.wait`` in PTX). Before that it must not
    read what work ahead of it writes, nor write what that reads or writes, and memory from the session may be some that
    work ahead still uses. Whatever comes behind it on the stream, the release of memory included, counts on that call.
    """
    def __new__(cls, grid: int | Sequence[int], block: int | Sequence[int], shared_bytes: int=0, cluster: int | Sequence[int] | None=None, cooperative: bool=False, programmatic: bool=False): ...
    @staticmethod
    def linear(size: int, block: int=256, shared_bytes: int=0) -> LaunchConfig:
        """One axis: as many blocks of ``block`` threads as cover ``size`` elements.

        Raises
        ------
        InvalidConfigError
            ``size`` is not a positive int.
        """
    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in the grid (x, y, z)."""
    @property
    def block(self) -> tuple[int, int, int]:
        """Threads in a block (x, y, z)."""
    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """Blocks in a cluster (x, y, z), or None."""
    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block, in bytes."""
    @property
    def cooperative(self) -> bool:
        """Are all blocks resident at once?"""
    @property
    def programmatic(self) -> bool:
        """May it start before the kernel ahead of it has ended?"""
    def __eq__(self, other, /): ...
    def __hash__(self): ...
    def __reduce__(self): ...
    def __repr__(self) -> str: ...
