"""Does a shard's header say what the manifest says? Decided from the header and the file's size.

Why: the manifest is checked as a whole before any file is opened; here each file is held against
its entry, so that a consumer may lay an array over the payload without another look.

Contract: every failure is `PromptCachePersistenceError.MalformedShard` with a code, the first one
wins. The payload is not read: only its hash can tell whether it is the right one.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from shmcache.bounds import I32_MAX
from shmcache.errors import PromptCachePersistenceError
from shmcache.policy.manifest import PromptCacheBlock, PromptCacheStateTensor
from shmcache.prompt.dtypes import DTYPES, array_bytes
from shmcache.prompt.header import ShardArray, ShardHeader

_STATE = "state"


def check_shard(
    path: Path, header: ShardHeader, entry: PromptCacheBlock | PromptCacheStateTensor
) -> None:
    """Check the shard of a block or of a state tensor.

    Errors: `PromptCachePersistenceError.MalformedShard` `array_count`, `array_missing`,
    `array_dimension`, `array_mismatch`, `byte_count`, `file_boundary`, `offsets`.
    """
    if isinstance(entry, PromptCacheBlock):
        _check_block(path, header, entry)
    else:
        _check_state(path, header, entry)
    if header.payload_start + max(array.end for array in header.arrays.values()) != (
        header.file_bytes
    ):
        _malformed(path, "file_boundary", f"a file of {header.file_bytes} bytes")
    if not _tile(header):
        _malformed(path, "offsets", "they do not tile the payload, or do not fit the shapes")


def _check_block(path: Path, header: ShardHeader, block: PromptCacheBlock) -> None:
    _check_count(path, header, 2)
    total = 0
    for name, shape, dtype in (
        (block.first_array, block.first_shape, block.first_dtype),
        (block.second_array, block.second_shape, block.second_dtype),
    ):
        array = _present(path, header, name)
        if array.shape != shape or DTYPES[array.dtype].name != dtype:
            _malformed(path, "array_mismatch", f"{name} is {array.dtype}{list(array.shape)}")
        total += _span(array)
    if total != block.logical_bytes:
        _malformed(path, "byte_count", f"{total} bytes, not {block.logical_bytes}")


def _check_state(path: Path, header: ShardHeader, tensor: PromptCacheStateTensor) -> None:
    _check_count(path, header, 1)
    array = _present(path, header, _STATE)
    found = array.shape, DTYPES[array.dtype].name, _span(array)
    if found != (tensor.shape, tensor.dtype, tensor.logical_bytes):
        _malformed(path, "array_mismatch", f"{_STATE} is {array.dtype}{list(array.shape)}")


def _check_count(path: Path, header: ShardHeader, count: int) -> None:
    if len(header.arrays) != count:
        _malformed(path, "array_count", f"{len(header.arrays)} arrays, not {count}")


def _present(path: Path, header: ShardHeader, name: str) -> ShardArray:
    """The array of this name, whose dimensions are ones."""
    array = header.arrays.get(name)
    if array is None:
        _malformed(path, "array_missing", f"no array {name!r}")
    if any(size > I32_MAX for size in array.shape):
        _malformed(path, "array_dimension", f"a dimension of {name} is above {I32_MAX}")
    return array


def _span(array: ShardArray) -> int:
    return max(0, array.end - array.begin)


def _tile(header: ShardHeader) -> bool:
    """Whether the arrays fill the payload without gap or overlap, each as long as its shape."""
    position = 0
    for array in sorted(header.arrays.values(), key=lambda array: (array.begin, array.end)):
        size = array_bytes(DTYPES[array.dtype], array.shape)
        if array.begin != position or size != array.end - array.begin:
            return False
        position = array.end
    return True


def _malformed(path: Path, code: str, message: str) -> NoReturn:
    raise PromptCachePersistenceError.MalformedShard(path, code, message)
