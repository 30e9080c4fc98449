"""I7, I11: what dies when, in one process: tasks, submissions, workers, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from shmcache.errors import CacheIoWorkerError
from shmcache.io import CRASHED, STOPPED, CacheIoSubmission, CacheIoTicket, CacheIoWorker
from tests.io.tasks import (
    Call,
    Log,
    Task,
    busy_worker_of,
    key,
    wait_blocked,
    wait_idle,
    worker_of,
)
from tests.support import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def without_collector() -> Any:
    """What must die here dies by itself, at once: no collector comes to help."""
    gc.disable()
    yield
    gc.enable()


class Payload:
    """What a task holds; a weak reference tells when it is gone."""


def raise_it(payload: Payload) -> object:
    raise OSError("no space")


def raise_it_from_a_cycle(payload: Payload) -> object:
    error = OSError("no space")
    kept = [error]  # noqa: F841 (error -> traceback -> this frame -> error)
    raise error


def raise_it_from_another(payload: Payload) -> object:
    try:
        raise_it_from_a_cycle(payload)
    except OSError as error:
        inner = error
        raise ValueError("outer") from inner
    return None


def raise_a_group(payload: Payload) -> object:
    errors: list[BaseException] = [KeyboardInterrupt()]
    try:
        raise_it_from_a_cycle(payload)
    except OSError as error:
        errors.append(error)
    raise BaseExceptionGroup("group", errors)  # out here, where none of them is its context


@pytest.mark.parametrize(
    ("execute", "message"),
    [
        (lambda payload: "output", None),
        (raise_it, "no space"),
        (raise_it_from_a_cycle, "no space"),
        (raise_it_from_another, "outer"),
        (raise_a_group, CRASHED),
    ],
)
def test_i7_the_task_is_gone_when_it_says_so(
    execute: Callable[[Payload], object], message: str | None
) -> None:
    with CacheIoWorker(1, "test-io", execute, print) as worker:
        payload = Payload()
        gone = weakref.ref(payload)
        submission = worker.prepare(key(1), payload)
        del payload
        assert gone() is not None
        submission.enqueue()
        submission.ticket.wait_for_task_resources(PATIENCE_S)
        assert gone() is None
        if message is None:
            assert submission.ticket.wait() == "output"
        else:
            with pytest.raises(CacheIoWorkerError.OperationFailed) as caught:
                submission.ticket.wait()
            assert caught.value.message == message
            assert caught.value.__context__ is None


def test_i7_the_task_of_a_broken_discard_is_gone() -> None:
    def discard(output: object) -> None:
        kept = (output, OSError("broken"))
        raise kept[1]

    may_end = threading.Event()

    def execute(payload: Payload) -> Payload:
        may_end.wait(PATIENCE_S)
        return payload  # the output is the task: then both must be gone

    with CacheIoWorker(1, "test-io", execute, discard) as worker:
        payload = Payload()
        gone = weakref.ref(payload)
        submission = worker.prepare(key(1), payload)
        del payload
        submission.enqueue()
        wait_until(lambda: worker._engine._state.queued == 0, "it runs")
        assert submission.ticket.cancel()
        may_end.set()
        submission.ticket.wait_for_task_resources(PATIENCE_S)
        assert gone() is None


@pytest.mark.parametrize("way", ["run", "close", "drop", "cancelled", "stopped"])
def test_i7_first_the_result_then_the_task_then_its_release(way: str) -> None:
    """The order that a waiter for buffers relies on, seen from the task's own end."""
    seen: list[tuple[bool, bool]] = []

    class Watching:
        ticket: CacheIoTicket[Any]

        def __del__(self) -> None:
            completion = self.ticket._completion
            seen.append((completion.resolved.is_open, completion.released.is_open))

    with CacheIoWorker(1, "test-io", id, print) as worker:
        task = Watching()
        owner = worker.prepare(key(1), task)
        task.ticket = ticket = owner.ticket
        del task
        if way == "cancelled":
            ticket.cancel()
        if way == "stopped":
            worker.close()
        if way == "close":
            owner.close()
        elif way != "drop":
            owner.enqueue()
        del owner
        ticket.wait_for_task_resources(PATIENCE_S)
        assert seen == [(True, False)]


@pytest.mark.parametrize("way", ["enqueue", "close", "with", "drop"])
def test_i7_the_task_of_a_joiner_is_gone(way: str) -> None:
    with busy_worker_of(1) as (worker, _, _):
        task = Task("joiner")
        gone = weakref.ref(task)
        joiner = worker.prepare(key(1000), task)
        ticket = joiner.ticket
        assert joiner.joined_task is task
        del task
        if way == "enqueue":
            joiner.enqueue()
        elif way == "close":
            joiner.close()
        elif way == "with":
            with joiner:
                pass
        if way == "drop":
            del joiner
        else:
            assert joiner.joined_task is None
        assert gone() is None
        with pytest.raises(TimeoutError):  # the owner's task is what counts, and it is running
            ticket.wait_for_task_resources(0)


@pytest.mark.parametrize("way", ["close", "with", "drop", "cancelled", "stopped"])
def test_i7_the_task_of_an_owner_that_never_ran_is_gone(way: str) -> None:
    with worker_of(1) as (worker, log):
        task = Task("owner")
        gone = weakref.ref(task)
        owner = worker.prepare(key(1), task)
        ticket = owner.ticket
        del task
        if way == "close":
            owner.close()
            owner.close()
        elif way == "with":
            with pytest.raises(ZeroDivisionError), owner:
                raise ZeroDivisionError
        elif way == "drop":
            del owner
        elif way == "cancelled":
            assert ticket.cancel()
            owner.enqueue()
        else:
            worker.close()
            owner.enqueue()
        assert gone() is None
        ticket.wait_for_task_resources(0)
        with pytest.raises(CacheIoWorkerError):
            ticket.wait(0)
        assert log.executed == []


def test_a_task_that_leads_back_to_its_submission_is_collected() -> None:
    """The safety net of an abandoned owner is no root of its own."""
    with worker_of(1) as (worker, _):
        task = Task("cycle")
        gone = weakref.ref(task)
        owner, joiner = worker.prepare(key(1), task), worker.prepare(key(1), Task("joiner"))
        task.value = owner
        waiting = Call(joiner.ticket.wait)
        del task, owner
        assert gone() is not None
        gc.collect()
        assert gone() is None
        with pytest.raises(CacheIoWorkerError.Cancelled):
            waiting.result()
        assert not worker.prepare(key(1), Task("new")).joined


def test_a_finalizer_needs_no_lock() -> None:
    """A collector may run inside any lock of the worker or of a waiter."""
    with worker_of(1) as (worker, _):
        owner, joiner = worker.prepare(key(1), Task("owner")), worker.prepare(key(1), Task("no"))
        waiting = Call(joiner.ticket.wait)
        with worker._engine._lock:
            del owner
            with pytest.raises(CacheIoWorkerError.Cancelled):
                waiting.result()
        assert not worker.prepare(key(1), Task("new")).joined


def test_an_output_is_not_kept_by_the_thread() -> None:
    with worker_of(1) as (worker, _):
        submission = worker.prepare(key(1), Task("output"))
        submission.enqueue()
        gone = weakref.ref(submission.ticket.wait(PATIENCE_S))
        wait_idle(worker)
        assert gone() is not None
        del submission
        assert gone() is None


@pytest.mark.parametrize("locked", [False, True])
def test_i11_a_dropped_worker_ends_its_thread(locked: bool) -> None:
    """After what was admitted; even if the finalizer runs inside the worker's own lock."""
    log = Log()
    worker = CacheIoWorker(2, "dropped", log.execute, log.discard)
    thread, engine = worker._thread, worker._engine
    gated = Task("gated", gated=True)
    tickets = []
    for number, task in enumerate((gated, Task("queued"))):
        submission = worker.prepare(key(number), task)
        submission.enqueue()
        tickets.append(submission.ticket)
    gated.wait_running()
    late = worker.prepare(key(9), Task("late"))
    if locked:
        with engine._lock:
            del worker
    else:
        del worker
    assert late.enqueue().joined is False
    with pytest.raises(CacheIoWorkerError.OperationFailed, match=STOPPED):
        late.ticket.wait(0)
    gated.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert [ticket.wait(0).value for ticket in tickets] == ["gated", "queued"]


def test_i11_submitters_blocked_at_a_dropped_worker_are_let_go() -> None:
    log = Log()
    worker = CacheIoWorker(1, "dropped", log.execute, log.discard)
    gated = Task("gated", gated=True)
    worker.prepare(key(1), gated).enqueue()
    gated.wait_running()
    worker.prepare(key(2), Task("queued")).enqueue()
    blocked = worker.prepare(key(3), Task("blocked"))
    call, thread = Call(blocked.enqueue), worker._thread
    wait_blocked(worker)
    del worker
    gated.open()
    assert call.result().backpressure
    with pytest.raises(CacheIoWorkerError.OperationFailed, match=STOPPED):
        blocked.ticket.wait(0)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert log.executed == ["gated", "queued"]


def test_i11_a_session_that_owns_its_worker_is_collected() -> None:
    """Its methods are what the worker runs: an idle thread must not hold them."""

    class Session:
        def __init__(self) -> None:
            self.worker = CacheIoWorker(1, "session", self.execute, self.discard)

        def execute(self, task: str) -> str:
            return task

        def discard(self, output: str) -> None:
            raise AssertionError

    session = Session()
    gone, thread = weakref.ref(session), session.worker._thread
    submission = session.worker.prepare(key(1), "task")
    submission.enqueue()
    assert submission.ticket.wait(PATIENCE_S) == "task"
    wait_idle(session.worker)
    del session
    gc.collect()
    assert gone() is None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_tickets_outlive_the_worker_and_keep_nothing_running() -> None:
    log = Log()
    with CacheIoWorker(1, "test-io", log.execute, log.discard) as worker:
        submission = worker.prepare(key(1), Task("kept"))
        submission.enqueue()
    ticket, thread = submission.ticket, worker._thread
    del worker, submission
    assert not thread.is_alive()
    assert ticket.wait(0).value == "kept"
    assert ticket.cancel() is False


def test_closed_on_its_own_thread_it_only_marks_the_stop() -> None:
    executed: list[str] = []

    def execute(task: str) -> None:
        worker.close()
        executed.append(task)

    worker = CacheIoWorker(2, "test-io", execute, print)
    worker.prepare(key(0), "closes").enqueue()
    worker._thread.join(PATIENCE_S)
    assert not worker._thread.is_alive()
    assert executed == ["closes"]
    worker.close()


def test_the_worker_dropped_by_its_own_task() -> None:
    """The finalizer then runs on the worker's own thread, which must not wait for itself."""
    holder: list[CacheIoWorker[Any, Any]] = []
    worker = CacheIoWorker[Any, Any](1, "test-io", lambda task: task.clear(), print)
    holder.append(worker)
    thread, submission = worker._thread, worker.prepare(key(1), holder)
    del worker
    submission.enqueue()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert holder == []


def test_waiting_for_oneself_is_refused() -> None:
    """It could not end; the contract forbids it, and here it raises instead."""

    def execute(task: Callable[[], object]) -> object:
        return task()

    def refusals() -> list[str]:
        wait_until(lambda: worker._engine._state.queued == 1, "the other is queued behind")
        with pytest.raises(TimeoutError):
            behind.ticket.wait(0)
        told = []
        for call in (behind.ticket.wait, behind.ticket.wait_for_task_resources, blocked.enqueue):
            with pytest.raises(RuntimeError) as caught:
                call()
            told.append(str(caught.value))
        return told

    with CacheIoWorker[Callable[[], object], object](1, "test-io", execute, print) as worker:
        may_go = threading.Event()
        worker.prepare(key(0), may_go.wait).enqueue()
        wait_until(lambda: worker._engine._state.queued == 0, "it runs")
        asking = worker.prepare(key(1), refusals)
        asking.enqueue()
        behind, blocked = worker.prepare(key(2), int), worker.prepare(key(3), int)
        call = Call(behind.enqueue)
        wait_blocked(worker)
        may_go.set()
        told = asking.ticket.wait(PATIENCE_S)
        assert told == ["the worker's own thread would wait for itself"] * 3
        call.result()
        assert behind.ticket.wait(PATIENCE_S) == 0
        with pytest.raises(CacheIoWorkerError.Cancelled):
            blocked.ticket.wait(0)


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log = Log()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(CacheIoWorkerError.Spawn) as caught:
        CacheIoWorker(1, "name-of-it", log.execute, log.discard)
    assert caught.value.thread_name == "name-of-it"
    assert isinstance(caught.value.source, RuntimeError)
    assert caught.value.__cause__ is caught.value.source


def test_the_thread_has_the_name() -> None:
    names: list[str] = []

    def execute(task: None) -> None:
        names.append(threading.current_thread().name)

    with CacheIoWorker.new(1, "disk", execute, print) as worker:
        worker.prepare(key(1), None).enqueue()
    assert names == ["disk"]


def test_arguments_are_checked_before_anything_happens() -> None:
    before = set(threading.enumerate())
    call: Any = CacheIoWorker
    for bad in ((True, "n", print, print), (1, b"n", print, print), (1, "n", None, print)):
        with pytest.raises(TypeError):
            call(*bad)
    with pytest.raises(TypeError):
        call(1, "n", print, "print")
    with pytest.raises(ValueError, match="capacity"):
        call(-1, "n", print, print)
    assert set(threading.enumerate()) == before
    with worker_of(1) as (worker, _):
        with pytest.raises(TypeError, match="key"):
            worker.prepare(("not", "a key"), Task(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ticket"):
            worker.retire(key(1))  # type: ignore[arg-type]


def test_a_ticket_of_another_worker_frees_nothing() -> None:
    with worker_of(1) as (one, _), worker_of(1) as (other, _):
        mine = one.prepare(key(1), Task(1))
        theirs = other.prepare(key(1), Task(1))
        one.retire(theirs.ticket)
        assert one.prepare(key(1), Task(2)).joined
        assert not mine.ticket.shares_completion_with(theirs.ticket)


def test_nothing_can_be_copied_but_tickets() -> None:
    with worker_of(1) as (worker, _):
        submission: CacheIoSubmission[Any, Any] = worker.prepare(key(1), Task(1))
        token: Any
        for token in (worker, submission):
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="copied or pickled"):
                    duplicate(token)
        ticket = submission.ticket
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(ticket)
        for twin in (copy.copy(ticket), copy.deepcopy([ticket])[0]):
            assert twin is not ticket
            assert twin != ticket
            assert twin.shares_completion_with(ticket)
            assert twin.key == ticket.key
        with pytest.raises(AttributeError):
            ticket.key = key(2)  # type: ignore[misc]
