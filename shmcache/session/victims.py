"""Which block leaves a tier next, found without looking at all of them.

Why: `CacheBlockLifecycle.eviction_candidate` looks at every candidate, and a decoding step may
evict once per layer among ten thousand blocks. This keeps the candidates of each tier sorted by the
same order, so that a victim costs a few comparisons.

Contract: `candidate` answers what `eviction_candidate` would for the same candidates.

Invariants: a heap has an entry with its present order for every block of its shelf that is neither
leased nor protected, and entries that have become stale, at most as many again.

Concurrency: the session's lock guards it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Any, Final, TypeAlias

from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.states.lifecycle import CacheBlockLifecycle, CacheEvictionPolicy

_Entry: TypeAlias = tuple[tuple[int, int], tuple[Any, ...], CacheBlockId]
_Place: TypeAlias = tuple[int, tuple[Any, ...]]

_STALE_MIN: Final = 64


class EvictionIndex:
    """The movable blocks of the device and the host tier of one session."""

    def __init__(self, lifecycle: CacheBlockLifecycle, policy: CacheEvictionPolicy) -> None:
        self._device = _Shelf(lifecycle, policy)
        self._host = _Shelf(lifecycle, policy)
        self._places: dict[CacheBlockId, _Shelf] = {}

    def place(self, id: CacheBlockId, tier: CacheTier | None) -> None:
        """The block is now a candidate of `tier`, or of none."""
        before, shelf = self._places.get(id), None if tier is None else self._shelf(tier)
        if before is shelf:
            return
        if before is not None:
            del self._places[id]
            before.remove(id)
        if shelf is not None:
            self._places[id] = shelf
            shelf.add(id)

    def touch(self, id: CacheBlockId) -> None:
        """Its leases or accesses have changed."""
        shelf = self._places.get(id)
        if shelf is not None:
            shelf.push(id)

    def candidate(
        self, tier: CacheTier, required: CacheBlockId | None, recent_per_layer: int
    ) -> CacheBlockId | None:
        """The block to evict first, or None if none may go."""
        return self._shelf(tier).candidate(required, recent_per_layer)

    def ids(self, tier: CacheTier) -> list[CacheBlockId]:
        """The candidates of a tier, those included that may not go."""
        shelf = self._shelf(tier)
        return [id for id, placed in self._places.items() if placed is shelf]

    def _shelf(self, tier: CacheTier) -> _Shelf:
        return self._device if tier is CacheTier.DEVICE else self._host


class _Shelf:
    """The candidates of one tier."""

    def __init__(self, lifecycle: CacheBlockLifecycle, policy: CacheEvictionPolicy) -> None:
        self._lifecycle = lifecycle
        self._policy = policy
        self._keys: dict[CacheBlockId, tuple[Any, ...]] = {}
        self._layers: dict[int, list[_Place]] = {}
        self._heap: list[_Entry] = []

    def add(self, id: CacheBlockId) -> None:
        key = self._keys[id] = id.sort_key()
        places, place = self._layers.setdefault(id.global_layer, []), (id.start, key)
        if not places or places[-1] < place:  # growth comes in order
            places.append(place)
        else:
            insort(places, place)
        self.push(id)

    def remove(self, id: CacheBlockId) -> None:
        places = self._layers[id.global_layer]
        del places[bisect_left(places, (id.start, self._keys.pop(id)))]

    def push(self, id: CacheBlockId) -> None:
        """Note the block's present order, if it may go at all."""
        if self._may_go(id):
            heapq.heappush(self._heap, self._entry(id))
        if len(self._heap) > 2 * len(self._keys) + _STALE_MIN:
            self._heap = [self._entry(each) for each in self._keys if self._may_go(each)]
            heapq.heapify(self._heap)

    def candidate(self, required: CacheBlockId | None, recent: int) -> CacheBlockId | None:
        kept: list[_Entry] = []
        found = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            id = entry[-1]
            if id not in self._keys or not self._may_go(id) or entry != self._entry(id):
                continue
            if not kept or kept[-1] != entry:  # of equal entries one is enough
                kept.append(entry)
            if id != required and not self._is_recent(id, recent):
                found = id
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found

    def _may_go(self, id: CacheBlockId) -> bool:
        lifecycle = self._lifecycle
        return not (lifecycle.is_leased(id) or lifecycle.is_protected_prefix(id))

    def _entry(self, id: CacheBlockId) -> _Entry:
        return self._lifecycle.eviction_order(id, self._policy), self._keys[id], id

    def _is_recent(self, id: CacheBlockId, recent: int) -> bool:
        places = self._layers[id.global_layer]
        if recent == 0:
            return False
        return len(places) <= recent or places[-recent] <= (id.start, self._keys[id])
