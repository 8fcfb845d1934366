# Written by tools/stubs.py from device.pyx; not edited by hand.

"""What the driver tells about its devices, without opening a context on any.

Source: CUDA Driver API, "Device Management", "Peer Context Memory Access".
"""

from __future__ import annotations

from typing import Final
from collections.abc import Mapping
from kina._core.identity import DeviceId, DeviceUuid

__all__ = ['DeviceInfo', 'device_info', 'devices', 'peer_matrix']

class DeviceInfo:
    """DeviceInfo()

    What a GPU is: read from the driver once, without opening a context. Made by :func:`kina.devices`.

    Attributes
    ----------
    name : str
    total_memory_bytes : int
    multiprocessor_count : int
    pci_bus_id : str
        ``domain:bus:device.function``, in hexadecimal digits.
    warp_size : int
        Threads of a warp.
    max_threads_per_block, max_threads_per_multiprocessor, max_blocks_per_multiprocessor : int
    max_block, max_grid : tuple of int
        Most threads of a block, and most blocks of a grid, along x, y and z.
    max_shared_bytes_per_block : int
        What every launch may use. Beyond it a function opts in: :meth:`kina.cuda.Function.launch` does so by itself.
    max_shared_bytes_per_block_optin, max_shared_bytes_per_multiprocessor, reserved_shared_bytes_per_block : int
        The driver keeps the last of them in each block.
    max_registers_per_block, max_registers_per_multiprocessor : int
        Of 32 bits.
    constant_bytes, l2_cache_bytes : int
    clock_rate_khz, memory_clock_rate_khz : int
    memory_bus_width_bits : int
    async_engine_count : int
        Copies that can run beside kernels, and each other.
    concurrent_kernels, cooperative_launch, cluster_launch : bool
    memory_pools, managed_memory, virtual_memory_management, can_map_host_memory : bool
    ecc_enabled, integrated, multi_gpu_board : bool
    """
    name: Final[str]
    total_memory_bytes: Final[int]
    multiprocessor_count: Final[int]
    pci_bus_id: Final[str]
    warp_size: Final[int]
    max_threads_per_block: Final[int]
    max_threads_per_multiprocessor: Final[int]
    max_blocks_per_multiprocessor: Final[int]
    max_shared_bytes_per_block: Final[int]
    max_shared_bytes_per_block_optin: Final[int]
    max_shared_bytes_per_multiprocessor: Final[int]
    reserved_shared_bytes_per_block: Final[int]
    max_registers_per_block: Final[int]
    max_registers_per_multiprocessor: Final[int]
    constant_bytes: Final[int]
    l2_cache_bytes: Final[int]
    clock_rate_khz: Final[int]
    memory_clock_rate_khz: Final[int]
    memory_bus_width_bits: Final[int]
    async_engine_count: Final[int]
    concurrent_kernels: Final[bool]
    cooperative_launch: Final[bool]
    cluster_launch: Final[bool]
    memory_pools: Final[bool]
    managed_memory: Final[bool]
    virtual_memory_management: Final[bool]
    can_map_host_memory: Final[bool]
    ecc_enabled: Final[bool]
    integrated: Final[bool]
    multi_gpu_board: Final[bool]

    def __init__(self): ...
    @property
    def type(self) -> str:
        """Kind of device: ``"cuda"``."""
    @property
    def id(self) -> DeviceId:
        """Its ordinal in this process, ``cuda:N``."""
    @property
    def uuid(self) -> DeviceUuid:
        """The physical device, whatever its ordinal."""
    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor)."""
    @property
    def max_block(self) -> tuple[int, int, int]:
        """Most threads of a block along x, y and z."""
    @property
    def max_grid(self) -> tuple[int, int, int]:
        """Most blocks of a grid along x, y and z."""
    @property
    def attributes(self) -> Mapping[str, int]:
        """Every attribute that the driver knows, by the name of its CU_DEVICE_ATTRIBUTE in lower case. Read-only.

        Raises
        ------
        UnavailableError
            The driver fails to tell one of them.

        Notes
        -----
        Read when it is first asked for, and kept. Values are the driver's, in its units: clock rates in kHz, the width
        of the memory's bus in bits, sizes of memory, pitches and alignments in bytes, registers of 32 bits, widths,
        heights and depths of textures and surfaces in elements; what can be or not is 1 or 0. An attribute of these
        headers that the driver is too old to know is not there.

        References
        ----------
        CUDA Driver API, cuDeviceGetAttribute.
        """
    def __eq__(self, other, /): ...
    def __hash__(self): ...
    def __repr__(self) -> str: ...

def devices() -> list[DeviceInfo]:
    """Every GPU the driver shows this process. Raises UnavailableError without a usable driver."""
def device_info(device: str | int | DeviceId | DeviceInfo) -> DeviceInfo:
    """The DeviceInfo of one GPU. Raises UnavailableError if the driver shows no such device."""
def peer_matrix() -> list[dict]:
    """For each ordered pair of GPUs, what ``source`` can do with the memory of ``target``; asked anew each time.

    Returns
    -------
    list of dict
        Keys ``source`` and ``target`` (DeviceId), ``access``, ``atomics``, ``array_access`` (bool),
        ``performance_rank`` (int, 0 is the fastest link).
    """
