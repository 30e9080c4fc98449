"""A shard's header against its manifest entry, and the spellings of types (persistence 6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
from msgspec.structs import replace

from shmcache import PromptCacheBlock, PromptCachePersistenceError, PromptCacheStateTensor
from shmcache.prompt.dtypes import DTYPES
from shmcache.prompt.header import read_shard_header
from shmcache.prompt.shard import open_shard
from shmcache.prompt.shard_checks import check_shard
from tests.policy.samples import hybrid, minimal
from tests.prompt.caches import MINI_TEXT, Header, mini_shard, shard_bytes

Error = PromptCachePersistenceError
BLOCK = minimal().blocks[0]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "shard.safetensors"


def check(path: Path, entry: PromptCacheBlock | PromptCacheStateTensor) -> None:
    with open_shard(path) as descriptor:
        check_shard(path, read_shard_header(descriptor, path), entry)


# 6.1 and 6.2 --------------------------------------------------------------------------------------


def two(first: list[Any], second: list[Any], data: int, names: str = "keys values") -> bytes:
    """A file of two arrays, each [dtype, shape, begin, end]."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, (dtype, shape, begin, end) in zip(names.split(), (first, second), strict=True)
    }
    return shard_bytes(header, bytes(data))


def block(first: list[int], second: list[int], dtype: str, size: int) -> PromptCacheBlock:
    return replace(
        BLOCK,
        first_shape=tuple(first),
        second_shape=tuple(second),
        first_dtype=dtype,
        second_dtype=dtype,
        logical_bytes=size,
    )


PAYLOAD = mini_shard()[144:]
PAIR = [1, 1, 3, 2]
HUGE = 2**31
BLOCK_ROWS: dict[str, tuple[bytes, PromptCacheBlock, str]] = {
    "as it is": (mini_shard(), BLOCK, ""),
    "one byte appended": (mini_shard() + b"x", BLOCK, "file_boundary"),
    "last byte cut": (mini_shard()[:-1], BLOCK, "file_boundary"),
    "payload byte flipped": (mini_shard()[:-1] + b"\xff", BLOCK, ""),
    "values renamed": (
        shard_bytes(MINI_TEXT.replace(b"values", b"vals"), PAYLOAD),
        BLOCK,
        "array_missing",
    ),
    "keys renamed": (
        shard_bytes(MINI_TEXT.replace(b"keys", b"kees"), PAYLOAD),
        BLOCK,
        "array_missing",
    ),
    "third array": (
        shard_bytes(
            MINI_TEXT[:-1] + b',"extra":{"dtype":"U8","shape":[0],"data_offsets":[48,48]}}', PAYLOAD
        ),
        BLOCK,
        "array_count",
    ),
    "one array": (
        shard_bytes(MINI_TEXT.partition(b',"values"')[0] + b"}", PAYLOAD[:24]),
        BLOCK,
        "array_count",
    ),
    "no array (V1, O13)": (shard_bytes(b"{}", PAYLOAD), BLOCK, "array_count"),
    "entry dtypes Float16": (
        mini_shard(),
        replace(BLOCK, first_dtype="Float16", second_dtype="Float16"),
        "array_mismatch",
    ),
    "entry logical_bytes 47": (mini_shard(), replace(BLOCK, logical_bytes=47), "byte_count"),
    "metadata": (
        shard_bytes(b'{"__metadata__":{"a":"b"},' + MINI_TEXT[1:], PAYLOAD),
        BLOCK,
        "",
    ),
    "second shape differs": (
        two(["F32", PAIR, 0, 24], ["F32", [1, 1, 2, 3], 24, 48], 48),
        BLOCK,
        "array_mismatch",
    ),
    "dimension above i32 before mismatch": (
        two(["F32", [HUGE], 0, 24], ["F32", PAIR, 24, 48], 48),
        BLOCK,
        "array_dimension",
    ),
    "missing second before dimension of first": (
        two(["F32", [HUGE], 0, 24], ["F32", PAIR, 24, 48], 48, "keys vals"),
        BLOCK,
        "array_dimension",
    ),
    "other code is its own name": (
        two(["F8_E4M3", [4], 0, 4], ["F8_E4M3", [2], 4, 6], 6),
        block([4], [2], "F8_E4M3", 6),
        "",
    ),
    "X2": (two(["F4", [4], 0, 2], ["F4", [2], 2, 3], 3), block([4], [2], "F4", 3), ""),
    "X1": (two(["F4", [3], 0, 2], ["F4", [2], 2, 3], 3), block([3], [2], "F4", 3), "offsets"),
    "O5": (two(["U8", [4], 0, 4], ["U8", [4], 8, 12], 12), block([4], [4], "Uint8", 8), "offsets"),
    "O6": (two(["U8", [8], 0, 8], ["U8", [8], 4, 12], 12), block([8], [8], "Uint8", 16), "offsets"),
    "O6b": (
        two(["U8", [16], 0, 16], ["U8", [16], 0, 16], 16),
        block([16], [16], "Uint8", 32),
        "offsets",
    ),
    "V16b": (
        two(["U8", [16], 0, 16], ["U8", [0], 4, 4], 16),
        block([16], [0], "Uint8", 16),
        "offsets",
    ),
    "V8": (two(["U8", [8], 8, 16], ["U8", [8], 0, 8], 16), block([8], [8], "Uint8", 16), ""),
    "begin after end counts as 0": (
        two(["U8", [8], 8, 0], ["U8", [8], 0, 8], 8),
        block([8], [8], "Uint8", 8),
        "offsets",
    ),
    "ranges swapped in size": (
        two(["U8", [4], 0, 8], ["U8", [8], 8, 12], 12),
        block([4], [8], "Uint8", 12),
        "offsets",
    ),
}


@pytest.mark.parametrize("row", BLOCK_ROWS)
def test_6_1_block_shards(shard: Path, row: str) -> None:
    content, entry, code = BLOCK_ROWS[row]
    shard.write_bytes(content)
    if not code:
        check(shard, entry)
        return
    with pytest.raises(PromptCachePersistenceError.MalformedShard) as caught:
        check(shard, entry)
    assert caught.value == Error.MalformedShard(shard, code)
    assert caught.value.message


STATE = replace(
    hybrid().state_tensors[3], shape=(2, 2), dtype="Float32", logical_bytes=16, array="state"
)
WRAP = 2**64


def state(
    dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16), data: int = 16
) -> tuple[bytes, PromptCacheStateTensor]:
    header: Header = {"state": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    return shard_bytes(header, bytes(data)), STATE


def agreeing(content: bytes, shape: tuple[int, ...], dtype: str, size: int) -> Any:
    return content, replace(STATE, shape=shape, dtype=dtype, logical_bytes=size)


STATE_ROWS: dict[str, tuple[tuple[bytes, PromptCacheStateTensor], str]] = {
    "good": (state(), ""),
    "named otherwise": (
        (
            shard_bytes(
                {"stat": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(16)
            ),
            STATE,
        ),
        "array_missing",
    ),
    "V1": ((shard_bytes(b"{}"), STATE), "array_count"),
    "V2": ((shard_bytes(b'{"__metadata__":{"k":"v"}}'), STATE), "array_count"),
    "O13": ((shard_bytes(b"{}", bytes(16)), STATE), "array_count"),
    "S5": (state(shape=[2, WRAP - 2]), "array_dimension"),
    "S5b": (state(shape=[2, 2**63 - 1]), "array_dimension"),
    "S5c": (state("U8", [2**32, 2**32], [2**40, 2**41]), "array_dimension"),
    "S5d": (state("U8", [2**32, 2**32], [0, 0], 0), "array_dimension"),
    "S6": (state(shape=[WRAP]), "array_dimension"),
    "S9": (state(shape=[0, 2**63], offsets=[0, 0], data=0), "array_dimension"),
    "S9b": (state(shape=[2**33, 2**33, 0], offsets=[0, 0], data=0), "array_dimension"),
    "S10": (state("U8", [1] * 10000, [0, 1], 1), "array_mismatch"),
    "dimension at the limit": (state(shape=[2**31 - 1]), "array_mismatch"),
    "O1": (state(offsets=[0, 4], data=4), "array_mismatch"),
    "O2": (state(shape=[1]), "array_mismatch"),
    "O3": (state(offsets=[16, 0]), "array_mismatch"),
    "O4": (state(offsets=[16, 32], data=32), "offsets"),
    "O7": (state("U8", [2**20], [0, 2**20]), "array_mismatch"),
    "O7 agreed": (
        agreeing(state("U8", [2**20], [0, 2**20])[0], (2**20,), "Uint8", 2**20),
        "file_boundary",
    ),
    "O7b": (state(offsets=[2**40, 2**40 + 16]), "file_boundary"),
    "O7c": (state(offsets=[WRAP - 16, WRAP]), "file_boundary"),
    "O7c below": (state(offsets=[WRAP - 32, WRAP - 16]), "file_boundary"),
    "O11": ((state()[0] + b"polyglot", STATE), "file_boundary"),
    "O12": ((state()[0][:-2], STATE), "file_boundary"),
    "O12 all": ((state()[0][:-16], STATE), "file_boundary"),
    "O14": (state(offsets=[69, 85]), "file_boundary"),
    "X1": (state("F4", [3], [0, 2], 2), "array_mismatch"),
    "dtype": (state("I32"), "array_mismatch"),
    "V6": (agreeing(state("F32", [], [0, 4], 4)[0], (), "Float32", 4), ""),
    "V7": (agreeing(state("F32", [2, 0], [0, 0], 0)[0], (2, 0), "Float32", 0), ""),
    "bytes disagree with shape": (
        agreeing(state(offsets=[0, 8], data=8)[0], (2, 2), "Float32", 8),
        "offsets",
    ),
}


@pytest.mark.parametrize("row", STATE_ROWS)
def test_6_2_state_shards(shard: Path, row: str) -> None:
    (content, entry), code = STATE_ROWS[row]
    shard.write_bytes(content)
    if not code:
        check(shard, entry)
        return
    with pytest.raises(PromptCachePersistenceError.MalformedShard) as caught:
        check(shard, entry)
    assert caught.value.code == code


# 6.3 ----------------------------------------------------------------------------------------------

NAMES = {
    "BOOL": ("Bool", 1, "bool"),
    "U8": ("Uint8", 1, "uint8"),
    "U16": ("Uint16", 2, "uint16"),
    "U32": ("Uint32", 4, "uint32"),
    "U64": ("Uint64", 8, "uint64"),
    "I8": ("Int8", 1, "int8"),
    "I16": ("Int16", 2, "int16"),
    "I32": ("Int32", 4, "int32"),
    "I64": ("Int64", 8, "int64"),
    "F16": ("Float16", 2, "float16"),
    "BF16": ("Bfloat16", 2, "bfloat16"),
    "F32": ("Float32", 4, "float32"),
    "F64": ("Float64", 8, "float64"),
}


def test_6_3_names_and_sizes() -> None:
    for code, (name, item_bytes, numpy) in NAMES.items():
        dtype = DTYPES[code]
        assert (dtype.name, dtype.width_bits) == (name, item_bytes * 8)
        assert dtype.numpy is not None
        assert dtype.numpy.name == numpy


def test_6_3_every_other_code_is_its_own_name() -> None:
    assert {code for code, dtype in DTYPES.items() if dtype.name == code} == {*DTYPES} - {*NAMES}
    for code, dtype in DTYPES.items():
        size = dtype.width_bits  # bytes of eight elements
        header: Header = {"a": {"dtype": code, "shape": [8], "data_offsets": [0, size]}}
        content = shard_bytes(header, bytes(size))
        assert safetensors.deserialize(content)  # type: ignore[no-untyped-call]
