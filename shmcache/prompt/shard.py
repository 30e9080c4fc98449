"""Write arrays into one file and read them back, hashed on the way.

Why: the hash of the payload is what a manifest promises of a file. It is computed over the very
bytes that are written, and again over the very bytes that are handed out.

Contract: the payload is everything after the header, of a safetensors file. Reading gives views on
one buffer, in the caller's memory if it brings some; until the hash agreed, the buffer's content
means nothing. Nothing is mapped: a file that is cut meanwhile must be an error, not a SIGBUS.

Units: sizes are bytes of payload, without the header.

Written here and not by the library, whose `serialize` copies the payload, and whose
`serialize_file` leaves a nameless temporary file when it is killed and tells no errno. The files
are byte for byte the library's.

Cost: no copy of the payload; both ways are as fast as the hash lets them (docs/performance.md).
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from shmcache.errors import PromptCachePersistenceError
from shmcache.prompt.dtypes import DTYPES, LAYOUT_ORDER, dtype_of
from shmcache.prompt.files import READ_FLAGS, StrPath, close, created, step, sync_file, write_all
from shmcache.prompt.header import (
    MAX_PROMPT_CACHE_SHARD_HEADER_BYTES,
    METADATA,
    ShardArray,
    ShardHeader,
    read_shard_header,
)

Array: TypeAlias = np.ndarray[Any, Any]

_CHUNK_BYTES: Final = 1 << 18  # stays in the processor's cache between the copy and the hash
_ALIGNMENT_BYTES: Final = 64
_LENGTH_BYTES: Final = 8


class StoredShard(NamedTuple):
    """A shard that was written: where, which arrays, and the hash of its payload."""

    path: Path
    arrays: dict[str, ShardArray]
    payload_bytes: int
    payload_sha256: str


def write_shard(path: StrPath, arrays: Mapping[str, Array], *, durable: bool) -> StoredShard:
    """Make a new file of these arrays; `durable` waits until the disk has its content.

    Errors: `PromptCachePersistenceError.Io` `create_shard` (it exists), `write_shard`, `sync_file`;
    `MalformedShard` `header_bound` for names that no reader would take; TypeError for elements that
    a shard cannot hold. What was begun stays for the owner of the directory to discard.
    """
    target = Path(path)
    if METADATA in arrays:
        raise ValueError(f"an array cannot be called {METADATA}")
    kept = {name: _contiguous(array) for name, array in arrays.items()}
    placed = _placed(kept)
    head = _head(placed)
    if len(head) > _LENGTH_BYTES + MAX_PROMPT_CACHE_SHARD_HEADER_BYTES:
        raise PromptCachePersistenceError.MalformedShard(target, "header_bound")
    digest = hashlib.sha256()
    with created("create_shard", target, exclusive=True) as descriptor:
        with step("write_shard", target):
            write_all(descriptor, head)
            for name in placed:
                for chunk in _chunks(kept[name].reshape(-1).view(np.uint8).data):
                    write_all(descriptor, chunk)
                    digest.update(chunk)
        if durable:
            sync_file(descriptor, target)
    payload_bytes = sum(array.nbytes for array in kept.values())
    return StoredShard(target, placed, payload_bytes, digest.hexdigest())


def read_shard(
    path: StrPath, arrays: Mapping[str, ShardArray], payload_sha256: str, into: Any = None
) -> dict[str, Array]:
    """The arrays of a shard that has exactly this header and this hash.

    `into` is a writable buffer of at least the payload's size, C-contiguous.

    Errors: as `open_shard` and `read_shard_header`; `MalformedShard` `array_mismatch`,
    `file_boundary`, `payload_digest`. After any of them the content of `into` means nothing.
    """
    target = Path(path)
    with open_shard(target) as descriptor:
        header = read_shard_header(descriptor, target)
        if header.arrays != dict(arrays):
            raise PromptCachePersistenceError.MalformedShard(target, "array_mismatch")
        return read_payload(descriptor, target, header, payload_sha256, into)


def read_shard_into(
    path: StrPath,
    arrays: Mapping[str, ShardArray],
    payload_sha256: str,
    targets: Mapping[str, Array],
) -> None:
    """Fill arrays that lie anywhere in memory: those of the shard, by name.

    Errors: as `read_shard`; `MalformedShard` `offsets` for arrays that do not follow each other;
    ValueError for other names, and for a target that is not contiguous, or has another size or
    element type. After any of them the content of the targets means nothing.
    """
    target = Path(path)
    kept = dict(sorted(arrays.items(), key=lambda item: item[1].begin))
    if targets.keys() != kept.keys():
        raise ValueError(f"the arrays are {list(kept)}, not {list(targets)}")
    pieces = [_memory_for(array, targets[name]) for name, array in kept.items()]
    with open_shard(target) as descriptor:
        header = read_shard_header(descriptor, target)
        if header.arrays != kept:
            raise PromptCachePersistenceError.MalformedShard(target, "array_mismatch")
        end = 0
        for array in kept.values():
            if array.begin != end:
                raise PromptCachePersistenceError.MalformedShard(target, "offsets")
            end = array.end
        if end != header.file_bytes - header.payload_start:
            raise PromptCachePersistenceError.MalformedShard(target, "file_boundary")
        _read_hashed(descriptor, target, header, payload_sha256, pieces)


def finalize_prompt_cache_shard(path: StrPath) -> str:
    """Make a written shard durable; the hash of its payload.

    Errors: `PromptCachePersistenceError.Io` `open_shard`, `sync_file`; those of
    `hash_prompt_cache_shard_payload`.
    """
    target = Path(path)
    with open_shard(target) as descriptor:
        sync_file(descriptor, target)
        payload_start = read_shard_header(descriptor, target).payload_start
        return hash_payload(descriptor, target, payload_start)


def hash_prompt_cache_shard_payload(path: StrPath) -> str:
    """SHA-256 of everything after the header, as 64 hex digits.

    Errors: `PromptCachePersistenceError.Io` `open_shard`, `hash_payload` and those of
    `read_shard_header`.
    """
    target = Path(path)
    with open_shard(target) as descriptor:
        payload_start = read_shard_header(descriptor, target).payload_start
        return hash_payload(descriptor, target, payload_start)


@contextmanager
def open_shard(path: Path) -> Iterator[int]:
    """A descriptor of the file itself, never of what a link in its place names."""
    with step("open_shard", path):
        descriptor = os.open(path, READ_FLAGS)
    try:
        yield descriptor
    finally:
        close(descriptor)


# Payload ------------------------------------------------------------------------------------------


def read_payload(
    descriptor: int, path: Path, header: ShardHeader, payload_sha256: str, into: Any = None
) -> dict[str, Array]:
    """Views of the arrays of a shard whose header was checked; see `read_shard`."""
    size = header.file_bytes - header.payload_start
    ends = [array.end for array in header.arrays.values()]
    if max(ends, default=0) != size:
        raise PromptCachePersistenceError.MalformedShard(path, "file_boundary")
    buffer = _buffer(into, size)
    _read_hashed(descriptor, path, header, payload_sha256, [buffer])
    return {name: view(buffer, array) for name, array in header.arrays.items()}


def _read_hashed(
    descriptor: int, path: Path, header: ShardHeader, payload_sha256: str, pieces: list[memoryview]
) -> None:
    """Fill the pieces, one behind the other, from the whole payload."""
    digest = hashlib.sha256()
    position = header.payload_start
    for chunk in itertools.chain.from_iterable(map(_chunks, pieces)):
        rest = chunk
        while rest:
            with step("read_payload", path):
                read = os.preadv(descriptor, [rest], position)
            if not read:
                message = f"it ends at {position} of {header.file_bytes} bytes"
                raise PromptCachePersistenceError.MalformedShard(path, "file_boundary", message)
            rest, position = rest[read:], position + read
        digest.update(chunk)
    if digest.hexdigest() != payload_sha256:
        raise PromptCachePersistenceError.MalformedShard(path, "payload_digest")


def _memory_for(array: ShardArray, target: Array) -> memoryview:
    """The memory of a target, which may have another shape."""
    fits = (
        target.flags.c_contiguous
        and target.flags.writeable
        and target.dtype == DTYPES[array.dtype].numpy
        and target.nbytes == array.end - array.begin
    )
    if not fits:
        raise ValueError(f"a contiguous {array.dtype} array of {array.shape} is needed")
    return target.reshape(-1).view(np.uint8).data


def view(buffer: memoryview, array: ShardArray) -> Array:
    """The array on the payload in `buffer`; one of elements unknown to numpy as its bytes."""
    kind = DTYPES[array.dtype].numpy
    if kind is None:
        return np.frombuffer(buffer[array.begin : array.end], np.uint8)
    return np.ndarray(array.shape, kind, buffer, array.begin)


def hash_payload(descriptor: int, path: Path, position: int) -> str:
    """SHA-256 of everything from `position` on."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while True:
        with step("hash_payload", path):
            read = os.preadv(descriptor, [buffer], position)
        if not read:
            return digest.hexdigest()
        digest.update(buffer[:read])
        position += read


def _buffer(into: Any, size: int) -> memoryview:
    """Room for `size` bytes: the caller's, or new."""
    if into is None:
        made = np.empty(size + _ALIGNMENT_BYTES, np.uint8)  # not zeroed: it is written once
        start = -made.ctypes.data % _ALIGNMENT_BYTES
        return made[start : start + size].data
    given = memoryview(into).cast("B")
    if given.readonly or given.nbytes < size:
        raise ValueError(f"a writable buffer of {size} bytes is needed, not of {given.nbytes}")
    return given[:size]


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


# Encoding -----------------------------------------------------------------------------------------


def _placed(kept: Mapping[str, Array]) -> dict[str, ShardArray]:
    """Where each array lies: wide elements first, then by name, without gaps."""
    dtypes = {name: dtype_of(array) for name, array in kept.items()}
    placed, begin = {}, 0
    for name in sorted(kept, key=lambda name: (LAYOUT_ORDER[dtypes[name].code], name)):
        end = begin + kept[name].nbytes
        placed[name] = ShardArray(dtypes[name].code, kept[name].shape, begin, end)
        begin = end
    return placed


def _head(placed: Mapping[str, ShardArray]) -> bytes:
    """The length field and the header, padded as the payload's elements need it."""
    entries = {
        name: {
            "dtype": array.dtype,
            "shape": array.shape,
            "data_offsets": (array.begin, array.end),
        }
        for name, array in placed.items()
    }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _contiguous(array: Array) -> Array:
    """Its elements in C order and little-endian: the raw memory of a view is not its content."""
    kind = dtype_of(array).numpy
    return (
        array
        if array.dtype == kind and array.flags.c_contiguous
        else np.array(array, kind, order="C")
    )
