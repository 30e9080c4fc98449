"""Publish a prompt cache so that it can be taken back: several ranks agree, or none is seen.

Why: the ranks of a distributed model publish one cache each, and a reader must not find those of
two different prefixes. Each makes its own visible, they vote, and each commits or rolls back.

Contract: the caller completes an ordinary new publication at `transaction_directory`, a sibling of
the destination that `begin` only names. `publish` makes it the destination, or its generation the
active one there; `rollback` restores what was, unless somebody else has published since. Dropping
rolls back.

Concurrency: between `publish` and the end both generations are held against `prune`.

Death: killed before `publish`, the transaction directory stays; after it, what is left of that, and
the new content stays published. A `prune` of the destination removes such directories: it finds
that nobody holds them, as the publication did, and that the process in their name has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from pathlib import Path
from typing import Final, Self

from shmcache.bounds import instance
from shmcache.errors import PromptCachePersistenceError
from shmcache.prompt.files import StrPath, step, sync_directory
from shmcache.prompt.generations import hold_active, remove_generation
from shmcache.prompt.holds import DirectoryHold, alone
from shmcache.prompt.ownership import StagingOwner
from shmcache.prompt.paths import (
    PROMPT_CACHE_CURRENT_FILE,
    PROMPT_CACHE_GENERATIONS_DIRECTORY,
    read_pointer,
)
from shmcache.prompt.publication import (
    checked_destination,
    keep_held,
    make_generations,
    noted_as_visible,
    switch_pointer,
)
from shmcache.prompt.reading import inspect_prompt_cache

_RESERVED: Final = "reserved"
_PUBLISHED: Final = "published"
_ENDED: Final = "ended"

_begun = itertools.count()


class ReversiblePromptCachePublication(StagingOwner):
    """A publication in two phases: `publish`, then `commit` or `rollback`."""

    def __init__(self, transaction: _Transaction) -> None:
        super().__init__(_roll_back_quietly, transaction)
        self._transaction = transaction

    @classmethod
    def begin(cls, destination: StrPath, replace_existing: bool) -> Self:
        """Reserve the name of a transaction directory; it is not made.

        Errors: `PromptCachePersistenceError.InvalidPromptCachePath`, `PromptCacheExists`, `Io`
        `create_parent`.
        """
        instance(replace_existing, bool, "replace_existing")
        path, _ = checked_destination(destination, replace_existing)
        nonce = time.time_ns() ^ next(_begun)
        name = f".{path.name}.transaction-p{os.getpid():08x}-{nonce:032x}"
        transaction = _Transaction(path, path.with_name(name), replace_existing)
        keep_held(transaction.directory, transaction)
        return cls(transaction)

    @property
    def transaction_directory(self) -> Path:
        """Where the caller publishes an ordinary new cache before it calls `publish`."""
        return self._transaction.directory

    def publish(self) -> None:
        """Make the content of the transaction directory what readers of the destination find.

        Errors: those of `inspect_prompt_cache`; `PromptCachePersistenceError.PromptCacheExists`,
        `InvalidPromptCachePath`, `Io`; `InvalidReversiblePublication` unless reserved. What readers
        find is as before, and the publication stays reserved; but an error with a note, which says
        that the new content is visible, leaves it published. RuntimeError in a forked child.
        """
        self._require_owner()
        self._transaction.require("publish", _RESERVED)
        self._transaction.publish()

    def commit(self) -> None:
        """Keep what was published, and remove the rest of the transaction directory.

        Errors: `PromptCachePersistenceError.InvalidReversiblePublication` unless published.
        """
        self._require_owner()
        self._transaction.require("commit", _PUBLISHED)
        self._finish()
        self._transaction.end()

    def rollback(self) -> None:
        """Restore what readers found before, and remove what was published.

        A generation that readers hold is left to `prune`.

        Errors: `PromptCachePersistenceError.InvalidReversiblePublication` once ended; `Io` of the
        step that failed, after which nothing more is tried.
        """
        self._require_owner()
        self._transaction.require("rollback", _RESERVED, _PUBLISHED)
        self._finish()
        self._transaction.roll_back()


class _Transaction:
    """The state of a reversible publication, without its owner's safety net."""

    def __init__(self, destination: Path, directory: Path, replace_existing: bool) -> None:
        self.destination = destination
        self.directory = directory
        self._replace_existing = replace_existing
        self._state = _RESERVED
        self._generation = ""
        self._previous: str | None = None
        self._moved = False  # a generation into an existing destination, else the whole directory
        self._holds: list[DirectoryHold] = []
        self._kept: list[DirectoryHold] = []  # from the inner publication's commit to the end

    def keep(self, hold: DirectoryHold) -> None:
        """The transaction directory is there: nobody may prune it."""
        self._kept.append(hold)

    def require(self, operation: str, *states: str) -> None:
        """Errors: `PromptCachePersistenceError.InvalidReversiblePublication`."""
        if self._state not in states:
            raise PromptCachePersistenceError.InvalidReversiblePublication(operation, self._state)

    def publish(self) -> None:
        """Errors: see `ReversiblePromptCachePublication.publish`."""
        inspect_prompt_cache(self.directory)
        path, hold = hold_active(self.directory)
        self._holds.append(hold)
        self._generation = path.name
        try:
            if os.path.exists(self.destination):
                self._move_generation(path)
            else:
                with step("publish_cache", self.destination):
                    os.rename(self.directory, self.destination)
                self._state = _PUBLISHED
                with noted_as_visible():
                    sync_directory(self.destination.parent)
        except BaseException:
            if self._state == _RESERVED:
                self._release()
            raise

    def _move_generation(self, path: Path) -> None:
        if not self._replace_existing:
            raise PromptCachePersistenceError.PromptCacheExists(self.destination)
        if not self.destination.is_dir():
            raise PromptCachePersistenceError.InvalidPromptCachePath(self.destination)
        try:
            previous, hold = hold_active(self.destination)
            self._previous = previous.name
            self._holds.append(hold)
        except PromptCachePersistenceError.MalformedStorage as error:
            if error.code != "current_missing":
                raise
        make_generations(self.destination)
        generations = self.destination / PROMPT_CACHE_GENERATIONS_DIRECTORY
        target = generations / path.name
        if os.path.lexists(target):
            raise PromptCachePersistenceError.InvalidPromptCachePath(target)
        with step("publish_generation", target):
            os.rename(path, target)
        self._moved = True
        try:
            sync_directory(generations)
            switch_pointer(self.destination, path.name)
        except BaseException:
            if _pointer(self.destination) != path.name:
                os.rename(target, path)
                self._moved = False
                raise
            self._state = _PUBLISHED
            raise
        self._state = _PUBLISHED

    def roll_back(self) -> None:
        """Errors: `PromptCachePersistenceError.Io`."""
        state, self._state = self._state, _ENDED
        try:
            if state == _PUBLISHED and self._moved:
                self._take_generation_back()
            elif state == _PUBLISHED:
                self._take_destination_back()
        finally:
            self._release()
        self._remove_directory()

    def end(self) -> None:
        """Let go of everything, and remove what is left of the transaction directory."""
        self._state = _ENDED
        self._release()
        self._remove_directory()

    def _take_generation_back(self) -> None:
        if _pointer(self.destination) == self._generation:
            if self._previous is not None:
                switch_pointer(self.destination, self._previous)
            else:
                pointer = self.destination / PROMPT_CACHE_CURRENT_FILE
                with step("switch_pointer", pointer):
                    os.unlink(pointer)
                sync_directory(self.destination)
        self._release()
        remove_generation(self.destination, self._generation)

    def _take_destination_back(self) -> None:
        if _pointer(self.destination) == self._generation:
            with step("publish_cache", self.directory):
                os.rename(self.destination, self.directory)
            sync_directory(self.destination.parent)
        else:  # somebody has published there since
            self._release()
            remove_generation(self.destination, self._generation)

    def _remove_directory(self) -> None:
        while self._kept:
            self._kept.pop().close()
        generation = self.directory / PROMPT_CACHE_GENERATIONS_DIRECTORY / self._generation
        with alone(generation) as descriptor:
            if descriptor is not None or not os.path.lexists(generation):
                shutil.rmtree(self.directory, ignore_errors=True)

    def _release(self) -> None:
        while self._holds:
            self._holds.pop().close()


def _pointer(destination: Path) -> str | None:
    with contextlib.suppress(PromptCachePersistenceError):
        return read_pointer(destination)
    return None


def _roll_back_quietly(transaction: _Transaction) -> None:
    with contextlib.suppress(PromptCachePersistenceError, OSError):
        transaction.roll_back()
