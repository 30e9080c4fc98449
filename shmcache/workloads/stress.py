"""Workers that do all that a pool allows, killed at random; an outsider checks the promises.

Why         The promises are about what is left when processes die; only real processes that really
            die can show it.
Contract    A run makes a pool of its own, starts worker processes and, unless told otherwise, a
            supervisor process. A nemesis kills workers at random times and replaces them. The
            auditor observes the pool without being an owner of it. The run is `ok` when nothing was
            violated and nothing leaked:

            G1  `verify` finds nothing, every 100 ms
            G2  no axis and no peak is above its limit (workers publish only what they reserved)
            G5  a killed worker's slot is free soon after the kernel reports its death; no worker
                meets an error other than a refusal for want of room; after the end, and one sweep,
                every axis is 0 and no owner is left
Units       Milliseconds of reclaim: from the death's report (pidfd readable in this process) until
            the owner's slot is seen FREE here. Measured only with the supervisor.
Death       However a run ends, its children end. A killed launcher leaves nothing but the pool.
Not here    Blocks and leases: they come with the arena.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable

import msgspec

from shmcache import CachePoolLimits, CacheResidencyPool, OwnerRecord, SegmentError
from shmcache.workloads.children import ChildProcess, Counters
from shmcache.workloads.stress_audit import Auditor
from shmcache.workloads.stress_worker import COUNTS, MEMBERSHIPS_MAX, RESERVATIONS_MAX

AUDIT_S = 0.1
PROGRESS_S = 0.2
PATIENCE_S = 30.0  # for a child to start, die, leave or be reclaimed: reached only by a bug

_GLANCE_S = 0.005  # between two looks at the totals
_POLL_S = 0.0002  # between two looks at a dead owner's slot
_ATTACHED_VICTIMS = 0.95  # part of the kills that choose among attached workers
_LIMITS = CachePoolLimits(8 << 30, 2 << 30, 256 << 20, 64 << 30)


class StressOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. The seed decides what the nemesis and each worker do, not their timing."""

    name: str
    seed: int
    workers: int = 4
    seconds: float = 10.0
    kills_per_second: float = 5.0
    supervisor: bool = True


class StressReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did and found. `leaked_...` is None when a violation made it unanswerable."""

    seed: int
    workers: int
    seconds: float
    supervisor: bool
    operations: int
    operations_per_second: float
    refusals: int
    kills: int
    audits: int
    reclaims_measured: int
    reclaim_p50_ms: float | None
    reclaim_p99_ms: float | None
    reclaim_max_ms: float | None
    violations: tuple[str, ...]
    leaked_bytes: int | None
    leaked_owners: int | None

    @property
    def ok(self) -> bool:
        """Nothing was violated, and nothing leaked."""
        return not (self.violations or self.leaked_bytes or self.leaked_owners)


class StressProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    elapsed_s: float
    operations: int
    kills: int
    audits: int


def run_stress(
    options: StressOptions, on_progress: Callable[[StressProgress], None] | None = None
) -> StressReport:
    """Make the pool, run, take everything away again, and report.

    `on_progress` is called every 0.2 s; an exception that it raises ends the run.
    Raises: SegmentError.Exists when a pool has the name; OSError when children cannot be started.
    """
    tables = {
        "arena_bytes": 0,
        "owners_max": 2 * options.workers + 2,
        # Small enough to be full at times.
        "managers_max": max(4, options.workers * MEMBERSHIPS_MAX // 2),
        "reservations_max": max(8, options.workers * RESERVATIONS_MAX * 3 // 4),
    }
    with contextlib.ExitStack() as stack:
        counters = stack.enter_context(Counters(options.workers, COUNTS))
        CacheResidencyPool.create(options.name, _LIMITS, **tables).close()
        stack.callback(_destroy, options.name)
        observer = stack.enter_context(CacheResidencyPool.observe(options.name))
        return _Stress(options, observer, counters).run(on_progress or (lambda _: None))


def _destroy(name: str) -> None:
    with contextlib.suppress(SegmentError.NotFound):  # somebody else removed it meanwhile
        CacheResidencyPool.destroy(name, force=True)


class _Stress:
    """One run: its children, the nemesis, and what is counted."""

    def __init__(
        self, options: StressOptions, observer: CacheResidencyPool, counters: Counters
    ) -> None:
        self._options = options
        self._auditor = Auditor(observer)
        self._rng = random.Random(options.seed)
        self._counters = counters
        self._workers: dict[int, ChildProcess] = {}  # by index of their counters
        self._supervisor: ChildProcess | None = None
        self._kills = 0
        self._reclaims_s: list[float] = []

    def run(self, on_progress: Callable[[StressProgress], None]) -> StressReport:
        try:
            self._start()
            started = time.monotonic()
            self._play(started, on_progress)
            seconds = time.monotonic() - started
            leaked = self._end()
        finally:
            self._kill_all()
        return self._report(seconds, *leaked)

    # -- the play

    def _start(self) -> None:
        if self._options.supervisor:
            self._supervisor = ChildProcess("stress_supervisor", (self._options.name,), None)
        for index in range(self._options.workers):
            self._spawn(index)
        for child in self._children():
            if not child.wait_ready():
                self._complain(f"process {child.pid} did not start: {child.last_words()}")

    def _spawn(self, index: int) -> None:
        seed = str(self._rng.getrandbits(64))
        counters, workers = self._counters.descriptor, self._counters.rows
        arguments = (self._options.name, seed, str(counters), str(index), str(workers))
        self._workers[index] = ChildProcess("stress_worker", arguments, counters)

    def _play(self, started: float, on_progress: Callable[[StressProgress], None]) -> None:
        """Glance all the time; audit, kill and tell when it is time to."""
        now = next_audit = next_progress = started
        next_kill = started + self._pause()
        while now < started + self._options.seconds and not self._auditor.violations:
            if now >= next_audit:
                next_audit = now + AUDIT_S
                self._auditor.audit()
            if now >= next_kill:
                next_kill = now + self._pause()
                self._kill_one()
            if now >= next_progress:
                next_progress = now + PROGRESS_S
                on_progress(self._progress(now - started))
            self._auditor.glance()
            self._notice_deaths()
            time.sleep(_GLANCE_S)
            now = time.monotonic()

    def _pause(self) -> float:
        rate = self._options.kills_per_second
        return self._rng.expovariate(rate) if rate > 0 else math.inf

    def _notice_deaths(self) -> None:
        """A child that ends before it was told to has something to say."""
        for child in self._children():
            if child.died(0):
                words = child.last_words()
                self._complain(f"process {child.pid} ended with {child.reap()}: {words}")

    # -- the nemesis

    def _kill_one(self) -> None:
        """Kill a worker, time its reclaim, and put a new one in its place.

        Mostly one that is at work: when workers start more slowly than they are to be killed, the
        nemesis waits for one to attach rather than kill them all in the cradle.
        """
        owners: dict[int, OwnerRecord] = {}
        with self._auditor.complaints():
            owners = {owner.pid: owner for owner in self._auditor.observer.owners()}
        candidates = list(self._workers)
        if self._rng.random() < _ATTACHED_VICTIMS:
            candidates = [index for index in candidates if self._workers[index].pid in owners]
        if not candidates:
            return
        index = self._rng.choice(candidates)
        victim = self._workers[index]
        if self._kill(victim) and self._supervisor is not None and victim.pid in owners:
            self._time_reclaim(owners[victim.pid])
        victim.reap()
        self._spawn(index)

    def _kill(self, victim: ChildProcess) -> bool:
        """Whether the kernel reported the death in good time."""
        self._kills += 1
        victim.kill()
        died = victim.died(PATIENCE_S)
        if not died:
            self._complain(f"process {victim.pid} did not die within {PATIENCE_S:g} s")
        return died

    def _time_reclaim(self, owner: OwnerRecord) -> None:
        died = time.monotonic()
        with self._auditor.complaints():
            while any(found.nonce == owner.nonce for found in self._auditor.observer.owners()):
                if time.monotonic() - died > PATIENCE_S:
                    self._complain(f"G5: owner {owner.pid} was not reclaimed in {PATIENCE_S:g} s")
                    return
                time.sleep(_POLL_S)
            self._reclaims_s.append(time.monotonic() - died)

    # -- the end

    def _end(self) -> tuple[int | None, int | None]:
        """Kill some, let the others leave, and look at what is left."""
        if self._auditor.violations:
            self._auditor.audit()  # what is wrong, if the first to notice could not say
            return None, None
        for worker in self._workers.values():
            if self._options.kills_per_second > 0 and self._rng.random() < 0.5:
                self._kill(worker)
            else:
                worker.dismiss()
        for worker in self._workers.values():
            if not worker.died(PATIENCE_S):
                self._complain(f"process {worker.pid} did not leave within {PATIENCE_S:g} s")
        if self._supervisor is not None:
            self._supervisor.dismiss()
            if not self._supervisor.died(PATIENCE_S):
                self._complain("the supervisor did not end")
        if not self._auditor.violations:
            self._auditor.audit()
            with self._auditor.complaints():
                return self._auditor.left()
        return None, None

    def _kill_all(self) -> None:
        for child in self._children():
            child.kill()
        for child in self._children():
            child.reap()

    # -- what is said

    def _children(self) -> list[ChildProcess]:
        watched = [self._supervisor] if self._supervisor is not None else []
        return [*watched, *self._workers.values()]

    def _complain(self, text: str) -> None:
        self._auditor.violations.append(text)

    def _progress(self, elapsed_s: float) -> StressProgress:
        return StressProgress(
            elapsed_s=elapsed_s,
            operations=self._counters.totals()[0],
            kills=self._kills,
            audits=self._auditor.audits,
        )

    def _report(
        self, seconds: float, leaked_bytes: int | None, leaked_owners: int | None
    ) -> StressReport:
        operations, refusals = self._counters.totals()
        return StressReport(
            seed=self._options.seed,
            workers=self._options.workers,
            seconds=round(seconds, 3),
            supervisor=self._options.supervisor,
            operations=operations,
            operations_per_second=round(operations / max(seconds, 1e-9), 1),
            refusals=refusals,
            kills=self._kills,
            audits=self._auditor.audits,
            reclaims_measured=len(self._reclaims_s),
            reclaim_p50_ms=percentile_ms(self._reclaims_s, 50),
            reclaim_p99_ms=percentile_ms(self._reclaims_s, 99),
            reclaim_max_ms=percentile_ms(self._reclaims_s, 100),
            violations=tuple(dict.fromkeys(self._auditor.violations)),
            leaked_bytes=leaked_bytes,
            leaked_owners=leaked_owners,
        )


def percentile_ms(seconds: list[float], percent: int) -> float | None:
    """The smallest of the times that `percent` of them do not exceed, in milliseconds."""
    if not seconds:
        return None
    rank = max(1, math.ceil(len(seconds) * percent / 100))
    return round(sorted(seconds)[rank - 1] * 1000, 3)
