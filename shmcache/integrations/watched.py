"""Several pools, looked at by any thread: what the metrics and the web page draw from.

Contract    Names given once, or every pool of this host as it comes and goes. A look is a snapshot
            or the error that stands in its place; nothing is remembered from the look before.
Concurrency Any thread: one look at a pool at a time.
"""

from __future__ import annotations

import contextlib
import threading

from shmcache import PoolSnapshot, PoolWatcher, bounds, segment_names
from shmcache.errors import CachePoolError, ContractError, SegmentError

STATES = ("active", "absent", "retired", "poisoned", "locked", "refused")
POOLS_MAX = 256  # watched at once; of a host with more, the first by name


class WatchedPools:
    """Watches pools by name; without names, all of this host."""

    def __init__(self, *names: str) -> None:
        self._names = tuple(bounds.pool_name(name) for name in names)
        self._watchers: dict[str, PoolWatcher] = {}
        self._lock = threading.Lock()

    def names(self) -> tuple[str, ...]:
        """Of the pools to look at."""
        return self._names or tuple(sorted(filter(_is_name, segment_names())))[:POOLS_MAX]

    def look(self, name: str) -> PoolSnapshot | ContractError:
        """A snapshot of the pool that has the name now, or why there is none."""
        with self._lock:
            return self._look(name)

    def look_at_all(self) -> dict[str, PoolSnapshot | ContractError]:
        """Each pool's look; forgets pools that went."""
        with self._lock:
            names = self.names()
            for name in self._watchers.keys() - set(names):
                self._watchers.pop(name).close()
            return {name: self._look(name) for name in names}

    def close(self) -> None:
        """Let go of every segment."""
        with self._lock:
            while self._watchers:
                self._watchers.popitem()[1].close()

    def _look(self, name: str) -> PoolSnapshot | ContractError:
        watcher = self._watchers.get(name)
        if watcher is None:
            watcher = self._watchers[name] = PoolWatcher(name)
        try:
            return watcher.look()
        except ContractError as error:
            self._watchers.pop(name).close()
            error.__traceback__ = None  # it is kept for a while, and would keep these frames
            return error


def state_of(error: ContractError) -> str:
    """The state in which a pool answers with this error."""
    match error:
        case SegmentError.NotFound():
            return "absent"
        case SegmentError.Retired():
            return "retired"
        case CachePoolError.Poisoned():
            return "poisoned"
        case SegmentError.LockHeld():
            return "locked"
        case _:
            return "refused"


def _is_name(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(bounds.pool_name(name))
    return False
