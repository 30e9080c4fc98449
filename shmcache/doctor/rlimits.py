"""Checks of this process's limits: a worker started the same way has the same."""

from __future__ import annotations

from typing import Final

from shmcache.doctor.host import CheckStatus, Host, Verdict
from shmcache.errors import size_text

_FILES_MIN: Final = 256  # a supervisor has a pidfd per owner, a worker a few descriptors per pool
_VIEWS: Final = 2  # a process maps a segment to write, and its arena to read

_OK, _NOTE, _WARN, _FAIL = CheckStatus


def open_files(host: Host) -> Verdict:
    """RLIMIT_NOFILE."""
    most = host.limit("Max open files")
    if most is None:
        return Verdict(_OK, "unlimited")
    if most < _FILES_MIN:
        return Verdict(_WARN, f"{most} descriptors", "ulimit -n 1024, or LimitNOFILE= of the unit")
    return Verdict(_OK, f"{most} descriptors")


def address_space(host: Host) -> Verdict:
    """RLIMIT_AS: a pool is mapped twice."""
    most, needed = host.limit("Max address space"), _VIEWS * host.needs_bytes
    if most is None:
        return Verdict(_OK, "unlimited")
    found = f"{size_text(most)} of addresses for a process"
    if most < needed:
        found += f", a pool of {size_text(host.needs_bytes)} takes {size_text(needed)}"
        return Verdict(_FAIL, found, "ulimit -v unlimited, or no LimitAS= in the unit")
    return Verdict(_WARN, found, "ulimit -v unlimited: every process maps a whole pool, twice")


def file_size(host: Host) -> Verdict:
    """RLIMIT_FSIZE: a pool is a file, and exceeding the limit is a signal."""
    most = host.limit("Max file size")
    if most is None:
        return Verdict(_OK, "unlimited")
    advice = "ulimit -f unlimited, or no LimitFSIZE= in the unit"
    return Verdict(_FAIL if most < host.needs_bytes else _WARN, f"{size_text(most)} a file", advice)


def locked_memory(host: Host) -> Verdict:
    """RLIMIT_MEMLOCK: of no matter to pools, but to who pins them for a device."""
    most = host.limit("Max locked memory")
    if most is None:
        return Verdict(_OK, "unlimited")
    found = f"{size_text(most)} may be locked"
    return Verdict(_NOTE, found, "ulimit -l unlimited if an engine pins blocks for its device")
