"""How a CUDA device may be named."""

from __future__ import annotations

from kina._core.identity import DeviceId
from kina.errors import InvalidConfigError

__all__ = ["ordinal_of"]


def ordinal_of(device: object) -> int:
    """The ordinal of ``0``, ``"cuda:0"``, ``"cuda"``, a DeviceId, or anything with ``id`` (DeviceInfo).

    Raises InvalidConfigError for anything else; whether the device exists is not asked here.
    """
    if isinstance(device, DeviceId):
        return device.ordinal
    if isinstance(device, bool):
        raise InvalidConfigError(f"{device!r} names no CUDA device", operation="device")
    if isinstance(device, int):
        if device < 0:
            raise InvalidConfigError(f"a device ordinal is not negative, got {device}", operation="device")
        return device
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind == "cuda" and (not colon or (number.isascii() and number.isdigit())):
            return int(number) if colon else 0
    elif isinstance(getattr(device, "id", None), DeviceId):
        return device.id.ordinal
    raise InvalidConfigError(
        f"{device!r} names no CUDA device: use 'cuda', 'cuda:N', an int, a DeviceId or a DeviceInfo",
        operation="device",
    )
