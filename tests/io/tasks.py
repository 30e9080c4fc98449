"""Tasks that a test holds up and lets go, workers that run them, calls on threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from shmcache.io import CacheIoSubmission, CacheIoWorker
from shmcache.states.storage import CacheIoOperationKey, CacheIoOperationKind
from tests.states.blocks import block
from tests.support import PATIENCE_S, wait_until

Returned = TypeVar("Returned")


def key(number: int, generation: int = 21) -> CacheIoOperationKey:
    """The key that the examples call k1, k2, ..."""
    return CacheIoOperationKey(generation, block(number, 0, 16), CacheIoOperationKind.WRITE)


class Output:
    """What a task returns; an object of its own, so that identity can be asked for."""

    def __init__(self, value: object) -> None:
        self.value = value


class Task:
    """Returns an `Output` of `value`, or raises it; a gated one runs until `open`."""

    def __init__(self, value: object, *, gated: bool = False) -> None:
        self.value = value
        self.running = threading.Event()
        self._gate = threading.Event()
        if not gated:
            self._gate.set()

    def open(self) -> None:
        self._gate.set()

    def wait_running(self) -> None:
        assert self.running.wait(PATIENCE_S)

    def __call__(self) -> Output:
        self.running.set()
        assert self._gate.wait(PATIENCE_S)
        if isinstance(self.value, BaseException):
            raise self.value
        return Output(self.value)


class Log:
    """The two callables of a worker, and what they were called with."""

    def __init__(self) -> None:
        self.executed: list[object] = []
        self.discarded: list[object] = []

    def execute(self, task: Task) -> Output:
        self.executed.append(task.value)
        return task()

    def discard(self, output: Output) -> None:
        self.discarded.append(output.value)


Worker = CacheIoWorker[Task, Output]
Submission = CacheIoSubmission[Task, Output]


@contextmanager
def worker_of(capacity: int) -> Iterator[tuple[Worker, Log]]:
    """A worker and its log; closed afterwards, and its thread is gone."""
    log = Log()
    with CacheIoWorker(capacity, "test-io", log.execute, log.discard) as worker:
        yield worker, log
    assert not worker._thread.is_alive()


@contextmanager
def busy_worker_of(capacity: int) -> Iterator[tuple[Worker, Log, Task]]:
    """A worker that is running a gated task; its gate is opened at the end at the latest."""
    gated = Task("gated", gated=True)
    with worker_of(capacity) as (worker, log):
        worker.prepare(key(1000), gated).enqueue()
        gated.wait_running()
        try:
            yield worker, log, gated
        finally:
            gated.open()


def wait_idle(worker: CacheIoWorker[Any, Any], keys_left: int = 0) -> None:
    """Until the thread has retired all it took, which it does after everything else."""
    wait_until(lambda: len(worker._engine._registry) == keys_left, "the worker retires its keys")


def wait_blocked(worker: CacheIoWorker[Any, Any], submitters: int = 1) -> None:
    """Until that many `enqueue` calls are waiting for room."""
    wait_until(lambda: len(worker._engine._blocked) == submitters, "submitters are blocked")


class Call(Generic[Returned]):
    """A call on a thread of its own, begun at once."""

    def __init__(self, function: Callable[..., Returned], *args: object) -> None:
        self._done: list[Returned] = []
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Returned], *args: object) -> None:
        try:
            self._done.append(function(*args))
        except BaseException as error:  # noqa: BLE001 (raised again where it is asked for)
            self._failed.append(error)

    @property
    def returned(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Returned:
        """Wait for it to return; what it raised is raised here."""
        self._thread.join(PATIENCE_S)
        assert self.returned, "the call has not returned"
        if self._failed:
            raise self._failed[0]
        return self._done[0]


def together(*functions: Callable[[], Returned]) -> list[Returned]:
    """Call all at once, each on its own thread, released by one barrier; results in order."""
    barrier = threading.Barrier(len(functions))

    def called(function: Callable[[], Returned]) -> Returned:
        barrier.wait(PATIENCE_S)
        return function()

    return [call.result() for call in [Call(called, function) for function in functions]]
