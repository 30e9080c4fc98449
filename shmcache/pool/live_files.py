"""Files that die with an owner: a directory of its own for each place, found by whoever sweeps.

Why         A killed process deletes nothing, and the bytes of its files stay charged on the disk
            axis until they are gone. So the pool knows where they are before the first exists.
Contract    `live_directory(place)` gives this owner a directory below `place` whose name carries
            the epoch and the owner's nonce: nobody else ever has the same. The place stands in the
            owner's slot from before the directory is made until after it is removed. Reclaim gives
            back all else of a dead owner, deletes these files, and only then releases their charge.
Invariants  G6: only the directory that carries the dead owner's nonce is looked into. G8: a place
            is input: absolute, reached without following any link, the directory ours, and of what
            is in it only regular files of ours with the name of a live block are deleted.
Concurrency Any number of sweepers delete the same files at once. The table of one owner has a lock
            for the threads of its process; a finalizer only tries it, else its part is queued.
Death       Before the place is noted: nothing. After it: a place without a directory, or one with
            files; a sweep finds either. A killed sweeper leaves fewer files to the next.
Fork        A child is another owner: what its parent listed is the parent's.
Errors      SegmentError.LiveDirectoriesFull: a slot has 384 bytes for all places of an owner.
            What cannot be deleted (another user's, a read-only file system) stays charged, is told
            by `sweep()` and tried again by every sweep.
Limits      Sweepers must see the places under the same paths: a place that is not there is taken
            for gone. Nobody sweeps for a pool without a name whose last process was killed.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from shmcache._core import CachePoolMembership
from shmcache.errors import CachePoolError, SegmentError
from shmcache.pool.arena import ArenaPool

_WALK: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# The names that prompt/live.py gives, staging included; a test compares.
LIVE_NAME: Final = re.compile(
    r"\.?live-p[0-9a-f]{8}-t[0-9a-f]{32}-w[0-9a-f]{16}-s[0-9a-f]{16}-layer-\d{5,}-(kv|mla)"
    r"-rank-p(\d+|x)-t(\d+|x)-e(\d+|x)--?\d+--?\d+(\.tmp)?\.safetensors"
)


class UndeletedFiles(msgspec.Struct, frozen=True):
    """Live files of a dead owner that could not be deleted, and why; their charge stays."""

    place: str
    reason: str


class LiveDirectory:
    """One use of an owner's directory for live files; `close` ends it, idempotently.

    The last use of a place takes the directory away, with what is still in it. Once the pool is
    closed there is nothing left of it, and a forked child has no part in it.
    """

    def __init__(self, pool: LiveFilesPool, table: _Places, place: str, path: Path) -> None:
        self.path = path
        self._pool = pool
        self._table = table
        self._place = place
        self._closed = False

    def close(self, *, wait: bool = True) -> None:
        """`wait=False`, for finalizers: what is in another thread's hands is done by that one."""
        if not self._closed and self._pool._nonce_here() == self._table.nonce:
            self._closed = True
            self._table.left.append(self._place)
            self._table.settle(self._pool, wait=wait)


class _Places:
    """The places of one owner, by how many use them."""

    def __init__(self, nonce: int) -> None:
        self.nonce = nonce
        self.lock = threading.Lock()
        self.users: dict[str, int] = {}
        self.left: collections.deque[str] = collections.deque()

    def settle(self, pool: LiveFilesPool, *, wait: bool) -> None:
        """Take back the uses that have ended. Who holds the lock looks again after releasing it."""
        while self.left and self.lock.acquire(blocking=wait):
            try:
                while self.left:
                    self._leave(pool, self.left.popleft())
            finally:
                self.lock.release()

    def _leave(self, pool: LiveFilesPool, place: str) -> None:
        self.users[place] -= 1
        if not self.users[place] and delete_live_files(place, pool._live_name(self.nonce)) is None:
            self.forget(pool, place)

    def forget(self, pool: LiveFilesPool, place: str) -> None:
        """A place too many in the slot is harmless: a pool that has ended keeps it."""
        del self.users[place]
        with contextlib.suppress(SegmentError, CachePoolError):
            self.tell(pool)

    def tell(self, pool: LiveFilesPool) -> None:
        """Errors: LiveDirectoriesFull, and those of every call."""
        pool._set_paths(b"".join(os.fsencode(place) + b"\0" for place in self.users))


class LiveFilesPool(ArenaPool):
    """The part of `CacheResidencyPool` that is about files. See the module."""

    _places: dict[int, _Places]
    _undeleted: dict[int, tuple[UndeletedFiles, ...]]
    _kept: list[CachePoolMembership]

    def live_directory(self, place: str | os.PathLike[str]) -> LiveDirectory:
        """A directory for files that must not outlive this process, below `place`, which exists.

        Errors: OSError; SegmentError.LiveDirectoriesFull.
        """
        real = os.path.realpath(os.fspath(place))
        nonce = self._facts()[4]
        table = self._places.setdefault(nonce, _Places(nonce))
        path = Path(real, self._live_name(nonce))
        try:
            with table.lock:
                self._use(table, real, path)
        finally:
            table.settle(self, wait=False)
        return LiveDirectory(self, table, real, path)

    def keep_membership(self, membership: CachePoolMembership) -> None:
        """Let a charge stand for files that could not be deleted, for as long as this handle."""
        self._kept.append(membership)

    def _use(self, table: _Places, place: str, path: Path) -> None:
        known = place in table.users
        table.users.setdefault(place, 0)
        try:
            if not known:
                table.tell(self)
            path.mkdir(mode=0o700, exist_ok=True)
        except BaseException:
            if not known:
                table.forget(self, place)
            raise
        table.users[place] += 1

    def _delete_live_files(self, paths: bytes, nonce: int) -> bool:
        """Called by reclaim, without the lock."""
        undeleted = tuple(
            UndeletedFiles(place, reason)
            for place in decoded(paths)
            if (reason := delete_live_files(place, self._live_name(nonce))) is not None
        )
        self._undeleted[nonce] = undeleted  # for `sweep`, which tells
        return not undeleted

    def delete_files_of_the_dead(self) -> None:
        """Before an epoch ends: afterwards nobody would know of them. As far as possible."""
        for slot, nonce, _ in self._find_dead():
            self._delete_live_files(self._owner_paths(slot, nonce), nonce)

    def _live_name(self, nonce: int) -> str:
        return f"shmcache-live-{self.id:016x}-{nonce:016x}"


def decoded(paths: bytes) -> tuple[str, ...]:
    """The places in an owner's slot."""
    return tuple(os.fsdecode(path) for path in paths.split(b"\0") if path)


def delete_live_files(place: str, name: str) -> str | None:
    """Delete the live files in the directory `name` of a place, and the directory.

    None when none are left, else why not. What else is in the directory is left there.
    """
    try:
        with _opened_without_links(place) as parent:
            descriptor = os.open(name, _LIST, dir_fd=parent)
            try:
                _empty(descriptor, parent, name)
            finally:
                os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


@contextlib.contextmanager
def _opened_without_links(place: str) -> Iterator[int]:
    """Errors: OSError, ENOTDIR for a link; EINVAL for what is no normal absolute path."""
    if not place.startswith("/") or os.path.normpath(place) != place:
        raise OSError(errno.EINVAL, "this is no normal absolute path")
    descriptor = os.open("/", _WALK)
    try:
        for part in place.split("/")[1:]:
            if part:
                parent, descriptor = descriptor, os.open(part, _WALK, dir_fd=descriptor)
                os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def _empty(descriptor: int, parent: int, name: str) -> None:
    """Until the directory can be removed, or nothing in it is a live file."""
    if os.fstat(descriptor).st_uid != os.geteuid():
        raise OSError(errno.EPERM, "the directory belongs to another user")
    deleted = True
    while deleted:
        deleted = False
        for entry in filter(LIVE_NAME.fullmatch, os.listdir(descriptor)):
            with contextlib.suppress(FileNotFoundError):  # another sweeper was faster
                status = os.stat(entry, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    os.unlink(entry, dir_fd=descriptor)
                    deleted = True
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
