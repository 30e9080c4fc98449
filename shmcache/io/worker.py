"""The background worker: one thread, one queue, results that any number of threads wait for.

Why: disks are slow and a session holds a lock. What may happen to an operation is decided by
`CacheIoExecutionState`; here it is carried out, and nobody is left waiting: not on a cancelled
task, a failed one, a stopped worker, a thread that is gone or a process that was forked.

Concurrency: every method from any thread; not from a signal handler, which may have interrupted a
thread inside the worker's lock. Lock order: the caller's lock, then the worker's. `execute`,
`discard` and the destructors of tasks run without the worker's lock, so they may take the caller's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, Self, SupportsIndex

from shmcache.bounds import instance
from shmcache.errors import CacheIoExecutionStateError, CacheIoWorkerError
from shmcache.io.completion import Completion, Done
from shmcache.io.engine import Engine
from shmcache.io.job import Calls, Job, Output, Task
from shmcache.io.submission import CacheIoSubmission
from shmcache.io.ticket import CacheIoTicket
from shmcache.states.storage import CacheIoOperationKey

_log = logging.getLogger(__name__)

_running: Final[dict[Engine[Any, Any], threading.Thread]] = {}


class CacheIoWorker(Generic[Task, Output]):
    """Runs tasks in the order of their admission, one at a time, on a thread of its own.

    Contract: `capacity` bounds the operations admitted and not started. `execute` turns a task into
    an output, or fails by raising. `discard` gets each output that lost to a cancellation, once.
    `close`, leaving `with`, dropping the worker and the interpreter's exit all stop it: what was
    admitted is still executed.

    Death: if the process dies, so do the tasks; a half-written file is the task's affair. A forked
    child's copy is inert: calls raise `RuntimeError`, releases do nothing.

    Errors: Execution(ZeroCapacity), before a thread exists; Spawn.
    """

    def __init__(
        self,
        capacity: int,
        thread_name: str,
        execute: Callable[[Task], Output],
        discard: Callable[[Output], None],
    ) -> None:
        instance(thread_name, str, "thread_name")
        for call in (execute, discard):
            if not callable(call):
                raise TypeError(f"execute and discard must be callable, not {call!r}")
        self._engine: Engine[Task, Output] = Engine(capacity)
        self._calls = Calls(execute, discard)
        # The thread must not lead back to the worker, or the worker could never be dropped; and it
        # must be a daemon: the interpreter joins all others before it runs _stop_all.
        self._thread = threading.Thread(
            target=_serve, args=(self._engine,), name=thread_name, daemon=True
        )
        _running[self._engine] = self._thread
        try:
            self._thread.start()
        except Exception as error:
            del _running[self._engine]
            raise CacheIoWorkerError.Spawn(thread_name, error) from error
        self._dropped = weakref.finalize(self, self._engine.stop_soon)
        self._dropped.atexit = False

    @classmethod
    def new(
        cls,
        capacity: int,
        thread_name: str,
        execute: Callable[[Task], Output],
        discard: Callable[[Output], None],
    ) -> Self:
        return cls(capacity, thread_name, execute, discard)

    def prepare(self, key: CacheIoOperationKey, task: Task) -> CacheIoSubmission[Task, Output]:
        """Register the task under its key, or join the operation that has the key. Runs nothing.

        Errors: Poisoned; RuntimeError when closed.
        """
        instance(key, CacheIoOperationKey, "key")
        job = Job(Completion(key), task, self._calls)
        # Made before the key is taken: from then on, whatever happens, it will be abandoned.
        submission = CacheIoSubmission(self._engine, job)
        registered = self._engine.prepare(job.completion)
        if registered is None:
            raise RuntimeError("the I/O worker is closed")
        if registered is not job.completion:
            submission._join(registered)
        return submission

    def retire(self, ticket: CacheIoTicket[Output]) -> None:
        """Free the key of an operation that is neither queued nor running; else nothing.

        Why: the worker does this by itself, a moment after the result is out. Until then a new
        `prepare` of the key would join the old result.
        """
        instance(ticket, CacheIoTicket, "ticket")
        with contextlib.suppress(CacheIoWorkerError.Poisoned):
            self._engine.retire(ticket._completion)

    def close(self) -> None:
        """Admit nothing more, finish what was admitted, join the thread. Idempotent.

        On the worker's own thread it only marks the stop.
        """
        self._dropped.detach()
        _stop(self._engine, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a CacheIoWorker is one-of-a-kind: it cannot be copied or pickled")


def _serve(engine: Engine[Any, Any]) -> None:
    """The thread: one job after the other, until the worker is stopped."""
    engine.thread_ident = threading.get_ident()
    try:
        while _serve_one(engine):
            pass
    except BaseException as error:  # noqa: BLE001 (all that are waiting are told)
        if not engine.is_foreign:
            _end_early(engine, error)
    finally:
        _running.pop(engine, None)
        engine.thread_ident = None
        engine.finished.open()


def _end_early(engine: Engine[Any, Any], error: BaseException) -> None:
    """Whoever waits is told `Poisoned`; the tasks that are left are dropped unrun."""
    if not isinstance(error, CacheIoWorkerError.Poisoned):
        engine.poison()
        _log.error("a cache I/O worker's thread was ended from outside", exc_info=error)
    while job := engine.take_rest():
        job.forget()
        job.completion.release()


def _serve_one(engine: Engine[Any, Any]) -> bool:
    """The next job, from the queue to its end; False when there will be none.

    A function of its own: no local of one turn may live on while the thread waits for the next.
    """
    job = engine.queue.get()
    if job is None:
        return not engine.ended()
    completion = job.completion
    try:
        if engine.begin(completion):
            _execute(engine, job)
    except CacheIoExecutionStateError as error:
        completion.resolve(CacheIoWorkerError.OperationFailed(str(error)))
    finally:
        job.forget()
        completion.release()
    engine.retire(completion)
    return True


def _execute(engine: Engine[Any, Any], job: Job[Any, Any]) -> None:
    """Run the task; its output goes to the waiters or, if a cancellation won, to `discard`."""
    result = job.run()
    engine.check_process()  # a task may fork and return in the child, whose output is only a copy
    delivered = False
    try:
        delivered = engine.complete(job.completion, result)
    finally:
        if not delivered and isinstance(result, Done):
            job.discard(result.output)


def _stop(engine: Engine[Any, Any], thread: threading.Thread) -> None:
    if engine.is_foreign:
        return
    with contextlib.suppress(CacheIoWorkerError.Poisoned):
        engine.stop()
    if thread is not threading.current_thread():
        # Not join alone: interrupted by a signal it takes the thread for ended (CPython 3.11).
        engine.finished.wait()
        thread.join()


def _stop_all() -> None:
    for engine, thread in list(_running.items()):
        _stop(engine, thread)


atexit.register(_stop_all)
