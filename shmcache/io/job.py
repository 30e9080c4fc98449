"""One task on its way through the queue, with the two callables that know what to do with it.

Why: a task holds buffers that somebody waits to reuse, so everything that could keep it alive after
it has run (a queue item, a local, the frames of an exception) is in this file. The callables travel
with the job because the thread must not hold them while it is idle: they usually lead back to the
session that owns the worker, which then would never be collected.

Concurrency: used by one thread at a time, without locks: a task's destructor may take any lock.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from shmcache.errors import CacheIoWorkerError
from shmcache.io.completion import Completion, Done

Task = TypeVar("Task")
Output = TypeVar("Output")

CRASHED: Final = "cache I/O task crashed"

_log = logging.getLogger(__name__)


class Calls(NamedTuple, Generic[Task, Output]):
    """What a worker was made to do."""

    execute: Callable[[Task], Output]
    discard: Callable[[Output], None]


class Job(Generic[Task, Output]):
    """A task, until it is forgotten."""

    __slots__ = ("_held", "completion")

    def __init__(
        self, completion: Completion[Output], task: Task, calls: Calls[Task, Output]
    ) -> None:
        self.completion = completion
        self._held: tuple[Task, Calls[Task, Output]] | None = (task, calls)

    @property
    def task(self) -> Task | None:
        """The task; None once it is forgotten."""
        return self._held[0] if self._held else None

    def run(self) -> Done[Output] | CacheIoWorkerError:
        """Execute the task; whatever it raises becomes a result."""
        assert self._held is not None
        try:
            return Done(self._held[1].execute(self._held[0]))
        except Exception as error:  # noqa: BLE001 (the waiters are told)
            self._log(logging.INFO, "failed", error)
            return CacheIoWorkerError.OperationFailed(_message(error))
        except BaseException as error:  # noqa: BLE001 (the thread serves others: nothing ends it)
            self._log(logging.WARNING, "crashed", error)
            return CacheIoWorkerError.OperationFailed(CRASHED)

    def discard(self, output: Output) -> None:
        """Hand back an output that nobody will see."""
        assert self._held is not None
        try:
            self._held[1].discard(output)
        except BaseException as error:  # noqa: BLE001 (as in run)
            self._log(logging.ERROR, "left an output that cannot be discarded", error)

    def forget(self) -> None:
        """Drop the task; it is gone when this returns, unless somebody outside holds it too."""
        self._held = None

    def _log(self, level: int, what: str, error: BaseException) -> None:
        """Log the traceback as text: a handler that kept the exception would keep the task, too."""
        if _log.isEnabledFor(level):
            text = "".join(traceback.format_exception(error))
            _log.log(level, "cache I/O task %s: %s\n%s", what, self.completion.key, text)
        _forget_frames(error)


def _message(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 (a broken __str__ must not turn a failure into a crash)
        return type(error).__name__


def _forget_frames(error: BaseException) -> None:
    """Clear the locals of the frames that raised: an error that is part of a cycle (a frame that
    keeps it in a variable is enough) would keep the task alive until some later collection.
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
