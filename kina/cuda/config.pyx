# cython: annotation_typing=False
"""Launch configurations."""

from cpython.number cimport PyNumber_Index

from kina.errors import InvalidConfigError

__all__ = ["LaunchConfig"]


cdef object read_index(object value):
    if isinstance(value, bool):
        return None
    try:
        return PyNumber_Index(value)
    except TypeError:  # an array of several elements has the method and refuses
        return None


cdef int read_axes(object value, unsigned int *axes, str name) except -1:
    """One to three positive ints, the missing ones 1."""
    cdef int i
    if isinstance(value, (tuple, list)):
        given = tuple(value)
    else:
        given = (value,)
    if not 1 <= len(given) <= 3:
        raise InvalidConfigError(f"{name} has 1 to 3 axes, got {value!r}", operation="LaunchConfig")
    for i in range(3):
        axes[i] = read_extent(given[i] if i < len(given) else 1, f"{name}[{i}]")
    return 0


cdef unsigned int read_extent(object value, str name) except? 0:
    extent = read_index(value)
    if extent is None:
        raise InvalidConfigError(f"{name} is an int, got {type(value).__name__}", operation="LaunchConfig")
    if not 1 <= extent <= 0xFFFFFFFF:
        raise InvalidConfigError(f"{name} is at least 1 and below 2**32, got {value!r}", operation="LaunchConfig")
    return extent


cdef int read_count(object value, str name, str operation) except -1:
    count = read_index(value)
    if count is None or not 0 <= count <= 0x7FFFFFFF:
        raise InvalidConfigError(f"{name} is an int from 0 to 2**31-1, got {value!r}", operation=operation)
    return count


cdef class LaunchConfig:
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

    def __cinit__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared_bytes: int = 0,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
        programmatic: bool = False,
    ):
        read_axes(grid, self._grid, "grid")
        read_axes(block, self._block, "block")
        if cluster is not None:
            read_axes(cluster, self._cluster, "cluster")
            for i in range(3):
                if self._grid[i] % self._cluster[i]:
                    raise InvalidConfigError(
                        f"the grid is made of whole clusters: grid[{i}] = {self._grid[i]} is no multiple of "
                        f"cluster[{i}] = {self._cluster[i]}", operation="LaunchConfig",
                    )
        self._shared_bytes = read_count(shared_bytes, "shared_bytes", "LaunchConfig")
        self._cooperative = bool(cooperative)
        self._programmatic = bool(programmatic)
        self._extended = self._cooperative or self._programmatic or cluster is not None

    @staticmethod
    def linear(size: int, block: int = 256, shared_bytes: int = 0) -> LaunchConfig:
        """One axis: as many blocks of ``block`` threads as cover ``size`` elements.

        Raises
        ------
        InvalidConfigError
            ``size`` is not a positive int.
        """
        cdef unsigned int threads = read_extent(block, "block")
        elements = read_index(size)
        if elements is None or elements < 1:
            raise InvalidConfigError(f"size is a positive int, got {size!r}: launch nothing for no elements",
                                     operation="LaunchConfig.linear")
        return LaunchConfig(-(-elements // threads), threads, shared_bytes)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in the grid (x, y, z)."""
        return (self._grid[0], self._grid[1], self._grid[2])

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads in a block (x, y, z)."""
        return (self._block[0], self._block[1], self._block[2])

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """Blocks in a cluster (x, y, z), or None."""
        if self._cluster[0] == 0:
            return None
        return (self._cluster[0], self._cluster[1], self._cluster[2])

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block, in bytes."""
        return self._shared_bytes

    @property
    def cooperative(self) -> bool:
        """Are all blocks resident at once?"""
        return self._cooperative

    @property
    def programmatic(self) -> bool:
        """May it start before the kernel ahead of it has ended?"""
        return self._programmatic

    def _key(self):
        return (self.grid, self.block, self._shared_bytes, self.cluster, self._cooperative, self._programmatic)

    def __eq__(self, other):
        if not isinstance(other, LaunchConfig):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __reduce__(self):
        return (LaunchConfig, self._key())

    def __repr__(self) -> str:
        extras = f", shared_bytes={self._shared_bytes}" if self._shared_bytes else ""
        if self.cluster is not None:
            extras += f", cluster={self.cluster}"
        if self._cooperative:
            extras += ", cooperative=True"
        if self._programmatic:
            extras += ", programmatic=True"
        return f"LaunchConfig(grid={self.grid}, block={self.block}{extras})"
