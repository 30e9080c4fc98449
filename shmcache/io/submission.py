"""A task that is registered and not yet queued: the moment to enqueue it, join, or think again."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Generic, NoReturn, Self, SupportsIndex

import msgspec
from msgspec.structs import force_setattr

from shmcache.bounds import instance, usize
from shmcache.errors import CacheIoExecutionStateError, CacheIoWorkerError
from shmcache.io.completion import Completion, Gate
from shmcache.io.engine import Engine
from shmcache.io.job import Job, Output, Task
from shmcache.io.ticket import CacheIoTicket
from shmcache.states.execution import CacheIoAdmission


class CacheIoSubmissionOutcome(msgspec.Struct, frozen=True, gc=False):
    """How `enqueue` went.

    `joined`: another submission's task serves this one. `backpressure`: a full queue delayed the
    call, whatever came of it. Units: `peak_occupancy` counts operations admitted and not started,
    the most there ever were.
    """

    joined: bool
    backpressure: bool
    peak_occupancy: int

    def __post_init__(self) -> None:
        instance(self.joined, bool, "joined")
        instance(self.backpressure, bool, "backpressure")
        force_setattr(self, "peak_occupancy", usize(self.peak_occupancy, "peak_occupancy"))


class CacheIoSubmission(Generic[Task, Output]):
    """What `CacheIoWorker.prepare` returns. Enqueue it once, or abandon it.

    Contract: an owner (`joined` is False) that is closed, leaves its `with` or is dropped without
    `enqueue` cancels the operation for everyone who joined and frees the key. The task of a joiner
    is never executed.

    Concurrency: the first of `enqueue` and `close` counts, from any thread.
    """

    # Of a call that was interrupted before `__init__` ended there is nothing to abandon.
    _job: Job[Task, Output] | None = None

    def __init__(self, engine: Engine[Task, Output], job: Job[Task, Output]) -> None:
        self._engine = engine
        self._ticket = CacheIoTicket(engine, job.completion)
        self._joined = False
        self._uses = itertools.count()
        self._job = job

    @property
    def ticket(self) -> CacheIoTicket[Output]:
        """A handle on the operation, the owner's or the one joined."""
        return self._ticket

    @property
    def joined(self) -> bool:
        """Whether another submission owns the operation."""
        return self._joined

    @property
    def joined_task(self) -> Task | None:
        """The unused task of a joiner, to disarm it; None for an owner, and once it is dropped."""
        return self._job.task if self._joined and self._job else None

    def enqueue(self) -> CacheIoSubmissionOutcome:
        """Queue the task; blocks while the queue is full, until it is cancelled or stopped.

        A cancelled operation and a stopped worker are no errors here: the ticket tells.

        Errors: RuntimeError the second time; Poisoned; Execution when the key was retired
        meanwhile. After any error, a KeyboardInterrupt too, the submission is abandoned.
        """
        self._engine.check_process()
        if next(self._uses):
            raise RuntimeError("this submission has been enqueued or closed before")
        try:
            if self._joined:
                self._abandon()
                return CacheIoSubmissionOutcome(True, False, self._engine.peak_queued())
            return self._enqueue()
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        """Abandon it, unless it was enqueued. Never blocks."""
        if not next(self._uses):
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Not weakref.finalize: the task must be gone before its release is announced, and a task
        # that leads back to its submission must not keep both alive.
        self._abandon()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a CacheIoSubmission is one-of-a-kind: it cannot be copied or pickled")

    def _join(self, completion: Completion[Output]) -> None:
        """The key is taken by another operation."""
        self._ticket = CacheIoTicket(self._engine, completion)
        self._joined = True

    def _enqueue(self) -> CacheIoSubmissionOutcome:
        assert self._job is not None
        completion, gate, blocked = self._job.completion, Gate(), False
        try:
            while True:
                admission, peak = self._engine.admit(self._job, gate)
                if admission is not CacheIoAdmission.AT_CAPACITY:
                    break
                blocked = True
                self._engine.check_blocking()
                gate.wait()
        except CacheIoExecutionStateError as error:
            completion.resolve(CacheIoWorkerError.OperationFailed(str(error)))
            raise CacheIoWorkerError.Execution(error) from error
        if admission is CacheIoAdmission.CANCELLED:
            self._abandon()
        return CacheIoSubmissionOutcome(False, blocked, peak)

    def _abandon(self) -> None:
        """Without locks: a finalizer may be running inside any of them. Again: nothing."""
        job = self._job
        if job is None:
            return
        if self._joined:
            job.forget()
        elif not job.completion.admitted:
            job.completion.cancel()
            job.forget()
            job.completion.release()
            if not job.completion.settled:
                self._engine.abandon(job.completion)
