"""A hostile header is refused with its code, before a library or an allocation sees it.

The rows of `REFUSED` and `ACCEPTED` carry the ids of the collection of malformed safetensors files
that this project was given; those that need two arrays are in test_shard_checks.py.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from shmcache import MAX_PROMPT_CACHE_SHARD_HEADER_BYTES, PromptCachePersistenceError
from shmcache.prompt.dtypes import DTYPES, array_bytes
from shmcache.prompt.header import ShardArray, ShardHeader, read_shard_header
from shmcache.prompt.shard import hash_prompt_cache_shard_payload, open_shard
from tests.prompt.caches import Header, mini_shard, shard_bytes

Error = PromptCachePersistenceError

OK: Header = {"state": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
TEXT = json.dumps(OK, separators=(",", ":")).encode()
ZEROS = bytes(16)


def entry(**changes: Any) -> Header:
    return {"state": OK["state"] | changes}


def without(key: str) -> Header:
    return {"state": {name: value for name, value in OK["state"].items() if name != key}}


def raw(old: bytes, new: bytes) -> bytes:
    """The good file with a piece of its header's text replaced."""
    assert old in TEXT
    return shard_bytes(TEXT.replace(old, new), ZEROS)


def header_of(path: Path) -> ShardHeader:
    with open_shard(path) as descriptor:
        return read_shard_header(descriptor, path)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "shard.safetensors"


SHORT = Error.Io("read_header_length", Path(), EOFError())


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


# The code is that of `header_json` but where the row says otherwise.
REFUSED: dict[str, tuple[bytes, str]] = {
    "L1": (b"", "short"),
    "L2": (bytes(7), "short"),
    "L3": (shard_bytes(b"", length=61), "header_truncated"),
    "L4": (shard_bytes(b""), "header_bound"),
    "L4 with data": (shard_bytes(b"", ZEROS), "header_bound"),
    "L5": (shard_bytes(OK, ZEROS, 1000), "header_truncated"),
    "L6": (shard_bytes(OK, ZEROS, 2**64 - 1), "header_bound"),
    "L6b": (shard_bytes(OK, ZEROS, 2**64 - 8), "header_bound"),
    "L6c": (shard_bytes(OK, ZEROS, 2**63), "header_bound"),
    "L7": (shard_bytes(OK, ZEROS, 100_000_001), "header_bound"),
    "L7b": (shard_bytes(OK, ZEROS, 100_000_000), "header_bound"),
    "L8": (len(TEXT).to_bytes(8, "big") + TEXT + ZEROS, "header_bound"),
    "L9": (shard_bytes(TEXT, ZEROS, len(TEXT) - 1), ""),
    "L10": (shard_bytes(TEXT, ZEROS, len(TEXT) + 1), ""),
    "F1": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64, "header_bound"),
    "F2": (b"<!DOCTYPE html><html></html>", "header_bound"),
    "F3": (b"PK\x03\x04" + bytes(60), "header_bound"),
    "F4": (b"GGUF\x03\0\0\0" + bytes(60), "header_bound"),
    "F5": (b"\x80\x02}q\0." + bytes(20), "header_bound"),
    "J1": (shard_bytes(b"\xff"), ""),
    "J2": (shard_bytes(b"{"), ""),
    "J3": (shard_bytes(b"[]"), ""),
    "J3 null": (shard_bytes(b"null"), ""),
    "J3 text": (shard_bytes(b'"x"'), ""),
    "J6": (shard_bytes(TEXT + bytes(4), ZEROS), ""),
    "J7": (shard_bytes(TEXT + b"xx", ZEROS), ""),
    "J7b": (shard_bytes(b'{},"__metadata__":{"key":"value"}}   '), ""),
    "J8": (shard_bytes(b"\xef\xbb\xbf" + TEXT, ZEROS), ""),
    "J9": (shard_bytes(TEXT.decode().encode("utf-16-le"), ZEROS), ""),
    "J10": (shard_bytes(repr(OK).encode(), ZEROS), ""),
    "J11": (shard_bytes(TEXT[:-1] + b",}", ZEROS), ""),
    "J11 comment": (shard_bytes(b"{/*x*/" + TEXT[1:], ZEROS), ""),
    "J13": (raw(b"[0,16]", b"[0,NaN]"), ""),
    "J14": (raw(b'"dtype"', b'"x":' + nested(200) + b',"dtype"'), ""),
    "J14b": (shard_bytes(b'{"a":' + nested(100_000) + b"}"), ""),
    "J15": (raw(b'"state"', rb'"\ud800"'), ""),
    "J16": (raw(b'"state"', b'"a\x01"'), ""),
    "J17": (shard_bytes(TEXT[:-1] + b"," + TEXT[1:], ZEROS), "duplicate"),
    "J17 dtype": (
        shard_bytes(TEXT[:-1] + b"," + TEXT[1:].replace(b"F32", b"I32"), ZEROS),
        "duplicate",
    ),
    "J17b": (
        shard_bytes(
            b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
            b'"a":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}}',
            ZEROS,
        ),
        "duplicate",
    ),
    "J18": (raw(b'"dtype":"F32"', b'"dtype":"F32","dtype":"I32"'), "duplicate"),
    "J18b": (
        shard_bytes(
            b'{"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},'
            rb'"\u0061":{"dtype":"I8","shape":[16],"data_offsets":[0,16]}}',
            ZEROS,
        ),
        "duplicate",
    ),
    "E1 dtype": (shard_bytes(without("dtype"), ZEROS), ""),
    "E1 shape": (shard_bytes(without("shape"), ZEROS), ""),
    "E1 offsets": (shard_bytes(without("data_offsets"), ZEROS), ""),
    "E4": (raw(b'"data_offsets"', b'"offsets"'), ""),
    "E5 none": (shard_bytes(entry(data_offsets=[]), ZEROS), ""),
    "E5 one": (shard_bytes(entry(data_offsets=[16]), ZEROS), ""),
    "E5 three": (shard_bytes(entry(data_offsets=[0, 16, 16]), ZEROS), ""),
    "E8": (shard_bytes({"state": [1, 2]}, ZEROS), ""),  # type: ignore[dict-item]
    "E8 null": (shard_bytes({"state": None}, ZEROS), ""),  # type: ignore[dict-item]
    "D1": (shard_bytes(entry(dtype="I33"), ZEROS), ""),
    "D1 lower": (shard_bytes(entry(dtype="f32"), ZEROS), ""),
    "D1 numpy": (shard_bytes(entry(dtype="float32"), ZEROS), ""),
    "D1 wide": (shard_bytes(entry(dtype="C128"), ZEROS), ""),
    "D4": (shard_bytes(entry(dtype=5), ZEROS), ""),
    "S1": (shard_bytes(entry(shape=[-2, -2]), ZEROS), ""),
    "S2": (shard_bytes(entry(shape=[2.0, 2]), ZEROS), ""),
    "S2 exponent": (raw(b"[2,2]", b"[1.6e1]"), ""),
    "S3": (shard_bytes(entry(shape=["2", 2]), ZEROS), ""),
    "S3 number": (shard_bytes(entry(shape=4), ZEROS), ""),
    "S8": (shard_bytes(entry(shape=[True, 16]), ZEROS), ""),
    "V15": (raw(b"[2,2]", b"[-0]"), ""),
    "V15 offset": (raw(b"[0,16]", b"[ -0,16]"), ""),
    "V17": (raw(b"[2,2]", b"[0,016]"), ""),
    "O8": (shard_bytes(entry(data_offsets=[-16, 0]), ZEROS), ""),
    "O9": (shard_bytes(entry(data_offsets=[0.0, 16.0]), ZEROS), ""),
    "O9 text": (shard_bytes(entry(data_offsets=["0", "16"]), ZEROS), ""),
    "M1": (shard_bytes({"__metadata__": {"k": 0}, **OK}, ZEROS), ""),
    "M1 object": (shard_bytes({"__metadata__": {"k": {}}, **OK}, ZEROS), ""),
    "M1 null": (shard_bytes({"__metadata__": {"k": None}, **OK}, ZEROS), ""),
    "M3": (shard_bytes({"__metadata__": ["a"], **OK}, ZEROS), ""),  # type: ignore[dict-item]
    "M5": (shard_bytes({"__metadata__": OK["state"]}, ZEROS), ""),
    "M6 null": (shard_bytes({"__metadata__": None, **OK}, ZEROS), ""),  # type: ignore[dict-item]
    "M8": (
        shard_bytes(b'{"__metadata__":{},"__metadata__":{},' + TEXT[1:], ZEROS),
        "duplicate",
    ),
    "M8b": (shard_bytes(b'{"__metadata__":{"a":"1","a":"2"},' + TEXT[1:], ZEROS), "duplicate"),
    "V5": (shard_bytes(b"\t\n{}\r "), ""),
}


@pytest.mark.parametrize("row", REFUSED)
def test_5_3_refused(shard: Path, row: str) -> None:
    content, said = REFUSED[row]
    shard.write_bytes(content)
    with pytest.raises(PromptCachePersistenceError) as caught:
        header_of(shard)
    if said == "short":
        assert caught.value == Error.Io("read_header_length", shard, EOFError())
        assert isinstance(caught.value.__cause__, EOFError)
    else:
        code = said if said.startswith("header") else "header_json"
        assert caught.value == Error.MalformedShard(shard, code)
        assert said != "duplicate" or "duplicate" in str(caught.value)


KEPT = {"state": ShardArray("F32", (2, 2), 0, 16)}
ACCEPTED: dict[str, tuple[bytes, dict[str, ShardArray]]] = {
    "good": (shard_bytes(OK, ZEROS), KEPT),
    "V1": (shard_bytes({}), {}),
    "V2": (shard_bytes({"__metadata__": {"k": "v"}}), {}),
    "V3": (shard_bytes(TEXT + b"    ", ZEROS), KEPT),
    "V4": (shard_bytes(b"{}\r \t\n"), {}),
    "V6": (
        shard_bytes(entry(shape=[], data_offsets=[0, 4]), bytes(4)),
        {"state": ShardArray("F32", (), 0, 4)},
    ),
    "V7": (
        shard_bytes(entry(shape=[2, 0], data_offsets=[0, 0])),
        {"state": ShardArray("F32", (2, 0), 0, 0)},
    ),
    "E10": (shard_bytes(entry(x=1), ZEROS), KEPT),
    "M6": (shard_bytes({"__metadata__": {}, **OK}, ZEROS), KEPT),
    "V10": (
        shard_bytes(
            {
                name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                for name in ("", "../../etc/passwd", "a\0b")
            }
        ),
        {name: ShardArray("U8", (0,), 0, 0) for name in ("", "../../etc/passwd", "a\0b")},
    ),
    "a minus in a name": (shard_bytes({"x-0": OK["state"]}, ZEROS), {"x-0": KEPT["state"]}),
}


@pytest.mark.parametrize("row", ACCEPTED)
def test_5_3_accepted(shard: Path, row: str) -> None:
    content, arrays = ACCEPTED[row]
    shard.write_bytes(content)
    header = header_of(shard)
    assert header.arrays == arrays
    assert header.file_bytes == len(content)
    assert header.payload_start == 8 + int.from_bytes(content[:8], "little")


def test_5_3_the_bound_is_inclusive(shard: Path) -> None:
    limit = MAX_PROMPT_CACHE_SHARD_HEADER_BYTES
    assert limit == 1_048_576
    shard.write_bytes(shard_bytes(TEXT + b" " * (limit - len(TEXT)), ZEROS))
    assert header_of(shard).payload_start == 8 + limit
    shard.write_bytes(shard_bytes(TEXT + b" " * (limit + 1 - len(TEXT)), ZEROS))
    with pytest.raises(PromptCachePersistenceError.MalformedShard, match="header_bound"):
        header_of(shard)


def test_5_3_the_bound_is_decided_before_the_size_and_the_memory(shard: Path) -> None:
    """C59: nothing of what a length field claims is allocated."""
    with shard.open("wb") as file:
        file.write((1 << 62).to_bytes(8, "little"))
        file.truncate(1 << 40)  # sparse: its size agrees with much
    tracemalloc.start()
    with pytest.raises(PromptCachePersistenceError.MalformedShard, match="header_bound"):
        header_of(shard)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_5_3_a_file_that_shrinks_while_it_is_read(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.write_bytes(shard_bytes(TEXT + b" " * 5000, ZEROS))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 4000 - at), at))
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        header_of(shard)
    assert (caught.value.action, type(caught.value.source)) == ("read_header", EOFError)


def test_a_name_is_never_a_path(shard: Path) -> None:
    """V10: reading such a file touches nothing else."""
    shard.write_bytes(ACCEPTED["V10"][0])
    assert hash_prompt_cache_shard_payload(shard)


# Against the library ------------------------------------------------------------------------------


def tiles(header: ShardHeader) -> bool:
    position = header.payload_start
    for array in sorted(header.arrays.values(), key=lambda one: (one.begin, one.end)):
        if array.begin != position - header.payload_start:
            return False
        if array_bytes(DTYPES[array.dtype], array.shape) != array.end - array.begin:
            return False
        position = header.payload_start + array.end
    return position == header.file_bytes


def verdicts(path: Path, content: bytes) -> tuple[bool, bool]:
    """Whether we accept this file (as `check_shard` would go on), and whether the library does."""
    path.write_bytes(content)
    try:
        ours = tiles(header_of(path))
    except PromptCachePersistenceError:
        ours = False
    try:
        safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 (the library lets more than its own type escape)
        return ours, False
    return ours, True


def test_what_we_accept_the_library_loads(shard: Path) -> None:
    for row, content in {**REFUSED, **ACCEPTED}.items():
        ours, theirs = verdicts(shard, content[0])
        assert theirs or not ours, row
        assert ours == (row in ACCEPTED), row


def test_every_cut_and_every_appended_byte_is_refused(shard: Path) -> None:
    whole = mini_shard()
    for length in range(len(whole)):
        assert verdicts(shard, whole[:length]) == (False, False)
    for more in (1, 2, 7, 8, 64):
        assert verdicts(shard, whole + bytes(more)) == (False, False)
    assert verdicts(shard, whole) == (True, True)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.floats(0, 1)
    | st.text("adk_0", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
COUNTS = st.integers(0, 20) | st.sampled_from([2**31, 2**63, 2**64 - 1, 2**64, -1])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "I33"]) | JSON_VALUES,
        "shape": st.lists(COUNTS, max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(COUNTS, min_size=2, max_size=2) | JSON_VALUES,
    },
    optional={"x": JSON_VALUES},
)
HEADERS = st.dictionaries(
    st.sampled_from(["state", "keys", "values", "__metadata__", ""]) | st.text(max_size=2),
    ENTRIES | JSON_VALUES,
    max_size=3,
)


@given(HEADERS, st.integers(0, 40), st.sampled_from([None, 0, 1, 2**63]))
def test_any_header(
    tmp_path_factory: pytest.TempPathFactory, header: Header, size: int, length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    ours, theirs = verdicts(path, shard_bytes(header, bytes(size), length))
    assert theirs or not ours


@given(st.data())
def test_any_change_of_a_good_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(mini_shard())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["set", "drop", "double"]))
        if kind == "set":
            content[place] = data.draw(st.integers(0, 255))
        elif kind == "drop":
            del content[place]
        else:
            content.insert(place, content[place])
    path = tmp_path_factory.getbasetemp() / "change.safetensors"
    ours, theirs = verdicts(path, bytes(content))
    assert theirs or not ours


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    for whole in (content, shard_bytes(content)):
        ours, theirs = verdicts(path, whole)
        assert theirs or not ours
