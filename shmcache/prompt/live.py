"""Publish one block of a running session under a file name that nobody else ever uses.

Why: a session spills blocks to disk and reads them back. Its writer may race with other sessions of
the same directory, with a forked child, or with its own late retry; a name that all three may use
would let one block's bytes be read as another's.

Contract: the name holds process, count, session, layer, representation, rank and tokens. The file
appears by a hard link, which fails where a rename would replace. No fsync: these files do not
outlive their session.

Death: killed before the link, a dot file stays; after it, a whole block file that no record names.
Both carry the process in their name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from shmcache.bounds import instance
from shmcache.errors import LiveCachePublicationError
from shmcache.policy.identity import CacheBlockId, CacheRankIdentity, CacheRepresentation
from shmcache.prompt.ownership import StagingOwner
from shmcache.prompt.paths import rank_directory_name
from shmcache.prompt.shard import Array, StoredShard, read_shard, write_shard

_REPRESENTATIONS: Final = {
    CacheRepresentation.KEY_VALUE: "kv",
    CacheRepresentation.COMPRESSED_LATENT_ROTARY: "mla",
}

# By pid, for a child that no at-fork handler was run for; emptied by fork, because a grandchild may
# get the number of a dead ancestor.
_namespaces: dict[int, tuple[str, Iterator[int]]] = {}
os.register_at_fork(after_in_child=_namespaces.clear)


class LiveCacheBlockPublication(StagingOwner):
    """Owner of one staging file; `commit` gives it its final name.

    Contract: the producer writes the whole block to `staging_path`, in a directory that exists.
    Whatever happens without a commit, only the staging file is removed.
    """

    def __init__(self, staging: Path, destination: Path) -> None:
        super().__init__(_unlink_quietly, staging)
        self._staging = staging
        self._destination = destination

    @classmethod
    def begin(cls, directory: str | os.PathLike[str], id: CacheBlockId) -> Self:
        """Choose both names. Touches no disk."""
        base = _base_name(instance(id, CacheBlockId, "id"))
        folder = Path(directory)
        return cls(folder / f".{base}.tmp.safetensors", folder / f"{base}.safetensors")

    @property
    def staging_path(self) -> Path:
        """Where to write the block."""
        return self._staging

    @property
    def destination_path(self) -> Path:
        """The name the block will have."""
        return self._destination

    def commit(self) -> Path:
        """Publish the staged file; the destination.

        Errors: `LiveCachePublicationError.Io` `link_live_block`, `unlink_live_staging`: nothing is
        published, nothing stays staged, and a file that had the name is as it was. RuntimeError the
        second time, after `close`, and in a forked child.
        """
        self._claim()
        try:
            try:
                os.link(self._staging, self._destination, follow_symlinks=False)
            except OSError as error:
                raise _io("link_live_block", self._destination, error) from error
            try:
                os.unlink(self._staging)
            except OSError as error:
                _unlink_quietly(self._destination)
                raise _io("unlink_live_staging", self._staging, error) from error
        except BaseException:
            self.close()
            raise
        self._finish()
        return self._destination


def write_live_block(
    directory: str | os.PathLike[str], id: CacheBlockId, arrays: Mapping[str, Array]
) -> StoredShard:
    """Store a block's arrays in a new file of an existing directory.

    Errors: those of `write_shard` and of `commit`; nothing stays on disk after any of them.
    """
    with LiveCacheBlockPublication.begin(directory, id) as publication:
        written = write_shard(publication.staging_path, arrays, durable=False)
        return written._replace(path=publication.commit())


def read_live_block(block: StoredShard, into: Any = None) -> dict[str, Array]:
    """The arrays that `write_live_block` stored; see `read_shard`.

    Errors: those of `read_shard`: the file was cut, changed or replaced.
    """
    return read_shard(block.path, block.arrays, block.payload_sha256, into)


def remove_live_block(path: str | os.PathLike[str]) -> None:
    """Remove a published block; one that is gone already is no error.

    Errors: `LiveCachePublicationError.Io` `unlink_live_block`.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        raise _io("unlink_live_block", Path(path), error) from error


def _base_name(id: CacheBlockId) -> str:
    process, counter = _namespaces.get(os.getpid()) or _new_namespace()
    representation = _REPRESENTATIONS[id.representation]
    rank = rank_directory_name(id.rank or CacheRankIdentity())
    return (
        f"live-{process}-w{next(counter):016x}-s{id.session_id:016x}-layer-{id.global_layer:05}"
        f"-{representation}-{rank}-{id.start}-{id.end}"
    )


def _new_namespace() -> tuple[str, Iterator[int]]:
    """Threads that come at once agree on one: setdefault is atomic."""
    pid = os.getpid()
    made = f"p{pid:08x}-t{time.time_ns():032x}", itertools.count(1)
    return _namespaces.setdefault(pid, made)


def _io(action: str, path: Path, error: OSError) -> LiveCachePublicationError.Io:
    return LiveCachePublicationError.Io(action, path, error)


def _unlink_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
