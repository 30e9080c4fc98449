"""Commands about one pool: each looks or acts, says what it found, and leaves.

Contract    Only `create` takes an owner slot, for a moment; everything else observes. The keys of
            each command's JSON are listed in docs/operating.md, and a test compares.
Units       `..._bytes` in JSON are bytes; text shows them rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.table import Table

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolResource,
    CachePoolUsage,
    CacheResidencyPool,
    ReclaimedOwner,
    SegmentGeometry,
    VerifyReport,
    bounds,
    read_dump,
)
from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.names import hex_id, optional_pool_argument, pool_argument
from shmcache.cli.sizes import SIZE, format_size

_FILE = click.Path(dir_okay=False, path_type=Path)
_Decorator: TypeAlias = Callable[[Callable[..., Answer]], Callable[..., Answer]]
_AXES = tuple(resource.value for resource in CachePoolResource)


def _count(name: str, limit: int, default: int | None, what: str) -> _Decorator:
    return click.option(
        name, type=click.IntRange(1, limit), default=default, show_default=True, help=what
    )


# ---- create and destroy ------------------------------------------------------------------------


@click.command(cls=Command)
@pool_argument
@click.option("--device", type=SIZE, required=True, help="Limit of device memory.")
@click.option("--host", type=SIZE, required=True, help="Limit of host memory; 0: none.")
@click.option("--transfer", type=SIZE, required=True, help="Limit of transfers in flight.")
@click.option("--disk", type=SIZE, default=0, help="Limit of disk space; 0, the default: none.")
@click.option("--arena", type=SIZE, help="Memory for blocks; default: as --host.")
@_count("--owners-max", bounds.OWNERS_MAX_LIMIT, bounds.OWNERS_MAX_DEFAULT, "Attached processes.")
@_count("--managers-max", bounds.MANAGERS_MAX_LIMIT, bounds.MANAGERS_MAX_DEFAULT, "Sessions.")
@_count(
    "--reservations-max",
    bounds.RESERVATIONS_MAX_LIMIT,
    bounds.RESERVATIONS_MAX_DEFAULT,
    "Reservations alive at once.",
)
@_count("--blocks-max", bounds.BLOCKS_MAX_LIMIT, None, "Blocks; default: one per 64 KiB of arena.")
@click.option("--block-bytes-max", type=SIZE, help="The largest block; default: 2 MiB.")
@click.option(
    "--eviction",
    type=click.Choice(bounds.EVICTION_POLICIES),
    default="adaptive",
    show_default=True,
    help="Which block goes first when room is needed.",
)
@click.option(
    "--verify",
    type=click.Choice(bounds.VERIFY_MODES),
    default="never",
    show_default=True,
    help="When a reader compares a block with the checksum of its writer.",
)
@click.option(
    "--hugepages",
    type=click.Choice(bounds.HUGEPAGE_MODES[:2]),
    default="none",
    show_default=True,
    help="Whether to ask for transparent huge pages.",
)
@click.option(
    "--mode",
    type=click.Choice(["600", "660"]),
    default="600",
    show_default=True,
    help="Permissions; 660 admits the group that creates it.",
)
@click.option("--exist-ok", is_flag=True, help="Accept a pool that exists with these very sizes.")
def create(name: str, exist_ok: bool, **options: Any) -> Answer:
    """Make a pool and allocate all its memory now.

    Memory is charged to the cgroup that this command runs in. Sizes are bytes, or K M G T, KiB ..
    (powers of 1024), or KB .. (powers of 1000).

    \b
    Example:
      shmcache create llm --device 8GiB --host 32GiB --transfer 1GiB --disk 200GB
    """
    axes = (options.pop(option) for option in ("device", "host", "transfer", "disk"))
    options["arena_bytes"] = options.pop("arena")
    options["mode"] = int(options["mode"], 8)
    make = CacheResidencyPool.open_or_create if exist_ok else CacheResidencyPool.create
    try:
        pool = make(name, CachePoolLimits(*axes), **options)
    except (ValueError, CachePoolError.InvalidLimits) as error:
        raise click.UsageError(str(error)) from error
    with pool:
        document = identity_of(pool) | sizes_document(pool.geometry())
        text = f"pool {name!r} has {format_size(pool.geometry().segment_bytes)} of shared memory"
        return Answer(document, (text,))


@click.command(cls=Command)
@pool_argument
@click.option("--force", is_flag=True, help="Also when other processes use it, or it is damaged.")
def destroy(name: str, force: bool) -> Answer:
    """Remove a pool. Refuses while live processes are attached, unless forced.

    Forced, those processes keep the old memory until they close it, and are told that their epoch
    has ended.

    \b
    Example:
      shmcache destroy llm
    """
    CacheResidencyPool.destroy(name, force=force)
    return Answer({"name": name, "destroyed": True}, (f"pool {name!r} is removed",))


# ---- looking -----------------------------------------------------------------------------------


@click.command(cls=Command)
@pool_argument
def report(name: str) -> Answer:
    """Show what a pool holds on each axis, its peaks and its limits.

    \b
    Example:
      shmcache report llm --json | jq .axes.host.current_bytes
    """
    with CacheResidencyPool.observe(name) as pool:
        taken = pool.snapshot()
        counts = {
            "owners": len(taken.owners),
            "managers": len(taken.managers),
            "reservations": taken.reservations,
        }
        document = identity_of(pool) | counts | {"axes": taken.axes}
        document |= sizes_document(pool.geometry()) | {"snapshot": taken}
    rows = (
        (
            axis.replace("_", " "),
            *map(format_size, (row.current_bytes, row.peak_bytes, row.limit_bytes)),
        )
        for axis, row in taken.axes.items()
    )
    heading = f"pool {name!r}, id {document['pool_id']}, {document['state']}"
    held = ", ".join(f"{count} {what}" for what, count in counts.items())
    return Answer(document, (heading, held, table("axis >current >peak >limit", rows)))


@click.command(cls=Command)
@pool_argument
def owners(name: str) -> Answer:
    """Show every attached process and what it holds.

    A dead one is named until somebody sweeps: `reclaim`, `supervise`, the next process to attach.

    \b
    Example:
      shmcache owners llm
    """
    with CacheResidencyPool.observe(name) as pool:
        records = pool.snapshot().owners
        listed = [
            {
                "slot": owner.slot,
                "pid": owner.pid,
                "nonce": owner.nonce,
                "started": _time(owner.started_ns),
                "verdict": owner.verdict,
                "cleaning": owner.cleaning,
                "managers": owner.managers,
                "reservations": owner.reservations,
                "usage": owner.usage,
                "leased_bytes": owner.leased_bytes,
                "private_bytes": owner.private_bytes,
                "command": owner.command,
            }
            for owner in records
        ]
        document = identity_of(pool) | {"owners": listed}
    keys = ("slot", "pid", "started", "managers", "reservations")
    rows = (
        (
            *(row[key] for key in keys),
            "cleaning" if owner.cleaning else owner.verdict.value,
            *_usage_cells(owner.usage),
            format_size(owner.leased_bytes),
            format_size(owner.private_bytes),
            row["command"],
        )
        for owner, row in zip(records, listed, strict=True)
    )
    columns = ">slot >pid started >managers >reservations state >device >host >transfer >disk "
    columns += ">leased >private command"
    found: str | Table = table(columns, rows) if records else "no owners"
    return Answer(document, (found,))


@click.command(cls=Command)
@optional_pool_argument
@click.option("--dump", "path", type=_FILE, help="Look at a file that `dump` wrote instead.")
def verify(name: str | None, path: Path | None) -> Answer:
    """Recount everything in a pool. A finding (exit code 1) poisons it: nobody uses it any more.

    Other processes wait for the length of the walk, some milliseconds. A dump is looked at in
    private.

    \b
    Example:
      shmcache verify llm || shmcache destroy --force llm
      shmcache verify --dump llm.dump
    """
    if path is not None and name is None:
        return _verify_dump(path)
    if name is None or path is not None:
        raise click.UsageError("name a pool, or a file with --dump")
    with CacheResidencyPool.observe(name) as pool:
        found = pool.verify()
        identity = identity_of(pool)
    return _verified(f"pool {name!r}", identity, found, "destroy it and create it again")


def _verify_dump(path: Path) -> Answer:
    dump = read_dump(path)
    found, header = dump.verify(), dump.header
    identity: dict[str, object] = {
        "name": header.name,
        "pool_id": header.pool_id,
        "state": header.state,
    }
    what = f"the dump of pool {header.name!r}, which was {header.state}"
    advice = "" if header.locked else "taken without the lock: some may have been half-made changes"
    return _verified(what, identity, found, advice)


def _verified(what: str, identity: dict[str, object], found: VerifyReport, advice: str) -> Answer:
    document = identity | {
        "ok": found.ok,
        "problems_count": found.problems_count,
        "problems": found.problems,
    }
    if found.ok:
        return Answer(document, (f"{what} is sound",))
    if not found.problems:
        return Answer(document, (f"{what} is {found.state}, no finding",), finding=True)
    rows = ((row.kind, row.index, row.expected, row.actual) for row in found.problems)
    heading = f"{what} is {found.state}: {found.problems_count} findings"
    listed = table("finding >index >expected >actual", rows)
    return Answer(document, (heading, listed, advice), finding=True)


@click.command(cls=Command)
@pool_argument
@click.argument("path", metavar="FILE", type=_FILE)
@click.option("--no-lock", is_flag=True, help="Do not wait for it: its holder is stopped.")
def dump(name: str, path: Path, no_lock: bool) -> Answer:
    """Write all tables of a pool into a file, without the bytes of its blocks.

    For `verify --dump`, or a look from Python, on another host or after the pool has gone. The file
    has the keys of blocks, the process ids and the beginnings of command lines. Other processes
    wait for the length of a copy, some milliseconds.

    \b
    Example:
      shmcache dump llm llm.dump
      shmcache verify --dump llm.dump
    """
    with CacheResidencyPool.observe(name) as pool:
        header = pool.dump(path, locked=not no_lock)
        document = identity_of(pool) | {"file": str(path), "locked": header.locked}
    size_bytes = path.stat().st_size
    text = f"pool {name!r} is in {str(path)!r}, {format_size(size_bytes)}"
    return Answer(document | {"file_bytes": size_bytes}, (text,))


@click.command(cls=Command)
@pool_argument
@click.option(
    "--forget-files",
    is_flag=True,
    help="Release the disk charge of live files also where they cannot be deleted.",
)
def reclaim(name: str, forget_files: bool) -> Answer:
    """Give back, once, what dead processes held. `supervise` does it all the time.

    \b
    Example:
      shmcache reclaim llm
    """
    with CacheResidencyPool.observe(name) as pool:
        reclaimed = pool.sweep(forget_files=forget_files)
        document = identity_of(pool) | {"reclaimed": reclaimed_document(reclaimed)}
    rows = ((o.pid, o.entries, *_usage_cells(o.usage)) for o in reclaimed)
    found = table(">pid >entries >device >host >transfer >disk", rows)
    remaining = [
        f"live files of process {owner.pid} in {files.place} are not deleted: {files.reason}"
        for owner in reclaimed
        for files in owner.undeleted
    ]
    return Answer(document, (found, *remaining) if reclaimed else ("nothing to reclaim",))


# ---- what answers share ------------------------------------------------------------------------


def identity_of(pool: CacheResidencyPool) -> dict[str, object]:
    """What every answer about a pool begins with."""
    return {"name": pool.name, "pool_id": hex_id(pool.id), "state": pool.state}


def reclaimed_document(owners: Iterable[ReclaimedOwner]) -> list[dict[str, object]]:
    """What was given back for each owner, as JSON has it."""
    return [
        {
            "slot": owner.slot,
            "pid": owner.pid,
            "nonce": hex_id(owner.nonce),
            "entries": owner.entries,
            "usage": owner.usage,
            "undeleted": owner.undeleted,
        }
        for owner in owners
    ]


def sizes_document(geometry: SegmentGeometry) -> dict[str, object]:
    """The sizes of a pool, as JSON has them."""
    fields = {field: getattr(geometry, field) for field in geometry.__struct_fields__}
    fields["mode"] = f"{geometry.mode:o}"
    return {"segment_bytes": geometry.segment_bytes, "geometry": fields}


def _usage_cells(usage: CachePoolUsage) -> Iterable[str]:
    return (format_size(getattr(usage, f"{axis}_bytes")) for axis in _AXES)


def _time(wall_ns: int | None) -> str | None:
    if wall_ns is None:
        return None
    return datetime.fromtimestamp(wall_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
