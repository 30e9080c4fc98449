"""Watch a pool's owners and give back what a dead one held, milliseconds after its death.

Why         Without anyone watching, the charges of a killed worker stay until the next attach or
            refusal.
Contract    `with Supervisor(pool):` watches from a thread; `run()` watches until `stop()`, as the
            command `shmcache supervise` does. It holds no owner slot, and nothing depends on it:
            any number may run at once, and each may be killed at any instruction. It also notices
            that the name was removed (the epoch is retired, so that no second pool can live
            beside it), that another segment took the name (it follows), and that the pool is
            poisoned (reports it, or starts a new epoch under the name).
Concurrency One pidfd per owner in one epoll; the owner table's attach counter is read every turn,
            so a new owner is watched after at most one turn.
Death       Nothing shared is left behind but what a sweep leaves: a slot in CLEANING, which any
            other sweep continues.
Errors      A lock held by a stopped process, and a host that refuses something (no room yet for a
            new epoch), are told and tried again. What a listener raises comes out of run(), or is
            logged when a thread of the supervisor's own runs it.
Source      pidfd_open(2), epoll(7).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Literal, Self

import msgspec

from shmcache import _core
from shmcache.errors import CachePoolError, SegmentError
from shmcache.pool import names, segment
from shmcache.pool.host import host_errors
from shmcache.pool.live_files import UndeletedFiles
from shmcache.pool.owners import ReclaimedOwner
from shmcache.pool.pool import CacheResidencyPool

_TURN_SECONDS = 0.02
_SWEEP_SECONDS = 0.25  # for what no pidfd tells: execve, hosts without pidfds, half-cleaned slots

_log = logging.getLogger("shmcache.supervisor")


class SupervisorEventKind(Enum):
    """What a supervisor noticed."""

    RECLAIMED = "reclaimed"
    LOCK_HELD = "lock_held"
    HINDERED = "hindered"
    POISONED = "poisoned"
    RECREATED = "recreated"
    FOLLOWED = "followed"
    GONE = "gone"


class SupervisorEvent(msgspec.Struct, frozen=True):
    """One thing that happened; `owners` are those reclaimed, `detail` is for people."""

    kind: SupervisorEventKind
    detail: str
    owners: tuple[ReclaimedOwner, ...] = ()


class Supervisor:
    """Watches one pool. `on_event` is called from the watching thread, after logging.

    `on_poison="recreate"` starts an empty epoch of the same sizes when validation failed.
    """

    def __init__(
        self,
        pool: CacheResidencyPool,
        *,
        on_poison: Literal["report", "recreate"] = "report",
        on_event: Callable[[SupervisorEvent], None] | None = None,
    ) -> None:
        if not isinstance(pool, CacheResidencyPool):
            raise TypeError(f"pool must be a CacheResidencyPool, not {type(pool).__name__}")
        if on_poison not in ("report", "recreate"):
            raise ValueError(f"on_poison must be 'report' or 'recreate', not {on_poison!r}")
        self._pool = _observer_of(pool)
        self._on_poison = on_poison
        self._on_event = on_event
        self._stopping = False  # no Event: its lock would hang a signal handler that meets it taken
        self._thread: threading.Thread | None = None
        self._watched: dict[int, tuple[int, int]] = {}  # slot -> (nonce, pidfd)
        self._seen_attach_seq = -1
        self._swept_at = 0.0
        self._poison_told = False
        self._hindrance = ""
        self._blindness_told = False
        self._undeleted: dict[int, tuple[UndeletedFiles, ...]] = {}

    # -- running

    def __enter__(self) -> Self:
        self._pool.fileno()  # raises Closed: left once, it would end at once and watch nothing
        self._thread = threading.Thread(target=self.run, name="shmcache-supervisor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, wait for the watching thread of a `with` block, and let go of the pool."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        self._pool.close()

    def sweep_soon(self) -> None:
        """A process is known to have died: the next turn sweeps. Any thread, without waiting."""
        self._swept_at = 0.0

    def stop(self) -> None:
        """Ask the watching thread to end after its present turn; safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Watch until stopped, or until the pool is gone."""
        watching = True
        while watching and not self._stopping:
            try:
                with select.epoll() as epoll:
                    while watching and not self._stopping:
                        watching = self.turn(epoll)
            except OSError as error:  # a library closed every descriptor of this process
                self._hindered(f"the host refused to watch: {error}")
                self._watched = {}
                self._seen_attach_seq = -1

    def turn(self, epoll: select.epoll) -> bool:
        """One look at everything; False when there is nothing left to watch."""
        for fd, _ in epoll.poll(_TURN_SECONDS):
            self._swept_at = 0.0  # a death: sweep now
            self._forget(epoll, fd)
        try:
            return self._look(epoll)
        except SegmentError.LockHeld as error:
            self._tell(SupervisorEventKind.LOCK_HELD, str(error))
        except SegmentError.Closed as error:
            self._hindered(f"{error}; looking for it again")
            return self._find_again(epoll)
        except SegmentError as error:
            self._hindered(str(error))
        return True

    # -- one turn's parts

    def _look(self, epoll: select.epoll) -> bool:
        try:
            if time.monotonic() - self._swept_at >= _SWEEP_SECONDS:
                self._sweep()
                if not self._still_named(epoll):
                    return False
            if self._pool._attach_seq() != self._seen_attach_seq:
                self._watch_owners(epoll)
            self._pool.keep_free()
        except CachePoolError.Poisoned:
            return self._poisoned(epoll)
        except SegmentError.Retired:
            return self._still_named(epoll)
        self._hindrance = ""
        return True

    def _sweep(self) -> None:
        self._swept_at = time.monotonic()
        swept = self._pool.sweep()
        self._tell_undeleted(swept)
        reclaimed = tuple(owner for owner in swept if owner.gave_back)
        if reclaimed:
            pids = ", ".join(str(owner.pid) for owner in reclaimed)
            entries = sum(owner.entries for owner in reclaimed)
            detail = f"process {pids} died; gave back {entries} entries"
            self._tell(SupervisorEventKind.RECLAIMED, detail, reclaimed)
        elif self._pool.state == "poisoned":
            raise CachePoolError.Poisoned()

    def _tell_undeleted(self, swept: tuple[ReclaimedOwner, ...]) -> None:
        """Once for each owner and reason; every sweep tries again."""
        told = {owner.nonce: owner.undeleted for owner in swept if owner.undeleted}
        for owner in swept:
            for files in owner.undeleted:
                if files not in self._undeleted.get(owner.nonce, ()):
                    detail = f"live files of process {owner.pid} in {files.place} stay charged"
                    self._tell(SupervisorEventKind.HINDERED, f"{detail}: {files.reason}", (owner,))
        self._undeleted = told

    def _watch_owners(self, epoll: select.epoll) -> None:
        self._seen_attach_seq = self._pool._attach_seq()
        for slot, _, nonce, pid, *_, verdict in self._pool._owner_rows():
            fd = self._pool._owner_pidfd(slot, nonce)
            if fd < 0 and verdict == _core.VERDICT_ALIVE and not self._blindness_told:
                self._blindness_told = True
                seconds = f"only by the sweep every {_SWEEP_SECONDS:g} s"
                _log.warning("no pidfd of process %d can be had: deaths are seen %s", pid, seconds)
            if fd < 0 or self._watched.get(slot) == (nonce, fd):
                continue
            self._watched[slot] = (nonce, fd)
            try:
                epoll.register(fd, select.EPOLLIN)
            except FileExistsError:
                epoll.modify(fd, select.EPOLLIN)

    def _forget(self, epoll: select.epoll, fd: int) -> None:
        """A dead owner's descriptor stays readable: it must not wake the next turn as well."""
        _unregister(epoll, fd)
        self._watched = {k: watched for k, watched in self._watched.items() if watched[1] != fd}

    def _still_named(self, epoll: select.epoll) -> bool:
        """Follow the name; retire what lost it."""
        pool = self._pool
        if not pool.name or names.has_name(pool.fileno(), names.segment_path(pool.name)):
            if pool.state != "retired":
                return True
            self._tell(SupervisorEventKind.GONE, f"pool {pool.name!r} has ended")
            return False
        pool._retire(None)
        try:
            successor = CacheResidencyPool.observe(pool.name)
        except SegmentError as error:
            self._tell(SupervisorEventKind.GONE, f"pool {pool.name!r} was removed ({error})")
            return False
        self._follow(epoll, successor)
        self._tell(SupervisorEventKind.FOLLOWED, f"pool {pool.name!r} has a new epoch")
        return True

    def _find_again(self, epoll: select.epoll) -> bool:
        """The segment's descriptor was closed by somebody else in this process."""
        try:
            successor = CacheResidencyPool.observe(self._pool.name or "?")
        except (SegmentError, ValueError) as error:
            self._tell(SupervisorEventKind.GONE, f"pool {self._pool.name!r} is lost ({error})")
            return False
        self._follow(epoll, successor)
        return True

    def _follow(self, epoll: select.epoll, successor: CacheResidencyPool) -> None:
        for _, fd in self._watched.values():
            _unregister(epoll, fd)
        self._pool.close()
        self._pool = successor
        self._watched = {}
        self._seen_attach_seq = -1
        self._poison_told = False

    def _poisoned(self, epoll: select.epoll) -> bool:
        pool = self._pool
        if not self._poison_told:
            self._poison_told = True
            self._tell(SupervisorEventKind.POISONED, f"pool {pool.name!r} is poisoned")
        if self._on_poison == "report" or not pool.name:
            time.sleep(_SWEEP_SECONDS)
            return self._still_named(epoll)
        successor = recreate(pool)
        if successor is None:
            return self._still_named(epoll)  # another supervisor was first
        self._follow(epoll, successor)
        self._tell(SupervisorEventKind.RECREATED, f"pool {pool.name!r} starts empty in a new epoch")
        return True

    def _hindered(self, detail: str) -> None:
        """The host did not let us; the next turn tries again, and is silent about the same."""
        if detail != self._hindrance:
            self._hindrance = detail
            self._tell(SupervisorEventKind.HINDERED, detail)
        time.sleep(_SWEEP_SECONDS)

    def _tell(
        self, kind: SupervisorEventKind, detail: str, owners: tuple[ReclaimedOwner, ...] = ()
    ) -> None:
        level = logging.INFO if kind is SupervisorEventKind.RECLAIMED else logging.WARNING
        _log.log(level, "%s", detail)
        if self._on_event is None:
            return
        try:
            self._on_event(SupervisorEvent(kind, detail, owners))
        except Exception:
            if self._thread is None:
                raise  # the caller of run() hears of it
            _log.exception("on_event failed")  # nobody would, and the pool would be unwatched


def recreate(pool: CacheResidencyPool) -> CacheResidencyPool | None:
    """Start a new, empty epoch of the same sizes under the pool's name, and retire the old one.

    None when the name no longer belongs to `pool`. The new segment is whole before it takes the
    name in one step: an attacher finds the old epoch or the new one.
    """
    names.require_ours(pool.fileno())
    with host_errors("recreate"), segment.built_segment(pool.name, pool.geometry()) as built:
        temporary, fd = built
        if not names.replace_name(pool.name, pool.fileno(), temporary):
            return None
        pool._retire(None)
        pool.delete_files_of_the_dead()
        CacheResidencyPool._from(os.dup(fd), pool.name).close()  # joined once: no leftover
        return CacheResidencyPool._from(os.dup(fd), pool.name, owns_slot=False)


def _unregister(epoll: select.epoll, fd: int) -> None:
    with contextlib.suppress(OSError):  # closed since by the handle, which took it out
        epoll.unregister(fd)


def _observer_of(pool: CacheResidencyPool) -> CacheResidencyPool:
    """A handle of its own: the descriptors it watches must not belong to the workers' handle."""
    with host_errors("dup"):
        return CacheResidencyPool._from(os.dup(pool.fileno()), pool.name, owns_slot=False)


__all__ = ["Supervisor", "SupervisorEvent", "SupervisorEventKind", "recreate"]
