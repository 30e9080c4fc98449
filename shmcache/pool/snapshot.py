"""Everything that can be told of a pool at one instant, as a value with a schema.

Why         A screen, a scrape and a script that each put together report(), owners() and
            arena_report() would show figures of different instants that do not add up.
Contract    `CacheResidencyPool.snapshot()` makes one, under one hold of the lock; an ended pool
            answers with its error. Leases and counters are read without the lock, a moment later.
            docs/snapshot.md is the schema of its JSON; SNAPSHOT_VERSION rises when a key changes
            its meaning or goes, and not when one is added.
Units       `..._bytes` bytes, `..._ns` nanoseconds of wall time; ids and nonces are hexadecimal
            text, because many readers of JSON round numbers of 64 bits.
Cost        Linear in managers, reservations, slabs and pins; docs/performance.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shmcache import _core
from shmcache.pool.arena import ArenaClass
from shmcache.pool.names import has_name, segment_path
from shmcache.pool.owners import OwnerVerdict, started_ns
from shmcache.pool.values import CachePoolReport, CachePoolUsage

if TYPE_CHECKING:
    from shmcache.pool.pool import CacheResidencyPool

SNAPSHOT_VERSION = 1
_COMMAND_COLUMNS_MAX = 60


class AxisSnapshot(msgspec.Struct, frozen=True, gc=False):
    """One axis. `current_bytes` may exceed both others: what is there already is published."""

    current_bytes: int
    peak_bytes: int
    limit_bytes: int


class AxesSnapshot(msgspec.Struct, frozen=True):
    """The four axes."""

    device: AxisSnapshot
    host: AxisSnapshot
    transfer_in_flight: AxisSnapshot
    disk: AxisSnapshot

    def items(self) -> tuple[tuple[str, AxisSnapshot], ...]:
        """Each with its name."""
        return tuple((name, getattr(self, name)) for name in self.__struct_fields__)


class OwnerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One attached process: what it is charged with, what it has pins on, what it has counted.

    `hits` and the other counters began at 0 when it attached. `command` is told of the living
    only: a pid of the dead may be somebody else's by now.
    """

    slot: int
    pid: int
    nonce: str
    started_ns: int | None
    verdict: OwnerVerdict
    cleaning: bool
    command: str | None
    managers: int
    reservations: int
    usage: CachePoolUsage
    leased_blocks: int
    leased_bytes: int
    private_blocks: int
    private_bytes: int
    hits: int
    misses: int
    hits_unseen: int
    bad_checksums: int

    @property
    def standing(self) -> str:
        """What is to be shown: a verdict, or `draining` while a slot is being emptied."""
        return "draining" if self.cleaning else self.verdict.value


class ManagerSnapshot(msgspec.Struct, frozen=True, gc=False):
    """One session: the id it is registered under, its owner's slot, what it has published."""

    manager: str
    slot: int
    usage: CachePoolUsage


class ArenaSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The arena. `stored` to `bad_checksums` count since the pool was made.

    The slab map: of slab `i`, the size of its blocks (0: it is free) and how many are in use.
    """

    arena_bytes: int
    used_bytes: int
    used_blocks: int
    slab_bytes: int
    slabs: int
    slabs_used: int
    draining_slab: int | None
    classes: tuple[ArenaClass, ...]
    stored: int
    evicted: int
    invalidated: int
    duplicates: int
    unindexed: int
    slabs_moved: int
    hits: int
    misses: int
    hits_unseen: int
    bad_checksums: int
    slab_block_bytes: tuple[int, ...]
    slab_used_blocks: tuple[int, ...]


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at one instant.

    `named`: its name still leads to it. `recoveries` counts changes that a killed process had
    decided and another one finished.
    """

    schema_version: int = SNAPSHOT_VERSION
    taken_ns: int
    name: str
    pool_id: str
    created_ns: int
    state: str
    named: bool
    segment_bytes: int
    reservations: int
    recoveries: int
    axes: AxesSnapshot
    owners: tuple[OwnerSnapshot, ...]
    managers: tuple[ManagerSnapshot, ...]
    arena: ArenaSnapshot | None = None


def take_snapshot(pool: CacheResidencyPool) -> PoolSnapshot:
    """What `CacheResidencyPool.snapshot()` answers."""
    report, (reservations, recoveries), owners, managers, arena = pool._snapshot()
    segment_bytes, _, created_ns, *_ = pool._facts()
    return PoolSnapshot(
        taken_ns=time.time_ns(),
        name=pool.name,
        pool_id=_hex(pool.id),
        created_ns=created_ns,
        state=pool.state,
        named=bool(pool.name) and has_name(pool.fileno(), segment_path(pool.name)),
        segment_bytes=segment_bytes,
        reservations=reservations,
        recoveries=recoveries,
        axes=_axes(report),
        owners=tuple(_owner(*row) for row in owners),
        managers=tuple(ManagerSnapshot(_hex(row[0]), *row[1:]) for row in managers),
        arena=None if arena is None else _arena(pool, *arena),
    )


def snapshot_schema() -> dict[str, Any]:
    """JSON Schema of a snapshot."""
    return msgspec.json.schema(PoolSnapshot)


def _hex(number: int) -> str:
    return f"{number:016x}"


def _axes(report: CachePoolReport) -> AxesSnapshot:
    return AxesSnapshot(
        *(
            AxisSnapshot(
                getattr(report, f"current_{axis}_bytes"),
                getattr(report, f"peak_{axis}_bytes"),
                getattr(report.limits, f"{axis}_bytes"),
            )
            for axis in AxesSnapshot.__struct_fields__
        )
    )


def _owner(
    identity: tuple[int, ...],
    held: tuple[int, int, CachePoolUsage],
    pinned: tuple[int, int, int, int],
    counters: tuple[int, int, int, int],
) -> OwnerSnapshot:
    slot, state, nonce, pid, ticks, _, number = identity
    verdict = OwnerVerdict.of(number)
    return OwnerSnapshot(
        slot=slot,
        pid=pid,
        nonce=_hex(nonce),
        started_ns=started_ns(ticks),
        verdict=verdict,
        cleaning=state == _core.OWNER_CLEANING,
        command=_command_line(pid) if verdict is OwnerVerdict.ALIVE else None,
        managers=held[0],
        reservations=held[1],
        usage=held[2],
        leased_blocks=pinned[0],
        leased_bytes=pinned[1],
        private_blocks=pinned[2],
        private_bytes=pinned[3],
        hits=counters[0],
        misses=counters[1],
        hits_unseen=counters[2],
        bad_checksums=counters[3],
    )


def _arena(
    pool: CacheResidencyPool,
    totals: dict[str, int],
    classes: list[tuple[int, ...]],
    slabs: list[tuple[int, int]],
    slab_bytes: int,
) -> ArenaSnapshot:
    hits, misses, unseen, bad = pool._counters()
    draining = totals.pop("draining")
    return ArenaSnapshot(
        arena_bytes=pool._geometry()["arena_bytes"],
        slab_bytes=slab_bytes,
        slabs=len(slabs),
        draining_slab=draining - 1 if draining else None,
        classes=tuple(ArenaClass(*row) for row in classes),
        hits=hits,
        misses=misses,
        hits_unseen=unseen,
        bad_checksums=bad,
        slab_block_bytes=tuple(block_bytes for block_bytes, _ in slabs),
        slab_used_blocks=tuple(used for _, used in slabs),
        **totals,
    )


def _command_line(pid: int) -> str | None:
    """The beginning of the process's command line, printable; None when it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    text = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return "".join(c if c.isprintable() else "?" for c in text[:_COMMAND_COLUMNS_MAX]) or None
