"""Pools as Prometheus metrics: a collector for any registry.

Why         What a pool holds is in the segment, so whoever is scraped can tell it: no worker has to
            count, and a worker that was killed has not taken its figures along.
Contract    Every scrape is a snapshot of each pool; docs/export.md lists the metrics. A pool that
            cannot be looked at has `shmcache_up` 0, its reason as the state, and no other sample.
            Labels are bounded: `slot` by owners_max, `block_bytes` by 64 classes, the others by
            this file. Process ids, nonces and manager ids are no labels; a slot's pid is a value.
Concurrency Scrapes from any thread; mount it once per process.
Needs       prometheus-client: `pip install 'shmcache[export]'`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shmcache import ArenaClass, ArenaSnapshot, OwnerSnapshot, PoolSnapshot
from shmcache.integrations.watched import STATES, WatchedPools, state_of

STANDINGS: Final = ("alive", "dead", "unknown", "draining")
BLOCK_STATES: Final = ("published", "private", "leased", "evictable", "doomed", "protected")

_GAUGES: Final = {
    "up": ("Whether the pool can be looked at.", ("pool",)),
    "pool_state": ("1 for the state that the pool is in.", ("pool", "state")),
    "pool_created_timestamp_seconds": ("When the present epoch was made.", ("pool",)),
    "segment_bytes": ("Size of the segment.", ("pool",)),
    "axis_bytes": ("Held on an axis of the budget.", ("pool", "axis")),
    "axis_peak_bytes": ("Most that was ever admitted on an axis.", ("pool", "axis")),
    "axis_limit_bytes": ("Limit of an axis.", ("pool", "axis")),
    "owners": ("Attached processes, by what can be proved about them.", ("pool", "state")),
    "managers": ("Registered sessions.", ("pool",)),
    "reservations": ("Reservations that are held.", ("pool",)),
    "arena_bytes": ("Size of the arena.", ("pool",)),
    "arena_used_bytes": ("Of blocks in use, by their class.", ("pool",)),
    "arena_used_blocks": ("Blocks in use.", ("pool",)),
    "arena_slabs": ("Slabs of the arena.", ("pool",)),
    "arena_used_slabs": ("Slabs that have a class.", ("pool",)),
    "arena_draining": ("1 while a slab is being emptied for another class.", ("pool",)),
    "class_slabs": ("Slabs of a class.", ("pool", "block_bytes")),
    "class_blocks": ("Blocks of a class, by state.", ("pool", "block_bytes", "state")),
    "owner_pid": ("Process id of the owner in a slot.", ("pool", "slot")),
    "owner_alive": ("0 when its death is proved or nothing can be.", ("pool", "slot")),
    "owner_bytes": ("Charged to an owner on an axis.", ("pool", "slot", "axis")),
    "owner_leased_bytes": ("Published blocks that an owner leases.", ("pool", "slot")),
    "owner_private_bytes": ("Blocks that an owner writes or keeps.", ("pool", "slot")),
}
_COUNTERS: Final = {
    "recoveries": ("Changes of killed processes that others finished.", ("pool",)),
    "hits": ("Blocks leased by lookup and match.", ("pool",)),
    "misses": ("Keys asked for and not found.", ("pool",)),
    "hits_unseen": ("Hits that the eviction policy did not hear of.", ("pool",)),
    "bad_checksums": ("Blocks whose bytes were not what was published.", ("pool",)),
    "blocks_stored": ("Blocks published.", ("pool",)),
    "blocks_evicted": ("Blocks that made room.", ("pool",)),
    "blocks_invalidated": ("Blocks withdrawn.", ("pool",)),
    "blocks_duplicate": ("Blocks that were published already.", ("pool",)),
    "blocks_unindexed": ("Blocks that found no place in the index.", ("pool",)),
    "slabs_moved": ("Slabs emptied for another class.", ("pool",)),
    "owner_hits": ("Hits of the owner in a slot.", ("pool", "slot")),
    "owner_misses": ("Misses of the owner in a slot.", ("pool", "slot")),
}
_ARENA_COUNTERS: Final = {
    "hits": "hits",
    "misses": "misses",
    "hits_unseen": "hits_unseen",
    "bad_checksums": "bad_checksums",
    "blocks_stored": "stored",
    "blocks_evicted": "evicted",
    "blocks_invalidated": "invalidated",
    "blocks_duplicate": "duplicates",
    "blocks_unindexed": "unindexed",
    "slabs_moved": "slabs_moved",
}


class PoolCollector(Collector):
    """Tells of the named pools, or of all of this host: `REGISTRY.register(PoolCollector("llm"))`.

    `owners=False` leaves out what is told per slot.
    """

    def __init__(self, *names: str, owners: bool = True, pools: WatchedPools | None = None) -> None:
        self._pools = WatchedPools(*names) if pools is None else pools
        self._owners = owners

    def collect(self) -> Iterable[Metric]:
        """One look at every pool."""
        families = _Families()
        for name, look in self._pools.look_at_all().items():
            state = "active" if isinstance(look, PoolSnapshot) else state_of(look)
            families.add("up", int(state == "active"), name)
            for other in STATES:
                families.add("pool_state", int(other == state), name, other)
            if isinstance(look, PoolSnapshot):
                _tell_pool(families, look)
                for owner in look.owners if self._owners else ():
                    _tell_owner(families, name, owner)
        return families.told()

    def describe(self) -> Iterable[Metric]:
        """The names, without a look: registering does not touch a pool."""
        return _Families().told()

    def close(self) -> None:
        """Let go of the segments."""
        self._pools.close()


class _Families:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, (text, labels) in _GAUGES.items():
            self._families[name] = GaugeMetricFamily(f"shmcache_{name}", text, labels=labels)
        for name, (text, labels) in _COUNTERS.items():
            self._families[name] = CounterMetricFamily(f"shmcache_{name}", text, labels=labels)

    def add(self, name: str, value: float, *labels: object) -> None:
        self._families[name].add_metric([str(label) for label in labels], value)

    def told(self) -> Iterator[Metric]:
        yield from self._families.values()


def _tell_pool(families: _Families, taken: PoolSnapshot) -> None:
    pool = taken.name
    families.add("pool_created_timestamp_seconds", taken.created_ns / 1e9, pool)
    families.add("segment_bytes", taken.segment_bytes, pool)
    for axis, level in taken.axes.items():
        families.add("axis_bytes", level.current_bytes, pool, axis)
        families.add("axis_peak_bytes", level.peak_bytes, pool, axis)
        families.add("axis_limit_bytes", level.limit_bytes, pool, axis)
    standings = Counter(owner.standing for owner in taken.owners)
    for standing in STANDINGS:
        families.add("owners", standings[standing], pool, standing)
    families.add("managers", len(taken.managers), pool)
    families.add("reservations", taken.reservations, pool)
    families.add("recoveries", taken.recoveries, pool)
    if taken.arena is not None:
        _tell_arena(families, pool, taken.arena)


def _tell_arena(families: _Families, pool: str, arena: ArenaSnapshot) -> None:
    families.add("arena_bytes", arena.arena_bytes, pool)
    families.add("arena_used_bytes", arena.used_bytes, pool)
    families.add("arena_used_blocks", arena.used_blocks, pool)
    families.add("arena_slabs", arena.slabs, pool)
    families.add("arena_used_slabs", arena.slabs_used, pool)
    families.add("arena_draining", int(arena.draining_slab is not None), pool)
    for name, field in _ARENA_COUNTERS.items():
        families.add(name, getattr(arena, field), pool)
    for kind in _by_size(arena.classes):
        families.add("class_slabs", kind.slabs, pool, kind.block_bytes)
        for state in BLOCK_STATES:
            families.add("class_blocks", getattr(kind, state), pool, kind.block_bytes, state)


def _by_size(classes: Iterable[ArenaClass]) -> Iterable[ArenaClass]:
    """A size once: two classes of one size would be two samples of one name."""
    return {kind.block_bytes: kind for kind in classes}.values()


def _tell_owner(families: _Families, pool: str, owner: OwnerSnapshot) -> None:
    slot = owner.slot
    families.add("owner_pid", owner.pid, pool, slot)
    families.add("owner_alive", int(owner.standing == "alive"), pool, slot)
    for axis in ("device", "host", "transfer_in_flight", "disk"):
        families.add("owner_bytes", getattr(owner.usage, f"{axis}_bytes"), pool, slot, axis)
    families.add("owner_leased_bytes", owner.leased_bytes, pool, slot)
    families.add("owner_private_bytes", owner.private_bytes, pool, slot)
    families.add("owner_hits", owner.hits, pool, slot)
    families.add("owner_misses", owner.misses, pool, slot)
