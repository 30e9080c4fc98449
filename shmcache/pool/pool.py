"""CacheResidencyPool: one finite budget on four axes, shared by any number of processes.

Why         Workers of one host compete for the same memory; each must be admitted before it
            allocates and must give back what it held, also when it is killed.
Contract    The accounting is contract/pool.md. Beyond it: named pools (create, open_or_create,
            attach, destroy), waiting for capacity (`timeout=`), owners and what they hold, sweep,
            verify. A pool is a handle; any number may refer to one segment, and equal handles
            compare equal.
Invariants  G1, G2: in core/accounts.c. G10: destroy refuses while others use the pool.
Concurrency Every method may be called from any thread. A fast call keeps the GIL for well under a
            microsecond; when the lock is taken it waits in slices and serves signals between
            them.
Death       What a killed process held is given back by the next attach, refusal, sweep or
            supervisor.
Errors      CachePoolError as contracted; SegmentError for names, files, room, locks and tables.
Fork        A child attaches anew on first use; inherited tokens are inert in it.
Cost        docs/performance.md.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from typing import Any, Self

from shmcache import _core
from shmcache.errors import CachePoolError, SegmentError
from shmcache.pool import names, segment
from shmcache.pool.admission import Admission, admitted
from shmcache.pool.dump import DumpHeader, write_dump
from shmcache.pool.host import host_errors
from shmcache.pool.live_files import LiveFilesPool, decoded
from shmcache.pool.owners import (
    POOL_STATES,
    OwnerRecord,
    OwnerVerdict,
    ReclaimedOwner,
    VerifyProblem,
    VerifyReport,
    started_ns,
)
from shmcache.pool.segment import SegmentGeometry
from shmcache.pool.snapshot import PoolSnapshot, take_snapshot
from shmcache.pool.values import (
    CachePoolLimits,
    CachePoolReport,
    CachePoolResource,
    CachePoolUsage,
)
from shmcache.pool.waiting import deadline_ns, patiently
from shmcache.telemetry import CacheResidencyTotals, ProcessSample, sample_process_of
from shmcache.telemetry.shared import totals_told

_core.bind_values(CachePoolUsage, CachePoolReport, tuple(CachePoolResource))

_PROBLEMS_MAX = 100
_PROBLEM_TEXTS = _core.problem_texts()
_OPEN_TRIES = 100  # rounds of "it exists" / "it is gone" between racing creators and removers
_OPEN_RETRY_SECONDS = 0.002

# By identity: equal handles are many.
_open_pools: weakref.WeakValueDictionary[int, CacheResidencyPool] = weakref.WeakValueDictionary()


class CacheResidencyPool(LiveFilesPool):
    """One process's handle of a pool. See the module for what holds of every method.

    `CacheResidencyPool(limits)` makes an anonymous pool: the same engine in memory without a name,
    shared with forked children, gone with the last of them. `name` is empty then; `id` names the
    epoch, equal in every process, and `limits` are the pool's: none of the three needs the lock.
    """

    def __init__(self, limits: CachePoolLimits, **options: Any) -> None:
        geometry = _geometry(limits, {"arena_bytes": 0} | options)
        self._take(segment.open_anonymous(geometry), "")

    @classmethod
    def new(cls, limits: CachePoolLimits, **options: Any) -> Self:
        """The same as calling the class."""
        return cls(limits, **options)

    # -- named pools

    @classmethod
    @host_errors("create")
    def create(cls, name: str, limits: CachePoolLimits, **options: Any) -> Self:
        """Make a pool and attach to it.

        Options of the arena: arena_bytes (default host_bytes), blocks_max (one per 64 KiB),
        block_bytes_max (2 MiB), claims_max, eviction ("lru", "lfu", "adaptive"), verify ("never",
        "first", "always": checksums of blocks), hugepages ("none", "thp"; "hugetlb" of anonymous
        pools), watermarks (parts of the arena to keep free), prefault (fill this process's page
        tables in the background). Of the tables: owners_max, managers_max, reservations_max. mode
        is 0o600, or 0o660 to admit the file's group.
        Raises: SegmentError.Exists, NoSpace, HostError.
        """
        prefault = options.pop("prefault", False)
        geometry = _geometry(limits, options)
        pool = cls.__new__(cls)
        try:
            with segment.created_segment(name, geometry) as fd:
                pool._take(os.dup(fd), name)
            if prefault:
                pool.prefault()
            return pool
        except BaseException:
            pool._undo_create()
            raise

    @classmethod
    @host_errors("open_or_create")
    def open_or_create(cls, name: str, limits: CachePoolLimits, **options: Any) -> Self:
        """Attach to the pool if it exists, with everything it holds, else make it.

        Raises: SegmentError.Refused("limits" or "geometry") when it exists with other sizes.
        """
        geometry = _geometry(limits, {k: v for k, v in options.items() if k != "prefault"})
        for tries_left in reversed(range(_OPEN_TRIES)):
            try:
                pool = cls.attach(name)
            except SegmentError.NotFound:
                pass
            except (SegmentError.Refused, SegmentError.Retired):
                if not names.remove_leftover(name):
                    if tries_left == 0:
                        raise
                    time.sleep(_OPEN_RETRY_SECONDS)  # somebody else may be replacing it
                    continue
            else:
                return pool._agreeing_with(geometry)
            try:
                return cls.create(name, limits, **options)
            except SegmentError.Exists:
                continue
        raise SegmentError.Exists(name)

    @classmethod
    @host_errors("attach")
    def attach(cls, name: str) -> Self:
        """Attach to an existing pool as an owner; dead owners are reclaimed on the way.

        Raises: SegmentError.NotFound, Refused, Retired, OwnersFull; CachePoolError.Poisoned.
        """
        pool = cls._from(segment.open_segment(name), name)
        pool.sweep()
        return pool

    @classmethod
    @host_errors("observe")
    def observe(cls, name: str) -> Self:
        """Look at a pool without taking an owner slot: report, owners, sweep, verify."""
        return cls._from(segment.open_segment(name), name, owns_slot=False)

    @classmethod
    @host_errors("destroy")
    def destroy(cls, name: str, *, force: bool = False) -> None:
        """Retire the pool and remove its name; its memory goes with its last user.

        Raises: SegmentError.InUse while live owners other than this process exist, unless forced;
        SegmentError.Refused for a file that is not a usable pool, unless nobody holds it or forced;
        HostError("unlink", "EPERM") for the pool of another user, whose name only they can remove.
        """
        try:
            observer = cls.observe(name)
        except SegmentError.Refused:
            if not names.remove_leftover(name) and not (force and names.remove_any(name)):
                raise
            return
        try:
            names.require_ours(observer.fileno())  # before it is retired for nothing
            observer._retire_unused(force)
            observer.delete_files_of_the_dead()
            names.remove_name(name, observer.fileno())
        finally:
            observer.close()

    @classmethod
    def _from(cls, fd: int, name: str, *, owns_slot: bool = True) -> Self:
        pool = cls.__new__(cls)
        pool._take(fd, name, owns_slot=owns_slot)
        return pool

    def _take(self, fd: int, name: str, *, owns_slot: bool = True) -> None:
        self._places, self._undeleted, self._kept = {}, {}, []
        self._attach(fd, name, CachePoolLimits, owns_slot)
        _open_pools[id(self)] = self

    def _undo_create(self) -> None:
        """The creator was interrupted: nobody will ever ask for this pool by itself."""
        if not self.closed and self._retire(1):  # unless a second owner has attached
            names.unlock_name(self.fileno())  # the builder's lock, which it may have left
            names.remove_name(self.name, self.fileno())
        self.close()

    def _agreeing_with(self, geometry: SegmentGeometry) -> Self:
        found = self.geometry()
        if found == geometry:
            return self
        self.close()
        if found.limits != geometry.limits:
            raise SegmentError.Refused("limits", geometry.limits, found.limits)
        raise SegmentError.Refused("geometry", geometry, found)

    def _find_again(self) -> int:
        if not self.name:
            raise SegmentError.Closed(self.name)
        return segment.open_segment(self.name)

    @staticmethod
    def geometry_for(limits: CachePoolLimits, **options: Any) -> SegmentGeometry:
        """The sizes that `create` would give a pool, `segment_bytes` too; makes none.

        Raises: ValueError for what no pool can have.
        """
        geometry = _geometry(limits, options)
        if geometry.segment_bytes == 0:
            raise ValueError(f"no segment can have these sizes: {geometry}")
        return geometry

    def geometry(self) -> SegmentGeometry:
        """The sizes the pool was created with."""
        return SegmentGeometry(limits=self.limits, **self._geometry())

    # -- waiting for capacity

    def _reserve_patiently(
        self, usage: CachePoolUsage, until_ns: int, refusal: CachePoolError | SegmentError
    ) -> _core.CachePoolReservation:
        """After a refusal: reclaim the dead, evict, then wait for releases, then raise it."""

        def attempt() -> _core.CachePoolReservation | None:
            nonlocal refusal
            answer = self._reserve_once(usage)
            if not isinstance(answer, _core.CachePoolReservation) and self._make_host_room(answer):
                answer = self._reserve_once(usage)
            if isinstance(answer, _core.CachePoolReservation):
                return answer
            refusal = answer
            return None

        hopeless = _never_fits(usage, self.limits)
        reservation = None
        if not hopeless and self._make_host_room(refusal):
            reservation = attempt()
        if reservation is None:
            reservation = patiently(self, attempt, until_ns, hopeless=hopeless)
        if reservation is not None:
            return reservation
        try:
            raise refusal
        finally:
            del refusal  # an error must not keep the frame that keeps it

    def reserve_async(
        self, usage: CachePoolUsage, *, timeout: float | None = None
    ) -> Admission[_core.CachePoolReservation]:
        """`reserve` for an event loop: `await` the token, or `async with` it.

        Waits up to `timeout` seconds, None: until it is cancelled. Whatever ends the waiting, what
        was admitted for it is given back. No thread per waiter: one of the process tries for all.
        Equal requests are admitted in the order in which they came. LockHeld, Retired, Poisoned
        and Closed are raised while it waits, as soon as they are seen.
        """
        return Admission(self._reserve_in_loop(usage, timeout))

    async def _reserve_in_loop(
        self, usage: CachePoolUsage, timeout: float | None
    ) -> _core.CachePoolReservation:
        until_ns = deadline_ns(timeout)
        if until_ns == 0 or type(usage) is not CachePoolUsage or _never_fits(usage, self.limits):
            return self.reserve(usage)  # refuses, or raises what is wrong

        def attempt() -> _core.CachePoolReservation | CachePoolError | SegmentError | None:
            answer = self._reserve_at_once(usage)
            if isinstance(answer, CachePoolError) and self._make_host_room(answer):
                answer = self._reserve_at_once(usage)
            return answer

        token: _core.CachePoolReservation = await admitted(self, usage, attempt, until_ns)
        return token

    # -- telemetry

    def telemetry(self) -> CacheResidencyTotals:
        """The reports of all sessions of all processes, summed; counters of the dead included.

        `sessions` and gauges in bytes are those of the last change of each session, other gauges
        those of its last `report()`. Takes no lock; counters never go back.
        """
        return totals_told(self._told())

    def processes(self) -> tuple[ProcessSample, ...]:
        """Memory and page faults of every attached process that lives and may be looked at."""
        owners = {row[3]: row[4] for row in self._owner_rows() if row[6] != _core.VERDICT_DEAD}
        samples = (sample_process_of(pid, ticks) for pid, ticks in sorted(owners.items()))
        return tuple(sample for sample in samples if sample is not None)

    # -- owners, sweep, verify

    def owners(self) -> tuple[OwnerRecord, ...]:
        """Every owner slot in use, with what it holds on each axis at one instant."""
        held = self._held_rows()
        return tuple(
            OwnerRecord(
                slot=slot,
                pid=pid,
                nonce=nonce,
                start_ticks=ticks,
                started_ns=started_ns(ticks),
                attach_seq=attach_seq,
                verdict=OwnerVerdict.of(verdict),
                cleaning=state == _core.OWNER_CLEANING,
                managers=held[slot][0],
                reservations=held[slot][1],
                usage=held[slot][2],
                live_places=decoded(self._owner_paths(slot, nonce)),
            )
            for slot, state, nonce, pid, ticks, attach_seq, verdict in self._owner_rows()
        )

    def snapshot(self) -> PoolSnapshot:
        """Everything that can be told of the pool but its blocks, at one instant; has a schema."""
        return take_snapshot(self)

    def dump(self, path: str | os.PathLike[str], *, locked: bool = True) -> DumpHeader:
        """Write all tables into a file for `read_dump`, in any state of the pool.

        Without the lock when its holder is stopped: changes are then seen half-made.
        """
        return write_dump(self, path, locked)

    def sweep(self, *, forget_files: bool = False) -> tuple[ReclaimedOwner, ...]:
        """Give back everything held by owners that are proved dead; returns what was given back.

        Of an owner that several sweep at once, each returns the part that it gave back itself.
        Live files are deleted before their charge is released; `forget_files` releases it also for
        files that cannot be deleted, which are then nobody's.
        """
        swept = []
        for slot, nonce, pid in self._find_dead():
            self._undeleted.pop(nonce, None)
            given_back = self._reclaim(slot, nonce, forget_files)
            undeleted = self._undeleted.pop(nonce, ())
            if given_back is not None or undeleted:
                entries, usage = given_back or (0, CachePoolUsage())
                swept.append(ReclaimedOwner(slot, pid, nonce, entries, usage, undeleted))
        return tuple(swept)

    def verify(self) -> VerifyReport:
        """Recount and walk everything. A finding poisons the pool: every later call says so.

        Works on poisoned and retired pools too. Holds the lock for the length of the walk.
        """
        found, count = self._check(_PROBLEMS_MAX)
        problems = tuple(VerifyProblem(_PROBLEM_TEXTS[kind], *rest) for kind, *rest in found)
        return VerifyReport(POOL_STATES[self._state()], problems, count)

    @property
    def state(self) -> str:
        """`active`, `retired` or `poisoned`; read without the lock."""
        return POOL_STATES[self._state()]

    def _retire_unused(self, force: bool) -> None:
        """Retire the epoch, after looking at all owners and unless one attached meanwhile."""
        while True:
            seen = self._attach_seq()
            others = tuple(
                pid
                for _, _, nonce, pid, _, _, verdict in self._owner_rows()
                if verdict != _core.VERDICT_DEAD and not _core.nonce_is_local(nonce)
            )
            if others and not force:
                raise SegmentError.InUse(others)
            if self._retire(None if force else seen):
                return

    # -- identity

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheResidencyPool):
            return NotImplemented
        return bool(self.id == other.id)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<CacheResidencyPool{name} id={self.id} {self.limits}>"

    def __reduce_ex__(self, protocol: object) -> Any:
        way = "send its name and attach there" if self.name else "fork after it was made"
        raise TypeError(f"a pool does not cross processes: {way} (see docs/workers.md)")


def _geometry(limits: CachePoolLimits, options: dict[str, Any]) -> SegmentGeometry:
    if not isinstance(limits, CachePoolLimits):
        raise TypeError(f"limits must be CachePoolLimits, not {type(limits).__name__}")
    return segment.geometry_for(limits, **options)


def _never_fits(usage: CachePoolUsage, limits: CachePoolLimits) -> bool:
    """Whether waiting is in vain: an axis asks for more than the pool will ever have."""
    return (
        usage.device_bytes > limits.device_bytes
        or usage.host_bytes > limits.host_bytes
        or usage.transfer_in_flight_bytes > limits.transfer_in_flight_bytes
        or usage.disk_bytes > limits.disk_bytes
    )


@atexit.register
def _leave_all() -> None:
    """An orderly exit leaves no slot behind; for the killed, a sweep does the same."""
    for pool in list(_open_pools.values()):
        with contextlib.suppress(BufferError):  # views of unpublished blocks: left to the sweep
            pool.close()


def _keep_views() -> None:
    """In a forked child: hold for it what views look at, before any of its code can read them.

    What cannot be held faults when it is read, rather than showing another block's bytes.
    """
    for pool in list(_open_pools.values()):
        if pool._has_views():
            with contextlib.suppress(SegmentError, CachePoolError):
                pool._ready_here()


os.register_at_fork(after_in_child=_keep_views)
