"""How large a pool must be: from a model, its traffic and a wish to the options of `create`.

Why         The size of a pool is fixed at its creation and its memory is taken at once. Too small
            evicts what the next request needs; too large takes the memory of others.
Contract    `plan_capacity` reads no host and makes no pool, but for the private one in which a
            policy other than `lru` is simulated. The arena holds, whichever is more: every block
            that all requests in flight may lease at once, sharing nothing; the blocks with which an
            LRU pool reaches the wanted hit rate on the trace. A given `arena_bytes` overrules both.
            `plan.geometry` is exactly what `create` makes of `plan.pool_options`, to the byte.
            Rates count references to the trace's own blocks; a block of n of the pool's is hit or
            missed whole, as an LRU pool of the small blocks would do.
Units       Tokens, bytes, blocks of the pool (`trace_blocks`: of the trace). Rates are fractions.
Errors      `ValueError` for sizes that no pool can have, and a wanted hit rate without a trace.
Not here    What the host has: shmcache/doctor. Reading configs: model_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from shmcache import CachePoolLimits, CacheResidencyPool, SegmentGeometry, bounds
from shmcache.workloads.block_room import LINE_BYTES, BlockRoom
from shmcache.workloads.geometries import Geometry
from shmcache.workloads.hit_curve import engine_hit_rate, hit_curve, private_curves

_SIZES_BELOW: Final = 7  # powers of two that a curve goes back from the size of the whole trace
_SAMPLES_PER_POWER: Final = 8
_POLICY_DEFAULT: Final = bounds.EVICTION_POLICIES[-1]


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served. `contexts` are lengths of requests in tokens; the longest counts."""

    block_tokens: int = 16
    contexts: tuple[int, ...] = (8192,)
    requests: int = 1
    workers: int = 1
    trace_block_tokens: int = 512
    target_rate: float | None = None
    arena_bytes: int | None = None
    policy: str = _POLICY_DEFAULT

    def __post_init__(self) -> None:
        bounds.bounded(self.block_tokens, "block_tokens", 1, bounds.BLOCK_TOKENS_MAX)
        bounds.bounded(self.trace_block_tokens, "trace_block_tokens", 1, bounds.BLOCK_TOKENS_MAX)
        bounds.bounded(self.requests, "requests", 1, bounds.MANAGERS_MAX_LIMIT)
        bounds.bounded(self.workers, "workers", 1, bounds.OWNERS_MAX_LIMIT)
        if not self.contexts:
            raise ValueError("a plan needs the length of a request")
        for tokens in self.contexts:
            bounds.bounded(tokens, "a context", 1, 1 << 30)
        if self.arena_bytes is not None:
            limits = (bounds.ARENA_BYTES_MIN, bounds.ARENA_BYTES_LIMIT)
            bounds.bounded(self.arena_bytes, "arena_bytes", *limits)
        if self.target_rate is not None and not 0 < self.target_rate <= 1:
            raise ValueError(f"a hit rate is above 0 and at most 1, unlike {self.target_rate}")
        if self.policy not in bounds.EVICTION_POLICIES:
            raise ValueError(f"there is no policy {self.policy!r}")
        small, large = sorted((self.block_tokens, self.trace_block_tokens))
        if large % small:
            raise ValueError(
                f"blocks of {self.block_tokens} tokens do not divide the trace's blocks of "
                f"{self.trace_block_tokens}, nor the other way round"
            )


class PlanContext(msgspec.Struct, frozen=True):
    """A request of one length: all that it keeps, windows and states included, and its blocks."""

    tokens: int
    sequence_bytes: int
    blocks: int


class PlanPoint(msgspec.Struct, frozen=True):
    """The hit rates of one size: shared, the same memory split between workers, and the policy."""

    arena_bytes: int
    blocks: int
    lru_rate: float
    private_rate: float
    policy_rate: float


class PlanSample(msgspec.Struct, frozen=True):
    """A place on the curve, for drawing."""

    arena_bytes: int
    lru_rate: float
    private_rate: float


class PlanTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says. `target_blocks` is None without a target, and where none reaches it.

    `longest_tokens` is the length of its longest prompt, in whole blocks.
    """

    requests: int
    trace_blocks: int
    trace_references: int
    longest_tokens: int
    ideal_rate: float
    target_rate: float | None
    target_blocks: int | None
    planned: PlanPoint
    points: tuple[PlanPoint, ...]
    samples: tuple[PlanSample, ...]

    @property
    def reached(self) -> bool:
        """Whether the plan has the rate that was wanted."""
        return self.target_rate is None or self.planned.lru_rate >= self.target_rate


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, and what it is for."""

    model: str
    bytes_per_token: int
    state_bytes: int
    block_tokens: int
    block_bytes: int
    place_bytes: int
    contexts: tuple[PlanContext, ...]
    requests: int
    workers: int
    in_flight_blocks: int
    blocks: int
    geometry: SegmentGeometry
    traffic: PlanTraffic | None

    @property
    def segment_bytes(self) -> int:
        """The size of the file that `create` makes."""
        return self.geometry.segment_bytes

    @property
    def pool_options(self) -> dict[str, Any]:
        """What `CacheResidencyPool.create` is to be told, beside name and limits."""
        names = ("arena_bytes", "blocks_max", "block_bytes_max", "owners_max", "managers_max")
        options = {name: getattr(self.geometry, name) for name in names}
        return options | {"eviction": self.geometry.eviction}

    @property
    def command(self) -> tuple[str, ...]:
        """The words after `shmcache create NAME` that make this pool."""
        limits = self.geometry.limits
        sizes = {
            "device": limits.device_bytes,
            "host": limits.host_bytes,
            "transfer": limits.transfer_in_flight_bytes,
        }
        options = self.pool_options
        options["arena"] = options.pop("arena_bytes")
        words = {name.replace("_", "-"): value for name, value in (sizes | options).items()}
        return tuple(word for name, value in words.items() for word in (f"--{name}", str(value)))


def plan_capacity(
    model: Geometry,
    options: PlanOptions,
    prompts: Sequence[Sequence[int]] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CapacityPlan:
    """The plan for a model; `prompts` are the block ids of a trace's requests, in their order.

    `on_progress` is told what is simulated, which takes seconds per size and long trace.
    """
    if model.bytes_per_token == 0:
        raise ValueError(f"{model.name} keeps nothing per token: it has no blocks to share")
    if options.target_rate is not None and prompts is None:
        raise ValueError("a hit rate is one of a trace: give both")
    block_bytes = model.bytes_per_token * options.block_tokens
    bounds.bounded(block_bytes, "the bytes of a block", 1, bounds.BLOCK_BYTES_LIMIT)
    room = BlockRoom(block_bytes).without_waste()
    contexts = tuple(_context(model, options, tokens) for tokens in sorted(set(options.contexts)))
    in_flight = options.requests * contexts[-1].blocks
    trace = None if prompts is None else _Trace(options, prompts, on_progress or (lambda _: None))
    blocks = _blocks(options, room, in_flight, trace)
    return CapacityPlan(
        model=model.name,
        bytes_per_token=model.bytes_per_token,
        state_bytes=model.state_bytes,
        block_tokens=options.block_tokens,
        block_bytes=block_bytes,
        place_bytes=room.place_bytes,
        contexts=contexts,
        requests=options.requests,
        workers=options.workers,
        in_flight_blocks=in_flight,
        blocks=blocks,
        geometry=_pool(options, room, blocks, contexts[-1]),
        traffic=trace.look(room, blocks) if trace else None,
    )


def _context(model: Geometry, options: PlanOptions, tokens: int) -> PlanContext:
    blocks = -(-tokens // options.block_tokens)
    return PlanContext(tokens, model.total_bytes(tokens), blocks)


def _blocks(options: PlanOptions, room: BlockRoom, in_flight: int, trace: _Trace | None) -> int:
    if options.arena_bytes is not None:
        blocks = room.blocks(options.arena_bytes)
    else:
        blocks = max(in_flight, (trace.target_blocks or 0) if trace else 0)
    return bounds.bounded(blocks, "the pool's blocks", 1, bounds.BLOCKS_MAX_LIMIT)


def _pool(
    options: PlanOptions, room: BlockRoom, blocks: int, longest: PlanContext
) -> SegmentGeometry:
    """The pool. Twice as many workers and requests have a row: a reload has old and new at once.

    Its limits are what the requests in flight keep on the device, and one request per worker on its
    way between device and host.
    """
    arena_bytes = room.arena_bytes(blocks)
    if options.arena_bytes is not None:
        arena_bytes = options.arena_bytes // LINE_BYTES * LINE_BYTES
    limits = CachePoolLimits(
        device_bytes=options.requests * longest.sequence_bytes,
        host_bytes=arena_bytes,
        transfer_in_flight_bytes=options.workers * longest.sequence_bytes,
        disk_bytes=0,
    )
    owners, managers = 2 * options.workers + 2, 2 * options.requests
    return CacheResidencyPool.geometry_for(
        limits,
        arena_bytes=arena_bytes,
        blocks_max=blocks,
        block_bytes_max=min(room.block_bytes_max, arena_bytes),
        owners_max=min(max(owners, bounds.OWNERS_MAX_DEFAULT), bounds.OWNERS_MAX_LIMIT),
        managers_max=min(max(managers, bounds.MANAGERS_MAX_DEFAULT), bounds.MANAGERS_MAX_LIMIT),
        eviction=options.policy,
    )


class _Trace:
    """A trace's curves, read in blocks of the pool."""

    def __init__(
        self,
        options: PlanOptions,
        prompts: Sequence[Sequence[int]],
        on_progress: Callable[[str], None],
    ) -> None:
        self._options = options
        self._on_progress = on_progress
        # Either a block of the trace is several of the pool's, or the other way round.
        self._per_block = max(1, options.trace_block_tokens // options.block_tokens)
        self._longest_tokens = max(map(len, prompts), default=0) * options.trace_block_tokens
        self._prompts = _in_larger_blocks(prompts, options)
        self._shared = hit_curve(self._prompts)
        alone = options.workers == 1
        self._private = (self._shared,) if alone else private_curves(self._prompts, options.workers)

    @property
    def target_blocks(self) -> int | None:
        if self._options.target_rate is None:
            return None
        found = self._shared.blocks_for(self._options.target_rate)
        return None if found is None else found * self._per_block

    def look(self, room: BlockRoom, blocks: int) -> PlanTraffic:
        """What the trace finds in a pool with these blocks, and in others."""
        whole = room.arena_bytes(self._shared.blocks * self._per_block)
        last = max((whole - 1).bit_length(), bounds.ARENA_BYTES_MIN.bit_length())
        powers = range(last - _SIZES_BELOW, last + 1)
        steps = range(_SIZES_BELOW * _SAMPLES_PER_POWER + 1)
        sampled = [int(2 ** (powers[0] + step / _SAMPLES_PER_POWER)) for step in steps]
        return PlanTraffic(
            requests=self._shared.requests,
            trace_blocks=self._shared.blocks,
            trace_references=self._shared.references,
            longest_tokens=self._longest_tokens,
            ideal_rate=self._shared.ideal_rate,
            target_rate=self._options.target_rate,
            target_blocks=self.target_blocks,
            planned=self._point(self._options.arena_bytes or room.arena_bytes(blocks), blocks),
            points=tuple(self._point(1 << power, room.blocks(1 << power)) for power in powers),
            samples=tuple(self._sample(size, room.blocks(size)) for size in sampled),
        )

    def _sample(self, arena_bytes: int, blocks: int) -> PlanSample:
        held, workers = blocks // self._per_block, self._options.workers
        hits = sum(curve.hits(held // workers) for curve in self._private)
        references = max(self._shared.references, 1)
        return PlanSample(arena_bytes, self._shared.rate(held), hits / references)

    def _point(self, arena_bytes: int, blocks: int) -> PlanPoint:
        rates = self._sample(arena_bytes, blocks)
        policy_rate = self._policy_rate(blocks // self._per_block)
        return PlanPoint(arena_bytes, blocks, rates.lru_rate, rates.private_rate, policy_rate)

    def _policy_rate(self, held: int) -> float:
        """Of the policy that the pool will have, from the engine itself where it is not `lru`."""
        policy = self._options.policy
        if policy == "lru" or not 0 < held < self._shared.blocks:  # nothing, or all, is kept
            return self._shared.rate(held)
        self._on_progress(f"{policy} with {held:,} blocks of the trace")
        return engine_hit_rate(self._prompts, held, policy)


def _in_larger_blocks(
    prompts: Sequence[Sequence[int]], options: PlanOptions
) -> Sequence[Sequence[int]]:
    """A block's id is that of the last of the trace's blocks in it: ids name whole prefixes."""
    several = options.block_tokens // options.trace_block_tokens
    if several <= 1:
        return prompts
    return [
        [*ids[several - 1 :: several], *ids[len(ids) // several * several :][-1:]]
        for ids in prompts
    ]
