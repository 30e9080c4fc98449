"""What can go wrong with prompt caches and live blocks as files.

Contract: `action` is a slug (docs/persistence.md lists them), `source` what the system or a decoder
said; `Io` compares by action, path, and the type and errno of the source.
"""

from __future__ import annotations

import errno
from dataclasses import field
from pathlib import Path
from typing import Final, TypeAlias

from shmcache.errors.base import ContractError, variant
from shmcache.errors.prompt import PromptCacheError

_NOT_ON_DISK: Final = "it is a miss: compute the prefix again and publish it"
_FULL: Final = "free disk space; what was published before is untouched"
_ERRNO_HINTS: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: f"{_FULL}, or raise the quota",
    errno.EIO: "the disk failed: write again from memory, what was written may be lost",
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "check the modes of the file and of the directories above it",
    errno.EPERM: "check the modes, and that the file system has hard links",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def _hint(source: Exception) -> str:
    return _ERRNO_HINTS.get(getattr(source, "errno", None) or 0, "")


class PromptCachePersistenceError(ContractError):
    """A prompt cache could not be published, found or trusted."""

    PromptCache: TypeAlias = "_PersistencePromptCache"
    Io: TypeAlias = "_PersistenceIo"
    ManifestJson: TypeAlias = "_PersistenceManifestJson"
    MalformedStorage: TypeAlias = "_PersistenceMalformedStorage"
    UnsafeShardPath: TypeAlias = "_PersistenceUnsafeShardPath"
    MissingShard: TypeAlias = "_PersistenceMissingShard"
    MalformedShard: TypeAlias = "_PersistenceMalformedShard"
    InvalidPromptCachePath: TypeAlias = "_PersistenceInvalidPromptCachePath"
    PromptCacheExists: TypeAlias = "_PersistencePromptCacheExists"
    InvalidReversiblePublication: TypeAlias = "_PersistenceInvalidReversiblePublication"


@variant("{source}", cause="source")
class _PersistencePromptCache(PromptCachePersistenceError):
    """The content of a manifest is invalid."""

    source: PromptCacheError


@variant("{action} failed for {path}: {source}", cause="source")
class _PersistenceIo(PromptCachePersistenceError):
    """A file operation failed; for a short read `source` is an EOFError."""

    action: str
    path: Path
    source: Exception

    @property
    def hint(self) -> str:
        return _hint(self.source)


@variant("the manifest is no JSON text of a manifest's shape: {source}", cause="source")
class _PersistenceManifestJson(PromptCachePersistenceError):
    source: Exception


@variant("the prompt cache's storage is malformed: {code}", hint=_NOT_ON_DISK)
class _PersistenceMalformedStorage(PromptCachePersistenceError):
    """The pointer, or what tells generations apart, is wrong."""

    code: str
    message: str = field(default="", compare=False)


@variant("the shard path {path!r} could leave the cache", hint="nothing behind it was opened")
class _PersistenceUnsafeShardPath(PromptCachePersistenceError):
    """`path` is relative, as the manifest has it."""

    path: str


@variant("the shard {path} is no regular file", hint=_NOT_ON_DISK)
class _PersistenceMissingShard(PromptCachePersistenceError):
    path: Path


@variant("the shard {path} is malformed: {code}", hint=_NOT_ON_DISK)
class _PersistenceMalformedShard(PromptCachePersistenceError):
    path: Path
    code: str
    message: str = field(default="", compare=False)


@variant(
    "nothing can be published at {path}",
    hint="name a directory to be made, or one that a cache may be replaced in",
)
class _PersistenceInvalidPromptCachePath(PromptCachePersistenceError):
    path: Path


@variant("{path} exists", hint="replace_existing=True replaces it; or choose another name")
class _PersistencePromptCacheExists(PromptCachePersistenceError):
    path: Path


@variant(
    "{operation} is not possible for a reversible publication that is {state}",
    hint="the order is: publish once, then commit or rollback",
)
class _PersistenceInvalidReversiblePublication(PromptCachePersistenceError):
    """`state` is `reserved`, `published` or `ended`."""

    operation: str
    state: str


class LiveCachePublicationError(ContractError):
    """A block of a running session could not be given its file name."""

    Io: TypeAlias = "_LivePublicationIo"


@variant("{action} failed for {path}: {source}", cause="source")
class _LivePublicationIo(LiveCachePublicationError):
    """`action` is `link_live_block`, `unlink_live_staging` or `unlink_live_block`."""

    action: str
    path: Path
    source: Exception

    @property
    def hint(self) -> str:
        return _hint(self.source)
