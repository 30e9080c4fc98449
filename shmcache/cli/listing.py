"""`shmcache list`: every file that has a pool's name, usable or not, and why not.

Contract    Never attaches as an owner and changes nothing. What cannot be opened is shown with the
            failed check: a pool of another user, namespace, boot or release, damage, foreign files.
"""

from __future__ import annotations

import contextlib
from typing import Any

import click

from shmcache import CacheResidencyPool, SegmentError, bounds, segment_names, segment_path
from shmcache.cli.answers import Answer, Command, error_document, table
from shmcache.cli.names import hex_id
from shmcache.cli.sizes import format_size
from shmcache.errors import ContractError

_SIZE_KEYS = ("size_bytes", "host_current_bytes", "host_limit_bytes")


@click.command("list", cls=Command)
def list_() -> Answer:
    """Show every pool of this host. A file that cannot be used is shown with the reason.

    \b
    Example:
      shmcache list --json
    """
    entries = [entry for name in segment_names() if (entry := _entry(name))]
    rows = (
        (
            entry["name"] if _is_pool_name(entry["name"]) else ascii(entry["name"]),
            entry["pool_id"],
            entry["state"],
            *(_size_cell(entry[key]) for key in _SIZE_KEYS),
            entry["owners"],
            entry["problem"]["message"] if entry["problem"] else "",
        )
        for entry in entries
    )
    found = table("name id state >size >host >host_limit >owners problem", rows)
    return Answer({"pools": entries}, (found,) if entries else ("no pools",))


def _entry(name: str) -> dict[str, Any] | None:
    """One line of the list; None when the file vanished while we looked."""
    entry: dict[str, Any] = {"name": name, "pool_id": None, "state": "refused", "usable": False}
    entry |= dict.fromkeys((*_SIZE_KEYS, "owners", "problem"))
    try:
        entry["size_bytes"] = segment_path(name).lstat().st_size
        with CacheResidencyPool.observe(name) as pool:
            entry |= {"pool_id": hex_id(pool.id), "state": pool.state}
            entry["host_limit_bytes"] = pool.limits.host_bytes
            entry["host_current_bytes"] = pool.report().current_host_bytes
            entry["owners"] = len(pool.owners())
            entry["usable"] = True
    except (FileNotFoundError, SegmentError.NotFound):
        return None
    except ContractError as error:
        entry["problem"] = error_document(error)
    except ValueError as error:  # no pool name: somebody else's file
        said = {"error": "ValueError", "message": str(error)}
        entry["problem"] = said | {"hint": "leave it to whoever made it", "attributes": {}}
    return entry


def _is_pool_name(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(bounds.pool_name(name))
    return False


def _size_cell(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else format_size(size_bytes)
