"""The host as the checks see it: files below a root, and three things that files do not tell.

Why         Every check must be shown hosts that nobody has at hand. A folder with copies of /proc,
            /sys, /etc and /dev/shm is one; the room of its file system, the user and the trials are
            given beside it.
Contract    Nothing here changes anything. A file that cannot be read is empty text, a number in it
            None: each check says what that means.
Source      proc(5), getrlimit(2), mountinfo and tmpfs in the kernel's documentation.
"""

from __future__ import annotations

import os
import re
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from shmcache import HostRoom, read_host_room
from shmcache.doctor.trials import HostTrials, try_host

SHM: Final = "/dev/shm"
_THP: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


class CheckStatus(Enum):
    """How a finding is meant."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


class Verdict(NamedTuple):
    """What a check answers: one line of what is the case, and one of what to do, if anything."""

    status: CheckStatus
    found: str
    advice: str = ""


class ShmRoom(NamedTuple):
    """A file system: `size_bytes` is 0 where it has no size of its own."""

    size_bytes: int
    free_bytes: int
    free_files: int


class Mount(NamedTuple):
    """Where a file system is seen; its options are those of the mount and of the file system."""

    point: str
    filesystem: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """The value of an option, empty for one without; None when it is not set."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


class HostSupply(msgspec.Struct, frozen=True, kw_only=True):
    """What the host can give, in numbers; None where there is no limit, or none that can be read.

    Units: bytes; `open_files` descriptors of one process. `cgroup_file` is the limit that
    `cgroup_free_bytes` belongs to, the tightest one.
    """

    memory_available_bytes: int | None
    swap_free_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    cgroup_free_bytes: int | None
    cgroup_file: str
    huge_page_bytes: int | None
    huge_pages_free_bytes: int | None
    shmem_huge: str | None
    open_files: int | None
    address_space_bytes: int | None
    file_bytes: int | None
    locked_bytes: int | None


class Host:
    """This host; or, with a `root` and the rest given, a made-up one.

    `needs_bytes` is a segment that shall fit, 0 for none in particular.
    """

    def __init__(
        self,
        root: str | Path = "/",
        *,
        needs_bytes: int = 0,
        uid: int | None = None,
        pid: int | None = None,
        shm: ShmRoom | None = None,
        trials: HostTrials | None = None,
    ) -> None:
        self.root = Path(root)
        self.needs_bytes = needs_bytes
        self.uid = os.geteuid() if uid is None else uid
        self.pid = os.getpid() if pid is None else pid
        self._shm = shm
        self._trials = trials

    # -- files

    def path(self, path: str) -> Path:
        """A path of the host, as this process reaches it."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """The text of a file, stripped; empty when it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """The one number in a file."""
        text = self.read(path)
        return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None

    def link(self, path: str) -> str | None:
        """What a symbolic link says."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return None

    # -- lines of files

    @cached_property
    def status(self) -> dict[str, str]:
        """/proc/self/status."""
        lines = (line.partition(":") for line in self.read("proc/self/status").splitlines())
        return {name: value.strip() for name, _, value in lines}

    @cached_property
    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes; counts of pages as counts."""
        lines = re.findall(r"^(\w+): +([0-9]+)( kB)?$", self.read("proc/meminfo"), re.M)
        return {name: int(number) << (10 if unit else 0) for name, number, unit in lines}

    @cached_property
    def mounts(self) -> tuple[Mount, ...]:
        """Every mount, in the order of mounting: of two at one place the later is seen."""
        found = []
        for line in self.read("proc/self/mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            left, right = before.split(" "), after.split(" ")
            if len(left) >= 6 and len(right) >= 3:
                options = tuple(left[5].split(",") + right[2].split(","))
                found.append(Mount(left[4], right[0], options))
        return tuple(found)

    def mount_of(self, path: str) -> Mount | None:
        """The mount that a path is on: the last of the longest points above it."""
        above = [m for m in self.mounts if Path(path).is_relative_to(m.point)]
        return max(enumerate(above), key=lambda nm: (len(nm[1].point), nm[0]))[1] if above else None

    def limit(self, name: str) -> int | None:
        """A soft limit of this process as /proc names it, `Max open files`; None: unlimited."""
        found = re.search(rf"^{name} +([0-9]+) ", self.read("proc/self/limits"), re.M)
        return int(found[1]) if found else None

    # -- the rest

    @cached_property
    def shm(self) -> ShmRoom | None:
        """The file system of pools; None when there is none to be seen."""
        if self._shm is not None:
            return self._shm
        try:
            status = os.statvfs(self.path(SHM))
        except OSError:
            return None
        size = status.f_frsize
        return ShmRoom(status.f_blocks * size, status.f_bavail * size, status.f_favail)

    @cached_property
    def room(self) -> HostRoom:
        """The three bounds that `create` looks at."""
        found = read_host_room(
            self.root, proc_root=self.path("proc"), cgroup_root=self.path("sys/fs/cgroup")
        )
        free_bytes = self.shm.free_bytes if self.shm and self.shm.size_bytes else None
        return msgspec.structs.replace(found, tmpfs_free_bytes=free_bytes)

    @cached_property
    def trials(self) -> HostTrials:
        """What was tried, on the real host only."""
        return self._trials or try_host()

    @property
    def shmem_huge(self) -> str | None:
        """The setting for transparent huge pages in shared memory; None where there are none."""
        chosen = re.search(r"\[(\w+)\]", self.read(_THP))
        return chosen[1] if chosen else None

    @property
    def supply(self) -> HostSupply:
        """All of it in numbers."""
        page, free_pages = self.memory.get("Hugepagesize"), self.memory.get("HugePages_Free")
        return HostSupply(
            memory_available_bytes=self.memory.get("MemAvailable"),
            swap_free_bytes=self.memory.get("SwapFree"),
            shm_bytes=self.shm and self.shm.size_bytes,
            shm_free_bytes=self.shm and self.shm.free_bytes,
            cgroup_free_bytes=self.room.memory_limit_free_bytes,
            cgroup_file=self.room.memory_limit_knob,
            huge_page_bytes=page,
            huge_pages_free_bytes=None if page is None or free_pages is None else free_pages * page,
            shmem_huge=self.shmem_huge,
            open_files=self.limit("Max open files"),
            address_space_bytes=self.limit("Max address space"),
            file_bytes=self.limit("Max file size"),
            locked_bytes=self.limit("Max locked memory"),
        )
