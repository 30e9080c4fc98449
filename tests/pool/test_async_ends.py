"""Waiting in event loops that ends otherwise than by an admission; mutants of the watcher."""

import asyncio
import gc
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolUsage,
    CacheResidencyPool,
    SegmentError,
    bounds,
)
from shmcache.pool import watcher
from shmcache.pool.names import segment_path
from tests.pool import raw
from tests.pool.loops import (
    LIMITS,
    ONE,
    WHOLE,
    begin,
    nothing_left,
    run,
    until,
    waiter_bits,
    waiting_here,
    watcher_threads,
)
from tests.support import PATIENCE_S, Worker, wait_until

Check = Callable[[CacheResidencyPool, float], Awaitable[None]]

# Takes all there is and gives it back, piece by piece, for ever.
RELEASER = """
import random
from shmcache import CachePoolUsage, CacheResidencyPool

def work(name, seed):
    rng = random.Random(seed)
    pool = CacheResidencyPool.attach(name)
    while True:
        tokens = []
        for _ in range(rng.randrange(1, 9)):
            try:
                tokens.append(pool.reserve(CachePoolUsage(host_bytes=rng.randrange(1, 5))))
            except Exception as error:
                assert "BudgetExceeded" in repr(error), error
        while tokens:
            tokens.pop(rng.randrange(len(tokens))).release()
"""


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS, owners_max=200) as pool:
        yield pool


# ---- cancellation: checks that mutants must fail -------------------------------------------------


async def cancelled_while_waiting(pool: CacheResidencyPool, limit_s: float) -> None:
    """Nothing is charged and no bit is left, though the capacity stays taken."""
    token = pool.reserve(WHOLE)
    try:
        tasks = [await begin(pool) for _ in range(3)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        await until(lambda: waiter_bits(pool) == 0, "no bit is left", limit_s)
    finally:
        token.release()
    await nothing_left(pool, limit_s)


async def cancelled_when_admitted(pool: CacheResidencyPool, limit_s: float) -> None:
    """The loop is busy from before the admission until after the cancellation."""
    token = pool.reserve(WHOLE)
    task = await begin(pool)
    token.release()
    wait_until(lambda: pool.report().current_host_bytes == 1, "the watcher admits it")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await nothing_left(pool, limit_s)


async def cancelled_in_the_attempt(pool: CacheResidencyPool, limit_s: float) -> None:
    """The watcher has the token, and has told nobody; the coroutine ends before it does."""
    loop = asyncio.get_running_loop()
    kept: list[Any] = []  # the finalizer of a token must not do what is checked
    ended = threading.Event()
    token = pool.reserve(WHOLE)
    task = await begin(pool)
    original = CacheResidencyPool._reserve_at_once

    def reserve(self: CacheResidencyPool, usage: CachePoolUsage) -> Any:
        answer = original(self, usage)
        if not isinstance(answer, Exception):
            kept.append(answer)
            loop.call_soon_threadsafe(task.cancel)
            ended.wait(PATIENCE_S)
        return answer

    CacheResidencyPool._reserve_at_once = reserve  # type: ignore[method-assign, assignment]
    try:
        token.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(kept) == 1
    finally:
        CacheResidencyPool._reserve_at_once = original  # type: ignore[method-assign]
        ended.set()
    await nothing_left(pool, limit_s)


async def killed_holder(pool: CacheResidencyPool, limit_s: float) -> None:
    """Nobody wakes the watcher, and nobody else sweeps."""
    with Worker("from shmcache import CachePoolUsage, CacheResidencyPool") as other:
        other.call("pool = CacheResidencyPool.attach(name)", name=pool.name)
        other.call("token = pool.reserve(CachePoolUsage(host_bytes=10))")
        task = await begin(pool)
        other.kill()
        try:
            async with asyncio.timeout(limit_s):
                (await task).release()
        except TimeoutError:
            raise AssertionError("a death is not noticed") from None


async def timed_out_beside_another(pool: CacheResidencyPool, limit_s: float) -> None:
    """The end of one waiter's time is not the end of its equals' waiting."""
    token = pool.reserve(WHOLE)
    task = await begin(pool)
    with pytest.raises(CachePoolError.BudgetExceeded):
        await pool.reserve_async(ONE, timeout=0.01)
    await until(lambda: waiting_here() == 1, "one waits", limit_s)
    assert waiter_bits(pool) == 1
    token.release()
    (await task).release()
    await nothing_left(pool, limit_s)


CHECKS: list[Check] = [
    cancelled_while_waiting,
    cancelled_when_admitted,
    cancelled_in_the_attempt,
    killed_holder,
    timed_out_beside_another,
]


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_left(pool: CacheResidencyPool, check: Check) -> None:
    run(check(pool, PATIENCE_S))


def keep_the_answer(waiter: watcher.Waiter) -> None:
    waiter.gone = True


def look_at_nobody(waiter: watcher.Waiter, answer: Any) -> None:
    waiter.box.append(answer)


def do_nothing(*arguments: Any) -> int:
    return 0


MUTANTS: list[tuple[Check, Any, str, Callable[..., Any]]] = [
    (cancelled_while_waiting, watcher.Watcher, "remove", do_nothing),
    (cancelled_while_waiting, CacheResidencyPool, "_wait_end", do_nothing),
    (cancelled_when_admitted, watcher.Waiter, "leave", keep_the_answer),
    (cancelled_in_the_attempt, watcher.Waiter, "put", look_at_nobody),
    (killed_holder, CacheResidencyPool, "_sweep", do_nothing),
    (timed_out_beside_another, watcher.Watcher, "remove", do_nothing),
]


@pytest.mark.parametrize(("check", "owner", "name", "mutant"), MUTANTS)
def test_the_checks_catch(
    pool: CacheResidencyPool,
    monkeypatch: pytest.MonkeyPatch,
    check: Check,
    owner: Any,
    name: str,
    mutant: Callable[..., Any],
) -> None:
    """Each with what keeps it from failing taken out."""

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, mutant)
            with pytest.raises(AssertionError):
                await check(pool, 0.3)

    run(main())
    forget_everything()


def forget_everything() -> None:
    """What a mutant left behind must not meet the next test."""
    left = watcher.this_process()
    for watched in list(left._watched.values()):
        for waiter in watched.waiters():
            waiter.gone = True
            left.remove(waiter)
    wait_until(lambda: waiting_here() == 0, "the watcher forgets")


# ---- other ends ----------------------------------------------------------------------------------


def test_a_loop_that_is_closed_with_waiters(pool: CacheResidencyPool) -> None:
    """Never run again: neither what it waits for nor what it was given stays."""
    token = pool.reserve(WHOLE)
    loop = asyncio.new_event_loop()
    waiting = [loop.create_task(pool.reserve_async(ONE)) for _ in range(2)]
    loop.run_until_complete(until(lambda: waiting_here() == 2, "they wait"))
    loop.close()
    wait_until(lambda: waiting_here() == 0, "the watcher forgets them")
    wait_until(lambda: waiter_bits(pool) == 0, "no bit is left")
    token.release()
    assert pool.report().current_host_bytes == 0
    for task in waiting:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_loop_that_is_closed_with_an_admission(pool: CacheResidencyPool) -> None:
    token = pool.reserve(WHOLE)
    loop = asyncio.new_event_loop()
    task: Any = loop.run_until_complete(begin(pool))
    token.release()
    wait_until(lambda: pool.report().current_host_bytes == 1, "the watcher admits it")
    loop.close()
    task._log_destroy_pending = False
    del task
    gc.collect()  # the loop ran nothing to its end: its tasks are in cycles
    wait_until(lambda: pool.report().current_host_bytes == 0, "it is given back")


def closed(pool: CacheResidencyPool, victim: CacheResidencyPool) -> type[Exception]:
    victim.close()
    return SegmentError.Closed


def destroyed(pool: CacheResidencyPool, victim: CacheResidencyPool) -> type[Exception]:
    CacheResidencyPool.destroy(pool.name, force=True)
    return SegmentError.Retired


def poisoned(pool: CacheResidencyPool, victim: CacheResidencyPool) -> type[Exception]:
    with raw.Segment(pool.fileno()) as segment:
        segment.damage_total()
    assert not pool.verify().ok
    return CachePoolError.Poisoned


@pytest.mark.parametrize("end", [closed, destroyed, poisoned])
def test_the_end_of_the_pool_is_told(
    pool: CacheResidencyPool,
    end: Callable[[CacheResidencyPool, CacheResidencyPool], type[Exception]],
) -> None:
    token = pool.reserve(WHOLE)
    with CacheResidencyPool.attach(pool.name) as victim:

        async def main() -> None:
            tasks = [await begin(victim) for _ in range(3)]
            expected = end(pool, victim)
            for task in tasks:
                with pytest.raises(expected):
                    await task
            await until(lambda: waiting_here() == 0, "nobody waits")

        run(main())
    if end is not poisoned:
        wait_until(lambda: waiter_bits(pool) == 0, "no bit is left")
        token.release()


def test_a_closed_pool_is_no_other_pools_concern(pool: CacheResidencyPool) -> None:
    """`close` waits for the watcher's sleep, which it ends; who waits elsewhere goes on waiting."""

    async def main() -> None:
        token = pool.reserve(WHOLE)
        task = await begin(pool)
        for _ in range(20):
            with CacheResidencyPool(LIMITS) as other:
                kept = other.reserve(WHOLE)
                ending = await begin(other)
                other.close()
                with pytest.raises(SegmentError.Closed):
                    await ending
                kept.release()
        token.release()
        (await task).release()
        await nothing_left(pool)

    run(main())


def test_a_forked_child_waits_for_itself(pool: CacheResidencyPool) -> None:
    """It inherits neither thread nor waiters, and its end is no concern of the parent's."""

    def in_the_child() -> None:
        assert waiting_here() == 0
        assert not watcher_threads()

        async def main() -> None:
            with pytest.raises(CachePoolError.BudgetExceeded):
                await pool.reserve_async(ONE, timeout=0.01)
            with CacheResidencyPool(LIMITS) as own:
                kept = own.reserve(WHOLE)
                task = await begin(own)
                assert len(watcher_threads()) == 1
                kept.release()
                (await task).release()

        run(main())

    token = pool.reserve(WHOLE)

    async def main() -> None:
        task = await begin(pool)
        child = await asyncio.to_thread(fork_and_run, in_the_child)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not task.done()
        token.release()
        (await task).release()
        pool.sweep()
        await nothing_left(pool)

    run(main())


def fork_and_run(work: Callable[[], None]) -> int:
    """From a thread without a loop, as a child has none."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def test_a_stopped_holder_of_the_lock_stops_neither_loop_nor_other_pools(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "LOCK_DEADLINE_NS", 300_000_000)
    with Worker("from tests.pool.raw import Lock") as holder, CacheResidencyPool(LIMITS) as other:
        holder.call("lock = Lock(path)", path=str(segment_path(pool.name)))
        holder.call("lock.take()")
        holder.stop()

        async def main() -> None:
            task = asyncio.create_task(pool.reserve_async(ONE))
            await until(lambda: waiting_here() == 1, "it waits")
            kept = other.reserve(WHOLE)
            beside = await begin(other)
            kept.release()
            (await beside).release()
            with pytest.raises(SegmentError.LockHeld) as caught:
                await task
            assert caught.value.pid == holder.pid
            task = asyncio.create_task(pool.reserve_async(ONE, timeout=0.01))
            with pytest.raises(SegmentError.LockHeld):
                await task
            task = asyncio.create_task(pool.reserve_async(ONE))
            await until(lambda: waiting_here() == 1, "it waits")
            holder.begin("lock.give()")
            holder.cont()
            (await task).release()

        run(main())
        holder.finish()


def test_a_watcher_that_fails_tells_everybody(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: watcher.Watcher) -> None:
        raise MemoryError

    async def main() -> None:
        token = pool.reserve(WHOLE)
        tasks = [await begin(pool), await begin(pool)]
        with monkeypatch.context() as patched:
            patched.setattr(watcher.Watcher, "_forget_closed_loops", fail)
            for task in tasks:
                with pytest.raises(RuntimeError, match="watcher failed"):
                    await task
        task = await begin(pool)
        token.release()
        (await task).release()
        await nothing_left(pool)

    run(main())


# ---- any order -----------------------------------------------------------------------------------


async def life(pool: CacheResidencyPool, rng: random.Random, ends: dict[str, int]) -> None:
    """One coroutine that waits, is cancelled at any moment, or loses patience, again and again."""
    for _ in range(25):
        usage = CachePoolUsage(host_bytes=rng.randrange(1, 11), device_bytes=rng.randrange(3))
        task = asyncio.create_task(
            pool.reserve_async(usage, timeout=rng.choice([None, 0.001, 0.01]))
        )
        if rng.random() < 0.6:
            asyncio.get_running_loop().call_later(rng.random() * 0.02, task.cancel)
        try:
            token = await task
        except asyncio.CancelledError:
            ends["cancelled"] += 1
        except CachePoolError.BudgetExceeded:
            ends["refused"] += 1
        else:
            ends["admitted"] += 1
            await asyncio.sleep(rng.random() * 0.002)
            token.release()


def test_a_storm_of_cancellations_among_processes_that_release(
    pool_name: str, rng: random.Random
) -> None:
    """And one of those is killed: in the end everything is given back, and nobody is marked."""
    limits = CachePoolLimits(10, 20, 1, 1)
    ends = {"cancelled": 0, "refused": 0, "admitted": 0}
    with CacheResidencyPool.create(pool_name, limits) as pool:
        with Worker(RELEASER) as first, Worker(RELEASER) as second:
            for worker in (first, second):
                worker.begin("work(name, seed)", name=pool_name, seed=rng.getrandbits(32))

            async def main() -> None:
                lives = [life(pool, random.Random(rng.getrandbits(32)), ends) for _ in range(40)]
                tasks = [asyncio.create_task(one) for one in lives]
                await until(lambda: sum(ends.values()) > 300, "a third is over")
                first.kill()
                await asyncio.gather(*tasks)
                assert len(watcher_threads()) <= 1

            run(main())
        assert sum(ends.values()) == 1000
        assert all(ends.values()), ends
        pool.sweep()
        run(nothing_left(pool))
        assert len(pool.owners()) == 1
