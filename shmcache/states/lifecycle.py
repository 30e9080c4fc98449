"""Who uses which block of a session, and which block may be evicted next.

Why: a block that attention reads must neither move nor vanish, the first tokens of a prompt must
never be evicted, and a victim must be chosen by an order that two runs agree on. This is the only
owner of lease counts, of the access clock, of the protected-prefix marks and of the mutable tail of
each layer.

Contract: one `CacheBlockLifecycle` belongs to one session. A call that raises has changed nothing,
the clock included. The clock moves by one in `insert`, `acquire` and `replace` with a replacement,
and nowhere else; it never goes back, not even in `clear`.

Invariants: the last accesses of two blocks differ and are not above the clock. A leased block
leaves only by `replace` with its exact lease count.

Concurrency: no lock; the session's lock guards it.

Errors: `CacheLifecycleError`; arguments outside their domain raise `TypeError` or `ValueError`.

Cost: `acquire` and `release` are one dictionary look-up each, whatever the number of blocks: about
1.2 us a pair among 10^3 and among 10^5 (`tools/bench lifecycle`, a shared 2-core virtual machine).
Choosing a victim takes time in proportion to the candidates; nothing is sorted.

Not here: bytes, tiers, files and transfers. Those are `CacheBlockStorage`, in a second map with the
same keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Final, Self

import msgspec

from shmcache.bounds import U64_MAX, USIZE_MAX, instance, usize
from shmcache.errors import CacheLifecycleError
from shmcache.policy.fields import I64, U64, Checked
from shmcache.policy.identity import CacheBlockId


class CacheEvictionPolicy(Enum):
    """Which block goes first. Least frequently used breaks ties by recency."""

    LEAST_RECENTLY_USED = "least_recently_used"
    LEAST_FREQUENTLY_USED = "least_frequently_used"


class MutableCacheTail(Checked, frozen=True, gc=False):
    """What a layer holds on the device that is not yet a sealed block.

    Units: `bytes` are those the backend owns for the tail; `end` is the token position it reaches,
    exclusive. They are independent: (0, 37) is the state right after a seal at token 37.
    """

    bytes: U64 = 0
    end: I64 = 0


class _Record(msgspec.Struct, gc=False):
    """What is known of one registered block."""

    protected_prefix: bool
    last_access: int
    leases: int = 0
    access_count: int = 0


_ORDERS: Final = {
    CacheEvictionPolicy.LEAST_RECENTLY_USED: attrgetter("last_access", "access_count"),
    CacheEvictionPolicy.LEAST_FREQUENTLY_USED: attrgetter("access_count", "last_access"),
}


class CacheBlockLifecycle:
    """Leases, accesses, protected marks and tails of one session's blocks (see the module)."""

    __slots__ = ("_access_clock", "_blocks", "_tails")

    def __init__(self) -> None:
        self._access_clock = 0
        self._blocks: dict[CacheBlockId, _Record] = {}
        self._tails: dict[int, MutableCacheTail] = {}

    @classmethod
    def new(cls) -> Self:
        return cls()

    # Blocks ---------------------------------------------------------------------------------------

    def insert(self, id: CacheBlockId, protected_prefix: bool) -> None:
        """Register a block, unleased; inserting is its first access.

        Errors: DuplicateBlock, AccessClockOverflow.
        """
        instance(id, CacheBlockId, "id")
        instance(protected_prefix, bool, "protected_prefix")
        if id in self._blocks:
            raise CacheLifecycleError.DuplicateBlock(id)
        self._add(id, protected_prefix, self._next_access())

    def remove(self, id: CacheBlockId) -> None:
        """Forget an unleased block. Errors: MissingBlock, BlockLeased."""
        if self._record(id).leases:
            raise CacheLifecycleError.BlockLeased(id)
        del self._blocks[id]

    def acquire(self, id: CacheBlockId) -> None:
        """Take one lease; this is an access. Errors: MissingBlock, LeaseOverflow,
        AccessClockOverflow.
        """
        record = self._record(id)
        if record.leases == USIZE_MAX:
            raise CacheLifecycleError.LeaseOverflow(id)
        self._access_clock = record.last_access = self._next_access()
        record.leases += 1
        if record.access_count < U64_MAX:
            record.access_count += 1

    def release(self, id: CacheBlockId) -> None:
        """Give one lease back; this is no access. Errors: MissingBlock, LeaseUnderflow."""
        record = self._record(id)
        if not record.leases:
            raise CacheLifecycleError.LeaseUnderflow(id)
        record.leases -= 1

    def replace(
        self,
        removals: Sequence[tuple[CacheBlockId, int]],
        replacement: tuple[CacheBlockId, bool] | None,
        tail_layer: int,
        tail: MutableCacheTail,
    ) -> None:
        """Truncate in one step: drop blocks, add at most one shortened block, set one tail.

        Contract: each removal names the exact number of leases the block has now. Those leases are
        consumed: to release one afterwards is an error. The replacement is a fresh record, also
        when it carries the identity of a removed block. Layers are not compared.

        Errors: DuplicateRemoval, MissingBlock, UnexpectedLeaseCount, DuplicateBlock,
        AccessClockOverflow, checked in this order.
        """
        expected = [
            (instance(id, CacheBlockId, "id"), usize(leases, "expected_leases"))
            for id, leases in removals
        ]
        if replacement is not None:
            added, protected_prefix = replacement
            instance(added, CacheBlockId, "replacement id")
            instance(protected_prefix, bool, "protected_prefix")
        tail_layer = usize(tail_layer, "tail_layer")
        instance(tail, MutableCacheTail, "tail")

        removed = self._check_removals(expected)
        if replacement is not None:
            if added in self._blocks and added not in removed:
                raise CacheLifecycleError.DuplicateBlock(added)
            access = self._next_access()
        for id in removed:
            del self._blocks[id]
        if replacement is not None:
            self._add(added, protected_prefix, access)
        self._tails[tail_layer] = tail

    def clear(self) -> None:
        """Forget every block and every tail, or raise BlockLeased and forget nothing."""
        leased = self.first_leased()
        if leased is not None:
            raise CacheLifecycleError.BlockLeased(leased)
        self._blocks.clear()
        self._tails.clear()

    def lease_count(self, id: CacheBlockId) -> int:
        """Leases the block has now. Errors: MissingBlock."""
        return self._record(id).leases

    def is_leased(self, id: CacheBlockId) -> bool:
        """Whether the block has a lease. Errors: MissingBlock."""
        return self._record(id).leases != 0

    def is_protected_prefix(self, id: CacheBlockId) -> bool:
        """Whether the block was registered as one never to evict. Errors: MissingBlock."""
        return self._record(id).protected_prefix

    def first_leased(self) -> CacheBlockId | None:
        """The smallest leased block in identity order."""
        return min((id for id, record in self._blocks.items() if record.leases), default=None)

    # Tails ----------------------------------------------------------------------------------------

    def set_tail(self, layer: int, tail: MutableCacheTail) -> MutableCacheTail | None:
        """Store a layer's tail and return the one before, for `restore_tail`."""
        layer = usize(layer, "layer")
        instance(tail, MutableCacheTail, "tail")
        before = self._tails.get(layer)
        self._tails[layer] = tail
        return before

    def restore_tail(self, layer: int, tail: MutableCacheTail | None) -> None:
        """Undo a `set_tail` whose admission failed; None restores "no entry"."""
        layer = usize(layer, "layer")
        if tail is None:
            self._tails.pop(layer, None)
        else:
            self._tails[layer] = instance(tail, MutableCacheTail, "tail")

    def tail(self, layer: int) -> MutableCacheTail | None:
        """The layer's tail, if it has one."""
        return self._tails.get(usize(layer, "layer"))

    def tails(self) -> list[tuple[int, MutableCacheTail]]:
        """Every layer's tail in ascending layer order, as a snapshot."""
        return sorted(self._tails.items())

    # Eviction -------------------------------------------------------------------------------------

    def eviction_candidate(
        self,
        candidates: Iterable[CacheBlockId],
        required: CacheBlockId | None,
        recent_per_layer: int,
        policy: CacheEvictionPolicy,
    ) -> CacheBlockId | None:
        """The block to evict first among `candidates`, or None if none may go. Changes nothing.

        Contract: never a leased or protected block, never `required`, and none of the last
        `recent_per_layer` candidates of each layer by position. Blocks that may not go for another
        reason still take up places of that window.

        Errors: MissingBlock with the smallest unregistered candidate.
        """
        if required is not None:
            instance(required, CacheBlockId, "required")
        recent_per_layer = usize(recent_per_layer, "recent_per_layer")
        order = _ORDERS[instance(policy, CacheEvictionPolicy, "policy")]
        movable = set(candidates)
        if missing := movable.difference(self._blocks):
            raise CacheLifecycleError.MissingBlock(
                min(instance(id, CacheBlockId, "id") for id in missing)
            )
        for recent in _recent(movable, recent_per_layer).values():
            movable.difference_update(recent)
        movable -= {required}
        records = ((self._blocks[id], id) for id in movable)
        keys = (
            (*order(record), id)
            for record, id in records
            if not (record.leases or record.protected_prefix)
        )
        return min(keys, default=(None,))[-1]

    def recent_protection_counts(
        self, candidates: Iterable[CacheBlockId], recent_per_layer: int
    ) -> dict[int, int]:
        """How many unprotected candidates the recent window keeps, per layer, layers ascending.

        Contract: here protected blocks take up no places of the window, other than in
        `eviction_candidate`.

        Errors: MissingBlock with the first unregistered candidate in the given order.
        """
        recent_per_layer = usize(recent_per_layer, "recent_per_layer")
        counted = {id for id in candidates if not self._record(id).protected_prefix}
        recent = _recent(counted, recent_per_layer)
        return {layer: len(recent[layer]) for layer in sorted(recent)}

    def eviction_order(self, id: CacheBlockId, policy: CacheEvictionPolicy) -> tuple[int, int]:
        """What `policy` compares blocks by, the smallest going first; only `acquire` changes it.

        Why: a session with many blocks keeps them sorted, by the same order as here.

        Errors: MissingBlock.
        """
        order: tuple[int, int] = _ORDERS[policy](self._record(id))
        return order

    # Inside ---------------------------------------------------------------------------------------

    def _record(self, id: CacheBlockId) -> _Record:
        record = self._blocks.get(id)
        if record is None:
            raise CacheLifecycleError.MissingBlock(instance(id, CacheBlockId, "id"))
        return record

    def _next_access(self) -> int:
        """The value of the next tick; the clock moves when the caller can no longer fail."""
        if self._access_clock == U64_MAX:
            raise CacheLifecycleError.AccessClockOverflow
        return self._access_clock + 1

    def _add(self, id: CacheBlockId, protected_prefix: bool, access: int) -> None:
        self._access_clock = access
        self._blocks[id] = _Record(protected_prefix, access)

    def _check_removals(self, removals: list[tuple[CacheBlockId, int]]) -> set[CacheBlockId]:
        removed = {id for id, _ in removals}
        if len(removed) != len(removals):
            raise CacheLifecycleError.DuplicateRemoval
        for id, expected in removals:
            actual = self._record(id).leases
            if actual != expected:
                raise CacheLifecycleError.UnexpectedLeaseCount(id, expected, actual)
        return removed


def _recent(ids: Iterable[CacheBlockId], per_layer: int) -> dict[int, list[CacheBlockId]]:
    """The last `per_layer` blocks of each layer by position; layers that have none are absent."""
    if not per_layer:
        return {}
    layers: dict[int, list[CacheBlockId]] = {}
    for id in ids:
        layers.setdefault(id.global_layer, []).append(id)
    return {
        layer: heapq.nlargest(per_layer, group, key=lambda id: (id.start, id))
        for layer, group in layers.items()
    }
