"""A directory that somebody uses is held: a shared flock that only garbage collection minds.

Why: a reader must not lose a generation under its hands, a publisher not its staging, and neither
may wait for anybody. So users share the lock, and only who deletes asks for it alone, without
waiting.

Contract: a hold says nothing about content. Where a file system has no flock, holding succeeds and
deleting does not.

Death: the kernel releases the lock with the last descriptor; a forked child keeps its parent's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from shmcache.prompt.files import close, open_directory

_NO_FLOCK: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class DirectoryHold:
    """An open directory that nobody will prune; `close` lets go of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._finalizer = weakref.finalize(self, close, descriptor)

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Hold what has this name; None if it is just being deleted, or has gone meanwhile.

        Errors: `OSError` when it cannot be opened; a link in place of the last name is not.
        """
        hold = cls(open_directory(path))
        try:
            fcntl.flock(hold.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            hold.close()
            return None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                hold.close()
                raise
        if hold.is_at(path):
            return hold
        hold.close()
        return None

    def is_at(self, path: Path) -> bool:
        """Whether the held directory still has this name."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(path))
        return False

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether it was let go of."""
        return not self._finalizer.alive


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int | None]:
    """The open directory while nobody else holds it; None if somebody does, or it has gone."""
    try:
        descriptor = open_directory(path)
    except OSError:
        yield None
        return
    try:
        yield descriptor if _is_alone(descriptor, path) else None
    finally:
        close(descriptor)


def _is_alone(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
