"""The header of a safetensors file, read strictly and bounded, before its payload is touched.

Why: the header of a file on disk is input. Parsers disagree about it (duplicate names, metadata,
numbers that are no integers) and some allocate what it claims; a file that two readers understand
differently must not pass for a block.

Contract: what is accepted here the safetensors library loads, and nothing that it refuses is
accepted once `shard_checks` has passed too. The text begins with `{`; only JSON's white space
follows the object. Unknown fields of an entry are ignored, names are never used as paths.

Source: the format's text and the parser of its library (huggingface/safetensors, `tensor.rs`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, TypeGuard

from shmcache.errors import PromptCachePersistenceError
from shmcache.policy.json_text import read_json
from shmcache.prompt.dtypes import DTYPES
from shmcache.prompt.files import read_up_to, step

MAX_PROMPT_CACHE_SHARD_HEADER_BYTES: Final = 1 << 20
"""The largest header of a shard, as its length field says it."""

METADATA: Final = "__metadata__"

_LENGTH_BYTES: Final = 8
_FIRST_READ_BYTES: Final = 1024  # the length and, of a cache's shard, the whole header
_MINUS_ZERO: Final = re.compile(rb"-0(?![.\deE])")
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


class ShardArray(NamedTuple):
    """One array of a shard: `begin` and `end` count bytes of the payload."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class ShardHeader(NamedTuple):
    """What the head of an open file says, and how long that file is."""

    arrays: Mapping[str, ShardArray]
    payload_start: int
    file_bytes: int


def read_shard_header(descriptor: int, path: Path) -> ShardHeader:
    """The header of an open shard; `path` is for errors.

    Errors: `PromptCachePersistenceError.Io` `stat_shard`; `MissingShard` for no regular file; `Io`
    `read_header_length`; `MalformedShard` `header_bound`, `header_truncated`; `Io` `read_header`;
    `MalformedShard` `header_json`; in this order.

    Cost: one read for a header up to 1 KiB; never more memory than the bound.
    """
    with step("stat_shard", path):
        status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise PromptCachePersistenceError.MissingShard(path)
    with step("read_header_length", path):
        start = read_up_to(descriptor, _FIRST_READ_BYTES)
    if len(start) < _LENGTH_BYTES:
        short = EOFError(f"{len(start)} of {_LENGTH_BYTES} bytes")
        raise PromptCachePersistenceError.Io("read_header_length", path, short) from short
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if not 0 < length <= MAX_PROMPT_CACHE_SHARD_HEADER_BYTES:
        _malformed(path, "header_bound", f"a header of {length} bytes")
    payload_start = _LENGTH_BYTES + length
    if payload_start > status.st_size:
        _malformed(path, "header_truncated", f"{length} bytes in a file of {status.st_size}")
    if payload_start > len(start):
        with step("read_header", path):
            start = read_up_to(descriptor, payload_start)
        if len(start) < payload_start:
            short = EOFError(f"{len(start)} of {payload_start} bytes")
            raise PromptCachePersistenceError.Io("read_header", path, short) from short
    arrays = _arrays(start[_LENGTH_BYTES:payload_start], path)
    return ShardHeader(arrays, payload_start, status.st_size)


def _arrays(text: bytes, path: Path) -> Mapping[str, ShardArray]:
    try:
        return _parse_again(text) if len(text) <= _FIRST_READ_BYTES else _parse(text)
    except ValueError as error:
        message = str(error)
        raise PromptCachePersistenceError.MalformedShard(path, "header_json", message) from None


def _parse(text: bytes) -> Mapping[str, ShardArray]:
    """The arrays that the JSON of a header names; where they lie is not judged.

    Errors: ValueError; msgspec's is one.
    """
    if not text.startswith(b"{"):
        raise ValueError("no object")
    document = read_json(text)
    # JSON's minus zero is a float to the library and the integer 0 to Python.
    if b"-0" in text and _MINUS_ZERO.search(_STRING.sub(b"", text)):
        raise ValueError("minus zero")
    if METADATA in document:
        metadata = document.pop(METADATA)
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise ValueError("metadata that is no map of texts")
    return MappingProxyType({name: _array(name, entry) for name, entry in document.items()})


# The shards of a cache have the same few headers, thousands of times.
_parse_again: Final = lru_cache(maxsize=256)(_parse)


def _array(name: str, entry: Any) -> ShardArray:
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name!r} is no object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(dtype, str)
        and dtype in DTYPES
        and _are_counts(shape)
        and _are_counts(offsets)
        and len(offsets) == 2
    ):
        raise ValueError(f"the entry of {name!r} is no array's")
    return ShardArray(dtype, tuple(shape), *offsets)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _malformed(path: Path, code: str, message: str) -> NoReturn:
    raise PromptCachePersistenceError.MalformedShard(path, code, message)
