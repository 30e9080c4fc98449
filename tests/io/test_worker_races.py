"""I5, I8, I9, I12 and other races: threads let go by one barrier, every outcome accounted for."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from shmcache.errors import CacheIoExecutionStateError, CacheIoWorkerError
from shmcache.io import STOPPED, CacheIoWorker
from tests.io.tasks import (
    Call,
    Output,
    Submission,
    Task,
    Worker,
    busy_worker_of,
    key,
    together,
    wait_blocked,
    wait_idle,
    worker_of,
)
from tests.support import PATIENCE_S

ROUNDS = 50


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after a few bytecodes, so that they meet in more places."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def answer(submission: Submission) -> str:
    """What its ticket says, as a word."""
    try:
        return f"output {submission.ticket.wait(PATIENCE_S).value}"
    except CacheIoWorkerError as error:
        return type(error).__name__


def test_i5_one_execution_for_64_submitters() -> None:
    with worker_of(64) as (worker, log):
        gate = Task("gate", gated=True)
        worker.prepare(key(0), gate).enqueue()
        # Without it, the first could be done and its key free before the last prepares.
        all_in = threading.Barrier(64, gate.open)

        def submit(number: int) -> tuple[bool, Output]:
            submission = worker.prepare(key(1), Task(number))
            submission.enqueue()
            all_in.wait(PATIENCE_S)
            return submission.joined, submission.ticket.wait(PATIENCE_S)

        answers = together(*(partial(submit, number) for number in range(64)))
    assert len({id(output) for _, output in answers}) == 1
    assert [joined for joined, _ in answers].count(False) == 1
    assert len(log.executed) == 2


def test_i8_before_during_and_after() -> None:
    with busy_worker_of(3) as (worker, _, gated):
        good, bad = worker.prepare(key(1), Task(1)), worker.prepare(key(2), Task(OSError("no")))
        before = [Call(answer, submission) for submission in (good, bad) for _ in range(4)]
        for submission in (good, bad):
            submission.enqueue()
        during = [Call(answer, submission) for submission in (good, bad) for _ in range(4)]
        gated.open()
        for calls in (before, during):
            assert [call.result() for call in calls] == ["output 1"] * 4 + ["OperationFailed"] * 4
        worker.retire(good.ticket)
        assert [answer(good), answer(good), answer(bad)] == ["output 1"] * 2 + ["OperationFailed"]
        assert good.ticket.wait() is good.ticket.wait(timeout=0)


def test_i9_cancel_against_the_end_of_a_running_task(quick_switches: None) -> None:
    """Either the output is delivered, or it is discarded and `cancel` said True; never both.

    The head start that the task gets grows while cancelling wins and shrinks while it loses, so
    that most of the rounds are close to the edge, on any machine.
    """
    running, may_end = threading.Semaphore(0), threading.Semaphore(0)
    discarded: list[int] = []

    def execute(task: int) -> int:
        running.release()
        assert may_end.acquire(timeout=PATIENCE_S)
        return task

    head_start, outcomes = 0, Counter[bool]()
    with CacheIoWorker(1, "race", execute, discarded.append) as worker:
        for number in range(1000):
            submission = worker.prepare(key(number), number)
            submission.enqueue()
            assert running.acquire(timeout=PATIENCE_S)
            may_end.release()
            for _ in range(head_start):
                pass
            cancelled = submission.ticket.cancel()
            try:
                assert submission.ticket.wait(PATIENCE_S) == number
                delivered = True
            except CacheIoWorkerError.Cancelled:
                delivered = False
            submission.ticket.wait_for_task_resources(PATIENCE_S)
            assert cancelled == (number in discarded) == (not delivered)
            assert submission.ticket.cancel() is False
            outcomes[cancelled] += 1
            head_start = max(0, head_start + (100 if cancelled else -100))
    assert len(discarded) == outcomes[True]
    assert outcomes[True] + outcomes[False] == 1000
    assert len(outcomes) == 2


def test_i9_only_one_of_many_cancels_wins() -> None:
    with busy_worker_of(1) as (worker, log, gated):
        tickets = [worker.prepare(key(1000), Task("joiner")).ticket for _ in range(8)]
        assert sorted(together(*(ticket.cancel for ticket in tickets))) == [False] * 7 + [True]
        gated.open()
        tickets[0].wait_for_task_resources(PATIENCE_S)
        assert log.discarded == ["gated"]


def test_i12_close_while_submitters_are_blocked() -> None:
    with busy_worker_of(2) as (worker, log, gated):
        queued = [worker.prepare(key(number), Task(number)) for number in range(2)]
        for submission in queued:
            submission.enqueue()
        blocked = [worker.prepare(key(number), Task(number)) for number in range(10, 18)]
        calls = [Call(submission.enqueue) for submission in blocked]
        wait_blocked(worker, 8)
        closing = Call(worker.close)
        for call, submission in zip(calls, blocked, strict=True):  # while the gate is closed
            outcome = call.result()
            assert (outcome.joined, outcome.backpressure) == (False, True)
            submission.ticket.wait_for_task_resources(PATIENCE_S)
            with pytest.raises(CacheIoWorkerError.OperationFailed) as caught:
                submission.ticket.wait(PATIENCE_S)
            assert caught.value.message == STOPPED
        gated.open()
        closing.result()
        assert [answer(submission) for submission in queued] == ["output 0", "output 1"]
        assert log.executed == ["gated", 0, 1]


def test_everyone_is_admitted_in_the_end() -> None:
    """Sixteen submitters through one place: none is forgotten when the place becomes free."""
    with worker_of(1) as (worker, log):
        submissions = [worker.prepare(key(number), Task(number)) for number in range(16)]
        outcomes = together(*(submission.enqueue for submission in submissions))
        assert sorted(map(answer, submissions)) == sorted(f"output {n}" for n in range(16))
        assert {outcome.peak_occupancy for outcome in outcomes} == {1}
        assert sorted(map(str, log.executed)) == sorted(map(str, range(16)))


def test_one_cancelled_submitter_among_the_blocked() -> None:
    """A cancellation frees no place, and wakes no one into a place that is not free."""
    with busy_worker_of(1) as (worker, log, gated):
        worker.prepare(key(0), Task(0)).enqueue()
        submissions = [worker.prepare(key(number), Task(number)) for number in range(1, 5)]
        calls = [Call(submission.enqueue) for submission in submissions]
        wait_blocked(worker, 4)
        assert submissions[2].ticket.cancel()
        assert calls[2].result().backpressure
        wait_blocked(worker, 3)
        gated.open()
        assert [answer(s) for s in submissions] == ["output 1", "output 2", "Cancelled", "output 4"]
        assert 3 not in log.executed
        assert all(call.result().peak_occupancy == 1 for call in calls)


def test_cancel_and_retire_of_a_blocked_submitter_at_once() -> None:
    """Its key may be free, and another's, before the submitter wakes up: it was cancelled."""
    with busy_worker_of(1) as (worker, _, gated):
        worker.prepare(key(0), Task(0)).enqueue()
        for _ in range(ROUNDS):
            submission = worker.prepare(key(1), Task(1))
            call = Call(submission.enqueue)
            wait_blocked(worker)
            assert submission.ticket.cancel()
            worker.retire(submission.ticket)
            with worker.prepare(key(1), Task("new")) as new:
                assert not new.joined
                assert call.result().backpressure
            assert answer(submission) == "Cancelled"
        gated.open()


def test_close_against_enqueue(quick_switches: None) -> None:
    """Executed or refused as stopped; in both cases the ticket and the resources are resolved."""
    outcomes: Counter[str] = Counter()
    for _ in range(ROUNDS):
        with worker_of(2) as (worker, log):
            submissions = [worker.prepare(key(number), Task(number)) for number in range(3)]
            together(worker.close, *(submission.enqueue for submission in submissions))
            answers = [answer(submission) for submission in submissions]
            for submission in submissions:
                submission.ticket.wait_for_task_resources(PATIENCE_S)
            outcomes.update(answers)
            executed = sorted(f"output {number}" for number in log.executed)
            assert sorted(a for a in answers if a != "OperationFailed") == executed
    assert sum(outcomes.values()) == 3 * ROUNDS


def test_close_from_many_threads() -> None:
    with busy_worker_of(1) as (worker, log, gated):
        calls = [Call(worker.close) for _ in range(8)]
        gated.open()
        for call in calls:
            call.result()
        worker.close()
        assert not worker._thread.is_alive()
        assert log.executed == ["gated"]


def test_two_threads_enqueue_one_submission() -> None:
    def attempt(submission: Submission) -> str:
        try:
            submission.enqueue()
        except RuntimeError as error:
            return str(error)
        return "enqueued"

    with worker_of(2) as (worker, log):
        for number in range(ROUNDS):
            submission = worker.prepare(key(number), Task(number))
            words = together(*[partial(attempt, submission)] * 4)
            assert words.count("enqueued") == 1
            assert sum("before" in word for word in words) == 3
            submission.ticket.wait(PATIENCE_S)
        assert log.executed == list(range(ROUNDS))


def test_close_of_a_submission_against_its_enqueue() -> None:
    """The first counts; the joiner's answer tells which it was."""
    outcomes: Counter[str] = Counter()
    with worker_of(2) as (worker, log):
        for number in range(ROUNDS):
            owner, joiner = (
                worker.prepare(key(number), Task(number)),
                worker.prepare(key(number), Task("joiner")),
            )

            def enqueue(owner: Submission = owner) -> None:
                try:
                    owner.enqueue()
                except RuntimeError:
                    return

            together(owner.close, enqueue)
            outcomes[answer(joiner).split()[0]] += 1
            joiner.ticket.wait_for_task_resources(PATIENCE_S)
        assert len(log.executed) == outcomes["output"]
        assert outcomes["output"] + outcomes["Cancelled"] == ROUNDS


def test_a_key_retired_before_its_enqueue() -> None:
    """[H] Nobody waits for ever, and a newer operation of the same key is left alone."""
    with worker_of(2) as (worker, log):
        owner, joiner = worker.prepare(key(1), Task("old")), worker.prepare(key(1), Task("joiner"))
        worker.retire(owner.ticket)
        newer = worker.prepare(key(1), Task("new"))
        assert not newer.joined
        with pytest.raises(CacheIoWorkerError.Execution) as caught:
            owner.enqueue()
        unknown = CacheIoExecutionStateError.UnknownOperation()
        assert caught.value.error == unknown
        assert caught.value.__cause__ == unknown
        with pytest.raises(CacheIoWorkerError.OperationFailed) as failed:
            joiner.ticket.wait(0)
        assert failed.value.message == str(unknown)
        owner.ticket.wait_for_task_resources(0)
        newer.enqueue()
        assert newer.ticket.wait(PATIENCE_S).value == "new"
        assert log.executed == ["new"]


def test_retire_leaves_queued_and_running_work_alone() -> None:
    with busy_worker_of(1) as (worker, log, gated):
        running = worker.prepare(key(1000), Task("joiner"))
        queued = worker.prepare(key(1), Task("queued"))
        queued.enqueue()
        for ticket in (running.ticket, queued.ticket):
            worker.retire(ticket)
            ticket.cancel()
            worker.retire(ticket)
        assert worker.prepare(key(1), Task("joiner")).joined
        assert worker.prepare(key(1000), Task("joiner")).joined
        gated.open()
        wait_idle(worker)
        assert log.executed == ["gated"]


def test_a_storm_of_everything(quick_switches: None) -> None:
    """Eight threads prepare, enqueue, cancel, retire and abandon five keys; then all is quiet."""

    def live(worker: Worker, seed: int) -> Counter[str]:
        words: Counter[str] = Counter()
        for turn in range(120):
            submission = worker.prepare(key((seed * 7 + turn) % 5), Task(turn))
            if (seed + turn) % 4 == 0:
                submission.close()
            else:
                try:
                    submission.enqueue()
                except CacheIoWorkerError.Execution:
                    words["retired by another"] += 1
            if (seed + turn) % 3 == 0:
                submission.ticket.cancel()
            if (seed + turn) % 5 == 0:
                worker.retire(submission.ticket)
            words[answer(submission).split()[0]] += 1
            submission.ticket.wait_for_task_resources(PATIENCE_S)
            worker.retire(submission.ticket)
        return words

    with worker_of(2) as (worker, log):
        total: Counter[str] = sum(
            together(*(partial(live, worker, seed) for seed in range(8))), Counter()
        )
        wait_idle(worker)
        state = worker._engine._state
        assert (state.queued, state._phases) == (0, {})
        assert state.peak_queued <= 2
        del total["retired by another"]
        assert total.total() == 8 * 120
        assert set(total) <= {"output", "Cancelled", "OperationFailed"}
        assert len(log.executed) <= 8 * 120
