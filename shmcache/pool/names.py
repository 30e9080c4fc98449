"""Take names away from segments, and only from those that nobody uses.

Why         /dev/shm is shared with strangers and survives its users. A name removed too early
            splits a pool in two; one never removed fills the host.
Contract    A name is removed or replaced only under the exclusive name lock of the file that has
            it, after looking again whether it still has it. A file that no process of this host
            could ever attach to (another boot, a gone namespace, damage, foreign bytes), a retired
            epoch, or a segment that nobody ever joined, if it is ours and no owner holds it, is a
            leftover. Age and pids prove nothing here: owners hold locks on the file, which the
            kernel drops with their last descriptor, in any namespace.
Concurrency Locks are on open file descriptions; two threads exclude each other like two
            processes.
Death       A killed remover leaves the name or does not; both are ordinary states.
Source      C06-C08, C48, C55, C68-C70 of the field's bug reports; PostgreSQL's "maybe in use".
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from shmcache import _core, bounds
from shmcache.errors import SegmentError
from shmcache.pool.values import CachePoolLimits

SHM_DIRECTORY = Path("/dev/shm")
TEMPORARY_PREFIX = ".shmcache-new."

# Byte locks on a segment's file: an owner holds one below (core/segment.c), a remover this one.
_NAME_BYTE = 1 << 62
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid

_LOCK_TRIES = 100
_LOCK_RETRY_SECONDS = 0.002

# Checks that no process of this host and release will ever pass.
_HOPELESS = frozenset(
    "size magic version abi checksum geometry boot_id pid_namespace time_namespace inode".split()
)

_log = logging.getLogger("shmcache")


def segment_path(name: str) -> Path:
    """Where the segment of this pool is."""
    return SHM_DIRECTORY / f"{bounds.SEGMENT_PREFIX}{bounds.pool_name(name)}"


def temporary_path(name: str) -> Path:
    """A fresh path for a segment that is to get this name; /proc shows it to `retire_nameless`."""
    return SHM_DIRECTORY / f"{TEMPORARY_PREFIX}{os.getpid()}.{os.urandom(8).hex()}.{name}"


def segment_names() -> list[str]:
    """Pool names that exist on this host, whoever made them."""
    prefix = bounds.SEGMENT_PREFIX
    return sorted(path.name.removeprefix(prefix) for path in SHM_DIRECTORY.glob(f"{prefix}*"))


# ---- locks on a file ---------------------------------------------------------------------------


def lock_name(fd: int) -> bool:
    """Take the right to remove or replace the name of this file; False when somebody has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, _NAME_BYTE, 1))
    except OSError:
        return False
    return True


def unlock_name(fd: int) -> None:
    """Give that right back; closing every copy of the descriptor does it too."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, _NAME_BYTE, 1))


def held_by_owner(fd: int) -> bool:
    """Whether any process, in whatever namespace, is attached as an owner."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, 0, _NAME_BYTE))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def has_name(fd: int, path: Path) -> bool:
    """Whether this very file, not another of the name, is at the path."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path, *, tries: int = 1) -> Iterator[int | None]:
    """A descriptor of the file at the path with its name locked; None when that cannot be had.

    Who looks for leftovers has the lock for an instant, which more `tries` wait out.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        while not (locked := lock_name(fd)) and (tries := tries - 1):
            time.sleep(_LOCK_RETRY_SECONDS)
        yield fd if locked and has_name(fd, path) else None
    finally:
        os.close(fd)


# ---- leftovers ---------------------------------------------------------------------------------


def collect_leftovers() -> int:
    """Remove temporary files whose creator is gone; returns how many there were."""
    collected = 0
    for path in SHM_DIRECTORY.glob(f"{TEMPORARY_PREFIX}*"):
        # Another user's file, which our group may open, is theirs to remove: /dev/shm is sticky.
        with _locked(path) as fd, contextlib.suppress(OSError):
            if fd is not None:
                path.unlink(missing_ok=True)
                collected += 1
    return collected


def remove_leftover(name: str) -> bool:
    """Remove the file of this name if it is a leftover; whether the name is free now."""
    path = segment_path(name)
    with _locked(path, tries=_LOCK_TRIES) as fd:
        if fd is not None and _is_leftover(fd, name):
            _log.warning("removed %s: no process can attach to it and none holds it", path)
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def _is_leftover(fd: int, name: str) -> bool:
    if os.fstat(fd).st_uid != os.geteuid():
        return False
    observer = _core.Attachment()
    try:
        observer._attach(os.dup(fd), name, CachePoolLimits, False)
    except SegmentError.Refused as refusal:
        return refusal.check in _HOPELESS and not held_by_owner(fd)
    try:
        if observer._state() == _core.STATE_RETIRED:
            return True  # whoever still holds it: its remover was killed before it took the name
        # Its creator ended before it joined. Should somebody join now, it is no leftover.
        return observer._attach_seq() == 0 and not held_by_owner(fd) and observer._retire(0)
    finally:
        observer.close()


def retire_nameless(name: str) -> int:
    """Retire segments of this name that live on without it; returns how many there were.

    Somebody (logind's RemoveIPC, an operator) removed the name while processes use the segment. A
    new segment of the name would split the pool unnoticed; retired, its users get a typed error at
    their next call and attach to the new one. A container that shares our processes and has a
    /dev/shm of its own uses the name for a pool of its own.
    """
    inodes = set()
    device = SHM_DIRECTORY.stat().st_dev
    for link in _nameless_descriptors(name):
        observer = _core.Attachment()
        with contextlib.suppress(OSError, SegmentError):
            observer._attach(os.open(link, os.O_RDWR | os.O_CLOEXEC), name, CachePoolLimits, False)
            file = os.fstat(observer.fileno())
            nameless = file.st_nlink == 0 and file.st_dev == device
            if nameless and observer._state() == _core.STATE_ACTIVE and observer._retire(None):
                inodes.add(file.st_ino)
        observer.close()
    if inodes:
        _log.warning("retired %d segment(s) of pool %r whose name was removed", len(inodes), name)
    return len(inodes)


def _nameless_descriptors(name: str) -> Iterator[str]:
    """/proc paths of descriptors that may be of such segments, while processes come and go.

    /proc shows a file under the path that it was opened by. That is the temporary one in the
    process that created it, whether or not it has its name.
    """
    building = rf"{re.escape(TEMPORARY_PREFIX)}[0-9]+\.[0-9a-f]{{16}}\.{re.escape(name)}"
    path = rf"{SHM_DIRECTORY}/({re.escape(segment_path(name).name)}|{building}) \(deleted\)"
    target = re.compile(path)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # gone, or somebody else's
        for link in links:
            with contextlib.suppress(OSError):
                if target.fullmatch(os.readlink(f"/proc/{pid}/fd/{link}")):
                    yield f"/proc/{pid}/fd/{link}"


# ---- removing on purpose -----------------------------------------------------------------------


def require_ours(fd: int) -> None:
    """Raise EPERM unless this user may remove the file's name: /dev/shm is sticky."""
    if os.geteuid() not in (0, os.fstat(fd).st_uid):
        raise SegmentError.HostError("unlink", "EPERM")


def remove_name(name: str, fd: int) -> bool:
    """Take the name away from the segment behind `fd`; False when it no longer has it."""
    path = segment_path(name)
    with _locked(path, tries=_LOCK_TRIES) as locked:
        if locked is None or not os.path.samestat(os.fstat(locked), os.fstat(fd)):
            return False
        path.unlink(missing_ok=True)
        return True


def remove_any(name: str) -> bool:
    """Take the name away from whatever has it, in use or not; whether the name is free now."""
    with contextlib.suppress(FileNotFoundError):
        segment_path(name).unlink()
    return not os.path.lexists(segment_path(name))


def replace_name(name: str, fd: int, temporary: Path) -> bool:
    """Give the name to the file at `temporary`, if the segment behind `fd` still has it."""
    path = segment_path(name)
    with _locked(path, tries=_LOCK_TRIES) as locked:
        if locked is None or not os.path.samestat(os.fstat(locked), os.fstat(fd)):
            return False
        os.rename(temporary, path)
        return True
