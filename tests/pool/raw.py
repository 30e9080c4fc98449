"""The bytes of a segment as a test sees them, without any help of the engine.

Why: damage must come from outside, and a test that asked the engine where things are would agree
with whatever it does. The numbers repeat core/layout.h on purpose; a change there must show here.
"""

import ctypes
import mmap
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

HEADER_BYTES = 552
CHECKSUM = 544
REGION_OFFSETS = 216
GATE, REDO, CONTROL, OWNERS = 1, 2, 3, 4
STATE, WAITERS = 64, 192  # in the gate
CURRENT, PEAK, RESERVATION_MARK = 0, 32, 112  # in the control region

# Fields of the header: offset and struct code.
FIELDS = {
    "magic": (0, "Q"),
    "version": (8, "I"),
    "abi": (12, "I"),
    "total_bytes": (16, "Q"),
    "pool_id": (24, "Q"),
    "boot_id": (32, "Q"),
    "pid_namespace": (48, "Q"),
    "time_namespace": (56, "Q"),
    "owner_uid": (72, "I"),
    "device_limit": (112, "Q"),
    "owners_max": (184, "I"),
    "mode": (208, "I"),
    "gate_offset": (REGION_OFFSETS + 8 * GATE, "Q"),
}


def checksum(header: bytes) -> int:
    """64-bit FNV-1a of all that stands before the checksum."""
    value = 0xCBF29CE484222325
    for byte in header[:CHECKSUM]:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


class Segment:
    """A second mapping of a segment: a descriptor of somebody else's, or a path."""

    def __init__(self, file: int | Path) -> None:
        path = file if isinstance(file, Path) else Path(f"/proc/self/fd/{file}")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.bytes = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bytes.close()

    # -- the header

    def field(self, name: str) -> int:
        offset, code = FIELDS[name]
        return int(struct.unpack_from(f"={code}", self.bytes, offset)[0])

    def forge(self, name: str, value: int, *, signed: bool = True) -> None:
        """Another value in the header, with the checksum that belongs to it."""
        offset, code = FIELDS[name]
        struct.pack_into(f"={code}", self.bytes, offset, value)
        if signed:
            struct.pack_into("=Q", self.bytes, CHECKSUM, checksum(self.bytes[:HEADER_BYTES]))

    # -- the tables

    def region(self, number: int) -> int:
        return int(struct.unpack_from("=Q", self.bytes, REGION_OFFSETS + 8 * number)[0])

    def word(self, region: int, offset: int) -> int:
        return int(struct.unpack_from("=Q", self.bytes, self.region(region) + offset)[0])

    def put(self, region: int, offset: int, value: int) -> None:
        struct.pack_into("=Q", self.bytes, self.region(region) + offset, value)

    def waiters(self) -> int:
        """How many owners wait for capacity."""
        return sum(self.word(GATE, WAITERS + 8 * k).bit_count() for k in range(16))

    # -- damage

    def damage_total(self) -> None:
        """The host total is one byte too high: every call still works, a recount differs."""
        self.put(CONTROL, CURRENT + 8, self.word(CONTROL, CURRENT + 8) + 1)

    def damage_free_list(self) -> None:
        """More reservations were ever made than there is room for."""
        self.put(CONTROL, RESERVATION_MARK, 1 << 40)

    def damage_redo(self) -> None:
        """A change was decided, and is nonsense."""
        self.put(REDO, 0, 0xDEAD05)


class Lock:
    """The segment's own lock, taken by whoever calls `take`; a process that dies with it, dies."""

    def __init__(self, path: str) -> None:
        self._segment = Segment(Path(path))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._segment.bytes))
        self._mutex = ctypes.c_void_p(start + self._segment.region(GATE))
        self._libc = ctypes.CDLL(None)

    def take(self) -> None:
        error = self._libc.pthread_mutex_lock(self._mutex)
        assert error == 0, os.strerror(error)

    def give(self) -> None:
        error = self._libc.pthread_mutex_unlock(self._mutex)
        assert error == 0, os.strerror(error)
