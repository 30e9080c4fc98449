"""Independent workers serve conversations about the documentation with a real decoder and one pool.

Why         Hit rates are an argument; a model that says the same with the pool and without it, bit
            by bit, while workers are killed, is a proof.
Contract    Turns are handed out to whoever is free: a conversation goes on at any worker, which
            finds in the pool what others computed of it. A killed worker is replaced; the turn that
            it had not answered is redone first, and counted once, with what its first look found.
            The run is `ok` when every answer that was checked has the bits of one computed without
            the pool, no worker met an error, `verify` finds nothing, and nothing but published
            blocks is charged in the end (G1, G3, G4, G5, G7).
Death       However a run ends, its children end, and the pool that it made goes unless it is kept.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from shmcache import CacheResidencyPool, SegmentError
from shmcache.workloads.children import Counters
from shmcache.workloads.decoder import ONE_BLAS_THREAD
from shmcache.workloads.demo_books import (
    DemoKill,
    DemoOptions,
    DemoProgress,
    DemoReport,
    Tally,
    milliseconds_since,
)
from shmcache.workloads.demo_worker import (
    COUNTS,
    FOUND_REQUEST,
    FOUND_TOKENS,
    WorkerAnswer,
    WorkerRequest,
    WorkerSettings,
)
from shmcache.workloads.doc_chats import Conversation, conversations, doc_pages, tokens_needed
from shmcache.workloads.leftovers import leftovers
from shmcache.workloads.seats import PATIENCE_S, PROGRESS_S, Crew, Seat
from shmcache.workloads.serving import create_serving_pool
from shmcache.workloads.weights import Model, load_model

_Seat: TypeAlias = Seat[WorkerSettings, WorkerRequest, WorkerAnswer]


def run_demo(
    options: DemoOptions, on_progress: Callable[[DemoProgress], None] = lambda _: None
) -> DemoReport:
    """Make the pool, serve all conversations, take everything away again, and report.

    `on_progress` is called every 0.2 s; an exception that it raises ends the run.
    Errors: WorkloadError for a model or pages that are not there; SegmentError.NoSpace when the
    pool does not fit this host; OSError when children cannot be started.
    """
    model = load_model(options.model, options.cache)
    chats = conversations(
        doc_pages(options.docs),
        model.tokenizer,
        seed=options.seed,
        count=options.conversations,
        turns=options.turns,
        pages_max=options.pages,
        page_tokens=options.page_tokens,
    )
    with contextlib.ExitStack() as stack:
        if _create(options, model, chats) and not options.keep:
            stack.callback(_destroy, options.name)
        pool = stack.enter_context(CacheResidencyPool.observe(options.name))
        counters = stack.enter_context(Counters(options.workers, COUNTS))
        return _Demo(options, model, chats, pool, counters).run(on_progress)


def _create(options: DemoOptions, model: Model, chats: list[Conversation]) -> bool:
    """Whether the pool was made, and did not exist before."""
    needed = (tokens_needed(chat, model.tokenizer, options.answer_tokens) for chat in chats)
    try:
        create_serving_pool(
            options.name,
            model.shape,
            servers=options.workers,
            tokens_max=max(needed),
            arena_bytes=options.arena_bytes,
            block_tokens=options.block_tokens,
        ).close()
    except SegmentError.Exists:
        return False
    return True


def _destroy(name: str) -> None:
    with contextlib.suppress(SegmentError.NotFound):  # somebody else removed it meanwhile
        CacheResidencyPool.destroy(name, force=True)


class _Turn(msgspec.Struct, eq=False):
    """One request; `found`: what a worker that was killed had found for it at the first look."""

    number: int
    chat: Conversation
    found: int | None = None
    kill: DemoKill | None = None


class _Demo:
    """One run: its workers, the turns at large, the nemesis, and what is counted."""

    def __init__(
        self,
        options: DemoOptions,
        model: Model,
        chats: list[Conversation],
        pool: CacheResidencyPool,
        counters: Counters,
    ) -> None:
        self._options = options
        self._model = model
        self._pool = pool
        self._counters = counters
        self._rng = random.Random(options.seed)
        self._crew: Crew[WorkerSettings, WorkerRequest, WorkerAnswer]
        self._crew = Crew(self._seat, options.workers)
        self._waiting = deque(self._next_turn(chat) for chat in chats)
        self._at_work: dict[int, _Turn] = {}
        self._handed_out = self._redone = self._dooms = 0
        self._tallies = [Tally() for _ in range(options.workers)]
        self._total = Tally()
        self._doomed: dict[_Seat, float] = {}  # who is to be killed, and when
        self._killed: dict[_Seat, float] = {}
        self._kills: list[DemoKill] = []

    def run(self, on_progress: Callable[[DemoProgress], None]) -> DemoReport:
        try:
            self._crew.start(lambda: on_progress(self._progress()))
            started = time.monotonic()
            self._serve(on_progress)
            seconds = time.monotonic() - started
            self._crew.end()
        finally:
            self._crew.kill_all()
        return self._report(seconds)

    def _seat(self, row: int) -> _Seat:
        settings = WorkerSettings(
            pool=self._options.name,
            model=self._options.model,
            cache=str(self._options.cache),
            block_tokens=self._options.block_tokens,
            counters=self._counters.descriptor,
            row=row,
            rows=self._options.workers,
        )
        return Seat(
            "demo_worker",
            row,
            settings,
            WorkerAnswer,
            inherited=self._counters.descriptor,
            environment=ONE_BLAS_THREAD,
        )

    # -- serving

    def _serve(self, on_progress: Callable[[DemoProgress], None]) -> None:
        next_progress = time.monotonic()
        while self._crew.sound and (self._waiting or self._at_work):
            while self._waiting and (seat := self._crew.free()):
                self._give(seat, self._waiting.popleft())
            due = min(next_progress, *self._doomed.values(), math.inf)
            for seat, answer in self._crew.listen(due - time.monotonic()):
                if answer is None:
                    self._bury(seat)
                else:
                    self._take(seat, answer)
            now = time.monotonic()
            for seat in [seat for seat, when in self._doomed.items() if when <= now]:
                self._kill(seat)
            if now >= next_progress:
                next_progress = now + PROGRESS_S
                on_progress(self._progress())

    def _next_turn(self, chat: Conversation) -> _Turn:
        """The number counts the turns of all conversations as if they took turns."""
        asked = self._options.turns - len(chat.questions)
        chat.ask(self._model.tokenizer)
        return _Turn(asked * self._options.conversations + chat.number, chat)

    def _give(self, seat: _Seat, turn: _Turn) -> None:
        options = self._options
        self._at_work[turn.number] = turn
        check = options.check_every > 0 and turn.number % options.check_every == 0
        prompt = turn.chat.tokens
        self._crew.give(seat, WorkerRequest(turn.number, prompt, options.answer_tokens, check))
        if turn.kill is None:  # not one that is redone
            self._handed_out += 1
            due = (options.kills + 1) * self._handed_out // options.requests
            if self._dooms < min(due, options.kills):
                self._doom(seat)

    def _take(self, seat: _Seat, answer: WorkerAnswer) -> None:
        turn = self._at_work.pop(answer.number)
        chat = turn.chat
        found = answer.reply.known_tokens
        if turn.kill is not None:
            turn.kill.found_tokens = found
        saved = found if turn.found is None else turn.found
        for tally in (self._total, self._tallies[seat.row]):
            tally.count(len(chat.tokens), saved, answer)
        chat.answered(self._model.tokenizer, answer.reply.tokens)
        if chat.questions:
            self._waiting.append(self._next_turn(chat))
        if seat in self._doomed:
            self._kill(seat)

    # -- kills

    def _doom(self, seat: _Seat) -> None:
        """Kill it at some moment of its work; at the latest when that is done."""
        self._dooms += 1
        mean_s = self._total.seconds / max(self._total.requests, 1)
        self._doomed[seat] = time.monotonic() + self._rng.random() * mean_s

    def _kill(self, seat: _Seat) -> None:
        del self._doomed[seat]
        self._killed[seat] = time.monotonic()
        seat.kill()

    def _bury(self, seat: _Seat) -> None:
        """Give back what a killed worker held; its turn is done again, before all others."""
        pid = seat.child.pid
        kill = DemoKill(worker=seat.row, pid=pid, reclaim_ms=self._reclaim(pid, self._killed[seat]))
        self._kills.append(kill)
        for tally in (self._total, self._tallies[seat.row]):
            tally.kills += 1
        if seat.request is None:
            return
        turn = self._at_work.pop(seat.request.number)
        counts = self._counters.row(seat.row)
        if turn.found is None and counts[FOUND_REQUEST] == turn.number + 1:
            turn.found = counts[FOUND_TOKENS]
        turn.kill = kill
        kill.prompt_tokens = len(turn.chat.tokens)
        self._redone += 1
        self._waiting.appendleft(turn)

    def _reclaim(self, pid: int, killed: float) -> float:
        """Milliseconds from the kill until nothing is held for it, by whoever cleaned up."""
        self._pool.sweep()
        while any(owner.pid == pid for owner in self._pool.owners()):
            if time.monotonic() > killed + PATIENCE_S:
                self._crew.violations.append(f"worker {pid} is dead and still holds something")
                break
            self._pool.sweep()
        return milliseconds_since(killed)

    # -- what is said

    def _progress(self) -> DemoProgress:
        return DemoProgress(
            requests=self._total.requests,
            requests_total=self._options.requests,
            prompt_tokens=self._total.prompt_tokens,
            tokens_saved=self._total.tokens_saved,
            kills=len(self._kills),
        )

    def _report(self, seconds: float) -> DemoReport:
        left = leftovers(self._pool)
        return DemoReport(
            model=self._model.name,
            total=self._total.row(),
            workers=tuple(tally.row() for tally in self._tallies),
            kills=tuple(self._kills),
            redone=self._redone,
            leaked_bytes=left.leaked_bytes,
            seconds=round(seconds, 3),
            seed=self._options.seed,
            violations=tuple(dict.fromkeys([*self._crew.violations, *left.violations])),
        )
