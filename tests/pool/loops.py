"""What tests of waiting in event loops share."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from shmcache import CachePoolLimits, CachePoolUsage, CacheResidencyPool
from shmcache.pool import watcher
from tests.pool import raw
from tests.support import PATIENCE_S, POLL_S

LIMITS = CachePoolLimits(10, 10, 10, 10)
WHOLE = CachePoolUsage(host_bytes=10)
ONE = CachePoolUsage(host_bytes=1)


def run(main: Awaitable[Any]) -> Any:
    """In a loop of its own; what waits in vain fails, and does not hang."""

    async def limited() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(limited())


async def until(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """As `wait_until`, while the loop runs on."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


async def begin(pool: CacheResidencyPool, usage: CachePoolUsage = ONE) -> asyncio.Task[Any]:
    """A task that waits, and that the watcher has tried in vain."""
    before = set(_waiters())
    task = asyncio.create_task(pool.reserve_async(usage))
    await until(lambda: any(w.looked for w in set(_waiters()) - before), "it waits")
    return task


def waiting_here() -> int:
    """How many coroutines the watcher of this process knows of."""
    return len(_waiters())


def _waiters() -> list[watcher.Waiter]:
    watched = list(watcher.this_process()._watched.values())
    return [waiter for pool in watched for waiter in pool.waiters()]


def watcher_threads() -> list[threading.Thread]:
    """At most one, by the promise."""
    return [thread for thread in threading.enumerate() if thread.name == "shmcache-watcher"]


def waiter_bits(pool: CacheResidencyPool) -> int:
    """How many owners are marked as waiting, in the segment."""
    with raw.Segment(pool.fileno()) as segment:
        return segment.waiters()


async def nothing_left(pool: CacheResidencyPool, limit_s: float = PATIENCE_S) -> None:
    """Nobody waits, nothing is charged."""
    await until(lambda: waiting_here() == 0, "the watcher knows nobody", limit_s)
    await until(lambda: waiter_bits(pool) == 0, "no bit is left", limit_s)
    await until(lambda: pool.report().current_host_bytes == 0, "nothing is charged", limit_s)
    assert pool.verify().ok
