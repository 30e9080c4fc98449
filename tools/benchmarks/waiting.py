"""Waiting in an event loop: an admission without waiting, a handover, many waiters, their cost."""

from __future__ import annotations

import asyncio
import os
import statistics
import time

from rows import Row, percentile

import shmcache as sc

_NAME = f"bench-{os.getpid()}-waiting"
_LIMITS = sc.CachePoolLimits(10, 10, 10, 10)
_WHOLE = sc.CachePoolUsage(host_bytes=10)
_MANY = 5_000
_CALLS = 20_000


def run() -> list[Row]:
    """All rows; needs ten seconds."""
    pool = sc.CacheResidencyPool.create(_NAME, _LIMITS)
    try:
        return asyncio.run(_rows(pool))
    finally:
        pool.close()
        sc.CacheResidencyPool.destroy(_NAME, force=True)


async def _rows(pool: sc.CacheResidencyPool) -> list[Row]:
    ratios, awaited = [], []
    for _ in range(5):  # alternate, so that a slow moment hits both
        awaited.append(await _awaited_ns(pool))
        started = time.perf_counter_ns()
        for _ in range(_CALLS):
            pool.reserve(_WHOLE).release()
        ratios.append(awaited[-1] * _CALLS / (time.perf_counter_ns() - started))
    handovers = [await _handover_us(pool) for _ in range(500)]
    idle, each = await _many(pool)
    alone = statistics.median(ratios)
    return [
        Row("await reserve_async + release", statistics.median(awaited), "ns", "reserve + release",
            alone),
        Row("release to a waiting coroutine, p50", percentile(handovers, 50), "us"),
        Row("release to a waiting coroutine, p99", percentile(handovers, 99), "us"),
        Row(f"{_MANY} that wait", idle * 100, "% of a core"),
        Row(f"{_MANY} served one after the other, each", each, "us"),
    ]  # fmt: skip


async def _awaited_ns(pool: sc.CacheResidencyPool) -> float:
    started = time.perf_counter_ns()
    for _ in range(_CALLS):
        (await pool.reserve_async(_WHOLE)).release()
    return (time.perf_counter_ns() - started) / _CALLS


async def _wait(pool: sc.CacheResidencyPool) -> int:
    async with pool.reserve_async(_WHOLE):
        return time.perf_counter_ns()


async def _handover_us(pool: sc.CacheResidencyPool) -> float:
    token = pool.reserve(_WHOLE)
    task = asyncio.create_task(_wait(pool))
    await asyncio.sleep(0.002)
    released = time.perf_counter_ns()
    token.release()
    return (await task - released) / 1e3


async def _many(pool: sc.CacheResidencyPool) -> tuple[float, float]:
    """The part of a core that waiting takes, and microseconds until the next has it."""
    token = pool.reserve(_WHOLE)
    tasks = [asyncio.create_task(_wait(pool)) for _ in range(_MANY)]
    await asyncio.sleep(0.5)
    before, started = time.process_time(), time.perf_counter()
    await asyncio.sleep(3)
    idle = (time.process_time() - before) / (time.perf_counter() - started)
    started = time.perf_counter()
    token.release()
    await asyncio.gather(*tasks)
    return idle, (time.perf_counter() - started) / _MANY * 1e6
