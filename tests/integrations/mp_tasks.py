"""What workers of process pools do in the tests: importable by name, as spawned ones must."""

from __future__ import annotations

import os
import signal

import shmcache as sc
from shmcache.integrations.mp_workers import PoolName, current_pool, join_pool

ONE = sc.CachePoolUsage(host_bytes=1)
kept: list[object] = []


def read(key: bytes) -> tuple[int, int, bytes]:
    """The process, its handle, and a block's bytes."""
    pool = current_pool()
    with pool.lookup(key) as lease:  # type: ignore[union-attr]
        return os.getpid(), id(pool), bytes(lease.memoryview())


def read_by_name(name: PoolName, key: bytes) -> tuple[int, int, bytes]:
    """The same without an initializer."""
    pool = name.pool()
    with pool.lookup(key) as lease:  # type: ignore[union-attr]
        return os.getpid(), id(pool), bytes(lease.memoryview())


def keep(nbytes: int) -> int:
    """Charge the process, and keep it."""
    pool = current_pool()
    kept.append(pool.reserve(sc.CachePoolUsage(host_bytes=nbytes)))
    kept.append(pool.register_manager(None))
    return os.getpid()


def wait_for_room(nbytes: int) -> int:
    """Killed while it waits."""
    current_pool().reserve(sc.CachePoolUsage(host_bytes=nbytes), timeout=None)
    return os.getpid()


def fork_and_use() -> tuple[int, int, int]:
    """Host bytes seen by a worker before, by its child, and after the child's end."""
    pool = current_pool()
    with pool.reserve(ONE):
        before = pool.report().current_host_bytes
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with current_pool().reserve(ONE):
                    os.write(writing, bytes([current_pool().report().current_host_bytes]))
            finally:
                os._exit(0)
        within = os.read(reading, 1)[0]
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        pool.sweep()
        return before, within, pool.report().current_host_bytes


def main(name: PoolName, key: bytes) -> None:
    """A `Process`: joins by itself."""
    join_pool(name)
    assert read(key)[2] == b"block"
    keep(1)


def linger(name: PoolName) -> None:
    """Joins, charges, and stays until it is killed."""
    join_pool(name)
    keep(1)
    signal.pause()
