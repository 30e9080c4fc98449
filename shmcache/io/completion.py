"""What one operation came to: the result slot, and whether its task is gone.

Why: any number of threads and event loops wait for either fact, and each may come from anywhere,
from a garbage collector's finalizer too. A finalizer interrupts a thread between two bytecodes, so
nothing here takes a lock that a thread could be holding: a `threading.Event` would deadlock.

Invariants: the result is set once and never changes. The two facts are independent.

Concurrency: every method may be called from any thread and from finalizers. Relied upon is that
`dict.setdefault`, a list of a dict's values and the release of a raw lock are each one step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from threading import TIMEOUT_MAX, Lock
from typing import Final, Generic, TypeVar

from shmcache.errors import CacheIoWorkerError
from shmcache.states.storage import CacheIoOperationKey

Output = TypeVar("Output")

STOPPED: Final = "cache I/O worker stopped"


class Gate:
    """Blocks one thread until another opens it; each opening lets it through once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let the thread through, now or when it comes; once, if it is opened twice before."""
        with contextlib.suppress(RuntimeError):  # it is open
            self._lock.release()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is opened, or after `timeout` seconds."""
        seconds = -1 if timeout is None else min(max(timeout, 0), TIMEOUT_MAX)
        self._lock.acquire(timeout=seconds)


class Latch:
    """A fact that becomes true once and stays so, and those who wait for it."""

    __slots__ = ("_open", "_wakes")

    def __init__(self) -> None:
        self._open = False
        self._wakes: dict[object, Callable[[], object]] = {}

    @property
    def is_open(self) -> bool:
        """Whether the fact is true."""
        return self._open

    def open(self) -> None:
        """Make it true and wake all who wait, each at least once.

        Who wakes up unsubscribes himself: were he taken off the list here, an exception before his
        wake-up would leave him waiting for ever.
        """
        self._open = True
        for wake in list(self._wakes.values()):
            wake()

    def subscribe(self, waiter: object, wake: Callable[[], object]) -> None:
        """`wake` runs when it is true, on the thread that makes it true; it must bear repetition.

        The waiter must look at `is_open` afterwards: an `open` may have passed in between.
        """
        self._wakes[waiter] = wake

    def unsubscribe(self, waiter: object) -> None:
        """The waiter has stopped waiting, for whatever reason."""
        self._wakes.pop(waiter, None)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is true, at most `timeout` seconds; whether it is."""
        if not self._open:
            gate = Gate()
            self.subscribe(gate, gate.open)
            try:
                if not self._open:
                    gate.wait(timeout)
            finally:
                self.unsubscribe(gate)
        return self._open


class Done(Generic[Output]):
    """The result of a task that returned."""

    __slots__ = ("output",)

    def __init__(self, output: Output) -> None:
        self.output = output


class Completion(Generic[Output]):
    """One operation as its waiters see it; tickets are handles on it.

    The engine sets, under its lock: `admitted`, the thread has the task; `settled`, the owner's
    submission was used up and has no claim on the key any more.
    """

    __slots__ = ("_released", "_result", "admitted", "key", "released", "resolved", "settled")

    def __init__(self, key: CacheIoOperationKey) -> None:
        self.key = key
        self.resolved = Latch()
        self.released = Latch()
        self.admitted = self.settled = False
        self._released = False
        self._result: dict[None, Done[Output] | CacheIoWorkerError] = {}

    @property
    def cancelled(self) -> bool:
        """Whether the result is a cancellation."""
        return isinstance(self._result.get(None), CacheIoWorkerError.Cancelled)

    def resolve(self, result: Done[Output] | CacheIoWorkerError) -> bool:
        """Set the result, unless there is one; whether it was set."""
        first = self._result.setdefault(None, result) is result
        self.resolved.open()
        return first

    def cancel(self) -> bool:
        """Set the result to a cancellation, unless there is one."""
        return self.resolve(CacheIoWorkerError.Cancelled(self.key.generation))

    def release(self) -> None:
        """The task and all it held are gone."""
        self._released = True
        self.released.open()

    def poison(self) -> None:
        """Nobody will set what is missing: let no one wait for it."""
        self.resolve(CacheIoWorkerError.Poisoned())
        self.released.open()

    def answer(self) -> Output:
        """The output, or the error. To be called when `resolved` is open."""
        result = self._result[None]
        if isinstance(result, Done):
            return result.output
        raise copy.copy(result)  # each waiter adds a traceback of its own

    def check_released(self) -> None:
        """To be called when `released` is open. Errors: Poisoned."""
        if not self._released:
            raise CacheIoWorkerError.Poisoned
