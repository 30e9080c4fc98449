"""Commands about one prompt cache on disk: what it holds, whether it is sound, what may go.

Contract    Nothing here needs a pool. `inspect` and `list` read no tensor; `verify` reads all of
            them. Only `prune` changes anything, and takes nothing that is in use. The keys of each
            command's JSON are listed in docs/persistence.md, and a test compares.
Units       `..._bytes` in JSON are bytes; text shows them rounded.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.progress import DownloadColumn, TimeRemainingColumn

from shmcache import (
    PromptCacheGeneration,
    PromptCacheManifest,
    PromptCacheReader,
    prompt_cache_generations,
    prune_prompt_cache,
    verify_prompt_cache,
)
from shmcache.cli.answers import Answer, Command, table
from shmcache.cli.progress import progress_bar
from shmcache.cli.sizes import format_size

_directory = click.argument("directory", metavar="DIRECTORY", type=click.Path(path_type=Path))
_SUMMARY = (
    "model_family",
    "effective_model_type",
    "total_prefix_tokens",
    "block_size_tokens",
    "batch_size",
    "layer_count",
    "global_layer_start",
    "global_layer_end",
    "application_namespace",
    "checkpoint_fingerprint",
    "prefix_content_fingerprint",
    "architecture_fingerprint",
    "prefix_sha256",
)


@click.group("prompt")
def prompt() -> None:
    """Look after prompt caches on disk. Every command of this group takes --json.

    \b
    Example:
      shmcache prompt verify caches/system-prompt
    """


@prompt.command(cls=Command)
@_directory
def inspect(directory: Path) -> Answer:
    """Show what a cache holds, once its manifest and all headers were checked.

    \b
    Example:
      shmcache prompt inspect caches/system-prompt
    """
    with PromptCacheReader.open(directory) as reader:
        manifest, generation = reader.manifest, reader.path.name
    document = {"directory": str(directory), "generation": generation}
    document |= {name: getattr(manifest, name) for name in _SUMMARY} | _counts(manifest)
    rows = ((name.replace("_", " "), _shown(name, value)) for name, value in document.items())
    return Answer(document, (table("fact value", rows),))


@prompt.command(cls=Command)
@_directory
def verify(directory: Path) -> Answer:
    """Read every tensor of a cache and compare its hash. Damage is exit code 1.

    \b
    Example:
      shmcache prompt verify caches/system-prompt
    """
    columns = (DownloadColumn(), TimeRemainingColumn())
    with progress_bar(f"verifying {directory}", *columns) as change:
        tell = change and (lambda done, total: change(completed=done, total=total))
        manifest = verify_prompt_cache(directory, tell)
    document = {"directory": str(directory), "ok": True} | _counts(manifest)
    size = format_size(_bytes(manifest))
    return Answer(document, (f"{directory} is sound: {size} in {document['shards']} shards",))


@prompt.command("list", cls=Command)
@_directory
def list_(directory: Path) -> Answer:
    """Show the generations of a cache, and what killed publishers left.

    \b
    Example:
      shmcache prompt list caches/system-prompt
    """
    found = prompt_cache_generations(directory)
    document = {"directory": str(directory), "generations": list(map(_entry, found))}
    return Answer(document, (_listed(found),) if found else ("no generations",))


@prompt.command(cls=Command)
@_directory
@click.option(
    "--keep",
    type=click.IntRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="Spare so many of the replaced generations, the newest ones.",
)
@click.option("--dry-run", is_flag=True, help="Only say what nobody uses now.")
def prune(directory: Path, keep: int, dry_run: bool) -> Answer:
    """Remove old generations, and what killed publishers left, unless somebody uses them.

    \b
    Example:
      shmcache prompt prune caches/system-prompt --keep 1
    """
    if dry_run:
        found = tuple(one for one in prompt_cache_generations(directory) if one.prunable)
    else:
        found = prune_prompt_cache(directory, keep)
    size_bytes = sum(one.size_bytes for one in found)
    document = {
        "directory": str(directory),
        "dry_run": dry_run,
        "freed_bytes": size_bytes,
        "removed": list(map(_entry, found)),
    }
    if not found:
        return Answer(document, ("nothing to remove",))
    what = "could be freed" if dry_run else "freed"
    return Answer(document, (_listed(found), f"{format_size(size_bytes)} {what}"))


# ---- what answers share ------------------------------------------------------------------------


def _counts(manifest: PromptCacheManifest) -> dict[str, object]:
    blocks, tensors = len(manifest.blocks), len(manifest.state_tensors)
    return {
        "blocks": blocks,
        "state_tensors": tensors,
        "shards": blocks + tensors,
        "payload_bytes": _bytes(manifest),
    }


def _bytes(manifest: PromptCacheManifest) -> int:
    blocks = sum(block.logical_bytes for block in manifest.blocks)
    return blocks + sum(tensor.logical_bytes for tensor in manifest.state_tensors)


def _shown(name: str, value: object) -> object:
    return format_size(value) if name.endswith("_bytes") and isinstance(value, int) else value


def _entry(one: PromptCacheGeneration) -> dict[str, object]:
    return {
        "name": one.path.name,
        "kind": one.kind.value,
        "prunable": one.prunable,
        "size_bytes": one.size_bytes,
        "modified": _time(one.modified_ns),
    }


def _listed(found: tuple[PromptCacheGeneration, ...]) -> Any:
    rows = (
        (
            one.path.name,
            one.kind.value,
            "yes" if one.prunable else "no",
            format_size(one.size_bytes),
            _time(one.modified_ns),
        )
        for one in found
    )
    return table("name kind prunable >size modified", rows)


def _time(moment_ns: int) -> str:
    return datetime.fromtimestamp(moment_ns // 10**9, UTC).isoformat().replace("+00:00", "Z")
