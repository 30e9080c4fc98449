"""Open a prompt cache: find its active generation, check it, hand out verified arrays.

Why: a reader takes no lock that a writer would wait for, and must never see half a cache or a wrong
byte. It resolves the pointer once and works in that generation for good.

Contract: `inspect_prompt_cache` and `validate_prompt_cache_manifest` read headers and sizes only.
`PromptCacheReader.read` compares the payload's hash before it returns a byte of it, and no payload
is read under a manifest that differs from the digest stored beside it.

Concurrency: a reader holds its generation; `prune` leaves it alone.

Cost: 10,000 shards are inspected in well under a second (docs/performance.md).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import msgspec

from shmcache.bounds import PROMPT_MANIFEST_BYTES_MAX, instance
from shmcache.errors import PromptCacheError, PromptCachePersistenceError
from shmcache.policy.json_text import read_json
from shmcache.policy.manifest import (
    PromptCacheBlock,
    PromptCacheManifest,
    PromptCacheStateTensor,
    require_schema_version,
)
from shmcache.prompt.files import READ_FLAGS, StrPath, close, open_directory, read_up_to, step
from shmcache.prompt.generations import hold_active
from shmcache.prompt.header import ShardHeader, read_shard_header
from shmcache.prompt.holds import DirectoryHold
from shmcache.prompt.paths import DIGEST_FILE, MANIFEST_FILE, open_beneath
from shmcache.prompt.shard import Array, hash_payload, read_payload
from shmcache.prompt.shard_checks import check_shard

PromptCacheEntry: TypeAlias = PromptCacheBlock | PromptCacheStateTensor

_DIGEST_BYTES_MAX: Final = 256


def inspect_prompt_cache(directory: StrPath) -> PromptCacheManifest:
    """The manifest of the active generation, once it and the headers of all shards were checked.

    Errors: those of `resolve_prompt_cache_root` and `validate_prompt_cache_manifest`;
    `PromptCachePersistenceError.Io` `open_manifest`, `read_manifest`; `MalformedStorage`
    `manifest_length`; `ManifestJson`; `PromptCache` for its content.
    """
    generation, hold = hold_active(Path(directory))
    try:
        manifest = decode_manifest(_read_manifest(generation, hold.descriptor))
        _validate(generation, hold.descriptor, manifest)
        return manifest
    finally:
        hold.close()


def validate_prompt_cache_manifest(directory: StrPath, manifest: PromptCacheManifest) -> None:
    """Check a manifest, and the shards it names in the directory of a generation.

    Errors: `PromptCachePersistenceError.PromptCache`, `UnsafeShardPath`, `MissingShard`,
    `MalformedShard`; `Io` of the steps of opening and reading a header.
    """
    instance(manifest, PromptCacheManifest, "manifest")
    path = Path(directory)
    _validate_content(manifest)
    entries = manifest_entries(manifest)
    try:
        descriptor = open_directory(path, follow=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not entries:
            return
        raise PromptCachePersistenceError.MissingShard(path / entries[0].shard) from error
    except OSError as error:
        raise PromptCachePersistenceError.Io("open_shard", path, error) from error
    try:
        for entry in entries:
            _check_entry(path, descriptor, entry)
    finally:
        close(descriptor)


class PromptCacheReader:
    """One generation of a prompt cache, held open; a context manager.

    Contract: `open` checks as `inspect_prompt_cache` does, and the manifest's digest, if the cache
    has one. `validate_compatibility` of the manifest is the caller's business, before any `read`.

    Concurrency: `read` may be called by any number of threads, `close` by one when they are done.

    Death: nothing is left; a generation is held by its open directory.
    """

    def __init__(self, path: Path, hold: DirectoryHold, manifest: PromptCacheManifest) -> None:
        self._path = path
        self._hold = hold
        self._manifest = manifest

    @classmethod
    def open(cls, directory: StrPath) -> Self:
        """Open the active generation of a destination.

        Errors: those of `inspect_prompt_cache`; `PromptCachePersistenceError.MalformedStorage`
        `manifest_digest`.
        """
        path, hold = hold_active(Path(directory))
        try:
            text = _read_manifest(path, hold.descriptor)
            manifest = decode_manifest(text)
            _compare_digest(path, hold.descriptor, text)
            _validate(path, hold.descriptor, manifest)
            return cls(path, hold, manifest)
        except BaseException:
            hold.close()
            raise

    @property
    def path(self) -> Path:
        """The directory of the generation."""
        return self._path

    @property
    def manifest(self) -> PromptCacheManifest:
        """What the cache holds."""
        return self._manifest

    def read(self, entry: PromptCacheEntry, into: Any = None) -> dict[str, Array]:
        """The arrays of a block or state tensor of the manifest, by name, as views on one buffer.

        `into` is a writable, contiguous buffer of at least `entry.logical_bytes`; without it memory
        is allocated. An array of elements unknown to numpy comes as its bytes.

        Errors: `PromptCachePersistenceError`, as in `open` for the shard; `MalformedShard`
        `payload_digest`. After any of them the content of `into` means nothing. RuntimeError after
        `close`.
        """
        with open_beneath(self._path, self._descriptor, entry.shard) as (shard, path):
            header = _checked_header(shard, path, entry)
            return read_payload(shard, path, header, entry.payload_sha256, into)

    def header(self, entry: PromptCacheEntry) -> tuple[Path, ShardHeader]:
        """Where an entry's file is, and its checked header, for who reads the payload later.

        Errors: as in `open` for the shard.
        """
        with open_beneath(self._path, self._descriptor, entry.shard) as (shard, path):
            return path, _checked_header(shard, path, entry)

    def verify(self, entry: PromptCacheEntry) -> None:
        """Compare the hash of an entry's payload, without keeping it.

        Errors: those of `read`.
        """
        with open_beneath(self._path, self._descriptor, entry.shard) as (shard, path):
            header = _checked_header(shard, path, entry)
            if hash_payload(shard, path, header.payload_start) != entry.payload_sha256:
                raise PromptCachePersistenceError.MalformedShard(path, "payload_digest")

    @property
    def _descriptor(self) -> int:
        if self._hold.closed:
            raise RuntimeError("this prompt cache has been closed")
        return self._hold.descriptor

    def close(self) -> None:
        """Let go of the generation. Idempotent; arrays that were read stay valid."""
        self._hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def verify_prompt_cache(
    directory: StrPath, on_progress: Callable[[int, int], object] | None = None
) -> PromptCacheManifest:
    """Read every byte of the active generation and compare all hashes; its manifest.

    `on_progress(done_bytes, total_bytes)` is called after each shard.

    Errors: those of `PromptCacheReader.open` and `verify`.
    """
    with PromptCacheReader.open(directory) as cache:
        entries = manifest_entries(cache.manifest)
        total, done = sum(entry.logical_bytes for entry in entries), 0
        for entry in entries:
            cache.verify(entry)
            done += entry.logical_bytes
            if on_progress:
                on_progress(done, total)
        return cache.manifest


# Manifest -----------------------------------------------------------------------------------------


def manifest_entries(manifest: PromptCacheManifest) -> tuple[PromptCacheEntry, ...]:
    """All that a cache stores, blocks first."""
    return (*manifest.blocks, *manifest.state_tensors)


def decode_manifest(text: bytes) -> PromptCacheManifest:
    """The manifest in the text of a file; its schema is looked at before its shape.

    Errors: `PromptCachePersistenceError.ManifestJson`, `PromptCache`.
    """
    try:
        document = read_json(text)
        require_schema_version(document)
        return PromptCacheManifest.from_document(document)
    except PromptCacheError as error:
        raise PromptCachePersistenceError.PromptCache(error) from error
    except msgspec.DecodeError as error:
        raise PromptCachePersistenceError.ManifestJson(error) from error


def digest_line(text: bytes) -> bytes:
    """What `sha256sum` writes about a manifest of this text."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST_FILE}\n".encode()


def _read_manifest(directory: Path, descriptor: int) -> bytes:
    path = directory / MANIFEST_FILE
    text = _read_file(descriptor, path, "manifest", PROMPT_MANIFEST_BYTES_MAX)
    if text is None:
        message = f"more than {PROMPT_MANIFEST_BYTES_MAX} bytes"
        raise PromptCachePersistenceError.MalformedStorage("manifest_length", message)
    return text


def _compare_digest(directory: Path, descriptor: int, text: bytes) -> None:
    """Caches of other writers have no digest; of ours only a person could remove it."""
    try:
        found = _read_file(descriptor, directory / DIGEST_FILE, "digest", _DIGEST_BYTES_MAX)
    except PromptCachePersistenceError.Io as error:
        if isinstance(error.source, FileNotFoundError):
            return
        raise
    if found != digest_line(text):
        message = f"{MANIFEST_FILE} is not what was published"
        raise PromptCachePersistenceError.MalformedStorage("manifest_digest", message)


def _read_file(directory: int, path: Path, what: str, size_bytes_max: int) -> bytes | None:
    """The content of a regular file of an open directory; None if it is longer than it may be."""
    with step(f"open_{what}", path):
        descriptor = os.open(path.name, READ_FLAGS, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            if status.st_size > size_bytes_max:
                return None
            with step(f"read_{what}", path):
                return read_up_to(descriptor, status.st_size)
        finally:
            close(descriptor)


# Shards -------------------------------------------------------------------------------------------


def _validate(directory: Path, descriptor: int, manifest: PromptCacheManifest) -> None:
    _validate_content(manifest)
    for entry in manifest_entries(manifest):
        _check_entry(directory, descriptor, entry)


def _validate_content(manifest: PromptCacheManifest) -> None:
    try:
        manifest.validate()
    except PromptCacheError as error:
        raise PromptCachePersistenceError.PromptCache(error) from error


def _check_entry(directory: Path, descriptor: int, entry: PromptCacheEntry) -> None:
    with open_beneath(directory, descriptor, entry.shard) as (shard, path):
        _checked_header(shard, path, entry)


def _checked_header(descriptor: int, path: Path, entry: PromptCacheEntry) -> ShardHeader:
    header = read_shard_header(descriptor, path)
    check_shard(path, header, entry)
    return header
