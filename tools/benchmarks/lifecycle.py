"""The lifecycle: what a lease costs among few and many blocks, and what choosing a victim costs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from rows import Row, median_ns

import shmcache as sc

_SIZES = (10**3, 10**4, 10**5)
_LAYERS = 32
_CALLS = 20_000


def run() -> list[Row]:
    """All rows; needs about ten seconds."""
    sizes = [_Measured(size) for size in _SIZES]
    return [*_leases(sizes), *_victims(sizes)]


class _Measured:
    """Nanoseconds in a lifecycle of `size` blocks that are used in no order."""

    def __init__(self, size: int) -> None:
        self.lifecycle, ids = _filled(size)
        random.Random(size).shuffle(ids)
        self.size = size
        self.hot = self._pair(ids[:100])
        self.cold = self._pair(ids)
        self.dictionary = self._two_look_ups(ids)
        policy = sc.CacheEvictionPolicy.LEAST_RECENTLY_USED
        rounds = max(1, 10_000 // size)
        self.victim = (
            median_ns(lambda: self.lifecycle.eviction_candidate(ids, None, 2, policy), calls=rounds)
            / size
        )

    def _pair(self, ids: list[sc.CacheBlockId]) -> float:
        following = itertools.cycle(ids).__next__
        acquire, release = self.lifecycle.acquire, self.lifecycle.release

        def pair() -> None:
            id = following()
            acquire(id)
            release(id)

        return median_ns(pair, calls=_CALLS)

    def _two_look_ups(self, ids: list[sc.CacheBlockId]) -> float:
        following = itertools.cycle(ids).__next__
        table = {id: [0] for id in ids}

        def pair() -> None:
            id = following()
            table[id][0] += 1
            table[id][0] -= 1

        return median_ns(pair, calls=_CALLS)


def _filled(size: int) -> tuple[sc.CacheBlockLifecycle, list[sc.CacheBlockId]]:
    lifecycle = sc.CacheBlockLifecycle()
    ids = [
        sc.CacheBlockId(
            session_id=1,
            global_layer=number % _LAYERS,
            representation=sc.CacheRepresentation.KEY_VALUE,
            start=number // _LAYERS * 16,
            end=number // _LAYERS * 16 + 16,
        )
        for number in range(size)
    ]
    for id in ids:
        lifecycle.insert(id, False)
    return lifecycle, ids


def _leases(sizes: list[_Measured]) -> Iterator[Row]:
    few = sizes[0]
    for many in sizes:
        name = f"acquire and release, {many.size} blocks"
        ratio = many.hot / few.hot
        yield Row(f"{name}, 100 in use", many.hot, "ns", f"{few.size} blocks", ratio, "1x")
        ratio = many.cold / many.dictionary
        yield Row(f"{name}, all in use", many.cold, "ns", "a dict of counters", ratio, "the same")


def _victims(sizes: list[_Measured]) -> Iterator[Row]:
    few = sizes[0]
    for many in sizes:
        name = f"eviction_candidate, per candidate of {many.size}"
        ratio = many.victim / few.victim
        yield Row(name, many.victim, "ns", f"{few.size} blocks", ratio, "1x")
