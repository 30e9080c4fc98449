"""Shards as they are written, read and hashed (persistence 5)."""

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

from shmcache import (
    PromptCachePersistenceError,
    finalize_prompt_cache_shard,
    hash_prompt_cache_shard_payload,
)
from shmcache.prompt.dtypes import DTYPES, dtype_of
from shmcache.prompt.header import MAX_PROMPT_CACHE_SHARD_HEADER_BYTES, read_shard_header
from shmcache.prompt.shard import open_shard, read_shard, read_shard_into, write_shard
from shmcache.prompt.shard_checks import check_shard
from tests.policy.samples import minimal
from tests.prompt.caches import MINI_HASH, MINI_TEXT, counting, mini_shard, shard_bytes

Error = PromptCachePersistenceError
WRITABLE = [code for code, dtype in DTYPES.items() if dtype.numpy is not None]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "shard.safetensors"


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
    with open_shard(shard) as descriptor:
        check_shard(shard, read_shard_header(descriptor, shard), minimal().blocks[0])


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


# Reading into arrays ------------------------------------------------------------------------------

SCATTERED: dict[str, np.ndarray[Any, Any]] = {
    "b": np.arange(12, dtype=np.int16).reshape(3, 4),
    "a": np.arange(70_000.0),
    "c": np.ones(0),
}


def blank() -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full_like(array, 7) for name, array in SCATTERED.items()}


def test_arrays_anywhere_are_filled(shard: Path) -> None:
    written = write_shard(shard, SCATTERED, durable=False)
    targets = blank()
    targets["b"] = targets["b"].reshape(12)  # the same elements in another shape
    read_shard_into(shard, written.arrays, written.payload_sha256, targets)
    for name, array in SCATTERED.items():
        assert np.array_equal(targets[name], array.reshape(targets[name].shape))


@pytest.mark.parametrize("target", ["shape", "dtype", "strides", "readonly", "missing", "extra"])
def test_arrays_that_do_not_fit_are_refused(shard: Path, target: str) -> None:
    written = write_shard(shard, SCATTERED, durable=False)
    targets = blank()
    if target == "missing":
        del targets["b"]
    elif target == "extra":
        targets["d"] = np.ones(3)
    elif target == "readonly":
        targets["b"].flags.writeable = False
    else:
        targets["b"] = {
            "shape": np.zeros(11, np.int16),
            "dtype": np.zeros((3, 4), np.uint16),
            "strides": np.zeros((3, 8), np.int16)[:, ::2],
        }[target]
    with pytest.raises(ValueError, match=r"needed|arrays are"):
        read_shard_into(shard, written.arrays, written.payload_sha256, targets)


@pytest.mark.parametrize("damage", ["flip", "cut", "append", "header"])
def test_a_damaged_shard_fills_nothing_that_is_believed(shard: Path, damage: str) -> None:
    written = write_shard(shard, SCATTERED, durable=False)
    content = bytearray(shard.read_bytes())
    code = {"flip": "payload_digest", "header": "array_mismatch"}.get(damage, "file_boundary")
    if damage == "flip":
        content[-1] ^= 1
    elif damage == "cut":
        del content[-1]
    elif damage == "append":
        content.append(0)
    else:
        content = bytearray(bytes(content).replace(b'"b"', b'"B"'))
    shard.write_bytes(content)
    with pytest.raises(Error.MalformedShard) as caught:
        read_shard_into(shard, written.arrays, written.payload_sha256, blank())
    assert caught.value.code == code


def test_arrays_with_a_gap_between_them_are_refused(shard: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}   '
    shard.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with open_shard(shard) as descriptor:
        arrays = dict(read_shard_header(descriptor, shard).arrays)
    with pytest.raises(Error.MalformedShard) as caught:
        read_shard_into(shard, arrays, "", {"a": np.zeros(2, np.uint8)})
    assert caught.value.code == "offsets"
