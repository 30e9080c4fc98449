"""The one lock of a session, with a place for what finalizers have to say.

Why: a dropped lease or an abandoned write must change the books, but a finalizer interrupts any
thread between two bytecodes, perhaps one that holds this lock or one that a holder waits for. So it
leaves a call here and goes; whoever has the lock next runs it, at once if nobody has it.

Concurrency: `later` never waits. Calls run with the lock held and must not wait either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shmcache._core import SectionLock

_log = logging.getLogger(__name__)

_RECOUNTS_MAX = 8  # interrupted ones; a handler that raises more often is a broken one


class SessionLock(SectionLock):
    """A context manager; not reentrant.

    `recount` is called when a section was cut short by anything but an error of a contract: it must
    make the books true again. If it fails, every later section raises `ManagerPoisoned`.
    Errors: RuntimeError in a forked child.
    """

    def __init__(self, recount: Callable[[], None]) -> None:
        self._recount = recount

    def check_process(self) -> None:
        """Errors: RuntimeError in a forked child."""
        if self.is_foreign:
            raise RuntimeError("this session belongs to the parent process: make one after fork")

    def later(self, call: Callable[[], None]) -> None:
        """Run `call` under the lock, now if it is free, else when it is released. Never waits."""
        if not self.is_foreign:
            self._late.append(call)
            self._run_if_free()

    def _run_late(self) -> None:
        while self._late:
            call = self._late.popleft()
            try:
                call()
            except Exception:  # noqa: BLE001 (it is nobody's call: there is no one to tell)
                _log.exception("a session could not carry out what a finalizer left to it")
            except BaseException:  # a signal handler's: the call may be half done
                self._make_true()
                raise

    def _make_true(self) -> None:
        for _ in range(_RECOUNTS_MAX):
            try:
                self._recount()
                return
            except Exception:  # noqa: BLE001 (the error that cut the section short is raised)
                _log.exception("a session could not recount after an interruption")
                break
            except BaseException:  # noqa: BLE001 (a second one: the first is on its way up)
                continue
        self._poisoned = True
