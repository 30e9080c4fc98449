"""Make and open segments: what is built is whole before it has a name.

Why         A name in /dev/shm outlives every process, so each step of its life must leave
            something that the next comer can use or clear away, never a half-initialised segment
            to wait for.
Contract    A segment is built under a temporary name, allocated whole, formatted, and gets its
            name by `link`, which fails if the name exists: there is one winner. A file of a
            pool's name that no process of this host could ever attach to (another boot, a gone
            namespace, damage, foreign bytes) and that no owner holds is a leftover: create and
            open_or_create replace it, attach refuses it by the failed check.
Death       A killed creator leaves a temporary file whose name lock is free: every create
            collects those. Between link and unlink the segment has two names, and the spare one
            is collected. One killed between link and join leaves a segment that never had an
            owner: the next create replaces it.
Errors      `SegmentError` only; what the system says is in HostError.
Source      vLLM and Boost cases on half-created segments; PostgreSQL on "maybe in use".
Not here    Taking names away: names.py. What is inside a segment: core/.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import posix_ipc

from shmcache import _core, bounds
from shmcache.errors import SegmentError
from shmcache.pool.host import TMPFS_KNOB, read_host_room, require_room
from shmcache.pool.names import (
    SHM_DIRECTORY,
    TEMPORARY_PREFIX,
    collect_leftovers,
    has_name,
    lock_name,
    remove_leftover,
    retire_nameless,
    segment_path,
    temporary_path,
    unlock_name,
)
from shmcache.pool.values import CachePoolLimits

HUGETLB_KNOB = "vm.nr_hugepages"
_GATE_POLL_SECONDS = 0.005
_BLOCK_BYTES = 64 << 10  # default room in the block table: one block per 64 KiB of arena
_ARENA_ALIGN = 64

_VERIFY_FLAGS = (0, _core.FLAG_VERIFY_FIRST, _core.FLAG_VERIFY_ALWAYS)
_HUGEPAGE_FLAGS = (0, _core.FLAG_HUGE_THP, _core.FLAG_HUGETLB)


class SegmentGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a creator chooses; two openers agree when all of it is equal."""

    limits: CachePoolLimits
    arena_bytes: int = 0
    blocks_max: int = 0
    block_bytes_max: int = 0
    claims_max: int = 0
    free_low_bytes: int = 0
    free_high_bytes: int = 0
    owners_max: int = bounds.OWNERS_MAX_DEFAULT
    managers_max: int = bounds.MANAGERS_MAX_DEFAULT
    reservations_max: int = bounds.RESERVATIONS_MAX_DEFAULT
    eviction_policy: int = 0
    flags: int = 0
    mode: int = 0o600

    def __post_init__(self) -> None:
        for what, value, low, high in (
            ("owners_max", self.owners_max, 1, bounds.OWNERS_MAX_LIMIT),
            ("managers_max", self.managers_max, 1, bounds.MANAGERS_MAX_LIMIT),
            ("reservations_max", self.reservations_max, 1, bounds.RESERVATIONS_MAX_LIMIT),
            ("blocks_max", self.blocks_max, 0, bounds.BLOCKS_MAX_LIMIT),
            ("arena_bytes", self.arena_bytes, 0, bounds.ARENA_BYTES_LIMIT),
            ("block_bytes_max", self.block_bytes_max, 0, bounds.BLOCK_BYTES_LIMIT),
            ("claims_max", self.claims_max, 0, bounds.CLAIMS_MAX_LIMIT),
            ("free_low_bytes", self.free_low_bytes, 0, bounds.ARENA_BYTES_LIMIT),
            ("free_high_bytes", self.free_high_bytes, 0, bounds.ARENA_BYTES_LIMIT),
            ("eviction_policy", self.eviction_policy, 0, len(bounds.EVICTION_POLICIES) - 1),
            ("flags", self.flags, 0, 2**32 - 1),
        ):
            bounds.bounded(value, what, low, high)
        bounds.bounded(self.mode, "mode", 0, 0o777)
        if self.mode not in (0o600, 0o660):
            raise ValueError(f"mode must be 0o600 or 0o660, not {self.mode:#o}")

    @property
    def eviction(self) -> str:
        """Name of the policy that decides which block goes first."""
        return bounds.EVICTION_POLICIES[self.eviction_policy]

    @property
    def segment_bytes(self) -> int:
        """Size of the segment's file."""
        return _core.segment_bytes(self)


def geometry_for(
    limits: CachePoolLimits,
    *,
    arena_bytes: int | None = None,
    blocks_max: int | None = None,
    block_bytes_max: int | None = None,
    claims_max: int = bounds.CLAIMS_MAX_DEFAULT,
    eviction: str = "adaptive",
    verify: str = "never",
    hugepages: str = "none",
    watermarks: tuple[float, float] = (0.0, 0.0),
    **tables: int,
) -> SegmentGeometry:
    """The geometry of a named pool: an arena of host_bytes unless told otherwise, none if tiny.

    `watermarks` are the parts of the arena of which a keeper (`Supervisor`, `pool.keep_free()`)
    makes the second free when less than the first is.
    """
    policy = _number_of(eviction, "eviction", bounds.EVICTION_POLICIES)
    flags = _VERIFY_FLAGS[_number_of(verify, "verify", bounds.VERIFY_MODES)]
    flags |= _HUGEPAGE_FLAGS[_number_of(hugepages, "hugepages", bounds.HUGEPAGE_MODES)]
    low, high = watermarks
    if not 0 <= low <= high < 1:
        raise ValueError(f"watermarks must be 0 <= low <= high < 1, unlike {watermarks}")
    if arena_bytes is None:
        arena_bytes = limits.host_bytes
    arena_bytes = bounds.u64(arena_bytes, "arena_bytes") // _ARENA_ALIGN * _ARENA_ALIGN
    if arena_bytes < bounds.ARENA_BYTES_MIN:
        return SegmentGeometry(limits=limits, **tables)
    if blocks_max is None:
        blocks_max = min(-(-arena_bytes // _BLOCK_BYTES), bounds.BLOCKS_MAX_LIMIT)
    if block_bytes_max is None:
        block_bytes_max = min(bounds.BLOCK_BYTES_MAX_DEFAULT, arena_bytes)
    bounds.bounded(block_bytes_max, "block_bytes_max", 1, arena_bytes)
    bounds.bounded(blocks_max, "blocks_max", 1, bounds.BLOCKS_MAX_LIMIT)
    return SegmentGeometry(
        limits=limits,
        arena_bytes=arena_bytes,
        blocks_max=blocks_max,
        block_bytes_max=block_bytes_max,
        claims_max=claims_max,
        free_low_bytes=int(low * arena_bytes),
        free_high_bytes=int(high * arena_bytes),
        eviction_policy=policy,
        flags=flags,
        **tables,
    )


def _number_of(name: str, what: str, names: tuple[str, ...]) -> int:
    if name not in names:
        raise ValueError(f"{what} must be one of {', '.join(names)}, not {name!r}")
    return names.index(name)


# ---- opening -----------------------------------------------------------------------------------


def open_segment(name: str) -> int:
    """A descriptor of the named segment, never creating it and never following a link."""
    path = segment_path(name)
    try:
        return _open_shared(path, flags=0)
    except FileNotFoundError:
        raise SegmentError.NotFound(name) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise SegmentError.Refused("file_type", "a regular file", path.name) from error
        raise SegmentError.HostError.of("shm_open", error) from error


def _open_shared(path: Path, *, flags: int, mode: int = 0o600) -> int:
    """`shm_open`: close-on-exec, and a symbolic link is an error."""
    try:
        return int(posix_ipc.SharedMemory(f"/{path.name}", flags, mode=mode).fd)
    except posix_ipc.ExistentialError as error:
        raise OSError(errno.EEXIST if flags else errno.ENOENT, str(error)) from error
    except posix_ipc.PermissionsError as error:
        raise OSError(errno.EACCES, str(error)) from error
    except ValueError as error:  # how posix_ipc reports a directory of that name
        raise OSError(errno.EISDIR, str(error)) from error


def open_anonymous(geometry: SegmentGeometry) -> int:
    """A descriptor of a new segment without a name, whose memory is allocated as it is touched."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if geometry.flags & _core.FLAG_HUGETLB:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        fd = os.memfd_create("shmcache", flags)
    except OSError as error:
        raise SegmentError.HostError.of("memfd_create", error) from error
    try:
        os.fchmod(fd, geometry.mode)
        os.ftruncate(fd, geometry.segment_bytes)
        if geometry.flags & _core.FLAG_HUGETLB:
            _allocate(fd, geometry.segment_bytes, HUGETLB_KNOB)  # a page less would be a SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        _core.format_segment(fd, geometry)
    except OSError as error:
        os.close(fd)
        raise SegmentError.HostError.of("memfd", error) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


# ---- creating ----------------------------------------------------------------------------------


@contextlib.contextmanager
def created_segment(name: str, geometry: SegmentGeometry) -> Iterator[int]:
    """A descriptor of the new segment of this name; raises Exists if there is one already.

    Needs room for all of it at once: refuses with NoSpace before a page is touched. The caller
    joins before it leaves: until then its name is locked, for a segment that nobody ever joined is
    a leftover.
    """
    path = segment_path(name)
    collect_leftovers()
    with _turn_to_build(name):
        if not remove_leftover(name):
            raise SegmentError.Exists(name)
        retire_nameless(name)
        with built_segment(name, geometry) as (temporary, fd):
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise SegmentError.Exists(name) from None
            except OSError as error:
                raise SegmentError.HostError.of("link", error) from error
            yield fd


@contextlib.contextmanager
def _turn_to_build(name: str) -> Iterator[None]:
    """Be the only creator of this name: together they would take each other's room, and all fail.

    The gate is a file with its name locked, so a killed holder's is collected. Whoever waits raises
    Exists once the pool is there, and goes on alone when nothing was allocated for a while (the
    holder is stopped) or the gate is a stranger's.
    """
    gate = SHM_DIRECTORY / f"{TEMPORARY_PREFIX}{name}"
    entered, seen, patient_ns = None, -1, 0
    try:
        with contextlib.suppress(OSError):  # a folder, a link, another user's file: no gate
            while (entered := _enter(gate)) is None:
                if os.path.lexists(segment_path(name)):
                    raise SegmentError.Exists(name)
                allocated = _allocated_for_new(name)
                if allocated != seen:
                    seen, patient_ns = allocated, time.monotonic_ns() + bounds.LOCK_DEADLINE_NS
                elif time.monotonic_ns() > patient_ns:
                    break
                time.sleep(_GATE_POLL_SECONDS)
        yield
    finally:
        if entered is not None:
            with entered:
                gate.unlink(missing_ok=True)


def _enter(gate: Path) -> io.FileIO | None:
    """The gate with its name locked; None when somebody else has that.

    An object, not a descriptor: one that an interrupt loses is closed, and its lock with it. Else
    the next create of this process would wait for the lock of the one before.
    """
    file = io.FileIO(gate, "r+", opener=_open_gate)
    try:
        if lock_name(file.fileno()) and has_name(file.fileno(), gate):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _open_gate(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _allocated_for_new(name: str) -> int:
    """Blocks of all segments in the making for this name."""
    blocks = 0
    for path in SHM_DIRECTORY.glob(f"{TEMPORARY_PREFIX}*.{name}"):
        with contextlib.suppress(FileNotFoundError):
            blocks += path.lstat().st_blocks
    return blocks


@contextlib.contextmanager
def built_segment(name: str, geometry: SegmentGeometry) -> Iterator[tuple[Path, int]]:
    """A complete segment for this name, under a temporary one, which is gone afterwards."""
    needed = geometry.segment_bytes
    if needed == 0:
        raise SegmentError.Refused("geometry", "sizes within the limits of the engine", geometry)
    if geometry.flags & _core.FLAG_HUGETLB:
        raise SegmentError.Refused("geometry", "hugepages none or thp in a named pool", "hugetlb")
    require_room(needed, read_host_room(SHM_DIRECTORY))
    temporary, fd = _open_temporary(name, geometry.mode)
    try:
        os.fchmod(fd, geometry.mode)  # the umask may have taken bits away
        _allocate(fd, needed, TMPFS_KNOB)
        _core.format_segment(fd, geometry)
        yield temporary, fd
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            os.unlink(temporary)
        unlock_name(fd)
        os.close(fd)


def _open_temporary(name: str, mode: int) -> tuple[Path, int]:
    """A new file with its name locked: whoever can lock it later may remove it."""
    while True:
        temporary = temporary_path(name)
        try:
            fd = _open_shared(temporary, flags=posix_ipc.O_CREX, mode=mode)
        except OSError as error:
            raise SegmentError.HostError.of("shm_open", error) from error
        if lock_name(fd) and has_name(fd, temporary):
            return temporary, fd
        os.close(fd)  # collected by somebody before its lock was taken


def _allocate(fd: int, needed: int, knob: str) -> None:
    """Back every page now: a full tmpfs must say ENOSPC here, not SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, needed)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # somebody took the room meanwhile
            free_bytes = read_host_room(fd).tmpfs_free_bytes or 0
            raise SegmentError.NoSpace(needed, free_bytes, knob) from error
        raise SegmentError.HostError.of("posix_fallocate", error) from error
