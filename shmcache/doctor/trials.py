"""What only a try can tell: a security profile hides calls that the kernel has.

Contract    Makes a pool of less than a megabyte under a name of its own and removes it; looks at
            every other segment without attaching as an owner. Nothing else is changed.
Death       A killed trial leaves its small pool, which the next doctor shows as a segment.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from shmcache import (
    CachePoolLimits,
    CacheResidencyPool,
    ContractError,
    OwnerVerdict,
    SegmentError,
    segment_names,
)

_LIMITS = CachePoolLimits(1, 0, 1, 0)


class SegmentSight(msgspec.Struct, frozen=True):
    """A file with a pool's name: its state, or the problem, and the failed check if it is one."""

    name: str
    state: str
    problem: str = ""
    check: str = ""
    dead_owners: int = 0


class HostTrials(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; of a call or a pool the error, None when it works."""

    pidfd: str | None = None
    pidfd_has_inode: bool = True
    memfd: str | None = None
    anonymous_pool: ContractError | None = None
    named_pool: ContractError | None = None
    segments: tuple[SegmentSight, ...] = ()
    proc_owned: bool = True


def try_host() -> HostTrials:
    """Try everything on this host."""
    segments = tuple(sight for name in segment_names() if (sight := _sight(name)))
    pidfd, has_inode = _try_pidfd()
    return HostTrials(
        pidfd=pidfd,
        pidfd_has_inode=has_inode,
        memfd=_try_memfd(),
        anonymous_pool=_try_pool(""),
        named_pool=_try_pool(f"doctor-{os.getpid()}-{os.urandom(4).hex()}"),
        segments=segments,
        proc_owned=_owns_proc(),
    )


def _try_pidfd() -> tuple[str | None, bool]:
    """The error of `pidfd_open`; whether pidfds have a file system, and so inodes, of their own."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError as error:
        return _errno(error), False
    anonymous = os.eventfd(0)
    try:
        return None, os.fstat(pidfd).st_dev != os.fstat(anonymous).st_dev
    finally:
        os.close(pidfd)
        os.close(anonymous)


def _try_memfd() -> str | None:
    try:
        os.close(os.memfd_create("shmcache-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return _errno(error)
    return None


def _owns_proc() -> bool:
    """Whether others of this user may look at this process: what is not dumpable is root's."""
    try:
        return os.stat("/proc/self/maps").st_uid == os.geteuid()
    except OSError:
        return True


def _errno(error: OSError) -> str:
    return SegmentError.HostError.of("a system call", error).errno_name


def _try_pool(name: str) -> ContractError | None:
    """Make, verify and remove a pool."""
    try:
        with contextlib.ExitStack() as stack:
            if name:
                pool = CacheResidencyPool.create(name, _LIMITS)
                stack.callback(CacheResidencyPool.destroy, name)
            else:
                pool = CacheResidencyPool(_LIMITS)
            stack.enter_context(pool).verify()
    except ContractError as error:
        return error
    except OSError as error:
        return SegmentError.HostError.of("create", error)
    return None


def _sight(name: str) -> SegmentSight | None:
    """One file; None when it vanished while we looked."""
    try:
        with CacheResidencyPool.observe(name) as pool:
            state = pool.state
            owners = pool.owners() if state == "active" else ()
            dead = sum(owner.verdict is OwnerVerdict.DEAD for owner in owners)
            return SegmentSight(name, state, dead_owners=dead)
    except SegmentError.NotFound:
        return None
    except SegmentError.Refused as error:
        return SegmentSight(name, "refused", str(error), error.check)
    except ContractError as error:
        return SegmentSight(name, "refused", str(error))
    except ValueError as error:
        return SegmentSight(name, "foreign", str(error))
