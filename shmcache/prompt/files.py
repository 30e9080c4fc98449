"""System calls on files, each with the name of the step it is part of.

Contract: every `OSError` becomes `PromptCachePersistenceError.Io` with that step's action and path.
A failed fsync is never repeated: the kernel reports lost pages once and then calls them clean.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

from shmcache.errors import PromptCachePersistenceError

StrPath: TypeAlias = str | os.PathLike[str]
Buffer: TypeAlias = bytes | bytearray | memoryview

# A FIFO must not block the open, and nothing may be reached through a link.
READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT
_MODE: Final = 0o666  # less the umask


@contextmanager
def step(action: str, path: Path) -> Iterator[None]:
    """Name the step whose system calls fail inside.

    Errors: `PromptCachePersistenceError.Io`.
    """
    try:
        yield
    except OSError as error:
        raise PromptCachePersistenceError.Io(action, path, error) from error


@contextmanager
def created(action: str, path: Path, *, exclusive: bool) -> Iterator[int]:
    """A descriptor for writing a file: a new one, or one to be overwritten."""
    with step(action, path):
        descriptor = os.open(path, _CREATE_FLAGS | (os.O_EXCL if exclusive else os.O_TRUNC), _MODE)
    try:
        yield descriptor
    except BaseException:
        close(descriptor)
        raise
    with step("close_file", path):  # some file systems tell of a full quota only now
        os.close(descriptor)


def write_all(descriptor: int, data: Buffer) -> None:
    """Write everything, in as many system calls as it takes.

    Errors: `OSError`.
    """
    rest = memoryview(data).cast("B")
    while rest:
        written = os.write(descriptor, rest)
        if not written:
            raise OSError(errno.EIO, "nothing could be written")
        rest = rest[written:]


def sync_file(descriptor: int, path: Path, action: str = "sync_file") -> None:
    """Make a file's content durable."""
    with step(action, path):
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    with step("sync_directory", path):
        descriptor = os.open(path, _DIRECTORY_FLAGS)
        try:
            os.fsync(descriptor)
        finally:
            close(descriptor)


def open_directory(path: StrPath, *, directory: int | None = None, follow: bool = False) -> int:
    """A descriptor of a directory, by default only if the last name is no link.

    Errors: `OSError`.
    """
    flags = _DIRECTORY_FLAGS | (0 if follow else os.O_NOFOLLOW)
    return os.open(path, flags, dir_fd=directory)


def close(descriptor: int) -> None:
    """Close what was not written to: an error would tell nothing."""
    with suppress(OSError):
        os.close(descriptor)


def read_up_to(descriptor: int, size_bytes: int) -> bytes:
    """The first bytes of a file, fewer only if it is shorter.

    Errors: `OSError`.
    """
    found = os.pread(descriptor, size_bytes, 0)
    while len(found) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(found), len(found))
        if not more:
            break
        found += more
    return found
