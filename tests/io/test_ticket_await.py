"""Tickets in event loops: awaited, by many, cancelled awaiters, loops that are gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shmcache.errors import CacheIoWorkerError
from shmcache.io import CacheIoTicket
from tests.io.tasks import Call, Output, Task, Worker, busy_worker_of, key, worker_of
from tests.support import PATIENCE_S


async def result_of(ticket: CacheIoTicket[Output]) -> Output:
    return await ticket


def subscribed(ticket: CacheIoTicket[Any]) -> int:
    return len(ticket._completion.resolved._wakes)


async def until_subscribed(ticket: CacheIoTicket[Any], waiters: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while subscribed(ticket) != waiters:
            await asyncio.sleep(0)


def test_awaited_before_and_after_the_end() -> None:
    async def main(worker: Worker, gated: Task) -> None:
        running = worker.prepare(key(1000), Task("joiner")).ticket
        waiting = [asyncio.create_task(result_of(running)) for _ in range(5)]
        await until_subscribed(running, 5)
        gated.open()
        outputs = await asyncio.gather(*waiting)
        assert {id(output) for output in outputs} == {id(await running)}
        assert outputs[0].value == "gated"
        assert running.wait() is outputs[0]
        assert subscribed(running) == 0

    with busy_worker_of(2) as (worker, _, gated):
        asyncio.run(main(worker, gated))


@pytest.mark.parametrize("error", [CacheIoWorkerError.OperationFailed("no space")])
def test_failures_are_raised(error: CacheIoWorkerError) -> None:
    async def main(worker: Worker) -> None:
        submission = worker.prepare(key(1), Task(OSError("no space")))
        submission.enqueue()
        for _ in range(2):
            with pytest.raises(CacheIoWorkerError) as caught:
                await submission.ticket
            assert caught.value == error

    with worker_of(1) as (worker, _):
        asyncio.run(main(worker))


def test_cancelling_the_operation_is_no_cancelled_coroutine() -> None:
    """The awaiter gets our error; asyncio must not take it for a cancellation of the awaiter."""

    async def main(worker: Worker) -> None:
        running = worker.prepare(key(1000), Task("joiner")).ticket
        waiting = asyncio.create_task(result_of(running))
        await until_subscribed(running, 1)
        assert running.cancel()
        with pytest.raises(CacheIoWorkerError.Cancelled) as caught:
            await waiting
        assert not isinstance(caught.value, asyncio.CancelledError)
        assert not waiting.cancelled()

    with busy_worker_of(1) as (worker, _, _):
        asyncio.run(main(worker))


def test_a_cancelled_awaiter_cancels_nothing_and_leaves_nothing() -> None:
    async def main(worker: Worker, gated: Task) -> None:
        running = worker.prepare(key(1000), Task("joiner")).ticket
        impatient = asyncio.create_task(result_of(running))
        patient = asyncio.create_task(result_of(running))
        await until_subscribed(running, 2)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert subscribed(running) == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await running
        gated.open()
        assert (await patient).value == "gated"

    with busy_worker_of(1) as (worker, log, gated):
        asyncio.run(main(worker, gated))
        assert log.discarded == []


def test_the_end_and_a_cancelled_awaiter_at_once() -> None:
    """The wake-up may be on its way when the awaiter is cancelled; it must find a done future."""

    complaints: list[dict[str, Any]] = []

    async def main(worker: Worker, number: int) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        submission = worker.prepare(key(number), Task(number))
        waiting = asyncio.create_task(result_of(submission.ticket))
        await until_subscribed(submission.ticket, 1)
        submission.enqueue()
        submission.ticket.wait(PATIENCE_S)  # blocks the loop: both arrive in its next turn
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with worker_of(1) as (worker, _):
        for number in range(20):
            asyncio.run(main(worker, number), debug=True)
    assert complaints == []


def test_a_loop_that_is_gone_disturbs_nobody() -> None:
    with busy_worker_of(1) as (worker, _, gated):
        running = worker.prepare(key(1000), Task("joiner")).ticket
        loop = asyncio.new_event_loop()
        waiting = result_of(running).__await__()
        loop.call_soon(lambda: next(waiting))
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert subscribed(running) == 1
        loop.close()
        gated.open()
        assert running.wait(PATIENCE_S).value == "gated"
        after = worker.prepare(key(1), Task("after"))
        after.enqueue()
        assert after.ticket.wait(PATIENCE_S).value == "after"
        waiting.close()


def test_two_loops_in_two_threads() -> None:
    with busy_worker_of(1) as (worker, _, gated):
        running = worker.prepare(key(1000), Task("joiner")).ticket

        def one(barrier: threading.Barrier) -> Callable[[], Output]:
            async def main() -> Output:
                barrier.wait(PATIENCE_S)
                return await running

            return lambda: asyncio.run(main())

        barrier = threading.Barrier(3)
        calls = [Call(one(barrier)) for _ in range(2)]
        barrier.wait(PATIENCE_S)
        gated.open()
        assert calls[0].result() is calls[1].result()


def test_without_a_loop_it_says_so() -> None:
    with busy_worker_of(1) as (worker, _, _):
        running = worker.prepare(key(1000), Task("joiner")).ticket
        with pytest.raises(RuntimeError, match="no running event loop"):
            next(running.__await__())
        assert subscribed(running) == 0
