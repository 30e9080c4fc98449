"""`reserve_async` and `allocate_async`: who waits in an event loop, and in which order."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolResource,
    CachePoolUsage,
    CacheResidencyPool,
    Lease,
    SegmentError,
)
from shmcache.pool import watcher
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
from tests.support import Worker, wait_until

REFUSAL = CachePoolError.BudgetExceeded(CachePoolResource.HOST, 11, 10)
BLOCK = 64 << 10


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS, owners_max=200) as pool:
        yield pool


@pytest.fixture
def arena(pool_name: str) -> Iterator[CacheResidencyPool]:
    limits = CachePoolLimits(1, 4 * BLOCK, 1, 0)
    with CacheResidencyPool.create(pool_name, limits, arena_bytes=4 * BLOCK) as pool:
        yield pool


# ---- without waiting -----------------------------------------------------------------------------


def test_room_needs_no_watcher(pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher.Watcher, "add", None)

    async def main() -> None:
        async with pool.reserve_async(WHOLE) as token:
            assert token.usage == WHOLE
            assert pool.report().current_host_bytes == 10
        assert pool.report().current_host_bytes == 0
        with await asyncio.create_task(pool.reserve_async(ONE, timeout=5)):
            assert pool.report().current_host_bytes == 1

    run(main())
    assert pool.report().current_host_bytes == 0


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, 0.02])
def test_the_refusal_is_raised_when_time_is_up(pool: CacheResidencyPool, timeout: float) -> None:
    token = pool.reserve(WHOLE)

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(CachePoolError.BudgetExceeded) as caught:
                await pool.reserve_async(ONE, timeout=timeout)
            assert caught.value == REFUSAL
        token.release()
        await nothing_left(pool)

    run(main())


def test_what_can_never_fit_is_refused_at_once(pool: CacheResidencyPool) -> None:
    kept = pool.reserve(ONE)

    async def main() -> None:
        with pytest.raises(CachePoolError.BudgetExceeded):
            await pool.reserve_async(CachePoolUsage(host_bytes=11))

    run(main())
    kept.release()


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), ("1", TypeError)])
def test_a_timeout_outside_its_domain_is_told(
    pool: CacheResidencyPool, timeout: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="timeout"):
        run(pool.reserve_async(ONE, timeout=timeout))
    with pytest.raises(TypeError, match="usage"):
        run(pool.reserve_async("1"))  # type: ignore[arg-type]


def test_an_observer_admits_nothing(pool: CacheResidencyPool) -> None:
    with (
        CacheResidencyPool.observe(pool.name) as observer,
        pytest.raises(TypeError, match="observer"),
    ):
        run(observer.reserve_async(ONE))


# ---- waiting -------------------------------------------------------------------------------------


def test_a_release_ends_the_waiting_and_the_loop_runs_meanwhile(pool: CacheResidencyPool) -> None:
    token = pool.reserve(WHOLE)

    async def main() -> None:
        task = await begin(pool)
        assert waiter_bits(pool) == 1
        token.release()  # which only a loop that runs can do
        assert (await task).usage == ONE
        assert pool.report().current_host_bytes == 1
        await until(lambda: waiter_bits(pool) == 0, "no bit is left")

    run(main())


def test_another_process_releases_or_is_killed(pool: CacheResidencyPool) -> None:
    """A release wakes; a death is found by the watcher, for nobody else sweeps."""
    with Worker("from shmcache import CachePoolUsage, CacheResidencyPool") as other:
        other.call("pool = CacheResidencyPool.attach(name)", name=pool.name)

        async def main(end: Callable[[], object]) -> None:
            other.call("token = pool.reserve(CachePoolUsage(host_bytes=10), timeout=60)")
            task = await begin(pool)
            end()
            (await task).release()
            await nothing_left(pool)

        run(main(lambda: other.call("token.release()")))
        run(main(other.kill))
    assert len(pool.owners()) == 1


def test_thousands_wait_with_one_thread_and_are_served_in_order(pool: CacheResidencyPool) -> None:
    count = 3000
    token = pool.reserve(WHOLE)
    served: list[int] = []

    async def wait(number: int) -> None:
        async with pool.reserve_async(WHOLE):
            assert pool.report().current_host_bytes == 10
            served.append(number)

    async def main() -> None:
        before = set(threading.enumerate())
        tasks = [asyncio.create_task(wait(number)) for number in range(count)]
        await until(lambda: waiting_here() == count, "all wait")
        assert len(watcher_threads()) == 1
        assert set(threading.enumerate()) - before <= set(watcher_threads())
        assert waiter_bits(pool) == 1
        token.release()
        await asyncio.gather(*tasks)

    run(main())
    assert served == list(range(count))
    assert pool.report().current_host_bytes == 0


def test_who_asks_again_does_not_overtake_who_waits(pool: CacheResidencyPool) -> None:
    """Without a queue, a task that gives back and asks in one step would get it every time."""

    async def main() -> None:
        token = await pool.reserve_async(WHOLE)
        task = await begin(pool, WHOLE)
        token.release()
        again = asyncio.create_task(pool.reserve_async(WHOLE))
        done, _ = await asyncio.wait([task, again], return_when=asyncio.FIRST_COMPLETED)
        assert done == {task}
        (await task).release()
        (await again).release()

    run(main())


def test_one_that_does_not_fit_holds_up_only_its_equals(pool: CacheResidencyPool) -> None:
    kept = pool.reserve(CachePoolUsage(host_bytes=5))

    async def main() -> None:
        large = await begin(pool, WHOLE)
        for usage in (CachePoolUsage(host_bytes=5), CachePoolUsage(device_bytes=10)):
            (await pool.reserve_async(usage)).release()
        assert not large.done()
        kept.release()
        (await large).release()

    run(main())


def test_blocks_are_waited_for(arena: CacheResidencyPool) -> None:
    key = b"k" * 32

    async def store() -> None:
        async with arena.allocate_async(BLOCK) as block:
            block.publish(key).lease.release()

    async def main() -> None:
        blocks = [await arena.allocate_async(BLOCK) for _ in range(4)]
        with pytest.raises(CachePoolError.BudgetExceeded):
            await arena.allocate_async(BLOCK, timeout=0.01)
        task = asyncio.create_task(store())
        await until(lambda: waiting_here() == 1, "it waits")
        blocks.pop().release()
        await task
        assert arena.contains(key)
        arena.invalidate(key)
        for block in blocks:
            block.release()
        await nothing_left(arena)

    run(main())


def test_a_reservation_turns_into_a_block_that_was_waited_for(pool_name: str) -> None:
    """The axis has room for it from the start, the arena not."""
    limits = CachePoolLimits(1, 5 * BLOCK, 1, 0)
    with CacheResidencyPool.create(pool_name, limits, arena_bytes=4 * BLOCK) as arena:

        async def main() -> None:
            blocks = [arena.allocate(BLOCK) for _ in range(4)]
            token = arena.reserve(CachePoolUsage(host_bytes=BLOCK))
            with pytest.raises(SegmentError.ArenaFull) as caught:
                await arena.allocate_async(BLOCK, reservation=token, timeout=0.01)
            assert caught.value.holders == ((os.getpid(), 4 * BLOCK),)
            task = asyncio.create_task(arena.allocate_async(BLOCK, reservation=token))
            await until(lambda: waiting_here() == 1, "it waits")
            blocks.pop().release()
            blocks.append(await task)
            assert token.released
            task = asyncio.create_task(arena.allocate_async(BLOCK, reservation=token))
            with pytest.raises(ValueError, match="released already"):
                await task
            for block in blocks:
                block.release()
            await nothing_left(arena)

        run(main())


def test_what_nobody_leases_is_evicted_for_a_reservation(arena: CacheResidencyPool) -> None:
    async def main() -> None:
        lease = arena.allocate(4 * BLOCK).publish(b"k" * 32).lease
        task = await begin(arena, CachePoolUsage(host_bytes=BLOCK))
        lease.release()
        (await task).release()
        assert not arena.contains(b"k" * 32)
        await nothing_left(arena)

    run(main())


def test_one_makes_a_block_and_the_others_lease_it(arena: CacheResidencyPool) -> None:
    """Coroutines of this process, and one of another that is killed with its claim."""
    key = b"k" * 32
    made = []

    async def need() -> bytes:
        async with arena.claim_async(key) as answer:
            if isinstance(answer, Lease):
                return bytes(answer.memoryview())
            made.append(answer)
            await asyncio.sleep(0)
            async with arena.allocate_async(4) as block:
                block.memoryview()[:] = b"data"
                block.publish(key).lease.release()
            return b"data"

    with Worker("from shmcache import CacheResidencyPool") as other:
        other.call("pool = CacheResidencyPool.attach(name)", name=arena.name)
        other.call("claim = pool.claim(b'k' * 32)")

        async def main() -> None:
            assert await arena.claim_async(key, timeout=0.01) is None
            assert await arena.claim_async(key, timeout=0) is None
            tasks = [asyncio.create_task(need()) for _ in range(50)]
            await until(lambda: waiting_here() == 50, "all wait")
            other.kill()
            assert set(await asyncio.gather(*tasks)) == {b"data"}
            assert len(made) == 1
            arena.invalidate(key)
            await nothing_left(arena)

        run(main())


# ---- the watcher ---------------------------------------------------------------------------------


def test_one_watcher_serves_all_pools_and_loops(pool: CacheResidencyPool) -> None:
    """Three loops in three threads, each with a pool of its own and a handle of a common one."""
    ready = threading.Barrier(4)
    released = threading.Event()
    results: list[Any] = []

    def work() -> None:
        async def main() -> None:
            with CacheResidencyPool(LIMITS) as own:
                token = own.reserve(WHOLE)
                tasks = [await begin(own), await begin(pool)]
                await asyncio.get_running_loop().run_in_executor(None, ready.wait)
                await asyncio.get_running_loop().run_in_executor(None, released.wait)
                token.release()
                for task in tasks:
                    results.append((await task).release())

        run(main())

    token = pool.reserve(WHOLE)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait()
    assert waiting_here() == 6
    assert len(watcher_threads()) == 1
    token.release()
    released.set()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    run(nothing_left(pool))


def test_the_watcher_ends_when_nobody_waits_and_starts_again(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_IDLE_NS", 1)

    async def main() -> None:
        for _ in range(3):
            token = pool.reserve(WHOLE)
            task = await begin(pool)
            assert len(watcher_threads()) == 1
            token.release()
            (await task).release()
            await until(lambda: not watcher_threads(), "the thread ends")
            assert waiter_bits(pool) == 0

    run(main())


def test_waiting_for_a_full_arena_is_no_spinning(
    arena: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt in vain must not count as a release: who waits would wake itself for ever."""
    attempts: list[int] = []
    once, at_once = CacheResidencyPool._allocate_once, CacheResidencyPool._allocate_at_once

    def counted(attempt: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            attempts.append(1)
            return attempt(*arguments)

        return count

    monkeypatch.setattr(CacheResidencyPool, "_allocate_once", counted(once))
    monkeypatch.setattr(CacheResidencyPool, "_allocate_at_once", counted(at_once))
    blocks = [arena.allocate(BLOCK) for _ in range(4)]
    with pytest.raises(CachePoolError.BudgetExceeded):
        arena.allocate(BLOCK, timeout=0.5)
    with pytest.raises(CachePoolError.BudgetExceeded):
        run(arena.allocate_async(BLOCK, timeout=0.5))
    assert len(attempts) < 200  # two for each slice of 50 ms; it was 150,000
    blocks.clear()


@pytest.fixture(scope="module")
def uvloop() -> Any:
    """The module; its first loop opens a pipe that stays for the life of the process."""
    module = pytest.importorskip("uvloop", reason="uvloop is not installed (extra `test`)")
    with asyncio.Runner(loop_factory=module.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))
    return module


def test_any_event_loop_will_do(pool: CacheResidencyPool, uvloop: Any) -> None:
    token = pool.reserve(WHOLE)

    async def main() -> None:
        task = await begin(pool)
        gone = await begin(pool)
        gone.cancel()
        token.release()
        (await task).release()
        with pytest.raises(CachePoolError.BudgetExceeded), await pool.reserve_async(WHOLE):
            await pool.reserve_async(ONE, timeout=0.01)
        await nothing_left(pool)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_more_pools_than_the_kernel_waits_for_at_once(pool: CacheResidencyPool) -> None:
    """The others are looked at every few milliseconds."""

    async def main() -> None:
        pools = [CacheResidencyPool(CachePoolLimits(1, 1, 1, 1)) for _ in range(130)]
        tokens = [pool.reserve(ONE) for pool in pools]
        tasks = [asyncio.create_task(pool.reserve_async(ONE)) for pool in pools]
        await until(lambda: waiting_here() == 130, "all wait")
        for token in reversed(tokens):
            token.release()
        for task in tasks:
            (await task).release()
        for one in pools:
            one.close()

    run(main())


def test_no_thread_can_be_started(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    wait_until(lambda: not watcher_threads(), "the last watcher ends")
    token = pool.reserve(WHOLE)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(SegmentError.HostError) as caught:
            run(pool.reserve_async(ONE))
        assert caught.value == SegmentError.HostError("clone", "EAGAIN")

    async def main() -> None:
        task = await begin(pool)
        token.release()
        (await task).release()
        await nothing_left(pool)

    run(main())
