"""Processes whose event loops wait for capacity: killed, stopped, on kernels that cannot do all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

import shmcache as sc
from tests.pool import raw
from tests.process import kernel
from tests.process.conftest import needs_filters
from tests.support import ROOT, Worker, wait_until

LIMITS = sc.CachePoolLimits(1, 10, 1, 0)
WHOLE = sc.CachePoolUsage(host_bytes=10)
COUNT = 200

WAITS = """
import asyncio, errno, threading
import shmcache as sc
from tests.process import kernel

def wait(name, count, keeps):
    pool = sc.CacheResidencyPool.attach(name)

    async def one():
        async with pool.reserve_async(sc.CachePoolUsage(host_bytes=10)):
            if keeps:
                tell("has it")
                await asyncio.Event().wait()
            return threading.active_count()

    async def main():
        return await asyncio.gather(*(one() for _ in range(count)))

    threads = asyncio.run(main())
    pool.close()
    return len(threads), max(threads)
"""


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with sc.CacheResidencyPool.create(pool_name, LIMITS) as pool:
        yield pool


def waiters(pool: sc.CacheResidencyPool) -> int:
    with raw.Segment(pool.fileno()) as segment:
        return segment.waiters()


def begin(pool: sc.CacheResidencyPool, worker: Worker, *, keeps: bool = False) -> None:
    before = waiters(pool)
    worker.begin("wait(name, count, keeps)", name=pool.name, count=COUNT, keeps=keeps)
    wait_until(lambda: waiters(pool) == before + 1, "its coroutines wait")


def expect_nothing_left(pool: sc.CacheResidencyPool) -> None:
    pool.sweep()
    assert (len(pool.owners()), pool.report().current_host_bytes) == (1, 0)
    assert waiters(pool) == 0
    assert pool.verify().ok


@needs_filters
@pytest.mark.parametrize("number", [kernel.ERRNO_REFUSED, kernel.ERRNO_UNKNOWN_CALL])
def test_a_kernel_that_cannot_wait_for_several(pool: sc.CacheResidencyPool, number: int) -> None:
    """The watcher looks every few milliseconds instead."""
    token = pool.reserve(WHOLE)
    with Worker(WAITS) as worker:
        worker.call("kernel.refuse_calls(number, 'futex_waitv')", number=number)
        begin(pool, worker)
        token.release()
        assert worker.finish() == [COUNT, 2]
        expect_nothing_left(pool)


def test_two_processes_of_many_waiters_and_one_is_killed(pool: sc.CacheResidencyPool) -> None:
    """With the whole pool in its hands: all of the other's are served, before or after."""
    token = pool.reserve(WHOLE)
    with Worker(WAITS) as doomed, Worker(WAITS) as other:
        begin(pool, doomed, keeps=True)
        begin(pool, other)
        token.release()
        doomed.expect("has it")
        doomed.kill()
        assert other.finish() == [COUNT, 2]
    expect_nothing_left(pool)


def test_a_stopped_process_of_many_waiters_costs_nothing(pool: sc.CacheResidencyPool) -> None:
    token = pool.reserve(WHOLE)
    with Worker(WAITS) as worker:
        begin(pool, worker)
        worker.stop()
        token.release()
        pool.reserve(WHOLE).release()
        worker.kill()
    expect_nothing_left(pool)


EXITS = """
import asyncio, sys
import shmcache as sc

pool = sc.CacheResidencyPool.attach(sys.argv[1])
loop = asyncio.new_event_loop()
wanted = sc.CachePoolUsage(host_bytes=1)

async def one():
    async with pool.reserve_async(wanted):
        raise AssertionError

tasks = [loop.create_task(one()) for _ in range(5)]
loop.run_until_complete(asyncio.sleep(0.02))
sys.exit(3)
"""


def test_an_exit_in_the_midst_of_waiting_is_orderly(pool: sc.CacheResidencyPool) -> None:
    """The loop was never closed: the watcher's sleep ends, and nobody has to sweep."""
    token = pool.reserve(WHOLE)
    done = subprocess.run(
        [sys.executable, "-c", EXITS, pool.name], capture_output=True, check=False, cwd=ROOT
    )
    assert done.returncode == 3, done.stderr
    assert len(pool.owners()) == 1
    assert waiters(pool) == 0
    token.release()
