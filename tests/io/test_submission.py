"""I14 for the outcome, and the small rules of a submission."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmcache.bounds import USIZE_MAX
from shmcache.errors import CacheIoWorkerError
from shmcache.io import CacheIoSubmissionOutcome
from tests.io.tasks import Task, busy_worker_of, key, worker_of

outcomes = st.builds(
    CacheIoSubmissionOutcome, st.booleans(), st.booleans(), st.integers(0, USIZE_MAX)
)


@given(outcomes)
@example(CacheIoSubmissionOutcome(True, True, USIZE_MAX))
def test_i14_outcomes_are_values(outcome: CacheIoSubmissionOutcome) -> None:
    cls = CacheIoSubmissionOutcome
    for twin in (
        copy.deepcopy(outcome),
        pickle.loads(pickle.dumps(outcome)),
        msgspec.json.decode(msgspec.json.encode(outcome), type=cls),
        msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=cls),
    ):
        assert twin == outcome
        assert hash(twin) == hash(outcome)
    for name, value in (("joined", not outcome.joined), ("peak_occupancy", 1)):
        with pytest.raises(AttributeError):
            setattr(outcome, name, value)
    flipped = msgspec.structs.replace(outcome, backpressure=not outcome.backpressure)
    assert flipped != outcome


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ((1, False, 0), TypeError),
        ((True, None, 0), TypeError),
        ((True, False, 1.0), TypeError),
        ((True, False, True), TypeError),
        ((True, False, -1), ValueError),
        ((True, False, USIZE_MAX + 1), ValueError),
    ],
)
def test_outcomes_keep_their_domain(fields: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        CacheIoSubmissionOutcome(*fields)
    encoded = msgspec.json.encode(
        dict(zip(("joined", "backpressure", "peak_occupancy"), fields, strict=True))
    )
    if fields[2] != 1.0:  # true for True, too: JSON has no other way to write these
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(encoded, type=CacheIoSubmissionOutcome)


def test_used_up_is_used_up() -> None:
    with worker_of(1) as (worker, log):
        enqueued, closed = worker.prepare(key(1), Task(1)), worker.prepare(key(2), Task(2))
        joiner = worker.prepare(key(1), Task(3))
        enqueued.enqueue()
        enqueued.close()  # nothing
        closed.close()
        joiner.enqueue()
        for submission in (enqueued, closed, joiner):
            with pytest.raises(RuntimeError, match="before"):
                submission.enqueue()
        assert enqueued.ticket.wait(10).value == 1
        assert log.executed == [1]


def test_leaving_with_after_enqueue_abandons_nothing() -> None:
    with worker_of(1) as (worker, _):
        with worker.prepare(key(1), Task(1)) as submission:
            submission.enqueue()
        assert submission.ticket.wait(10).value == 1


def test_an_abandoned_joiner_leaves_the_operation_alone() -> None:
    with worker_of(1) as (worker, _):
        owner = worker.prepare(key(1), Task("owner"))
        for way in ("close", "drop"):
            joiner = worker.prepare(key(1), Task(way))
            assert joiner.joined
            if way == "close":
                joiner.close()
            del joiner
        assert worker.prepare(key(1), Task("joiner")).joined
        owner.enqueue()
        assert owner.ticket.wait(10).value == "owner"


def test_an_owner_dropped_after_its_cancellation_frees_the_key() -> None:
    with worker_of(1) as (worker, _):
        owner = worker.prepare(key(1), Task("owner"))
        ticket = owner.ticket
        assert ticket.cancel()
        assert worker.prepare(key(1), Task("joiner")).joined
        del owner
        ticket.wait_for_task_resources(0)
        assert not worker.prepare(key(1), Task("new")).joined


def test_an_owner_whose_key_is_anothers_frees_nothing() -> None:
    with worker_of(1) as (worker, _):
        old = worker.prepare(key(1), Task("old"))
        worker.retire(old.ticket)
        new = worker.prepare(key(1), Task("new"))
        assert not new.joined
        old.close()
        with pytest.raises(CacheIoWorkerError.Cancelled):
            old.ticket.wait(0)
        assert worker.prepare(key(1), Task("joiner")).joined
        new.enqueue()
        assert new.ticket.wait(10).value == "new"


def test_a_dropped_owner_that_was_enqueued_cancels_nothing() -> None:
    with busy_worker_of(1) as (worker, log, gated):
        submission = worker.prepare(key(1), Task("queued"))
        submission.enqueue()
        ticket = submission.ticket
        del submission
        assert worker.prepare(key(1), Task("joiner")).joined
        gated.open()
        assert ticket.wait(10).value == "queued"
        assert log.executed == ["gated", "queued"]
