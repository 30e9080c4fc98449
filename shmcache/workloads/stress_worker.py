"""One process of a stress run: reserves, publishes and releases at random until told to stop.

    python -m shmcache.workloads.stress_worker POOL SEED COUNTERS INDEX WORKERS

Contract    Publishes only what it has reserved, so that no axis ever exceeds its limit. Refusals
            for want of room are its daily bread; any other error ends it with a traceback, which
            the launcher reports. It stops, orderly, when its standard input closes.
            COUNTERS is a descriptor that it has inherited.
Death       May be killed anywhere. Its two counters, in a file that all workers map, stay.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import NoReturn

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolMembership,
    CachePoolReservation,
    CachePoolUsage,
    CacheResidencyPool,
    SegmentError,
)
from shmcache.workloads.children import Counters, say_ready, when_dismissed

RESERVATIONS_MAX = 8
MEMBERSHIPS_MAX = 4

# What a worker counts: operations done, and how many were refused.
COUNTS = 2

_SHARE = 8  # a worker asks for at most limit / (_SHARE * workers) at once
_TIMEOUTS_S = (0, 0, 0, 0, 0, 0, 0.002, 0.02)
_REFUSALS = (CachePoolError.BudgetExceeded, SegmentError.TableFull)


class StressWorker:
    """What one worker holds, and the next random thing it does."""

    def __init__(
        self, pool: CacheResidencyPool, rng: random.Random, workers: int, count: memoryview
    ) -> None:
        self._pool = pool
        self._rng = rng
        self._largest = _divided(pool.limits, _SHARE * workers)
        self._count = count
        self._reservations: list[CachePoolReservation] = []
        self._members: list[tuple[CachePoolMembership, CachePoolUsage]] = []
        self._actions: tuple[Callable[[], None], ...] = (
            *[self.reserve] * 4,
            *[self.release] * 3,
            *[self.publish_and_release] * 3,
            self.publish_less,
            self.leave,
            self.look,
        )

    def step(self) -> None:
        """One operation, counted; a refusal is counted twice."""
        try:
            self._rng.choice(self._actions)()
        except _REFUSALS:
            self._count[1] += 1
        self._count[0] += 1

    def reserve(self) -> None:
        """Reserve on some axes, or on the transfer axis alone; sometimes wait for room."""
        if len(self._reservations) == RESERVATIONS_MAX:
            self.release()
        usage, timeout = self._usage(), self._rng.choice(_TIMEOUTS_S)
        if self._rng.random() < 0.2:
            made = self._pool.reserve_transfer(usage.transfer_in_flight_bytes, timeout=timeout)
        else:
            made = self._pool.reserve(usage, timeout=timeout)
        self._reservations.append(made)

    def release(self) -> None:
        """Give one reservation back: by name, or by forgetting it."""
        if self._reservations:
            token = self._reservations.pop(self._rng.randrange(len(self._reservations)))
            if self._rng.random() < 0.5:
                token.release()

    def publish_and_release(self) -> None:
        """Reserve, and turn the reservation into what a manager has published."""
        if len(self._members) < MEMBERSHIPS_MAX and self._rng.random() < 0.5:
            self._members.append((self._pool.register_manager(None), CachePoolUsage()))
        if not self._members:
            return
        usage = self._usage()
        reservation = self._pool.reserve(usage)
        index = self._rng.randrange(len(self._members))
        member = self._members[index][0]
        self._within(self._pool.publish_and_release(member.manager, usage, reservation))
        self._members[index] = (member, usage)

    def publish_less(self) -> None:
        """Shrink what a manager has published."""
        if self._members:
            index = self._rng.randrange(len(self._members))
            member, usage = self._members[index]
            usage = _divided(usage, 2)
            self._within(self._pool.update_manager(member.manager, usage))
            self._members[index] = (member, usage)

    def leave(self) -> None:
        """End one membership, and with it what it had published."""
        if self._members:
            self._members.pop(self._rng.randrange(len(self._members)))[0].release()

    def look(self) -> None:
        """Read the totals."""
        report = self._pool.report()
        self._within(
            CachePoolUsage(
                report.current_device_bytes,
                report.current_host_bytes,
                report.current_transfer_in_flight_bytes,
                report.current_disk_bytes,
            )
        )

    def _usage(self) -> CachePoolUsage:
        def some(largest: int) -> int:
            return self._rng.randint(0, largest) if self._rng.random() < 0.5 else 0

        return CachePoolUsage(
            some(self._largest.device_bytes),
            some(self._largest.host_bytes),
            some(self._largest.transfer_in_flight_bytes),
            some(self._largest.disk_bytes),
        )

    def _within(self, totals: CachePoolUsage) -> None:
        """G2, seen from inside: no publication of ours exceeds what it had reserved."""
        limits = self._pool.limits
        if (
            totals.device_bytes > limits.device_bytes
            or totals.host_bytes > limits.host_bytes
            or totals.transfer_in_flight_bytes > limits.transfer_in_flight_bytes
            or totals.disk_bytes > limits.disk_bytes
        ):
            raise ArithmeticError(f"G2: {totals} exceeds {limits}")


def _divided(usage: CachePoolUsage | CachePoolLimits, divisor: int) -> CachePoolUsage:
    return CachePoolUsage(
        usage.device_bytes // divisor,
        usage.host_bytes // divisor,
        usage.transfer_in_flight_bytes // divisor,
        usage.disk_bytes // divisor,
    )


def main(name: str, seed: str, counters: str, index: str, workers: str) -> NoReturn:
    """Work until dismissed, then leave in order."""
    dismissed: list[bool] = []
    when_dismissed(lambda: dismissed.append(True))
    count = Counters(int(workers), COUNTS, int(counters)).row(int(index))
    with CacheResidencyPool.attach(name) as pool:
        worker = StressWorker(pool, random.Random(int(seed)), int(workers), count)
        say_ready()
        while not dismissed:
            worker.step()
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
