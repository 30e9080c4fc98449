"""Random lives of many operations against a naive model: a place, a mark, and counting by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmcache.errors import CacheIoExecutionStateError
from shmcache.states.execution import CacheIoExecutionState
from shmcache.states.storage import CacheIoOperationKey, CacheIoOperationKind
from tests.states.blocks import block

if TYPE_CHECKING:
    from collections.abc import Callable

Key = CacheIoOperationKey

keys = st.builds(
    CacheIoOperationKey,
    st.integers(1, 2),
    st.sampled_from([block(0, 0, 16), block(1, 0, 16)]),
    st.sampled_from(CacheIoOperationKind),
)


class Refused(Exception):
    """The model's refusal; its text is the name of the error."""


class Model:
    """Each operation is a place ("desk", "queue", "machine", "out") and whether it is cancelled.

    No table and no counter: the queue is a list, its length is counted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.places: dict[Key, str] = {}
        self.cancelled: set[Key] = set()
        self.queue: list[Key] = []
        self.peak = 0

    def prepare(self, key: Key) -> str:
        if key in self.places:
            return "joined"
        self.places[key] = "desk"
        return "new"

    def admit(self, key: Key) -> str:
        if key not in self.places:
            raise Refused("UnknownOperation")
        self.need(key, "desk", "InvalidAdmission")
        if key in self.cancelled:
            return "cancelled"
        if len(self.queue) == self.capacity:
            return "at_capacity"
        self.places[key] = "queue"
        self.queue.append(key)
        self.peak = max(self.peak, len(self.queue))
        return "admitted"

    def rollback_admission(self, key: Key) -> None:
        self.need(key, "queue", "InvalidAdmissionRollback")
        self.queue.remove(key)
        self.places[key] = "desk"

    def begin(self, key: Key) -> str:
        if key not in self.places:
            return "discard"
        self.need(key, "queue", "InvalidStart")
        self.queue.remove(key)
        self.places[key] = "out" if key in self.cancelled else "machine"
        return "discard" if key in self.cancelled else "execute"

    def cancel(self, key: Key) -> bool:
        if self.places.get(key, "out") == "out" or key in self.cancelled:
            return False
        self.cancelled.add(key)
        return True

    def complete(self, key: Key) -> str:
        self.need(key, "machine", "InvalidCompletion")
        self.places[key] = "out"
        return "discard" if key in self.cancelled else "publish"

    def retire(self, key: Key) -> bool:
        if self.places.get(key) in ("queue", "machine"):
            raise Refused("OperationStillOwned")
        self.cancelled.discard(key)
        return self.places.pop(key, None) is not None

    def need(self, key: Key, place: str, error: str) -> None:
        if self.places.get(key) != place:
            raise Refused(error)


class Lives(RuleBasedStateMachine):
    """The same call on both: the same answer or the same refusal, and equal numbers after it."""

    @initialize(capacity=st.integers(1, 3))
    def begin_life(self, capacity: int) -> None:
        self.state = CacheIoExecutionState(capacity)
        self.model = Model(capacity)

    @rule(key=keys)
    def prepare(self, key: Key) -> None:
        self.both(self.state.prepare, self.model.prepare, key)

    @rule(key=keys)
    def admit(self, key: Key) -> None:
        self.both(self.state.admit, self.model.admit, key)

    @rule(key=keys)
    def rollback(self, key: Key) -> None:
        self.both(self.state.rollback_admission, self.model.rollback_admission, key)

    @rule(key=keys)
    def begin(self, key: Key) -> None:
        self.both(self.state.begin, self.model.begin, key)

    @rule(key=keys)
    def cancel(self, key: Key) -> None:
        self.both(self.state.cancel, self.model.cancel, key)

    @rule(key=keys)
    def complete(self, key: Key) -> None:
        self.both(self.state.complete, self.model.complete, key)

    @rule(key=keys)
    def retire(self, key: Key) -> None:
        self.both(self.state.retire, self.model.retire, key)

    def both(self, real: Callable[[Key], object], naive: Callable[[Key], object], key: Key) -> None:
        try:
            expected = naive(key)
        except Refused as refused:
            with pytest.raises(getattr(CacheIoExecutionStateError, str(refused))):
                real(key)
        else:
            answer = real(key)
            assert getattr(answer, "value", answer) == expected

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "state"):
            assert self.state.queued == len(self.model.queue) <= self.state.capacity
            assert self.state.peak_queued == self.model.peak
            assert self.state._phases.keys() == self.model.places.keys()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40)
