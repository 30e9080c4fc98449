"""Who is attached to a pool, what each holds, and what was given back for the dead.

Why         "Where did the host's memory go" is answered per process, and a sweep must be able to
            say whose charges it released.
Contract    Values only; `CacheResidencyPool.owners()` and `.sweep()` make them.
Units       Bytes per axis in `usage`; `started_ns` is wall time for people and decides nothing.
Not here    The verdict on life and death: core/owners.c.
"""

from __future__ import annotations

import os
import time
from enum import Enum

import msgspec
from msgspec.structs import astuple

from shmcache import _core
from shmcache.pool.live_files import UndeletedFiles
from shmcache.pool.values import CachePoolUsage


class OwnerVerdict(Enum):
    """What can be proved about an owner. UNKNOWN is never reclaimed."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, number: int) -> OwnerVerdict:
        """The engine's number as a verdict."""
        return _VERDICTS[number]


_VERDICTS = {
    _core.VERDICT_ALIVE: OwnerVerdict.ALIVE,
    _core.VERDICT_DEAD: OwnerVerdict.DEAD,
    _core.VERDICT_UNKNOWN: OwnerVerdict.UNKNOWN,
}


class OwnerRecord(msgspec.Struct, frozen=True):
    """One owner slot in use.

    `cleaning` means that the owner is leaving, or is being reclaimed. `usage` is the sum of its
    managers' publications and of its reservations. Below `live_places` it may have files.
    """

    slot: int
    pid: int
    nonce: int
    start_ticks: int
    started_ns: int | None
    attach_seq: int
    verdict: OwnerVerdict
    cleaning: bool
    managers: int
    reservations: int
    usage: CachePoolUsage
    live_places: tuple[str, ...] = ()


class ReclaimedOwner(msgspec.Struct, frozen=True):
    """A dead owner and what was given back for it; `entries` counts managers and reservations.

    While some of its files are `undeleted`, the disk charge of its managers stays.
    """

    slot: int
    pid: int
    nonce: int
    entries: int
    usage: CachePoolUsage
    undeleted: tuple[UndeletedFiles, ...] = ()

    @property
    def gave_back(self) -> bool:
        """Whether anything was, if only the slot."""
        return bool(self.entries or not self.undeleted or any(astuple(self.usage)))


class VerifyProblem(msgspec.Struct, frozen=True):
    """One finding: what is wrong, where, and the two numbers that disagree."""

    kind: str
    index: int
    expected: int
    actual: int


class VerifyReport(msgspec.Struct, frozen=True):
    """What a walk over everything found. Findings beyond the first few are counted only."""

    state: str
    problems: tuple[VerifyProblem, ...]
    problems_count: int

    @property
    def ok(self) -> bool:
        """No finding, and the pool is in use."""
        return self.problems_count == 0 and self.state == "active"


POOL_STATES = {
    _core.STATE_ACTIVE: "active",
    _core.STATE_RETIRED: "retired",
    _core.STATE_POISONED: "poisoned",
}


def started_ns(start_ticks: int) -> int | None:
    """Wall time of a process's start, from its start ticks since boot; None when unknown."""
    if start_ticks == 0:
        return None
    since_boot_ns = start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns
