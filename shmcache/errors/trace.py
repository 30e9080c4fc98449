"""What a file of recorded requests can get wrong."""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from shmcache.errors.base import ContractError, variant


class TraceError(ContractError):
    """A trace cannot be replayed, from some line on or at all."""

    Unreadable: TypeAlias = "_TraceUnreadable"
    Malformed: TypeAlias = "_TraceMalformed"


@variant("the trace {source!r} cannot be read")
class _TraceUnreadable(TraceError):
    source: str
    message: str = field(default="", compare=False)


@variant(
    "line {line} of the trace is no request",
    hint="each has timestamp, input_length, output_length and maybe hash_ids, one id per block",
)
class _TraceMalformed(TraceError):
    """`line` counts from 1, in the file as it is without compression."""

    line: int
    message: str = field(default="", compare=False)
