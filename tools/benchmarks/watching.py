"""Watching a pool: what a snapshot and a scrape cost, beside an admission that they might delay."""

from __future__ import annotations

import contextlib
import os

from prometheus_client import CollectorRegistry, generate_latest
from rows import Row, median_ns

import shmcache as sc
from shmcache.integrations.prometheus import PoolCollector

_OWNERS, _MANAGERS, _BLOCKS = 8, 8, 1000


def run() -> list[Row]:
    """All rows; needs about five seconds."""
    name = f"bench-watching-{os.getpid()}"
    limits = sc.CachePoolLimits(1 << 30, 64 << 20, 1 << 20, 0)
    usage = sc.CachePoolUsage(device_bytes=1)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(sc.CacheResidencyPool.create(name, limits))
        stack.callback(sc.CacheResidencyPool.destroy, name, force=True)
        others = [sc.CacheResidencyPool.attach(name) for _ in range(_OWNERS - 1)]
        for owner in (pool, *map(stack.enter_context, others)):
            for _ in range(_MANAGERS):
                stack.enter_context(owner.register_manager(None))
        for number in range(_BLOCKS):
            pool.allocate(4096).publish(number.to_bytes(32, "big")).lease.release()
        watcher = stack.enter_context(sc.PoolWatcher(name))
        collector, registry = PoolCollector(name), CollectorRegistry()
        registry.register(collector)
        stack.callback(collector.close)
        reserve_ns = median_ns(lambda: pool.reserve(usage).release(), calls=2000)
        peer, sizes = "reserve and release", f"{_OWNERS} owners, {_MANAGERS * _OWNERS} managers"
        return [
            _row(f"{what}: {sizes}, {_BLOCKS} blocks", median_ns(call, calls=100), peer, reserve_ns)
            for what, call in (
                ("engine's part of a snapshot", pool._snapshot),
                ("snapshot of a name", watcher.look),
                ("scrape", lambda: generate_latest(registry)),
            )
        ]


def _row(name: str, value_ns: float, peer: str, peer_ns: float) -> Row:
    return Row(name, value_ns / 1000, "us", peer, value_ns / peer_ns)
