"""What a replay is told, what it counts, and what it says in the end."""

from __future__ import annotations

import msgspec

from shmcache import bounds
from shmcache.errors import size_text
from shmcache.workloads.block_room import BlockRoom
from shmcache.workloads.replay_worker import WorkerAnswer, chain, trace_keys
from shmcache.workloads.traces import BLOCK_TOKENS_DEFAULT, TraceRequest


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and in how much memory: `pool_blocks` blocks, or as many as `pool_bytes` hold.

    `kill_after` kills one worker when so many requests have been handed out; `kill_every_s` kills
    one at a time, for ever. `seed` decides whom.
    Errors: `ValueError` for a memory that holds no block, or an impossible name.
    """

    name: str
    seed: int
    block_bytes: int
    block_tokens: int = BLOCK_TOKENS_DEFAULT
    pool_bytes: int | None = None
    pool_blocks: int | None = None
    eviction: str | None = None
    workers: int = 4
    private: bool = False
    speed: float | None = None
    kill_every_s: float | None = None
    kill_after: int | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        if (self.pool_bytes is None) == (self.pool_blocks is None):
            raise ValueError("the pool has a size in bytes or in blocks, one of the two")
        bounds.bounded(self.block_bytes, "the bytes of a block", 1, bounds.BLOCK_BYTES_LIMIT)
        if not 1 <= self.blocks <= bounds.BLOCKS_MAX_LIMIT:
            raise ValueError(
                f"a pool would have {self.blocks} blocks of {size_text(self.block_bytes)}: "
                f"make it 1 to {bounds.BLOCKS_MAX_LIMIT}"
            )
        for name in self.names:
            bounds.pool_name(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the pools: one for all workers, or one for each."""
        if not self.private:
            return (self.name,)
        return tuple(f"{self.name}-{worker}" for worker in range(self.workers))

    @property
    def blocks(self) -> int:
        """How many blocks each pool holds."""
        shares = len(self.names)
        if self.pool_blocks is not None:
            return self.pool_blocks // shares
        return BlockRoom(self.block_bytes).blocks((self.pool_bytes or 0) // shares)

    @property
    def arena_bytes(self) -> int:
        """What so many blocks need."""
        return BlockRoom(self.block_bytes).arena_bytes(self.blocks)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did and found; None where a violation left no answer."""

    requests: int
    block_references: int
    block_hits: int
    block_hit_rate: float
    ideal_hit_rate: float
    input_tokens: int
    tokens_saved: int
    evictions: int | None
    kills: int
    redone: int
    leaked_bytes: int | None
    wrong_bytes: int
    bytes_stored: int
    bytes_served: int
    blocks_left_out: int
    seconds: float
    workers: int
    seed: int
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every byte was right, nothing was violated, and nothing leaked."""
        return not (self.violations or self.wrong_bytes or self.leaked_bytes)


class ReplayProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    elapsed_s: float
    requests: int
    block_references: int
    block_hits: int
    kills: int


class Tally:
    """What the answers say of the trace, each request counted once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys = trace_keys()
        self._seen: set[bytes] = set()
        self.requests = self.references = self.hits = self.ideal_hits = 0
        self.tokens = self.tokens_saved = self.left_out = 0
        self._found: dict[int, int] = {}

    def arrive(self, request: TraceRequest) -> None:
        """What a cache without limit would have found, requests coming in this order."""
        keys = [key.tobytes() for key in chain(self._keys, request.block_ids)]
        # A key is seen only with all keys before it: those that are seen are a prefix.
        self.ideal_hits += sum(key in self._seen for key in keys)
        self._seen.update(keys)

    def cut_short(self, number: int, hits: int) -> None:
        """A worker was killed after it had found `hits` blocks for a request.

        That is what counts: whoever does it again also finds what this worker had stored for it.
        """
        self._found.setdefault(number, hits)

    def count(self, request: TraceRequest, answer: WorkerAnswer) -> None:
        """A request that is done."""
        blocks = len(request.block_ids)
        hits = self._found.pop(answer.number, answer.hits)
        self.requests += 1
        self.references += blocks
        self.hits += hits
        self.left_out += blocks - answer.hits - answer.stored
        self.tokens += request.input_tokens
        self.tokens_saved += min(hits * self._block_tokens, request.input_tokens)

    def rate(self, hits: int) -> float:
        """As a fraction of the references; 0 when there are none."""
        return round(hits / self.references, 6) if self.references else 0.0
