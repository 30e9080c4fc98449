"""R4: the worked life of contract/residency.md B9, every row against `pool.report()`.

The pool of this test carries out "publish and release" as two calls and writes down what it shows
after each of its own calls. So the rows in which a charge is doubled for a moment can be seen; in
an ordinary pool the two are one change. The second test lives the same life there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits, CachePoolUsage
from shmcache.session.options import PagedCacheOptions
from shmcache.session.session import CacheSession
from tests.session.rig import axes, grow, make, peaks, published

pytestmark = pytest.mark.usefixtures("engine")

LIMITS = CachePoolLimits(64, 48, 128, 256)
Row = tuple[tuple[int, int, int, int], tuple[int, int, int, int], str]


class WatchedPool(CacheResidencyPool):
    """Writes a row after each call that changes it."""

    def watch(self, session: CacheSession) -> None:
        self.rows: list[Row] = []
        self.session = session

    def note(self, usage: Any = None) -> None:
        if not hasattr(self, "rows"):
            return
        core = self.session._core
        used = usage or core.sums().usage()
        manager = (
            used.device_bytes,
            used.host_bytes,
            used.transfer_in_flight_bytes,
            used.disk_bytes,
        )
        phases = " ".join(
            f"B{id.start // 4}={core.records[id].storage.phase.name}" for id in sorted(core.records)
        )
        row = manager, axes(self.report()), phases
        if not self.rows or self.rows[-1] != row:
            self.rows.append(row)

    def update_manager(self, manager: int, usage: Any) -> Any:
        aggregate = super().update_manager(manager, usage)
        self.note(usage)
        return aggregate

    def publish_and_release(self, manager: int, usage: Any, reservation: Any) -> Any:
        super().update_manager(manager, usage)
        self.note(usage)
        reservation.release()
        self.note(usage)
        return CachePoolUsage(*axes(self.report()))

    def reserve(self, usage: Any, *, timeout: float | None = 0) -> Any:
        token = super().reserve(usage, timeout=timeout)
        self.note(self.published)
        return token

    @property
    def published(self) -> Any:
        """What the session has told, which is not yet what it is about to hold."""
        return CachePoolUsage(*self.rows[-1][0]) if self.rows else None


def live(session: CacheSession) -> None:
    grow(session, 3)
    grow(session, 1)
    grow(session, 4)
    grow(session, 1)
    grow(session, 3)
    grow(session, 1)
    first = session.blocks()[0]
    lease = session.lease(first)
    lease.release()


def rows(*given: tuple[Any, ...]) -> list[Row]:
    """A row without phases has those of the row before."""
    phases, made = "", []
    for row in given:
        phases = row[2] if len(row) == 3 else phases
        made.append((row[0], row[1], phases))
    return made


D, H, W, K, R, X = (
    "DEVICE",
    "HOST_UNBACKED",
    "HOST_WRITING",
    "HOST_BACKED",
    "DISK_READING",
    "DISK_READY",
)
M = "DEMOTING_TO_HOST"


def at(*phases: str) -> str:
    return " ".join(f"B{n}={phase}" for n, phase in enumerate(phases))


EXPECTED = rows(
    ((24, 0, 0, 0), (24, 0, 0, 0), ""),
    ((32, 0, 0, 0), (32, 0, 0, 0)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),  # seal: tail emptied
    ((32, 0, 0, 0), (32, 0, 0, 0), at(D)),
    ((64, 0, 0, 0), (64, 0, 0, 0)),  # the tail of B1, full
    ((32, 0, 0, 0), (32, 0, 0, 0)),
    ((64, 0, 0, 0), (64, 0, 0, 0), at(D, D)),
    ((72, 0, 0, 0), (72, 0, 0, 0)),  # tail 1 token: device over, victim B0
    ((72, 0, 0, 0), (72, 40, 40, 0)),  # +A
    ((72, 40, 40, 0), (72, 80, 80, 0), at(M, D)),
    ((72, 40, 40, 0), (72, 40, 40, 0)),  # -A
    ((40, 40, 0, 0), (40, 40, 0, 0), at(H, D)),
    ((64, 40, 0, 0), (64, 40, 0, 0)),  # the tail of B2, full
    ((32, 40, 0, 0), (32, 40, 0, 0)),
    ((64, 40, 0, 0), (64, 40, 0, 0), at(H, D, D)),
    ((72, 40, 0, 0), (72, 40, 0, 0)),  # victim B1, host full: host victim B0
    ((72, 40, 0, 0), (72, 40, 40, 32)),  # +W
    ((72, 40, 40, 32), (72, 40, 80, 64), at(W, D, D)),
    ((72, 40, 40, 32), (72, 40, 40, 32)),  # -W, enqueue
    ((72, 40, 40, 32), (72, 40, 40, 32), at(X, D, D)),  # commit
    ((72, 0, 0, 32), (72, 0, 0, 32)),  # task gone
    ((72, 0, 0, 32), (72, 40, 40, 32)),  # +A
    ((72, 40, 40, 32), (72, 80, 80, 32), at(X, M, D)),
    ((72, 40, 40, 32), (72, 40, 40, 32)),
    ((40, 40, 0, 32), (40, 40, 0, 32), at(X, H, D)),
    # lease B0: host full, B1 to disk
    ((40, 40, 0, 32), (40, 40, 40, 64)),
    ((40, 40, 40, 64), (40, 40, 80, 96), at(X, W, D)),
    ((40, 40, 40, 64), (40, 40, 40, 64)),
    ((40, 40, 40, 64), (40, 40, 40, 64), at(X, X, D)),
    ((40, 0, 0, 64), (40, 0, 0, 64)),
    ((40, 0, 0, 64), (40, 40, 0, 64)),  # +H
    ((40, 0, 0, 64), (40, 40, 32, 64)),  # +T
    ((40, 40, 0, 64), (40, 80, 32, 64), at(R, X, D)),
    ((40, 40, 0, 64), (40, 40, 32, 64)),  # -H, enqueue, wait
    ((40, 40, 0, 64), (40, 40, 32, 64), at(K, X, D)),  # read applied
    ((40, 40, 0, 64), (40, 40, 40, 64)),  # -T +P
    ((72, 0, 0, 64), (72, 0, 40, 64), at(D, X, D)),
    ((72, 0, 0, 64), (72, 40, 80, 64)),  # allow_recent: B2
    ((72, 40, 40, 64), (72, 80, 120, 64), at(D, X, M)),
    ((72, 40, 40, 64), (72, 40, 80, 64)),
    ((40, 40, 0, 64), (40, 40, 40, 64), at(D, X, H)),
    ((40, 40, 0, 64), (40, 40, 0, 64)),  # lease released, -P
    ((8, 40, 0, 64), (8, 40, 0, 64), at(X, X, H)),  # B0 evicted, nothing moved
)


def test_r4_every_row(tmp_path: Path) -> None:
    pool = WatchedPool(LIMITS)
    with pool, make(device=64, host=48, disk=(tmp_path, 256), pool=pool) as session:
        pool.watch(session)
        live(session)
        pool.note()
        session.demote(session.blocks()[0])
        assert list(zip(pool.rows, EXPECTED, strict=False)) == [(row, row) for row in EXPECTED]
        assert pool.rows == EXPECTED
        assert peaks(pool.report()) == (64, 40, 120, 96)


def test_r4_an_ordinary_pool_shows_no_charge_twice(tmp_path: Path) -> None:
    options = PagedCacheOptions(4, 64, 48, 1).with_live_disk(tmp_path, 256, 4)
    with (
        options.create_pool() as pool,
        make(device=64, host=48, disk=(tmp_path, 256), pool=pool) as session,
    ):
        assert pool.limits == LIMITS
        live(session)
        assert published(session) == axes(pool.report()) == (40, 40, 0, 64)
        session.demote(session.blocks()[0])
        assert axes(pool.report()) == (8, 40, 0, 64)
        assert peaks(pool.report()) == (64, 40, 80, 64)
        report = session.report()
        assert report.host_demotions == 3
        assert report.disk_demotions == 3
        assert report.disk_promotions == 1
        assert report.demand_misses == 1
        assert report.block_seals == 3
        assert report.transfer_bytes == 6 * 32
        assert report.failures == 0
