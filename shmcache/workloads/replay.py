"""Replays recorded requests against real worker processes that share one pool, or have one each.

Why         What a shared pool is worth, and whether it keeps its promises, shows on real traffic,
            served by processes that may be killed at any moment.
Contract    Requests are handed out in order of arrival, each to a worker that is free; what a
            worker does with one is in replay_worker.py. Without `speed` they follow each other as
            fast as they are served and hold nothing afterwards; with it they arrive at timestamp /
            speed, and hold their leases for 20 ms per output token / speed. With `private`, worker
            i of n has a pool of its own, an n-th of the memory, and serves every n-th request.
            A killed worker is replaced. The request that it had not answered is redone first, by
            whoever is free, and counted once, with the hits of the first look: what the killed
            worker had published for this very request is found again (G7), but saved nothing.
            The run is `ok` when no byte that was read was wrong, no worker met an error, `verify`
            finds nothing, and nothing but published blocks is charged in the end (G1, G5).
Units       Rates are fractions of block references. The ideal rate is that of one worker with a
            cache without limit.
Death       However a run ends, its children end and, unless it is to be kept, its pools go.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from shmcache import (
    CachePoolLimits,
    CacheResidencyPool,
    SegmentError,
)
from shmcache.workloads.children import Counters
from shmcache.workloads.leftovers import leftovers
from shmcache.workloads.replay_books import (
    ReplayOptions,
    ReplayProgress,
    ReplayReport,
    Tally,
)
from shmcache.workloads.replay_worker import (
    BYTES_SERVED,
    BYTES_STORED,
    COUNTS,
    FOUND_HITS,
    FOUND_REQUEST,
    WRONG_BYTES,
    WorkerAnswer,
    WorkerRequest,
    WorkerSettings,
)
from shmcache.workloads.seats import PROGRESS_S, Crew, Seat
from shmcache.workloads.traces import TraceRequest

_HOLD_S_PER_OUTPUT_TOKEN: Final = 0.020
_Seat: TypeAlias = Seat[WorkerSettings, WorkerRequest, WorkerAnswer]


def run_replay(
    requests: Iterable[TraceRequest],
    options: ReplayOptions,
    on_progress: Callable[[ReplayProgress], None] | None = None,
) -> ReplayReport:
    """Make the pools, replay, take everything away again, and report.

    `on_progress` is called every 0.2 s; an exception that it, or `requests`, raises ends the run.
    Errors: SegmentError.Exists when a pool has the name, NoSpace when it does not fit this host;
    OSError when children cannot be started.
    """
    with contextlib.ExitStack() as stack:
        pools = []
        for name in options.names:
            _create(name, options)
            if not options.keep:
                stack.callback(_destroy, name)
            pools.append(stack.enter_context(CacheResidencyPool.observe(name)))
        counters = stack.enter_context(Counters(options.workers, COUNTS))
        return _Replay(options, pools, counters, requests).run(on_progress or (lambda _: None))


def _create(name: str, options: ReplayOptions) -> None:
    """A pool with its part of the memory, for blocks of the one size there is."""
    settings: dict[str, Any] = {
        "owners_max": 2 * options.workers + 2,
        "block_bytes_max": options.block_bytes,
        "blocks_max": options.blocks,
    }
    if options.eviction is not None:
        settings["eviction"] = options.eviction
    limits = CachePoolLimits(1, options.arena_bytes, 1, 0)
    CacheResidencyPool.create(name, limits, **settings).close()


def _destroy(name: str) -> None:
    with contextlib.suppress(SegmentError.NotFound):  # somebody else removed it meanwhile
        CacheResidencyPool.destroy(name, force=True)


class _Replay:
    """One run: its workers, the requests at large, the nemesis, and what is counted."""

    def __init__(
        self,
        options: ReplayOptions,
        pools: list[CacheResidencyPool],
        counters: Counters,
        requests: Iterable[TraceRequest],
    ) -> None:
        self._options = options
        self._pools = pools
        self._counters = counters
        self._rng = random.Random(options.seed)
        self._tally = Tally(options.block_tokens)
        self._arrivals = enumerate(requests)
        self._ahead: deque[tuple[int, TraceRequest]] = deque()  # the next, and those to be redone
        self._at_work: dict[int, TraceRequest] = {}
        self._handed_out = self._kills = self._redone = 0
        self._crew: Crew[WorkerSettings, WorkerRequest, WorkerAnswer]
        self._crew = Crew(self._seat, options.workers)
        self._violations = self._crew.violations

    def run(self, on_progress: Callable[[ReplayProgress], None]) -> ReplayReport:
        try:
            self._crew.start()
            started = time.monotonic()
            self._play(started, on_progress)
            seconds = time.monotonic() - started
            self._crew.end()
        finally:
            self._crew.kill_all()
        return self._report(seconds)

    # -- workers

    def _seat(self, row: int) -> _Seat:
        settings = WorkerSettings(
            pool=self._pools[row % len(self._pools)].name,
            block_bytes=self._options.block_bytes,
            counters=self._counters.descriptor,
            row=row,
            rows=self._options.workers,
        )
        return Seat(
            "replay_worker", row, settings, WorkerAnswer, inherited=self._counters.descriptor
        )

    def _listen(self, wait_s: float) -> None:
        """Take in what workers say, and what the killed ones leave undone."""
        for seat, answer in self._crew.listen(wait_s):
            if answer is not None:
                self._tally.count(self._at_work.pop(answer.number), answer)
            elif seat.request is not None:
                number = seat.request.number
                counts = self._counters.row(seat.row)
                if counts[FOUND_REQUEST] == number + 1:
                    self._tally.cut_short(number, counts[FOUND_HITS])
                self._redone += 1
                self._ahead.appendleft((number, self._at_work.pop(number)))

    def _kill_one(self) -> None:
        """One that works, else one that could: killing in the cradle would stop the replay."""
        busy = [seat for seat in self._crew.seats if seat.attached and seat.request]
        attached = busy or [seat for seat in self._crew.seats if seat.attached]
        if attached:
            self._kills += 1
            self._rng.choice(attached).kill()

    # -- the play

    def _play(self, started: float, on_progress: Callable[[ReplayProgress], None]) -> None:
        now = next_progress = started
        next_kill = started + self._pause()
        while not self._violations:
            next_request = self._hand_out(started, now)
            if not (self._ahead or self._at_work):
                return
            self._listen(min(next_request, next_kill, next_progress) - time.monotonic())
            now = time.monotonic()
            if now >= next_kill:
                next_kill = now + self._pause()
                self._kill_one()
            if now >= next_progress:
                next_progress = now + PROGRESS_S
                on_progress(self._progress(now - started))

    def _pause(self) -> float:
        every_s = self._options.kill_every_s
        return every_s * self._rng.uniform(0.5, 1.5) if every_s else math.inf

    def _hand_out(self, started: float, now: float) -> float:
        """Give what is due to who is free; when the next is due, if that is all it waits for."""
        while True:
            if not self._ahead:
                self._ahead.extend(itertools.islice(self._arrivals, 1))
            if not self._ahead:
                return math.inf
            number, request = self._ahead[0]
            due = started + self._scaled(request.timestamp_ms / 1000)
            seat = self._free_seat(number)
            if seat is None:
                return math.inf
            if due > now:
                return due
            self._ahead.popleft()
            self._give(seat, number, request)

    def _free_seat(self, number: int) -> _Seat | None:
        return self._crew.free(number % self._options.workers if self._options.private else None)

    def _give(self, seat: _Seat, number: int, request: TraceRequest) -> None:
        if number == self._handed_out:  # not one that is redone
            self._handed_out += 1
            self._tally.arrive(request)
        self._at_work[number] = request
        hold_s = self._scaled(request.output_tokens * _HOLD_S_PER_OUTPUT_TOKEN)
        self._crew.give(seat, WorkerRequest(number, request.block_ids, hold_s))
        if self._handed_out == self._options.kill_after and not self._kills:
            self._kills += 1
            seat.kill()

    def _scaled(self, seconds: float) -> float:
        return seconds / self._options.speed if self._options.speed else 0.0

    # -- what is said

    def _progress(self, elapsed_s: float) -> ReplayProgress:
        return ReplayProgress(
            elapsed_s=elapsed_s,
            requests=self._tally.requests,
            block_references=self._tally.references,
            block_hits=self._tally.hits,
            kills=self._kills,
        )

    def _report(self, seconds: float) -> ReplayReport:
        tally, counts = self._tally, self._counters.totals()
        left = [leftovers(pool) for pool in self._pools]
        self._violations += itertools.chain(*(each.violations for each in left))
        return ReplayReport(
            requests=tally.requests,
            block_references=tally.references,
            block_hits=tally.hits,
            block_hit_rate=tally.rate(tally.hits),
            ideal_hit_rate=tally.rate(tally.ideal_hits),
            input_tokens=tally.tokens,
            tokens_saved=tally.tokens_saved,
            evictions=_sum(each.evictions for each in left),
            kills=self._kills,
            redone=self._redone,
            leaked_bytes=_sum(each.leaked_bytes for each in left),
            wrong_bytes=counts[WRONG_BYTES],
            bytes_stored=counts[BYTES_STORED],
            bytes_served=counts[BYTES_SERVED],
            blocks_left_out=tally.left_out,
            seconds=round(seconds, 3),
            workers=self._options.workers,
            seed=self._options.seed,
            violations=tuple(dict.fromkeys(self._violations)),
        )


def _sum(counts: Iterable[int | None]) -> int | None:
    """None if any of them is not known."""
    known = list(counts)
    return None if None in known else sum(filter(None, known))
