"""How often a trace hits in a pool of any size: all sizes in one pass.

Why         A pool should be as large as its hits are worth, and that shows on real requests only.
            Replaying a trace once per size takes minutes; the distances of one LRU stack answer for
            every size at once.
Contract    One request after the other: the longest prefix that is there counts as hits, then all
            blocks of the request are used from its last to its first, and what was not used for
            longest goes. `hits(n)` is exactly what a pool of n blocks with the policy `lru` and one
            worker finds (give or take a block where a request is longer than the pool). Other
            policies have no such distances: `engine_hit_rate` runs the real engine, for one size.
            Not seen: requests at the same time, whose leases keep blocks.
Invariants  A block is used by every request that uses a block behind it, and is younger then. So
            the blocks that a request was the last to use are, at any time, the end of its chain;
            an LRU stack is the requests in order, each with that end. Ranks in the stack are sums
            over requests, not over blocks: a Fenwick tree of a word per request holds them.
Cost        Per request, a few steps of the tree for each earlier request whose blocks it takes
            over; per block, one look into a dict. Memory: an entry per distinct block. 288,500
            references to 182,790 blocks take 0.2 s.
Source      Mattson et al., "Evaluation techniques for storage hierarchies", 1970; Bennett and
            Kruskal, "LRU stack processing", 1975.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shmcache import CachePoolLimits, CacheResidencyPool, Lease, LeaseRun, SegmentError
from shmcache.workloads.block_room import BlockRoom
from shmcache.workloads.replay_worker import chain, trace_keys

_ROOT: Final = -1  # what comes before the first block of a prompt
_BLOCK_BYTES: Final = 64  # of a simulated block: what is in it does not matter


class HitCurve:
    """The hits of a trace, by the number of blocks that a pool has room for."""

    def __init__(self, requests: int, references: int, hits: npt.NDArray[np.int64]) -> None:
        self.requests = requests
        self.references = references
        self._hits = hits

    @property
    def blocks(self) -> int:
        """Distinct blocks of the trace: a larger pool has no more hits."""
        return len(self._hits) - 1

    def hits(self, blocks: int) -> int:
        """Blocks found, in a pool with room for so many."""
        return int(self._hits[min(max(blocks, 0), self.blocks)])

    def rate(self, blocks: int) -> float:
        """As a fraction of the references; 0 when there are none."""
        return self.hits(blocks) / self.references if self.references else 0.0

    @property
    def ideal_rate(self) -> float:
        """Of a cache without limit."""
        return self.rate(self.blocks)

    def blocks_for(self, rate: float) -> int | None:
        """The fewest blocks that reach the rate; None when no cache does."""
        found = int(np.searchsorted(self._hits, rate * self.references - 1e-9))
        return found if found <= self.blocks else None


def hit_curve(prompts: Iterable[Sequence[int]]) -> HitCurve:
    """The curve of these requests, each the ids of its blocks, as `TraceRequest.block_ids`."""
    stack = _Stack()
    for block_ids in prompts:
        stack.use(block_ids)
    return stack.curve()


def private_curves(prompts: Iterable[Sequence[int]], workers: int) -> tuple[HitCurve, ...]:
    """A curve per worker, when each serves every n-th request from a cache of its own."""
    stacks = [_Stack() for _ in range(workers)]
    for block_ids, stack in zip(prompts, itertools.cycle(stacks), strict=False):
        stack.use(block_ids)
    return tuple(stack.curve() for stack in stacks)


class _Stack:
    """All blocks in the order of their last use, and what was found at which depth."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], int] = {}  # the block before it, its id: its number
        self._user: list[int] = []  # of a block: the last request that used it
        self._held = _Sums()  # of a request: blocks that no later one has used
        self._steps: Counter[int] = Counter()  # hits at a depth, minus those one less deep
        self._references = 0

    def use(self, block_ids: Sequence[int]) -> None:
        """One request."""
        known, now = len(self._user), len(self._held)
        blocks = self._chain(block_ids)
        found = sum(block < known for block in blocks)
        for user, run in itertools.groupby(self._user[block] for block in blocks[:found]):
            length = sum(1 for _ in run)
            depth = known - self._held.upto(user) + 1  # of the first, which is the youngest
            self._steps[depth] += 1
            self._steps[depth + length] -= 1
            self._held.add(user, -length)
        for block in blocks:
            self._user[block] = now
        self._held.append(len(blocks))
        self._references += len(blocks)

    def curve(self) -> HitCurve:
        steps = np.zeros(len(self._user) + 2, np.int64)
        for depth, step in self._steps.items():
            steps[depth] = step
        at_depth = np.cumsum(steps)[:-1]
        return HitCurve(len(self._held), self._references, np.cumsum(at_depth))

    def _chain(self, block_ids: Sequence[int]) -> list[int]:
        """Numbers of the blocks: known ones first, for a new one makes all behind it new."""
        before, numbers = _ROOT, []
        for block_id in block_ids:
            before = self._blocks.setdefault((before, block_id), len(self._user))
            if before == len(self._user):
                self._user.append(0)
            numbers.append(before)
        return numbers


class _Sums:
    """Numbers in a row that grows at its end; sums of its beginning in logarithmic time."""

    def __init__(self) -> None:
        self._tree = [0]  # [n]: the sum of the last (n & -n) numbers up to the n-th

    def __len__(self) -> int:
        return len(self._tree) - 1

    def append(self, value: int) -> None:
        end = len(self._tree)
        self._tree.append(value + self._before(end - 1) - self._before(end - (end & -end)))

    def add(self, index: int, value: int) -> None:
        place = index + 1
        while place < len(self._tree):
            self._tree[place] += value
            place += place & -place

    def upto(self, index: int) -> int:
        """The sum up to and with this one."""
        return self._before(index + 1)

    def _before(self, end: int) -> int:
        total = 0
        while end:
            total += self._tree[end]
            end -= end & -end
        return total


# ---- the engine --------------------------------------------------------------------------------


def engine_hit_rate(prompts: Iterable[Sequence[int]], blocks: int, policy: str) -> float:
    """The rate of the engine itself, in a private pool of so many blocks without content.

    Cost: about 10 us per block reference, and 200 bytes per block.
    """
    room = BlockRoom(_BLOCK_BYTES)
    limits = CachePoolLimits(1, 2 * room.arena_bytes(blocks), 1, 0)
    hits = references = 0
    with CacheResidencyPool(
        limits,
        arena_bytes=room.arena_bytes(blocks),
        blocks_max=blocks,
        block_bytes_max=_BLOCK_BYTES,
        eviction=policy,
    ) as pool:
        keys_of = trace_keys()
        for block_ids in prompts:
            keys = [key.tobytes() for key in chain(keys_of, tuple(block_ids))]
            references += len(keys)
            with pool.match(keys) as run:
                hits += len(run)
                _store(pool, keys[len(run) :], run)
    return hits / references if references else 0.0


def _store(pool: CacheResidencyPool, keys: list[bytes], run: LeaseRun) -> None:
    """Publish what is missing, from parent to child, and lease it all meanwhile."""
    parent: Lease | LeaseRun = run
    with contextlib.ExitStack() as leases, contextlib.suppress(SegmentError.ArenaFull):
        for key in keys:
            parent = leases.enter_context(
                pool.allocate(_BLOCK_BYTES).publish(key, parent=parent).lease
            )
