"""Pools in the workers of multiprocessing, concurrent.futures and torch's DataLoader.

    name = PoolName.of(pool)
    with ProcessPoolExecutor(initializer=join_pool, initargs=(name,)) as executor:
        executor.submit(work)              # which calls current_pool()

Why         A pool is not pickled: each process attaches by itself, as an owner that can be killed.
            What crosses is its name, also where a worker inherits nothing (spawn), or only what
            was there when the first one was asked for (forkserver).
Contract    `PoolName` is pickled freely, in tasks, initializers and datasets; `pool()` is the
            process's one handle, attached on first use, and again when the pool was recreated.
            `join_pool` is the initializer that lets `current_pool` answer with it.
Death       A killed worker (BrokenProcessPool) holds nothing after the next sweep, refusal or
            attach. A worker that ends in order (`maxtasksperchild`, the executor's end) leaves
            at once.
Fork        A worker may fork: the child's first use attaches it as an owner of its own.
Errors      NotFound, Refused, Retired, OwnersFull: those of `attach`. An initializer that raises
            breaks an executor, and lets a multiprocessing.Pool start workers for ever: make sure
            that the pool is there before.
Source      The resource tracker of multiprocessing never hears of a pool, and removes none.
"""

from __future__ import annotations

import msgspec

from shmcache import CacheResidencyPool, bounds
from shmcache.integrations.worker_pool import (
    PoolSettings,
    PoolSource,
    current_pool,
    this_process,
    use_pool_here,
)


class PoolName(msgspec.Struct, frozen=True):
    """Which pool, for another process; see the module."""

    name: str

    def __post_init__(self) -> None:
        bounds.pool_name(self.name)

    @classmethod
    def of(cls, pool: CacheResidencyPool) -> PoolName:
        """The name of a pool. Raises TypeError for one without: only forked children have those."""
        if not pool.name:
            raise TypeError("a pool without a name is shared by fork only: create it with a name")
        return cls(pool.name)

    def pool(self) -> CacheResidencyPool:
        """This process's handle. Errors: those of `attach`."""
        return this_process(self)

    def open(self) -> CacheResidencyPool:
        """One more handle, that is the caller's to close. Errors: those of `attach`."""
        return CacheResidencyPool.attach(self.name)


class _Inherited:
    """A pool that this process has from the one that forked it."""

    def __init__(self, pool: CacheResidencyPool) -> None:
        self.name = pool.name or f"#{pool.id}"
        self._pool = pool

    def open(self) -> CacheResidencyPool:
        return self._pool


def join_pool(pool: PoolName | PoolSettings | CacheResidencyPool) -> None:
    """Attach this process, and let `current_pool` answer with its handle: an initializer.

    A `CacheResidencyPool` itself, also one without a name, reaches workers that are forked.
    """
    source: PoolSource = _Inherited(pool) if isinstance(pool, CacheResidencyPool) else pool
    use_pool_here(source)
    current_pool().report()  # a forked child attaches with its first call


__all__ = ["PoolName", "current_pool", "join_pool"]
