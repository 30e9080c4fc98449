"""Shards as they are written, hashed and held against a manifest (persistence 5 and 6)."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmcache import (
    PromptCacheBlock,
    PromptCachePersistenceError,
    PromptCacheStateTensor,
    finalize_prompt_cache_shard,
    hash_prompt_cache_shard_payload,
)
from shmcache.prompt.dtypes import DTYPES, dtype_of
from shmcache.prompt.header import MAX_PROMPT_CACHE_SHARD_HEADER_BYTES, read_shard_header
from shmcache.prompt.shard import open_shard, read_shard, write_shard
from shmcache.prompt.shard_checks import check_shard
from tests.policy.samples import hybrid, minimal
from tests.prompt.caches import MINI_HASH, MINI_TEXT, Header, counting, mini_shard, shard_bytes

Error = PromptCachePersistenceError
BLOCK = minimal().blocks[0]
WRITABLE = [code for code, dtype in DTYPES.items() if dtype.numpy is not None]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "shard.safetensors"


def check(path: Path, entry: PromptCacheBlock | PromptCacheStateTensor) -> None:
    with open_shard(path) as descriptor:
        check_shard(path, read_shard_header(descriptor, path), entry)


# Writing ------------------------------------------------------------------------------------------


def by_the_library(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    kept = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    made: bytes = safetensors.serialize(
        {
            name: safetensors.TensorSpec(
                dtype=array.dtype.name,
                shape=list(array.shape),
                data_ptr=array.ctypes.data,
                data_len=array.nbytes,
            )
            for name, array in kept.items()
        }
    )
    return made


@given(
    st.dictionaries(
        st.sampled_from(["keys", "values", "latent", "rotary_key", "state", "", "é\n"]),
        st.tuples(st.sampled_from(WRITABLE), st.lists(st.integers(0, 3), max_size=4)),
        max_size=5,
    )
)
def test_files_are_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    path.unlink(missing_ok=True)
    made = {}
    for name, (code, shape) in arrays.items():
        kind = DTYPES[code].numpy
        assert kind is not None
        size = int(np.prod(shape)) * kind.itemsize
        made[name] = np.frombuffer(bytes(range(size % 256)) + bytes(size - size % 256), kind)
        made[name] = made[name].reshape(shape)
    stored = write_shard(path, made, durable=False)
    content = path.read_bytes()
    assert content == by_the_library(made)
    start = 8 + int.from_bytes(content[:8], "little")
    assert stored.payload_bytes == len(content) - start
    assert stored.payload_sha256 == hashlib.sha256(content[start:]).hexdigest()
    back = read_shard(path, stored.arrays, stored.payload_sha256)
    assert {name: (array.dtype, array.shape) for name, array in back.items()} == {
        name: (array.dtype, array.shape) for name, array in made.items()
    }
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in made.items()
    }


def test_5_4_a_view_is_stored_as_its_elements(shard: Path) -> None:
    base = np.arange(24, dtype=">f4").reshape(2, 3, 4)  # neither contiguous nor little-endian
    stored = write_shard(shard, {"state": base.transpose(2, 0, 1)}, durable=True)
    (back,) = read_shard(shard, stored.arrays, stored.payload_sha256).values()
    assert (back == base.transpose(2, 0, 1)).all()
    assert back.dtype == np.dtype("<f4")


def test_5_4_bfloat16(shard: Path) -> None:
    array = np.array([1.5, -2.0, 3.140625], dtype=ml_dtypes.bfloat16)
    stored = write_shard(shard, {"state": array}, durable=True)
    assert stored.arrays["state"].dtype == "BF16"
    (back,) = read_shard(shard, stored.arrays, stored.payload_sha256).values()
    assert back.dtype == ml_dtypes.bfloat16
    assert (back == array).all()


def test_elements_that_numpy_does_not_know_come_as_bytes(shard: Path) -> None:
    """X2: a sub-byte type is legal in a block."""
    header = {"state": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    shard.write_bytes(shard_bytes(header, b"\x12\x34"))
    with open_shard(shard) as descriptor:
        arrays = read_shard_header(descriptor, shard).arrays
    (back,) = read_shard(shard, arrays, hashlib.sha256(b"\x12\x34").hexdigest()).values()
    assert (back.dtype, back.tolist()) == (np.uint8, [0x12, 0x34])


def test_odd_payloads_pass(shard: Path) -> None:
    """V8, V9, V9b, V13, V14, V16: order, alignment and values mean nothing."""
    header = {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        "e": {"dtype": "U8", "shape": [0], "data_offsets": [1, 1]},
        "a": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
    }
    payload = b"\x02" + np.array([np.nan, np.inf], "<f4").tobytes()
    shard.write_bytes(shard_bytes(header, payload))
    with open_shard(shard) as descriptor:
        arrays = read_shard_header(descriptor, shard).arrays
    back = read_shard(shard, arrays, hashlib.sha256(payload).hexdigest())
    assert np.isnan(back["b"][0])
    assert back["b"].tobytes() == payload[1:]


def test_names_that_no_reader_takes_are_not_written(shard: Path) -> None:
    """C58, M5: whatever is written loads."""
    one = np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="__metadata__"):
        write_shard(shard, {"__metadata__": one}, durable=False)
    entry = len(b'{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}')
    room = MAX_PROMPT_CACHE_SHARD_HEADER_BYTES - entry
    with pytest.raises(PromptCachePersistenceError.MalformedShard, match="header_bound"):
        write_shard(shard, {"x" * (room + 1): one}, durable=False)
    assert not shard.exists()
    stored = write_shard(shard, {"x" * room: one}, durable=False)
    assert read_shard(shard, stored.arrays, stored.payload_sha256)


@pytest.mark.parametrize("array", [np.array(["x"]), np.array([object()]), np.zeros(1, "M8[s]")])
def test_elements_that_cannot_be_stored(array: Any) -> None:
    with pytest.raises(TypeError, match="cannot hold"):
        dtype_of(array)


def test_a_shard_is_never_written_over_a_file(shard: Path) -> None:
    shard.write_bytes(b"old")
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        write_shard(shard, {}, durable=False)
    assert (caught.value.action, type(caught.value.source)) == ("create_shard", FileExistsError)
    shard.unlink()
    shard.symlink_to(shard.parent / "elsewhere")
    with pytest.raises(PromptCachePersistenceError.Io, match="create_shard"):
        write_shard(shard, {}, durable=False)
    assert os.listdir(shard.parent) == [shard.name]


def test_a_buffer_must_have_room_and_be_writable(shard: Path) -> None:
    stored = write_shard(shard, {"state": np.arange(4, dtype=np.uint8)}, durable=False)
    for into in (bytearray(3), bytes(4)):
        with pytest.raises(ValueError, match="writable buffer of 4 bytes"):
            read_shard(shard, stored.arrays, stored.payload_sha256, into)
    room = np.zeros((3, 2), np.int16)
    (back,) = read_shard(shard, stored.arrays, stored.payload_sha256, room).values()
    assert back.tolist() == [0, 1, 2, 3]
    assert np.shares_memory(back, room)


# 5.1 and 5.2 --------------------------------------------------------------------------------------


def test_6_4_the_mini_shard(shard: Path) -> None:
    """Header length, text, padding, size and hash as the contract has them."""
    arrays = {
        "keys": counting((1, 1, 3, 2), "Float32"),
        "values": counting((1, 1, 3, 2), "Float32", 6),
    }
    write_shard(shard, arrays, durable=True)
    content = shard.read_bytes()
    assert content == mini_shard()
    assert (len(content), content[:8]) == (192, b"\x88" + bytes(7))
    assert content[8:144] == MINI_TEXT + b" " * 6
    assert finalize_prompt_cache_shard(shard) == MINI_HASH
    assert hash_prompt_cache_shard_payload(str(shard)) == MINI_HASH
    check(shard, BLOCK)


def test_5_2_the_header_is_not_hashed_and_what_follows_is(shard: Path) -> None:
    payload = mini_shard()[144:]
    shard.write_bytes(shard_bytes(b'{"__metadata__":{"a":"b"},' + MINI_TEXT[1:], payload))
    assert hash_prompt_cache_shard_payload(shard) == MINI_HASH
    shard.write_bytes(mini_shard() + b"!")
    assert hash_prompt_cache_shard_payload(shard) == hashlib.sha256(payload + b"!").hexdigest()
    shard.write_bytes(shard_bytes(b"{}"))
    assert hash_prompt_cache_shard_payload(shard) == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("work", [hash_prompt_cache_shard_payload, finalize_prompt_cache_shard])
def test_5_2_what_cannot_be_opened(shard: Path, work: Any) -> None:
    def source() -> OSError:
        with pytest.raises(PromptCachePersistenceError.Io) as caught:
            work(shard)
        assert (caught.value.action, caught.value.path) == ("open_shard", shard)
        assert isinstance(caught.value.source, OSError)
        return caught.value.source

    assert isinstance(source(), FileNotFoundError)
    target = shard.with_name("target")
    target.write_bytes(mini_shard())
    shard.symlink_to(target)
    assert source().errno == errno.ELOOP


@pytest.mark.parametrize("work", [hash_prompt_cache_shard_payload, finalize_prompt_cache_shard])
def test_5_2_a_fifo_is_no_shard_and_blocks_nobody(shard: Path, work: Any) -> None:
    os.mkfifo(shard)
    with pytest.raises(PromptCachePersistenceError) as caught:
        work(shard)
    if work is hash_prompt_cache_shard_payload:
        assert caught.value == Error.MissingShard(shard)


def test_5_1_finalize_syncs_once_and_never_again(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C63: after a failed fsync the kernel calls lost pages clean."""
    shard.write_bytes(mini_shard())
    calls = []

    def fail(descriptor: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        finalize_prompt_cache_shard(shard)
    assert caught.value == Error.Io("sync_file", shard, OSError(errno.EIO, ""))
    assert calls == [str(shard)]


def test_5_2_a_read_that_fails(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.write_bytes(mini_shard())

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(PromptCachePersistenceError.Io, match="hash_payload"):
        hash_prompt_cache_shard_payload(shard)


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


@pytest.mark.parametrize("code", NAMES)
def test_6_3_names_and_sizes(code: str) -> None:
    name, item_bytes, numpy = NAMES[code]
    dtype = DTYPES[code]
    assert (dtype.name, dtype.width_bits) == (name, item_bytes * 8)
    assert dtype.numpy is not None
    assert dtype.numpy.name == numpy


def test_6_3_every_other_code_is_its_own_name() -> None:
    assert {code for code, dtype in DTYPES.items() if dtype.name == code} == {*DTYPES} - {*NAMES}
    for code, dtype in DTYPES.items():
        header: Header = {"a": {"dtype": code, "shape": [8], "data_offsets": [0, dtype.width_bits]}}
        safetensors.deserialize(shard_bytes(header, bytes(dtype.width_bits)))  # type: ignore[no-untyped-call]
