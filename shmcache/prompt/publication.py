"""Publish one generation of a prompt cache: staged, verified, durable, then visible in one rename.

Why: a cache is written by workers that are killed and on disks that fill up. At every instant, also
after a power loss, a reader must find the old content or the new, whole.

Contract: the producer writes shards into `staging_directory` and makes each durable
(`finalize_prompt_cache_shard`, or the functions of `producing.py`); `commit` does the rest. The
order is the proof: content before the entry that names it, the pointer last.

Concurrency: no locks among publishers. Of two new publications of one destination the second fails;
of two replacements the last to switch is active. A shared hold tells `prune` what is in use.

Death: staging and hidden roots stay, under names that nothing resolves, until `prune`.

Not here: what a manifest must say (policy/), and taking old generations away (generations.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec

from shmcache.bounds import PROMPT_MANIFEST_BYTES_MAX, instance
from shmcache.errors import PromptCachePersistenceError
from shmcache.policy.manifest import PromptCacheManifest
from shmcache.prompt.files import (
    StrPath,
    created,
    step,
    sync_directory,
    sync_file,
    write_all,
)
from shmcache.prompt.holds import DirectoryHold
from shmcache.prompt.ownership import StagingOwner
from shmcache.prompt.paths import (
    DIGEST_FILE,
    MANIFEST_FILE,
    PROMPT_CACHE_CURRENT_FILE,
    PROMPT_CACHE_GENERATIONS_DIRECTORY,
    is_real_directory,
)
from shmcache.prompt.reading import digest_line, validate_prompt_cache_manifest

_HOLD_ATTEMPTS: Final = 100
_POLL_S: Final = 0.005


class PromptCachePublication(StagingOwner):
    """Owner of one staging directory; `commit` publishes it, anything else discards it.

    Contract: a context manager; leaving it without `commit` discards the work. A forked child may
    write into the staging of its parent and owns nothing.
    """

    def __init__(self, plan: _Plan, hold: DirectoryHold) -> None:
        super().__init__(_discard, plan.root, hold)
        self._plan = plan
        self._hold = hold

    @classmethod
    def begin(cls, destination: StrPath, replace_existing: bool) -> Self:
        """Make the staging directory of a new cache, or of a replacement if the destination exists.

        Errors: `PromptCachePersistenceError.InvalidPromptCachePath`, `PromptCacheExists`; `Io`
        `create_parent`, `create_staging_root`, `create_generations`, `create_staging`.
        """
        instance(replace_existing, bool, "replace_existing")
        plan = _Plan(*checked_destination(destination, replace_existing))
        hold = plan.make_staging()
        try:
            return cls(plan, hold)
        except BaseException:
            _discard(plan.root, hold)
            raise

    @property
    def staging_directory(self) -> Path:
        """Where to write the shards.

        Errors: RuntimeError after `commit` and `close`.
        """
        if not self._is_open:
            raise RuntimeError("this publication has been committed or closed")
        return self._plan.staging

    @property
    def generation(self) -> str:
        """The name that the published generation has."""
        return self._plan.generation

    def commit(self, manifest: PromptCacheManifest) -> None:
        """Publish the staged shards under this manifest.

        Errors: `PromptCachePersistenceError`: `ManifestJson`, `MalformedStorage` `manifest_length`,
        those of `validate_prompt_cache_manifest`, `Io` of the failed step. The old content stays,
        and what was staged is removed; a note says if the new content is visible and only its
        durability is unknown. RuntimeError the second time, after `close`, and in a forked child.
        """
        instance(manifest, PromptCacheManifest, "manifest")
        self._claim()
        try:
            self._stage_manifest(manifest)
            validate_prompt_cache_manifest(self._plan.staging, manifest)
            _sync_tree(self._plan.staging)
            self._plan.publish()
        except BaseException:
            self.close()
            raise
        self._finish()
        keeper = _keepers.get(self._plan.destination)
        if keeper is None:
            self._hold.close()
        else:
            keeper.keep(self._hold)

    def _stage_manifest(self, manifest: PromptCacheManifest) -> None:
        try:
            text = manifest.to_json()
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise PromptCachePersistenceError.ManifestJson(error) from error
        if len(text) > PROMPT_MANIFEST_BYTES_MAX:
            message = f"{len(text)} bytes, the limit is {PROMPT_MANIFEST_BYTES_MAX}"
            raise PromptCachePersistenceError.MalformedStorage("manifest_length", message)
        for name, content in ((MANIFEST_FILE, text), (DIGEST_FILE, digest_line(text))):
            path = self._plan.staging / name
            with created("create_manifest", path, exclusive=False) as descriptor:
                with step("write_manifest", path):
                    write_all(descriptor, content)
                sync_file(descriptor, path)


class _Plan:
    """The directories of one publication, and the steps that make it visible."""

    def __init__(self, destination: Path, unsynced: list[Path]) -> None:
        nonce = time.time_ns()
        self.destination = destination
        self.generation = f"generation-{nonce}"
        self.replacing = os.path.exists(destination)
        self._unsynced = unsynced
        if self.replacing:
            self.generations = destination / PROMPT_CACHE_GENERATIONS_DIRECTORY
            self.root = self.staging = self.generations / f".tmp-{nonce}"
        else:
            self.root = destination.parent / f".{destination.name}.tmp-{nonce}"
            self.generations = self.root / PROMPT_CACHE_GENERATIONS_DIRECTORY
            self.staging = self.generations / self.generation

    def make_staging(self) -> DirectoryHold:
        """Errors: `PromptCachePersistenceError.Io`; nothing of this publication is left then."""
        if self.replacing:
            make_generations(self.destination)
            return _make_held(self.root, "create_staging")
        hold = _make_held(self.root, "create_staging_root")
        try:
            for action, directory in (
                ("create_generations", self.generations),
                ("create_staging", self.staging),
            ):
                with step(action, directory):
                    os.mkdir(directory)
        except BaseException:
            _discard(self.root, hold)
            raise
        return hold

    def publish(self) -> None:
        """Errors: `PromptCachePersistenceError.Io`, with a note if the result is visible."""
        if self.replacing:
            target = self.generations / self.generation
            with step("publish_generation", target):
                os.rename(self.staging, target)
            sync_directory(self.generations)
            switch_pointer(self.destination, self.generation)
        else:
            sync_directory(self.generations)
            switch_pointer(self.root, self.generation)
            with step("publish_cache", self.destination):
                os.rename(self.root, self.destination)
        with noted_as_visible():
            for directory in (self.destination.parent, *self._unsynced):
                sync_directory(directory)


# Steps that a reversible publication takes too ----------------------------------------------------


class Keeper(Protocol):
    """Goes on holding what is published at a destination that nobody reads yet."""

    def keep(self, hold: DirectoryHold) -> None:
        """Once that it is there."""


_keepers: weakref.WeakValueDictionary[Path, Keeper] = weakref.WeakValueDictionary()


def keep_held(destination: Path, keeper: Keeper) -> None:
    """Hand the hold of what this process publishes there to the keeper, as long as that lives."""
    _keepers[destination] = keeper


def checked_destination(destination: StrPath, replace_existing: bool) -> tuple[Path, list[Path]]:
    """The destination, whose parents exist now; and the directories in which they were made.

    Errors: `PromptCachePersistenceError.InvalidPromptCachePath`, `PromptCacheExists`, `Io`
    `create_parent`.
    """
    text = instance(os.fspath(destination), str, "destination")
    path = Path(text)
    if not text or "\0" in text or (path.anchor and not path.name):
        raise PromptCachePersistenceError.InvalidPromptCachePath(path)
    unsynced = []
    parent = path.parent
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
        unsynced.append(parent)
    with step("create_parent", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    exists = os.path.exists(path)
    if exists and not replace_existing:
        raise PromptCachePersistenceError.PromptCacheExists(path)
    if (exists and not path.is_dir()) or not _is_file_name(path.name):
        raise PromptCachePersistenceError.InvalidPromptCachePath(path)
    return path, unsynced


def make_generations(destination: Path) -> None:
    """The directory of generations of an existing destination, durable if it had to be made.

    Errors: `PromptCachePersistenceError.Io` `create_generations`, also for a link in its place.
    """
    generations = destination / PROMPT_CACHE_GENERATIONS_DIRECTORY
    with step("create_generations", generations):
        try:
            os.mkdir(generations)
        except FileExistsError:
            if is_real_directory(generations):
                return
            raise
    sync_directory(destination)


def switch_pointer(directory: Path, generation: str) -> None:
    """Make CURRENT of a directory name a generation, durably.

    Errors: `PromptCachePersistenceError.Io` `create_pointer`, `write_pointer`, `sync_pointer`,
    `switch_pointer`: the old pointer stays; `sync_directory`, with a note: the new one is visible.
    """
    written = directory / f".{PROMPT_CACHE_CURRENT_FILE}.tmp-{generation.rpartition('-')[2]}"
    pointer = directory / PROMPT_CACHE_CURRENT_FILE
    try:
        with created("create_pointer", written, exclusive=False) as descriptor:
            with step("write_pointer", written):
                write_all(descriptor, f"{generation}\n".encode())
            sync_file(descriptor, written, "sync_pointer")
        with step("switch_pointer", pointer):
            os.rename(written, pointer)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(written)
        raise
    with noted_as_visible():
        sync_directory(directory)


@contextlib.contextmanager
def noted_as_visible() -> Iterator[None]:
    """Tell with an error that the new content is there, and may be lost with the power."""
    try:
        yield
    except PromptCachePersistenceError as error:
        error.add_note("what was published is visible, but may not survive a power loss")
        raise


def _is_file_name(name: str) -> bool:
    try:
        return name not in ("", "..") and bool(name.encode())
    except UnicodeEncodeError:  # bytes that are no UTF-8
        return False


def _make_held(directory: Path, action: str) -> DirectoryHold:
    """Make a directory and hold it; a prune that comes in between takes it for abandoned.

    Errors: `PromptCachePersistenceError.Io`.
    """
    with step(action, directory):
        os.mkdir(directory)
        for _ in range(_HOLD_ATTEMPTS):
            try:
                hold = DirectoryHold.take(directory)
            except FileNotFoundError:
                os.mkdir(directory)
                continue
            except OSError:
                os.rmdir(directory)
                raise
            if hold is not None:
                return hold
            time.sleep(_POLL_S)
        raise BlockingIOError(errno.EAGAIN, "somebody keeps it locked")


def _sync_tree(directory: Path) -> None:
    """Make the entries of a directory and of all below it durable, the innermost first."""
    folders = [directory]
    for folder in folders:
        with step("sync_directory", folder), os.scandir(folder) as entries:
            folders += [Path(one.path) for one in entries if one.is_dir(follow_symlinks=False)]
    for folder in reversed(folders):
        sync_directory(folder)


def _discard(root: Path, hold: DirectoryHold) -> None:
    """Remove what was staged, if it is still there under that name."""
    if hold.is_at(root):
        shutil.rmtree(root, ignore_errors=True)
    hold.close()
