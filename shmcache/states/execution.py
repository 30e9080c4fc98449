"""Which background read or write may be queued, started, cancelled, and when its key is free.

Why: a session asks for the same block twice, changes its mind while the disk is busy, and must not
queue without bound. What then happens to an operation is decided here, from keys alone; the worker
(`shmcache.io`) owns the thread, the tasks and the results, and asks before each step.

Contract: `TRANSITIONS` is all that may happen; any other call raises and changes nothing. A key
stays taken until `retire`, so that whoever prepares it meanwhile joins. `cancel` answers True once
per operation and frees no place in the queue: only `begin` and `rollback_admission` do.

Invariants: `queued` is the number of entries QUEUED or CANCELLED_QUEUED and never above `capacity`;
a running operation does not count, a cancelled one still in the queue does. `peak_queued` never
falls.

Concurrency: no lock; the worker's lock guards it.

Errors: `CacheIoExecutionStateError`; a capacity outside its domain raises `TypeError` or
`ValueError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, Self, TypeAlias, TypeVar

from shmcache.bounds import usize
from shmcache.errors import CacheIoExecutionStateError
from shmcache.states.storage import CacheIoOperationKey
from shmcache.states.tables import Transition


class CacheIoPreparation(Enum):
    """NEW: the caller owns a new operation. JOINED: one with this key exists, share its result."""

    NEW = "new"
    JOINED = "joined"


class CacheIoAdmission(Enum):
    """ADMITTED: put it in the queue. AT_CAPACITY: ask again when there is room. CANCELLED: drop."""

    ADMITTED = "admitted"
    AT_CAPACITY = "at_capacity"
    CANCELLED = "cancelled"


class CacheIoStartDisposition(Enum):
    """EXECUTE: run the task, then report its completion. DISCARD: drop the task unrun."""

    EXECUTE = "execute"
    DISCARD = "discard"


class CacheIoCompletionDisposition(Enum):
    """PUBLISH: hand the result to the waiters. DISCARD: a cancellation won, throw it away."""

    PUBLISH = "publish"
    DISCARD = "discard"


class CacheIoPhase(Enum):
    """Where an operation is; one without an entry is absent (None)."""

    PREPARED = "prepared"
    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    CANCELLED_PREPARED = "cancelled_prepared"
    CANCELLED_QUEUED = "cancelled_queued"
    CANCELLED_IN_FLIGHT = "cancelled_in_flight"
    COMPLETED = "completed"
    COMPLETED_CANCELLED = "completed_cancelled"


Answer = TypeVar("Answer")
_P: TypeAlias = CacheIoPhase
# One call: for each phase where it is legal, the next phase and what the caller is answered.
_Moves: TypeAlias = Mapping[CacheIoPhase | None, tuple[CacheIoPhase | None, Answer]]

_PREPARE: Final[_Moves[CacheIoPreparation]] = {
    None: (_P.PREPARED, CacheIoPreparation.NEW),
    **{phase: (phase, CacheIoPreparation.JOINED) for phase in CacheIoPhase},
}
_ADMIT_WITH_ROOM: Final[_Moves[CacheIoAdmission]] = {
    _P.PREPARED: (_P.QUEUED, CacheIoAdmission.ADMITTED),
    _P.CANCELLED_PREPARED: (_P.CANCELLED_PREPARED, CacheIoAdmission.CANCELLED),
}
_ADMIT_WHEN_FULL: Final[_Moves[CacheIoAdmission]] = {
    **_ADMIT_WITH_ROOM,
    _P.PREPARED: (_P.PREPARED, CacheIoAdmission.AT_CAPACITY),
}
_ROLLBACK_ADMISSION: Final[_Moves[None]] = {
    _P.QUEUED: (_P.PREPARED, None),
    _P.CANCELLED_QUEUED: (_P.CANCELLED_PREPARED, None),
}
_BEGIN: Final[_Moves[CacheIoStartDisposition]] = {
    None: (None, CacheIoStartDisposition.DISCARD),
    _P.QUEUED: (_P.IN_FLIGHT, CacheIoStartDisposition.EXECUTE),
    _P.CANCELLED_QUEUED: (_P.COMPLETED_CANCELLED, CacheIoStartDisposition.DISCARD),
}
_CANCEL: Final[_Moves[bool]] = {
    _P.PREPARED: (_P.CANCELLED_PREPARED, True),
    _P.QUEUED: (_P.CANCELLED_QUEUED, True),
    _P.IN_FLIGHT: (_P.CANCELLED_IN_FLIGHT, True),
    None: (None, False),
    _P.CANCELLED_PREPARED: (_P.CANCELLED_PREPARED, False),
    _P.CANCELLED_QUEUED: (_P.CANCELLED_QUEUED, False),
    _P.CANCELLED_IN_FLIGHT: (_P.CANCELLED_IN_FLIGHT, False),
    _P.COMPLETED: (_P.COMPLETED, False),
    _P.COMPLETED_CANCELLED: (_P.COMPLETED_CANCELLED, False),
}
_COMPLETE: Final[_Moves[CacheIoCompletionDisposition]] = {
    _P.IN_FLIGHT: (_P.COMPLETED, CacheIoCompletionDisposition.PUBLISH),
    _P.CANCELLED_IN_FLIGHT: (_P.COMPLETED_CANCELLED, CacheIoCompletionDisposition.DISCARD),
}
_RETIRE: Final[_Moves[bool]] = {
    None: (None, False),
    _P.PREPARED: (None, True),
    _P.CANCELLED_PREPARED: (None, True),
    _P.COMPLETED: (None, True),
    _P.COMPLETED_CANCELLED: (None, True),
}

_CALLS: Final[tuple[tuple[str, str, _Moves[object]], ...]] = (
    ("prepare", "", _PREPARE),
    ("admit", "room", _ADMIT_WITH_ROOM),
    ("admit", "full", _ADMIT_WHEN_FULL),
    ("rollback_admission", "", _ROLLBACK_ADMISSION),
    ("begin", "", _BEGIN),
    ("cancel", "", _CANCEL),
    ("complete", "", _COMPLETE),
    ("retire", "", _RETIRE),
)


def _shown(answer: object) -> str:
    if isinstance(answer, Enum):
        return answer.name
    return "" if answer is None else str(answer)


TRANSITIONS: Final[tuple[Transition[CacheIoPhase], ...]] = tuple(
    Transition(source, event, target, when=when, result=_shown(answer))
    for event, when, moves in _CALLS
    for source, (target, answer) in moves.items()
)

_QUEUED: Final = frozenset({_P.QUEUED, _P.CANCELLED_QUEUED})


class CacheIoExecutionState:
    """The phases of all operations of one worker, and how many are queued (see the module).

    `capacity` bounds the operations that are admitted and have not begun.
    """

    __slots__ = ("_capacity", "_peak_queued", "_phases", "_queued")

    def __init__(self, capacity: int) -> None:
        self._capacity = usize(capacity, "capacity")
        if not capacity:
            raise CacheIoExecutionStateError.ZeroCapacity
        self._queued = 0
        self._peak_queued = 0
        self._phases: dict[CacheIoOperationKey, CacheIoPhase] = {}

    @classmethod
    def new(cls, capacity: int) -> Self:
        return cls(capacity)

    @property
    def capacity(self) -> int:
        """The bound on `queued`."""
        return self._capacity

    @property
    def queued(self) -> int:
        """Operations admitted and not begun."""
        return self._queued

    @property
    def peak_queued(self) -> int:
        """The largest value `queued` ever had."""
        return self._peak_queued

    def prepare(self, key: CacheIoOperationKey) -> CacheIoPreparation:
        """Take the key, or join the operation that has it, whatever has become of that one."""
        return self._move(key, _PREPARE)

    def admit(self, key: CacheIoOperationKey) -> CacheIoAdmission:
        """Ask for a place in the queue. Errors: UnknownOperation, InvalidAdmission."""
        if key not in self._phases:
            raise CacheIoExecutionStateError.UnknownOperation
        moves = _ADMIT_WITH_ROOM if self._queued < self._capacity else _ADMIT_WHEN_FULL
        return self._move(key, moves, CacheIoExecutionStateError.InvalidAdmission)

    def rollback_admission(self, key: CacheIoOperationKey) -> None:
        """It could not be put in the queue after all. Errors: InvalidAdmissionRollback."""
        self._move(key, _ROLLBACK_ADMISSION, CacheIoExecutionStateError.InvalidAdmissionRollback)

    def begin(self, key: CacheIoOperationKey) -> CacheIoStartDisposition:
        """It has left the queue. Errors: InvalidStart."""
        return self._move(key, _BEGIN, CacheIoExecutionStateError.InvalidStart)

    def cancel(self, key: CacheIoOperationKey) -> bool:
        """Whether this call cancelled it: True once per operation."""
        return self._move(key, _CANCEL)

    def complete(self, key: CacheIoOperationKey) -> CacheIoCompletionDisposition:
        """Its task has run. Errors: InvalidCompletion."""
        return self._move(key, _COMPLETE, CacheIoExecutionStateError.InvalidCompletion)

    def retire(self, key: CacheIoOperationKey) -> bool:
        """Free the key; whether it was taken. Errors: OperationStillOwned."""
        return self._move(key, _RETIRE, CacheIoExecutionStateError.OperationStillOwned)

    def _move(
        self,
        key: CacheIoOperationKey,
        moves: _Moves[Answer],
        refusal: type[CacheIoExecutionStateError] = CacheIoExecutionStateError.UnknownOperation,
    ) -> Answer:
        source = self._phases.get(key)
        if source not in moves:
            raise refusal()
        target, answer = moves[source]
        if target is None:
            self._phases.pop(key, None)
        else:
            self._phases[key] = target
        self._queued += (target in _QUEUED) - (source in _QUEUED)
        self._peak_queued = max(self._peak_queued, self._queued)
        return answer
