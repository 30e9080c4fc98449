"""I1, I2, I3 (the pure part): every call in every phase, and the sequences of the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from shmcache.bounds import USIZE_MAX
from shmcache.errors import CacheIoExecutionStateError
from shmcache.states.execution import (
    TRANSITIONS,
    CacheIoAdmission,
    CacheIoCompletionDisposition,
    CacheIoExecutionState,
    CacheIoPhase,
    CacheIoPreparation,
    CacheIoStartDisposition,
)
from shmcache.states.storage import CacheIoOperationKey, CacheIoOperationKind
from tests.states.blocks import block

if TYPE_CHECKING:
    from collections.abc import Callable

NEW, JOINED = CacheIoPreparation
ADMITTED, AT_CAPACITY, CANCELLED = CacheIoAdmission
EXECUTE, DROP = CacheIoStartDisposition
PUBLISH, THROW_AWAY = CacheIoCompletionDisposition

K1, K2, K3 = (
    CacheIoOperationKey(21, block(layer, 0, 16), CacheIoOperationKind.WRITE) for layer in range(3)
)

# How to get there with one key, from absence.
PATHS = {
    "absent": "",
    "prepared": "prepare",
    "queued": "prepare admit",
    "in_flight": "prepare admit begin",
    "cancelled_prepared": "prepare cancel",
    "cancelled_queued": "prepare admit cancel",
    "cancelled_in_flight": "prepare admit begin cancel",
    "completed": "prepare admit begin complete",
    "completed_cancelled": "prepare admit cancel begin",
}
# Next phase, answer, change of `queued`; "=": the phase stays, "!": the call is refused. `full` is
# `admit` while other operations fill the queue.
MATRIX = """
absent prepare prepared new 0
absent admit ! UnknownOperation 0
absent full ! UnknownOperation 0
absent rollback_admission ! InvalidAdmissionRollback 0
absent begin = discard 0
absent cancel = False 0
absent complete ! InvalidCompletion 0
absent retire = False 0
prepared prepare = joined 0
prepared admit queued admitted +1
prepared full = at_capacity 0
prepared rollback_admission ! InvalidAdmissionRollback 0
prepared begin ! InvalidStart 0
prepared cancel cancelled_prepared True 0
prepared complete ! InvalidCompletion 0
prepared retire absent True 0
queued prepare = joined 0
queued admit ! InvalidAdmission 0
queued full ! InvalidAdmission 0
queued rollback_admission prepared None -1
queued begin in_flight execute -1
queued cancel cancelled_queued True 0
queued complete ! InvalidCompletion 0
queued retire ! OperationStillOwned 0
in_flight prepare = joined 0
in_flight admit ! InvalidAdmission 0
in_flight full ! InvalidAdmission 0
in_flight rollback_admission ! InvalidAdmissionRollback 0
in_flight begin ! InvalidStart 0
in_flight cancel cancelled_in_flight True 0
in_flight complete completed publish 0
in_flight retire ! OperationStillOwned 0
cancelled_prepared prepare = joined 0
cancelled_prepared admit = cancelled 0
cancelled_prepared full = cancelled 0
cancelled_prepared rollback_admission ! InvalidAdmissionRollback 0
cancelled_prepared begin ! InvalidStart 0
cancelled_prepared cancel = False 0
cancelled_prepared complete ! InvalidCompletion 0
cancelled_prepared retire absent True 0
cancelled_queued prepare = joined 0
cancelled_queued admit ! InvalidAdmission 0
cancelled_queued full ! InvalidAdmission 0
cancelled_queued rollback_admission cancelled_prepared None -1
cancelled_queued begin completed_cancelled discard -1
cancelled_queued cancel = False 0
cancelled_queued complete ! InvalidCompletion 0
cancelled_queued retire ! OperationStillOwned 0
cancelled_in_flight prepare = joined 0
cancelled_in_flight admit ! InvalidAdmission 0
cancelled_in_flight full ! InvalidAdmission 0
cancelled_in_flight rollback_admission ! InvalidAdmissionRollback 0
cancelled_in_flight begin ! InvalidStart 0
cancelled_in_flight cancel = False 0
cancelled_in_flight complete completed_cancelled discard 0
cancelled_in_flight retire ! OperationStillOwned 0
completed prepare = joined 0
completed admit ! InvalidAdmission 0
completed full ! InvalidAdmission 0
completed rollback_admission ! InvalidAdmissionRollback 0
completed begin ! InvalidStart 0
completed cancel = False 0
completed complete ! InvalidCompletion 0
completed retire absent True 0
completed_cancelled prepare = joined 0
completed_cancelled admit ! InvalidAdmission 0
completed_cancelled full ! InvalidAdmission 0
completed_cancelled rollback_admission ! InvalidAdmissionRollback 0
completed_cancelled begin ! InvalidStart 0
completed_cancelled cancel = False 0
completed_cancelled complete ! InvalidCompletion 0
completed_cancelled retire absent True 0
"""
CELLS = [line.split() for line in MATRIX.strip().splitlines()]


def shown(answer: object) -> str:
    return str(getattr(answer, "value", answer))


def phase_of(state: CacheIoExecutionState, key: CacheIoOperationKey) -> str:
    """The only look inside: most phases answer most calls alike."""
    phase = state._phases.get(key)
    return phase.value if phase else "absent"


def state_in(phase: str, *, fill: bool) -> CacheIoExecutionState:
    """K1 in `phase`; the queue of four has one place left, or none if `fill`.

    The places are filled at the end: K1 must get through the queue first.
    """
    state = CacheIoExecutionState(4)
    for call in PATHS[phase].split():
        getattr(state, call)(K1)
    while state.queued < 3 + fill:
        key = msgspec.structs.replace(K2, generation=state.queued)
        assert (state.prepare(key), state.admit(key)) == (NEW, ADMITTED)
    return state


def test_i1_the_matrix_has_every_cell() -> None:
    calls = "prepare admit full rollback_admission begin cancel complete retire".split()
    assert [(cell[0], cell[1]) for cell in CELLS] == [(p, call) for p in PATHS for call in calls]
    assert list(PATHS)[1:] == [phase.value for phase in CacheIoPhase]


@pytest.mark.parametrize(("phase", "call", "target", "answer", "change"), CELLS)
def test_i1_cell(phase: str, call: str, target: str, answer: str, change: str) -> None:
    state = state_in(phase, fill=call == "full")
    assert phase_of(state, K1) == phase
    queued, peak = state.queued, state.peak_queued
    perform: Callable[[Any], object] = getattr(state, "admit" if call == "full" else call)
    if target == "!":
        error = getattr(CacheIoExecutionStateError, answer)
        with pytest.raises(CacheIoExecutionStateError) as caught:
            perform(K1)
        assert caught.value == error()
    else:
        assert shown(perform(K1)) == answer
    assert phase_of(state, K1) == (phase if target in "=!" else target)
    assert state.queued == queued + int(change)
    assert state.peak_queued == max(peak, state.queued)
    assert state.queued == sum(
        phase in (CacheIoPhase.QUEUED, CacheIoPhase.CANCELLED_QUEUED)
        for phase in state._phases.values()
    )


def test_transitions_are_the_legal_cells() -> None:
    """What the diagram is drawn from is what the contract's table says."""
    told = set()
    for row in TRANSITIONS:
        source = row.source.value if row.source else "absent"
        target = row.target.value if row.target else "absent"
        call = "full" if row.when == "full" else row.event
        told.add((source, call, target, row.result.lower() or "none"))
    expected = {
        (phase, call, phase if target == "=" else target, answer.lower())
        for phase, call, target, answer, _ in CELLS
        if target != "!"
    }
    assert told == expected
    assert len(TRANSITIONS) == len(expected)


def test_i2_admission_and_the_queue() -> None:
    """Example 1 of the contract, and 2 and 3 from there."""
    state = CacheIoExecutionState(2)
    assert (state.prepare(K1), state.prepare(K1), state.admit(K1)) == (NEW, JOINED, ADMITTED)
    assert state.queued == 1
    assert (state.prepare(K2), state.admit(K2)) == (NEW, ADMITTED)
    assert (state.queued, state.peak_queued) == (2, 2)
    assert (state.prepare(K3), state.admit(K3)) == (NEW, AT_CAPACITY)
    assert (state.begin(K1), state.queued) == (EXECUTE, 1)
    assert (state.admit(K3), state.queued, state.peak_queued) == (ADMITTED, 2, 2)

    assert (state.cancel(K2), state.cancel(K2), state.queued) == (True, False, 2)
    with pytest.raises(CacheIoExecutionStateError.OperationStillOwned):
        state.retire(K2)
    assert (state.begin(K2), state.queued) == (DROP, 1)
    assert (state.retire(K2), state.retire(K2), state.begin(K2)) == (True, False, DROP)
    with pytest.raises(CacheIoExecutionStateError.UnknownOperation):
        state.admit(K2)

    assert (state.cancel(K1), state.complete(K1)) == (True, THROW_AWAY)
    with pytest.raises(CacheIoExecutionStateError.InvalidCompletion):
        state.complete(K1)
    assert state.retire(K1) is True


def test_i2_rollback() -> None:
    """Example 4 of the contract."""
    state = CacheIoExecutionState(2)
    for key in (K1, K3):
        state.prepare(key)
        state.admit(key)
    state.begin(K1)
    state.rollback_admission(K3)
    assert (state.queued, state.peak_queued) == (0, 2)
    assert state.admit(K3) is ADMITTED
    assert state.cancel(K3)
    state.rollback_admission(K3)
    assert (state.admit(K3), state.queued, state.peak_queued) == (CANCELLED, 0, 2)


def test_i3_a_queue_without_room_is_refused() -> None:
    with pytest.raises(CacheIoExecutionStateError.ZeroCapacity):
        CacheIoExecutionState(0)
    for bad in (-1, USIZE_MAX + 1):
        with pytest.raises(ValueError, match="capacity"):
            CacheIoExecutionState(bad)
    for odd in (True, 1.0, None, "2"):
        with pytest.raises(TypeError, match="capacity"):
            CacheIoExecutionState(odd)  # type: ignore[arg-type]
    assert CacheIoExecutionState.new(capacity=USIZE_MAX).capacity == USIZE_MAX


def test_a_key_is_its_three_fields() -> None:
    state = CacheIoExecutionState(1)
    assert state.prepare(K1) is NEW
    for other in (
        msgspec.structs.replace(K1, generation=22),
        msgspec.structs.replace(K1, kind=CacheIoOperationKind.READ),
        msgspec.structs.replace(K1, id=block(0, 0, 15)),
    ):
        assert state.prepare(other) is NEW
    assert state.prepare(CacheIoOperationKey(21, block(0, 0, 16), K1.kind)) is JOINED


def test_what_is_read_cannot_be_written() -> None:
    state = CacheIoExecutionState(1)
    for name in ("capacity", "queued", "peak_queued", "phases"):
        with pytest.raises(AttributeError):
            setattr(state, name, 5)
