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
    """
    name: Final[str]
    total_memory_bytes: Final[int]
    multiprocessor_count: Final[int]
    pci_bus_id: Final[str]

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
    def attributes(self) -> Mapping[str, int]:
        """Limits and properties, units in their names. Read-only."""
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
