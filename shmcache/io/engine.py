"""The books of a worker: phases, who has which key, the queue, who waits for room.

Why: the worker's thread, its submissions and its tickets all change these, and none of them may
keep the worker itself alive. So they share this object, which owns no thread, and `CacheIoWorker`
is only what is dropped or closed.

Invariants: `_registry` has exactly the keys of the execution state. Jobs are in the queue in the
order of their admission. A section that is cut short (by an exception nobody planned, by Ctrl-C
between two bytecodes) poisons the books: every result that is missing becomes `Poisoned`, so that
nobody waits for ever.

Concurrency: one lock; no task, output or callable is run or dropped under it. Blocked submitters
wait outside, each at a gate of its own. Finalizers take no lock: they leave a note (`abandon`,
`stop_soon`) that the next section reads.

Death: after a fork the child's copy has no thread, and perhaps a lock held by a thread that is not
there. Every call in the child raises `RuntimeError` before it touches anything.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Concatenate, Generic, ParamSpec, TypeVar

from shmcache.errors import CacheIoExecutionStateError, CacheIoWorkerError
from shmcache.io.completion import STOPPED, Completion, Done, Gate, Latch
from shmcache.io.job import Job, Output, Task
from shmcache.states.execution import (
    CacheIoAdmission,
    CacheIoCompletionDisposition,
    CacheIoExecutionState,
    CacheIoPreparation,
    CacheIoStartDisposition,
)
from shmcache.states.storage import CacheIoOperationKey

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# Not a comparison of pids: a child in a new PID namespace may have its parent's number.
os.register_at_fork(after_in_child=_count_fork)


def section(
    method: Callable[Concatenate[Engine[Task, Output], Arguments], Returned],
) -> Callable[Concatenate[Engine[Task, Output], Arguments], Returned]:
    """A method that runs under the lock, in the creating process, on books that can be trusted.

    Errors: RuntimeError in a forked child, Poisoned; neither has changed anything. What the
    execution state refuses passes through: it has changed nothing either.
    """

    @functools.wraps(method)
    def guarded(
        self: Engine[Task, Output], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Returned:
        self.check_process()
        with self._lock:
            try:
                self._enter()
                returned = method(self, *args, **kwargs)
                self._dirty = False
                return returned
            except CacheIoExecutionStateError:
                self._dirty = False
                raise
            except BaseException:
                self._poison_if_dirty()
                raise

    return guarded


class Engine(Generic[Task, Output]):
    """See the module. `queue` gives the thread its jobs; None says "look at `ended`".

    `thread_ident` and `finished` are the thread's to set.
    """

    def __init__(self, capacity: int) -> None:
        try:
            self._state = CacheIoExecutionState(capacity)
        except CacheIoExecutionStateError as error:
            raise CacheIoWorkerError.Execution(error) from error
        self.queue: SimpleQueue[Job[Task, Output] | None] = SimpleQueue()
        self.thread_ident: int | None = None
        self.finished = Latch()
        self._born = _forks
        self._lock = threading.Lock()
        self._registry: dict[CacheIoOperationKey, Completion[Output]] = {}
        self._blocked: list[Gate] = []
        self._stopped = self._poisoned = self._dirty = False
        self._abandoned: deque[Completion[Output]] = deque()
        self._dropped = False

    # Who may call ---------------------------------------------------------------------------------

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child's copy."""
        return self._born != _forks

    def check_process(self) -> None:
        """Errors: RuntimeError in a forked child."""
        if self.is_foreign:
            raise RuntimeError("this I/O worker belongs to the parent process: make one after fork")

    def check_blocking(self) -> None:
        """Errors: RuntimeError where waiting could not end: a forked child, the worker's thread."""
        self.check_process()
        if threading.get_ident() == self.thread_ident:
            raise RuntimeError("the worker's own thread would wait for itself")

    # Submissions ----------------------------------------------------------------------------------

    @section
    def prepare(self, completion: Completion[Output]) -> Completion[Output] | None:
        """Register it, or give the one that has its key; None when stopped."""
        if self._stopped:
            return None
        if self._state.prepare(completion.key) is CacheIoPreparation.NEW:
            self._registry[completion.key] = completion
        return self._registry[completion.key]

    @section
    def admit(self, job: Job[Task, Output], gate: Gate) -> tuple[CacheIoAdmission, int]:
        """Queue the job, or say that it never will be, or that `gate` opens when to ask again.

        Also gives the peak occupancy. Errors: UnknownOperation when the key was retired meanwhile.
        """
        completion = job.completion
        if self._stopped:
            completion.resolve(CacheIoWorkerError.OperationFailed(STOPPED))
            self._free(completion)
            admission = CacheIoAdmission.CANCELLED
        elif self._owns(completion):
            admission = self._state.admit(completion.key)
        elif completion.cancelled:  # and its key retired, before its submitter woke up
            admission = CacheIoAdmission.CANCELLED
        else:
            raise CacheIoExecutionStateError.UnknownOperation
        if admission is CacheIoAdmission.ADMITTED:
            self.queue.put(job)
            completion.admitted = True
        elif admission is CacheIoAdmission.AT_CAPACITY:
            self._blocked.append(gate)
        completion.settled = admission is not CacheIoAdmission.AT_CAPACITY
        return admission, self._state.peak_queued

    @section
    def peak_queued(self) -> int:
        """The largest number of operations that ever were queued."""
        return self._state.peak_queued

    def abandon(self, completion: Completion[Output]) -> None:
        """The owner's submission will never be enqueued: the next section frees its key.

        Safe in a finalizer.
        """
        self._abandoned.append(completion)

    # Tickets --------------------------------------------------------------------------------------

    @section
    def cancel(self, completion: Completion[Output]) -> bool:
        """Whether this call cancelled the operation."""
        cancelled = self._owns(completion) and self._state.cancel(completion.key)
        if cancelled:
            completion.cancel()
            self._wake_blocked()
        return cancelled

    @section
    def retire(self, completion: Completion[Output]) -> None:
        """Free its key, if it has it and is neither queued nor running."""
        with contextlib.suppress(CacheIoExecutionStateError.OperationStillOwned):
            self._free(completion)
        self._wake_blocked()

    # The thread -----------------------------------------------------------------------------------

    @section
    def begin(self, completion: Completion[Output]) -> bool:
        """The job has left the queue; whether to run it."""
        disposition = self._state.begin(completion.key)
        self._wake_blocked()
        return disposition is CacheIoStartDisposition.EXECUTE

    @section
    def complete(
        self, completion: Completion[Output], result: Done[Output] | CacheIoWorkerError
    ) -> bool:
        """The job has run; whether the waiters were given its result."""
        try:
            disposition = self._state.complete(completion.key)
        except CacheIoExecutionStateError as error:
            completion.resolve(CacheIoWorkerError.OperationFailed(str(error)))
            return False
        return disposition is CacheIoCompletionDisposition.PUBLISH and completion.resolve(result)

    @section
    def ended(self) -> bool:
        """Whether the thread has nothing left to do and will never have."""
        return self._stopped and self.queue.empty()

    def take_rest(self) -> Job[Task, Output] | None:
        """A job left in the queue by a thread that ended early."""
        with contextlib.suppress(Empty):
            while True:
                if job := self.queue.get_nowait():
                    return job
        return None

    # The end --------------------------------------------------------------------------------------

    @section
    def stop(self) -> None:
        """Admit nothing more; the thread ends behind what was admitted."""
        self._stop()

    def stop_soon(self) -> None:
        """The worker was dropped. Safe in a finalizer: the thread does the rest."""
        self._dropped = True
        self.queue.put(None)

    def poison(self) -> None:
        """The thread cannot go on."""
        with self._lock:
            self._poison()

    # Under the lock -------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._poison_if_dirty()
        if self._poisoned:
            raise CacheIoWorkerError.Poisoned
        self._dirty = True
        while self._abandoned:
            self._free(self._abandoned.popleft())
        if self._dropped:
            self._stop()

    def _owns(self, completion: Completion[Output]) -> bool:
        """Whether its key is (still) its own: keys are used again, completions are not."""
        return self._registry.get(completion.key) is completion

    def _free(self, completion: Completion[Output]) -> None:
        if self._owns(completion):
            self._state.retire(completion.key)
            del self._registry[completion.key]

    def _wake_blocked(self) -> None:
        """Each blocked submitter asks again: there may be room, or it may have been cancelled."""
        while self._blocked:
            self._blocked[-1].open()
            self._blocked.pop()

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.queue.put(None)
            self._wake_blocked()

    def _poison_if_dirty(self) -> None:
        if self._dirty and not self._poisoned:
            self._poison()

    def _poison(self) -> None:
        self._stop()
        for completion in self._registry.values():
            completion.poison()
        self._wake_blocked()
        self.queue.put(None)
        self._poisoned = True  # last: cut short, too, the next section does it again
