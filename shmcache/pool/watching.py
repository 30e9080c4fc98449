"""Look again and again at the pool that has a name, whichever epoch that is.

Why         A screen or an exporter outlives pools. One that kept its handle would go on showing a
            segment that nobody uses any more as if it lived.
Contract    Every look first asks whether the name still leads to the segment at hand, and opens
            what it leads to now if not. What cannot be looked at is an error, never an old figure.
            Holds no owner slot.
Concurrency One look at a time.
Errors      SegmentError.NotFound, Refused, Retired, LockHeld; CachePoolError.Poisoned. The next
            look tries again.
"""

from __future__ import annotations

from typing import Self

from shmcache.errors import SegmentError
from shmcache.pool.names import has_name, segment_path
from shmcache.pool.owners import ReclaimedOwner
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.snapshot import PoolSnapshot


class PoolWatcher:
    """Takes snapshots of whatever pool has the name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pool: CacheResidencyPool | None = None

    def look(self) -> PoolSnapshot:
        """A snapshot of the present epoch."""
        try:
            return self._present().snapshot()
        except (SegmentError.Retired, SegmentError.Closed):
            self.close()
            return self._present().snapshot()

    def sweep(self) -> tuple[ReclaimedOwner, ...]:
        """Give back what dead owners of the present epoch held."""
        return self._present().sweep()

    def close(self) -> None:
        """Let go of the segment; the next look opens it again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _present(self) -> CacheResidencyPool:
        pool = self._pool
        if pool is not None and not has_name(pool.fileno(), segment_path(self.name)):
            self.close()
            pool = None
        if pool is None:
            pool = self._pool = CacheResidencyPool.observe(self.name)
        return pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
