"""The one lock of a session, with a place for what finalizers have to say.

Why: a dropped lease or an abandoned write must change the books, but a finalizer interrupts any
thread between two bytecodes, perhaps one that holds this lock or one that a holder waits for. So it
leaves a call here and goes; whoever has the lock next runs it, at once if nobody has it.

Concurrency: `later` never waits. Calls run with the lock held and must not wait either.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from shmcache.errors import CacheResidencyError, ContractError

_log = logging.getLogger(__name__)

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# Not a comparison of pids: that is a system call each time this lock is taken.
os.register_at_fork(after_in_child=_count_fork)


class SessionLock:
    """A context manager; not reentrant.

    `recount` is called when a section was cut short by anything but an error of a contract: it must
    make the books true again. If it fails, every later section raises `ManagerPoisoned`.
    """

    def __init__(self, recount: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._late: deque[Callable[[], None]] = deque()
        self._recount = recount
        self._poisoned = False
        self._born = _forks

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child's copy, which owns nothing."""
        return self._born != _forks

    def check_process(self) -> None:
        """Errors: RuntimeError in a forked child."""
        if self.is_foreign:
            raise RuntimeError("this session belongs to the parent process: make one after fork")

    def __enter__(self) -> None:
        if self._born != _forks:
            self.check_process()
        self._lock.acquire()
        if self._poisoned:
            self._lock.release()
            raise CacheResidencyError.ManagerPoisoned
        if self._late:
            self._run_late()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is not None and not issubclass(kind, ContractError):
                self._make_true()
            if self._late:
                self._run_late()
        finally:
            self._lock.release()
        if self._late:
            self._run_if_free()

    def later(self, call: Callable[[], None]) -> None:
        """Run `call` under the lock, now if it is free, else when it is released. Never waits."""
        if not self.is_foreign:
            self._late.append(call)
            self._run_if_free()

    def _run_if_free(self) -> None:
        # Whoever holds the lock looks at the list after releasing it, so nothing is forgotten.
        while self._late and self._lock.acquire(blocking=False):
            try:
                self._run_late()
            finally:
                self._lock.release()

    def _run_late(self) -> None:
        while self._late:
            call = self._late.popleft()
            try:
                call()
            except Exception:  # noqa: BLE001 (it is nobody's call: there is no one to tell)
                _log.exception("a session could not carry out what a finalizer left to it")

    def _make_true(self) -> None:
        try:
            self._recount()
        except Exception:  # noqa: BLE001 (the error that cut the section short is raised)
            _log.exception("a session could not recount after an interruption")
            self._poisoned = True
