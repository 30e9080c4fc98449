"""`shmcache arena`: what the blocks of a pool are, and who keeps them from being evicted."""

from __future__ import annotations

import click
from rich.table import Table

from shmcache import ArenaClass, ArenaHolding, ArenaReport, CacheResidencyPool
from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.names import pool_argument
from shmcache.cli.pools import identity_of
from shmcache.cli.sizes import format_size

_STATES = ("published", "private", "leased", "evictable", "doomed")


@click.command(cls=Command)
@pool_argument
def arena(name: str) -> Answer:
    """Show the blocks of a pool: by state, by size, and by the process that holds them.

    \b
    Example:
      shmcache arena llm --json | jq .evictable_bytes
    """
    with CacheResidencyPool.observe(name) as pool:
        report, holdings = pool.arena_report(), pool.holdings()
        identity = identity_of(pool)
    states = {f"{state}_bytes": getattr(report, f"{state}_bytes") for state in _STATES}
    document = {
        **identity,
        **{field: getattr(report, field) for field in report.__struct_fields__},
        **states,
        "fragmentation": report.fragmentation,
        "holdings": holdings,
    }
    return Answer(document, (_heading(report), *_tables(report, holdings)))


def _heading(report: ArenaReport) -> str:
    used, whole = format_size(report.used_bytes), format_size(report.arena_bytes)
    return (
        f"{report.used_blocks} blocks, {used} of {whole}; {report.stored} stored, "
        f"{report.evicted} evicted; {report.hits} hits, {report.misses} misses; "
        f"fragmentation {report.fragmentation:.1%}"
    )


def _tables(report: ArenaReport, holdings: tuple[ArenaHolding, ...]) -> list[Table]:
    tables: list[Table] = []
    if report.classes:
        rows = (_class_row(kind) for kind in report.classes)
        columns = ">block >slabs >published >private >leased >evictable >doomed >protected"
        tables.append(table(columns, rows))
    if holdings:
        held = (
            (row.slot, row.pid, format_size(row.leased_bytes), format_size(row.private_bytes))
            for row in holdings
        )
        tables.append(table(">slot >pid >leased >private", held))
    return tables


def _class_row(kind: ArenaClass) -> tuple[object, ...]:
    counts = (kind.published, kind.private, kind.leased, kind.evictable, kind.doomed)
    return (format_size(kind.block_bytes), kind.slabs, *counts, kind.protected)
