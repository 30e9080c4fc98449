"""How much shared memory this host can still give, and what to turn when it is not enough.

Why: nobody catches these failures afterwards. A tmpfs that is full kills with SIGBUS on first
touch, a memory cgroup that is full kills with SIGKILL even inside `posix_fallocate`. So a create
asks first and answers with needed bytes, available bytes and the knob.

Contract: three bounds, the tightest counts. (1) Free space of the file system of the segment.
(2) Limit minus usage of every memory cgroup from this process's own up to the root of the mount,
v1 and v2 alike: a limit set anywhere above kills just as well. (3) MemAvailable plus free swap,
what the kernel could find without killing somebody. A bound that cannot be read does not exist.

Usage is counted without `inactive_file`, the page cache that the kernel drops first: in a worker
that has just read its weights that cache fills the whole limit. Active page cache, and what could
go to swap, count as used: the answer errs on the small side. `memory.high` is not looked at, it
slows down and does not kill.

Concurrency: an answer is old as soon as it is given. It turns the common mistake into a message;
two creators at once can still meet the real limit (ENOSPC from a full tmpfs, which is harmless).

Source: cgroup-v2.rst, cgroup-v1/memory.rst, cgroups(7), proc(5) of Linux.

Not here: whose cgroup pays. The process that touches a page first does.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from shmcache.errors import SegmentError

TMPFS_KNOB = "the size of /dev/shm (--shm-size, emptyDir.sizeLimit, mount -o remount,size=)"
HOST_KNOB = "the free memory of this host (MemAvailable + SwapFree)"

_CGROUP_ROOT = Path("/sys/fs/cgroup")
# v1 writes "no limit" as the largest page-aligned long.
_UNLIMITED_BYTES = 1 << 62


class HostRoom(msgspec.Struct, frozen=True):
    """Free bytes under each of the three bounds; None where there is no such bound."""

    tmpfs_free_bytes: int | None = None
    memory_limit_free_bytes: int | None = None
    memory_limit_knob: str = ""
    """The limit file of the tightest cgroup, as this process sees it."""
    host_free_bytes: int | None = None

    def tightest(self) -> tuple[int, str] | None:
        """(free bytes, knob) of the bound that gives way first; None when nothing is known."""
        bounds = (
            (self.tmpfs_free_bytes, TMPFS_KNOB),
            (self.memory_limit_free_bytes, self.memory_limit_knob),
            (self.host_free_bytes, HOST_KNOB),
        )
        known = [(free, knob) for free, knob in bounds if free is not None]
        return min(known, key=lambda bound: bound[0], default=None)


@contextlib.contextmanager
def host_errors(call: str) -> Iterator[None]:
    """What the host refuses inside becomes a `SegmentError`: no user gets a bare OSError."""
    try:
        yield
    except OSError as error:
        raise SegmentError.HostError.of(call, error) from error


def require_room(needed_bytes: int, room: HostRoom) -> None:
    """Raise `SegmentError.NoSpace` when the tightest bound is below `needed_bytes`."""
    tightest = room.tightest()
    if tightest is not None and needed_bytes > tightest[0]:
        raise SegmentError.NoSpace(needed_bytes, *tightest)


def read_host_room(
    shm: int | str | os.PathLike[str],
    *,
    proc_root: str | os.PathLike[str] = "/proc",
    cgroup_root: str | os.PathLike[str] = "/sys/fs/cgroup",
) -> HostRoom:
    """The room for a segment on the file system of `shm`, a descriptor or a path.

    `cgroup_root` stands for /sys/fs/cgroup in the mount points that `proc_root` lists.
    """
    proc = Path(proc_root)
    levels = list(_memory_cgroups(proc, Path(cgroup_root)))
    free_bytes, knob = min(levels, default=(None, ""))
    return HostRoom(
        tmpfs_free_bytes=_filesystem_free_bytes(shm),
        memory_limit_free_bytes=free_bytes,
        memory_limit_knob=knob,
        host_free_bytes=_host_free_bytes(_read(proc / "meminfo")),
    )


def _filesystem_free_bytes(shm: int | str | os.PathLike[str]) -> int | None:
    try:
        status = os.statvfs(shm)
    except OSError as error:
        raise SegmentError.HostError.of("statvfs", error) from error
    # A tmpfs without a size, such as the kernel's own mount behind every memfd, reports no blocks.
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _host_free_bytes(meminfo: str) -> int | None:
    free_kib = dict(re.findall(r"^(MemAvailable|SwapFree): +([0-9]+) kB$", meminfo, re.MULTILINE))
    if "MemAvailable" not in free_kib:
        return None
    return (int(free_kib["MemAvailable"]) + int(free_kib.get("SwapFree", 0))) << 10


# Memory cgroups -----------------------------------------------------------------------------------


class _Hierarchy(NamedTuple):
    """What a kind of memory cgroup calls itself in /proc/self/cgroup, and its files."""

    controller: str
    limit: str
    usage: str
    droppable: str


_V2 = _Hierarchy("", "memory.max", "memory.current", "inactive_file")
_V1 = _Hierarchy("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class _Mount(NamedTuple):
    filesystem: str
    root: str
    point: Path


def _memory_cgroups(proc: Path, cgroup_root: Path) -> Iterator[tuple[int, str]]:
    """(free bytes, limit file) of every limited cgroup above this process, in both hierarchies.

    Only the memory controller has limit files. A hybrid host mounts both hierarchies and has the
    controller on one; the mounts of the other, and of other controllers, are found without any.
    """
    paths = _own_paths(_read(proc / "self" / "cgroup"))
    mounts = _cgroup_mounts(_read(proc / "self" / "mountinfo"))
    for mount in mounts:
        hierarchy = _V2 if mount.filesystem == "cgroup2" else _V1
        point = _relocate(mount.point, cgroup_root)
        for directory in _levels(point, mount.root, paths.get(hierarchy.controller, "/")):
            free_bytes = _free_bytes(directory, hierarchy)
            if free_bytes is not None:
                yield free_bytes, str(directory / hierarchy.limit)


def _own_paths(text: str) -> dict[str, str]:
    """Controller -> path in its hierarchy, of /proc/self/cgroup; v2 is the controller ""."""
    paths = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            paths.update(dict.fromkeys(fields[1].split(","), fields[2]))
    return paths


def _cgroup_mounts(text: str) -> list[_Mount]:
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) < 6 or right[0] not in ("cgroup", "cgroup2"):
            continue
        mounts.append(_Mount(right[0], _unescape(left[3]), Path(_unescape(left[4]))))
    return mounts


def _unescape(field: str) -> str:
    """The kernel writes space, tab, newline and backslash of a path as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _relocate(point: Path, cgroup_root: Path) -> Path:
    if point.is_relative_to(_CGROUP_ROOT):
        return cgroup_root / point.relative_to(_CGROUP_ROOT)
    return point


def _levels(point: Path, root: str, path: str) -> Iterator[Path]:
    """The directory of cgroup `path` and all its parents up to the mount point, innermost first.

    The mount may show only the part of the tree below `root` (a container without a cgroup
    namespace), and `path` may lie outside of it (`/../other`, or a bind mount of another group).
    Then the mount point itself is the closest group that can be seen.
    """
    below = Path(path)
    if below.is_relative_to(root) and ".." not in below.parts:
        relative = below.relative_to(root)
        for depth in range(len(relative.parts), 0, -1):
            yield point.joinpath(*relative.parts[:depth])
    yield point


def _free_bytes(directory: Path, names: _Hierarchy) -> int | None:
    """Limit minus what is used and cannot be dropped at once; None without a limit."""
    limit_bytes = _number(_read(directory / names.limit))
    if limit_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    used_bytes = _number(_read(directory / names.usage)) or 0
    stat = _read(directory / "memory.stat")
    match = re.search(rf"^{names.droppable} ([0-9]+)$", stat, re.MULTILINE)
    droppable_bytes = int(match[1]) if match else 0
    return max(0, limit_bytes - max(0, used_bytes - droppable_bytes))


def _number(text: str) -> int | None:
    """The text of a limit or usage file; "max", an absent file or nonsense is no number."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}\s*", text) else None


def _read(path: Path) -> str:
    """The file as text, empty if it cannot be read: each caller says what that means."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a NUL in a path
        return ""
