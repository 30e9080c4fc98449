"""A change of the books that is cut short: everyone is told, nobody waits, the thread ends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from shmcache.errors import CacheIoWorkerError
from shmcache.io import CacheIoSubmission
from shmcache.states.execution import CacheIoExecutionState
from tests.io.tasks import (
    Call,
    Task,
    Worker,
    busy_worker_of,
    key,
    wait_blocked,
    wait_idle,
    worker_of,
)
from tests.support import PATIENCE_S

Poisoned = CacheIoWorkerError.Poisoned


class Cut(BaseException):
    """Stands for a KeyboardInterrupt between two bytecodes."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the next call of a method of the execution state end half-way: done, but not told."""

    def arrange(name: str) -> None:
        whole = getattr(CacheIoExecutionState, name)

        def half(self: CacheIoExecutionState, *args: Any) -> None:
            monkeypatch.undo()
            whole(self, *args)
            raise Cut

        monkeypatch.setattr(CacheIoExecutionState, name, half)

    return arrange


def cut_short(worker: Worker, cut: Callable[[str], None]) -> None:
    cut("prepare")
    with pytest.raises(Cut):
        worker.prepare(key(77), Task("cut"))


def test_every_later_call_is_told(cut: Callable[[str], None]) -> None:
    with busy_worker_of(2) as (worker, log, gated):
        running = worker.prepare(key(1000), Task("joiner"))
        queued = worker.prepare(key(1), Task("queued"))
        prepared = worker.prepare(key(2), Task("prepared"))
        queued.enqueue()
        cut_short(worker, cut)
        for submission in (running, queued, prepared):
            for _ in range(2):
                with pytest.raises(Poisoned):
                    submission.ticket.wait()
                with pytest.raises(Poisoned):
                    submission.ticket.wait_for_task_resources()
            assert submission.ticket.cancel() is False
            worker.retire(submission.ticket)
        for submission in (prepared, running):
            with pytest.raises(Poisoned):
                submission.enqueue()
        prepared.ticket.wait_for_task_resources()  # its task is gone now
        with pytest.raises(Poisoned):
            worker.prepare(key(3), Task("new"))
        gated.open()
        worker._thread.join(PATIENCE_S)
        assert not worker._thread.is_alive()
        assert log.executed == ["gated"]
        assert log.discarded == ["gated"]  # nobody will see it, so it is handed back
        for submission in (running, queued):
            submission.ticket.wait_for_task_resources(0)
        worker.close()


def test_everyone_who_waits_is_woken(cut: Callable[[str], None]) -> None:
    with busy_worker_of(1) as (worker, _, _gated):
        queued, blocked = worker.prepare(key(1), Task(1)), worker.prepare(key(2), Task(2))
        queued.enqueue()
        calls: list[Call[Any]] = [
            Call(queued.ticket.wait),
            Call(queued.ticket.wait_for_task_resources),
            Call(blocked.ticket.wait),
            Call(blocked.enqueue),
        ]
        wait_blocked(worker)
        cut_short(worker, cut)
        for call in calls:
            with pytest.raises(Poisoned):
                call.result()
        blocked.ticket.wait_for_task_resources(PATIENCE_S)


def test_a_result_that_was_out_stays_the_answer(cut: Callable[[str], None]) -> None:
    with worker_of(1) as (worker, _):
        done = worker.prepare(key(1), Task("done"))
        done.enqueue()
        output = done.ticket.wait(PATIENCE_S)
        cancelled = worker.prepare(key(2), Task("cancelled"))
        cancelled.ticket.cancel()
        wait_idle(worker, keys_left=1)
        cut_short(worker, cut)
        assert done.ticket.wait() is output
        with pytest.raises(CacheIoWorkerError.Cancelled):
            cancelled.ticket.wait()
        with pytest.raises(Poisoned):
            cancelled.enqueue()
        with pytest.raises(CacheIoWorkerError.Cancelled):
            cancelled.ticket.wait()


@pytest.mark.parametrize("method", ["begin", "complete", "retire"])
def test_cut_short_on_the_thread(
    method: str, cut: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    with worker_of(2) as (worker, log):
        cut(method)
        first = worker.prepare(key(1), Task("first"))
        first.enqueue()
        first.ticket.wait_for_task_resources(PATIENCE_S)
        if method == "retire":
            assert first.ticket.wait(PATIENCE_S).value == "first"
        else:
            with pytest.raises(Poisoned):
                first.ticket.wait(PATIENCE_S)
        worker._thread.join(PATIENCE_S)
        assert not worker._thread.is_alive()
        assert log.discarded == (["first"] if method == "complete" else [])
        with pytest.raises(Poisoned):
            worker.prepare(key(2), Task("second"))
    assert "ended from outside" in caplog.text


def test_a_thread_ended_from_outside() -> None:
    """An exception thrown into the idle thread; it notices when it is next woken."""

    def attempt() -> object:
        submission = worker.prepare(key(1), Task(1))
        submission.enqueue()
        return submission.ticket.wait(PATIENCE_S)

    with worker_of(1) as (worker, log):
        ident = ctypes.c_ulong(worker._thread.ident or 0)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Cut)) == 1
        with pytest.raises(Poisoned):
            attempt()
        worker._thread.join(PATIENCE_S)
        assert not worker._thread.is_alive()
        assert log.executed == []


def test_an_exception_between_two_sections_is_found_by_the_next(cut: Callable[[str], None]) -> None:
    """Where not even the handler could run, the mark of an unfinished change is left."""
    with worker_of(1) as (worker, _):
        waiting = worker.prepare(key(1), Task(1))
        call = Call(waiting.ticket.wait)
        worker._engine._dirty = True
        with pytest.raises(Poisoned):
            worker.prepare(key(2), Task(2))
        with pytest.raises(Poisoned):
            call.result()


def test_a_blocked_enqueue_that_is_interrupted_abandons(monkeypatch: pytest.MonkeyPatch) -> None:
    """[D] A KeyboardInterrupt while waiting for room; nothing is poisoned by it."""
    with busy_worker_of(1) as (worker, log, gated):
        worker.prepare(key(1), Task("queued")).enqueue()
        blocked, joiner = worker.prepare(key(2), Task(2)), worker.prepare(key(2), Task(3))

        def interrupted(gate: object, timeout: float | None = None) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr("shmcache.io.completion.Gate.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            blocked.enqueue()
        with pytest.raises(CacheIoWorkerError.Cancelled):
            joiner.ticket.wait(0)
        blocked.ticket.wait_for_task_resources(0)
        assert not worker.prepare(key(2), Task("new")).joined
        with pytest.raises(RuntimeError, match="before"):
            blocked.enqueue()
        gated.open()
        wait_idle(worker)
        assert log.executed == ["gated", "queued"]


def test_refusals_do_not_poison() -> None:
    with worker_of(1) as (worker, _):
        owner = worker.prepare(key(1), Task(1))
        worker.retire(owner.ticket)
        with pytest.raises(CacheIoWorkerError.Execution):
            owner.enqueue()
        again: CacheIoSubmission[Any, Any] = worker.prepare(key(1), Task(1))
        again.enqueue()
        assert again.ticket.wait(PATIENCE_S).value == 1
