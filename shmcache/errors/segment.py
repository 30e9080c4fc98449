"""What the shared segment and this host can refuse beside accounting."""

from __future__ import annotations

import errno
from typing import Literal, TypeAlias

from shmcache.errors.base import ContractError, variant

RefusedCheck: TypeAlias = Literal[
    "owner_uid",
    "mode",
    "file_type",
    "size",
    "magic",
    "version",
    "abi",
    "boot_id",
    "pid_namespace",
    "time_namespace",
    "inode",
    "checksum",
    "limits",
    "geometry",
    "robust_mutex",
]

_RECREATE = "destroy it (`shmcache destroy`) and create it again"
_REFUSED_HINTS: dict[str, str] = {
    "owner_uid": "run as the user who created it, or choose another pool name",
    "mode": "another user could write to it: restore the mode with chmod, or recreate it",
    "file_type": "something else has this name: remove it, or choose another pool name",
    "size": f"the file was cut or overwritten: {_RECREATE}",
    "magic": "this file is no pool of shmcache: choose another pool name",
    "version": f"use one release of shmcache in all workers, or {_RECREATE}",
    "abi": f"use one build of shmcache on one kind of machine, or {_RECREATE}",
    "boot_id": f"it comes from before the last boot: {_RECREATE}",
    "pid_namespace": "share one PID namespace between all workers (shareProcessNamespace, --pid)",
    "time_namespace": "share one time namespace between all workers",
    "inode": f"it is a copy of a pool, and a copy is none: {_RECREATE}",
    "checksum": f"its header is damaged: {_RECREATE}",
    "limits": "ask for the limits it was created with, or attach without naming any",
    "geometry": "ask for the sizes it was created with, or attach without naming any",
    "robust_mutex": "this libc or kernel cannot recover a lock whose holder was killed",
}

_ERRNO_HINTS: dict[str, str] = {
    "EACCES": "check the mode and the owner of the segment and of /dev/shm",
    "EPERM": "a security profile or a missing capability forbids this call",
    "EMFILE": "raise the open file limit of this process (ulimit -n)",
    "ENFILE": "raise fs.file-max on this host",
    "ENOMEM": "raise vm.max_map_count or the address space limit (ulimit -v)",
    "ENOSPC": "raise the size of /dev/shm (--shm-size) or lower host_bytes",
    "ENOSYS": "this kernel is too old, or a security profile hides the call",
    "EROFS": "mount /dev/shm writable",
}


class SegmentError(ContractError):
    """What the shared segment can refuse beside accounting: names, files, room, tables, locks."""

    Exists: TypeAlias = "_SegmentExists"
    NotFound: TypeAlias = "_SegmentNotFound"
    Refused: TypeAlias = "_SegmentRefused"
    NoSpace: TypeAlias = "_SegmentNoSpace"
    OwnersFull: TypeAlias = "_SegmentOwnersFull"
    TableFull: TypeAlias = "_SegmentTableFull"
    LiveDirectoriesFull: TypeAlias = "_SegmentLiveDirectoriesFull"
    LockHeld: TypeAlias = "_SegmentLockHeld"
    Retired: TypeAlias = "_SegmentRetired"
    Corrupt: TypeAlias = "_SegmentCorrupt"
    ArenaFull: TypeAlias = "_SegmentArenaFull"
    BlockTooLarge: TypeAlias = "_SegmentBlockTooLarge"
    NoArena: TypeAlias = "_SegmentNoArena"
    InUse: TypeAlias = "_SegmentInUse"
    Closed: TypeAlias = "_SegmentClosed"
    HostError: TypeAlias = "_SegmentHostError"


@variant("a pool named {name!r} exists", hint="attach to it, open_or_create, or destroy it first")
class _SegmentExists(SegmentError):
    name: str


@variant("no pool is named {name!r}", hint="`shmcache list` shows what exists, `create` makes one")
class _SegmentNotFound(SegmentError):
    name: str


def _shown(check: str, expected: object, actual: object) -> tuple[object, object]:
    """Modes as people write them; of two sets of sizes, only what differs."""
    if check == "mode" and isinstance(expected, int) and isinstance(actual, int):
        return oct(expected), oct(actual)
    fields = getattr(expected, "__struct_fields__", ())
    if not fields or type(actual) is not type(expected):
        return expected, actual
    differing = [field for field in fields if getattr(expected, field) != getattr(actual, field)]
    expected_text, actual_text = (
        ", ".join(f"{field} {getattr(value, field)}" for field in differing)
        for value in (expected, actual)
    )
    return expected_text, actual_text


@variant("the segment failed the check {check}: expected {expected}, found {actual}")
class _SegmentRefused(SegmentError):
    check: RefusedCheck
    expected: object
    actual: object

    def __str__(self) -> str:
        shown = _shown(self.check, self.expected, self.actual)
        if shown == (self.expected, self.actual):
            return super().__str__()
        return str(SegmentError.Refused(self.check, *shown))

    @property
    def hint(self) -> str:
        return _REFUSED_HINTS.get(self.check, "")


@variant(
    "the pool needs {needed:size}, {available:size} can be had",
    hint="raise {knob} or lower host_bytes",
)
class _SegmentNoSpace(SegmentError):
    """`knob` is what an operator turns: a cgroup file, or the option that sizes /dev/shm."""

    needed: int
    available: int
    knob: str


@variant(
    "all {owners_max} owner slots are taken by live processes",
    hint="attach fewer processes, or create the pool with a larger owners_max",
)
class _SegmentOwnersFull(SegmentError):
    owners_max: int


@variant(
    "all {capacity} rows of the {table} table are taken",
    hint="release some, or create the pool with a larger {table}_max",
)
class _SegmentTableFull(SegmentError):
    """`table` is `managers`, `reservations`, `claims` or `block sizes`."""

    table: str
    capacity: int


@variant(
    "the directories of this process's live files need {needed:size} in the pool, "
    "there are {available:size}",
    hint="let its sessions share directories, or choose shorter paths",
)
class _SegmentLiveDirectoriesFull(SegmentError):
    """Each path counts with one byte more than it has."""

    needed: int
    available: int


@variant(
    "process {pid} (state {state}) holds the lock of the pool, waited {waited_ns} ns",
    hint="continue it if it is stopped (kill -CONT {pid}) or end it: a live holder is never robbed",
)
class _SegmentLockHeld(SegmentError):
    """`state` is the letter of /proc/PID/stat, or `unknown`."""

    pid: int
    state: str
    waited_ns: int


@variant("this epoch of pool {name!r} has been retired", hint="close this handle and attach again")
class _SegmentRetired(SegmentError):
    name: str


@variant("the segment is damaged: {what}", hint=f"no byte of it was used; {_RECREATE}")
class _SegmentCorrupt(SegmentError):
    what: str


@variant(
    "no room for a block of {needed:size} in the arena; held, as (pid, bytes): {holders}",
    hint="release leases, or create the pool with more arena_bytes",
)
class _SegmentArenaFull(SegmentError):
    """`holders` lists (pid, bytes) of the owners whose blocks cannot be evicted, largest first."""

    needed: int
    holders: tuple[tuple[int, int], ...]


@variant(
    "no block of this pool can have {needed:size}, the largest has {largest:size}",
    hint="cut it into smaller blocks, or create the pool with a larger block_bytes_max",
)
class _SegmentBlockTooLarge(SegmentError):
    needed: int
    largest: int


@variant(
    "pool {name!r} was made without an arena",
    hint="create it with arena_bytes (and at least 64 KiB of host_bytes)",
)
class _SegmentNoArena(SegmentError):
    name: str


@variant(
    "other live processes are attached: {owners}",
    hint="stop them first, or force (--force): they then keep the old memory, and get Retired",
)
class _SegmentInUse(SegmentError):
    """`owners` lists pids."""

    owners: tuple[int, ...]


@variant("this handle of pool {name!r} is closed", hint="attach again")
class _SegmentClosed(SegmentError):
    name: str


@variant("{call} failed with {errno_name}")
class _SegmentHostError(SegmentError):
    """A system call failed in a way that no other variant describes."""

    call: str
    errno_name: str

    @classmethod
    def of(cls, call: str, error: OSError) -> SegmentError.HostError:
        number = error.errno or 0
        return cls(call, errno.errorcode.get(number, f"errno {number}"))

    @property
    def hint(self) -> str:
        if (self.call, self.errno_name) == ("unlink", "EPERM"):
            return "only the user who created the pool can remove its name: destroy it as that user"
        return _ERRNO_HINTS.get(self.errno_name, "")
