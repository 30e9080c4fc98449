"""I4: the worked examples of the contract, by their numbers; I3, I6, I10, I13 beside them."""

from __future__ import annotations

import threading

import pytest

from shmcache.errors import CacheIoExecutionStateError, CacheIoWorkerError
from shmcache.io import CRASHED, STOPPED, CacheIoSubmissionOutcome, CacheIoWorker
from tests.io.tasks import (
    Call,
    Log,
    Output,
    Task,
    busy_worker_of,
    key,
    wait_blocked,
    wait_idle,
    worker_of,
)
from tests.support import PATIENCE_S

Outcome = CacheIoSubmissionOutcome
Cancelled, OperationFailed = CacheIoWorkerError.Cancelled, CacheIoWorkerError.OperationFailed


def test_i4_1_coalescing() -> None:
    with worker_of(2) as (worker, log):
        second = Task(71)
        owner, joiner = worker.prepare(key(1), Task(70)), worker.prepare(key(1), second)
        assert (owner.joined, joiner.joined) == (False, True)
        assert (owner.joined_task, joiner.joined_task) == (None, second)
        assert joiner.enqueue() == Outcome(True, False, 0)
        assert joiner.joined_task is None
        assert owner.enqueue() == Outcome(False, False, 1)
        outputs = [joiner.ticket.wait(PATIENCE_S), owner.ticket.wait(PATIENCE_S)]
        assert outputs[0] is outputs[1]
        assert outputs[0].value == 70
        assert owner.ticket.shares_completion_with(joiner.ticket)
        assert owner.ticket.key == key(1)
        assert log.executed == [70]


def test_i4_2_backpressure() -> None:
    with busy_worker_of(1) as (worker, log, gated):
        waiting = Task("b", gated=True)
        b, c = worker.prepare(key(2), waiting), worker.prepare(key(3), Task("c"))
        assert b.enqueue() == Outcome(False, False, 1)
        call = Call(c.enqueue)
        wait_blocked(worker)
        gated.open()
        assert call.result() == Outcome(False, True, 1)
        waiting.open()
        assert c.ticket.wait(PATIENCE_S).value == "c"
        assert log.executed == ["gated", "b", "c"]


def test_i4_3_cancelling_a_blocked_submitter() -> None:
    with busy_worker_of(1) as (worker, log, _):
        worker.prepare(key(2), Task("b")).enqueue()
        c = worker.prepare(key(3), Task("c"))
        call = Call(c.enqueue)
        wait_blocked(worker)
        assert c.ticket.cancel()
        assert call.result() == Outcome(False, True, 1)  # while the gate is still closed
        with pytest.raises(Cancelled) as caught:
            c.ticket.wait()
        assert caught.value.generation == 21
        c.ticket.wait_for_task_resources()
        again = worker.prepare(key(3), Task("again"))
        assert again.joined
        with pytest.raises(Cancelled):
            again.ticket.wait()
        worker.retire(c.ticket)
        assert not worker.prepare(key(3), Task("new")).joined
        assert log.executed == ["gated"]


def test_i4_4_cancelling_queued_work_frees_no_place() -> None:
    with busy_worker_of(1) as (worker, log, gated):
        b, c = worker.prepare(key(2), Task("b")), worker.prepare(key(3), Task("c"))
        b.enqueue()
        assert (b.ticket.cancel(), b.ticket.cancel()) == (True, False)
        with pytest.raises(Cancelled):
            b.ticket.wait()
        with pytest.raises(TimeoutError):
            b.ticket.wait_for_task_resources(0)
        call = Call(c.enqueue)
        wait_blocked(worker)
        assert not call.returned
        gated.open()
        assert call.result() == Outcome(False, True, 1)
        b.ticket.wait_for_task_resources(PATIENCE_S)
        c.ticket.wait(PATIENCE_S)
        assert log.executed == ["gated", "c"]
        assert log.discarded == []


def test_i4_5_cancelling_running_work() -> None:
    with busy_worker_of(1) as (worker, log, gated):
        a = worker.prepare(key(1000), Task("joiner"))
        assert a.joined
        assert a.ticket.cancel()
        with pytest.raises(Cancelled):
            a.ticket.wait()
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            a.ticket.wait_for_task_resources(0.05)
        assert worker.prepare(key(1000), Task("joiner")).joined
        gated.open()
        a.ticket.wait_for_task_resources(PATIENCE_S)
        assert log.discarded == ["gated"]
        wait_idle(worker)
        assert not worker.prepare(key(1000), Task("new")).joined


def test_i4_6_failures() -> None:
    with worker_of(4) as (worker, log):
        tasks = [
            Task(OSError("no space")),
            Task(SystemExit(3)),
            Task(KeyError()),
            Task(KeyboardInterrupt()),
            Task("fine"),
        ]
        submissions = [worker.prepare(key(number), task) for number, task in enumerate(tasks)]
        for submission in submissions:
            submission.enqueue()
        errors = [OperationFailed("no space"), OperationFailed(CRASHED)]
        errors += [OperationFailed("KeyError"), OperationFailed(CRASHED)]
        for submission, error in zip(submissions, errors, strict=False):
            with pytest.raises(OperationFailed) as caught:
                submission.ticket.wait(PATIENCE_S)
            assert caught.value == error
            submission.ticket.wait_for_task_resources(PATIENCE_S)
        assert submissions[4].ticket.wait(PATIENCE_S).value == "fine"
        assert log.discarded == []


def test_i4_7_abandoned_owner() -> None:
    with worker_of(1) as (worker, log):
        with worker.prepare(key(4), Task("owner")) as owner:
            joiner = worker.prepare(key(4), Task("joiner"))
            joiner.enqueue()
            waiting = Call(joiner.ticket.wait)
        with pytest.raises(Cancelled) as caught:
            waiting.result()
        assert caught.value == Cancelled(21)
        owner.ticket.wait_for_task_resources()
        assert owner.ticket.cancel() is False
        assert not worker.prepare(key(4), Task("new")).joined
        assert log.executed == []


def test_i4_8_close() -> None:
    with worker_of(3) as (worker, log):
        tickets = []
        gated = Task(0, gated=True)
        for number in range(3):
            submission = worker.prepare(key(number), Task(number) if number else gated)
            submission.enqueue()
            tickets.append(submission.ticket)
        fourth = worker.prepare(key(9), Task(9))
        closing = Call(worker.close)
        gated.wait_running()
        assert not closing.returned
        gated.open()
        closing.result()
        assert log.executed == [0, 1, 2]
        assert [ticket.wait(0).value for ticket in tickets] == [0, 1, 2]
        outcome = fourth.enqueue()
        assert (outcome.joined, outcome.backpressure) == (False, False)
        assert outcome.peak_occupancy in (2, 3)
        with pytest.raises(OperationFailed) as caught:
            fourth.ticket.wait(0)
        assert caught.value.message == STOPPED
        fourth.ticket.wait_for_task_resources(0)
        with pytest.raises(RuntimeError, match="closed"):
            worker.prepare(key(9), Task(9))


def test_i4_9_stale_ticket() -> None:
    with worker_of(2) as (worker, log):
        old = worker.prepare(key(5), Task("old"))
        old.enqueue()
        old.ticket.wait(PATIENCE_S)
        worker.retire(old.ticket)
        wait_idle(worker)
        new = worker.prepare(key(5), Task("new"))
        assert not new.joined
        assert not new.ticket.shares_completion_with(old.ticket)
        assert old.ticket.cancel() is False
        worker.retire(old.ticket)
        assert worker.prepare(key(5), Task("joiner")).joined
        new.enqueue()
        assert new.ticket.wait(PATIENCE_S).value == "new"
        assert log.executed == ["old", "new"]


def test_i3_no_room_no_thread() -> None:
    log, before = Log(), set(threading.enumerate())
    with pytest.raises(CacheIoWorkerError.Execution) as caught:
        CacheIoWorker(0, "never", log.execute, log.discard)
    assert caught.value.error == CacheIoExecutionStateError.ZeroCapacity()
    assert set(threading.enumerate()) == before


def test_i6_first_in_first_out() -> None:
    with busy_worker_of(50) as (worker, log, gated):
        tickets = []
        for number in range(50):
            submission = worker.prepare(key(number), Task(number))
            assert submission.enqueue() == Outcome(False, False, number + 1)
            tickets.append(submission.ticket)
        gated.open()
        assert [ticket.wait(PATIENCE_S).value for ticket in tickets] == list(range(50))
        assert log.executed == ["gated", *range(50)]


@pytest.mark.parametrize("error", [OSError("broken"), SystemExit(1)])
def test_i10_a_broken_discard_is_survived(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def discard(output: Output) -> None:
        raise error

    with CacheIoWorker(2, "broken", Task.__call__, discard) as worker:
        gated = Task("cancelled", gated=True)
        first = worker.prepare(key(1), gated)
        first.enqueue()
        gated.wait_running()
        assert first.ticket.cancel()
        gated.open()
        first.ticket.wait_for_task_resources(PATIENCE_S)
        second = worker.prepare(key(2), Task("fine"))
        second.enqueue()
        assert second.ticket.wait(PATIENCE_S).value == "fine"
    assert "cannot be discarded" in caplog.text


def test_i13_a_cancelled_key_stays_taken() -> None:
    with worker_of(1) as (worker, _):
        owner = worker.prepare(key(1), Task("owner"))
        assert owner.ticket.cancel()
        assert owner.enqueue() == Outcome(False, False, 0)
        for _ in range(2):
            joiner = worker.prepare(key(1), Task("joiner"))
            assert joiner.joined
            with pytest.raises(Cancelled):
                joiner.ticket.wait(0)
        del owner  # enqueued: its end frees nothing
        assert worker.prepare(key(1), Task("joiner")).joined
        worker.retire(joiner.ticket)
        assert not worker.prepare(key(1), Task("new")).joined
