"""Where the parts of a prompt cache are, and what in their place is refused.

Why: a manifest, a pointer and the entries of a directory are input: a path in them must not lead
out of the cache, by its text or by a link, and opening it must not block.

Contract: the destination itself may be reached through links. Below it none is followed: a link in
place of a shard is `UnsafeShardPath`, of the pointer `current_unsafe`, of a generation
`generation_missing`. Hard links are files like others. Names that begin with a dot are never
resolved: they belong to work that was not finished.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shmcache.bounds import instance
from shmcache.errors import PromptCachePersistenceError
from shmcache.policy.identity import CacheRankIdentity
from shmcache.policy.manifest_rules import is_safe_shard_path
from shmcache.policy.topology import PromptCacheTopology
from shmcache.prompt.files import READ_FLAGS, StrPath, close, open_directory, step

PROMPT_CACHE_GENERATIONS_DIRECTORY: Final = ".generations"
"""The directory below a destination that holds its generations."""

PROMPT_CACHE_CURRENT_FILE: Final = "CURRENT"
"""The file of a destination that names its active generation."""

MANIFEST_FILE: Final = "manifest.json"
DIGEST_FILE: Final = "manifest.sha256"

_POINTER_BYTES_MAX: Final = 256
_WHITE_SPACE: Final = " \t\r\n"  # nothing else that str.strip knows: a flipped bit may make it


# Generations --------------------------------------------------------------------------------------


def resolve_prompt_cache_root(directory: StrPath) -> Path:
    """The active generation of a destination, which `prune` may take away once it is replaced.

    Errors: `PromptCachePersistenceError.MalformedStorage` `current_missing`, `current_length`,
    `current_unsafe`, `generation_missing`; `Io` `stat_pointer`, `read_pointer`.
    """
    root = Path(directory)
    generations = root / PROMPT_CACHE_GENERATIONS_DIRECTORY
    missing = None
    while (name := read_pointer(root)) != missing:
        if is_real_directory(generations) and is_real_directory(generations / name):
            return generations / name
        missing = name  # unless it was replaced and pruned since the pointer was read
    raise PromptCachePersistenceError.MalformedStorage("generation_missing", name)


def read_pointer(directory: Path) -> str:
    """The name in CURRENT; that it exists is not looked at."""
    path = directory / PROMPT_CACHE_CURRENT_FILE
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise PromptCachePersistenceError.MalformedStorage("current_missing", str(path)) from None
    except OSError as error:
        raise PromptCachePersistenceError.Io("stat_pointer", path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise PromptCachePersistenceError.MalformedStorage("current_unsafe", "no regular file")
    if not 0 < status.st_size <= _POINTER_BYTES_MAX:
        message = f"{status.st_size} bytes"
        raise PromptCachePersistenceError.MalformedStorage("current_length", message)
    with step("read_pointer", path):
        descriptor = os.open(path, READ_FLAGS)
        try:
            content = os.read(descriptor, _POINTER_BYTES_MAX)
        finally:
            close(descriptor)
    try:
        name = content.decode().strip(_WHITE_SPACE)
    except UnicodeDecodeError as error:
        raise PromptCachePersistenceError.Io("read_pointer", path, error) from error
    if not is_generation_name(name):
        raise PromptCachePersistenceError.MalformedStorage("current_unsafe", repr(name))
    return name


def is_generation_name(name: str) -> bool:
    """Whether a text is one ordinary path component."""
    return bool(name) and not name.startswith(".") and "/" not in name and "\0" not in name


def prompt_cache_rank_path(root: StrPath, topology: PromptCacheTopology) -> Path:
    """Where a rank of a distributed model has its own cache; `root` if no axis is split."""
    rank = instance(topology, PromptCacheTopology, "topology").cache_rank_identity()
    return Path(root) if rank is None else Path(root) / rank_directory_name(rank)


def rank_directory_name(rank: CacheRankIdentity) -> str:
    """`rank-p<stage>-t<shard>-e<addressable>`, with an x for an absent axis."""
    axes = (rank.stage_rank, rank.shard_rank, rank.addressable_rank)
    stage, shard, addressable = ("x" if axis is None else str(axis) for axis in axes)
    return f"rank-p{stage}-t{shard}-e{addressable}"


# Shards -------------------------------------------------------------------------------------------


def safe_prompt_cache_shard_path(directory: StrPath, relative: str) -> Path:
    """`relative`, as a manifest has it, below the directory of a generation.

    What does not exist, or is no regular file, is no error here.

    Errors: `PromptCachePersistenceError.UnsafeShardPath` for a text that is no plain relative path
    (decided without touching the disk), and for a link on the way.
    """
    parts = _safe_parts(relative)
    path = Path(directory)
    joined = path.joinpath(*parts)
    for part in parts:
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            break  # it does not exist, as far as this process can tell
        if stat.S_ISLNK(mode):
            raise PromptCachePersistenceError.UnsafeShardPath(relative)
    return joined


@contextlib.contextmanager
def open_beneath(directory: Path, descriptor: int, relative: str) -> Iterator[tuple[int, Path]]:
    """A descriptor of a shard and its path; no component of `relative` is a link.

    `descriptor` is the open directory, `directory` its name for errors.

    Errors: `PromptCachePersistenceError.UnsafeShardPath`, `MissingShard` for what does not exist or
    is a directory, `Io` `open_shard`. Whether it is a regular file, the header's reader tells.
    """
    opened = _open_parts(directory, descriptor, relative)
    try:
        yield opened, directory / relative
    finally:
        close(opened)


def _open_parts(directory: Path, descriptor: int, relative: str) -> int:
    *folders, name = _safe_parts(relative)
    inner = descriptor
    try:
        for folder in folders:
            outer, inner = inner, open_directory(folder, directory=inner)
            if outer != descriptor:
                close(outer)
        return os.open(name, READ_FLAGS, dir_fd=inner)
    except (OSError, ValueError) as error:
        joined = safe_prompt_cache_shard_path(directory, relative)
        if os.path.isfile(joined) and isinstance(error, OSError):
            raise PromptCachePersistenceError.Io("open_shard", joined, error) from error
        raise PromptCachePersistenceError.MissingShard(joined) from error
    finally:
        if inner != descriptor:
            close(inner)


def _safe_parts(relative: str) -> list[str]:
    instance(relative, str, "a shard path")
    if "\0" in relative or not is_safe_shard_path(relative):
        raise PromptCachePersistenceError.UnsafeShardPath(relative)
    return relative.split("/")


def is_real_directory(path: Path) -> bool:
    """Whether this is a directory, and no link to one."""
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False
