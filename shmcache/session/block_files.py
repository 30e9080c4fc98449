"""The bytes of a block as a file: written once, read back only if every byte is what was written.

Why: a file can be shortened, replaced or rot between two moments of one session, and a wrong byte
would be a wrong answer without an error. What a file must be (length, header, digest) is kept in
memory, so that nothing found in it is believed.

Contract: a live file is a safetensors shard with the arrays of one block, made by
`LiveCacheBlockPublication`; it is never replaced and not synced to the disk, because it dies with
the session. Shards of prompt caches are read the same way.

Death: see prompt/live.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np

from shmcache.policy.identity import CacheBlockId
from shmcache.prompt.live import LiveCacheBlockPublication
from shmcache.session.backend import BlockSpec, HostArray
from shmcache.session.records import ArrayPlace, BlockFile

_LENGTH_BYTES: Final = 8
_SKIP_BYTES: Final = 1 << 16
_CODES: Final = {
    np.dtype(kind): code
    for kind, code in (
        (np.bool_, "BOOL"),
        (np.uint8, "U8"),
        (np.uint16, "U16"),
        (np.uint32, "U32"),
        (np.uint64, "U64"),
        (np.int8, "I8"),
        (np.int16, "I16"),
        (np.int32, "I32"),
        (np.int64, "I64"),
        (np.float16, "F16"),
        (np.float32, "F32"),
        (np.float64, "F64"),
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
    )
}


def write_block(
    directory: Path, id: CacheBlockId, spec: BlockSpec, arrays: Sequence[HostArray]
) -> BlockFile:
    """Publish the block under a name of its own; a failure leaves nothing.

    Errors: OSError, `LiveCachePublicationError`; TypeError for an element type without a name.
    """
    places = _places(spec)
    header = _header(spec, places)
    views = [_bytes_of(array) for array in arrays]
    with LiveCacheBlockPublication.begin(directory, id) as publication:
        digest = hashlib.sha256()
        with _opened(publication.staging_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            _write_all(fd, [memoryview(header), *views])
        for view in views:
            digest.update(view)
        path = publication.commit()
    size = len(header) + places[-1].stop
    return BlockFile(path, len(header), places, size, digest.digest())


def read_block(file: BlockFile, arrays: Sequence[HostArray]) -> None:
    """Fill the arrays from the file.

    Errors: OSError; ValueError when the file is not what was written, the arrays then hold rubbish.
    """
    with _opened(file.path, os.O_RDONLY) as fd:
        if os.fstat(fd).st_size != file.file_bytes:
            raise ValueError(f"{file.path} has changed its size: it is not read")
        digest = hashlib.sha256()
        at = 0
        os.lseek(fd, file.payload_start, os.SEEK_SET)
        for place, array in sorted(zip(file.places, arrays, strict=True), key=lambda each: each[0]):
            _skip(fd, place.start - at, digest)
            view = _bytes_of(array)
            _read_all(fd, view, file.path)
            digest.update(view)
            at = place.stop
        _skip(fd, file.file_bytes - file.payload_start - at, digest)
    if digest.digest() != file.sha256:
        raise ValueError(f"{file.path} has changed its content: it is not used")


def _places(spec: BlockSpec) -> tuple[ArrayPlace, ...]:
    places, at = [], 0
    for array in spec.arrays:
        places.append(ArrayPlace(at, at + array.nbytes))
        at += array.nbytes
    return tuple(places)


def _header(spec: BlockSpec, places: Sequence[ArrayPlace]) -> bytes:
    """The length and the JSON text of a safetensors file, padded to 8 bytes."""
    entries = {}
    for array, place in zip(spec.arrays, places, strict=True):
        code = _CODES.get(array.dtype)
        if code is None:
            raise TypeError(f"{array.dtype} has no name in files")
        entries[array.name] = {"dtype": code, "shape": array.shape, "data_offsets": place}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _bytes_of(array: HostArray) -> memoryview:
    """The array's memory; host arrays are contiguous. Not every element type has a buffer."""
    return array.reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, views: list[memoryview]) -> None:
    for view in views:
        at = 0
        while at < len(view):
            at += os.write(fd, view[at:])


def _read_all(fd: int, view: memoryview, path: Path) -> None:
    at = 0
    while at < len(view):
        count = os.readv(fd, [view[at:]])
        if not count:
            raise ValueError(f"{path} ended while it was read")
        at += count


def _skip(fd: int, count: int, digest: hashlib._Hash) -> None:
    """Hash bytes that no array wants."""
    while count:
        chunk = os.read(fd, min(count, _SKIP_BYTES))
        if not chunk:
            return
        digest.update(chunk)
        count -= len(chunk)
