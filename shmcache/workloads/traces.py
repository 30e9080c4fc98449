"""Reads recorded requests: one JSON object a line, plain or gzip, from a file or a pipe.

Why         Hit rates are properties of traffic: what a pool is worth shows on real requests only.
Contract    A line has `timestamp` (milliseconds since the first request), `input_length` and
            `output_length` (tokens), and may have `hash_ids`, one id per block of the prompt:
            equal ids mean equal tokens so far. The id of a last, partial block may be there or not.
            Other fields are ignored, lines of white space skipped. Without `hash_ids` every block
            gets an id of its own: nothing is known to be shared. Requests come in file order.
Errors      `TraceError`, naming the line. A line has at most LINE_BYTES_MAX bytes, whatever the
            compressed file unfolds to, so that memory stays flat (G8).
Source      The fields are those of the Mooncake traces (Qin et al., FAST'25).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from shmcache.errors import TraceError

BLOCK_TOKENS_DEFAULT: Final = 512
LINE_BYTES_MAX: Final = 1 << 22
INPUT_TOKENS_MAX: Final = 1 << 24

_GZIP_MAGIC: Final = b"\x1f"  # the first byte of it, which no JSON begins with
_TRACE_IDS_MAX: Final = (1 << 63) - 1  # ids above are those of blocks without one

_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INPUT_TOKENS_MAX)]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. `block_ids` has one id per block of the prompt, the last one maybe partial."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


@contextlib.contextmanager
def open_trace(
    path: str | Path, *, block_tokens: int = BLOCK_TOKENS_DEFAULT
) -> Iterator[TraceReader]:
    """The requests of a file."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
            size_bytes = os.fstat(file.fileno()).st_size
            reader = TraceReader(file, str(path), block_tokens=block_tokens, size_bytes=size_bytes)
        except OSError as error:
            raise TraceError.Unreadable(str(path), error.strerror or str(error)) from error
        yield reader


class TraceReader:
    """The requests of a stream, such as `sys.stdin.buffer`, read while they are asked for.

    Contract: `name` is what errors call it; `size_bytes` is its size where it has one.
    """

    def __init__(
        self,
        stream: io.BufferedReader[Any],
        name: str,
        *,
        block_tokens: int = BLOCK_TOKENS_DEFAULT,
        size_bytes: int = 0,
    ) -> None:
        zipped = stream.peek(1).startswith(_GZIP_MAGIC)  # of a folder, this fails
        self._stream = stream
        self._lines: io.BufferedIOBase = gzip.GzipFile(fileobj=stream) if zipped else stream
        self._name = name
        self._size_bytes = size_bytes
        self._block_tokens = block_tokens
        self._decoder = msgspec.json.Decoder(_Line)
        self._next_id = _TRACE_IDS_MAX + 1
        self._line = 0

    @property
    def fraction_read(self) -> float | None:
        """How much of the file has been read, 0 to 1; None when its size is not known."""
        return min(self._stream.tell() / self._size_bytes, 1.0) if self._size_bytes else None

    def __iter__(self) -> Iterator[TraceRequest]:
        while line := self._read_line():
            if not line.isspace():
                yield self._request(line)

    def _read_line(self) -> bytes:
        self._line += 1
        try:
            line = self._lines.readline(LINE_BYTES_MAX + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._malformed(f"the compressed data are damaged, {error}") from error
        except OSError as error:
            raise TraceError.Unreadable(self._name, error.strerror or str(error)) from error
        if len(line) > LINE_BYTES_MAX:
            raise self._malformed(f"it is longer than {LINE_BYTES_MAX} bytes")
        return line

    def _request(self, line: bytes) -> TraceRequest:
        try:
            fields = self._decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._malformed(str(error)) from error
        whole, rest = divmod(fields.input_length, self._block_tokens)
        blocks = whole + bool(rest)
        ids = fields.hash_ids
        if ids is None:
            ids = tuple(range(self._next_id, self._next_id + blocks))
            self._next_id += blocks
        elif len(ids) not in (whole, blocks):
            raise self._malformed(
                f"{fields.input_length} tokens are {blocks} blocks of {self._block_tokens}, "
                f"but hash_ids has {len(ids)}; is it another block size"
            )
        return TraceRequest(fields.timestamp, fields.input_length, fields.output_length, ids)

    def _malformed(self, message: str) -> TraceError.Malformed:
        return TraceError.Malformed(self._line, message)


class _Line(msgspec.Struct, gc=False):
    """A line as it is written."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: _Length
    output_length: _Length = 0
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=_TRACE_IDS_MAX)], ...] | None = None


def trace_line(request: TraceRequest) -> bytes:
    """A request as a line of a trace, with its end.

    Contract: `block_ids` are ids of a trace: below 2^63.
    """
    line = _Line(
        request.timestamp_ms, request.input_tokens, request.output_tokens, request.block_ids
    )
    return msgspec.json.encode(line) + b"\n"
