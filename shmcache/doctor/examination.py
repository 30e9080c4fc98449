"""The table of all checks, and going through it.

Why         What makes pools fail is spread over kernel, containers, limits and logins; one command
            should find it before a worker does.
Contract    A check is a function from a `Host` to a `Verdict`; its name is what the table calls it.
            FAIL: pools cannot be made or used as wanted. WARN: they will be lost, or fail, or be
            slow to notice, under some circumstances. NOTE: worth knowing. The order is that in
            which one would ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Final

import msgspec

from shmcache.doctor import files, isolation, kernel, memory, rlimits
from shmcache.doctor.host import CheckStatus, Host, Verdict

Check = Callable[[Host], Verdict]

# Whether a pool of a given size fits: what `shmcache plan` asks.
_ROOM: Final[tuple[Check, ...]] = (
    memory.shm_room,
    memory.cgroup,
    memory.memory,
    memory.overcommit,
    memory.thp,
    memory.hugetlb,
    rlimits.address_space,
    rlimits.file_size,
    rlimits.open_files,
    rlimits.locked_memory,
)
_OTHERS: Final[tuple[Check, ...]] = (
    kernel.machine,
    kernel.kernel,
    kernel.libc,
    kernel.python,
    kernel.robust_mutex,
    kernel.pidfd,
    kernel.pidfs,
    kernel.memfd,
    kernel.seccomp,
    kernel.ptrace,
    isolation.pid_namespace,
    isolation.time_namespace,
    isolation.proc,
    isolation.remove_ipc,
    memory.shm_mount,
    files.shm_permissions,
    files.segments,
    files.leftovers,
    files.strangers,
    memory.swap,
    memory.mappings,
    kernel.named_pool,
    kernel.anonymous_pool,
)
CHECKS: Final = MappingProxyType({check.__name__: check for check in (*_OTHERS, *_ROOM)})
ROOM_CHECKS: Final = tuple(check.__name__ for check in _ROOM)


class HostCheck(msgspec.Struct, frozen=True):
    """One line of an examination."""

    name: str
    status: CheckStatus
    found: str
    advice: str


class Examination(msgspec.Struct, frozen=True):
    """What was found; `ok` without a failure."""

    checks: tuple[HostCheck, ...]

    @property
    def ok(self) -> bool:
        """Nothing fails."""
        return not self.count(CheckStatus.FAIL)

    def count(self, status: CheckStatus) -> int:
        """How many checks ended so."""
        return sum(check.status is status for check in self.checks)


def examine_host(host: Host | None = None, names: Iterable[str] = CHECKS) -> Examination:
    """Make these checks, all of them unless told otherwise, on this host unless shown another."""
    seen = host or Host()
    return Examination(tuple(HostCheck(name, *CHECKS[name](seen)) for name in names))
