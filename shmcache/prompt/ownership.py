"""Files in the making have one owner, which takes them away unless they were published.

Why: a producer may fail, forget or be forked between its first byte and its commit. What it staged
must go then, exactly once, and never in a forked child, whose copy of the owner owns nothing.

Death: a killed owner leaves its staging; its name begins with a dot and says whose it is.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

ProcessMark: TypeAlias = tuple[int, int]


def process_mark() -> ProcessMark:
    """Equal for two calls in one process. Pids alone repeat, across PID namespaces at once."""
    return os.getpid(), _forks


class StagingOwner:
    """Base of publications: a context manager that discards unless `_finish` was called.

    Concurrency: `commit` of a subclass and `close` may race; the first counts.
    """

    def __init__(self, discard: Callable[..., None], *arguments: Any) -> None:
        self._uses = itertools.count()
        self._born = process_mark()
        self._finalizer = weakref.finalize(self, _discard, self._born, discard, *arguments)

    def close(self) -> None:
        """Discard what was staged, unless it was committed. Idempotent, never raises."""
        next(self._uses)
        self._finalizer()

    @property
    def _is_open(self) -> bool:
        return self._finalizer.alive

    def _require_owner(self) -> None:
        """Errors: RuntimeError in a forked child."""
        if self._born != process_mark():
            raise RuntimeError("this publication belongs to the parent process")

    def _claim(self) -> None:
        """Errors: RuntimeError the second time, after `close`, and in a forked child."""
        self._require_owner()
        if next(self._uses):
            raise RuntimeError("this publication has been committed or closed before")

    def _finish(self) -> None:
        """Nothing is left to discard."""
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __copy__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns files: it cannot be copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns files: it cannot be pickled")


def _discard(born: ProcessMark, discard: Callable[..., None], *arguments: Any) -> None:
    if born == process_mark():
        discard(*arguments)
