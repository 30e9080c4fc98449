"""The trace reader on good files, on damaged ones, and on the recorded traces where present."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.errors import ContractError, TraceError
from shmcache.workloads.traces import (
    INPUT_TOKENS_MAX,
    LINE_BYTES_MAX,
    TraceReader,
    TraceRequest,
    open_trace,
    trace_line,
)
from tests.support import ROOT

TRACES = ROOT.parent / "shared" / "data" / "traces"
GOOD = b'{"timestamp":5,"input_length":1025,"output_length":7,"hash_ids":[4,9,2]}\n'
REQUEST = TraceRequest(5.0, 1025, 7, (4, 9, 2))


def reader_of(text: bytes, block_tokens: int = 512) -> TraceReader:
    return TraceReader(io.BufferedReader(io.BytesIO(text)), "sample", block_tokens=block_tokens)


def read(text: bytes, block_tokens: int = 512) -> list[TraceRequest]:
    return list(reader_of(text, block_tokens))


def line(**fields: Any) -> bytes:
    """A good line with some fields changed; a field of None is left out."""
    given = {"timestamp": 0, "input_length": 1025, "output_length": 1, **fields}
    return json.dumps({k: v for k, v in given.items() if v is not None}).encode() + b"\n"


# ---- good files --------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_and_a_pipe_plain_or_compressed(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "trace"
    path.write_bytes(pack(GOOD * 3))
    with open_trace(path) as reader:
        assert list(reader) == [REQUEST] * 3
        assert reader.fraction_read == 1.0
    receiving, sending = os.pipe()
    with open(receiving, "rb") as stream:
        os.write(sending, pack(GOOD * 3))
        os.close(sending)
        piped = TraceReader(stream, "standard input")
        assert list(piped) == [REQUEST] * 3
        assert piped.fraction_read is None


def test_requests_come_while_a_pipe_is_still_written() -> None:
    receiving, sending = os.pipe()
    with open(receiving, "rb") as stream, open(sending, "wb", buffering=0) as writer:
        writer.write(GOOD)
        requests = iter(TraceReader(stream, "standard input"))
        assert next(requests) == REQUEST
        writer.write(GOOD.replace(b"5", b"6", 1))
        assert next(requests).timestamp_ms == 6


def test_what_other_producers_write() -> None:
    """Fields of their own, any order, no output, fractions of a millisecond, no newline, CRLF."""
    variants = b"".join(
        (
            b'{"hash_ids":[1],"model":{"a":[1,{}]},"input_length":5,"timestamp":0.25}\r\n',
            b" \n\n",
            b'{"timestamp":1e3,"input_length":0,"output_length":0,"hash_ids":[]}\n',
            b'{"timestamp":2,"input_length":512,"hash_ids":[8]}',
        )
    )
    assert read(variants) == [
        TraceRequest(0.25, 5, 0, (1,)),
        TraceRequest(1000.0, 0, 0, ()),
        TraceRequest(2.0, 512, 0, (8,)),
    ]
    assert read(b"") == []


def test_the_id_of_a_partial_block_may_be_absent() -> None:
    assert read(line(hash_ids=[4, 9])) == [TraceRequest(0.0, 1025, 1, (4, 9))]
    assert read(line(hash_ids=[4, 9, 2]))[0].block_ids == (4, 9, 2)
    assert read(line(input_length=3, hash_ids=[]))[0].block_ids == ()
    for wrong in ([4], [4, 9, 2, 1], []):
        with pytest.raises(TraceError.Malformed, match="1025 tokens are 3 blocks of 512"):
            read(line(hash_ids=wrong))
    with pytest.raises(TraceError.Malformed, match="1024 tokens are 2 blocks of 512"):
        read(line(input_length=1024, hash_ids=[4]))
    assert read(line(input_length=1024, hash_ids=list(range(64))), block_tokens=16)


def test_without_ids_nothing_is_shared() -> None:
    """Nor with ids that other lines of the same file have, up to the largest."""
    lines = line() + line(hash_ids=[0, 1, (1 << 63) - 1]) + line(hash_ids=None) + line()
    found = [request.block_ids for request in read(lines)]
    assert [len(ids) for ids in found] == [3, 3, 3, 3]
    assert len({number for ids in found for number in ids}) == 12
    assert found == [request.block_ids for request in read(lines)]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e15, allow_nan=False),
            st.integers(0, 9000),
            st.integers(0, INPUT_TOKENS_MAX),
            st.booleans(),
        ),
        max_size=5,
    ),
    st.integers(1, 600),
)
def test_a_written_request_is_read_again(
    given: list[tuple[float, int, int, bool]], block_tokens: int
) -> None:
    requests = []
    for timestamp_ms, tokens, output, partial in given:
        whole, rest = divmod(tokens, block_tokens)
        count = whole + (partial and rest > 0)
        ids = tuple(random.Random(tokens).randrange(1 << 63) for _ in range(count))
        requests.append(TraceRequest(timestamp_ms, tokens, output, ids))
    assert read(b"".join(map(trace_line, requests)), block_tokens) == requests


# ---- damaged files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"nonsense\n", "JSON is malformed"),
        (b"{}\n", "timestamp"),
        (b"[1]\n", "Expected `object`"),
        (GOOD[:-2] + b"\n", "truncated"),
        (GOOD[:-1] + GOOD, "trailing characters"),
        (b"\xff\xfe\n", "malformed"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp="0"), "Expected `float`"),
        (line(timestamp=None), "missing required field `timestamp`"),
        (b'{"timestamp":1e999,"input_length":1}\n', "out of range"),
        (b'{"timestamp":NaN,"input_length":1}\n', "malformed"),
        (line(input_length=-1), "input_length"),
        (line(input_length=1.5), "Expected `int`"),
        (line(input_length=INPUT_TOKENS_MAX + 1), "input_length"),
        (line(output_length=-1), "output_length"),
        (line(hash_ids=[1, -1, 2]), r"hash_ids\[1\]"),
        (line(hash_ids=[1, 1 << 63, 2]), "hash_ids"),
        (line(hash_ids=[1, "2", 3]), "hash_ids"),
        (line(hash_ids={}), "Expected `array"),
        (b'{"timestamp":0,"x":' + b"[" * 100_000 + b"\n", "recursion"),
        (b'{"timestamp":0,"x":"' + b"x" * LINE_BYTES_MAX + b'"}\n', "longer than 4194304 bytes"),
    ],
)
def test_a_malformed_line_is_named(bad: bytes, message: str) -> None:
    for pack in (bytes, gzip.compress):
        requests = iter(reader_of(pack(GOOD + b"\n" + bad + GOOD)))
        assert next(requests) == REQUEST
        with pytest.raises(TraceError.Malformed, match=message) as caught:
            next(requests)
        assert caught.value.line == 3
        assert caught.value.hint


def test_damaged_compression_is_named() -> None:
    packed = gzip.compress(b"".join(line(timestamp=n, hash_ids=None) for n in range(3000)))
    whole = len(read(packed))
    assert whole == 3000
    cases = [packed[:cut] for cut in (3, 20, len(packed) // 2, len(packed) - 9, len(packed) - 1)]
    cases.append(packed[:-6] + b"\0\0" + packed[-4:])  # a wrong checksum
    cases.append(packed + b"no gzip")
    for case in cases:
        with pytest.raises(TraceError.Malformed, match="the compressed data are damaged") as caught:
            read(case)
        assert 1 <= caught.value.line <= whole + 1


def test_any_damage_is_an_error_or_other_requests(rng: random.Random) -> None:
    """G8: what is found is input."""
    plain = GOOD * 20
    seen: Counter[str] = Counter()
    for text in (plain, gzip.compress(plain)):
        for _ in range(400):
            damaged = bytearray(text)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                read(bytes(damaged))
                seen["read"] += 1
            except TraceError.Malformed:
                seen["refused"] += 1
    assert min(seen["read"], seen["refused"]) > 0


def test_a_compressed_file_without_lines_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=9) as packed:
        for _ in range(64):
            packed.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open_trace(path) as reader, pytest.raises(TraceError.Malformed, match="longer than"):
        list(reader)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10  # KiB


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TraceError.Unreadable, match=reason) as caught, open_trace(path):
            pass
        assert caught.value.source == str(path)
        assert isinstance(caught.value, ContractError)


def test_an_error_of_the_user_of_a_trace_is_not_the_trace_s(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(GOOD)
    with pytest.raises(PermissionError), open_trace(path):
        raise PermissionError


# ---- recorded traces ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
def test_recorded_traces_are_read_whole(name: str) -> None:
    if not TRACES.exists():
        pytest.skip("the recorded traces are not beside this checkout")
    known = json.loads((TRACES / "reference.json").read_text())["traces"][name]
    with open_trace(TRACES / f"{name}.jsonl.gz") as reader:
        requests = list(reader)
    ids = [number for request in requests for number in request.block_ids]
    assert len(requests) == known["requests"]
    assert len(ids) == known["block_refs"]
    assert len(set(ids)) == known["unique_blocks"]
    times = [requests[0].timestamp_ms, requests[-1].timestamp_ms]
    assert times == known["timestamp_ms"]


@pytest.mark.parametrize("name", ["azure_llm_2023_code", "azure_llm_2023_conv"])
def test_recorded_traces_without_ids_share_nothing(name: str) -> None:
    if not TRACES.exists():
        pytest.skip("the recorded traces are not beside this checkout")
    with open_trace(TRACES / f"{name}.jsonl.gz", block_tokens=16) as reader:
        blocks = [-(-request.input_tokens // 16) for request in reader]
    with open_trace(TRACES / f"{name}.jsonl.gz", block_tokens=16) as reader:
        ids = {number for request in reader for number in request.block_ids}
    assert len(ids) == sum(blocks)
