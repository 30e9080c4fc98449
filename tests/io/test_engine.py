"""The books alone, without a thread: who is woken by what, and when the thread may end."""

from __future__ import annotations

import pytest

from shmcache.errors import CacheIoExecutionStateError, CacheIoWorkerError
from shmcache.io.completion import Completion, Done, Gate
from shmcache.io.engine import Engine
from shmcache.io.job import Calls, Job
from shmcache.states.execution import CacheIoAdmission
from tests.io.tasks import key

ADMITTED, AT_CAPACITY, CANCELLED = CacheIoAdmission

Books = Engine[str, str]


def job(engine: Books, number: int) -> Job[str, str]:
    completion: Completion[str] = Completion(key(number))
    assert engine.prepare(completion) is completion
    return Job(completion, str(number), Calls(str, print))


@pytest.fixture
def full() -> tuple[Books, Job[str, str], Job[str, str]]:
    """A queue of one place, the job that has it, and one whose submitter is blocked."""
    engine = Books(1)
    queued, blocked = job(engine, 1), job(engine, 2)
    assert engine.admit(queued, Gate()) == (ADMITTED, 1)
    assert engine.admit(blocked, Gate()) == (AT_CAPACITY, 1)
    assert len(engine._blocked) == 1
    return engine, queued, blocked


def test_room_wakes_the_blocked(full: tuple[Books, Job[str, str], Job[str, str]]) -> None:
    engine, queued, blocked = full
    assert engine.begin(queued.completion)
    assert engine._blocked == []
    assert engine.admit(blocked, Gate()) == (ADMITTED, 1)


def test_a_cancellation_wakes_the_blocked(full: tuple[Books, Job[str, str], Job[str, str]]) -> None:
    engine, queued, blocked = full
    assert engine.cancel(blocked.completion)
    assert engine._blocked == []
    assert engine.admit(blocked, Gate()) == (CANCELLED, 1)
    assert not engine.cancel(blocked.completion)
    assert engine.begin(queued.completion)


def test_the_end_wakes_the_blocked(full: tuple[Books, Job[str, str], Job[str, str]]) -> None:
    engine, _, blocked = full
    engine.stop()
    assert engine._blocked == []
    assert engine.admit(blocked, Gate()) == (CANCELLED, 1)
    with pytest.raises(CacheIoWorkerError.OperationFailed):
        blocked.completion.answer()
    assert list(engine._registry) == [key(1)]  # its own key is free, the queued job's is not
    assert engine.prepare(Completion(key(3))) is None


def test_every_blocked_submitter_is_woken(
    full: tuple[Books, Job[str, str], Job[str, str]],
) -> None:
    engine, queued, _ = full
    for number in range(3, 6):
        assert engine.admit(job(engine, number), Gate())[0] is AT_CAPACITY
    assert len(engine._blocked) == 4
    engine.retire(queued.completion)  # it is queued: nothing is freed
    assert engine._blocked == []


def test_the_thread_ends_behind_the_last_job() -> None:
    """A dropped worker's note may stand before a job that was admitted at the same moment."""
    engine = Books(2)
    last = job(engine, 1)
    engine.queue.put(None)  # stop_soon, whose flag is seen later
    assert engine.admit(last, Gate())[0] is ADMITTED
    engine.stop()
    assert engine.queue.get_nowait() is None
    assert not engine.ended()
    assert engine.queue.get_nowait() is last
    assert engine.queue.get_nowait() is None
    assert engine.ended()


def test_a_dropped_worker_is_stopped_by_whoever_comes_next() -> None:
    engine = Books(1)
    engine.stop_soon()
    assert engine.prepare(Completion(key(1))) is None
    assert [engine.queue.get_nowait() for _ in range(2)] == [None, None]
    assert engine.ended()


def test_what_a_thread_left_is_found() -> None:
    engine = Books(2)
    left = [job(engine, number) for number in range(2)]
    for each in left:
        engine.admit(each, Gate())
    engine.poison()
    assert [engine.take_rest() for _ in range(3)] == [*left, None]
    for _ in range(3):
        with pytest.raises(CacheIoWorkerError.Poisoned):
            engine.prepare(Completion(key(9)))
    assert engine.queue.empty()  # being refused writes no further notes


def test_a_completion_that_is_refused_is_told_to_the_waiters() -> None:
    """[H] It cannot happen while only the thread completes; if it does, nobody waits for ever."""
    engine = Books(1)
    waiting = job(engine, 1).completion
    assert not engine.complete(waiting, Done("output"))
    with pytest.raises(CacheIoWorkerError.OperationFailed) as caught:
        waiting.answer()
    assert caught.value.message == str(CacheIoExecutionStateError.InvalidCompletion())


def test_an_output_that_comes_too_late_is_not_published() -> None:
    engine = Books(1)
    late = job(engine, 1)
    engine.admit(late, Gate())
    assert engine.begin(late.completion)
    late.completion.cancel()  # whatever the books say
    assert not engine.complete(late.completion, Done("output"))
