"""What the demo is told, what it counts, and what it says in the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec

from shmcache import bounds
from shmcache.workloads.decoder import STEP_TOKENS
from shmcache.workloads.demo_worker import WorkerAnswer

ARENA_BYTES: Final = 256 << 20


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `model` and `cache` as in weights.load_model; `docs` is a folder of pages.

    Every `check_every`th request is computed without the pool too, none for 0. `kills` workers are
    killed one after the other, evenly over the requests; `seed` decides when exactly, and what is
    asked. A pool of that name that exists is used and left; one that is made is removed, unless it
    is to be kept.
    Errors: `ValueError` for an impossible name, or more kills than there is time for.
    """

    name: str
    seed: int
    model: str
    cache: Path
    docs: Path
    workers: int = 3
    conversations: int = 4
    turns: int = 3
    pages: int = 2
    page_tokens: int = 768
    answer_tokens: int = 16
    block_tokens: int = STEP_TOKENS
    arena_bytes: int = ARENA_BYTES
    check_every: int = 1
    kills: int = 1
    keep: bool = False

    def __post_init__(self) -> None:
        bounds.pool_name(self.name)
        if self.kills >= self.requests:
            raise ValueError(f"{self.kills} kills need more than {self.requests} requests")

    @property
    def requests(self) -> int:
        """How many there will be."""
        return self.conversations * self.turns


class DemoRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker, or all, did; a successor goes on with the row of the killed.

    Contract: each request is counted once, for who answered it, with what its first look found.
    `checked` requests were computed without the pool too; `different` of them had other bits.
    Units: tokens of prompts, but `generated`; milliseconds from the request to the first token's
    logits, on average; tokens per second of prompts and answers, checks left out. None for nothing
    to divide by. `first_token_ratio` compares the checked requests only.
    """

    requests: int
    tokens_computed: int
    tokens_saved: int
    hit_rate: float | None
    generated: int
    tokens_per_second: float | None
    first_token_ms: float | None
    first_token_alone_ms: float | None
    first_token_ratio: float | None
    checked: int
    different: int
    kills: int


class DemoKill(msgspec.Struct, kw_only=True):
    """A worker that was killed. `reclaim_ms`: from the signal until nothing was held for it.

    `found_tokens`: what the successor found of the request that the killed one left undone; None
    when it left none.
    """

    worker: int
    pid: int
    reclaim_ms: float
    prompt_tokens: int | None = None
    found_tokens: int | None = None


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did and found; None where a violation left no answer."""

    model: str
    total: DemoRow
    workers: tuple[DemoRow, ...]
    kills: tuple[DemoKill, ...]
    redone: int
    leaked_bytes: int | None
    seconds: float
    seed: int
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every bit was right, nothing was violated, and nothing leaked."""
        return not (self.violations or self.total.different or self.leaked_bytes)


class DemoProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    requests: int
    requests_total: int
    prompt_tokens: int
    tokens_saved: int
    kills: int


class Tally(msgspec.Struct):
    """The sums of one worker, or of all."""

    requests: int = 0
    prompt_tokens: int = 0
    tokens_saved: int = 0
    generated: int = 0
    seconds: float = 0.0
    first_token_s: float = 0.0
    checked_first_token_s: float = 0.0
    alone_first_token_s: float = 0.0
    checked: int = 0
    different: int = 0
    kills: int = 0

    def count(self, prompt_tokens: int, saved: int, answer: WorkerAnswer) -> None:
        """A request that is done."""
        reply = answer.reply
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.tokens_saved += saved
        self.generated += len(reply.tokens)
        self.seconds += reply.seconds
        self.first_token_s += reply.first_token_s
        if answer.alone is not None:
            self.checked += 1
            self.checked_first_token_s += reply.first_token_s
            self.alone_first_token_s += answer.alone.first_token_s
            self.different += not answer.same

    def row(self) -> DemoRow:
        """What is said of it."""
        alone_s = self.alone_first_token_s
        worked = self.prompt_tokens + self.generated
        return DemoRow(
            requests=self.requests,
            tokens_computed=self.prompt_tokens - self.tokens_saved,
            tokens_saved=self.tokens_saved,
            hit_rate=_ratio(self.tokens_saved, self.prompt_tokens),
            generated=self.generated,
            tokens_per_second=_ratio(worked, self.seconds, 1),
            first_token_ms=_ratio(self.first_token_s * 1e3, self.requests, 1),
            first_token_alone_ms=_ratio(alone_s * 1e3, self.checked, 1),
            first_token_ratio=_ratio(self.checked_first_token_s, alone_s),
            checked=self.checked,
            different=self.different,
            kills=self.kills,
        )


def milliseconds_since(started: float) -> float:
    """Of the monotonic clock."""
    return round((time.monotonic() - started) * 1e3, 2)


def _ratio(part: float, whole: float, digits: int = 4) -> float | None:
    return round(part / whole, digits) if whole else None
