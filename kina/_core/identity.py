"""The four identities that never stand in for one another."""

from __future__ import annotations

from functools import total_ordering
from typing import NoReturn

__all__ = ["AllocationDomainId", "DeviceId", "DeviceUuid", "RuntimeIdentity"]


@total_ordering
class DeviceId:
    """DeviceId(ordinal)

    Process-visible number of a CUDA device, compared by value. It changes its meaning with
    ``CUDA_VISIBLE_DEVICES``; :class:`DeviceUuid` does not.
    """

    __slots__ = ("_ordinal",)

    def __init__(self, ordinal: int) -> None:
        if isinstance(ordinal, bool) or not isinstance(ordinal, int):
            raise TypeError(f"DeviceId takes an int, got {type(ordinal).__name__}")
        if ordinal < 0:
            raise ValueError(f"a device ordinal is not negative, got {ordinal}")
        self._ordinal = ordinal

    @property
    def ordinal(self) -> int:
        return self._ordinal

    def __index__(self) -> int:
        return self._ordinal

    def __eq__(self, other: object) -> bool:
        return self._ordinal == other._ordinal if isinstance(other, DeviceId) else NotImplemented

    def __lt__(self, other: DeviceId) -> bool:
        return self._ordinal < other._ordinal if isinstance(other, DeviceId) else NotImplemented

    def __hash__(self) -> int:
        return hash((DeviceId, self._ordinal))

    def __repr__(self) -> str:
        return f"DeviceId({self._ordinal})"

    def __str__(self) -> str:
        return f"cuda:{self._ordinal}"


class DeviceUuid:
    """DeviceUuid(octets)

    Physical or MIG identity of a device: 16 opaque bytes as the driver reports them, stable across
    processes and orders of enumeration. Never parsed from text of the environment.
    """

    __slots__ = ("_octets",)

    def __init__(self, octets: bytes) -> None:
        octets = bytes(octets)
        if len(octets) != 16:
            raise ValueError(f"a device UUID has 16 bytes, got {len(octets)}")
        self._octets = octets

    def __bytes__(self) -> bytes:
        return self._octets

    def __eq__(self, other: object) -> bool:
        return self._octets == other._octets if isinstance(other, DeviceUuid) else NotImplemented

    def __hash__(self) -> int:
        return hash((DeviceUuid, self._octets))

    def __repr__(self) -> str:
        return f"DeviceUuid('{self}')"

    def __str__(self) -> str:
        digits = self._octets.hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


class _Issued:
    """A process-unique number that only kina hands out and never reuses."""

    __slots__ = ("_number",)
    _number: int

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is issued by a Runtime and cannot be constructed")

    @classmethod
    def _issue(cls, number: int):
        self = object.__new__(cls)
        self._number = number
        return self

    def __eq__(self, other: object) -> bool:
        return self._number == other._number if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), self._number))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._number}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} has no meaning outside its process")


class RuntimeIdentity(_Issued):
    """One exact Runtime instance; never reused."""

    __slots__ = ()


class AllocationDomainId(_Issued):
    """Who owns and retires an allocation; one per Runtime, never merged by UUID."""

    __slots__ = ()
