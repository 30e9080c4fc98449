"""The generations of a prompt cache: hold the active one, list them, prune what nobody holds.

Why: publishing never takes anything away, so that readers need no lock. Somebody has to take away
later what was replaced, and what killed publishers left, without a reader or publisher noticing.

Contract: `prune` removes a directory only while it has it alone, having read the pointer after
that. Before, it makes the pointer durable: a power loss must not bring back an older one that
names what is gone. A generation gets another name before its first file goes.

Concurrency: with readers, publishers and other prunes at any moment.

Death: a killed prune leaves a directory `.pruned-...` that the next one removes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from shmcache.bounds import usize
from shmcache.errors import PromptCachePersistenceError
from shmcache.prompt.files import StrPath, sync_directory
from shmcache.prompt.holds import DirectoryHold, alone
from shmcache.prompt.paths import (
    PROMPT_CACHE_CURRENT_FILE,
    PROMPT_CACHE_GENERATIONS_DIRECTORY,
    is_real_directory,
    read_pointer,
    resolve_prompt_cache_root,
)

_PATIENCE_S: Final = 5.0  # a prune needs the lock of a generation for microseconds
_POLL_S: Final = 0.005
_PRUNED: Final = ".pruned-"


class PromptCacheGenerationKind(Enum):
    """What a directory of a prompt cache is."""

    ACTIVE = "active"
    REPLACED = "replaced"  # or never activated
    STAGING = "staging"  # unfinished: a publisher's, or a killed one's; of two phases, the latter's
    PRUNED = "pruned"  # half deleted by a killed prune


class PromptCacheGeneration(msgspec.Struct, frozen=True):
    """One directory of a prompt cache.

    `prunable`: no pointer names it, and no reader or publisher held it just now. Units:
    `size_bytes` as on disk, hard links counted once.
    """

    path: Path
    kind: PromptCacheGenerationKind
    prunable: bool
    size_bytes: int
    modified_ns: int


_K = PromptCacheGenerationKind


def hold_active(directory: Path) -> tuple[Path, DirectoryHold]:
    """The active generation of a destination, held.

    A generation that is replaced and pruned between two steps is looked up again.

    Errors: those of `resolve_prompt_cache_root`; `PromptCachePersistenceError.MalformedStorage`
    `generation_busy` if somebody keeps the active generation locked for himself.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        path = resolve_prompt_cache_root(directory)
        try:
            hold = DirectoryHold.take(path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # pruned or replaced by a link meanwhile: the next look tells
        except OSError as error:
            raise PromptCachePersistenceError.Io("open_generation", path, error) from error
        if hold is not None:
            return path, hold
        if time.monotonic() > deadline:
            raise PromptCachePersistenceError.MalformedStorage("generation_busy", path.name)
        time.sleep(_POLL_S)


def prompt_cache_generations(directory: StrPath) -> tuple[PromptCacheGeneration, ...]:
    """What a destination consists of, the active generation first; empty if there is nothing."""
    root = Path(directory)
    active = _active(root)
    found = [_described(path, kind, active) for path, kind in _directories(root)]
    order = list(_K)
    return tuple(sorted(filter(None, found), key=lambda one: (order.index(one.kind), one.path)))


def prune_prompt_cache(directory: StrPath, keep: int = 0) -> tuple[PromptCacheGeneration, ...]:
    """Remove what no pointer names and nobody holds; what was removed.

    `keep` spares that many of the replaced generations, the last modified ones. All of them are
    spared where no pointer is: whoever lost it may name one.

    Errors: `PromptCachePersistenceError` of `resolve_prompt_cache_root` but `current_missing`, and
    `Io` `sync_directory`: nothing was removed; `Io` `prune`: the rest is still to be removed.
    """
    usize(keep, "keep")
    root = Path(directory)
    removable = {_K.STAGING, _K.PRUNED}
    try:
        resolve_prompt_cache_root(root)
    except PromptCachePersistenceError.MalformedStorage as error:
        if error.code != "current_missing":
            raise
    else:
        sync_directory(root)
        sync_directory(root / PROMPT_CACHE_GENERATIONS_DIRECTORY)
        removable.add(_K.REPLACED)
    candidates = [one for one in prompt_cache_generations(root) if one.kind in removable]
    candidates.sort(key=lambda one: one.modified_ns, reverse=True)
    spared = [one for one in candidates if one.kind is _K.REPLACED][:keep]
    removed = [one for one in candidates if one not in spared and _remove(root, one.path)]
    _remove_pointers(root)
    return tuple(removed)


def remove_generation(directory: Path, name: str) -> bool:
    """Remove a generation that the pointer does not name and nobody holds; whether it did.

    Errors: `PromptCachePersistenceError.Io` `prune`.
    """
    return _remove(directory, directory / PROMPT_CACHE_GENERATIONS_DIRECTORY / name)


def _remove(root: Path, path: Path) -> bool:
    with alone(path) as descriptor:
        # The pointer is read under the lock: whoever makes it name this generation holds it.
        if descriptor is None or _active(root) == path:
            return False
        doomed = path
        try:
            if not path.name.startswith("."):
                doomed = _retired_name(path)
                os.rename(path, doomed)
            shutil.rmtree(doomed)
        except FileNotFoundError:
            return False  # its publisher, or another prune, was faster
        except OSError as error:
            raise PromptCachePersistenceError.Io("prune", doomed, error) from error
    return True


def _retired_name(path: Path) -> Path:
    """A free name; a killed prune of a generation of the same name may have left one."""
    for number in itertools.count():
        name = path.with_name(f"{_PRUNED}{path.name}-{number}")
        if not os.path.lexists(name):
            return name
    raise AssertionError  # unreachable: the count has no end


def _remove_pointers(root: Path) -> None:
    """Pointers that killed publishers wrote and did not switch to."""
    generations = root / PROMPT_CACHE_GENERATIONS_DIRECTORY
    for name in _names(root):
        unfinished = re.fullmatch(rf"\.{PROMPT_CACHE_CURRENT_FILE}\.tmp-(\d+)", name)
        if not unfinished:
            continue
        generation = generations / f"generation-{unfinished[1]}"
        with alone(generation) as descriptor:
            if descriptor is not None or not generation.exists():
                with contextlib.suppress(OSError):
                    os.unlink(root / name)


# Looking ------------------------------------------------------------------------------------------


def _active(root: Path) -> Path | None:
    """The generation that the pointer names, whether or not it can be used."""
    try:
        return root / PROMPT_CACHE_GENERATIONS_DIRECTORY / read_pointer(root)
    except PromptCachePersistenceError.MalformedStorage:
        return None


def _directories(root: Path) -> Iterator[tuple[Path, PromptCacheGenerationKind]]:
    generations = root / PROMPT_CACHE_GENERATIONS_DIRECTORY
    for name in _names(generations) if is_real_directory(generations) else ():
        if re.fullmatch(r"\.tmp-\d+", name):
            yield generations / name, _K.STAGING
        elif name.startswith(_PRUNED):
            yield generations / name, _K.PRUNED
        elif name.startswith("generation-"):
            yield generations / name, _K.REPLACED
    # What killed publishers left beside it: of a new cache, of a reversible publication, of both.
    hidden = rf"\.{re.escape(root.name)}"
    unfinished = re.compile(rf"{hidden}\.tmp-\d+")
    transaction = re.compile(
        rf"\.?{hidden}\.transaction-p([0-9a-f]{{8}})-[0-9a-f]{{32}}(\.tmp-\d+)?"
    )
    for name in _names(root.parent):
        found = transaction.fullmatch(name)
        if unfinished.fullmatch(name) or (found and not _runs(int(found[1], 16))):
            yield root.parent / name, _K.STAGING


def _runs(pid: int) -> bool:
    """Whether there may be such a process; one more reason to spare what carries its number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return pid > 0


def _names(directory: Path) -> list[str]:
    """Empty for what is no directory."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(directory))
    return []


def _described(
    path: Path, kind: PromptCacheGenerationKind, active: Path | None
) -> PromptCacheGeneration | None:
    """None for what is no directory, or has gone meanwhile."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return None
    prunable = False
    if path == active:
        kind = _K.ACTIVE  # not locked even to look: readers come to it all the time
    else:
        with alone(path) as descriptor:
            prunable = descriptor is not None
    return PromptCacheGeneration(
        path=path,
        kind=kind,
        prunable=prunable,
        size_bytes=_size_bytes(path),
        modified_ns=status.st_mtime_ns,
    )


def _size_bytes(path: Path) -> int:
    """What its files occupy; each of several hard links once."""
    sizes = {}
    for folder, _, names in os.walk(path, onerror=None):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())
