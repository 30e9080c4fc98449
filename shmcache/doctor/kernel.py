"""Checks of kernel, C library and interpreter: what the engine is built on."""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import Final

from shmcache import ContractError, SegmentError
from shmcache.doctor.host import CheckStatus, Host, Verdict

# MAP_FIXED_NOREPLACE; pidfd_open; pidfs.
_KERNEL_MIN, _KERNEL_PIDFD, _KERNEL_PIDFS = (4, 17), (5, 3), (6, 9)
_GLIBC_MIN: Final = (2, 30)
_FILTERED: Final = "2"  # in /proc/self/status

_OK, _NOTE, _WARN, _FAIL = CheckStatus


def kernel(host: Host) -> Verdict:
    """Its release."""
    release = host.read("proc/sys/kernel/osrelease") or "of unknown release"
    found, version = f"Linux {release}", _version(release)
    if version is None:
        return Verdict(_NOTE, found, "Linux 5.3 or newer is needed, 6.9 is better")
    if version < _KERNEL_MIN:
        return Verdict(_FAIL, found, "use Linux 5.3 or newer")
    if version < _KERNEL_PIDFD:
        return Verdict(_WARN, found, "use Linux 5.3 or newer: deaths are seen late without pidfds")
    if version < _KERNEL_PIDFS:
        return Verdict(_NOTE, found, "from Linux 6.9 on a reused pid is told apart at once")
    return Verdict(_OK, found)


def libc(host: Host, version: str | None = None) -> Verdict:
    """The C library, whose mutex all processes of a pool share."""
    found = _libc() if version is None else version
    if not found.startswith("glibc"):
        advice = "use glibc 2.30 or newer; other C libraries are not tested"
        return Verdict(_WARN, found or "not glibc", advice)
    known = _version(found)
    if known is not None and known < _GLIBC_MIN:
        return Verdict(_FAIL, found, "use glibc 2.30 or newer")
    return Verdict(_OK, found)


def machine(host: Host) -> Verdict:
    """All changing words of a segment are aligned 64-bit words."""
    found = f"{platform.machine()}, {sys.maxsize.bit_length() + 1} bits, {sys.byteorder} endian"
    if sys.maxsize < 1 << 32:
        return Verdict(_FAIL, found, "use a 64-bit Python on a 64-bit machine")
    return Verdict(_OK, found)


def python(host: Host) -> Verdict:
    """The interpreter."""
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return Verdict(_WARN, f"{found}, free-threaded", "use a build with the GIL")
    if platform.python_implementation() != "CPython":
        return Verdict(_WARN, found, "use CPython")
    return Verdict(_OK, found)


def robust_mutex(host: Host) -> Verdict:
    """Whether the death of a lock's holder is reported: a child is killed with one."""
    tried = (host.trials.anonymous_pool, host.trials.named_pool)
    if any(_is_robust_refusal(error) for error in tried):
        return Verdict(_FAIL, "a killed holder's lock is not reported", "run elsewhere")
    if all(tried):
        return Verdict(_WARN, "it could not be tried", "see anonymous_pool and named_pool")
    return Verdict(_OK, "a killed holder's lock is reported")


def pidfd(host: Host) -> Verdict:
    """How deaths are seen at once."""
    if host.trials.pidfd is None:
        return Verdict(_OK, "pidfd_open works")
    found = f"pidfd_open answers {host.trials.pidfd}"
    advice = "allow pidfd_open: without it deaths are seen by a sweep, every 0.25 s"
    return Verdict(_WARN, found, advice)


def pidfs(host: Host) -> Verdict:
    """How a reused pid is told from its predecessor."""
    if host.trials.pidfd is not None:
        return Verdict(_NOTE, "no pidfds", "see pidfd")
    if host.trials.pidfd_has_inode:
        return Verdict(_OK, "each pidfd has an inode of its own")
    advice = "use Linux 6.9 or newer; start times tell reused pids apart, to 10 ms"
    return Verdict(_NOTE, "pidfds have no inodes of their own", advice)


def memfd(host: Host) -> Verdict:
    """What anonymous pools are made of."""
    if host.trials.memfd is None:
        return Verdict(_OK, "memfd_create works")
    found = f"memfd_create answers {host.trials.memfd}"
    return Verdict(_WARN, found, "use named pools, or allow memfd_create")


def anonymous_pool(host: Host) -> Verdict:
    """A whole one is made and verified."""
    error = host.trials.anonymous_pool
    if error is None:
        return Verdict(_OK, "made and verified one")
    return Verdict(_WARN, _fact(error), error.hint or "use named pools")


def named_pool(host: Host) -> Verdict:
    """A whole one is made, verified and removed."""
    error = host.trials.named_pool
    if error is None:
        return Verdict(_OK, "made, verified and removed one")
    return Verdict(_FAIL, _fact(error), error.hint or "see the other checks")


def seccomp(host: Host) -> Verdict:
    """Whether a profile filters calls. Which ones matter is for pidfd, memfd and the pools."""
    if host.status.get("Seccomp") != _FILTERED:
        return Verdict(_OK, "no filter")
    if host.trials.pidfd or host.trials.memfd:
        advice = "allow pidfd_open and memfd_create in the profile"
        return Verdict(_NOTE, "a filter, which refuses calls of ours", advice)
    return Verdict(_OK, "a filter, which lets our calls pass")


def ptrace(host: Host) -> Verdict:
    """Yama: pools read /proc of their own user's processes, which it does not restrict."""
    scope = host.number("proc/sys/kernel/yama/ptrace_scope")
    if not scope:
        return Verdict(_OK, "not restricted")
    return Verdict(_OK, f"ptrace_scope is {scope}: restricts debuggers, not pools")


def _is_robust_refusal(error: ContractError | None) -> bool:
    return isinstance(error, SegmentError.Refused) and error.check == "robust_mutex"


def _fact(error: ContractError) -> str:
    return str(error).removesuffix(f": {error.hint}")


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _version(text: str) -> tuple[int, int] | None:
    found = re.search(r"([0-9]+)\.([0-9]+)", text)
    return (int(found[1]), int(found[2])) if found else None
