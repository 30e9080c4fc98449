"""What is said to a pool and what it answers: limits, usage, the name of an axis, a report.

Why: these cross processes and files (JSON, msgpack), so each is immutable, equal by value and
checked the same way however it came into being: `__post_init__` runs for the constructor, for a
decoder and for `msgspec.structs.replace`.

Contract: an argument outside its domain raises `TypeError` or `ValueError`, which a decoder turns
into `msgspec.ValidationError`; a zero limit raises `CachePoolError.InvalidLimits` from both.
Unknown keys are ignored on decode.

Cost: no structure here holds a reference cycle, so none is tracked by the garbage collector.

Not here: sums. Usages are added and subtracted by the engine only, under its lock.
"""

from __future__ import annotations

from enum import Enum
from typing import Self

import msgspec
from msgspec.structs import force_setattr

from shmcache.bounds import U64_MAX, u64
from shmcache.errors import CachePoolError

_AXES = ("device_bytes", "host_bytes", "transfer_in_flight_bytes", "disk_bytes")


class CachePoolResource(Enum):
    """One axis of the budget. The order is that in which admission looks at the axes."""

    DEVICE = "device"
    HOST = "host"
    TRANSFER_IN_FLIGHT = "transfer_in_flight"
    DISK = "disk"


class CachePoolLimits(msgspec.Struct, frozen=True, gc=False):
    """What all sessions of a pool together may hold, per axis.

    Contract: device and transfer are not 0 (the device is named first if both are); a host or
    disk limit of 0 switches that tier off. No relation between axes is required.
    """

    device_bytes: int
    host_bytes: int
    transfer_in_flight_bytes: int
    disk_bytes: int

    def __post_init__(self) -> None:
        _check_axes(self)
        if self.device_bytes == 0:
            raise CachePoolError.InvalidLimits("device_bytes_zero")
        if self.transfer_in_flight_bytes == 0:
            raise CachePoolError.InvalidLimits("transfer_in_flight_bytes_zero")

    @classmethod
    def new(
        cls, device_bytes: int, host_bytes: int, transfer_in_flight_bytes: int, disk_bytes: int
    ) -> Self:
        return cls(device_bytes, host_bytes, transfer_in_flight_bytes, disk_bytes)


class CachePoolUsage(msgspec.Struct, frozen=True, gc=False):
    """Bytes held, or asked for, on the four axes; a missing key decodes as 0."""

    device_bytes: int = 0
    host_bytes: int = 0
    transfer_in_flight_bytes: int = 0
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        # Every reservation makes one: four plain ints whose union of bits is a u64 need no more.
        device, host = self.device_bytes, self.host_bytes
        transfer, disk = self.transfer_in_flight_bytes, self.disk_bytes
        if not (
            type(device) is type(host) is type(transfer) is type(disk) is int
            and 0 <= device | host | transfer | disk <= U64_MAX
        ):
            _check_axes(self)

    @classmethod
    def new(
        cls,
        device_bytes: int = 0,
        host_bytes: int = 0,
        transfer_in_flight_bytes: int = 0,
        disk_bytes: int = 0,
    ) -> Self:
        return cls(device_bytes, host_bytes, transfer_in_flight_bytes, disk_bytes)


class CachePoolReport(msgspec.Struct, frozen=True, gc=False):
    """One instant of a pool: all numbers were read under one hold of the lock.

    Contract: `current` may exceed the limit (a publication is never refused) and the peak (which
    only admissions and publications move).

    Invariants: G1.
    """

    pool_id: int
    managers: int
    current_device_bytes: int
    peak_device_bytes: int
    current_host_bytes: int
    peak_host_bytes: int
    current_transfer_in_flight_bytes: int
    peak_transfer_in_flight_bytes: int
    current_disk_bytes: int
    peak_disk_bytes: int
    limits: CachePoolLimits

    def __post_init__(self) -> None:
        # The pool makes these from counters that cannot leave u64 and a decoder has checked the
        # types, so one comparison of the union of all bits is what is left to check.
        if not (
            0
            <= self.pool_id
            | self.managers
            | self.current_device_bytes
            | self.peak_device_bytes
            | self.current_host_bytes
            | self.peak_host_bytes
            | self.current_transfer_in_flight_bytes
            | self.peak_transfer_in_flight_bytes
            | self.current_disk_bytes
            | self.peak_disk_bytes
            <= U64_MAX
        ):
            for field in self.__struct_fields__[:-1]:
                u64(getattr(self, field), field)


def _check_axes(value: CachePoolLimits | CachePoolUsage) -> None:
    for axis in _AXES:
        given = getattr(value, axis)
        checked = u64(given, axis)
        if checked is not given:
            force_setattr(value, axis, checked)  # an int subclass: no encoder knows those
